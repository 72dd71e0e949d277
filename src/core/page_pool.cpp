#include "pagedkv/core/page_pool.h"

#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "core/idle_window.h"
#include "core/memory_budget.h"
#include "core/page_group.h"
#include "core/page_layout.h"
#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv {
namespace {

using Clock = std::chrono::steady_clock;

// A dynamic pool commits what is needed, or half of what it has where that is more; the first time
// at least kFirstCommitTokens, and of its own accord never more than kMaxCommitBytes, so that the
// time a commit takes out of a step does not grow with the pool (8 MiB are about 2 ms of page
// faults).
constexpr int64_t kFirstCommitTokens = 64;
constexpr int64_t kMaxCommitBytes = int64_t{8} << 20;

// Where cached pages give room, the machine is not asked again for so many allocations after it refused
// to: asking reads about ten files.
constexpr int64_t kAllocationsBetweenAsking = 64;
// What give_back_idle() gives back at once: a MiB takes a third of a millisecond (bench/results/pool.json).
constexpr int64_t kMaxGiveBackBytes = int64_t{64} << 20;

std::string count_of(int64_t n, const char* what) {
  return std::to_string(n) + " " + what + (n == 1 ? "" : "s");
}

int64_t physical_memory() noexcept {
  return int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
}

}  // namespace

int64_t grown_pages(int64_t current, int64_t required, int64_t window_pages) noexcept {
  const int64_t grown = std::max({required, current + (current + 1) / 2, current + 1});
  if (window_pages <= 0 || required > window_pages) return grown;
  return std::min(grown, std::max(window_pages, current));
}

struct PagePool::Impl {
  explicit Impl(PagePoolOptions o)
      : options(std::move(o)),
        idle(std::chrono::duration<double>(options.idle_seconds), options.groups.size()),
        random(options.shuffle_seed) {}

  // What a request that needs memory makes of its group.
  struct Plan {
    PageGroup* group;
    int64_t required;  // pages committed, at least
    int64_t target;    // pages committed
    int64_t capacity;
    int64_t room;
    // Saturates: a request may name any count, and is refused only after its bytes are known.
    int64_t new_bytes(int64_t pages) const {
      int64_t bytes;
      if (__builtin_mul_overflow(pages - group->num_committed(), group->page_bytes(), &bytes))
        return std::numeric_limits<int64_t>::max();
      return bytes;
    }
  };

  void reserve();
  bool try_reserve(const std::vector<int64_t>& max_pages);
  int64_t default_max_pages(int64_t page_bytes) const;
  void check_start() const;
  int64_t ask_machine() const;
  PoolLimit limit() const;
  std::string limit_text(PoolLimit limit) const;

  bool is_enough(std::span<const PageRequest> requests) noexcept;
  bool make_room(std::span<const PageRequest> requests);
  bool grow_for(std::span<const PageRequest> requests, bool with_cached);
  bool make_budget(std::span<const PageRequest> requests);
  int64_t spare_pages(const PageGroup& group, std::span<const PageRequest> requests) const noexcept;
  int64_t give_back_spare(std::span<const PageRequest> requests, int64_t bytes) noexcept;
  int64_t reclaimable(const PageGroup& group, int64_t missing) const noexcept;
  bool grow(std::span<Plan> plans);
  bool check_capacity(const Plan& plan);
  bool check_budget(std::span<const Plan> plans, int64_t left, PoolLimit limit);
  void choose_sizes(std::span<Plan> plans, int64_t left) const;
  bool commit(std::span<const Plan> plans);
  bool refuse(Refusal why, std::string text);

  void see_use(PageGroup& group, int64_t pages) noexcept {
    idle.see(static_cast<size_t>(group_index(&group)), pages);
  }
  int64_t idle_pages(const PageGroup& group) const noexcept;
  void count_given(int64_t bytes) noexcept;

