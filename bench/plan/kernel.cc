// SPDX-License-Identifier: Apache-2.0
#include "bench/plan/kernel.h"

#include <algorithm>

#include "base/integer_math.h"

namespace tessera::bench {

const Term& Prediction::limit() const {
  return *std::max_element(terms.begin(), terms.end(), [](const Term& a, const Term& b) { return a.us < b.us; });
}

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
  const int64_t counted = k.has_whole_waves ? p.waves * std::min(k.tiles, places) : k.tiles;
  const auto copies = static_cast<double>(counted * k.multiprocessors_of_tile * k.stages);
  const double memory_rate = k.is_bulk ? t.memory.low : t.memory.high;
  const double cold_bytes = is_low ? k.cold_bytes : 0;
  const double copies_us = cold_bytes / t.memory.low + (k.requested_bytes - cold_bytes) / t.l2.at(is_low);
  p.terms = {
      {"products", of_cycles(k.product_cycles)},
      {"issue", of_cycles(k.issue_cycles) + k.first_bytes / (memory_rate * 1e6)},
      {"shared memory", of_cycles((k.operand_bytes + t.copies_share.at(is_low) * k.copied_bytes) / t.shared_port.low)},
      {"entry port", of_cycles(k.copied_bytes / t.entry_port.at(is_low))},
      {cold_bytes > 0 ? "copies" : "L2", copies * copies_us / 1e6},
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
