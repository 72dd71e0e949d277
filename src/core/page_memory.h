// The memory of one page array: address space for the most pages it may ever have, of which the
// first ones are committed. The array never moves; growth touches nothing that is committed
// already.
//
//   0            touched        boundary                              reserved
//   |  pages  +64 |  unbacked   |  no access (PROT_NONE)                |
//
// touched: committed pages and the slack behind the last one, in whole OS pages; all of it is
// backed. boundary: the end of what may be read and written; it moves in steps of kBoundaryStep, so
// that an array costs two mappings however often it grows (vm.max_map_count is 65,530 by default).
// One OS page without access always follows, so that a stray write past an array faults.
//
// Huge pages are asked for: attention reads 4 % faster from them in decode, 10 % in prefill. The kernel
// gives them where they fit below the boundary, which therefore never lies behind one that the touched
// bytes do not fill.
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagedkv {

class PageMemory {
 public:
  static constexpr int64_t kBoundaryStep = int64_t{256} << 10;
  // Readable behind the last page: kernels load whole vectors.
  static constexpr int64_t kSlackBytes = 64;

  // page_bytes and max_pages >= 1. Throws MemoryError when the address space is refused.
  PageMemory(int64_t page_bytes, int64_t max_pages);
  PageMemory(PageMemory&& other) noexcept;
  PageMemory& operator=(PageMemory&&) = delete;
  ~PageMemory();

  std::byte* data() const noexcept { return data_; }
  int64_t page_bytes() const noexcept { return page_bytes_; }
  int64_t pages() const noexcept { return pages_; }  // committed
  int64_t reserved_bytes() const noexcept { return reserved_; }

  // Moves the boundary so that the first num_pages pages may be written, without backing them. Returns
  // 0, or the errno of the call that failed. Takes no longer for more memory: a page table entry is
  // made by who touches it.
  [[nodiscard]] int try_open(int64_t num_pages) noexcept;

  // Backs the first num_pages pages, zeroed where they are new; requires pages() <= num_pages <=
  // max_pages. Returns 0, or the errno of the call that failed: then nothing has changed.
  [[nodiscard]] int try_commit(int64_t num_pages) noexcept;

  // Gives the memory behind the first num_pages pages back, from the end.
  void decommit_to(int64_t num_pages) noexcept;

  // Bytes that the kernel holds for this array now.
  int64_t resident_bytes() const;

 private:
  int64_t touched_bytes(int64_t num_pages) const noexcept;
  int64_t boundary_bytes(int64_t num_pages) const noexcept;

  std::byte* data_ = nullptr;
  int64_t page_bytes_ = 0;
  int64_t pages_ = 0;
  int64_t boundary_ = 0;
  int64_t reserved_ = 0;
};

}  // namespace pagedkv