  int64_t committed_bytes() const noexcept;
  int64_t held_bytes() const noexcept;
  int64_t held_pages() const noexcept;
  int group_index(const PageGroup* group) const noexcept {
    return static_cast<int>(group - groups.data());
  }
  PageGroup& group(int g) noexcept {
    assert(g >= 0 && g < static_cast<int>(groups.size()));
    return groups[g];
  }

  const PagePoolOptions options;
  std::vector<PageGroup> groups;
  std::vector<std::pair<int, int>> layers;  // layer of the model: group, layer of the group
  int64_t bytes_per_page = 0;               // one page of each group
  PageKeeper* keeper = nullptr;
  int64_t ask_after = 0;  // allocations
  IdleWindow idle;
  bool gives_back = false;  // a period has ended, and not all that it left over is given back
  PagePoolStats counters;   // those that are counted, not derived
  uint64_t random;
  Refusal refusal = Refusal::kNone;
  std::string refusal_text;
  int64_t bytes_short = 0;  // for what grow() was refused last, where the budget was why
};

// ---- start

PagePool::PagePool(PagePoolOptions options) {
  check_options(options);
  kernels();  // a bad PAGEDKV_KERNELS shows here: store() cannot throw
  impl_ = std::make_unique<Impl>(std::move(options));
  impl_->reserve();
}

PagePool::~PagePool() = default;

void PagePool::Impl::reserve() {
  for (int g = 0; g < static_cast<int>(options.groups.size()); ++g) {
    bytes_per_page += group_page_bytes(options.groups[g], options.page_size);
    for (int l = 0; l < static_cast<int>(options.groups[g].layers.size()); ++l)
      layers.emplace_back(g, l);
  }
  check_start();
  std::vector<int64_t> max_pages;
  for (const LayerGroupSpec& spec : options.groups)
    max_pages.push_back(options.max_pages != 0
                            ? options.max_pages
                            : default_max_pages(group_page_bytes(spec, options.page_size)));
  while (!try_reserve(
      max_pages))  // our own guess was refused, as under ulimit -v: a smaller one will do
    for (int64_t& pages : max_pages) pages = std::max<int64_t>(options.num_pages, pages / 2);
  counters.bytes_limit = limit().bytes;
}

bool PagePool::Impl::try_reserve(const std::vector<int64_t>& max_pages) {
  groups.clear();
  groups.reserve(max_pages.size());
  try {
    for (size_t g = 0; g < max_pages.size(); ++g)
      groups.emplace_back(options.groups[g], options.page_size, options.num_pages, max_pages[g]);
    return true;
  } catch (const MemoryError&) {
    const int64_t most = *std::max_element(max_pages.begin(), max_pages.end());
    if (options.max_pages != 0 || most <= options.num_pages) throw;
    return false;
  }
}

// Twice what the machine has left, since others may give memory back while the pool lives; address
// space costs nothing.
int64_t PagePool::Impl::default_max_pages(int64_t page_bytes) const {
  if (!options.dynamic) return options.num_pages;
  int64_t bytes = 2 * std::min(ask_machine(), physical_memory());
  if (options.max_bytes > 0) bytes = std::min(bytes, options.max_bytes);
  return std::clamp<int64_t>(bytes / page_bytes, options.num_pages,
                             std::numeric_limits<int32_t>::max());
}

void PagePool::Impl::check_start() const {
  const PoolLimit most = limit();
  const int64_t pages = options.dynamic ? 1 : options.num_pages;
  if (pages > most.bytes / bytes_per_page)
    throw MemoryError(count_of(pages, "page") + " of each layer group need " +
                      std::to_string(pages * bytes_per_page) + " bytes, " + limit_text(most));
}

// ---- budget

int64_t PagePool::Impl::ask_machine() const {
  return std::max<int64_t>(
      0, options.available_bytes ? options.available_bytes() : available_memory());
}

PoolLimit PagePool::Impl::limit() const {
  return pool_limit(options, ask_machine(), committed_bytes());
}

