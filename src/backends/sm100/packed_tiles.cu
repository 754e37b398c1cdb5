// SPDX-License-Identifier: Apache-2.0
// Packing and its inverse, on the host and on a GPU: one function per 16 columns of a row, so that both do the same.
#include "backends/sm100/packed_tiles.h"

#include "backends/cuda_common/launch.cuh"

namespace tessera::backends::sm100 {

namespace {

struct Job {
  uint8_t *data, *scales, *packed;
  int64_t rows, cols;
};

struct Place {
  bool is_there;         // in the matrix; else padding
  int64_t codes, scale;  // in the checkpoint's bytes
  int64_t packed_codes, packed_scale;
};

TESSERA_HOST_DEVICE Place place_of(const Job& job, int64_t index) {
  constexpr int kItems = PackedTile::kRows * PackedTile::kBlocks;
  const int64_t tile = index / kItems, tiles = PackedTile::tiles_of_row(job.cols);
  const int at = static_cast<int>(index % kItems), in_tile = at / PackedTile::kBlocks, block = at % PackedTile::kBlocks;
  const int64_t row = tile / tiles * PackedTile::kRows + in_tile;
  const int64_t column = tile % tiles * PackedTile::kColumns + block * PackedTile::kBlockColumns;
  return {row < job.rows && column < job.cols, (row * job.cols + column) / 2,
          (row * job.cols + column) / PackedTile::kBlockColumns,
          tile * PackedTile::kBytes + PackedTile::codes_at(in_tile, block),
          tile * PackedTile::kBytes + PackedTile::scale_at(in_tile, block)};
}

TESSERA_HOST_DEVICE uint64_t& eight_bytes(uint8_t* bytes, int64_t offset) {
  return *reinterpret_cast<uint64_t*>(bytes + offset);
}
TESSERA_HOST_DEVICE void pack_one(const Job& job, int64_t index) {
  const Place place = place_of(job, index);
  eight_bytes(job.packed, place.packed_codes) = place.is_there ? eight_bytes(job.data, place.codes) : 0;
  job.packed[place.packed_scale] = place.is_there ? job.scales[place.scale] : uint8_t{0};
}
TESSERA_HOST_DEVICE void unpack_one(const Job& job, int64_t index) {
  const Place place = place_of(job, index);
  if (!place.is_there) return;
  eight_bytes(job.data, place.codes) = eight_bytes(job.packed, place.packed_codes);
  job.scales[place.scale] = job.packed[place.packed_scale];
}

int64_t data_bytes(const ops::WeightView& weight) {
  return PackedTile::offset(round_up<int64_t>(weight.rows, PackedTile::kRows), weight.cols);
}
int64_t scale_bytes(const ops::WeightView&) {
  return 0;  // among the data
}
int64_t num_items(const ops::WeightView& weight) {
  return data_bytes(weight) / PackedTile::kBytes * PackedTile::kRows * PackedTile::kBlocks;
}
Job job_of(const ops::WeightView& plain, const ops::WeightView& packed) {
  const auto bytes = [](const void* at) { return static_cast<uint8_t*>(const_cast<void*>(at)); };
  return {bytes(plain.data), bytes(plain.block_scales), bytes(packed.data), plain.rows, plain.cols};
}

constexpr int64_t kGrain = 1 << 14;

void pack(const ops::WeightView& checkpoint, const ops::WeightView& packed, device::Queue& queue) {
  const Job job = job_of(checkpoint, packed);
  queue.parallel_for(num_items(checkpoint), kGrain, [=](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) pack_one(job, index);
  });
}
void unpack(const ops::WeightView& packed, const ops::WeightView& checkpoint, device::Queue& queue) {
  const Job job = job_of(checkpoint, packed);
  queue.parallel_for(num_items(checkpoint), kGrain, [=](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) unpack_one(job, index);
  });
}

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) pack_tiles(Job job, int64_t count) {
  cuda_common::wait_for_previous();
  const int64_t index = cuda_common::item_index();
  if (index < count) pack_one(job, index);
}

void pack_on_device(const ops::WeightView& checkpoint, const ops::WeightView& packed, device::Queue& queue) {
  const int64_t count = num_items(checkpoint);
  cuda_common::launch("pack_tiles", queue, pack_tiles, cuda_common::grid_for(count, kThreads), kThreads, 0,
                      job_of(checkpoint, packed), count);
}

constexpr ops::PackedLayout kLayout = {"tiles of tcgen05.mma", data_bytes, scale_bytes, pack, unpack, pack_on_device};

}  // namespace

const ops::PackedLayout* packed_tiles() {
  return &kLayout;
}

}  // namespace tessera::backends::sm100
