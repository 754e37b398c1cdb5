// SPDX-License-Identifier: Apache-2.0
// Contexts, and quantisation, which has no state.
#include <fmt/format.h>

#include <cmath>
#include <vector>

#include "base/error.h"
#include "bindings/c/boundary.h"
#include "device/device_choice.h"
#include "device/gpu_executor.h"
#include "numeric/nvfp4.h"
#include "ops/reference_rows.h"

namespace tessera::bindings {

namespace {

void quantize_rows(const TensorView& x, uint8_t* codes, uint8_t* scales, float* globals, device::Queue& queue) {
  const int64_t cols = x.shape[1];
  queue.parallel_for(x.shape[0], 1 + 4096 / cols, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(cols));
    for (int64_t r = begin; r < end; ++r) {
      ops::load_floats(x, r * cols, cols, row.data());
      globals[r] = numeric::nvfp4_activation_scale(numeric::abs_max(row.data(), cols));
      numeric::nvfp4_quantize_row(row.data(), cols, globals[r], codes + r * cols / 2, scales + r * cols / 16);
    }
  });
}

void quantize_weight(const TensorView& x, numeric::Nvfp4WeightRule rule, uint8_t* codes, uint8_t* scales, float* global,
                     device::Queue& queue) {
  const int64_t rows = x.shape[0], cols = x.shape[1];
  std::vector<float> largest(static_cast<size_t>(rows));
  queue.parallel_for(rows, 1 + 4096 / cols, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(cols));
    for (int64_t r = begin; r < end; ++r) {
      ops::load_floats(x, r * cols, cols, row.data());
      largest[static_cast<size_t>(r)] = numeric::abs_max(row.data(), cols);
    }
  });
  for (int64_t r = 0; r < rows; ++r) {
    if (std::isfinite(largest[static_cast<size_t>(r)])) continue;
    fail(ErrorCode::kNotFinite, fmt::format("x: row {} of a weight holds NaN or infinity", r));
  }
  const float scale = numeric::nvfp4_weight_scale(numeric::abs_max(largest.data(), rows), rule);
  queue.parallel_for(rows, 1 + 4096 / cols, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(cols));
    for (int64_t r = begin; r < end; ++r) {
      ops::load_floats(x, r * cols, cols, row.data());
      numeric::nvfp4_quantize_weight_row(row.data(), cols, scale, rule, codes + r * cols / 2, scales + r * cols / 16);
    }
  });
  *global = scale;
}

}  // namespace

}  // namespace tessera::bindings

using namespace tessera;
using namespace tessera::bindings;

extern "C" {

tessera_status tessera_context_open(const char* device, void* stream, int32_t num_threads, tessera_context** context) {
  return guarded([&] {
    check_not_null(device, "device");
    check_not_null(context, "context");
    check_size(num_threads, 0, 4096, "num_threads");
    auto opened = std::make_unique<tessera_context>();
    opened->machine = device::machine_of(device);
    if (opened->machine.gpu.has_value()) {
      opened->executor = device::make_gpu_executor(*opened->machine.gpu, stream);
    } else {
      check_flag(stream == nullptr, "stream", "NULL on the CPU", static_cast<int64_t>(stream != nullptr));
      opened->executor = device::make_executor(opened->machine, num_threads);
    }
    opened->planner();  // malformed TESSERA_FORCE and TESSERA_BACKENDS are errors here
    *context = opened.release();
  });
}

void tessera_context_close(tessera_context* context) {
  if (context == nullptr) return;
  tessera_context_synchronize(context);
  context->allocations.clear();  // before the memory that they lie in
  delete context;
}

tessera_status tessera_context_synchronize(tessera_context* context) {
  return guarded([&] {
    check_not_null(context, "context");
    context->executor->make_current();
    context->executor->synchronize();
  });
}

tessera_status tessera_allocate(tessera_context* context, size_t bytes, void** data) {
  return guarded([&] {
    check_not_null(context, "context");
    check_not_null(data, "data");
    check_flag(bytes > 0, "bytes", "more than 0", 0);
    context->executor->make_current();
    device::Buffer buffer(bytes, context->memory());
    void* const address = buffer.data();
    context->allocations.emplace(address, std::move(buffer));
    *data = address;
  });
}

tessera_status tessera_release(tessera_context* context, void* data) {
  return guarded([&] {
    check_not_null(context, "context");
    if (data == nullptr) return;
    context->executor->make_current();
    if (context->allocations.erase(data) == 0) {
      fail(ErrorCode::kInvalidArgument, "data: expected an address that tessera_allocate gave");
    }
  });
}

tessera_status tessera_upload(tessera_context* context, void* target, const void* host, size_t bytes) {
  return guarded([&] {
    check_not_null(context, "context");
    if (bytes == 0) return;
    check_not_null(target, "target");
    check_not_null(host, "host");
    context->executor->make_current();
    context->memory().upload(target, host, bytes);
    context->executor->synchronize();
  });
}

tessera_status tessera_download(tessera_context* context, void* host, const void* source, size_t bytes) {
  return guarded([&] {
    check_not_null(context, "context");
    if (bytes == 0) return;
    check_not_null(host, "host");
    check_not_null(source, "source");
    context->executor->make_current();
    context->memory().download(host, source, bytes);
    context->executor->synchronize();
  });
}

tessera_status tessera_quantize_nvfp4(tessera_context* context, tessera_nvfp4_rule rule, tessera_dtype dtype,
                                      const void* x, int64_t rows, int64_t cols, uint8_t* codes, uint8_t* scales,
                                      float* globals) {
  return guarded([&] {
    check_not_null(context, "context");
    const DType type = dtype_of(dtype, "dtype");
    check_flag(rule >= TESSERA_NVFP4_ROWS && rule <= TESSERA_NVFP4_TENSOR_FOUR_OVER_SIX, "rule",
               "a TESSERA_NVFP4_ value", rule);
    check_size(rows, 0, kMaxSize, "rows");
    check_size(cols, numeric::kNvfp4Block, kMaxSize, "cols");
    check_flag(cols % numeric::kNvfp4Block == 0, "cols", "a multiple of 16", cols);
    if (!context->memory().is_host()) {
      fail(ErrorCode::kUnsupported,
           "quantisation to NVFP4 runs on the CPU only; on a GPU, linear maps take TESSERA_INPUT_A4");
    }
    if (rows == 0) return;
    check_pointer(x, type == DType::kF32 ? 4 : 2, "x");
    check_not_null(codes, "codes");
    check_not_null(scales, "scales");
    check_pointer(globals, alignof(float), "globals");
    const TensorView view{const_cast<void*>(x), type, {rows, cols}};
    if (rule == TESSERA_NVFP4_ROWS) return quantize_rows(view, codes, scales, globals, context->queue());
    quantize_weight(
        view, rule == TESSERA_NVFP4_TENSOR ? numeric::Nvfp4WeightRule::kAmax : numeric::Nvfp4WeightRule::kFourOverSix,
        codes, scales, globals, context->queue());
  });
}
}
