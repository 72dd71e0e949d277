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

namespace pagedkv {
namespace {

int64_t os_page() noexcept {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;

int64_t round_up(int64_t bytes, int64_t step) noexcept { return (bytes + step - 1) / step * step; }

// Makes the kernel supply [begin, begin + bytes), which must be new: on kernels without
// MADV_POPULATE_WRITE it is written, with the zeros it would read as anyway. Returns an errno.
int populate(std::byte* begin, int64_t bytes) noexcept {
  if (bytes == 0) return 0;
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
      reserved_(std::exchange(other.reserved_, 0)) {}

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
  if (boundary_ > touched)
    madvise(data_ + touched, static_cast<size_t>(boundary_ - touched), MADV_DONTNEED);
  if (boundary_ > boundary &&
      mprotect(data_ + boundary, static_cast<size_t>(boundary_ - boundary), PROT_NONE) == 0)
    boundary_ = boundary;
  pages_ = num_pages;
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
