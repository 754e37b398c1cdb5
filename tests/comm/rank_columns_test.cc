// SPDX-License-Identifier: Apache-2.0
// Columns of ranks as rows, and back: every bit at its place and nothing beside it written, on the host and on a GPU.
#include "comm/rank_columns.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/rng.h"
#include "comm/any_gpu.h"
#include "comm/loopback.h"
#include "comm/ranks.h"
#include "device/buffer.h"
#include "testing/seed.h"

namespace tessera::comm {
namespace {

using tessera::testing::run_ranks;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr uint32_t kPoison = 0x7FA00001;  // a signalling NaN, which no part has
constexpr size_t kGuard = 8;              // words before and behind

struct Case {
  int64_t world, rows, columns;
};
// One word and several blocks; columns that are and are not a multiple of 16 bytes; nothing.
constexpr Case kCases[] = {{1, 1, 1}, {1, 3, 8},   {2, 1, 5},  {2, 2, 4},    {2, 3, 1},    {3, 5, 7},  {3, 4, 12},
                           {8, 7, 3}, {8, 2, 128}, {5, 9, 33}, {2, 3, 1100}, {2, 2, 1101}, {4, 0, 16}, {4, 16, 0}};

// Any bits, of which some are not numbers and some are -0.
std::vector<uint32_t> random_words(Rng& rng, int64_t count) {
  std::vector<uint32_t> words(static_cast<size_t>(count));
  for (uint32_t& word : words) {
    const uint64_t kind = rng.below(8);
    word = kind == 0   ? 0x80000000
           : kind == 1 ? 0x7FC00000 + static_cast<uint32_t>(rng.below(1 << 20))
           : kind == 2 ? 0xFFC00000 + static_cast<uint32_t>(rng.below(1 << 20))
                       : static_cast<uint32_t>(rng.below(0x7F800000));
  }
  return words;
}

// The contract, value by value, between guards.
std::vector<uint32_t> expected_of(const std::vector<uint32_t>& parts, const Case& one) {
  std::vector<uint32_t> out(2 * kGuard + parts.size(), kPoison);
  for (int64_t row = 0; row < one.rows; ++row) {
    for (int64_t column = 0; column < one.world * one.columns; ++column) {
      const int64_t rank = column / one.columns, own = column % one.columns;
      out[kGuard + static_cast<size_t>(row * one.world * one.columns + column)] =
          parts[static_cast<size_t>((rank * one.rows + row) * one.columns + own)];
    }
  }
  return out;
}

TensorView view(void* data, const Shape& shape) {
  return {data, DType::kF32, shape};
}
Shape parts_shape(const Case& one) {
  return {one.world, one.rows, one.columns};
}
Shape out_shape(const Case& one) {
  return {one.rows, one.world * one.columns};
}

TEST(JoinColumns, PlacesEveryBitOnTheHost) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  device::Queue queue(1);
  for (const Case& one : kCases) {
    std::vector<uint32_t> parts = random_words(rng, parts_shape(one).num_elements());
    std::vector<uint32_t> out(2 * kGuard + parts.size(), kPoison);
    join_columns(view(parts.data(), parts_shape(one)), view(out.data() + kGuard, out_shape(one)), queue);
    EXPECT_EQ(out, expected_of(parts, one)) << one.world << ' ' << one.rows << ' ' << one.columns;
  }
}

// Arrays that begin at a multiple of 16 bytes and ones that do not.
TEST(JoinColumns, PlacesEveryBitOnAGpu) {
  std::string why_not;
  const auto executor = testing::any_gpu(why_not);
  if (executor == nullptr) GTEST_SKIP() << why_not;
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  device::MemorySpace& memory = executor->memory();
  for (const Case& one : kCases) {
    for (const auto& [parts_begin, out_begin] : {std::pair{0, 0}, {1, 0}, {0, 3}}) {
      const std::vector<uint32_t> parts = random_words(rng, parts_shape(one).num_elements());
      const std::vector<uint32_t> poison(2 * kGuard + parts.size(), kPoison);
      device::Buffer in((parts.size() + 4) * sizeof(uint32_t), memory), out((poison.size() + 4) * 4, memory);
      uint32_t *from = in.as<uint32_t>() + parts_begin, *to = out.as<uint32_t>() + out_begin;
      memory.upload(from, parts.data(), parts.size() * sizeof(uint32_t));
      memory.upload(to, poison.data(), poison.size() * sizeof(uint32_t));
      join_columns(view(from, parts_shape(one)), view(to + kGuard, out_shape(one)), executor->queue());
      executor->synchronize();
      std::vector<uint32_t> found(poison.size());
      memory.download(found.data(), to, found.size() * sizeof(uint32_t));
      EXPECT_EQ(found, expected_of(parts, one)) << fmt::format("{} ranks, {} rows, {} columns; {}, {}", one.world,
                                                               one.rows, one.columns, parts_begin, out_begin);
    }
  }
}

// Every row back to where it came from; a matrix of BF16 has two values in a word.
TEST(SplitColumns, UndoesJoining) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  device::Queue queue(1);
  for (const Case& one : kCases) {
    const std::vector<uint32_t> parts = random_words(rng, parts_shape(one).num_elements());
    std::vector<uint32_t> joined = expected_of(parts, one);
    for (const DType type : {DType::kF32, DType::kBF16}) {
      const int64_t columns = one.columns * (type == DType::kF32 ? 1 : 2);
      std::vector<uint32_t> out(2 * kGuard + parts.size(), kPoison), expected = out;
      std::copy(parts.begin(), parts.end(), expected.begin() + kGuard);
      split_columns({joined.data() + kGuard, type, {one.rows, one.world * columns}},
                    {out.data() + kGuard, type, {one.world, one.rows, columns}}, queue);
      EXPECT_EQ(out, expected) << one.world << ' ' << one.rows << ' ' << one.columns;
    }
  }
}

