#include "pagedkv/kernels/kernel_set.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/reference/reference.h"
#include "pagedkv/base/log.h"

namespace pagedkv {
namespace {

constexpr KernelSet kReference = {
    "reference",       "nothing",        +[]() noexcept { return true; },
    reference::attend, reference::store, reference::fetch};

const std::vector<KernelSet>& all_sets() {
  static const std::vector<KernelSet> sets = [] {
    std::vector<KernelSet> list(cpu::kernel_sets().begin(), cpu::kernel_sets().end());
    list.push_back(kReference);
    return list;
  }();
  return sets;
}

std::string set_names() {
  std::string names;
  for (const KernelSet& set : all_sets())
    names += (names.empty() ? "" : ", ") + std::string(set.name);
  return names;
}

const KernelSet& find(std::string_view name) {
  for (const KernelSet& set : all_sets())
    if (name == set.name) return set;
  throw std::invalid_argument("kernel set \"" + std::string(name) + "\": this build has " +
                              set_names());
}

// Names in PAGEDKV_KERNELS_HIDE count as unsupported, so that tests can be a lesser CPU.
bool hidden([[maybe_unused]] const KernelSet& set) {
#ifdef PAGEDKV_TEST_HOOKS
  if (const char* list = std::getenv("PAGEDKV_KERNELS_HIDE")) {
    std::string_view rest = list;
    while (!rest.empty()) {
      const size_t comma = std::min(rest.find(','), rest.size());
      if (&find(rest.substr(0, comma)) == &set) return true;
      rest.remove_prefix(std::min(comma + 1, rest.size()));
    }
  }
#endif
  return false;
}

bool usable(const KernelSet& set) { return set.supported() && !hidden(set); }

const KernelSet& usable_set(std::string_view name) {
  const KernelSet& set = find(name);
  if (!usable(set))
    throw std::invalid_argument("kernel set \"" + std::string(name) +
                                "\": this CPU lacks what it needs (" + set.needs + ")" +
                                (set.supported() ? ", says PAGEDKV_KERNELS_HIDE" : ""));
  return set;
}

const KernelSet& best_set() {
  std::string missing;
  for (const KernelSet& set : all_sets()) {
    const bool is_reference = set.attend == reference::attend;
    if (!is_reference && usable(set)) return set;
    if (!is_reference)
      missing += (missing.empty() ? "" : "; ") + std::string(set.name) + " needs " + set.needs;
  }
  warn_once("kernels.reference",
            "slow reference kernels are in use: " +
                (missing.empty() ? "this build has no others"
                                 : "no other set fits this CPU (" + missing + ")"));
  return all_sets().back();
}

const KernelSet& first_choice() {
  const char* forced = std::getenv("PAGEDKV_KERNELS");
  if (!forced || std::string_view(forced).find_first_not_of(" \t") == std::string_view::npos)
    return best_set();
  try {
    return usable_set(forced);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("PAGEDKV_KERNELS: " + std::string(error.what()));
  }
}

std::atomic<const KernelSet*> g_active{nullptr};

}  // namespace

std::span<const KernelSet> kernel_sets() noexcept { return all_sets(); }

const KernelSet& kernels() {
  const KernelSet* set = g_active.load(std::memory_order_acquire);
  if (!set) {
    set = &first_choice();  // threads that come at once choose alike
    g_active.store(set, std::memory_order_release);
  }
  return *set;
}

void select_kernels(std::string_view name) {
  g_active.store(&usable_set(name), std::memory_order_release);
}

}  // namespace pagedkv
