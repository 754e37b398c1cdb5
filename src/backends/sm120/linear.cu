// SPDX-License-Identifier: Apache-2.0
// linear in a4: inputs are rounded to NVFP4 and arranged by a kernel of their own, then multiplied (scaled_sums.cuh).
#include "backends/cuda_common/values.cuh"
#include "backends/cuda_common/workspace.h"
#include "backends/sm120/kernels.h"
#include "backends/sm120/scaled_inputs.cuh"
#include "backends/sm120/scaled_sums.cuh"

namespace tessera::backends::sm120 {

namespace {

using cuda_common::Values;

struct LinearMap {
  static constexpr int kMatrices = 1;
  // Some tokens of a group.
  struct Work {
    int64_t group, first_token;
    int count;
  };

  const uint16_t* x;    // [tokens, groups * in]
  char* scaled_inputs;  // [groups] matrices of inputs
  float* factors;       // [groups, padded tokens]
  const char* units;
  float tensor_scale;
  Values y;  // [tokens, groups * out]
  int64_t in, out, groups, num_tokens;
  int tile_tokens, num_tiles;  // of a group

  __device__ int width() const { return static_cast<int>(in); }
  __device__ int rows() const { return static_cast<int>(out); }
  __device__ int num_work() const { return static_cast<int>(groups) * num_tiles; }
  __device__ Work work(int index) const {
    const int64_t group = index / num_tiles, first = static_cast<int64_t>(index % num_tiles) * tile_tokens;
    return {group, first, static_cast<int>(min(num_tokens - first, static_cast<int64_t>(tile_tokens)))};
  }
  __device__ char* inputs(const Work& work) const { return scaled_inputs + InputUnit::bytes(position(work), in); }
  __device__ const char* unit(const Work& work, int, int row) const {
    return units + WeightUnit::offset(work.group * out + row, 0, in);
  }
  __device__ InputSource source(const Work& work, int token) const {
    return {x + ((work.first_token + token) * groups + work.group) * in, 0};
  }
  __device__ float* factor(const Work& work, int token) const { return factors + position(work) + token; }
  __device__ void store(const Work& work, int row, int token, const float (&sums)[1]) const {
    y.store(((work.first_token + token) * groups + work.group) * out + row,
            sums[0] * (*factor(work, token) * tensor_scale));
  }

 private:
  __device__ int64_t position(const Work& work) const {
    return work.group * round_up<int64_t>(num_tokens, InputUnit::kRows) + work.first_token;
  }
};

// Fills what lies in the workspace; its bytes.
int64_t take_workspace(const ops::Linear::Desc& desc, int64_t num_tokens, void* base, LinearMap& map) {
  cuda_common::Workspace workspace(base);
  const int64_t positions = desc.groups * round_up<int64_t>(num_tokens, InputUnit::kRows);
  map.scaled_inputs = workspace.take<char>(InputUnit::bytes(positions, desc.in));
  map.factors = workspace.take<float>(positions);
  return workspace.used();
}

}  // namespace

bool linear_supports(const ops::Linear::Desc& desc, std::string& why_not) {
  if (desc.input != ops::InputMode::kA4 || desc.activation != DType::kBF16) {
    why_not = "inputs are not BF16 rounded to NVFP4 (a4)";
  } else if (desc.groups > 1 && desc.out % WeightUnit::kRows != 0) {
    why_not = "a group's outputs are no multiple of 16";
  } else {
    return ops::linear_reference_supports(desc, why_not);
  }
  return false;
}

int64_t linear_workspace(const ops::Linear::Desc& desc, int64_t max_tokens) {
  LinearMap map{};
  return take_workspace(desc, max_tokens, nullptr, map);
}

void linear(const ops::Linear::Desc& desc, const ops::Linear::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  LinearMap map{};
  take_workspace(desc, args.num_tokens, args.workspace, map);
  map.x = static_cast<const uint16_t*>(args.x.data), map.y = cuda_common::values_of(args.y);
  map.units = static_cast<const char*>(args.weight.data), map.tensor_scale = args.weight.tensor_scale;
  map.in = desc.in, map.out = desc.out, map.groups = desc.groups, map.num_tokens = args.num_tokens;

  const auto most_work = [&](int64_t tokens) { return desc.groups * ceil_div<int64_t>(args.num_tokens, tokens); };
  const int64_t tile_tokens = linear_tile_tokens(desc, args.num_tokens, cuda_common::multiprocessors());
  map.tile_tokens = static_cast<int>(tile_tokens);
  const int64_t work = most_work(tile_tokens);
  map.num_tiles = static_cast<int>(work / desc.groups);
  launch_arrange("arrange_inputs", queue, work, std::min(tile_tokens, args.num_tokens), map);
  if (tile_tokens == Wide::kTokens) {
    launch_wide("linear_wide", queue, work, desc.out, map);
  } else if (tile_tokens == Few::kMostTokens) {
    launch_few<Few::kMostTiles>("linear_few", queue, work, desc.out, map);
  } else {
    launch_few<1>("linear_few", queue, work, desc.out, map);
  }
}

}  // namespace tessera::backends::sm120
