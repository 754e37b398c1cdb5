// SPDX-License-Identifier: Apache-2.0
#pragma once
// GPUs that kernels' times are predicted for: what they do at most, each figure with where it comes from. None was
// chosen to make one row right; those that a measurement set say which.
#include <array>
#include <span>
#include <string_view>

namespace tessera::bench {

// A figure; a range where nobody has measured it (low: the pessimist's).
struct Figure {
  double low, high;
  std::string_view unit, source;

  constexpr Figure(double value, std::string_view the_unit, std::string_view the_source)
      : low(value), high(value), unit(the_unit), source(the_source) {}
  constexpr Figure(double the_low, double the_high, std::string_view the_unit, std::string_view the_source)
      : low(the_low), high(the_high), unit(the_unit), source(the_source) {}
  constexpr double at(bool is_low) const { return is_low ? low : high; }
};

enum class Family { kHopper, kTensorMemory, kWarpProducts };  // sm90; sm100; sm120

struct Target {
  std::string_view name, gpu;
  Family family;
  int multiprocessors;
  Figure clustered;     // multiprocessors that clusters of four blocks have a place on
  Figure clock;         // GHz, where power allows it
  Figure product_rate;  // FLOP a cycle of a multiprocessor: NVFP4, on Hopper BF16
  Figure power_flops;   // PFLOP/s of these products that power allows in a large product
  Figure shared_port;   // bytes a cycle of a multiprocessor that products read from shared memory
  Figure copies_share;  // of the bytes copied into shared memory, those that compete with products for that port
  Figure entry_port;    // bytes a cycle that enter a multiprocessor
  Figure l2;            // TB/s, all multiprocessors
  Figure memory;        // TB/s read
  Figure launch;        // us: a kernel of a recorded step that does nothing
  Figure latency;       // us: from a copy's issue to its bytes
  Figure capacity;      // GB of memory that a program can have
  Figure link;          // GB/s, one way, from one GPU to another
  Figure collective;    // us: NCCL with next to no bytes; high: two GPUs, low: more
  Figure peer_sum;      // us: a sum over peer memory (comm/peer.h), with next to no bytes
  Figure peer_rate;     // GB/s of such sums from one GPU to another; 0: none reaches another's memory
};

std::span<const Target> targets();
// Throws kInvalidArgument, naming those there are.
const Target& target_of(std::string_view name);
// By what the driver calls a GPU, as in "NVIDIA H200". Null: nobody has figures of it.
const Target* target_of_gpu(std::string_view gpu_name);

// Each figure of a target with its name, for tables.
struct NamedFigure {
  std::string_view name;
  Figure figure;
};
std::array<NamedFigure, 16> figures_of(const Target& target);

}  // namespace tessera::bench
