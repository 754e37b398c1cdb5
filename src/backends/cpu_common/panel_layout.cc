// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/panel_layout.h"

#include <algorithm>
#include <cstring>

#include "base/integer_math.h"

namespace tessera::backends::cpu_common {

namespace {

using ops::WeightFormat;
using ops::WeightView;

constexpr int64_t kScaleBlock = 128;  // FP8: rows and columns of one scale

int64_t block_bytes(WeightFormat format) {
  switch (format) {
    case WeightFormat::kNvfp4:
      return 128;
    case WeightFormat::kFp8Block:
      return 256;
    case WeightFormat::kBf16:
      return 512;
    case WeightFormat::kF32:
      return 1024;
  }
  return 0;
}

int64_t panel_bytes(const WeightView& weight) {
  return weight.cols / kPanelBlock * block_bytes(weight.format);
}

int64_t data_bytes(const WeightView& weight) {
  return num_panels(weight.rows) * panel_bytes(weight);
}

int64_t scale_bytes(const WeightView& weight) {
  return weight.format == WeightFormat::kNvfp4 ? num_panels(weight.rows) * weight.cols : weight.scale_bytes();
}

// Where block `block` of a panel begins, in blocks from the beginning of the weight.
int64_t block_index(const WeightView& weight, int64_t panel, int64_t block) {
  const int64_t blocks = weight.cols / kPanelBlock, all = num_panels(weight.rows);
  if (panel % 2 == 0 && panel + 1 == all) return panel * blocks + block;
  return panel / 2 * 2 * blocks + 2 * block + panel % 2;
}

enum class Direction { kPack, kUnpack };

// In both halves of 32 bits: nibbles 0 to 7 become 0 2 4 6 1 3 5 7, and back.
uint64_t evens_first(uint64_t x) {
  uint64_t swap = (x ^ (x >> 4)) & 0x00F000F000F000F0;
  x ^= swap ^ (swap << 4);
  swap = (x ^ (x >> 8)) & 0x0000FF000000FF00;
  return x ^ swap ^ (swap << 8);
}
uint64_t evens_apart(uint64_t x) {
  uint64_t swap = (x ^ (x >> 8)) & 0x0000FF000000FF00;
  x ^= swap ^ (swap << 8);
  swap = (x ^ (x >> 4)) & 0x00F000F000F000F0;
  return x ^ swap ^ (swap << 4);
}

// Moves the 16 inputs of one row between its place in the checkpoint and its place in a block.
template <WeightFormat kFormat, Direction kDirection>
void move_row(uint8_t* plain, uint8_t* block, int64_t r) {
  const auto move = [](uint8_t* a, uint8_t* b, size_t bytes) {
    kDirection == Direction::kPack ? std::memcpy(b, a, bytes) : std::memcpy(a, b, bytes);
  };
  if constexpr (kFormat == WeightFormat::kNvfp4) {
    uint8_t *low = block + r * 4, *high = low + 16 * 4;
    uint64_t codes = 0;
    if (kDirection == Direction::kPack) {
      std::memcpy(&codes, plain, 8);
      codes = evens_first(codes);
      const auto first = static_cast<uint32_t>(codes), second = static_cast<uint32_t>(codes >> 32);
      std::memcpy(low, &first, 4);
      std::memcpy(high, &second, 4);
    } else {
      uint32_t first = 0, second = 0;
      std::memcpy(&first, low, 4);
      std::memcpy(&second, high, 4);
      codes = evens_apart(static_cast<uint64_t>(second) << 32 | first);
      std::memcpy(plain, &codes, 8);
    }
  } else if constexpr (kFormat == WeightFormat::kFp8Block) {
    for (int64_t k = 0; k < 16; k += 2) move(plain + k, block + k / 4 * 64 + r / 4 * 16 + k % 4 / 2 * 8 + r % 4 * 2, 2);
  } else if constexpr (kFormat == WeightFormat::kBf16) {
    for (int64_t k = 0; k < 16; k += 2) move(plain + 2 * k, block + k / 2 * 64 + r * 4, 4);
  } else {
    for (int64_t k = 0; k < 16; ++k) move(plain + 4 * k, block + k * 64 + r * 4, 4);
  }
}

template <WeightFormat kFormat, Direction kDirection>
void move_panels(const WeightView& plain, const WeightView& packed, device::Queue& queue) {
  const int64_t blocks = plain.cols / kPanelBlock, bytes = block_bytes(kFormat);
  const int64_t plain_row = WeightView{kFormat, 1, plain.cols}.data_bytes(), plain_block = plain_row / blocks;
  uint8_t* plain_data = static_cast<uint8_t*>(const_cast<void*>(plain.data));
  uint8_t* packed_data = static_cast<uint8_t*>(const_cast<void*>(packed.data));
  uint8_t* plain_scales = static_cast<uint8_t*>(const_cast<void*>(plain.block_scales));
  uint8_t* packed_scales = static_cast<uint8_t*>(const_cast<void*>(packed.block_scales));
  constexpr bool kHasRowScales = kFormat == WeightFormat::kNvfp4;
  queue.parallel_for(num_panels(plain.rows), 4, [=](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t first = p * kPanelRows, count = std::min(kPanelRows, plain.rows - first);
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t at = block_index(plain, p, b);
        uint8_t* block = packed_data + at * bytes;
        if (kDirection == Direction::kPack && count < kPanelRows) {
          std::memset(block, 0, static_cast<size_t>(bytes));
          if (kHasRowScales) std::memset(packed_scales + at * kPanelRows, 0, kPanelRows);
        }
        for (int64_t r = 0; r < count; ++r) {
          const int64_t n = first + r;
          move_row<kFormat, kDirection>(plain_data + n * plain_row + b * plain_block, block, r);
          if (!kHasRowScales) continue;
          uint8_t* one = plain_scales + n * blocks + b;
          uint8_t* other = packed_scales + at * kPanelRows + r;
          kDirection == Direction::kPack ? * other = *one : * one = *other;
        }
      }
    }
  });
}

