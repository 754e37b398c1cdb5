// SPDX-License-Identifier: Apache-2.0
#include "bindings/python/weight.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"

namespace tessera::python {

Weight::Weight(DevicePtr device, nb::handle data, nb::handle block_scales, const std::vector<float>& tensor_scales)
    : device_(std::move(device)) {
  // Any shape first, to see whether there is one matrix or several.
  const nb::object shape = nb::getattr(data, "shape", nb::none());
  const bool is_stack = !shape.is_none() && nb::len(shape) == 3;
  const auto read = [&](nb::handle array, const char* name, std::initializer_list<Element> elements,
                        std::array<int64_t, 3> sizes) {
    return is_stack ? read_array(*device_, array, name, elements, {sizes[0], sizes[1], sizes[2]})
                    : read_array(*device_, array, name, elements, {sizes[1], sizes[2]});
  };
  using enum Element;
  data_ = read(data, "data", {kByte, kE4m3, kF32, kBf16}, {kAny, kAny, kAny});
  count_ = is_stack ? data_.shape[0] : 1;
  rows_ = data_.shape[data_.shape.size() - 2], cols_ = data_.shape.back();
  switch (data_.element) {
    case kF32:
      format_ = TESSERA_WEIGHT_F32;
      break;
    case kBf16:
      format_ = TESSERA_WEIGHT_BF16;
      break;
    case kE4m3:
      format_ = TESSERA_WEIGHT_FP8_BLOCK;
      break;
    default:
      format_ = TESSERA_WEIGHT_NVFP4;
      cols_ *= 2;
  }
  if (has_scales() == block_scales.is_none()) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("block_scales: expected {}", has_scales() ? "an array, which weights of this dtype have"
                                                               : "None, since weights of this dtype have none"));
  }
  if (format_ == TESSERA_WEIGHT_NVFP4) {
    scales_ = read(block_scales, "block_scales", {kE4m3, kByte}, {count_, rows_, cols_ / 16});
  } else if (has_scales()) {
    scales_ = read(block_scales, "block_scales", {kF32}, {count_, (rows_ + 127) / 128, (cols_ + 127) / 128});
  }
  tensor_scales_.assign(static_cast<size_t>(count_), 1.0f);
  if (tensor_scales.size() == 1) tensor_scales_.assign(static_cast<size_t>(count_), tensor_scales.front());
  if (tensor_scales.size() > 1) tensor_scales_ = tensor_scales;
  if (tensor_scales_.size() != static_cast<size_t>(count_)) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("tensor_scale: expected 1 or {} numbers, found {}", count_, tensor_scales_.size()));
  }
}

const char* Weight::format() const {
  constexpr const char* kNames[] = {"f32", "bf16", "fp8", "nvfp4"};
  return kNames[format_];
}

std::vector<tessera_weight> Weight::views() const {
  std::vector<tessera_weight> views;
  const size_t bytes = data_.owner.nbytes() / static_cast<size_t>(std::max<int64_t>(count_, 1));
  const size_t scale_bytes =
      has_scales() ? scales_.owner.nbytes() / static_cast<size_t>(std::max<int64_t>(count_, 1)) : 0;
  for (size_t i = 0; i < static_cast<size_t>(count_); ++i) {
    views.push_back({.format = format_,
                     .rows = rows_,
                     .cols = cols_,
                     .data = data_.as<uint8_t>() + i * bytes,
                     .block_scales = has_scales() ? scales_.as<uint8_t>() + i * scale_bytes : nullptr,
                     .tensor_scale = tensor_scales_[i]});
  }
  return views;
}

void check_device(const DevicePtr& device, const WeightPtr& weight, const char* name) {
  if (weight != nullptr && weight->device() != device) {
    fail(ErrorCode::kInvalidArgument, fmt::format("{}: expected a weight of this context", name));
  }
}

}  // namespace tessera::python
