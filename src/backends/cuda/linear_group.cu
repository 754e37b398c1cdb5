// SPDX-License-Identifier: Apache-2.0
// linear_group on tensor cores: for few tokens the tiles of all maps stream through one launch (weight_stream.cuh), so
// that narrow maps share the GPU and wait for their input once; of gate and up a tile has both, and stores their
// activation. More tokens (cuda_common/stream_limit.h): the maps one by one. The sums are those of linear_mma.cu.
#include <type_traits>

#include "backends/cuda/kernels.h"
#include "backends/cuda_common/fast_division.cuh"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/mma_sums.cuh"
#include "backends/cuda_common/packed_ring.cuh"
#include "backends/cuda_common/stream_limit.h"
#include "backends/cuda_common/values.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;

struct Map {
  int end;                    // of its tiles
  const void *data, *scales;  // packed_units.h
  float tensor_scale;
  Values y;  // [tokens, out]
  int out;
};

struct Job {
  const uint16_t* x;  // [tokens, in]
  Map maps[ops::LinearGroup::kMostMaps];
  int64_t in;
  int num_tokens;
  FastDivisor token_tiles;  // of kTileTokens
  float limit;              // of swiglu
};

// A tile's rows, counted over all maps, and its 8 tokens.
struct RowsAndTokens {
  int row_tile, first_token;
};
__device__ RowsAndTokens rows_and_tokens(const Job& job, int tile) {
  const uint32_t row_tile = job.token_tiles.quotient(static_cast<uint32_t>(tile));
  const uint32_t token_tile = static_cast<uint32_t>(tile) - row_tile * job.token_tiles.divisor();
  return {static_cast<int>(row_tile), static_cast<int>(token_tile) * kTileTokens};
}
// This lane's token of a tile's 8.
__device__ const uint16_t* inputs_from(const Job& job, int first_token) {
  const int token = min(first_token + static_cast<int>(threadIdx.x) % kWarp / 4, job.num_tokens - 1);
  return job.x + token * job.in;
}

// Tiles of 16 rows, map by map, each for 8 tokens after another.
template <class Share>
class MapTiles {
 public:
  static constexpr int kPasses = 1;
  struct Place {
    int map, first_row, first_token;
  };

  __device__ explicit MapTiles(const Job& job) : job_(job) {}

  __device__ Place place(int tile) const {
    const RowsAndTokens at = rows_and_tokens(job_, tile);
    int map = 0, begin = 0;
    while (at.row_tile >= job_.maps[map].end) begin = job_.maps[map++].end;
    return {map, (at.row_tile - begin) * kTileRows, at.first_token};
  }
  __device__ TileWeights weights(const Place& place, int) const {
    const Map& map = job_.maps[place.map];
    return {map.data, map.scales, place.first_row, map.out};
  }
  __device__ const uint16_t* inputs(const Place& place) const { return inputs_from(job_, place.first_token); }
  struct Ticket {};
  __device__ Ticket ticket(const Place&, int) const { return {}; }
  __device__ void store(const Place& place, int at, const float (&sums)[1], Ticket) const {
    const Map& map = job_.maps[place.map];
    const int row = place.first_row + streamed_row(at), token = place.first_token + streamed_token(at);
    if (row >= map.out || token >= job_.num_tokens) return;
    map.y.store(static_cast<int64_t>(token) * map.out + row, sums[0] * Share::kFactor * map.tensor_scale);
  }

 private:
  const Job& job_;
};

// Tiles of 16 rows of gate and up, the first two maps, each for 8 tokens after another.
template <class Share>
class GatedTiles {
 public:
  static constexpr int kPasses = 2;
  struct Place {
    int first_row, first_token;
  };

  __device__ explicit GatedTiles(const Job& job) : job_(job) {}

  __device__ Place place(int tile) const {
    const RowsAndTokens at = rows_and_tokens(job_, tile);
    return {at.row_tile * kTileRows, at.first_token};
  }
  __device__ TileWeights weights(const Place& place, int pass) const {
    const Map& map = job_.maps[pass];
    return {map.data, map.scales, place.first_row, map.out};
  }
  __device__ const uint16_t* inputs(const Place& place) const { return inputs_from(job_, place.first_token); }
  struct Ticket {};
  __device__ Ticket ticket(const Place&, int) const { return {}; }
  __device__ void store(const Place& place, int at, const float (&sums)[2], Ticket) const {
    const Map &gate = job_.maps[0], &up = job_.maps[1];
    const int row = place.first_row + streamed_row(at), token = place.first_token + streamed_token(at);
    if (row >= gate.out || token >= job_.num_tokens) return;
    const auto rounded = [&](const Map& map, float sum) {
      return round_to(true, sum * Share::kFactor * map.tensor_scale);
    };
    gate.y.store(static_cast<int64_t>(token) * gate.out + row,
                 swiglu_value(rounded(gate, sums[0]), rounded(up, sums[1]), job_.limit));
  }

