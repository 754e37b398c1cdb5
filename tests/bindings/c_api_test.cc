// SPDX-License-Identifier: Apache-2.0
// What the C interface promises beside results (ctypes_test.py): messages belong to their thread, memory that ends is
// an error and not an end, and results are those of the ops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bindings/c/tessera.h"
#include "testing/seed.h"

namespace {

TEST(CApi, MessagesBelongToTheirThread) {
  tessera_context* context = nullptr;
  EXPECT_EQ(tessera_context_open("tpu", nullptr, 0, &context), TESSERA_INVALID_ARGUMENT);
  const std::string mine = tessera_error_message();
  EXPECT_NE(mine.find("tpu"), std::string::npos);
  std::thread([] {
    EXPECT_STREQ(tessera_error_message(), "");
    tessera_context* none = nullptr;
    EXPECT_EQ(tessera_context_open(nullptr, nullptr, 0, &none), TESSERA_INVALID_ARGUMENT);
    EXPECT_STRNE(tessera_error_message(), "");
  }).join();
  EXPECT_EQ(tessera_error_message(), mine);
  EXPECT_EQ(context, nullptr);
}

TEST(CApi, MemoryThatEndsIsAnError) {
  tessera_context* context = nullptr;
  ASSERT_EQ(tessera_context_open("cpu", nullptr, 1, &context), TESSERA_OK);
  void* data = nullptr;
  EXPECT_EQ(tessera_allocate(context, SIZE_MAX, &data), TESSERA_RESOURCE_EXHAUSTED);
  EXPECT_EQ(data, nullptr);
  EXPECT_EQ(tessera_allocate(context, 0, &data), TESSERA_INVALID_ARGUMENT);
  ASSERT_EQ(tessera_allocate(context, 100, &data), TESSERA_OK);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 128, 0u);
  EXPECT_EQ(tessera_release(context, data), TESSERA_OK);
  EXPECT_EQ(tessera_release(context, data), TESSERA_INVALID_ARGUMENT) << "twice";
  tessera_context_close(context);
}

// Where GPUs are emulated: bytes of a quantisation there are the host's, whatever the rule, and so is what a weight
// with a NaN becomes but for the error.
#ifdef TESSERA_CUDA_EMULATED
TEST(CApi, AGpuQuantisesToTheHostsBytes) {
  constexpr int64_t kRows = 9, kCols = 80;
  const uint32_t seed = tessera::fresh_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  std::vector<float> x(kRows * kCols);
  for (float& value : x) {
    value = std::normal_distribution<float>(0, rng() % 20 == 0 ? 50.0f : 1.0f)(rng);
  }
  std::fill_n(x.begin() + 2 * kCols, kCols, 0.0f);
  struct Result {
    tessera_status status = TESSERA_OK;
    std::vector<uint8_t> codes, scales, globals;
  };
  const auto quantise = [&](const char* device, tessera_nvfp4_rule rule) {
    Result result{TESSERA_OK, std::vector<uint8_t>(x.size() / 2), std::vector<uint8_t>(x.size() / 16),
                  std::vector<uint8_t>(4 * (rule == TESSERA_NVFP4_ROWS ? kRows : 1))};
    tessera_context* context = nullptr;
    EXPECT_EQ(tessera_context_open(device, nullptr, 1, &context), TESSERA_OK) << tessera_error_message();
    const auto there = [&](const void* host, size_t bytes) {
      void* data = nullptr;
      EXPECT_EQ(tessera_allocate(context, bytes, &data), TESSERA_OK);
      EXPECT_EQ(tessera_upload(context, data, host, bytes), TESSERA_OK);
      return data;
    };
    void* const values = there(x.data(), x.size() * 4);
    std::vector<void*> out;
    for (auto* bytes : {&result.codes, &result.scales, &result.globals}) {
      out.push_back(there(bytes->data(), bytes->size()));
    }
    result.status =
        tessera_quantize_nvfp4(context, rule, TESSERA_F32, values, kRows, kCols, static_cast<uint8_t*>(out[0]),
                               static_cast<uint8_t*>(out[1]), static_cast<float*>(out[2]));
    size_t i = 0;
    for (auto* bytes : {&result.codes, &result.scales, &result.globals}) {
      EXPECT_EQ(tessera_download(context, bytes->data(), out[i++], bytes->size()), TESSERA_OK);
    }
    tessera_context_close(context);
    return result;
  };
  for (const bool has_nan : {false, true}) {
    if (has_nan) x[5 * kCols + 33] = std::nanf("");
    for (const tessera_nvfp4_rule rule :
         {TESSERA_NVFP4_ROWS, TESSERA_NVFP4_TENSOR, TESSERA_NVFP4_TENSOR_FOUR_OVER_SIX}) {
      const Result gpu = quantise("cuda:0", rule), host = quantise("cpu", rule);
      EXPECT_EQ(gpu.status, TESSERA_OK) << tessera_error_message();
      if (has_nan && rule != TESSERA_NVFP4_ROWS) {
        EXPECT_EQ(host.status, TESSERA_NOT_FINITE);
        EXPECT_EQ(gpu.scales, std::vector<uint8_t>(gpu.scales.size(), 0x7F));
        continue;
      }
      EXPECT_EQ(host.status, TESSERA_OK);
      EXPECT_EQ(gpu.codes, host.codes);
      EXPECT_EQ(gpu.scales, host.scales);
      EXPECT_EQ(gpu.globals, host.globals);
    }
  }
}
#endif

