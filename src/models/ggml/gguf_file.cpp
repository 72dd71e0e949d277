#include "models/ggml/gguf_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "gguf.h"
#include "models/ggml/ggml_log.h"
#include "models/model.h"

namespace pagedkv {
namespace {

// ggml places tensors at multiples of this and aborts on anything else (ggml-impl.h).
constexpr size_t kTensorAlignment = 32;

// Each takes some tens of bytes in the file and a thousand in memory; no model has a hundredth of these.
constexpr uint64_t kMostTensors = uint64_t{1} << 17;
constexpr uint64_t kMostKeys = uint64_t{1} << 16;

std::string show(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
};

struct CloseFile {
  void operator()(std::FILE* file) const noexcept { std::fclose(file); }
};

uint64_t memory_of_the_machine() {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

bool is_integer(gguf_type type) {
  switch (type) {
    case GGUF_TYPE_UINT8:
    case GGUF_TYPE_INT8:
    case GGUF_TYPE_UINT16:
    case GGUF_TYPE_INT16:
    case GGUF_TYPE_UINT32:
    case GGUF_TYPE_INT32:
    case GGUF_TYPE_UINT64:
    case GGUF_TYPE_INT64:
      return true;
    default:
      return false;
  }
}

template <class T>
T element(const void* data, int64_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + i * sizeof(T), sizeof(T));
  return value;
}

// Values beyond int64 become its maximum: they are out of every limit we have.
int64_t integer_element(gguf_type type, const void* data, int64_t i) {
  switch (type) {
    case GGUF_TYPE_UINT8:
      return element<uint8_t>(data, i);
    case GGUF_TYPE_INT8:
      return element<int8_t>(data, i);
    case GGUF_TYPE_UINT16:
      return element<uint16_t>(data, i);
    case GGUF_TYPE_INT16:
      return element<int16_t>(data, i);
    case GGUF_TYPE_UINT32:
      return element<uint32_t>(data, i);
    case GGUF_TYPE_INT32:
      return element<int32_t>(data, i);
    case GGUF_TYPE_INT64:
      return element<int64_t>(data, i);
    case GGUF_TYPE_UINT64: {
      const uint64_t value = element<uint64_t>(data, i);
      constexpr auto kMost = std::numeric_limits<int64_t>::max();
      return value > static_cast<uint64_t>(kMost) ? kMost : static_cast<int64_t>(value);
    }
    default:
      return 0;
  }
}

}  // namespace

void GgufFile::FreeMeta::operator()(gguf_context* meta) const noexcept { gguf_free(meta); }
void GgufFile::FreeTensors::operator()(ggml_context* context) const noexcept { ggml_free(context); }
void GgufFile::FreeBuffer::operator()(ggml_backend_buffer* buffer) const noexcept {
  ggml_backend_buffer_free(buffer);
}
GgufFile::Mapping::~Mapping() {
  if (data) munmap(data, size);
}

GgufFile::GgufFile(const std::string& path, Contents contents) : path_(path) {
  const Descriptor file{
      open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};  // a FIFO would block
  if (file.fd < 0) fail(std::string("cannot be opened: ") + std::strerror(errno));
  struct stat status;
  if (fstat(file.fd, &status) != 0) fail(std::string("cannot be read: ") + std::strerror(errno));
  if (!S_ISREG(status.st_mode)) fail("is not a regular file");
  file_bytes_ = status.st_size;
  check_counts(file.fd);
  read_header(file.fd);
  check_ranges();
  index();
  if (contents == Contents::kAll) map(file.fd);
}

GgufFile::~GgufFile() = default;

// gguf would believe the counts and take memory for them.
void GgufFile::check_counts(int fd) const {
  struct {
    char magic[4];
    uint32_t version;
    uint64_t tensors, keys;
  } header;
  if (pread(fd, &header, sizeof header, 0) != static_cast<ssize_t>(sizeof header)) return;
  if (std::memcmp(header.magic, "GGUF", 4) != 0) return;  // what is wrong, gguf says
  if (header.tensors > kMostTensors || header.keys > kMostKeys) {
    fail("claims " + std::to_string(header.tensors) + " tensors and " +
         std::to_string(header.keys) + " keys; at most " + std::to_string(kMostTensors) + " and " +
         std::to_string(kMostKeys) + " are read");
  }
}

void GgufFile::read_header(int fd) {
  const int copy = dup(fd);
  const std::unique_ptr<std::FILE, CloseFile> file(copy < 0 ? nullptr : fdopen(copy, "rb"));
  if (!file) fail(std::string("cannot be read: ") + std::strerror(errno));
  const LogCapture log;
  ggml_context* context = nullptr;
  try {
    meta_.reset(gguf_init_from_file_ptr(file.get(), {/*no_alloc=*/true, &context}));
  } catch (const std::exception& error) {  // a header that asks for more memory than there is
    fail(std::string("cannot be read as GGUF: ") + error.what());
  }
  context_.reset(context);
  if (!meta_)
    fail("cannot be read as GGUF (" + std::to_string(file_bytes_) + " bytes): " + log.text());
  if (integer("split.count", 0, 65535).value_or(0) > 1) {
    fail(
        "is one part of a split model, which is not supported; join the parts with "
        "llama-gguf-split --merge");
  }
}

// gguf has checked that the tensors' bytes are contiguous and that their sums do not overflow.
void GgufFile::check_ranges() const {
  const size_t start = gguf_get_data_offset(meta_.get());
  const int64_t count = gguf_get_n_tensors(meta_.get());
  if (count == 0) fail("holds no tensors");
  if (start % kTensorAlignment != 0 || gguf_get_alignment(meta_.get()) % kTensorAlignment != 0) {
    fail("general.alignment is " + std::to_string(gguf_get_alignment(meta_.get())) +
         "; a multiple of 32 is needed");
  }
  const uint64_t room = static_cast<uint64_t>(file_bytes_) - start;  // start was read from the file
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t offset = gguf_get_tensor_offset(meta_.get(), i);
    const uint64_t size = gguf_get_tensor_size(meta_.get(), i);
    if (size == 0)
      fail(std::string("tensor ") + gguf_get_tensor_name(meta_.get(), i) + " is empty");
    if (offset > room || size > room - offset) {
      fail(std::string("is cut short: tensor ") + gguf_get_tensor_name(meta_.get(), i) +
           " ends at byte " + std::to_string(start + offset + size) + ", the file at byte " +
           std::to_string(file_bytes_));
    }
  }
}