 private:
  const Job& job_;
};

template <class Ring, class Tiles>
__global__ void __launch_bounds__(kMaxWarps* kWarp, 2)
    linear_group_kernel(const __grid_constant__ Job job, StreamShape shape, int num_tiles) {
  const Tiles tiles(job);
  float* s_sums = dynamic_shared<float>();  // then the rings
  Ring ring(shape, num_tiles, tiles, reinterpret_cast<char*>(s_sums + 2 * shape.round_sums(Tiles::kPasses)));
  wait_for_previous();
  stream_tiles(shape, num_tiles, tiles, ring, s_sums);
}

// False: not on this GPU.
template <ops::WeightFormat kFormat, class Tiles>
bool stream(const Job& job, int row_tiles, device::Queue& queue) {
  const int num_tiles = row_tiles * static_cast<int>(job.token_tiles.divisor());
  const StreamShape shape = stream_shape(job.in, num_tiles, Tiles::kPasses);
  const unsigned blocks = shape.blocks(num_tiles);
  const auto start = [&](auto stages) {
    using Ring = PackedRing<kFormat, stages.value, Tiles>;
    const size_t bytes = shape.shared_bytes(stages.value, Ring::kBytes, Tiles::kPasses);
    if (bytes > most_shared_bytes()) return false;
    launch("linear_group", queue, linear_group_kernel<Ring, Tiles>, dim3(blocks), shape.threads(), bytes, job, shape,
           num_tiles);
    return true;
  };
  // Longer rings where blocks are few, as linear_mma.cu has them.
  if (static_cast<int>(blocks) <= multiprocessors() && start(std::integral_constant<int, kManyStages>())) return true;
  return start(std::integral_constant<int, kPackedStages>());
}

template <ops::WeightFormat kFormat>
bool stream_maps(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue) {
  using Share = PackedShare<kFormat>;
  Job job{};
  job.x = static_cast<const uint16_t*>(args.x.data);
  job.in = desc.maps.front().in;
  job.num_tokens = static_cast<int>(args.num_tokens);
  job.token_tiles = FastDivisor(static_cast<uint32_t>(ceil_div<int64_t>(args.num_tokens, kTileTokens)));
  int end = 0;
  for (size_t i = 0; i < desc.maps.size(); ++i) {
    const ops::WeightView& weight = args.weights[i];
    const int out = static_cast<int>(desc.maps[i].out);
    end += ceil_div(out, kTileRows);
    job.maps[i] = {end, weight.data, weight.block_scales, weight.tensor_scale, values_of(args.y[i]), out};
  }
  if (!desc.swiglu) return stream<kFormat, MapTiles<Share>>(job, end, queue);
  job.limit = desc.swiglu->limit;
  return stream<kFormat, GatedTiles<Share>>(job, job.maps[0].end, queue);
}

}  // namespace

bool linear_group_packed_supports(const ops::LinearGroup::Desc& desc, std::string& why_not) {
  if (!ops::linear_group_reference_supports(desc, why_not)) return false;
  if (desc.norm) {
    why_not = "the norm is a kernel of its own";
    return false;
  }
  for (const ops::Linear::Desc& map : desc.maps) {
    if (!linear_packed_supports(map, why_not)) return false;
  }
  return true;
}

bool linear_group_stream(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue) {
  if (args.num_tokens == 0) return true;
  int64_t row_tiles = 0;
  for (const ops::Linear::Desc& map : desc.maps) row_tiles += ceil_div<int64_t>(map.out, kTileRows);
  const ops::Linear::Desc& first = desc.maps.front();
  if (!streams_tokens(first.format, std::ssize(desc.maps), row_tiles, first.in, args.num_tokens)) return false;
  switch (first.format) {
    case ops::WeightFormat::kNvfp4:
      return stream_maps<ops::WeightFormat::kNvfp4>(desc, args, queue);
    case ops::WeightFormat::kFp8Block:
      return stream_maps<ops::WeightFormat::kFp8Block>(desc, args, queue);
    case ops::WeightFormat::kBf16:
      return stream_maps<ops::WeightFormat::kBf16>(desc, args, queue);
    case ops::WeightFormat::kF32:
      break;  // declined
  }
  return false;
}

void linear_group_packed(const ops::LinearGroup::Desc& desc, const ops::LinearGroup::Args& args, device::Queue& queue) {
  if (!linear_group_stream(desc, args, queue)) ops::run_parts(desc, args, queue, linear_packed, swiglu);
}

}  // namespace tessera::backends::cuda
