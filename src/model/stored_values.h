// SPDX-License-Identifier: Apache-2.0
#pragma once
// Values as a checkpoint stores them: widening, and checks that name tensor and element.
#include <cstdint>
#include <string>

#include "checkpoint/checkpoint.h"

namespace tessera::model {

// Throws kDataLoss naming file, tensor and element.
[[noreturn]] void fail_value(const checkpoint::LocatedTensor& tensor, int64_t index, const std::string& expected,
                             const std::string& found);

// `count` values stored as F32 or BF16, as FP32, exactly.
void widen(DType stored, const void* bytes, int64_t count, float* out);

// Throws for the first NaN or infinity.
void check_finite(const checkpoint::LocatedTensor& tensor, const float* values, int64_t count);
void check_finite_bf16(const checkpoint::LocatedTensor& tensor, const uint16_t* values, int64_t count);

// E4M3 bytes: never NaN (0x7F, 0xFF); with kClear the sign must not be set either (hardware ignores a scale's sign).
enum class SignBit { kFree, kClear };
void check_e4m3(const checkpoint::LocatedTensor& tensor, const uint8_t* codes, int64_t count, SignBit sign,
                const char* expected);

}  // namespace tessera::model
