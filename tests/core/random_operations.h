// Random operations on something and its model, for RapidCheck: lists of them are drawn, and a failing one is cut down.
// RC_PARAMS="seed=…" draws others, PAGEDKV_TEST_SCALE more.
#pragma once

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

namespace pagedkv::testing {

struct Op {
  int kind = 0;       // 0..99, which the session knows
  int size = 0;       // 0..39, tokens mostly
  uint32_t seed = 0;  // of all else
};

inline void showValue(const Op& op, std::ostream& out) {
  out << "{.kind = " << op.kind << ", .size = " << op.size << ", .seed = " << op.seed << '}';
}

// splitmix64 (Steele, Lea, Flood 2014).
class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 77) {}
  int operator()(int n) {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<int>((z ^ (z >> 31)) % static_cast<uint64_t>(n));
  }
  bool one_in(int n) { return (*this)(n) == 0; }
  template <class T>
  T of(std::initializer_list<T> values) {
    return values.begin()[(*this)(static_cast<int>(values.size()))];
  }

 private:
  uint64_t state_;
};

struct RandomCounts {
  int64_t operations = 0, sessions = 0;
};

}  // namespace pagedkv::testing

namespace rc {
template <>
struct Arbitrary<pagedkv::testing::Op> {
  static Gen<pagedkv::testing::Op> arbitrary() {
    using pagedkv::testing::Op;
    return gen::build<Op>(gen::set(&Op::kind, gen::inRange(0, 100)),
                          gen::set(&Op::size, gen::inRange(0, 40)), gen::set(&Op::seed));
  }
};
}  // namespace rc

namespace pagedkv::testing {

// Sessions of 100,000 operations in all, or more. A Session is made from a uint32_t; step(const Op&) and then
// finish(Session&) tell what is wrong, if anything. rc_params: where the variable is not set.
template <class Session, class Finish>
void run_random_sessions(const char* rc_params, const Finish& finish, RandomCounts& counts) {
  const auto property = [&](uint32_t seed, const std::vector<Op>& ops) {
    Session session(seed);
    for (size_t i = 0; i < ops.size(); ++i) {
      ++counts.operations;
      const std::string problem = session.step(ops[i]);
      if (!problem.empty()) RC_FAIL("operation " + std::to_string(i) + ", " + problem);
    }
    ++counts.sessions;
    const std::string problem = finish(session);
    if (!problem.empty()) RC_FAIL(problem);
  };
  const char* scale = std::getenv("PAGEDKV_TEST_SCALE");
  const auto wanted =
      static_cast<int64_t>(100'000 * (scale != nullptr ? std::max(1.0, std::atof(scale)) : 1.0));
  setenv("RC_PARAMS", rc_params, 0);
  rc::detail::TestParams params = rc::detail::configuration().testParams;
  while (counts.operations < wanted) {
    const rc::detail::TestResult result =
        rc::detail::checkTestable(property, rc::detail::TestMetadata(), params);
    std::ostringstream text;
    rc::detail::printResultMessage(result, text);
    ASSERT_TRUE(result.is<rc::detail::SuccessResult>()) << text.str();
    ++params.seed;
  }
  EXPECT_GE(counts.operations, wanted);
}

}  // namespace pagedkv::testing