// Two contexts at once, in two threads: each gives the bits that it gives alone.
TEST(CApi, ContextsAreIndependent) {
  constexpr int64_t kIn = 256, kOut = 200, kTokens = 9;
  const uint32_t seed = tessera::fresh_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  std::vector<uint16_t> weights(kIn * kOut), x(kIn * kTokens);
  for (auto* values : {&weights, &x}) {
    for (uint16_t& value : *values) value = static_cast<uint16_t>(0x3F00 + rng() % 256 + (rng() % 2) * 0x8000);
  }
  const auto run = [&](std::vector<float>& y) {
    tessera_context* context = nullptr;
    ASSERT_EQ(tessera_context_open("cpu", nullptr, 2, &context), TESSERA_OK);
    const auto on_device = [&](const std::vector<uint16_t>& values) {
      void* data = nullptr;
      EXPECT_EQ(tessera_allocate(context, values.size() * 2, &data), TESSERA_OK);
      EXPECT_EQ(tessera_upload(context, data, values.data(), values.size() * 2), TESSERA_OK);
      return data;
    };
    const tessera_weight weight{TESSERA_WEIGHT_BF16, kOut, kIn, on_device(weights), nullptr, 0};
    const tessera_linear_desc desc{kIn, kOut, 1, TESSERA_INPUT_A16, TESSERA_BF16, TESSERA_F32};
    tessera_linear* linear = nullptr;
    ASSERT_EQ(tessera_linear_create(context, &desc, &weight, kTokens, &linear), TESSERA_OK) << tessera_error_message();
    void* out = nullptr;
    ASSERT_EQ(tessera_allocate(context, y.size() * 4, &out), TESSERA_OK);
    const void* const in = on_device(x);
    for (int i = 0; i < 20; ++i) ASSERT_EQ(tessera_linear_run(linear, in, out, kTokens), TESSERA_OK);
    ASSERT_EQ(tessera_download(context, y.data(), out, y.size() * 4), TESSERA_OK);
    tessera_linear_destroy(linear);
    tessera_context_close(context);
  };
  std::vector<float> alone(kOut * kTokens), first(alone), second(alone);
  run(alone);
  std::thread other([&] { run(first); });
  run(second);
  other.join();
  EXPECT_EQ(std::memcmp(first.data(), alone.data(), alone.size() * 4), 0);
  EXPECT_EQ(std::memcmp(second.data(), alone.data(), alone.size() * 4), 0);
}

}  // namespace
