#include "models/ggml/arithmetic.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <tuple>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

namespace pagedkv {
namespace {

// A way to multiply: fewer rows than min_rows are padded.
struct Way {
  int min_rows;
  bool use_reference;
};

// Cheapest first. What is free or nearly (a second row costs about 5 % of F16 products): tried in `auto`.
constexpr Way kNearlyFree[] = {{1, false}, {2, false}};
// For the types that tile from 8 rows on. Products row by row keep the speed of generation and make wide
// ones slower (one thread: Q4_K 3.4 times, all of SmolLM2 Q4_K_M 183 prompt tokens/s instead of 222); padding a
// lone row to 8 keeps prompts and makes generation 4 to 8 times slower, where most of a request's time goes.
constexpr Way kAnyPrice[] = {{1, true}, {2, true}, {8, false}, {8, true}};

constexpr std::array kRowCounts = {1, 2, 7, 8, 9, 33};
constexpr int kMostRows = 33;

uint64_t splitmix64(uint64_t& state) {
  uint64_t z = state += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// Products of one weight with chosen rows of activations, by ggml as a step would have them.
class Product {
 public:
  // Of a large weight the first rows, as many more as leave its row count's remainder, so that a kernel's tail
  // is met too; the whole test of a file stays below 0.3 s.
  explicit Product(const ggml_tensor* weight) : weight_(weight), in_(weight->ne[0]) {
    const int64_t most = std::clamp<int64_t>((int64_t{1} << 20) / in_, 64, 256) / 64 * 64;
    out_ = weight->ne[1] <= most ? weight->ne[1] : most + weight->ne[1] % 64;
    uint64_t state = static_cast<uint64_t>(in_);
    activations_.resize(static_cast<size_t>(in_ * (2 * kMostRows)));
    for (float& a : activations_) a = static_cast<float>(splitmix64(state) >> 40) * 0x1p-23f - 1.0f;
  }

  int64_t out() const noexcept { return out_; }

  // [rows, out] of activation rows [first, first + rows).
  std::vector<float> run(int first, int rows, Way way) const {
    const int padded = std::max(rows, way.min_rows);
    std::vector<std::byte> memory(8 * ggml_tensor_overhead() +
                                  ggml_graph_overhead_custom(8, false));
    ggml_context* c = ggml_init({memory.size(), memory.data(), /*no_alloc=*/true});
    ggml_tensor* w = ggml_new_tensor_2d(c, weight_->type, in_, out_);
    w->data = weight_->data;
    w->buffer = weight_->buffer;
    ggml_tensor* x = ggml_new_tensor_2d(c, GGML_TYPE_F32, in_, padded);
    x->data = const_cast<float*>(activations_.data()) + first * in_;
    ggml_tensor* y = ggml_mul_mat(c, w, x);
    std::vector<float> products(static_cast<size_t>(out_ * padded));
    y->data = products.data();
    ggml_cgraph* graph = ggml_new_graph_custom(c, 8, false);
    ggml_build_forward_expand(graph, y);
    ggml_cplan plan = ggml_graph_plan(graph, 1, nullptr);
    std::vector<uint8_t> work(plan.work_size);
    plan.work_data = work.data();
    plan.use_ref = way.use_reference;
    const ggml_status status = ggml_graph_compute(graph, &plan);
    ggml_free(c);
    if (status != GGML_STATUS_SUCCESS)
      throw std::runtime_error("ggml could not multiply in the self-test");
    products.resize(static_cast<size_t>(out_ * rows));
    return products;
  }

 private:
  const ggml_tensor* weight_;
  int64_t in_, out_;
  std::vector<float> activations_;  // [2 * kMostRows, in_]: enough for padding behind any start
};

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

void hash_bits(std::span<const float> values, uint64_t& hash) {  // FNV-1a over words
  for (const float value : values) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    hash = (hash ^ bits) * 0x100000001b3ull;
  }
}

// Whether every number of rows gives the bits that the largest gives; folds them into `hash`.
bool keeps_bits(const Product& product, Way way, uint64_t& hash) {
  const std::vector<float> all = product.run(0, kMostRows, way);
  for (const int rows : kRowCounts) {
    const int first = rows == kMostRows ? 0 : (kMostRows - rows) / 2;
    const std::vector<float> some = product.run(first, rows, way);
    if (!same_bits(some,
                   std::span(all).subspan(static_cast<size_t>(first * product.out()), some.size())))
      return false;
  }
  hash_bits(all, hash);
  return true;
}

// One weight of each type and shape.
std::vector<const ggml_tensor*> representatives(const std::vector<ggml_tensor*>& matrices) {
  std::set<std::tuple<ggml_type, int64_t, int64_t>> seen;
  std::vector<const ggml_tensor*> out;
  for (const ggml_tensor* t : matrices) {
    if (seen.emplace(t->type, t->ne[0], t->ne[1]).second) out.push_back(t);
  }
  return out;
}

// The first type whose products depend on the number of rows; empty if none.
std::optional<std::string> try_way(const std::vector<const ggml_tensor*>& weights, Way way,
                                   uint64_t& hash) {
  hash = 0xcbf29ce484222325ull;
  for (const ggml_tensor* w : weights) {
    if (!keeps_bits(Product(w), way, hash)) return ggml_type_name(w->type);
  }
  return std::nullopt;
}

std::string cpu_features() {
  using GetFeatures = ggml_backend_feature* (*)(ggml_backend_reg_t);
  const auto get = reinterpret_cast<GetFeatures>(
      ggml_backend_reg_get_proc_address(ggml_backend_cpu_reg(), "ggml_backend_get_features"));
  std::string out;
  if (!get) return out;
  for (const ggml_backend_feature* f = get(ggml_backend_cpu_reg()); f->name; ++f) {
    out += std::string(out.empty() ? "" : " ") + f->name + "=" + f->value;
  }
  return out;
}

std::string hex(uint64_t value) {
  std::string out(16, '0');
  for (int i = 15; i >= 0; --i, value >>= 4) out[i] = "0123456789abcdef"[value & 15];
  return out;
}

// Whatever changes a bit of a stored page: ggml's version, build and CPU features, the way, and the products
// that the self-test saw, which stand for what environment variables and the like may change.
std::string make_id(const Arithmetic& a, uint64_t products) {
  return std::string("ggml ") + ggml_version() + " " + ggml_commit() + " build " +
         PAGEDKV_LLAMA_BUILD_ID + "; " + cpu_features() + "; rows " + std::to_string(a.min_rows) +
         (a.use_reference ? ", row by row" : "") +
         (a.exact ? ", exact " + hex(products) : ", not exact");
}

std::string why_exact(Way way) {
  if (way.use_reference)
    return "products row by row, so that their number does not matter; prompts take longer";
  if (way.min_rows > 1) return "fewer than " + std::to_string(way.min_rows) + " rows are padded";
  return "products do not depend on the number of rows";
}

}  // namespace

Arithmetic choose_arithmetic(const std::vector<ggml_tensor*>& matrices, ExactMode mode) {
  ggml_cpu_init();
  Arithmetic out;
  uint64_t hash = 0;
  const auto weights = representatives(matrices);
  std::string type;  // the one in the way
  const auto try_all = [&](std::span<const Way> ways) {
    for (const Way way : ways) {
      if (const auto failed = try_way(weights, way, hash)) {
        type = *failed;
        continue;
      }
      out.exact = true;
      out.min_rows = way.min_rows;
      out.use_reference = way.use_reference;
      out.reason = why_exact(way);
      return;
    }
  };
  if (mode != ExactMode::kOff) try_all(kNearlyFree);
  if (mode == ExactMode::kOn && !out.exact) try_all(kAnyPrice);
  if (mode == ExactMode::kOn && !out.exact) {
    throw std::runtime_error("--exact on: products of type " + type +
                             " depend on the number of rows however they are computed");
  }
  if (mode == ExactMode::kOff) {
    out.reason = "--exact off";
  } else if (!out.exact) {
    out.reason = "products of type " + type +
                 " depend on the number of rows; --exact on avoids that, with slower prompts";
  }
  out.id = make_id(out, hash);
  return out;
}

}  // namespace pagedkv