template <Direction kDirection>
void move_all(const WeightView& plain, const WeightView& packed, device::Queue& queue) {
  switch (plain.format) {
    case WeightFormat::kNvfp4:
      move_panels<WeightFormat::kNvfp4, kDirection>(plain, packed, queue);
      return;
    case WeightFormat::kBf16:
      move_panels<WeightFormat::kBf16, kDirection>(plain, packed, queue);
      return;
    case WeightFormat::kF32:
      move_panels<WeightFormat::kF32, kDirection>(plain, packed, queue);
      return;
    case WeightFormat::kFp8Block: {
      move_panels<WeightFormat::kFp8Block, kDirection>(plain, packed, queue);
      const bool is_packing = kDirection == Direction::kPack;
      std::memcpy(const_cast<void*>(is_packing ? packed.block_scales : plain.block_scales),
                  is_packing ? plain.block_scales : packed.block_scales, static_cast<size_t>(plain.scale_bytes()));
      return;
    }
  }
}

void pack(const WeightView& checkpoint, const WeightView& packed, device::Queue& queue) {
  move_all<Direction::kPack>(checkpoint, packed, queue);
}
void unpack(const WeightView& packed, const WeightView& checkpoint, device::Queue& queue) {
  move_all<Direction::kUnpack>(checkpoint, packed, queue);
}

constexpr ops::PackedLayout kLayout = {"panels of 16 rows", data_bytes, scale_bytes, pack, unpack};

}  // namespace

const ops::PackedLayout* panel_layout() {
  return &kLayout;
}

int64_t num_panels(int64_t rows) {
  return ceil_div(rows, kPanelRows);
}

Panel panel_of(const ops::WeightView& packed, int64_t index) {
  const int64_t at = block_index(packed, index, 0);
  const bool is_alone = index % 2 == 0 && index + 1 == num_panels(packed.rows);
  const uint8_t* scales = static_cast<const uint8_t*>(packed.block_scales);
  Panel panel{static_cast<const uint8_t*>(packed.data) + at * block_bytes(packed.format), scales, is_alone ? 1 : 2};
  if (packed.format == WeightFormat::kNvfp4) panel.scales = scales + at * kPanelRows;
  if (packed.format == WeightFormat::kFp8Block) {
    const int64_t row_bytes = ceil_div(packed.cols, kScaleBlock) * 4;
    panel.scales = scales + index * kPanelRows / kScaleBlock * row_bytes;
  }
  return panel;
}

}  // namespace tessera::backends::cpu_common
