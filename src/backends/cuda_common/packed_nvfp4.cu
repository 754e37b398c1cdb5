// SPDX-License-Identifier: Apache-2.0
// Packing and its inverse, on the host and on a GPU: one function per two words, so that both do the same.
#include "backends/cuda_common/packed_nvfp4.h"

#include "backends/cuda_common/launch.cuh"
#include "numeric/nvfp4.h"

namespace tessera::backends::cuda_common {

namespace {

using Layout = PackedNvfp4;
constexpr int64_t kBlock = numeric::kNvfp4Block;
constexpr int kWordCodes = 8, kPairCodes = 2 * kWordCodes;  // of two words: columns of one block
constexpr int kUnitPairs = Layout::kRows * Layout::kColumns / kPairCodes;
static_assert(kPairCodes == kBlock);

// Where bit `bit` (3: the sign) of code `code` (0 to 15) of two words lies; from 32 on in the second.
TESSERA_HOST_DEVICE constexpr int bit_at(int code, int bit) {
  const int word = code / kWordCodes, j = code % kWordCodes / 2, half = code % 2 * 16, other = 16 - half;
  const bool is_sign = bit == 3;
  switch (j) {
    case 0:
      return 32 * word + half + (is_sign ? 15 : 6 + bit);
    case 1:
      return 32 * word + (is_sign ? other + 5 : half + 12 + bit);
    case 2:
      return 32 * word + half + (is_sign ? 9 : bit);
    default:
      break;
  }
  // In the word that both make; the odd word's bits stand two higher there.
  const int at = word == 0 ? (is_sign ? half + 13 : half + 4 + bit) : is_sign ? other + 3 : half + 10 + bit;
  return (Layout::kThirdBits >> at & 1) != 0 ? at : 32 + at - 2;
}

TESSERA_HOST_DEVICE uint64_t packed_pair(uint64_t codes) {
  uint64_t words = 0;
  for (int code = 0; code < kPairCodes; ++code) {
    for (int bit = 0; bit < 4; ++bit) words |= (codes >> (4 * code + bit) & 1) << bit_at(code, bit);
  }
  return words;
}
TESSERA_HOST_DEVICE uint64_t plain_pair(uint64_t words) {
  uint64_t codes = 0;
  for (int code = 0; code < kPairCodes; ++code) {
    for (int bit = 0; bit < 4; ++bit) codes |= (words >> bit_at(code, bit) & 1) << (4 * code + bit);
  }
  return codes;
}

struct Job {
  uint8_t *data, *scales, *packed;
  int64_t rows, cols;
};

// Two words of a packed matrix are a block of a lane's row.
struct Place {
  int64_t row, column;   // of its first code
  int64_t words, scale;  // where they and the block's scale lie among the packed bytes
};
TESSERA_HOST_DEVICE Place place_of(const Job& job, int64_t index) {
  const int64_t unit = index / kUnitPairs, units = Layout::units_of_row(job.cols);
  const int at = static_cast<int>(index % kUnitPairs), i = at % 2, lane = at / 2 % Layout::kLanes;
  const int piece = at / (2 * Layout::kLanes), row = lane / 4 + piece % 2 * 8;
  Place place;
  place.row = unit / units * Layout::kRows + row;
  place.column = unit % units * Layout::kColumns + piece / 2 * 128 + lane % 4 * 32 + i * kPairCodes;
  place.words = unit * Layout::kBytes + at * 8;
  place.scale = unit * Layout::kBytes + (Layout::kPieces * Layout::kLanes + lane) * Layout::kPieceBytes + piece * 2 + i;
  return place;
}

TESSERA_HOST_DEVICE void pack_one(const Job& job, int64_t index) {
  const Place place = place_of(job, index);
  uint64_t codes = 0;
  uint8_t scale = 0;
  if (place.row < job.rows && place.column < job.cols) {
    codes = *reinterpret_cast<const uint64_t*>(job.data + (place.row * job.cols + place.column) / 2);
    scale = job.scales[(place.row * job.cols + place.column) / kBlock];
  }
  *reinterpret_cast<uint64_t*>(job.packed + place.words) = packed_pair(codes);
  job.packed[place.scale] = scale;
}
TESSERA_HOST_DEVICE void unpack_one(const Job& job, int64_t index) {
  const Place place = place_of(job, index);
  if (place.row >= job.rows || place.column >= job.cols) return;
  const uint64_t words = *reinterpret_cast<const uint64_t*>(job.packed + place.words);
  *reinterpret_cast<uint64_t*>(job.data + (place.row * job.cols + place.column) / 2) = plain_pair(words);
  job.scales[(place.row * job.cols + place.column) / kBlock] = job.packed[place.scale];
}

int64_t data_bytes(const ops::WeightView& weight) {
  return ceil_div<int64_t>(weight.rows, Layout::kRows) * Layout::units_of_row(weight.cols) * Layout::kBytes;
}
int64_t scale_bytes(const ops::WeightView&) {
  return 0;  // among the data
}
int64_t num_pairs(const ops::WeightView& weight) {
  return data_bytes(weight) / Layout::kBytes * kUnitPairs;
}

Job job_of(const ops::WeightView& plain, const ops::WeightView& packed) {
  return {static_cast<uint8_t*>(const_cast<void*>(plain.data)),
          static_cast<uint8_t*>(const_cast<void*>(plain.block_scales)),
          static_cast<uint8_t*>(const_cast<void*>(packed.data)), plain.rows, plain.cols};
}

void pack(const ops::WeightView& checkpoint, const ops::WeightView& packed, device::Queue& queue) {
  const Job job = job_of(checkpoint, packed);
  queue.parallel_for(num_pairs(checkpoint), 1 << 14, [=](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) pack_one(job, index);
  });
}
void unpack(const ops::WeightView& packed, const ops::WeightView& checkpoint, device::Queue& queue) {
  const Job job = job_of(checkpoint, packed);
  queue.parallel_for(num_pairs(checkpoint), 1 << 14, [=](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) unpack_one(job, index);
  });
}

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) pack_pairs(Job job, int64_t count) {
  wait_for_previous();
  const int64_t index = item_index();
  if (index < count) pack_one(job, index);
}

void pack_on_device(const ops::WeightView& checkpoint, const ops::WeightView& packed, device::Queue& queue) {
  const int64_t count = num_pairs(checkpoint);
  launch("pack_pairs", queue, pack_pairs, grid_for(count, kThreads), kThreads, 0, job_of(checkpoint, packed), count);
}

constexpr ops::PackedLayout kLayout = {"units of mma.sync", data_bytes, scale_bytes, pack, unpack, pack_on_device};

}  // namespace

const ops::PackedLayout* packed_nvfp4() {
  return &kLayout;
}

}  // namespace tessera::backends::cuda_common
