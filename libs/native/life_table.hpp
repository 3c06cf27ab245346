// Evidence of one class of prompts, as `kvmesh._native.LifeTable` documents it.
#pragma once

#include "rates.hpp"

namespace kvmesh {

class LifeTable {
 public:
  static constexpr double HALF_LIFE_S = 6 * 3600;
  // That pass a bin: evidence of the belief that the rate halves from bin to bin.
  static constexpr double PRIOR_PROMPTS = 20;
  static constexpr double COARSE_RETURNS = 2;  // evidence that a coarser class gives a finer one

  explicit LifeTable(double now) { at_.fill(now); }

  void close() { closed = true; }

  void enter(size_t bin, double now) {
    if (closed) return;
    pass_time(bin, now);
    waiting_[bin] += 1;
  }

  void leave(size_t bin, double now) {
    if (closed) return;
    pass_time(bin, now);
    waiting_[bin] -= 1;
  }

  void count_return(double age_s, double until_s) {
    if (closed) return;
    const size_t first = age_bin(age_s), last = age_bin(until_s);
    for (size_t bin = first; bin <= last; ++bin) {
      const double start = std::max(age_s, bin == 0 ? 0.0 : AGE_ENDS[bin - 1]);
      const double late_s = std::max(std::min(until_s, AGE_ENDS[bin]) - start, 0.0);
      seconds_[bin] = std::max(seconds_[bin] - late_s, 0.0);
    }
    returns_[first] += 1;
    returned += 1;
  }

  Rates own_rates(double now) {
    Rates rates;
    double belief = 1 / AGE_ENDS[0];
    for (size_t bin = 0; bin < BINS; ++bin) {
      pass_time(bin, now);
      const double prior_s = PRIOR_PROMPTS * width_of(bin);
      rates[bin] = (returns_[bin] + belief * prior_s) / (seconds_[bin] + prior_s);
      belief = rates[bin] / 2;
    }
    return rates;
  }

  void refine(Rates& rates, double now) {
    for (size_t bin = 0; bin < BINS; ++bin) {
      pass_time(bin, now);
      const double returns = returns_[bin] + COARSE_RETURNS;
      rates[bin] = returns / (seconds_[bin] + COARSE_RETURNS / rates[bin]);
    }
  }

  void count(double ended, double returns) {
    prompts += ended;
    expected += returns;
  }

  bool closed = false;
  double prompts = 0, returned = 0, expected = 0;

 private:
  void pass_time(size_t bin, double now) {
    const double passed = now - at_[bin];
    if (!(passed > 0)) return;
    at_[bin] = now;
    const double kept = std::pow(0.5, passed / HALF_LIFE_S);
    returns_[bin] *= kept;
    seconds_[bin] = seconds_[bin] * kept + waiting_[bin] * passed;
    if (bin != 0) return;
    prompts *= kept;
    returned *= kept;
    expected *= kept;
  }

  Rates returns_{}, seconds_{}, at_, waiting_{};
};

}  // namespace kvmesh