std::string PagePool::Impl::limit_text(PoolLimit limit) const {
  if (!limit.by_machine) return "the byte budget is " + std::to_string(limit.bytes);
  return "the machine allows the pool " + std::to_string(limit.bytes) + " (headroom " +
         std::to_string(options.headroom_bytes) + ")";
}

int64_t PagePool::Impl::committed_bytes() const noexcept {
  int64_t sum = 0;
  for (const PageGroup& g : groups) sum += g.num_committed() * g.page_bytes();
  return sum;
}

int64_t PagePool::Impl::held_bytes() const noexcept {
  int64_t sum = 0;
  for (const PageGroup& g : groups) sum += g.num_held() * g.page_bytes();
  return sum;
}

int64_t PagePool::Impl::held_pages() const noexcept {
  int64_t sum = 0;
  for (const PageGroup& g : groups) sum += g.num_held();
  return sum;
}

// ---- allocation

bool PagePool::try_allocate(int group, std::span<PageId> out, int64_t room) {
  const PageRequest request{group, out, room};
  return try_allocate({&request, 1});
}

bool PagePool::try_allocate(std::span<const PageRequest> requests) {
  Impl& p = *impl_;
  if (!p.is_enough(requests) && !p.make_room(requests)) {
    ++p.counters.refusals;
    return false;
  }
  for (const PageRequest& r : requests) {
    PageGroup& g = p.group(r.group);
    g.take(r.out, p.options.shuffle_seed != 0 ? &p.random : nullptr);
    p.see_use(g, g.num_in_use());
  }
  p.counters.pages_peak = std::max(p.counters.pages_peak, p.held_pages());
  p.counters.bytes_peak = std::max(p.counters.bytes_peak, p.held_bytes());
  ++p.counters.allocations;
  p.refusal = Refusal::kNone;
  return true;
}

bool PagePool::Impl::is_enough(std::span<const PageRequest> requests) noexcept {
  return std::ranges::all_of(requests, [&](const PageRequest& r) {
    return static_cast<int64_t>(r.out.size()) <= group(r.group).num_free();
  });
}

// Growth first, for what is cached may be of use again; then as many cached pages as growth cannot replace; then memory
// that other groups do without. On failure no page that is held has changed.
bool PagePool::Impl::make_room(std::span<const PageRequest> requests) {
  const bool can_reclaim = std::ranges::any_of(requests, [&](const PageRequest& r) {
    return reclaimable(group(r.group), static_cast<int64_t>(r.out.size())) > 0;
  });
  if ((!can_reclaim || counters.allocations >= ask_after) && grow_for(requests, false)) return true;
  if (can_reclaim && counters.allocations >= ask_after)
    ask_after = counters.allocations + kAllocationsBetweenAsking;
  const bool can_grow = can_reclaim && grow_for(requests, true);
  if (!can_grow && !(make_budget(requests) && grow_for(requests, true))) return false;
  for (const PageRequest& r : requests) {
    const int64_t missing = static_cast<int64_t>(r.out.size()) - group(r.group).num_free();
    if (missing > 0) counters.pages_reclaimed += keeper->reclaim(r.group, missing);
  }
  assert(is_enough(requests));
  return true;
}

// All groups share one budget: where it refused these requests, gives back the memory of pages that they leave over, of
// free ones and then of cached ones. False where these could never be enough: then nothing has changed.
bool PagePool::Impl::make_budget(std::span<const PageRequest> requests) {
  int64_t spare = 0;
  for (const PageGroup& g : groups) spare += spare_pages(g, requests) * g.page_bytes();
  if (!options.dynamic || bytes_short == 0 || bytes_short > spare) return false;
  int64_t missing = bytes_short - give_back_spare(requests, std::max(bytes_short, kMaxCommitBytes));
  for (PageGroup& g : groups)
    // Twice as many each time: what lies alone between held pages gives nothing back.
    for (int64_t pages = 1; missing > 0; pages *= 2) {
      pages = std::max(pages, missing / g.page_bytes());
      const int64_t count = reclaimable(g, std::min(pages, spare_pages(g, requests)));
      if (count == 0) break;
      counters.pages_reclaimed += keeper->reclaim(group_index(&g), count);
      missing -= give_back_spare(requests, missing);
    }
  return missing <= 0;
}

