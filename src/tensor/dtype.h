// SPDX-License-Identifier: Apache-2.0
#pragma once
// Element types, as safetensors names them.
#include <cstdint>
#include <optional>
#include <string_view>

namespace tessera {

enum class DType : uint8_t {
  kBool,
  kU8,
  kI8,
  kI16,
  kU16,
  kI32,
  kU32,
  kI64,
  kU64,
  kF16,
  kBF16,
  kF32,
  kF64,
  kC64,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kF4,
  kF6E2M3,
  kF6E3M2,
};

int dtype_bits(DType dtype);
std::string_view dtype_name(DType dtype);  // "BF16", "F8_E4M3", ...
std::optional<DType> dtype_from_name(std::string_view name);

}  // namespace tessera