// More rows than a grid has blocks in its second dimension, too.
TEST(SplitColumns, UndoesJoiningOnAGpu) {
  std::string why_not;
  const auto executor = testing::any_gpu(why_not);
  if (executor == nullptr) GTEST_SKIP() << why_not;
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  device::MemorySpace& memory = executor->memory();
  for (const Case& one : {Case{2, 5, 4}, Case{3, 7, 5}, Case{8, 33, 2048}, Case{2, 70'000, 2}}) {
    const std::vector<uint32_t> parts = random_words(rng, parts_shape(one).num_elements());
    const std::vector<uint32_t> joined = expected_of(parts, one);
    const size_t bytes = parts.size() * sizeof(uint32_t);
    const device::Buffer in(bytes, memory), out(bytes, memory);
    memory.upload(in.data(), joined.data() + kGuard, bytes);
    split_columns({in.data(), DType::kBF16, {one.rows, 2 * one.world * one.columns}},
                  {out.data(), DType::kBF16, {one.world, one.rows, 2 * one.columns}}, executor->queue());
    executor->synchronize();
    std::vector<uint32_t> found(parts.size());
    memory.download(found.data(), out.data(), bytes);
    EXPECT_EQ(found, parts) << one.world << ' ' << one.rows << ' ' << one.columns;
  }
}

TEST(SplitColumns, WhatDoesNotFitIsNamed) {
  device::Queue queue(1);
  std::vector<float> values(64);
  const auto refusal = [&](const TensorView& in, const TensorView& parts) -> std::string {
    try {
      split_columns(in, parts, queue);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(refusal(view(values.data(), {3, 9}), view(values.data() + 27, {2, 3, 4})),
              HasSubstr("found F32 [3, 9] into F32 [2, 3, 4]"));
  EXPECT_THAT(refusal({values.data(), DType::kBF16, {3, 6}}, {values.data() + 27, DType::kBF16, {2, 3, 3}}),
              HasSubstr("an even number of columns"));
  EXPECT_THAT(refusal({values.data(), DType::kBF16, {3, 8}}, view(values.data() + 27, {2, 3, 4})),
              HasSubstr("found BF16 [3, 8] into F32 [2, 3, 4]"));
  EXPECT_THAT(refusal({values.data(), DType::kI32, {3, 8}}, {values.data() + 27, DType::kI32, {2, 3, 4}}),
              HasSubstr("found I32"));
}

// What ranks gather of a matrix of which each has columns is the matrix.
TEST(JoinColumns, GatheredColumnsAreTheMatrix) {
  constexpr int64_t kRows = 5, kColumns = 3;
  for (const int world : {1, 2, 3, 8}) {
    Rng rng(static_cast<uint64_t>(world));
    const std::vector<uint32_t> matrix = random_words(rng, kRows * kColumns * world);
    auto ranks = make_loopback(world);
    EXPECT_THAT(run_ranks(ranks,
                          [&](Communicator& comm, device::Queue& queue) {
                            std::vector<uint32_t> own, all(matrix.size(), kPoison), out(matrix.size(), kPoison);
                            for (int64_t row = 0; row < kRows; ++row) {
                              const auto begin = matrix.begin() + (row * world + comm.rank()) * kColumns;
                              own.insert(own.end(), begin, begin + kColumns);
                            }
                            const TensorView parts = view(all.data(), {world, kRows, kColumns});
                            comm.all_gather(view(own.data(), {kRows, kColumns}), parts, queue);
                            join_columns(parts, view(out.data(), {kRows, world * kColumns}), queue);
                            EXPECT_EQ(out, matrix) << "rank " << comm.rank() << " of " << world;
                          }),
                Each(""));
  }
}

TEST(JoinColumns, WhatDoesNotFitIsNamed) {
  device::Queue queue(1);
  std::vector<float> values(64);
  const auto refusal = [&](const TensorView& parts, const TensorView& out) -> std::string {
    try {
      join_columns(parts, out, queue);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal(view(values.data(), {2, 3, 4}), view(values.data() + 24, {3, 9})),
            "join_columns: expected F32 [world, rows, columns] into [rows, world * columns], found F32 [2, 3, 4] into "
            "F32 [3, 9]");
  EXPECT_THAT(refusal(view(values.data(), {6, 4}), view(values.data() + 24, {3, 8})), HasSubstr("found F32 [6, 4]"));
  EXPECT_THAT(refusal({values.data(), DType::kBF16, {2, 3, 4}}, view(values.data() + 24, {3, 8})),
              HasSubstr("found BF16 [2, 3, 4]"));
}

}  // namespace
}  // namespace tessera::comm