// Free and cached pages beyond those that the requests take.
int64_t PagePool::Impl::spare_pages(const PageGroup& group,
                                    std::span<const PageRequest> requests) const noexcept {
  int64_t pages = group.num_free() + reclaimable(group, group.num_cached());
  for (const PageRequest& r : requests)
    if (r.group == group_index(&group)) pages -= static_cast<int64_t>(r.out.size());
  return std::max<int64_t>(0, pages);
}

// Returns how many bytes; about as many as are asked for, if there are.
int64_t PagePool::Impl::give_back_spare(std::span<const PageRequest> requests,
                                        int64_t bytes) noexcept {
  int64_t given = 0;
  for (PageGroup& g : groups) {
    const int64_t spare = std::min(g.num_free(), spare_pages(g, requests));
    const int64_t wanted = (bytes - given + g.page_bytes() - 1) / g.page_bytes();
    if (spare > 0 && wanted > 0)
      given += g.give_back(g.num_committed() - spare, wanted) * g.page_bytes();
  }
  count_given(given);
  return given;
}

// How many of `missing` pages cached ones can give.
int64_t PagePool::Impl::reclaimable(const PageGroup& group, int64_t missing) const noexcept {
  return keeper != nullptr ? std::min(missing, keeper->reclaimable(group_index(&group))) : 0;
}

// Commits what the requests need beyond the free pages, and beyond those that can be reclaimed where these count.
bool PagePool::Impl::grow_for(std::span<const PageRequest> requests, bool with_cached) {
  bytes_short = 0;
  std::vector<Plan> plans;
  for (const PageRequest& r : requests) {
    PageGroup& g = group(r.group);
    const auto num_pages = static_cast<int64_t>(r.out.size());
    int64_t missing = num_pages - g.num_free();
    if (with_cached) missing -= reclaimable(g, missing);
    if (missing <= 0) continue;
    Plan plan{&g, g.num_committed() + missing, 0, g.capacity(), 0};
    if (!check_capacity(plan)) return false;
    if (!options.dynamic) plan.required = g.capacity();  // the first allocation commits all
    if (r.room > 0)
      plan.room = g.num_in_use() + std::clamp<int64_t>(r.room, num_pages, g.max_pages());
    plans.push_back(plan);
  }
  return plans.empty() || grow(plans);
}

bool PagePool::Impl::grow(std::span<Plan> plans) {
  const PoolLimit most = limit();
  counters.bytes_limit = most.bytes;
  const int64_t left = std::max<int64_t>(0, most.bytes - committed_bytes());
  if (!check_budget(plans, left, most)) return false;
  choose_sizes(plans, left);
  return commit(plans);
}

bool PagePool::Impl::check_capacity(const Plan& plan) {
  const PageGroup& g = *plan.group;
  const int64_t most = options.dynamic ? g.max_pages() : g.capacity();
  if (plan.required <= most) return true;
  if (options.dynamic && options.max_pages == 0) {  // the address space was sized by the budget
    const PoolLimit limit = this->limit();
    const int64_t left = std::max<int64_t>(0, limit.bytes - committed_bytes());
    if (!check_budget({&plan, 1}, left, limit)) {
      bytes_short = 0;  // no memory of other groups would do
      return false;
    }
  }
  return refuse(Refusal::kCapacity, "layer group " + std::to_string(group_index(&g)) + " needs " +
                                        count_of(plan.required, "page") + ", " +
                                        (options.dynamic ? "there is address space for "
                                                         : "growth is off and it has ") +
                                        std::to_string(most));
}

