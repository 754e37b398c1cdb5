// SPDX-License-Identifier: Apache-2.0
#include "bindings/c/boundary.h"

#include <fmt/format.h>

#include <cmath>
#include <iterator>
#include <new>
#include <string>

#include "backends/registry.h"
#include "base/env.h"
#include "base/error.h"

tessera::ops::Planner tessera_context::planner() const {
  using namespace tessera;
  return {backends::all_backends(), machine, ops::parse_forced(env_value("TESSERA_FORCE").value_or(""))};
}

namespace tessera::bindings {

namespace {

thread_local std::string last_message;

tessera_status status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return TESSERA_INVALID_ARGUMENT;
    case ErrorCode::kNotFound:
      return TESSERA_NOT_FOUND;
    case ErrorCode::kDataLoss:
      return TESSERA_DATA_LOSS;
    case ErrorCode::kUnsupported:
      return TESSERA_UNSUPPORTED;
    case ErrorCode::kResourceExhausted:
      return TESSERA_RESOURCE_EXHAUSTED;
    case ErrorCode::kCancelled:
      return TESSERA_CANCELLED;
    case ErrorCode::kDeviceError:
      return TESSERA_DEVICE_ERROR;
    case ErrorCode::kNotFinite:
      return TESSERA_NOT_FINITE;
    case ErrorCode::kInternal:
      return TESSERA_INTERNAL;
  }
  return TESSERA_INTERNAL;
}

tessera_status failed(tessera_status status, const char* message) noexcept {
  try {
    last_message = message;
  } catch (const std::bad_alloc&) {
    last_message.clear();  // no memory for the message either
  }
  return status;
}

}  // namespace

tessera_status call_guarded(void (*call)(void* object), void* object) noexcept {
  try {
    call(object);
    return TESSERA_OK;
  } catch (const Error& error) {
    return failed(status_of(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return failed(TESSERA_RESOURCE_EXHAUSTED, "out of memory");
  } catch (const std::exception& error) {
    return failed(TESSERA_INTERNAL, error.what());
  } catch (...) {
    return failed(TESSERA_INTERNAL, "an exception of an unknown type");
  }
}

void check_not_null(const void* pointer, const char* name) {
  if (pointer == nullptr) fail(ErrorCode::kInvalidArgument, fmt::format("{}: expected an address, found NULL", name));
}

void check_pointer(const void* pointer, size_t alignment, const char* name) {
  check_not_null(pointer, name);
  const size_t rest = reinterpret_cast<uintptr_t>(pointer) % alignment;
  if (rest != 0) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("{}: expected an address aligned to {} bytes, found one {} behind", name, alignment, rest));
  }
}

void check_size(int64_t value, int64_t least, int64_t most, const char* name) {
  if (value >= least && value <= most) return;
  fail(ErrorCode::kInvalidArgument, fmt::format("{}: expected {} to {}, found {}", name, least, most, value));
}

void check_tokens(int64_t num_tokens, int64_t max_tokens) {
  check_size(num_tokens, 0, max_tokens, "num_tokens");
}

void check_flag(bool is_right, const char* name, const char* expected, int64_t found) {
  if (is_right) return;
  fail(ErrorCode::kInvalidArgument, fmt::format("{}: expected {}, found {}", name, expected, found));
}

DType dtype_of(tessera_dtype dtype, const char* name) {
  check_flag(dtype == TESSERA_F32 || dtype == TESSERA_BF16, name, "TESSERA_F32 or TESSERA_BF16", dtype);
  return dtype == TESSERA_F32 ? DType::kF32 : DType::kBF16;
}

ops::InputMode input_mode_of(tessera_input_mode mode, const char* name) {
  switch (mode) {
    case TESSERA_INPUT_F32:
      return ops::InputMode::kF32;
    case TESSERA_INPUT_A16:
      return ops::InputMode::kA16;
    case TESSERA_INPUT_A4:
      return ops::InputMode::kA4;
    case TESSERA_INPUT_A8:
      return ops::InputMode::kA8;
    default:
      fail(ErrorCode::kInvalidArgument, fmt::format("{}: expected a TESSERA_INPUT_ value, found {}", name, mode));
  }
}

DType activation_of(tessera_dtype dtype, ops::InputMode input) {
  const DType activation = dtype_of(dtype, "activation");
  const bool is_f32 = input == ops::InputMode::kF32;
  check_flag((activation == DType::kF32) == is_f32, "activation",
             is_f32 ? "TESSERA_F32 with TESSERA_INPUT_F32" : "TESSERA_BF16 with this input mode", dtype);
  return activation;
}

ops::WeightView weight_of(const tessera_weight* weight, int64_t rows, int64_t cols, const char* name) {
  check_not_null(weight, name);
  ops::WeightView view;
  switch (weight->format) {
    case TESSERA_WEIGHT_F32:
      view.format = ops::WeightFormat::kF32;
      break;
    case TESSERA_WEIGHT_BF16:
      view.format = ops::WeightFormat::kBf16;
      break;
    case TESSERA_WEIGHT_FP8_BLOCK:
      view.format = ops::WeightFormat::kFp8Block;
      break;
    case TESSERA_WEIGHT_NVFP4:
      view.format = ops::WeightFormat::kNvfp4;
      break;
    default:
      fail(ErrorCode::kInvalidArgument,
           fmt::format("{}.format: expected a TESSERA_WEIGHT_ value, found {}", name, weight->format));
  }
  if (weight->rows != rows || weight->cols != cols) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("{}: expected [{}, {}], found [{}, {}]", name, rows, cols, weight->rows, weight->cols));
  }
  const std::string prefix = name;
  view.rows = rows, view.cols = cols;
  check_pointer(weight->data, kDataAlignment, (prefix + ".data").c_str());
  view.data = weight->data;
  if (view.format == ops::WeightFormat::kNvfp4 || view.format == ops::WeightFormat::kFp8Block) {
    check_pointer(weight->block_scales, kDataAlignment, (prefix + ".block_scales").c_str());
    view.block_scales = weight->block_scales;
  }
  if (view.format == ops::WeightFormat::kNvfp4) {
    check_flag(cols % 16 == 0, (prefix + ".cols").c_str(), "a multiple of 16", cols);
    if (!(weight->tensor_scale > 0) || !std::isfinite(weight->tensor_scale)) {
      fail(ErrorCode::kInvalidArgument,
           fmt::format("{}.tensor_scale: expected a finite number above 0, found {}", name, weight->tensor_scale));
    }
    view.tensor_scale = weight->tensor_scale;
  }
  return view;
}

}  // namespace tessera::bindings

extern "C" {

const char* tessera_version(void) {
  return TESSERA_VERSION;
}

int32_t tessera_abi_version(void) {
  return TESSERA_ABI_VERSION;
}

const char* tessera_error_message(void) {
  return tessera::bindings::last_message.c_str();
}

const char* tessera_status_name(tessera_status status) {
  constexpr const char* kNames[] = {
      "ok",        "invalid argument", "not found",  "data loss", "unsupported", "resource exhausted",
      "cancelled", "device error",     "not finite", "internal"};
  return status >= 0 && status < static_cast<tessera_status>(std::size(kNames)) ? kNames[status] : "unknown";
}
}
