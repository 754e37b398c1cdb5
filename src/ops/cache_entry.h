// SPDX-License-Identifier: Apache-2.0
#pragma once
// The bytes of one cached vector. Entries of a cache lie one after the other, entry_bytes() apart.
//   kF32, kBf16   width values
//   kKvFp8Bf16    nope E4M3 codes | rope BF16 | nope/64 UE8M0 scales | padding to 8: 584 bytes at 448 + 64
//   kKvFp8F32     the same with the rotary part in FP32: mode f32 x fp8, in which nothing else is rounded
//   kIndexFp4     width/2 bytes of E2M1 codes (even element low) | width/32 UE8M0 scales: 68 bytes at 128
// Source: DeepSeek-V4 inference/kernel.py (act_quant, fp4 quantiser); the 584-byte entry is FlashMLA's content.
#include <cstdint>
#include <string>
#include <string_view>

#include "base/integer_math.h"
#include "ops/precision.h"
#include "tensor/tensor_view.h"

namespace tessera::ops {

enum class EntryFormat : uint8_t { kF32, kBf16, kKvFp8Bf16, kKvFp8F32, kIndexFp4 };

constexpr int64_t kKvGroup = 64;     // values that share an E4M3 scale
constexpr int64_t kIndexGroup = 32;  // values that share an E2M1 scale

struct EntryLayout {
  EntryFormat format = EntryFormat::kBf16;
  int64_t width = 0;     // values per vector
  int64_t rope_dim = 0;  // of them, the last ones, never quantised (0 for index keys)

  int64_t entry_bytes() const;
  constexpr int64_t nope_dim() const { return width - rope_dim; }
  std::string to_string() const;
  friend bool operator==(const EntryLayout&, const EntryLayout&) = default;
};

// Byte offsets inside a kKvFp8 entry: codes, then the rotary part, then the scales.
struct KvOffsets {
  int64_t rope, scales, end;
};

constexpr KvOffsets kv_offsets(const EntryLayout& layout) {
  const int64_t rope_bytes = layout.rope_dim * (layout.format == EntryFormat::kKvFp8F32 ? 4 : 2);
  const int64_t scales = layout.nope_dim() + rope_bytes;
  const int64_t end = scales + layout.nope_dim() / kKvGroup;
  return {layout.nope_dim(), scales, round_up<int64_t>(end, 8)};
}

// The layouts of a model's caches in a precision.
EntryLayout kv_entry_layout(const Precision& precision, int64_t head_dim, int64_t rope_dim);
EntryLayout index_entry_layout(const Precision& precision, int64_t index_head_dim);

// One vector of `width` FP32 values to bytes and back.
void encode_entry(const EntryLayout& layout, const float* values, uint8_t* entry);
void decode_entry(const EntryLayout& layout, const uint8_t* entry, float* values);

std::string_view to_string(EntryFormat format);

}  // namespace tessera::ops
