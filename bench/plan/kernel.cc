// SPDX-License-Identifier: Apache-2.0
#include "bench/plan/kernel.h"

#include <algorithm>

#include "base/integer_math.h"

namespace tessera::bench {

const Term& Prediction::limit() const {
  return *std::max_element(terms.begin(), terms.end(), [](const Term& a, const Term& b) { return a.us < b.us; });
}

namespace {

// What a ring's stages take beyond their bytes' time, as an H200's rows have it: in the first wave the most, in later
// waves of new inputs a part of it. Why is not known: copies of the same bytes again and again take as long
// (docs/performance/prediction.md).
double copy_waits_us(const Kernel& k, const Target& t) {
  constexpr double kLaterPart = 0.3, kCrowd = 0.9;
  if (k.lead_stages <= 0) return 0;
  const double one = t.latency.low / k.lead_stages;
  const bool is_crowded = static_cast<double>(k.tiles) >= kCrowd * t.multiprocessors;
  const double first = one + (is_crowded ? t.crowding.low : 0);
  return static_cast<double>(k.stages) * (first + static_cast<double>(k.fresh_waves - 1) * kLaterPart * one);
}

}  // namespace

Prediction predict(const Kernel& k, const Target& t, bool is_low) {
  const double clock_per_us = t.clock.at(is_low) * 1e3;
  // A pair's two share their place on the GPU; more have to find one.
  const double usable = k.multiprocessors_of_tile > 2 ? t.clustered.at(is_low) : t.multiprocessors;
  const int64_t places = std::max<int64_t>(1, static_cast<int64_t>(usable) / k.multiprocessors_of_tile);
  Prediction p;
  p.waves = ceil_div<int64_t>(k.tiles, places * k.tiles_at_once);
  const auto stages = static_cast<double>(p.waves * k.stages);
  // Tiles that a multiprocessor has at once share what it has.
  const auto at_once = static_cast<double>(std::min(k.tiles_at_once, ceil_div<int64_t>(k.tiles, places)));
  const auto of_cycles = [&](double cycles) { return stages * at_once * cycles / clock_per_us; };
  // A last wave of few tiles takes a ring no less time than a full one.
  const int64_t counted = k.lead_stages > 0 ? p.waves * std::min(k.tiles, places) : k.tiles;
  const double total_requested =
      static_cast<double>(counted * k.multiprocessors_of_tile * k.stages) * k.requested_bytes;
  const double memory_rate = k.is_bulk ? t.memory.low : t.memory.high;
  const bool is_cold = k.is_all_cold && is_low;
  const double copies_rate = (is_cold ? t.memory.low : t.l2.at(is_low)) * 1e6;
  p.terms = {
      {"products", of_cycles(k.product_cycles)},
      {"issue", of_cycles(k.issue_cycles) + k.first_bytes / (memory_rate * 1e6)},
      {"shared memory", of_cycles((k.operand_bytes + t.copies_share.at(is_low) * k.copied_bytes) / t.shared_port.low)},
      {"entry port", of_cycles(k.copied_bytes / t.entry_port.at(is_low))},
      {is_cold ? "copies" : "L2", total_requested / copies_rate + copy_waits_us(k, t)},
      {"memory", k.memory_bytes / (memory_rate * 1e6) + k.drain_cycles / clock_per_us},
      {"power", k.tile_flops / (t.power_flops.at(is_low) * 1e9)},
      {"stores", static_cast<double>(p.waves) * at_once * k.store_cycles / clock_per_us},
      // Bytes under way: a ring's stages each take a latency.
      {"latency", k.copied_bytes > 0 ? stages * t.latency.low / static_cast<double>(k.ring_stages) : 0},
  };
  p.hidden_us = p.limit().us;
  p.fill_us = t.launch.low + static_cast<double>(k.latencies) * t.latency.low;
  p.end_us = (static_cast<double>(p.waves) * k.end_cycles + k.store_cycles) / clock_per_us;
  return p;
}

Estimate estimate(const std::vector<Kernel>& kernels, const Target& target, bool is_low) {
  Estimate e;
  double longest = -1;
  for (const Kernel& kernel : kernels) {
    e.parts.push_back(predict(kernel, target, is_low));
    const Prediction& p = e.parts.back();
    e.us += p.us();
    if (p.us() <= longest) continue;
    longest = p.us();
    e.kernel = kernel.name, e.waves = p.waves;
    e.limit = p.limit();
    if (p.fill_us + p.end_us > p.hidden_us) e.limit = {"fill and end", p.fill_us + p.end_us};
  }
  return e;
}

double roofline_us(double bytes, double flops, const Target& t) {
  const double peak_per_us = t.multiprocessors * t.product_rate.high * t.clock.high * 1e3;
  return std::max(bytes / (t.memory.high * 1e6), flops / peak_per_us);
}

}  // namespace tessera::bench
