// A GGUF file, checked before it is trusted: what it says about itself, and its tensors in place.
//
// The constructor reads the header, compares every tensor's bytes with the size of the file and, unless
// the header is all that is wanted, maps the file read-only; nothing is copied. Metadata is read through
// typed getters that refuse a value of the wrong type or outside its limits. Every failure is a ModelError
// that names the file, the value and the limit. Immutable afterwards, so threads may share it. A file that another process cuts
// short while it is mapped ends this one (SIGBUS): replace model files by renaming.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

struct ggml_backend_buffer;
struct ggml_context;
struct ggml_tensor;
struct gguf_context;

namespace pagedkv {

class GgufFile {
 public:
  enum class Contents { kHeader, kAll };  // of a header alone the tensors have shapes, no data

  explicit GgufFile(const std::string& path, Contents contents = Contents::kAll);
  ~GgufFile();
  GgufFile(const GgufFile&) = delete;
  GgufFile& operator=(const GgufFile&) = delete;

  const std::string& path() const noexcept { return path_; }

  std::vector<std::string> keys() const;  // in file order
  bool has(const std::string& key) const;
  // Empty where the key is absent.
  std::optional<std::string> text(const std::string& key) const;
  std::optional<bool> boolean(const std::string& key) const;
  // An integer of any width. An array is taken for its value when all its elements are equal, which
  // is how some converters write a value that could differ between layers.
  std::optional<int64_t> integer(const std::string& key, int64_t least, int64_t most) const;
  // A float32 or float64.
  std::optional<double> real(const std::string& key, double least, double most) const;
  // A scalar of any numeric type or a boolean, as a number, whatever its limits.
  std::optional<double> number(const std::string& key) const;
  std::optional<int64_t> array_length(const std::string& key) const;
  // Empty where the key is absent or holds something else than an array of booleans.
  std::optional<std::vector<bool>> boolean_array(const std::string& key) const;
  // The elements of an array of strings, as C strings; they live as long as the file.
  std::vector<const char*> text_array(const std::string& key) const;

  // Tensors, their data in the mapping if there is one. Owned by the file.
  std::vector<ggml_tensor*> tensors() const;
  ggml_tensor* tensor(const std::string& name) const;  // null where absent
  int64_t tensor_bytes() const noexcept { return tensor_bytes_; }

  // Reads the mapped tensors into memory, telling how much is there (0..1). A file of more than half the
  // machine's memory is left to come in as it is used.
  void populate(const std::function<void(float)>& progress) const;

  // Throws ModelError: "<path>: <what>".
  [[noreturn]] void fail(const std::string& what) const;

 private:
  struct FreeMeta {
    void operator()(gguf_context* meta) const noexcept;
  };
  struct FreeTensors {
    void operator()(ggml_context* context) const noexcept;
  };
  struct FreeBuffer {
    void operator()(ggml_backend_buffer* buffer) const noexcept;
  };
  struct Mapping {
    std::byte* data = nullptr;
    size_t size = 0;
    ~Mapping();
  };

  void check_counts(int fd) const;
  void read_header(int fd);
  void check_ranges() const;
  void index();
  void map(int fd);
  int64_t find(const std::string& key) const noexcept;  // -1 where absent
  [[noreturn]] void fail_type(const std::string& key, const char* wanted) const;

  std::string path_;
  int64_t file_bytes_ = 0;
  int64_t tensor_bytes_ = 0;
  Mapping mapping_;
  std::unique_ptr<gguf_context, FreeMeta> meta_;
  std::unique_ptr<ggml_context, FreeTensors> context_;
  std::unique_ptr<ggml_backend_buffer, FreeBuffer> buffer_;
  std::unordered_map<std::string_view, ggml_tensor*> by_name_;  // names live in the tensors
};

}  // namespace pagedkv
