// SPDX-License-Identifier: Apache-2.0
// random_fill: a thread per eight bytes or per value.
#include "backends/cuda/kernels.h"
#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/values.cuh"

namespace tessera::backends::cuda {

namespace {

using namespace cuda_common;
using Kind = ops::RandomFill::Kind;

constexpr int kBlock = 256;

__global__ void __launch_bounds__(kBlock) fill_bytes(uint8_t* out, int64_t count, uint64_t seed, Kind kind) {
  wait_for_previous();
  const int64_t i = item_index(), begin = 8 * i;
  if (begin >= count) return;
  const uint64_t word = ops::random_bytes(kind, seed, i);
  if (begin + 8 <= count) {
    *reinterpret_cast<uint64_t*>(out + begin) = word;
    return;
  }
  for (int64_t k = begin; k < count; ++k) out[k] = static_cast<uint8_t>(word >> (8 * (k - begin)));
}

__global__ void __launch_bounds__(kBlock)
    fill_normal(Values out, int64_t count, uint64_t seed, float center, float spread) {
  wait_for_previous();
  const int64_t i = item_index();
  if (i < count) out.store(i, center + spread * ops::random_normal(seed, i));
}

}  // namespace

void random_fill(const ops::RandomFill::Desc& desc, const ops::RandomFill::Args& args, device::Queue& queue) {
  if (desc.kind != Kind::kNormal) {
    launch("random_fill", queue, fill_bytes, grid_for(args.count, 8 * kBlock), kBlock, 0,
           static_cast<uint8_t*>(args.out), args.count, args.seed, desc.kind);
    return;
  }
  launch("random_fill", queue, fill_normal, grid_for(args.count, kBlock), kBlock, 0,
         Values{args.out, desc.dtype == DType::kBF16}, args.count, args.seed, args.center, args.spread);
}

}  // namespace tessera::backends::cuda
