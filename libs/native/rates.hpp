// Rates of return by age, as `kvmesh.returns.rates` defines them, and what follows from them.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace kvmesh {

constexpr size_t BINS = 16, LAST_BIN = BINS - 1;
using Rates = std::array<double, BINS>;

// The upper ends of the bins of age, in seconds: 0.5, 1, 2, … 8192, inf; and their widths.
constexpr Rates AGE_ENDS = [] {
  Rates ends{};
  for (size_t bin = 0; bin < LAST_BIN; ++bin) ends[bin] = static_cast<double>(1 << bin) / 2;
  ends[LAST_BIN] = std::numeric_limits<double>::infinity();
  return ends;
}();
constexpr Rates BIN_WIDTHS = [] {
  Rates widths = AGE_ENDS;
  for (size_t bin = LAST_BIN; bin > 0; --bin) widths[bin] -= AGE_ENDS[bin - 1];
  return widths;
}();
// The last bin, which has no end, counts as long as all others together.
constexpr double width_of(size_t bin) { return std::min(BIN_WIDTHS[bin], AGE_ENDS[LAST_BIN - 1]); }

inline size_t age_bin(double age_s) {
  if (!(age_s >= AGE_ENDS[0])) return 0;
  if (age_s >= AGE_ENDS[LAST_BIN - 1]) return LAST_BIN;
  return static_cast<size_t>(std::log2(age_s / AGE_ENDS[0])) + 1;
}

inline double share_returned(const Rates& rates, double within_s) {
  double expected = 0, start = 0;
  for (size_t bin = 0; bin < BINS && within_s > start; start = AGE_ENDS[bin++]) {
    if (rates[bin] != 0) expected += rates[bin] * (std::min(within_s, AGE_ENDS[bin]) - start);
  }
  return 1 - std::exp(-expected);
}

inline double share_within(const Rates& rates, double age_s, double seconds) {
  double expected = 0, at = std::max(age_s, 0.0);
  const double until = at + seconds;
  for (size_t bin = age_bin(at); bin < BINS; ++bin) {
    const double end = std::min(AGE_ENDS[bin], until);
    expected += rates[bin] * (end - at);
    if (end >= until) break;
    at = end;
  }
  return -std::expm1(-expected);
}

// The value at the start of each bin: the greatest number of expected returns per second of holding.
inline Rates values_by_age(const Rates& rates) {
  // Adjacent bins that are held through: returns and seconds expected, and the share left.
  struct Span {
    double value, returns, seconds, left;
  };
  Rates values;
  std::array<Span, BINS> later;
  size_t spans = 0;
  for (size_t at = BINS; at-- > 0;) {
    const double rate = rates[at];
    Span span{0, 0, BIN_WIDTHS[at], 1};
    if (rate > 0) {
      const double returns = -std::expm1(-rate * BIN_WIDTHS[at]);
      span = {rate, returns, returns / rate, 1 - returns};
    }
    while (spans > 0 && later[spans - 1].value > span.value) {
      const Span& after = later[--spans];
      span.returns += span.left * after.returns;
      span.seconds += span.left * after.seconds;
      span.left *= after.left;
      span.value = span.returns / span.seconds;
    }
    values[at] = span.value;
    later[spans++] = span;
  }
  return values;
}

// The probability of a return at all after the start of each bin.
inline Rates chances_by_age(const Rates& rates) {
  Rates chances;
  double left = 1;
  for (size_t at = BINS; at-- > 0;) {
    left *= std::exp(-rates[at] * width_of(at));
    chances[at] = 1 - left;
  }
  return chances;
}

// A rate's byte on the wire: its logarithm in eighths of an octave, 192 for 1/s; 0 for none.
inline uint8_t packed(double rate) {
  if (!(rate > 0)) return 0;
  return static_cast<uint8_t>(std::clamp(std::nearbyint(192 + 8 * std::log2(rate)), 0.0, 255.0));
}

}  // namespace kvmesh
