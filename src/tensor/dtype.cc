// SPDX-License-Identifier: Apache-2.0
#include "tensor/dtype.h"

#include <array>

namespace tessera {

namespace {

struct Row {
  DType dtype;
  int bits;
  std::string_view name;
};

constexpr std::array kRows = {
    Row{DType::kBool, 8, "BOOL"},
    Row{DType::kU8, 8, "U8"},
    Row{DType::kI8, 8, "I8"},
    Row{DType::kI16, 16, "I16"},
    Row{DType::kU16, 16, "U16"},
    Row{DType::kI32, 32, "I32"},
    Row{DType::kU32, 32, "U32"},
    Row{DType::kI64, 64, "I64"},
    Row{DType::kU64, 64, "U64"},
    Row{DType::kF16, 16, "F16"},
    Row{DType::kBF16, 16, "BF16"},
    Row{DType::kF32, 32, "F32"},
    Row{DType::kF64, 64, "F64"},
    Row{DType::kC64, 64, "C64"},
    Row{DType::kF8E4M3, 8, "F8_E4M3"},
    Row{DType::kF8E5M2, 8, "F8_E5M2"},
    Row{DType::kF8E8M0, 8, "F8_E8M0"},
    Row{DType::kF8E4M3Fnuz, 8, "F8_E4M3FNUZ"},
    Row{DType::kF8E5M2Fnuz, 8, "F8_E5M2FNUZ"},
    Row{DType::kF4, 4, "F4"},
    Row{DType::kF6E2M3, 6, "F6_E2M3"},
    Row{DType::kF6E3M2, 6, "F6_E3M2"},
};

constexpr bool rows_follow_the_enum() {
  for (size_t i = 0; i < kRows.size(); ++i) {
    if (static_cast<size_t>(kRows[i].dtype) != i) return false;
  }
  return true;
}
static_assert(rows_follow_the_enum(), "kRows is indexed by the enumerator");

}  // namespace

int dtype_bits(DType dtype) {
  return kRows[static_cast<size_t>(dtype)].bits;
}
std::string_view dtype_name(DType dtype) {
  return kRows[static_cast<size_t>(dtype)].name;
}

std::optional<DType> dtype_from_name(std::string_view name) {
  for (const Row& row : kRows) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

}  // namespace tessera
