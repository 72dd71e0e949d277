#include "core/page_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/numa.h"
#include "pagedkv/base/error.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif
#ifndef MADV_COLD
#define MADV_COLD 20  // Linux 5.4
#endif

namespace pagedkv {
namespace {

int64_t os_page() noexcept {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;

int64_t round_down(int64_t bytes, int64_t step) noexcept { return bytes / step * step; }
int64_t round_up(int64_t bytes, int64_t step) noexcept {
  return round_down(bytes + step - 1, step);
}

// Makes the kernel supply [begin, begin + bytes), which must be new: on kernels without
// MADV_POPULATE_WRITE it is written, with the zeros it would read as anyway. Returns an errno.
int populate(std::byte* begin, int64_t bytes) noexcept {
  if (bytes <= 0) return 0;
  int result;
  do {
    result = madvise(begin, static_cast<size_t>(bytes), MADV_POPULATE_WRITE);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return 0;
  if (errno != EINVAL && errno != ENOSYS) return errno;
  for (int64_t i = 0; i < bytes; i += os_page())
    *static_cast<volatile std::byte*>(begin + i) = std::byte{0};
  return 0;
}

}  // namespace

PageMemory::PageMemory(int64_t page_bytes, int64_t max_pages) : page_bytes_(page_bytes) {
  assert(page_bytes >= 1 && max_pages >= 1);
  static const std::vector<int> nodes = memory_nodes();  // may throw: before there is a mapping
  reserved_ = round_up(page_bytes * max_pages + kSlackBytes, os_page()) + os_page();
  void* const space = mmap(nullptr, static_cast<size_t>(reserved_), PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED)
    throw MemoryError("address space for " + std::to_string(max_pages) + " pages (" +
                      std::to_string(reserved_) + " bytes) was refused: " + std::strerror(errno));
  data_ = static_cast<std::byte*>(space);
  madvise(data_, static_cast<size_t>(reserved_), MADV_HUGEPAGE);  // where the kernel has them
  interleave(data_, static_cast<size_t>(reserved_), nodes);
}

PageMemory::PageMemory(PageMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      page_bytes_(other.page_bytes_),
      pages_(std::exchange(other.pages_, 0)),
      boundary_(std::exchange(other.boundary_, 0)),
      reserved_(std::exchange(other.reserved_, 0)),
      uses_huge_pages_(other.uses_huge_pages_) {}

PageMemory::~PageMemory() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(reserved_));
}

int64_t PageMemory::touched_bytes(int64_t num_pages) const noexcept {
  return num_pages == 0 ? 0 : round_up(num_pages * page_bytes_ + kSlackBytes, os_page());
}

int64_t PageMemory::boundary_bytes(int64_t num_pages) const noexcept {
  const int64_t touched = touched_bytes(num_pages);
  const int64_t boundary = round_up(touched, kBoundaryStep);
  // A huge page that ended between them would be backed as a whole.
  const auto huge_page = [&](int64_t at) {
    return reinterpret_cast<uintptr_t>(data_ + at) / kHugePage;
  };
  if (huge_page(touched) != huge_page(boundary)) return touched;
  return std::min(boundary, reserved_ - os_page());
}

int PageMemory::try_open(int64_t num_pages) noexcept {
  const int64_t new_boundary = boundary_bytes(num_pages);
  if (new_boundary <= boundary_) return 0;
  if (mprotect(data_ + boundary_, static_cast<size_t>(new_boundary - boundary_),
               PROT_READ | PROT_WRITE) != 0)
    return errno;
  boundary_ = new_boundary;
  return 0;
}

int PageMemory::try_commit(int64_t num_pages) noexcept {
  assert(num_pages >= pages_);
  const int64_t touched = touched_bytes(pages_);
  const int64_t new_touched = touched_bytes(num_pages);
  if (const int error = try_open(num_pages)) return error;
  const int64_t old_pages = std::exchange(pages_, num_pages);
  const int error = populate(data_ + touched, new_touched - touched);
  if (error != 0) decommit_to(old_pages);
  return error;
}

void PageMemory::decommit_to(int64_t num_pages) noexcept {
  assert(num_pages <= pages_);
  const int64_t touched = touched_bytes(num_pages);
  const int64_t boundary = boundary_bytes(num_pages);
  if (num_pages < pages_) zero(num_pages * page_bytes_, touched);
  discard({touched, boundary_});
  if (boundary_ > boundary &&
      mprotect(data_ + boundary, static_cast<size_t>(boundary_ - boundary), PROT_NONE) == 0)
    boundary_ = boundary;
  pages_ = num_pages;
}

// ---- holes

PageMemory::Bytes PageMemory::hole_of(PageRange hole) const noexcept {
  const int64_t slack = hole.first == 0 ? 0 : kSlackBytes;  // of the page before
  return {round_up(hole.first * page_bytes_ + slack, os_page()),
          round_down(hole.last * page_bytes_, os_page())};
}

int64_t PageMemory::hole_bytes(PageRange hole) const noexcept {
  const Bytes bytes = hole_of(hole);
  return std::max<int64_t>(0, bytes.end - bytes.begin);
}

bool PageMemory::try_give_back(PageRange run, PageRange hole) noexcept {
  assert(hole.first <= run.first && run.last <= hole.last && hole.last < pages_);
  const Bytes freed = hole_of(hole);
  const int64_t begin = run.first * page_bytes_;
  const int64_t end = run.last * page_bytes_;
  // What the holes beside the run have freed already is left alone.
  if (!discard({std::max(freed.begin, round_down(begin, os_page())),
                std::min(freed.end, round_up(end + kSlackBytes, os_page()))}))
    return false;
  zero(begin, std::min(end, freed.begin));
  zero(std::max({begin, freed.begin, freed.end}), end);
  return true;
}

int PageMemory::try_restore(PageRange hole, int64_t num_pages) noexcept {
  const Bytes freed = hole_of(hole);
  const Bytes rest = hole_of({hole.first + num_pages, hole.last});
  const int64_t end = rest.begin < rest.end ? rest.begin : freed.end;
  return populate(data_ + freed.begin, end - freed.begin);
}

// One call for the whole reservation: another for a part of it would cost a mapping.
void PageMemory::use_huge_pages(bool use) noexcept {
  if (use == uses_huge_pages_) return;
  uses_huge_pages_ = use;
  madvise(data_, static_cast<size_t>(reserved_), use ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

bool PageMemory::discard(Bytes bytes) noexcept {
  if (bytes.end <= bytes.begin) return true;
  split_huge_page(bytes.begin);
  split_huge_page(bytes.end);
  return madvise(data_ + bytes.begin, static_cast<size_t>(bytes.end - bytes.begin),
                 MADV_DONTNEED) == 0;
}

// Splits the huge page that reaches across this offset, if there is one: the kernel does so in order to make one
// OS page of it cold.
void PageMemory::split_huge_page(int64_t offset) noexcept {
  const auto at = reinterpret_cast<uintptr_t>(data_ + offset);
  const uintptr_t huge_page = at / kHugePage * kHugePage;
  const auto open = reinterpret_cast<uintptr_t>(data_);
  if (at == huge_page || huge_page < open ||
      huge_page + kHugePage > open + static_cast<uintptr_t>(boundary_))
    return;
  madvise(data_ + offset, static_cast<size_t>(os_page()), MADV_COLD);
}

void PageMemory::zero(int64_t begin, int64_t end) noexcept {
  if (begin < end) std::memset(data_ + begin, 0, static_cast<size_t>(end - begin));
}

int64_t PageMemory::resident_bytes() const {
  if (boundary_ == 0) return 0;
  std::vector<unsigned char> held(static_cast<size_t>(boundary_ / os_page()));
  if (mincore(data_, static_cast<size_t>(boundary_), held.data()) != 0)
    throw std::runtime_error(std::string("mincore: ") + std::strerror(errno));
  return os_page() *
         std::count_if(held.begin(), held.end(), [](unsigned char h) { return (h & 1) != 0; });
}

}  // namespace pagedkv
