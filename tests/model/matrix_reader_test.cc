// SPDX-License-Identifier: Apache-2.0
// Matrices large enough that several threads read and check pieces of them.
#include "model/matrix_reader.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <vector>

#include "base/error.h"
#include "base/rng.h"
#include "testing/seed.h"
#include "testing/temporary_folder.h"

namespace tessera::model {
namespace {

class MatrixReaderTest : public ::testing::TestWithParam<DType> {
 protected:
  // Several pieces and a tail.
  static constexpr int64_t kRows = 701, kCols = 1103;

  MatrixReaderTest()
      : seed_(fresh_seed()),
        rng_(seed_),
        trace_(__FILE__, __LINE__, "seed " + std::to_string(seed_)),
        width_(dtype_bits(GetParam()) / 8),
        bytes_(static_cast<size_t>(kRows * kCols * width_)) {
    // Any bits but those of an exponent of ones.
    for (size_t i = 0; i < bytes_.size(); ++i) {
      bytes_[i] = static_cast<uint8_t>(rng_.below((i + 1) % static_cast<size_t>(width_) == 0 ? 0x7F : 256));
    }
  }

  void plant_nan(int64_t element) { std::memset(bytes_.data() + element * width_, 0xFF, static_cast<size_t>(width_)); }

  // What a reader with that many threads makes of it; 0: without a queue.
  std::vector<uint8_t> read(int threads, const WeightSlice& slice) {
    const std::string path = folder_.path() + "/large.safetensors";
    const std::string header = "{\"w\": {\"dtype\": \"" + std::string(GetParam() == DType::kF32 ? "F32" : "BF16") +
                               "\", \"shape\": [701, 1103], \"data_offsets\": [0, " + std::to_string(bytes_.size()) +
                               "]}}";
    const uint64_t length = header.size();
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(&length), 8)
        << header << std::string(bytes_.begin(), bytes_.end());
    const checkpoint::SafetensorsFile file = checkpoint::SafetensorsFile::open(path);
    StoredTensor stored;
    stored.format = GetParam() == DType::kF32 ? StoredFormat::kF32 : StoredFormat::kBf16;
    stored.codes = {file.find("w"), &file};
    device::Queue queue(std::max(threads, 1));
    const Matrix matrix = MatrixReader(nullptr, threads == 0 ? nullptr : &queue).read(stored, {kRows, kCols}, slice);
    return {matrix.data.as<uint8_t>(), matrix.data.as<uint8_t>() + matrix.data.size()};
  }
  std::string error(int threads) {
    try {
      read(threads, kWhole);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  static constexpr WeightSlice kWhole{0, kRows, 0, kCols};
  uint64_t seed_;
  Rng rng_;
  ::testing::ScopedTrace trace_;
  testing::TemporaryFolder folder_;
  const int64_t width_;
  std::vector<uint8_t> bytes_;
};

TEST_P(MatrixReaderTest, PiecesMakeTheWhole) {
  ASSERT_GT(bytes_.size(), 2 * kPieceBytes);
  for (const int threads : {0, 1, 3}) EXPECT_TRUE(read(threads, kWhole) == bytes_) << threads << " threads";
  const WeightSlice rows{7, kRows - 5, 0, kCols};
  const auto first = bytes_.begin() + 7 * kCols * width_, last = bytes_.end() - 5 * kCols * width_;
  EXPECT_TRUE(read(3, rows) == std::vector<uint8_t>(first, last));
}

// Parts of rows: those between which less than a page lies are read together.
TEST_P(MatrixReaderTest, ColumnsAreThoseOfTheirRows) {
  ASSERT_GT((kCols - 31) * 4, 4096);
  for (const WeightSlice& slice : {WeightSlice{7, kRows - 5, 100, 131},
                                   {0, kRows, 1, kCols},
                                   {0, 1, 400, 1000},
                                   {kRows - 2, kRows, kCols - 1, kCols},
                                   {3, 3, 0, 9}}) {
    std::vector<uint8_t> expected;
    for (int64_t r = slice.row_begin; r < slice.row_end; ++r) {
      const auto row = bytes_.begin() + r * kCols * width_;
      expected.insert(expected.end(), row + slice.col_begin * width_, row + slice.col_end * width_);
    }
    for (const int threads : {0, 1, 3}) EXPECT_TRUE(read(threads, slice) == expected) << threads << " threads";
  }
}

TEST_P(MatrixReaderTest, TheFirstBadValueIsNamedWhoeverFindsOne) {
  const int64_t count = kRows * kCols, bad = static_cast<int64_t>(rng_.below(static_cast<uint64_t>(count / 3)));
  plant_nan(count - 1);
  plant_nan(count / 2);
  plant_nan(bad);
  const std::string expected = error(0);
  EXPECT_NE(expected.find(std::to_string(bad)), std::string::npos) << expected;
  for (int round = 0; round < 5; ++round) EXPECT_EQ(error(3), expected);
}

INSTANTIATE_TEST_SUITE_P(Formats, MatrixReaderTest, ::testing::Values(DType::kBF16, DType::kF32),
                         [](const auto& one) { return std::string(dtype_name(one.param)); });

// Scales of an FP8 matrix of 2 by 3 blocks, of which a slice has the middle two: whether they fold is said of all.
TEST(MatrixReader, SaysWhetherFp8ScalesFold) {
  const auto fold = [](const std::string& dtype, const std::string& scales) {
    testing::TemporaryFolder folder;
    const std::string path = folder.path() + "/fp8.safetensors";
    const int64_t codes = int64_t{200} * 300;
    const std::string header = "{\"w\": {\"dtype\": \"F8_E4M3\", \"shape\": [200, 300], \"data_offsets\": [0, " +
                               std::to_string(codes) + "]}, \"s\": {\"dtype\": \"" + dtype +
                               "\", \"shape\": [2, 3], \"data_offsets\": [" + std::to_string(codes) + ", " +
                               std::to_string(codes + std::ssize(scales)) + "]}}";
    const uint64_t length = header.size();
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(&length), 8)
        << header << std::string(static_cast<size_t>(codes), '\x31') << scales;
    const checkpoint::SafetensorsFile file = checkpoint::SafetensorsFile::open(path);
    StoredTensor stored;
    stored.format = StoredFormat::kFp8Block;
    stored.codes = {file.find("w"), &file}, stored.block_scales = {file.find("s"), &file};
    const WeightSlice slice{0, 200, 128, 256};
    const Matrix matrix = MatrixReader(nullptr).read(stored, {200, 300}, slice);
    EXPECT_EQ(matrix.view.format, ops::WeightFormat::kFp8Block);
    return matrix.view.scales_fold;
  };
  const auto floats = [](const std::vector<float>& values) {
    return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  };
  EXPECT_TRUE(fold("F8_E8M0", std::string("\x70\x78\x7f\x80\x60\x1b", 6)));
  EXPECT_FALSE(fold("F8_E8M0", std::string("\x70\x78\x7f\x80\x60\x1a", 6)));  // 2^-101
  EXPECT_TRUE(fold("F32", floats({0.5f, 0, 0x1p-12f, 2, 1, 0x1p-9f})));
  EXPECT_FALSE(fold("F32", floats({0.5f, 0, 0x1p-12f, 2, 3, 0x1p-9f})));
  EXPECT_FALSE(fold("F32", floats({0.3f, 0, 0x1p-12f, 2, 1, 0x1p-9f})));  // not in the slice
}

}  // namespace
}  // namespace tessera::model
