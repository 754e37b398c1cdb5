// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a kernel's launch does, in numbers that its time follows from: tiles of stages on multiprocessors. A prediction
// is the largest of the times that each resource alone would take, and before and behind it what nothing hides.
#include <cstdint>
#include <string>
#include <vector>

#include "bench/plan/target.h"

namespace tessera::bench {

// Who has such a kernel.
enum class Form {
  kOurs,   // as it is written
  kIdeal,  // a form that is not written
};

struct Kernel {
  std::string name;
  Form form = Form::kOurs;
  int64_t tiles = 1;
  int64_t stages = 1;         // of a tile
  int64_t tiles_at_once = 1;  // of a multiprocessor
  int64_t multiprocessors_of_tile = 1;
  // Of a stage, each multiprocessor of the tile.
  double product_cycles = 0, issue_cycles = 0;
  double operand_bytes = 0;    // that products read from shared memory
  double copied_bytes = 0;     // that arrive in shared memory
  double requested_bytes = 0;  // from L2: fewer where a copy reaches several
  int64_t ring_stages = 1;     // on their way or in use
  double cold_bytes = 0;       // of them, those that no other tile asks for: on an H200 they come as memory brings them
  bool has_whole_waves = false;  // a last wave of few tiles takes copies no less time than a full one
  double store_cycles = 0;       // of a tile, while the next one's stages run; of the last one behind them all
  double end_cycles = 0;         // of a tile, behind its last stage, that nothing hides
  // Of the launch.
  double memory_bytes = 0;  // read from memory, once
  double first_bytes = 0;   // of them, those that come before the first stage of all can be multiplied
  double drain_cycles = 0;  // what is still to be multiplied when the last of them have come
  // Of memory's, those that are copied before it waits for the kernel before; and what is loaded from L2 behind that,
  // before the first stage of all can be multiplied. For who knows what is before: predict() takes neither.
  double early_bytes = 0, input_bytes = 0;
  int64_t latencies = 1;  // that pass before the first copy has come; 0: it is made before the kernel waits
  double flops = 0;       // those that are asked for; power follows those of whole tiles
  double tile_flops = 0;
  bool is_bulk = true;  // bulk copies: the target's lower figure of memory
};

struct Term {
  std::string name;  // "products", "issue", "shared memory", "entry port", "L2", "copies", "memory", "power", "stores",
                     // "latency"
  double us = 0;
};
struct Prediction {
  std::vector<Term> terms;
  double hidden_us = 0;            // the largest of them
  double fill_us = 0, end_us = 0;  // before and behind, launch included
  int64_t waves = 0;
  const Term& limit() const;
  double us() const { return hidden_us + fill_us + end_us; }
};

// With the figures' low or high ends.
Prediction predict(const Kernel& kernel, const Target& target, bool is_low);

// Of kernels one after another.
struct Estimate {
  double us = 0;
  Term limit;          // of the longest kernel
  std::string kernel;  // which is that
  int64_t waves = 0;   // of it
  std::vector<Prediction> parts;
};
Estimate estimate(const std::vector<Kernel>& kernels, const Target& target, bool is_low);

// Bytes over memory's rate or products over their rate at the target's clock, whichever is longer, us.
double roofline_us(double bytes, double flops, const Target& target);

}  // namespace tessera::bench
