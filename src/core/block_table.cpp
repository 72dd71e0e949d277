#include "pagedkv/core/block_table.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/window.h"

namespace pagedkv {
namespace {

int64_t pages_for(int64_t tokens, int64_t page_size) noexcept {
  return tokens / page_size + (tokens % page_size != 0);
}

}  // namespace

int64_t most_pages_held(int64_t length, int64_t step_tokens, int page_size,
                        int sliding_window) noexcept {
  const int64_t all = pages_for(length, page_size);
  if (sliding_window == 0) return all;
  // The tokens before a step that its first query sees, and the step's, wherever pages begin.
  const int64_t span = sliding_window - 1 + std::min(step_tokens, length);
  return std::min(all, pages_for(span + page_size - 1, page_size));
}

BlockTable::BlockTable(PagePool& pool, int64_t context_window)
    : pool_(&pool),
      pages_(static_cast<size_t>(pool.num_groups())),
      passed_(static_cast<size_t>(pool.num_groups())),
      context_window_(context_window) {
  if (context_window < 0)
    throw std::invalid_argument("context_window " + std::to_string(context_window) +
                                ": must be at least 0 (0: none)");
}

BlockTable::BlockTable(BlockTable&& other) noexcept
    : pool_(other.pool_),
      pages_(std::exchange(other.pages_, {})),
      passed_(std::exchange(other.passed_, {})),
      length_(std::exchange(other.length_, 0)),
      context_window_(other.context_window_),
      zeroes_freed_(other.zeroes_freed_),
      refusal_(other.refusal_),
      refusal_text_(std::move(other.refusal_text_)) {}

BlockTable& BlockTable::operator=(BlockTable&& other) noexcept {
  BlockTable taken(std::move(other));
  std::swap(pool_, taken.pool_);
  std::swap(pages_, taken.pages_);
  std::swap(passed_, taken.passed_);
  std::swap(length_, taken.length_);
  std::swap(context_window_, taken.context_window_);
  std::swap(zeroes_freed_, taken.zeroes_freed_);
  std::swap(refusal_, taken.refusal_);
  std::swap(refusal_text_, taken.refusal_text_);
  return *this;
}

BlockTable::~BlockTable() {
  for (size_t g = 0; g < pages_.size(); ++g)
    pool_->release(static_cast<int>(g), std::span(pages_[g]).subspan(passed_[g]));
}

int64_t BlockTable::capacity() const noexcept {
  size_t fewest = pages_.empty() ? 0 : pages_[0].size();
  for (const auto& pages : pages_) fewest = std::min(fewest, pages.size());
  return static_cast<int64_t>(fewest) * pool_->page_size();
}

bool BlockTable::refuse(PagePool::Refusal why, std::string text) {
  refusal_ = why;
  refusal_text_ = std::move(text);
  return false;
}

// What can never fit is refused before the pool is asked, and before any list grows for it.
bool BlockTable::check_limits(int64_t num_tokens) {
  const auto check = [&](int64_t most, const char* limit, int64_t passed = 0) {
    if (num_tokens <= most - length_) return true;
    const std::string sum = num_tokens <= INT64_MAX - length_
                                ? std::to_string(length_ + num_tokens)
                                : std::to_string(length_) + " + " + std::to_string(num_tokens);
    return refuse(PagePool::Refusal::kCapacity,
                  "sequence needs " + sum + " tokens, " + limit + std::to_string(most) +
                      (passed > 0 ? " (" + std::to_string(passed) + " of them given back)" : ""));
  };
  if (context_window_ > 0 && !check(context_window_, "the context window is ")) return false;
  int tightest = 0;
  const auto most_pages = [&](int g) { return pool_->max_pages(g) + passed_[g]; };
  for (int g = 1; g < pool_->num_groups(); ++g)
    if (most_pages(g) < most_pages(tightest)) tightest = g;
  return check(most_pages(tightest) * page_size(), "the pool holds at most ",
               passed_[tightest] * page_size());
}

bool BlockTable::last_page_is_shared(int group) const noexcept {
  return length_ % pool_->page_size() != 0 && pool_->is_shared(group, pages_[group].back());
}

// Pages that a group must get so that the sequence may write tokens [length(), new_length).
int64_t BlockTable::missing_pages(int group, int64_t new_length) const noexcept {
  const auto held = static_cast<int64_t>(pages_[group].size());
  return pages_for(new_length, pool_->page_size()) - held + (last_page_is_shared(group) ? 1 : 0);
}

bool BlockTable::try_append(int64_t num_tokens) {
  if (num_tokens < 0)
    throw std::invalid_argument("num_tokens " + std::to_string(num_tokens) +
                                ": must be at least 0");
  if (!check_limits(num_tokens)) return false;
  const int64_t new_length = length_ + num_tokens;
  bool enough = true;
  for (int g = 0; g < pool_->num_groups(); ++g)
    enough = enough && missing_pages(g, new_length) == 0;
  if (num_tokens > 0 && !enough && !take_pages(new_length)) return false;
  length_ = new_length;
  return true;
}

bool BlockTable::take_pages(int64_t new_length) {
  // Millions of pages: whether there is memory for them is asked before their list takes any.
  constexpr int64_t kMany = int64_t{1} << 20;
  for (int g = 0; g < pool_->num_groups(); ++g) {
    const int64_t missing = missing_pages(g, new_length);
    const int64_t held = pool_->capacity(g) - pool_->pages_free(g);
    if (missing > kMany && !pool_->try_grow(g, held + missing))
      return refuse(pool_->refusal(), pool_->refusal_text());
  }
  std::vector<PageRequest> requests;
  requests.reserve(pages_.size());
  for (int g = 0; g < pool_->num_groups(); ++g) {
    auto& pages = pages_[g];
    const size_t wanted = pages.size() + static_cast<size_t>(missing_pages(g, new_length));
    if (wanted > pages.capacity()) pages.reserve(std::max(wanted, 2 * pages.capacity()));
  }
  for (int g = 0; g < pool_->num_groups(); ++g) {  // nothing throws in here
    auto& pages = pages_[g];
    const size_t held = pages.size();
    const bool copy = last_page_is_shared(g);
    const int64_t most = pages_for(context_window_, pool_->page_size()) + (copy ? 1 : 0);
    pages.resize(held + static_cast<size_t>(missing_pages(g, new_length)));
    requests.push_back({g, std::span(pages).subspan(held),
                        context_window_ > 0 ? most - static_cast<int64_t>(held) : 0});
  }
  if (!allocate(requests)) return refuse(pool_->refusal(), pool_->refusal_text());
  for (const PageRequest& request : requests) {
    if (zeroes_freed_) pool_->zero_when_freed(request.group, request.out);
    const auto num_pages = static_cast<int64_t>(pages_[request.group].size());
    if (num_pages > pages_for(new_length, pool_->page_size()))
      replace_shared(request.group, static_cast<size_t>(num_pages) - request.out.size() - 1);
  }
  return true;
}

// Fills the ends of the lists that the requests name, or cuts them off again.
bool BlockTable::allocate(std::span<const PageRequest> requests) {
  const auto cut_off = [&] {
    for (const PageRequest& request : requests) {
      auto& pages = pages_[request.group];
      pages.resize(pages.size() - request.out.size());
    }
  };
  try {
    if (pool_->try_allocate(requests)) return true;
  } catch (...) {  // std::bad_alloc
    cut_off();
    throw;
  }
  cut_off();
  return false;
}

// Copy on write: the page after `index` becomes this table's own copy of the shared one at `index`.
void BlockTable::replace_shared(int group, size_t index) {
  auto& pages = pages_[group];
  const PageId shared = pages[index];
  pool_->copy_page(group, shared, pages[index + 1], static_cast<int>(length_ % pool_->page_size()));
  pages.erase(pages.begin() + static_cast<std::ptrdiff_t>(index));
  pool_->release(group, {&shared, 1});
}

void BlockTable::append(int64_t num_tokens) {
  if (try_append(num_tokens)) return;
  if (refusal_ == PagePool::Refusal::kCapacity) throw CapacityError(refusal_text_);
  throw MemoryError(refusal_text_);
}

int64_t BlockTable::release_passed() {
  int64_t num_released = 0;
  for (int g = 0; g < pool_->num_groups(); ++g) {
    const int64_t first = first_page_seen(*pool_, g, length_), count = first - passed_[g];
    if (count <= 0) continue;
    const std::span<PageId> passed = std::span(pages_[g]).subspan(passed_[g], count);
    pool_->release(g, passed);
    std::ranges::fill(passed, kNoPage);
    passed_[g] = first;
    num_released += count;
  }
  return num_released;
}

// A group without a page that a query at `length` sees, or -1. What lies from `length` on is taken anew.
int BlockTable::group_that_cannot_trim_to(int64_t length) const noexcept {
  const int64_t kept = pages_for(length, pool_->page_size());
  for (int g = 0; g < pool_->num_groups(); ++g)
    if (first_page_seen(*pool_, g, length) < std::min(passed_[g], kept)) return g;
  return -1;
}

bool BlockTable::can_trim_to(int64_t length) const noexcept {
  return length >= 0 && length <= length_ && group_that_cannot_trim_to(length) < 0;
}

void BlockTable::check_trim(int64_t length) const {
  const int group = group_that_cannot_trim_to(length);
  if (group < 0) return;
  throw std::invalid_argument(
      "length " + std::to_string(length) + ": the window of layer group " + std::to_string(group) +
      " begins at token " + std::to_string(length + 1 - pool_->sliding_window(group)) +
      ", and tokens before " + std::to_string(passed_[group] * pool_->page_size()) +
      " were given back");
}

void BlockTable::trim_to(int64_t length) {
  if (length < 0 || length > length_)
    throw std::invalid_argument("length " + std::to_string(length) + ": must be in 0.." +
                                std::to_string(length_));
  check_trim(length);
  const int64_t kept = pages_for(length, pool_->page_size());
  for (int g = 0; g < pool_->num_groups(); ++g) {
    auto& pages = pages_[g];
    pool_->release(g, std::span(pages).subspan(std::max(kept, passed_[g])));
    pages.resize(kept);
    passed_[g] = std::min(kept, passed_[g]);
  }
  length_ = length;
}

void BlockTable::zero_when_freed() {
  zeroes_freed_ = true;
  for (int g = 0; g < pool_->num_groups(); ++g)
    pool_->zero_when_freed(g, std::span(pages_[g]).subspan(passed_[g]));
}

BlockTable BlockTable::share_prefix(int64_t num_pages) const {
  const int64_t full = length_ / pool_->page_size();
  if (num_pages < 0 || num_pages > full)
    throw std::invalid_argument("num_pages " + std::to_string(num_pages) + ": full pages are 0.." +
                                std::to_string(full));
  check_trim(num_pages * pool_->page_size());
  return share(static_cast<size_t>(num_pages), num_pages * pool_->page_size());
}

BlockTable BlockTable::fork() const {
  return share(static_cast<size_t>(pages_for(length_, pool_->page_size())), length_);
}

BlockTable BlockTable::share(size_t num_pages, int64_t length) const {
  BlockTable shared(*pool_, context_window_);
  shared.zeroes_freed_ = zeroes_freed_;
  std::vector<std::vector<PageId>> pages;
  for (const auto& own : pages_)
    pages.emplace_back(own.begin(), own.begin() + static_cast<std::ptrdiff_t>(num_pages));
  shared.hold(std::move(pages), length);
  return shared;
}

void BlockTable::hold(std::vector<std::vector<PageId>> pages, int64_t length) {
  for (int g = 0; g < pool_->num_groups(); ++g) {
    const auto first = std::ranges::find_if(pages[g], [](PageId page) { return page != kNoPage; });
    passed_[g] = first - pages[g].begin();
    pool_->retain(g, std::span(first, pages[g].end()));
    pages_[g] = std::move(pages[g]);
  }
  length_ = length;
}

void BlockTable::replace(int group, int64_t index, PageId page) {
  pool_->retain(group, {&page, 1});
  if (zeroes_freed_) pool_->zero_when_freed(group, {&page, 1});
  const PageId before = std::exchange(pages_[group][index], page);
  pool_->release(group, {&before, 1});
}

void BlockTable::slot_mapping(int group, int64_t first, std::span<int64_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  if (first < 0 || first > length_ || count > length_ - first)
    throw std::invalid_argument("slots of " + std::to_string(count) + " tokens from " +
                                std::to_string(first) + ": the sequence has " +
                                std::to_string(length_));
  const int64_t page_size = pool_->page_size();
  if (count > 0 && first < passed_[group] * page_size)
    throw std::invalid_argument("slot of token " + std::to_string(first) + ": tokens before " +
                                std::to_string(passed_[group] * page_size) + " of layer group " +
                                std::to_string(group) + " were given back");
  const std::vector<PageId>& pages = pages_[group];
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = first + i;
    out[i] = pages[token / page_size] * page_size + token % page_size;
  }
}

}  // namespace pagedkv
