#include "core/golden_deviations.h"

#include <iostream>
#include <stdexcept>

namespace pagedkv::testing {

Deviations::Deviations(Deviation::Group group) {
  for (const Deviation& deviation : kDeviations)
    if ((deviation.groups & group) != 0) list_.push_back(deviation);
  counts_.resize(list_.size());
}

void Deviations::met(std::string_view name) {
  for (size_t i = 0; i < list_.size(); ++i) {
    if (list_[i].name != name) continue;
    ++counts_[i];
    return;
  }
  throw std::logic_error("no deviation of this group is called " + std::string(name));
}

std::vector<std::string> Deviations::unused() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < list_.size(); ++i)
    if (counts_[i] == 0) names.emplace_back(list_[i].name);
  return names;
}

void Deviations::print() const {
  for (size_t i = 0; i < list_.size(); ++i)
    std::cout << "  " << counts_[i] << " x " << list_[i].name << ": " << list_[i].reason << '\n';
}

}  // namespace pagedkv::testing