bool PagePool::Impl::check_budget(std::span<const Plan> plans, int64_t left, PoolLimit limit) {
  int64_t bytes = 0;
  for (const Plan& plan : plans) bytes += plan.new_bytes(plan.required);
  if (bytes <= left) return true;
  bytes_short = bytes - left;
  return refuse(Refusal::kBudget, "the pages need " + std::to_string(bytes) + " bytes more, " +
                                      std::to_string(left) + " are left: " + limit_text(limit));
}

// How far each group grows. With the budget nearly used up, no further than it must.
void PagePool::Impl::choose_sizes(std::span<Plan> plans, int64_t left) const {
  int64_t bytes = 0;
  for (Plan& plan : plans) {
    const PageGroup& g = *plan.group;
    if (plan.required > plan.capacity) {
      const int64_t most = std::min(g.max_pages(), g.num_committed() + left / g.page_bytes());
      plan.capacity = std::min(grown_pages(plan.capacity, plan.required, plan.room),
                               std::max(most, plan.required));
    }
    const int64_t step = std::min((g.num_committed() + 1) / 2, kMaxCommitBytes / g.page_bytes());
    const int64_t start = (kFirstCommitTokens + options.page_size - 1) / options.page_size;
    plan.target = std::min(std::max(g.num_committed() + step, start), plan.capacity);
    if (plan.room > 0) plan.target = std::min(plan.target, plan.room);
    plan.target = std::max(plan.target, plan.required);
    bytes += plan.new_bytes(plan.target);
  }
  if (bytes <= left) return;
  for (Plan& plan : plans) plan.target = plan.required;
}

bool PagePool::Impl::commit(std::span<const Plan> plans) {
  int64_t bytes = 0;
  for (const Plan& plan : plans) bytes += plan.new_bytes(plan.target);
  if (options.commit_hook && !options.commit_hook(bytes))
    return refuse(Refusal::kBudget,
                  "a commit of " + std::to_string(bytes) + " bytes was refused (hook)");
  const auto undo = [&](int error) {
    for (const Plan& plan : plans) plan.group->undo_commit(plan.target);
    return refuse(Refusal::kBudget, "the machine refused " + std::to_string(bytes) +
                                        " bytes beyond the " + std::to_string(committed_bytes()) +
                                        " committed: " + std::strerror(error));
  };
  const auto start = Clock::now();
  for (const Plan& plan : plans) plan.group->reserve_lists(plan.target);
  for (const Plan& plan : plans)
    if (const int error = plan.group->try_open(plan.target)) return undo(error);
  const auto opened = Clock::now();
  for (const Plan& plan : plans)
    if (const int error = plan.group->try_commit(plan.target)) return undo(error);
  counters.commit_seconds += std::chrono::duration<double>(opened - start).count();
  counters.touch_seconds += std::chrono::duration<double>(Clock::now() - opened).count();
  for (const Plan& plan : plans) {
    plan.group->add_committed(plan.target);
    if (plan.capacity > plan.group->capacity()) ++counters.grow_events;
    plan.group->set_capacity(plan.capacity);
  }
  ++counters.commit_events;
  gives_back = false;  // there is use for it again
  return true;
}

bool PagePool::Impl::refuse(Refusal why, std::string text) {
  refusal = why;
  refusal_text = std::move(text);
  return false;
}

bool PagePool::try_grow(int group, int64_t num_pages, int64_t room) {
  Impl& p = *impl_;
  PageGroup& g = p.group(group);
  p.refusal = Refusal::kNone;
  if (num_pages > g.num_committed()) {
    Impl::Plan plan{&g, num_pages, 0, g.capacity(), room};
    if (!p.options.dynamic) plan.required = std::max(num_pages, g.capacity());
    if (!p.check_capacity(plan) || !p.grow({&plan, 1})) {
      ++p.counters.refusals;
      return false;
    }
  }
  p.see_use(g, num_pages);
  return true;
}

// ---- giving back

