// SPDX-License-Identifier: Apache-2.0
// The sum over ranks of values that lie rank behind rank: the order of additions, one rounding, and a GPU's bits those
// of the host, wherever arrays begin.
#include "comm/rank_sum.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "base/rng.h"
#include "comm/any_gpu.h"
#include "device/buffer.h"
#include "testing/seed.h"

namespace tessera::comm {
namespace {

struct Case {
  int world;
  int64_t count, stride;
};
constexpr Case kCases[] = {{1, 1, 1},     {2, 3, 3},       {2, 4, 4},       {2, 8, 12},      {3, 7, 9},      {3, 8, 10},
                           {8, 256, 256}, {2, 1024, 1024}, {2, 1025, 1028}, {4, 5000, 5000}, {8, 1030, 1031}};

// Over many orders of magnitude, so that another order of additions gives other bits; and infinities.
std::vector<float> random_values(Rng& rng, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    value = static_cast<float>((rng.uniform() - 0.5) * std::exp2(static_cast<double>(rng.below(40)) - 20));
    if (rng.below(50) == 0) value = -0.0f;
    if (rng.below(200) == 0) value = INFINITY;
  }
  return values;
}

TEST(SumRanks, AddsInOrderAndRoundsOnce) {
  const float parts[] = {1, 0x1p24f, -0x1p24f, 1 + 0x1p-8f, 0x1p-9f, 0x1p-9f};  // three ranks of two values
  device::Queue queue(1);
  float sums[2];
  sum_ranks(parts, DType::kF32, 3, 2, sums, DType::kF32, 2, queue);
  EXPECT_EQ(sums[0], (1 + -0x1p24f) + 0x1p-9f);
  EXPECT_EQ(sums[1], 0x1p24f + 2) << "(2^24 + 1.004) + 0.002 rounded to even neighbours";
  uint16_t rounded[2];
  const float halves[] = {1, 0x1p-9f, 0x1p-8f, 0x1p-9f};  // two ranks
  sum_ranks(halves, DType::kF32, 2, 2, rounded, DType::kBF16, 2, queue);
  EXPECT_EQ(numeric::bf16_to_float(rounded[0]), 1.0f) << "a tie, to even";
  EXPECT_EQ(numeric::bf16_to_float(rounded[1]), 0x1p-8f);
}

TEST(SumRanks, GpusHaveTheBitsOfTheHost) {
  std::string why_not;
  const auto executor = testing::any_gpu(why_not);
  if (executor == nullptr) GTEST_SKIP() << why_not;
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  device::Queue host(1);
  device::MemorySpace& memory = executor->memory();
  constexpr size_t kGuard = 4;  // values behind the sums
  for (const Case& one : kCases) {
    for (const DType in : {DType::kF32, DType::kBF16}) {
      for (const DType out : {DType::kF32, DType::kBF16}) {
        for (const int begin : {0, 1}) {
          const int64_t num_values = one.stride * (one.world - 1) + one.count;
          const std::vector<float> values = random_values(rng, num_values);
          const size_t in_bytes = in == DType::kF32 ? 4 : 2, out_bytes = out == DType::kF32 ? 4 : 2;
          std::vector<uint8_t> parts(static_cast<size_t>(num_values) * in_bytes);
          for (int64_t i = 0; i < num_values; ++i) {
            store_value(parts.data(), in == DType::kBF16, i, values[static_cast<size_t>(i)]);
          }
          std::vector<uint8_t> expected((static_cast<size_t>(one.count) + kGuard) * out_bytes, 0xA5), found = expected;
          sum_ranks(parts.data(), in, one.world, one.stride, expected.data(), out, one.count, host);
          const device::Buffer from(parts.size() + in_bytes, memory), to(found.size() + out_bytes, memory);
          uint8_t* const first = from.as<uint8_t>() + static_cast<size_t>(begin) * in_bytes;
          uint8_t* const sums = to.as<uint8_t>() + static_cast<size_t>(begin) * out_bytes;
          memory.upload(first, parts.data(), parts.size());
          memory.upload(sums, found.data(), found.size());
          sum_ranks(first, in, one.world, one.stride, sums, out, one.count, executor->queue());
          executor->synchronize();
          memory.download(found.data(), sums, found.size());
          EXPECT_EQ(found, expected) << one.world << " ranks, " << one.count << " values by " << one.stride
                                     << ", from value " << begin;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::comm
