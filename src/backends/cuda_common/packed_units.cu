// SPDX-License-Identifier: Apache-2.0
// Packing and its inverse, on the host and on a GPU: one function per 8 bytes of codes, so that both do the same.
#include "backends/cuda_common/packed_units.h"

#include "backends/cuda_common/launch.cuh"
#include "backends/cuda_common/packed_fp8.h"
#include "backends/cuda_common/packed_nvfp4.h"
#include "numeric/nvfp4.h"

namespace tessera::backends::cuda_common {

namespace {

using ops::WeightFormat;

struct Job {
  uint8_t *data, *scales, *packed, *packed_scales;
  int64_t rows, cols;
  bool scales_fold;
};

template <WeightFormat kFormat>
struct Packing {
  using Unit = PackedUnit<kFormat>;
  static constexpr bool kIsFp8 = kFormat == WeightFormat::kFp8Block;
  static constexpr int kItemCodes = 64 / Unit::kCodeBits;  // columns
  static constexpr int kUnitItems = Unit::kRows * Unit::kColumns / kItemCodes;
  static_assert(!Unit::kIsNvfp4 || kItemCodes == numeric::kNvfp4Block);

  TESSERA_HOST_DEVICE static constexpr int bit_at(int bit) {
    return Unit::kIsNvfp4 ? packed_nvfp4_bit(bit) : kIsFp8 ? packed_fp8_bit(bit) : bit;
  }
  TESSERA_HOST_DEVICE static uint64_t packed_item(uint64_t codes) {
    uint64_t words = 0;
    for (int bit = 0; bit < 64; ++bit) words |= (codes >> bit & 1) << bit_at(bit);
    return words;
  }
  TESSERA_HOST_DEVICE static uint64_t plain_item(uint64_t words) {
    uint64_t codes = 0;
    for (int bit = 0; bit < 64; ++bit) codes |= (words >> bit_at(bit) & 1) << bit;
    return codes;
  }

  // An item of a packed matrix is half a piece, of one row.
  struct Place {
    int64_t row, column;   // of its first code
    int64_t words, scale;  // where it and an NVFP4 block's scale lie among the packed bytes; words -1: nowhere
  };
  TESSERA_HOST_DEVICE static Place place_of(const Job& job, int64_t index) {
    constexpr int kRowPieces = Unit::kBlockPieces / 2;  // of a lane's 32 columns
    const int64_t unit = index / kUnitItems, units = Unit::units_of_row(job.cols);
    const int at = static_cast<int>(index % kUnitItems), i = at % 2, lane = at / 2 % Unit::kLanes;
    const int piece = at / (2 * Unit::kLanes), row = lane / 4 + piece / kRowPieces % 2 * 8;
    Place place;
    place.row = unit / units * Unit::kRows + row;
    place.column = unit % units * Unit::kColumns + piece / Unit::kBlockPieces * 128 + lane % 4 * 32 +
                   (piece % kRowPieces * 2 + i) * kItemCodes;
    const int64_t begin = unit / units * Unit::row_bytes(job.cols) + unit % units * Unit::kBytes;
    const bool is_whole = unit % units + 1 < units || (unit / units + 1) * Unit::kRows >= job.rows;
    const bool has_room = is_whole || piece / Unit::kBlockPieces < Unit::last_unit_blocks(job.cols);
    place.words = has_room ? begin + Unit::kScaleBytes + at * 8 : -1;
    place.scale = begin + lane * Unit::kPieceBytes + piece * 2 + i;
    return place;
  }

  // Indices from the items on are FP8's scales in their packed order.
  static int64_t num_items(const ops::WeightView& weight) {
    return ceil_div<int64_t>(weight.rows, Unit::kRows) * Unit::units_of_row(weight.cols) * kUnitItems;
  }
  static int64_t num_indices(const ops::WeightView& weight) { return num_items(weight) + scale_bytes(weight) / 4; }

  // Where the checkpoint has the packed scale number `at`; -1: padding.
  TESSERA_HOST_DEVICE static int64_t plain_scale_at(const Job& job, int64_t at) {
    const int64_t padded = packed_scales_of_row(job.cols), column = at % padded;
    const int64_t width = ceil_div<int64_t>(job.cols, numeric::kFp8WeightBlock);
    return column < width ? at / padded * width + column : -1;
  }
  // Bits, not values. Padding folds like the others, so that a row of a matrix has one kind of scales.
  TESSERA_HOST_DEVICE static void pack_scale(const Job& job, int64_t at) {
    const int64_t from = plain_scale_at(job, at);
    const uint32_t bits = from >= 0 ? reinterpret_cast<const uint32_t*>(job.scales)[from] : 0;
    reinterpret_cast<uint32_t*>(job.packed_scales)[at] = job.scales_fold ? folded_scale(bits) : bits;
  }
  TESSERA_HOST_DEVICE static void unpack_scale(const Job& job, int64_t at) {
    const int64_t to = plain_scale_at(job, at);
    const uint32_t bits = reinterpret_cast<const uint32_t*>(job.packed_scales)[at];
    if (to >= 0) reinterpret_cast<uint32_t*>(job.scales)[to] = job.scales_fold ? unfolded_scale(bits) : bits;
  }