void PagePool::shrink_to(int group, int64_t num_pages) {
  if (num_pages < 1)
    throw std::invalid_argument("num_pages " + std::to_string(num_pages) + ": must be at least 1");
  PageGroup& g = impl_->group(group);
  int64_t given = g.cut_to(num_pages);
  if (impl_->options.dynamic) given += g.give_back(num_pages, g.extent());
  g.set_capacity(std::min(g.capacity(), std::max(num_pages, g.extent())));
  impl_->count_given(given * g.page_bytes());
}

int64_t PagePool::give_back_idle(std::chrono::steady_clock::time_point now) {
  Impl& p = *impl_;
  if (p.options.idle_seconds == 0 || !p.options.dynamic) return 0;
  if (p.idle.advance(now, [&](size_t g) { return p.groups[g].num_in_use(); })) p.gives_back = true;
  if (!p.gives_back) return 0;
  int64_t given = 0;
  for (PageGroup& g : p.groups) {
    const int64_t most = std::max<int64_t>(1, (kMaxGiveBackBytes - given) / g.page_bytes());
    given += g.give_back(p.idle_pages(g), most) * g.page_bytes();
  }
  p.gives_back = given > 0;
  p.count_given(given);
  return given;
}

// That stay with their memory.
int64_t PagePool::Impl::idle_pages(const PageGroup& group) const noexcept {
  const auto peak = static_cast<double>(idle.peak(static_cast<size_t>(group_index(&group))));
  const int64_t floor = (options.idle_floor_bytes + bytes_per_page - 1) / bytes_per_page;
  return std::max(floor, static_cast<int64_t>(std::ceil(peak * options.idle_keep)));
}

void PagePool::Impl::count_given(int64_t bytes) noexcept {
  if (bytes == 0) return;
  ++counters.shrink_events;
  counters.bytes_given_back += bytes;
}

// ---- references

void PagePool::retain(int group, std::span<const PageId> pages) {
  Impl& p = *impl_;
  p.group(group).retain(pages);
  if (p.keeper == nullptr) return;  // no page was cached
  p.counters.pages_peak = std::max(p.counters.pages_peak, p.held_pages());
  p.counters.bytes_peak = std::max(p.counters.bytes_peak, p.held_bytes());
}

void PagePool::release(int group, std::span<const PageId> pages) {
  impl_->group(group).release(pages);
}

int32_t PagePool::references(int group, PageId page) const noexcept {
  return impl_->group(group).references(page);
}

void PagePool::copy_page(int group, PageId from, PageId to, int num_tokens) {
  PageGroup& g = impl_->group(group);
  for (PageId page : {from, to})
    if (g.references(page) == 0)
      throw std::invalid_argument("page " + std::to_string(page) +
                                  " is not held: it cannot be copied");
  if (from == to) return;
  g.copy_page(from, to);
  ++impl_->counters.page_copies;
  if (impl_->keeper != nullptr)
    impl_->keeper->on_copied(group, from, to, num_tokens > 0 ? num_tokens : page_size());
}

bool PagePool::is_shared(int group, PageId page) const noexcept {
  const PageGroup& g = impl_->group(group);
  return g.references(page) > 1 || g.is_kept(page);
}

void PagePool::zero_when_freed(int group, std::span<const PageId> pages) {
  PageGroup& g = impl_->group(group);
  for (PageId page : pages)
    if (g.references(page) == 0)
      throw std::invalid_argument("page " + std::to_string(page) + " is not held");
  g.zero_when_freed(pages);
}

// ---- cached pages

void PagePool::set_keeper(PageKeeper* keeper) {
  Impl& p = *impl_;
  if (keeper != nullptr && p.keeper != nullptr)
    throw std::invalid_argument("this pool's pages have a keeper already");
  p.keeper = keeper;
  for (PageGroup& g : p.groups) g.set_keeper(keeper, p.group_index(&g));
}

