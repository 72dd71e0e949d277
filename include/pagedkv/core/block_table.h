// Which pages hold a sequence's tokens: entry i of a group's table is the page of tokens
// [i * page_size, (i + 1) * page_size), or kNoPage once a sliding window has passed it and
// release_passed() has given it back. Holds its pages and gives them back when destroyed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "pagedkv/core/page_pool.h"

namespace [[gnu::visibility("default")]] pagedkv {

class PrefixIndex;

// The most pages of a layer group that a sequence which grows to `length` tokens holds at once, where
// it takes at most step_tokens at a time, followed by release_passed(). sliding_window 0: all of them.
int64_t most_pages_held(int64_t length, int64_t step_tokens, int page_size,
                        int sliding_window) noexcept;

class BlockTable {
 public:
  // The pool must outlive the table. A table that was moved from may be assigned to or destroyed, no
  // more. context_window > 0: the most tokens this sequence may hold.
  explicit BlockTable(PagePool& pool, int64_t context_window = 0);
  BlockTable(BlockTable&& other) noexcept;
  BlockTable& operator=(BlockTable&& other) noexcept;
  BlockTable(const BlockTable&) = delete;
  BlockTable& operator=(const BlockTable&) = delete;
  ~BlockTable();

  int64_t length() const noexcept { return length_; }  // tokens
  int64_t capacity() const noexcept;                   // tokens that fit without another page
  int64_t context_window() const noexcept { return context_window_; }  // 0: none

  // Makes room for num_tokens more in every group and counts them as held; all or nothing. False:
  // the window or the pool refuses; nothing has changed, and refusal_text() names the need and the
  // limit. A last page that is partly filled and shared (after share_prefix() and trim_to()) is
  // copied first, so that the new tokens are seen by this sequence alone.
  [[nodiscard]] bool try_append(int64_t num_tokens);
  // The same, throwing CapacityError or MemoryError.
  void append(int64_t num_tokens);
  const std::string& refusal_text() const noexcept { return refusal_text_; }

  // In each group with a sliding window, gives back the pages that lie wholly before what the next
  // token sees; their entries become kNoPage. Returns how many. To be called after a step that
  // succeeded, not within one: its first query still sees the window before it, and to undo it,
  // trim_to() needs that too. Where no page has been passed it costs a few operations a group.
  int64_t release_passed();

  // Forgets the last tokens down to `length`; pages no longer needed go back. Throws
  // std::invalid_argument, having changed nothing, where can_trim_to(length) is false.
  void trim_to(int64_t length);
  // Whether 0 <= length <= length() and the sequence can go on from there: no page that the token at
  // `length` sees has been given back. 0 is always possible, and so is the length at the last
  // release_passed() and every longer one.
  bool can_trim_to(int64_t length) const noexcept;

  // From now on the bytes of this sequence's pages are zeroed when they become free, whoever holds them last: those it
  // has, and those it will get.
  void zero_when_freed();

  // A table that holds the first num_pages full pages together with this one (reference counts
  // rise; no byte is copied). Throws std::invalid_argument where this one has fewer, and where it
  // could not be trimmed to them.
  [[nodiscard]] BlockTable share_prefix(int64_t num_pages) const;
  // A table of the same tokens in the same pages, the last one too: another branch. No byte is copied;
  // who appends first while a partly filled last page is shared gets a copy of that page.
  [[nodiscard]] BlockTable fork() const;

  int num_groups() const noexcept { return static_cast<int>(pages_.size()); }
  int page_size() const noexcept { return pool_->page_size(); }
  // group must be one of the pool's. The first num_passed(group) entries are kNoPage, no other is.
  std::span<const PageId> pages(int group) const noexcept { return pages_[group]; }
  int64_t num_passed(int group) const noexcept { return passed_[group]; }

  // Writes the slots of tokens [first, first + out.size()) in a group. Throws std::invalid_argument
  // for tokens that the sequence does not have, or whose page has been given back.
  void slot_mapping(int group, int64_t first, std::span<int64_t> out) const;

 private:
  friend PrefixIndex;
  // Holds the first `length` tokens of these pages [group][page] too; the table must be empty. In each group the first
  // ones may be kNoPage.
  void hold(std::vector<std::vector<PageId>> pages, int64_t length);
  // Page `index` of a group gives way to one with the same content.
  void replace(int group, int64_t index, PageId page);
  BlockTable share(size_t num_pages, int64_t length) const;
  bool refuse(PagePool::Refusal why, std::string text);
  bool check_limits(int64_t num_tokens);
  bool last_page_is_shared(int group) const noexcept;
  int group_that_cannot_trim_to(int64_t length) const noexcept;
  void check_trim(int64_t length) const;
  int64_t missing_pages(int group, int64_t new_length) const noexcept;
  bool take_pages(int64_t new_length);
  bool allocate(std::span<const PageRequest> requests);
  void replace_shared(int group, size_t index);

  PagePool* pool_;
  std::vector<std::vector<PageId>> pages_;  // [group][page of the sequence]
  std::vector<int64_t> passed_;             // [group] entries that are kNoPage, the first ones
  int64_t length_ = 0;
  int64_t context_window_ = 0;
  bool zeroes_freed_ = false;
  PagePool::Refusal refusal_ = PagePool::Refusal::kNone;
  std::string refusal_text_;
};

}  // namespace pagedkv