  TESSERA_HOST_DEVICE static uint64_t* codes_of(const Job& job, const Place& place) {
    return reinterpret_cast<uint64_t*>(job.data + (place.row * job.cols + place.column) * Unit::kCodeBits / 8);
  }
  TESSERA_HOST_DEVICE static void pack_one(const Job& job, int64_t index, int64_t num_items) {
    if (index >= num_items) return pack_scale(job, index - num_items);
    const Place place = place_of(job, index);
    const bool is_there = place.row < job.rows && place.column < job.cols;
    if (place.words >= 0) {
      *reinterpret_cast<uint64_t*>(job.packed + place.words) = is_there ? packed_item(*codes_of(job, place)) : 0;
    }
    if constexpr (Unit::kIsNvfp4) {
      job.packed[place.scale] =
          is_there ? job.scales[(place.row * job.cols + place.column) / numeric::kNvfp4Block] : uint8_t{0};
    }
  }
  TESSERA_HOST_DEVICE static void unpack_one(const Job& job, int64_t index, int64_t num_items) {
    if (index >= num_items) return unpack_scale(job, index - num_items);
    const Place place = place_of(job, index);
    if (place.row >= job.rows || place.column >= job.cols) return;
    *codes_of(job, place) = plain_item(*reinterpret_cast<const uint64_t*>(job.packed + place.words));
    if constexpr (Unit::kIsNvfp4) {
      job.scales[(place.row * job.cols + place.column) / numeric::kNvfp4Block] = job.packed[place.scale];
    }
  }

  static int64_t data_bytes(const ops::WeightView& weight) {
    return ceil_div<int64_t>(weight.rows, Unit::kRows) * Unit::row_bytes(weight.cols) +
           (Unit::kBlocks - Unit::last_unit_blocks(weight.cols)) * Unit::kBlockBytes;
  }
  static int64_t scale_bytes(const ops::WeightView& weight) {
    if (!kIsFp8) return 0;  // none, or among the data
    return ceil_div<int64_t>(weight.rows, numeric::kFp8WeightBlock) * packed_scales_of_row(weight.cols) * 4;
  }
  static Job job_of(const ops::WeightView& plain, const ops::WeightView& packed) {
    const auto bytes = [](const void* at) { return static_cast<uint8_t*>(const_cast<void*>(at)); };
    return {bytes(plain.data), bytes(plain.block_scales), bytes(packed.data), bytes(packed.block_scales), plain.rows,
            plain.cols,        packed.scales_fold};
  }

  static void pack(const ops::WeightView& checkpoint, const ops::WeightView& packed, device::Queue& queue) {
    const Job job = job_of(checkpoint, packed);
    const int64_t items = num_items(checkpoint);
    queue.parallel_for(num_indices(checkpoint), 1 << 14, [=](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) pack_one(job, index, items);
    });
  }
  static void unpack(const ops::WeightView& packed, const ops::WeightView& checkpoint, device::Queue& queue) {
    const Job job = job_of(checkpoint, packed);
    const int64_t items = num_items(checkpoint);
    queue.parallel_for(num_indices(checkpoint), 1 << 14, [=](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) unpack_one(job, index, items);
    });
  }
  static void pack_on_device(const ops::WeightView& checkpoint, const ops::WeightView& packed, device::Queue& queue);
};

constexpr int kThreads = 256;

template <WeightFormat kFormat>
__global__ void __launch_bounds__(kThreads) pack_items(Job job, int64_t num_items, int64_t count) {
  wait_for_previous();
  const int64_t index = item_index();
  if (index < count) Packing<kFormat>::pack_one(job, index, num_items);
}

template <WeightFormat kFormat>
void Packing<kFormat>::pack_on_device(const ops::WeightView& checkpoint, const ops::WeightView& packed,
                                      device::Queue& queue) {
  const int64_t count = num_indices(checkpoint);
  launch("pack_items", queue, pack_items<kFormat>, grid_for(count, kThreads), kThreads, 0, job_of(checkpoint, packed),
         num_items(checkpoint), count);
}

template <WeightFormat kFormat>
constexpr ops::PackedLayout kLayout = {"units of mma.sync",           Packing<kFormat>::data_bytes,
                                       Packing<kFormat>::scale_bytes, Packing<kFormat>::pack,
                                       Packing<kFormat>::unpack,      Packing<kFormat>::pack_on_device};

}  // namespace

const ops::PackedLayout* packed_units(WeightFormat format) {
  switch (format) {
    case WeightFormat::kNvfp4:
      return &kLayout<WeightFormat::kNvfp4>;
    case WeightFormat::kFp8Block:
      return &kLayout<WeightFormat::kFp8Block>;
    case WeightFormat::kBf16:
      return &kLayout<WeightFormat::kBf16>;
    case WeightFormat::kF32:
      break;
  }
  return nullptr;
}

const ops::PackedLayout* packed_units_of_each() {
  using ops::WeightView;
  static constexpr ops::PackedLayout kLayoutOfEach = {
      "units of mma.sync, of each weight's format",
      [](const WeightView& weight) { return packed_units(weight.format)->data_bytes(weight); },
      [](const WeightView& weight) { return packed_units(weight.format)->scale_bytes(weight); },
      [](const WeightView& checkpoint, const WeightView& packed, device::Queue& queue) {
        packed_units(checkpoint.format)->pack(checkpoint, packed, queue);
      },
      [](const WeightView& packed, const WeightView& checkpoint, device::Queue& queue) {
        packed_units(packed.format)->unpack(packed, checkpoint, queue);
      },
      [](const WeightView& checkpoint, const WeightView& packed, device::Queue& queue) {
        packed_units(checkpoint.format)->pack_on_device(checkpoint, packed, queue);
      }};
  return &kLayoutOfEach;
}

}  // namespace tessera::backends::cuda_common
