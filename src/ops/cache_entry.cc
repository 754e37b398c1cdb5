// SPDX-License-Identifier: Apache-2.0
#include "ops/cache_entry.h"

#include <fmt/format.h>

#include <cstring>

#include "base/error.h"
#include "numeric/bf16.h"
#include "numeric/fp8_block.h"
#include "numeric/mxfp4.h"

namespace tessera::ops {

std::string_view to_string(EntryFormat format) {
  switch (format) {
    case EntryFormat::kF32:
      return "f32";
    case EntryFormat::kBf16:
      return "bf16";
    case EntryFormat::kKvFp8Bf16:
      return "fp8+bf16";
    case EntryFormat::kKvFp8F32:
      return "fp8+f32";
    case EntryFormat::kIndexFp4:
      return "fp4";
  }
  return "?";
}

int64_t EntryLayout::entry_bytes() const {
  switch (format) {
    case EntryFormat::kF32:
      return width * 4;
    case EntryFormat::kBf16:
      return width * 2;
    case EntryFormat::kKvFp8Bf16:
    case EntryFormat::kKvFp8F32:
      return kv_offsets(*this).end;
    case EntryFormat::kIndexFp4:
      return width / 2 + width / kIndexGroup;
  }
  return 0;
}

std::string EntryLayout::to_string() const {
  return fmt::format("{} x {} ({} rotary)", ops::to_string(format), width, rope_dim);
}

EntryLayout kv_entry_layout(const Precision& precision, int64_t head_dim, int64_t rope_dim) {
  const bool is_f32 = precision.input == InputMode::kF32;
  EntryLayout layout{is_f32 ? EntryFormat::kF32 : EntryFormat::kBf16, head_dim, rope_dim};
  if (precision.cache == CacheMode::kFp8) {
    layout.format = is_f32 ? EntryFormat::kKvFp8F32 : EntryFormat::kKvFp8Bf16;
    if (layout.nope_dim() % kKvGroup != 0) {
      fail(
          ErrorCode::kUnsupported,
          fmt::format("cache fp8 needs head_dim - qk_rope_head_dim to be a multiple of {}, found {}; use --cache exact",
                      kKvGroup, layout.nope_dim()));
    }
  }
  return layout;
}

EntryLayout index_entry_layout(const Precision& precision, int64_t index_head_dim) {
  if (precision.cache == CacheMode::kFp8) {
    if (index_head_dim % kIndexGroup != 0) {
      fail(ErrorCode::kUnsupported,
           fmt::format("cache fp8 needs index_head_dim to be a multiple of {}, found {}; use --cache exact",
                       kIndexGroup, index_head_dim));
    }
    return {EntryFormat::kIndexFp4, index_head_dim, 0};
  }
  return {precision.input == InputMode::kF32 ? EntryFormat::kF32 : EntryFormat::kBf16, index_head_dim, 0};
}

void encode_entry(const EntryLayout& layout, const float* values, uint8_t* entry) {
  switch (layout.format) {
    case EntryFormat::kF32:
      std::memcpy(entry, values, static_cast<size_t>(layout.width) * 4);
      return;
    case EntryFormat::kBf16:
      for (int64_t i = 0; i < layout.width; ++i) {
        const uint16_t bits = numeric::bf16_from_float(values[i]);
        std::memcpy(entry + 2 * i, &bits, 2);
      }
      return;
    case EntryFormat::kIndexFp4:
      numeric::q4_quantize(values, layout.width, entry, entry + layout.width / 2);
      return;
    case EntryFormat::kKvFp8Bf16:
    case EntryFormat::kKvFp8F32: {
      const KvOffsets at = kv_offsets(layout);
      const int64_t nope = layout.nope_dim();
      numeric::q8_quantize(values, nope, kKvGroup, entry, entry + at.scales);
      const EntryLayout tail{layout.format == EntryFormat::kKvFp8F32 ? EntryFormat::kF32 : EntryFormat::kBf16,
                             layout.rope_dim, 0};
      encode_entry(tail, values + nope, entry + at.rope);
      const int64_t written = at.scales + nope / kKvGroup;
      std::memset(entry + written, 0, static_cast<size_t>(at.end - written));
      return;
    }
  }
}

void decode_entry(const EntryLayout& layout, const uint8_t* entry, float* values) {
  switch (layout.format) {
    case EntryFormat::kF32:
      std::memcpy(values, entry, static_cast<size_t>(layout.width) * 4);
      return;
    case EntryFormat::kBf16:
      for (int64_t i = 0; i < layout.width; ++i) {
        uint16_t bits = 0;
        std::memcpy(&bits, entry + 2 * i, 2);
        values[i] = numeric::bf16_to_float(bits);
      }
      return;
    case EntryFormat::kIndexFp4:
      numeric::q4_dequantize(entry, entry + layout.width / 2, layout.width, values);
      return;
    case EntryFormat::kKvFp8Bf16:
    case EntryFormat::kKvFp8F32: {
      const KvOffsets at = kv_offsets(layout);
      numeric::q8_dequantize(entry, entry + at.scales, layout.nope_dim(), kKvGroup, values);
      const EntryLayout tail{layout.format == EntryFormat::kKvFp8F32 ? EntryFormat::kF32 : EntryFormat::kBf16,
                             layout.rope_dim, 0};
      decode_entry(tail, entry + at.rope, values + layout.nope_dim());
      return;
    }
  }
}

}  // namespace tessera::ops
