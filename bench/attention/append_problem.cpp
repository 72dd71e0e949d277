#include "append_problem.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>

namespace pagedkv::bench {

AppendProblem::AppendProblem(const apps::AttentionCase& c)
    : case_(c), pool_(apps::pool_options(c)) {
  slots_.resize(c.num_queries());
  size_t at = 0;
  for (const apps::SequenceLength& s : c.sequences) {
    BlockTable& table = tables_.emplace_back(pool_);
    table.append(s.seq_len);
    table.slot_mapping(0, s.seq_len - s.query_len, std::span(slots_).subspan(at, s.query_len));
    at += s.query_len;
  }
  keys_.resize(slots_.size() * c.heads.kv * c.key_dim);
  values_.resize(slots_.size() * c.heads.kv * c.value_dim);
  apps::fill(keys_, 1);
  apps::fill(values_, 2);
  args_.keys = keys_.data();
  args_.values = values_.data();
  args_.pages = pool_.layer_pages(0);
  args_.slot_mapping = slots_.data();
  args_.num_tokens = static_cast<int>(slots_.size());
}

void AppendProblem::check(const KernelSet& set, Executor& executor) {
  const int64_t tokens = std::min<int64_t>(256, args_.num_tokens);
  if (!set.store(args_, executor)) throw std::logic_error("a finite row was not stored");
  const std::vector<float> stored = read_back(tokens);
  StoreArgs first = args_;
  first.num_tokens = static_cast<int>(tokens);
  if (!kernel_sets().back().store(first, executor))
    throw std::logic_error("a finite row was not stored");
  const std::vector<float> expected = read_back(tokens);
  if (std::memcmp(stored.data(), expected.data(), stored.size() * sizeof(float)) != 0)
    throw std::runtime_error(std::string("rows stored by kernel set ") + set.name +
                             " differ from the reference");
}

apps::CallTimes AppendProblem::time(const KernelSet& set, Executor& executor, int runs) {
  return apps::time_calls(runs, [&] { static_cast<void>(set.store(args_, executor)); });
}

int64_t AppendProblem::rows() const { return 2 * case_.num_queries() * case_.heads.kv; }

int64_t AppendProblem::source_bytes() const {
  return static_cast<int64_t>((keys_.size() + values_.size()) * sizeof(float));
}

int64_t AppendProblem::stored_bytes() const {
  return case_.num_queries() * pool_.bytes_per_token();
}

std::vector<float> AppendProblem::read_back(int64_t tokens) {
  const int64_t key_floats = tokens * case_.heads.kv * case_.key_dim;
  std::vector<float> x(key_floats + tokens * case_.heads.kv * case_.value_dim);
  ThreadPool one(1);
  FetchArgs fetch;
  fetch.pages = args_.pages;
  fetch.slot_mapping = slots_.data();
  fetch.num_tokens = static_cast<int>(tokens);
  fetch.keys = x.data();
  fetch.values = x.data() + key_floats;
  kernel_sets().back().fetch(fetch, one);
  return x;
}

}  // namespace pagedkv::bench