void GgufFile::index() {
  for (ggml_tensor* t : tensors()) {
    tensor_bytes_ += static_cast<int64_t>(ggml_nbytes(t));
    by_name_.emplace(t->name, t);
  }
}

void GgufFile::map(int fd) {
  void* data = mmap(nullptr, static_cast<size_t>(file_bytes_), PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) fail(std::string("cannot be mapped: ") + std::strerror(errno));
  mapping_.data = static_cast<std::byte*>(data);
  mapping_.size = static_cast<size_t>(file_bytes_);
  const size_t start = gguf_get_data_offset(meta_.get());
  buffer_.reset(ggml_backend_cpu_buffer_from_ptr(mapping_.data + start, mapping_.size - start));
  if (!buffer_) fail("cannot be given to ggml");
  int64_t i = 0;  // gguf makes the tensors in the order of the file
  for (ggml_tensor* t : tensors()) {
    std::byte* data = mapping_.data + start + gguf_get_tensor_offset(meta_.get(), i++);
    ggml_backend_tensor_alloc(buffer_.get(), t, data);
  }
}

void GgufFile::populate(const std::function<void(float)>& progress) const {
  constexpr size_t kStep = size_t{16} << 20;
  if (mapping_.size > memory_of_the_machine() / 2) {
    if (progress) progress(1.0f);
    return;
  }
  for (size_t done = 0; done < mapping_.size;) {
    const size_t bytes = std::min(kStep, mapping_.size - done);
#ifdef MADV_POPULATE_READ
    // Older kernels do not know it (EINVAL); then pages come in when first read. EFAULT: past the end.
    if (madvise(mapping_.data + done, bytes, MADV_POPULATE_READ) != 0 &&
        (errno == EFAULT || errno == EHWPOISON)) {
      fail("cannot be read at byte " + std::to_string(done) + ": " + std::strerror(errno));
    }
#endif
    done += bytes;
    if (progress) progress(static_cast<float>(done) / static_cast<float>(mapping_.size));
  }
}

std::vector<std::string> GgufFile::keys() const {
  std::vector<std::string> out;
  for (int64_t i = 0; i < gguf_get_n_kv(meta_.get()); ++i)
    out.emplace_back(gguf_get_key(meta_.get(), i));
  return out;
}

int64_t GgufFile::find(const std::string& key) const noexcept {
  return gguf_find_key(meta_.get(), key.c_str());
}

bool GgufFile::has(const std::string& key) const { return find(key) >= 0; }

std::optional<std::string> GgufFile::text(const std::string& key) const {
  const int64_t id = find(key);
  if (id < 0) return std::nullopt;
  if (gguf_get_kv_type(meta_.get(), id) != GGUF_TYPE_STRING) fail_type(key, "a string");
  return gguf_get_val_str(meta_.get(), id);
}

std::optional<bool> GgufFile::boolean(const std::string& key) const {
  const int64_t id = find(key);
  if (id < 0) return std::nullopt;
  if (gguf_get_kv_type(meta_.get(), id) != GGUF_TYPE_BOOL) fail_type(key, "a boolean");
  return gguf_get_val_bool(meta_.get(), id);
}

