// SPDX-License-Identifier: Apache-2.0
#include "convert/source_bands.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/integer_math.h"
#include "model/stored_values.h"
#include "numeric/fp8_block.h"
#include "numeric/mxfp4.h"

namespace tessera::convert {

namespace {

using checkpoint::LocatedTensor;
using model::StoredFormat;
using numeric::kFp8WeightBlock;

// Bytes of a row of codes or values, and of its block scales (none for FP8, whose blocks span rows).
struct RowBytes {
  int64_t codes = 0, scales = 0;
};

RowBytes row_bytes(const PlannedMatrix& matrix) {
  switch (matrix.stored.format) {
    case StoredFormat::kF32:
      return {matrix.cols * 4, 0};
    case StoredFormat::kBf16:
      return {matrix.cols * 2, 0};
    case StoredFormat::kFp8Block:
      return {matrix.cols, 0};
    case StoredFormat::kNvfp4:
    case StoredFormat::kNvfp4Reciprocal:
      return {matrix.cols / 2, matrix.cols / numeric::kNvfp4Block};
    case StoredFormat::kMxfp4:
      return {matrix.cols / 2, matrix.cols / numeric::kMxfp4Block};
  }
  return {};
}

std::unique_ptr<uint8_t[]> read_part(const LocatedTensor& tensor, int64_t begin, int64_t bytes) {
  auto data = std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>(bytes));
  tensor.read_part(static_cast<uint64_t>(begin), static_cast<uint64_t>(bytes), data.get());
  return data;
}

// The factors of the band's rows of blocks, widened.
std::vector<float> read_fp8_scales(const PlannedMatrix& matrix, int64_t row_begin, int64_t row_end) {
  const LocatedTensor& tensor = matrix.stored.block_scales;
  const int64_t blocks = tensor.entry->shape[1], first = row_begin / kFp8WeightBlock;
  const int64_t count = (ceil_div<int64_t>(row_end, kFp8WeightBlock) - first) * blocks;
  const int64_t width = dtype_bits(*tensor.entry->dtype) / 8;
  const auto bytes = read_part(tensor, first * blocks * width, count * width);
  std::vector<float> scales(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* at = bytes.get() + i * width;
    float& scale = scales[static_cast<size_t>(i)];
    if (tensor.entry->dtype == DType::kF8E8M0) {
      scale = numeric::e8m0_to_float(*at);
    } else {
      model::widen(*tensor.entry->dtype, at, 1, &scale);
    }
    if (!std::isfinite(scale) || scale < 0) {
      model::fail_value(tensor, first * blocks + i, "a finite scale >= 0", fmt::format("{}", scale));
    }
  }
  return scales;
}

}  // namespace

int num_passes(const Job& job) {
  const bool needs_scale_first = job.treatment == Treatment::kRound || job.treatment == Treatment::kExact;
  return needs_scale_first && source_bytes(job) > kResidentBytes ? 2 : 1;
}

uint64_t source_bytes(const Job& job) {
  if (job.matrices.empty()) return job.source.entry->num_bytes;
  uint64_t bytes = 0;
  for (const PlannedMatrix& matrix : job.matrices) {
    const RowBytes row = row_bytes(matrix);
    bytes += static_cast<uint64_t>(matrix.rows * (row.codes + row.scales));
  }
  return bytes;
}

std::vector<Band> bands_of(const Job& job) {
  std::vector<Band> bands;
  const auto cut = [&](size_t matrix, int64_t rows, int64_t row, int64_t unit) {
    int64_t step = std::max<int64_t>(1, static_cast<int64_t>(kBandBytes) / std::max<int64_t>(1, row));
    step = round_up(step, unit);
    for (int64_t begin = 0; begin < rows; begin += step) {
      Band band;
      band.matrix = matrix, band.row_begin = begin, band.row_end = std::min(rows, begin + step);
      bands.push_back(std::move(band));
    }
  };
  if (job.matrices.empty()) cut(0, static_cast<int64_t>(job.source.entry->num_bytes), 1, 1);
  for (size_t m = 0; m < job.matrices.size(); ++m) {
    const PlannedMatrix& matrix = job.matrices[m];
    cut(m, matrix.rows, row_bytes(matrix).codes, matrix.stored.format == StoredFormat::kFp8Block ? kFp8WeightBlock : 1);
  }
  return bands;
}

void read_band(const Job& job, Band& band) {
  const int64_t rows = band.row_end - band.row_begin;
  if (job.matrices.empty()) {
    band.codes = read_part(job.source, band.row_begin, rows);
    band.num_bytes = static_cast<uint64_t>(rows);
    return;
  }
  const PlannedMatrix& matrix = job.matrices[band.matrix];
  const RowBytes row = row_bytes(matrix);
  band.codes =
      read_part(matrix.stored.codes, (matrix.stored.row_offset + band.row_begin) * row.codes, rows * row.codes);
  if (row.scales > 0) {
    band.scales = read_part(matrix.stored.block_scales, band.row_begin * row.scales, rows * row.scales);
  }
  if (matrix.stored.format == StoredFormat::kFp8Block) {
    band.fp8_scales = read_fp8_scales(matrix, band.row_begin, band.row_end);
  }
  band.num_bytes = static_cast<uint64_t>(rows * (row.codes + row.scales));
}

void widen_row(const PlannedMatrix& matrix, const Band& band, int64_t row, float* out) {
  const uint8_t* values = band.codes.get() + (row - band.row_begin) * row_bytes(matrix).codes;
  switch (matrix.stored.format) {
    case StoredFormat::kF32:
      model::widen(DType::kF32, values, matrix.cols, out);
      return;
    case StoredFormat::kBf16:
      model::widen(DType::kBF16, values, matrix.cols, out);
      return;
    case StoredFormat::kFp8Block: {
      const int64_t blocks = matrix.stored.block_scales.entry->shape[1];
      const float* scales = band.fp8_scales.data() + (row - band.row_begin) / kFp8WeightBlock * blocks;
      numeric::fp8_block_dequantize_row(values, scales, matrix.cols, out);
      return;
    }
    default:
      TESSERA_CHECK(false, matrix.name);
  }
}

SourceReader::SourceReader(const Plan& plan, std::vector<size_t> jobs)
    : plan_(plan), jobs_(std::move(jobs)), queue_(kReadAheadBytes), thread_([this] { run(); }) {}

SourceReader::~SourceReader() {
  queue_.close();
  thread_.join();
}

Band SourceReader::next() {
  std::optional<Band> band = queue_.pop();
  TESSERA_CHECK(band.has_value(), "more bands asked for than there are");
  return std::move(*band);
}

void SourceReader::run() {
  try {
    for (const size_t j : jobs_) {
      const Job& job = plan_.jobs[j];
      for (int pass = 0; pass < num_passes(job); ++pass) {
        for (Band& band : bands_of(job)) {
          read_band(job, band);
          const uint64_t bytes = band.num_bytes;
          if (!queue_.push(std::move(band), bytes)) return;
        }
      }
    }
    queue_.close();
  } catch (...) {
    queue_.fail(std::current_exception());
  }
}

}  // namespace tessera::convert
