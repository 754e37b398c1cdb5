// SPDX-License-Identifier: Apache-2.0
// linear and linear_group in a4: inputs are rounded to NVFP4 and arranged by a kernel of their own, after their norm
// where one is before the maps, then multiplied by each map (scaled_sums.cuh).
#include <algorithm>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/map_groups.h"
#include "backends/cuda_common/row_parts.cuh"
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

// A map of one group whose inputs go through rms_norm before they are arranged, in shared memory.
struct NormedMap : LinearMap {
  Values norm_weight;
  float eps;

  static int64_t shared_bytes(int64_t in) { return in * static_cast<int64_t>(sizeof(float) + sizeof(uint16_t)); }
  __device__ InputSource source(const Work& work, int token) const {
    float* s_row = cuda_common::dynamic_shared<float>();
    auto* s_values = reinterpret_cast<uint16_t*>(s_row + in);
    const Values values{const_cast<uint16_t*>(x), true};
    cuda_common::norm_row(s_row, values, (work.first_token + token) * in, norm_weight, in, eps);
    __syncthreads();
    for (int64_t c = threadIdx.x; c < in; c += kInputThreads) s_values[c] = numeric::bf16_from_float(s_row[c]);
    __syncthreads();
    return {s_values, 0};
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

LinearMap map_of(const ops::Linear::Desc& desc, const ops::Linear::Args& args, int64_t tile_tokens) {
  LinearMap map{};
  take_workspace(desc, args.num_tokens, args.workspace, map);
  map.x = static_cast<const uint16_t*>(args.x.data), map.y = cuda_common::values_of(args.y);
  map.units = static_cast<const char*>(args.weight.data), map.tensor_scale = args.weight.tensor_scale;
  map.in = desc.in, map.out = desc.out, map.groups = desc.groups, map.num_tokens = args.num_tokens;
  map.tile_tokens = static_cast<int>(tile_tokens);
  map.num_tiles = static_cast<int>(ceil_div<int64_t>(args.num_tokens, tile_tokens));
  return map;
}

int64_t work_of(const LinearMap& map) {
  return map.groups * map.num_tiles;
}

template <class Map>
void arrange(const Map& map, device::Queue& queue, int64_t shared_bytes = 0) {
  launch_arrange("arrange_inputs", queue, work_of(map), std::min<int64_t>(map.tile_tokens, map.num_tokens), map,
                 shared_bytes);
}

// Inputs are arranged.
void multiply(const LinearMap& map, device::Queue& queue) {
  if (map.tile_tokens == Wide::kTokens) {
    launch_wide("linear_wide", queue, work_of(map), map.out, map);
  } else if (map.tile_tokens == Few::kMostTokens) {
    launch_few<Few::kMostTiles>("linear_few", queue, work_of(map), map.out, map);
  } else {
    launch_few<1>("linear_few", queue, work_of(map), map.out, map);
  }
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
  const LinearMap map = map_of(desc, args, linear_tile_tokens(desc, args.num_tokens, cuda_common::multiprocessors()));
  arrange(map, queue);
  multiply(map, queue);
}

bool linear_group_supports(const ops::LinearGroup::Desc& desc, std::string& why_not) {
  return cuda_common::map_group_supports(desc, linear_supports, cuda::rms_norm_supports, why_not);
}

int64_t linear_group_workspace(const ops::LinearGroup::Desc& desc, int64_t max_tokens) {
  return linear_workspace(desc.maps.front(), max_tokens);  // of their one input
}

void linear_group(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return;
  const int64_t tile_tokens = cuda_common::map_group_tile_tokens(desc, [&](const ops::Linear::Desc& map) -> int64_t {
    return linear_tile_tokens(map, args.num_tokens, cuda_common::multiprocessors());
  });
  for (size_t i = 0; i < desc.maps.size(); ++i) {
    const LinearMap map = map_of(desc.maps[i], ops::linear_of_group(args, i), tile_tokens);
    if (i == 0 && desc.norm) {
      arrange(NormedMap{map, cuda_common::values_of(args.norm_weight), desc.norm->eps}, queue,
              NormedMap::shared_bytes(map.in));
    } else if (i == 0) {
      arrange(map, queue);
    }
    multiply(map, queue);
  }
  if (desc.swiglu) cuda::swiglu(*desc.swiglu, ops::swiglu_of_group(args), queue);
}

}  // namespace tessera::backends::sm120
