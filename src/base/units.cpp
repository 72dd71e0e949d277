#include "base/units.h"

#include <charconv>
#include <cmath>
#include <stdexcept>

namespace pagedkv {

int64_t parse_bytes(const std::string& text) {
  const auto bad = [&] {
    return std::invalid_argument(
        "\"" + text + "\" is no size: write bytes, or a number with KiB, MiB, GiB or TiB");
  };
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || !(number >= 0)) throw bad();
  std::string unit(end, text.data() + text.size());
  unit.erase(0, unit.find_first_not_of(' ') == std::string::npos ? unit.size()
                                                                 : unit.find_first_not_of(' '));
  int shift = -1;
  if (unit.empty() || unit == "B") shift = 0;
  if (unit == "KiB" || unit == "K" || unit == "k") shift = 10;
  if (unit == "MiB" || unit == "M") shift = 20;
  if (unit == "GiB" || unit == "G") shift = 30;
  if (unit == "TiB" || unit == "T") shift = 40;
  if (shift < 0) throw bad();
  const double bytes = std::ldexp(number, shift);
  if (!(bytes < 9.2e18)) throw bad();
  return static_cast<int64_t>(bytes);
}

double parse_seconds(const std::string& text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string unit(end, text.data() + text.size());
  double factor = 0;
  if (unit.empty() || unit == "s") factor = 1;
  if (unit == "ms") factor = 1e-3;
  if (unit == "m" || unit == "min") factor = 60;
  if (unit == "h") factor = 3600;
  if (unit == "d") factor = 86400;
  if (error != std::errc() || factor == 0 || !(number >= 0 && number * factor <= 1e9))
    throw std::invalid_argument("\"" + text +
                                "\" is no time: write seconds, or a number with ms, s, m, h or d");
  return number * factor;
}

}  // namespace pagedkv
