// The memory of one page array: address space for the most pages it may ever have, of which the
// first ones are open; of these all have memory but the holes that were given back. The array never
// moves; growth touches nothing that has memory already.
//
//   0                     touched        boundary                     reserved
//   |  pages  hole  pages  +64 |  unbacked   |  no access (PROT_NONE)       |
//
// touched: open pages and the slack behind the last one, in whole OS pages; all of it but the holes is
// backed. boundary: the end of what may be read and written; it moves in steps of kBoundaryStep, so
// that an array costs two mappings however often it grows (vm.max_map_count is 65,530 by default).
// One OS page without access always follows, so that a stray write past an array faults.
//
// Huge pages are asked for: attention reads 4 % faster from them in decode, 10 % in prefill. The kernel
// gives them where they fit below the boundary, which therefore never lies behind one that the touched
// bytes do not fill.
//
// A hole is a run of open pages without memory, with pages that have it on both sides or before page 0. It frees the
// OS pages that no other page and no slack reaches into, and stays readable and writable, so that it costs no mapping.
// A huge page that is given back in part is split first: the kernel would else keep it whole until memory is short
// (Linux 6.18: of 1 GiB given back in holes of 2016 KiB, 0 bytes came free, after splitting all). While there are
// holes, no huge page may be asked for: khugepaged would fill them.
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagedkv {

// Pages [first, last).
struct PageRange {
  int64_t first = 0;
  int64_t last = 0;
  int64_t size() const noexcept { return last - first; }
};

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
  int64_t pages() const noexcept { return pages_; }  // open, holes included
  int64_t reserved_bytes() const noexcept { return reserved_; }

  // Moves the boundary so that the first num_pages pages may be written, without backing them. Returns
  // 0, or the errno of the call that failed. Takes no longer for more memory: a page table entry is
  // made by who touches it.
  [[nodiscard]] int try_open(int64_t num_pages) noexcept;

  // Backs the first num_pages pages, zeroed where they are new; requires pages() <= num_pages <=
  // max_pages. Returns 0, or the errno of the call that failed: then nothing has changed.
  [[nodiscard]] int try_commit(int64_t num_pages) noexcept;

  // Gives the memory behind the first num_pages pages back, from the end. The last of these is in no hole.
  void decommit_to(int64_t num_pages) noexcept;

  // Bytes that a hole frees.
  int64_t hole_bytes(PageRange hole) const noexcept;
  // Makes `run` part of a hole, which is `hole` afterwards: the run and the holes it touches. The pages of the run
  // will be zeros. False: the kernel refuses (locked memory), and the memory is still there.
  bool try_give_back(PageRange run, PageRange hole) noexcept;
  // Backs the first num_pages pages of a hole. Returns 0 or an errno; try_give_back() of them with the whole hole
  // undoes it, done or failed.
  [[nodiscard]] int try_restore(PageRange hole, int64_t num_pages) noexcept;
  // Whether the kernel may use huge pages: not while there are holes, of which a restored page would fill 2 MiB.
  void use_huge_pages(bool use) noexcept;

  // Bytes that the kernel holds for this array now.
  int64_t resident_bytes() const;

 private:
  // Offsets of whole OS pages; empty where end <= begin.
  struct Bytes {
    int64_t begin;
    int64_t end;
  };
  Bytes hole_of(PageRange hole) const noexcept;
  bool discard(Bytes bytes) noexcept;
  void split_huge_page(int64_t offset) noexcept;
  void zero(int64_t begin, int64_t end) noexcept;
  int64_t touched_bytes(int64_t num_pages) const noexcept;
  int64_t boundary_bytes(int64_t num_pages) const noexcept;

  std::byte* data_ = nullptr;
  int64_t page_bytes_ = 0;
  int64_t pages_ = 0;
  int64_t boundary_ = 0;
  int64_t reserved_ = 0;
  bool uses_huge_pages_ = true;
};

}  // namespace pagedkv
