#include "engine/text_stream.h"

#include <gtest/gtest.h>

#include <random>
#include <stdexcept>

namespace pagedkv {
namespace {

std::string feed(TextStream& stream, const std::vector<std::string>& parts) {
  std::string out;
  for (const auto& p : parts) out += stream.push(p);
  return out;
}

TEST(TextStream, PassesPlainTextAtOnce) {
  TextStream s;
  EXPECT_EQ(s.push("abc"), "abc");
  EXPECT_EQ(s.finish(), "");
}

TEST(TextStream, HoldsACharacterUntilItIsWhole) {
  TextStream s;
  EXPECT_EQ(s.push("\xf0"), "");
  EXPECT_EQ(s.push("\x9f"), "");
  EXPECT_EQ(s.push("\xa6"), "");
  EXPECT_EQ(s.push("\x99"), "\xf0\x9f\xa6\x99");
}

TEST(TextStream, AnUnfinishedCharacterBecomesOneReplacementAtTheEnd) {
  TextStream s;
  EXPECT_EQ(feed(s, {"a", "\xf0", "\x9f"}), "a");
  EXPECT_EQ(s.finish(), "\xef\xbf\xbd");
}

TEST(TextStream, BytesThatAreNoCharacterBecomeReplacements) {
  TextStream s;
  EXPECT_EQ(s.push("a\xff"
                   "b\xc0\xaf"),
            "a\xef\xbf\xbd"
            "b\xef\xbf\xbd\xef\xbf\xbd");
  EXPECT_EQ(valid_utf8("\xe2\x82"
                       "A"),
            "\xef\xbf\xbd"
            "A");
  EXPECT_EQ(valid_utf8("\xed\xa0\x80"), "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");  // a surrogate
}

TEST(TextStream, EndsBeforeAStopTextSpreadOverTokens) {
  TextStream s({"GHI"});
  EXPECT_EQ(feed(s, {"D", "E", "F", "G", "H", "I", "J"}), "DEF");
  EXPECT_TRUE(s.stopped());
  EXPECT_EQ(s.finish(), "");
}

TEST(TextStream, GivesBackWhatOnlyLookedLikeAStopText) {
  TextStream s({"GHX"});
  EXPECT_EQ(feed(s, {"F", "G", "H"}), "F");
  EXPECT_EQ(s.push("I"), "GHI");
  EXPECT_FALSE(s.stopped());
}

TEST(TextStream, ReleasesAHeldBeginningAtTheEnd) {
  TextStream s({"GHX"});
  EXPECT_EQ(feed(s, {"F", "G", "H"}), "F");
  EXPECT_EQ(s.finish(), "GH");
}

TEST(TextStream, TakesTheEarliestOfSeveralStopTexts) {
  TextStream s({"cd", "bcx", "b"});
  EXPECT_EQ(s.push("abcd"), "a");
  EXPECT_TRUE(s.stopped());
}

TEST(TextStream, RefusesAnEmptyStopText) { EXPECT_THROW(TextStream({""}), std::invalid_argument); }

// However a text is cut into tokens, what is shown is the same and is valid UTF-8 at every moment.
TEST(TextStream, DoesNotDependOnHowTheTextIsCut) {
  std::mt19937 random(7);
  const std::string text = "h\xc3\xa9llo \xf0\x9f\xa6\x99 w\xe2\x82\xacrld\xff stop STOPPED";
  for (const auto& stops :
       {std::vector<std::string>{}, {"STOP"}, {"w\xe2\x82\xac"}, {"zzz", "\xa6"}}) {
    TextStream whole(stops);
    const std::string want = whole.push(text) + whole.finish();
    for (int round = 0; round < 500; ++round) {
      TextStream s(stops);
      std::string got;
      for (size_t i = 0; i < text.size();) {
        const size_t n = std::min(text.size() - i, size_t{1} + random() % 4);
        const std::string part = s.push(text.substr(i, n));
        ASSERT_EQ(part, valid_utf8(part));
        got += part;
        i += n;
      }
      ASSERT_EQ(got + s.finish(), want);
    }
  }
}

}  // namespace
}  // namespace pagedkv
