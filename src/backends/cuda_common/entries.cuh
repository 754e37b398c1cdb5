// SPDX-License-Identifier: Apache-2.0
#pragma once
// Cache entries (ops/cache_entry.h) as kernels see them.
#include <cstdint>

#include "numeric/bf16.h"
#include "numeric/e2m1.h"
#include "numeric/fp8_block.h"
#include "numeric/mxfp4.h"
#include "ops/cache_entry.h"

namespace tessera::backends::cuda_common {

struct Entries {
  ops::EntryFormat format;
  int64_t width, nope, bytes;
  ops::KvOffsets at;  // of kKvFp8 entries

  // Value c of an entry of that format: the kernel is compiled for it, so that its loads can run ahead.
  template <ops::EntryFormat kFormat>
  __device__ float value(const uint8_t* entry, int c) const {
    if constexpr (kFormat == ops::EntryFormat::kF32) {
      return reinterpret_cast<const float*>(entry)[c];
    } else if constexpr (kFormat == ops::EntryFormat::kBf16) {
      return numeric::bf16_to_float(reinterpret_cast<const uint16_t*>(entry)[c]);
    } else if constexpr (kFormat == ops::EntryFormat::kIndexFp4) {
      return numeric::e2m1_to_float(entry[c / 2] >> (c % 2 * 4) & 15) *
             numeric::e8m0_to_float(entry[width / 2 + c / ops::kIndexGroup]);
    } else {
      if (c < nope) {
        return numeric::e4m3_to_float(entry[c]) * numeric::e8m0_to_float(entry[at.scales + c / ops::kKvGroup]);
      }
      const uint8_t* rope = entry + at.rope;
      return kFormat == ops::EntryFormat::kKvFp8F32
                 ? reinterpret_cast<const float*>(rope)[c - nope]
                 : numeric::bf16_to_float(reinterpret_cast<const uint16_t*>(rope)[c - nope]);
    }
  }
};

// Bytes of DeepSeek-V4's keys, of which one group is rotary, and where their parts are, as constants: in instructions
// they are free.
template <ops::EntryFormat kFormat, int kWidth>
struct EntryBytes {
  static constexpr int kGroup = static_cast<int>(ops::kKvGroup);
  static constexpr bool kHasFp8 = kFormat == ops::EntryFormat::kKvFp8Bf16;
  static constexpr ops::KvOffsets kAt = ops::kv_offsets({kFormat, kWidth, kGroup});
  static constexpr int64_t kCount = kHasFp8 ? kAt.end : 2 * kWidth;
  static_assert(!kHasFp8 || (kAt.rope == kWidth - kGroup && kAt.scales % 8 == 0 && kCount % 8 == 0));
};

// Calls function(constant) with the format as a constant expression: constant.value.
template <ops::EntryFormat kFormat>
struct EntryConstant {
  static constexpr ops::EntryFormat value = kFormat;
};
template <class Function>
void with_entries(ops::EntryFormat format, Function&& function) {
  switch (format) {
    case ops::EntryFormat::kF32:
      return function(EntryConstant<ops::EntryFormat::kF32>());
    case ops::EntryFormat::kBf16:
      return function(EntryConstant<ops::EntryFormat::kBf16>());
    case ops::EntryFormat::kKvFp8Bf16:
      return function(EntryConstant<ops::EntryFormat::kKvFp8Bf16>());
    case ops::EntryFormat::kKvFp8F32:
      return function(EntryConstant<ops::EntryFormat::kKvFp8F32>());
    case ops::EntryFormat::kIndexFp4:
      return function(EntryConstant<ops::EntryFormat::kIndexFp4>());
  }
}

inline Entries entries_of(const ops::EntryLayout& layout) {
  return {layout.format, layout.width, layout.nope_dim(), layout.entry_bytes(), ops::kv_offsets(layout)};
}

}  // namespace tessera::backends::cuda_common