std::optional<int64_t> GgufFile::integer(const std::string& key, int64_t least,
                                         int64_t most) const {
  const int64_t id = find(key);
  if (id < 0) return std::nullopt;
  gguf_type type = gguf_get_kv_type(meta_.get(), id);
  const bool is_array = type == GGUF_TYPE_ARRAY;
  if (is_array) type = gguf_get_arr_type(meta_.get(), id);
  if (!is_integer(type)) fail_type(key, "an integer");
  const int64_t count = is_array ? static_cast<int64_t>(gguf_get_arr_n(meta_.get(), id)) : 1;
  if (count == 0) fail(key + " is an empty array; an integer is needed");
  const void* data =
      is_array ? gguf_get_arr_data(meta_.get(), id) : gguf_get_val_data(meta_.get(), id);
  const int64_t value = integer_element(type, data, 0);
  for (int64_t i = 1; i < count; ++i) {
    if (integer_element(type, data, i) == value) continue;
    fail(key + " differs between layers (" + std::to_string(value) + " and " +
         std::to_string(integer_element(type, data, i)) + "), which is not supported");
  }
  if (value < least || value > most) {
    fail(key + " is " + std::to_string(value) + "; it must be in " + std::to_string(least) + ".." +
         std::to_string(most));
  }
  return value;
}

std::optional<double> GgufFile::number(const std::string& key) const {
  const int64_t id = find(key);
  if (id < 0) return std::nullopt;
  const gguf_type type = gguf_get_kv_type(meta_.get(), id);
  if (type == GGUF_TYPE_FLOAT32) return gguf_get_val_f32(meta_.get(), id);
  if (type == GGUF_TYPE_FLOAT64) return gguf_get_val_f64(meta_.get(), id);
  if (type == GGUF_TYPE_BOOL) return gguf_get_val_bool(meta_.get(), id) ? 1 : 0;
  if (!is_integer(type)) fail_type(key, "a number");
  return static_cast<double>(integer_element(type, gguf_get_val_data(meta_.get(), id), 0));
}

std::optional<double> GgufFile::real(const std::string& key, double least, double most) const {
  const int64_t id = find(key);
  if (id < 0) return std::nullopt;
  const gguf_type type = gguf_get_kv_type(meta_.get(), id);
  if (type != GGUF_TYPE_FLOAT32 && type != GGUF_TYPE_FLOAT64) fail_type(key, "a float");
  const double value = *number(key);
  if (!(value >= least && value <= most)) {  // a NaN fails both
    fail(key + " is " + show(value) + "; it must be in " + show(least) + ".." + show(most));
  }
  return value;
}

std::optional<std::vector<bool>> GgufFile::boolean_array(const std::string& key) const {
  const int64_t id = find(key);
  if (id < 0 || gguf_get_kv_type(meta_.get(), id) != GGUF_TYPE_ARRAY ||
      gguf_get_arr_type(meta_.get(), id) != GGUF_TYPE_BOOL)
    return std::nullopt;
  const auto* data = static_cast<const int8_t*>(gguf_get_arr_data(meta_.get(), id));
  std::vector<bool> out(gguf_get_arr_n(meta_.get(), id));
  for (size_t i = 0; i < out.size(); ++i) out[i] = data[i] != 0;
  return out;
}

std::optional<int64_t> GgufFile::array_length(const std::string& key) const {
  const int64_t id = find(key);
  if (id < 0) return std::nullopt;
  if (gguf_get_kv_type(meta_.get(), id) != GGUF_TYPE_ARRAY) fail_type(key, "an array");
  return static_cast<int64_t>(gguf_get_arr_n(meta_.get(), id));
}

std::vector<const char*> GgufFile::text_array(const std::string& key) const {
  const int64_t id = find(key);
  if (id < 0) return {};
  if (gguf_get_kv_type(meta_.get(), id) != GGUF_TYPE_ARRAY ||
      gguf_get_arr_type(meta_.get(), id) != GGUF_TYPE_STRING) {
    fail_type(key, "an array of strings");
  }
  std::vector<const char*> out(gguf_get_arr_n(meta_.get(), id));
  for (size_t i = 0; i < out.size(); ++i) out[i] = gguf_get_arr_str(meta_.get(), id, i);
  return out;
}

std::vector<ggml_tensor*> GgufFile::tensors() const {
  std::vector<ggml_tensor*> out;
  ggml_context* context = context_.get();
  for (ggml_tensor* t = ggml_get_first_tensor(context); t; t = ggml_get_next_tensor(context, t))
    out.push_back(t);
  return out;
}

ggml_tensor* GgufFile::tensor(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

void GgufFile::fail(const std::string& what) const { throw ModelError(path_ + ": " + what); }

void GgufFile::fail_type(const std::string& key, const char* wanted) const {
  const int64_t id = find(key);
  const gguf_type type = gguf_get_kv_type(meta_.get(), id);
  std::string found = gguf_type_name(type);
  if (type == GGUF_TYPE_ARRAY)
    found += std::string(" of ") + gguf_type_name(gguf_get_arr_type(meta_.get(), id));
  fail(key + " is of type " + found + "; " + wanted + " is needed");
}

}  // namespace pagedkv