void PagePool::keep(int group, PageId page) {
  if (impl_->keeper == nullptr) throw std::invalid_argument("this pool's pages have no keeper");
  impl_->group(group).keep(page);
}
void PagePool::unkeep(int group, PageId page) { impl_->group(group).unkeep(page); }
bool PagePool::is_kept(int group, PageId page) const noexcept {
  return impl_->group(group).is_kept(page);
}

// ---- what there is

int PagePool::num_groups() const noexcept { return static_cast<int>(impl_->groups.size()); }
int PagePool::num_layers() const noexcept { return static_cast<int>(impl_->layers.size()); }
int PagePool::page_size() const noexcept { return impl_->options.page_size; }
int PagePool::sliding_window(int group) const noexcept {
  return impl_->group(group).sliding_window();
}
int PagePool::group_of_layer(int layer) const noexcept { return impl_->layers[layer].first; }

LayerPages PagePool::layer_pages(int layer) const noexcept {
  const auto [group, layer_of_group] = impl_->layers[layer];
  return impl_->groups[group].layers()[layer_of_group];
}

int64_t PagePool::capacity(int group) const noexcept { return impl_->group(group).capacity(); }
int64_t PagePool::committed(int group) const noexcept {
  return impl_->group(group).num_committed();
}
int64_t PagePool::extent(int group) const noexcept { return impl_->group(group).extent(); }
int64_t PagePool::max_pages(int group) const noexcept { return impl_->group(group).max_pages(); }

int64_t PagePool::pages_held(int group) const noexcept { return impl_->group(group).num_held(); }
int64_t PagePool::pages_cached(int group) const noexcept {
  return impl_->group(group).num_cached();
}
int64_t PagePool::pages_free(int group) const noexcept {
  const PageGroup& g = impl_->group(group);
  return g.capacity() - g.num_held() - g.num_cached();
}

int64_t PagePool::pages_peak(int group) const noexcept { return impl_->group(group).peak_held(); }

int64_t PagePool::bytes_per_token() const noexcept {
  return impl_->bytes_per_page / impl_->options.page_size;
}

int64_t PagePool::page_bytes(int group) const noexcept { return impl_->group(group).page_bytes(); }

PagePool::Refusal PagePool::refusal() const noexcept { return impl_->refusal; }
const std::string& PagePool::refusal_text() const noexcept { return impl_->refusal_text; }

PagePoolStats PagePool::stats() const noexcept {
  PagePoolStats s = impl_->counters;
  for (const PageGroup& g : impl_->groups) {
    s.pages_capacity += g.capacity();
    s.pages_committed += g.num_committed();
    s.pages_held += g.num_held();
    s.pages_cached += g.num_cached();
    s.bytes_cached += g.num_cached() * g.page_bytes();
    s.bytes_reserved += g.reserved_bytes();
  }
  s.bytes_in_use = impl_->held_bytes();
  s.bytes_committed = impl_->committed_bytes();
  return s;
}

std::vector<int32_t> PagePool::page_map(int group) const { return impl_->group(group).page_map(); }
int64_t PagePool::pages_shared(int group) const noexcept {
  return impl_->group(group).count_shared();
}

int64_t PagePool::bytes_resident() const {
  int64_t sum = 0;
  for (const PageGroup& g : impl_->groups) sum += g.resident_bytes();
  return sum;
}

void PagePool::verify(const std::vector<std::vector<int32_t>>* expected) const {
  const Impl& p = *impl_;
  if (expected != nullptr && expected->size() != p.groups.size())
    throw std::logic_error("page pool: expected references are of " +
                           std::to_string(expected->size()) + " groups");
  int64_t held = 0;
  for (size_t g = 0; g < p.groups.size(); ++g) {
    p.groups[g].verify(expected != nullptr ? &(*expected)[g] : nullptr);
    held += p.groups[g].num_held();
  }
  if (held > p.counters.pages_peak)
    throw std::logic_error("page pool: " + std::to_string(held) + " pages are held, the peak was " +
                           std::to_string(p.counters.pages_peak));
}

}  // namespace pagedkv
