// SPDX-License-Identifier: Apache-2.0
#pragma once
// The phases of a window layer of Flash at one token (layer_phases.cuh).
#include <cmath>
#include <string>
#include <vector>

#include "bench/cuda/layer_phases.cuh"

namespace tessera::bench {

constexpr int kExperts = 16;  // that the router chooses kChosen of

// The phases of a layer; is_folded: norms and mixing before a map are done by each of its blocks for itself.
struct Shape {
  Job job{};
  std::vector<std::string> names;
  int units = 0;  // that a token multiplies

  explicit Shape(bool is_folded) {
    constexpr int kOneInput = 20;
    const auto mix = [&](const char* name, int num_in, bool can_fold = false) {
      if (is_folded && can_fold) {
        folded_in_ = num_in;
        return;
      }
      add(name, {.kind = PhaseKind::kMix, .num_in = num_in, .num_out = 4096});
    };
    mix("streams' products", 4096), mix("mix and norm", 4096, true);
    map("wq_a, wkv", 96, 3, kOneInput), mix("q_norm", 1536, true), map("wq_b", 2048, 1, kOneInput);
    mix("norm_rope", 32768);
    add("attention", {.kind = PhaseKind::kAttend, .num_in = 4096, .num_out = 32768});
    map("wo_a", 512, 3, 6), map("wo_b", 256, 4, kOneInput);
    mix("streams' products", 4096), mix("mix and norm", 4096, true);
    map("gate", 16, 3, kOneInput);
    job.router_phase = job.num_phases;
    mix("router", 256);
    experts("gate and up", 3, kOneInput, true), experts("down", 2, 8, false);
    mix("streams", 7 * 4096);
    job.own_units = own_units_, job.expert_units = expert_units_, job.num_experts = kExperts;
    job.layer_units = own_units_ + int64_t{kExperts} * expert_units_;
  }

 private:
  int own_units_ = 0, expert_units_ = 0, folded_in_ = 0;

  void add(const char* name, Phase phase) {
    phase.out_at = static_cast<int>(job.set_values);
    job.set_values += phase.num_out;
    if (phase.kind == PhaseKind::kMap) {
      phase.mixes_first = folded_in_ > 0, phase.num_in = folded_in_, folded_in_ = 0;
      // So that outputs are about as large as inputs.
      phase.scale = static_cast<float>(1 / std::sqrt(24.0 * (kChunk << phase.log2_chunks)));
      units += (phase.tiles + phase.routed_tiles) << phase.log2_chunks;
    }
    job.phases[job.num_phases++] = phase;
    names.emplace_back(name);
  }
  void map(const char* name, int tiles, int log2_chunks, int log2_input_tiles) {
    add(name, {.kind = PhaseKind::kMap,
               .num_out = tiles * 16,
               .tiles = tiles,
               .log2_chunks = log2_chunks,
               .log2_input_tiles = log2_input_tiles,
               .first_unit = own_units_});
    own_units_ += tiles << log2_chunks;
  }
  // The shared expert's map, and the chosen ones'.
  void experts(const char* name, int log2_chunks, int log2_input_tiles, bool is_first) {
    constexpr int kLog2Tiles = 8, kTiles = 1 << kLog2Tiles;
    add(name, {.kind = PhaseKind::kMap,
               .is_gated = is_first,
               .chooses = is_first,
               .num_out = (1 + kChosen) * kTiles * (is_first ? 8 : 16),
               .tiles = kTiles,
               .routed_tiles = kChosen * kTiles,
               .log2_chunks = log2_chunks,
               .log2_input_tiles = log2_input_tiles,
               .first_unit = own_units_,
               .expert_unit = expert_units_,
               .log2_expert_tiles = kLog2Tiles});
    own_units_ += kTiles << log2_chunks, expert_units_ += kTiles << log2_chunks;
  }
};

}  // namespace tessera::bench
