// SPDX-License-Identifier: Apache-2.0
// Packing and its inverse, on the host and on a GPU: one function per 16 columns of a row, so that both do the same.
#include "backends/sm120/scaled_units.h"

#include "backends/cuda_common/launch.cuh"

namespace tessera::backends::sm120 {

namespace {

using numeric::kNvfp4Block;

struct Job {
  uint8_t *data, *scales, *packed;
  int64_t rows, columns;
};

int64_t data_bytes(const ops::WeightView& weight) {
  return ceil_div<int64_t>(weight.rows, WeightUnit::kRows) * units_of_row(weight.cols) * WeightUnit::kBytes;
}
int64_t scale_bytes(const ops::WeightView&) {
  return 0;  // among the data
}

// Blocks of a packed matrix, those that are not there too.
int64_t num_blocks(const ops::WeightView& weight) {
  return data_bytes(weight) / WeightUnit::kBytes * WeightUnit::kRows * kUnitBlocks;
}

// Where a block lies here and there.
struct Place {
  bool is_there;
  int64_t plain;  // among the checkpoint's blocks
  uint8_t* unit;
  int row, block;  // in it
};
TESSERA_HOST_DEVICE Place place_of(const Job& job, int64_t index) {
  const int64_t row_blocks = units_of_row(job.columns) * kUnitBlocks, row = index / row_blocks,
                block = index % row_blocks;
  const int64_t columns = job.columns / kNvfp4Block;
  return {row < job.rows && block < columns, row * columns + block,
          job.packed + WeightUnit::offset(row, block * kNvfp4Block, job.columns),
          static_cast<int>(row % WeightUnit::kRows), static_cast<int>(block % kUnitBlocks)};
}
TESSERA_HOST_DEVICE uint32_t* word_of(const Place& place, int word) {
  return reinterpret_cast<uint32_t*>(place.unit +
                                     WeightUnit::codes_at(place.row, place.block * kNvfp4Block + word * kWordCodes));
}

TESSERA_HOST_DEVICE void pack_block(const Job& job, int64_t index) {
  const Place place = place_of(job, index);
  const uint32_t* words = reinterpret_cast<const uint32_t*>(job.data) + 2 * place.plain;
  for (int i = 0; i < 2; ++i) *word_of(place, i) = place.is_there ? words[i] : 0;
  place.unit[WeightUnit::scale_at(place.row, place.block)] = place.is_there ? job.scales[place.plain] : uint8_t{0};
}
TESSERA_HOST_DEVICE void unpack_block(const Job& job, int64_t index) {
  const Place place = place_of(job, index);
  if (!place.is_there) return;
  uint32_t* words = reinterpret_cast<uint32_t*>(job.data) + 2 * place.plain;
  for (int i = 0; i < 2; ++i) words[i] = *word_of(place, i);
  job.scales[place.plain] = place.unit[WeightUnit::scale_at(place.row, place.block)];
}

Job job_of(const ops::WeightView& plain, const ops::WeightView& packed) {
  const auto bytes = [](const void* at) { return static_cast<uint8_t*>(const_cast<void*>(at)); };
  return {bytes(plain.data), bytes(plain.block_scales), bytes(packed.data), plain.rows, plain.cols};
}

constexpr int64_t kGrain = 1 << 14;
constexpr int kThreads = 256;

void pack(const ops::WeightView& checkpoint, const ops::WeightView& packed, device::Queue& queue) {
  const Job job = job_of(checkpoint, packed);
  queue.parallel_for(num_blocks(checkpoint), kGrain, [=](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) pack_block(job, index);
  });
}
void unpack(const ops::WeightView& packed, const ops::WeightView& checkpoint, device::Queue& queue) {
  const Job job = job_of(checkpoint, packed);
  queue.parallel_for(num_blocks(checkpoint), kGrain, [=](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) unpack_block(job, index);
  });
}

__global__ void __launch_bounds__(kThreads) pack_blocks(Job job, int64_t count) {
  cuda_common::wait_for_previous();
  const int64_t index = cuda_common::item_index();
  if (index < count) pack_block(job, index);
}
void pack_on_device(const ops::WeightView& checkpoint, const ops::WeightView& packed, device::Queue& queue) {
  const int64_t count = num_blocks(checkpoint);
  cuda_common::launch("pack_blocks", queue, pack_blocks, cuda_common::grid_for(count, kThreads), kThreads, 0,
                      job_of(checkpoint, packed), count);
}

}  // namespace

constinit const ops::PackedLayout kScaledUnits = {
    "units of block-scaled mma.sync", data_bytes, scale_bytes, pack, unpack, pack_on_device};

}  // namespace tessera::backends::sm120
