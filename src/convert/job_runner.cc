// SPDX-License-Identifier: Apache-2.0
#include "convert/job_runner.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <mutex>

#include "base/error.h"
#include "base/integer_math.h"
#include "base/strings.h"
#include "convert/quantise.h"
#include "model/stored_values.h"
#include "numeric/mxfp4_to_nvfp4.h"

namespace tessera::convert {

namespace {

using numeric::kMxfp4Block;
using numeric::kNvfp4Block;

constexpr int64_t kGrainValues = 1 << 15;  // fewer are not worth a thread

float read_float(const checkpoint::LocatedTensor& tensor) {
  float value = 0;
  tensor.read(&value);
  return value;
}

// A scale as stored, or its reciprocal. Rounded as the loader of compressed-tensors rounds it.
float checked_scale(const checkpoint::LocatedTensor& tensor, bool is_reciprocal) {
  const float stored = read_float(tensor);
  const float value = is_reciprocal ? 1 / stored : stored;
  if (!std::isfinite(value) || value <= 0 || !std::isfinite(stored)) {
    model::fail_value(tensor, 0, "a finite scale > 0", fmt::format("{}", stored));
  }
  return value;
}

// Error of MXFP4 blocks that had to be rounded: (before - after)^2, summed over a row.
void measure_rounding(const uint8_t* codes, const uint8_t* scales, const uint8_t* out_codes, const uint8_t* out_scales,
                      int64_t count, float tensor_scale, Statistics& measured) {
  std::vector<float> before(static_cast<size_t>(count)), after(static_cast<size_t>(count));
  numeric::q4_dequantize(codes, scales, count, before.data());
  numeric::nvfp4_dequantize_row(out_codes, out_scales, count, after.data());
  for (size_t i = 0; i < before.size(); ++i) {
    const double value = before[i], difference = value - static_cast<double>(after[i] * tensor_scale);
    measured.squared_value += value * value;
    measured.squared_error += difference * difference;
  }
  measured.num_rounded_blocks += count / kNvfp4Block;
}

}  // namespace

JobRunner::JobRunner(const Plan& plan, const Options& options, SourceReader& reader, ShardOutput& output,
                     ProgressSink* progress, const std::atomic<bool>* is_cancelled)
    : plan_(plan),
      options_(options),
      reader_(reader),
      output_(output),
      progress_(progress),
      is_cancelled_(is_cancelled),
      queue_(options.num_threads) {}

void JobRunner::run(size_t index, FamilyStatistics& measured) {
  const Job& job = plan_.jobs[index];
  if (job.matrices.empty()) {
    copy(job);
  } else {
    convert_matrices(job, measured);
  }
}

Band JobRunner::next_band() {
  if (is_cancelled_ != nullptr && is_cancelled_->load()) fail(ErrorCode::kCancelled, "stopped");
  Band band = reader_.next();
  if (progress_ != nullptr) progress_->advance(band.num_bytes);
  return band;
}

void JobRunner::copy(const Job& job) {
  const size_t num_bands = bands_of(job).size();
  for (size_t i = 0; i < num_bands; ++i) {
    Band band = next_band();
    if (job.treatment == Treatment::kReciprocal) {
      write_scalar(job.first_tensor, checked_scale(job.source, true));
    } else {
      output_.write(job.first_tensor, std::move(band.codes), band.num_bytes);
    }
  }
}

void JobRunner::convert_matrices(const Job& job, FamilyStatistics& families) {
  Statistics& measured = families[static_cast<size_t>(job.matrices.front().family)];
  const int64_t count = static_cast<int64_t>(job.matrices.size());
  std::vector<Band> kept;
  float tensor_scale = 1;
  switch (job.treatment) {
    case Treatment::kRound:
      measured.num_rounded += count;
      tensor_scale = rounding_scale(job, kept);
      break;
    case Treatment::kExact:
      measured.num_exact += count;
      tensor_scale = exact_scale(job, kept, measured);
      break;
    default:
      measured.num_nvfp4 += count;
      tensor_scale = checked_scale(job.matrices.front().stored.tensor_scale,
                                   job.matrices.front().stored.format == model::StoredFormat::kNvfp4Reciprocal);
  }
  const size_t num_bands = bands_of(job).size();
  for (size_t i = 0; i < num_bands; ++i) {
    // A band that was kept is let go once it is written.
    const Band band = kept.empty() ? next_band() : std::move(kept[i]);
    convert_band(job, band, tensor_scale, measured);
  }
  for (size_t m = 0; m < job.matrices.size(); ++m) write_scalar(global_of(job, m), tensor_scale);
}

float JobRunner::band_amax(const PlannedMatrix& matrix, const Band& band) {
  std::mutex lock;
  float amax = 0;
  queue_.parallel_for(band.row_end - band.row_begin, kGrainValues / matrix.cols + 1, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(matrix.cols));
    float part = 0;
    for (int64_t r = band.row_begin + begin; r < band.row_begin + end; ++r) {
      widen_row(matrix, band, r, row.data());
      const float largest = largest_magnitude(row.data(), matrix.cols);
      if (!std::isfinite(largest)) {
        model::fail_value(matrix.stored.codes, (matrix.stored.row_offset + r) * matrix.cols,
                          "finite values in the row that begins there", "a NaN or an infinity");
      }
      part = std::max(part, largest);
    }
    const std::lock_guard<std::mutex> hold(lock);
    amax = std::max(amax, part);
  });
  return amax;
}

float JobRunner::rounding_scale(const Job& job, std::vector<Band>& kept) {
  const bool keeps = num_passes(job) == 1;
  const size_t num_bands = bands_of(job).size();
  float amax = 0;
  for (size_t i = 0; i < num_bands; ++i) {
    Band band = next_band();
    amax = std::max(amax, band_amax(job.matrices[band.matrix], band));
    if (keeps) kept.push_back(std::move(band));
  }
  return numeric::nvfp4_weight_scale(amax, options_.rule);
}

float JobRunner::exact_scale(const Job& job, std::vector<Band>& kept, Statistics& measured) {
  const bool keeps = num_passes(job) == 1;
  const size_t num_bands = bands_of(job).size();
  numeric::Mxfp4Census census;
  for (size_t i = 0; i < num_bands; ++i) {
    Band band = next_band();
    const int64_t row_blocks = job.matrices[band.matrix].cols / kMxfp4Block;
    std::mutex lock;
    queue_.parallel_for((band.row_end - band.row_begin) * row_blocks, kGrainValues / kMxfp4Block,
                        [&](int64_t begin, int64_t end) {
                          numeric::Mxfp4Census part;
                          part.add(band.codes.get() + begin * kMxfp4Block / 2, band.scales.get() + begin, end - begin);
                          const std::lock_guard<std::mutex> hold(lock);
                          census.add(part);
                        });
    if (keeps) kept.push_back(std::move(band));
  }
  const checkpoint::LocatedTensor& codes = job.matrices.front().stored.codes;
  if (census.num_nan() > 0) {
    const checkpoint::LocatedTensor& scales = job.matrices.front().stored.block_scales;
    fail_data(scales.file->path(), fmt::format("tensor {} (and what shares its scale)", printable(scales.entry->name)),
              "E8M0 scales", fmt::format("{} NaN (byte 0xff)", census.num_nan()));
  }
  const int exponent = numeric::mxfp4_global_exponent(census.max_scale());
  const int64_t num_inexact = census.num_unrepresentable(exponent);
  if (num_inexact > 0 && !options_.allow_inexact) {
    fail(ErrorCode::kUnsupported,
         fmt::format("{}: tensor {}: expected MXFP4 blocks that NVFP4 holds exactly, at most 2^17 below the largest, "
                     "found {} (of all matrices that share a scale) further below; --allow-inexact rounds them",
                     printable(codes.file->path()), printable(codes.entry->name), num_inexact));
  }
  measured.num_inexact_blocks += num_inexact;
  return numeric::mxfp4_global_scale(exponent);
}

void JobRunner::convert_band(const Job& job, const Band& band, float tensor_scale, Statistics& measured) {
  const PlannedMatrix& matrix = job.matrices[band.matrix];
  const int64_t cols = matrix.cols, rows = band.row_end - band.row_begin;
  const int64_t code_bytes = cols / 2, scale_bytes = cols / kNvfp4Block;
  auto codes = std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>(rows * code_bytes));
  auto scales = std::make_unique_for_overwrite<uint8_t[]>(static_cast<size_t>(rows * scale_bytes));
  const bool is_as_is = job.treatment == Treatment::kAsIs, is_exact = job.treatment == Treatment::kExact;
  if (is_as_is) {
    model::check_e4m3(matrix.stored.block_scales, band.scales.get(), rows * scale_bytes, model::SignBit::kClear,
                      "a positive E4M3 scale (0x00 to 0x7e)");
  }
  const int exponent = is_exact ? std::ilogb(tensor_scale) : 0;
  // Measured in runs of rows that the shape decides, and added in order: sums don't depend on the number of threads.
  const int64_t run_rows = kGrainValues / cols + 1;
  std::vector<Statistics> by_run(static_cast<size_t>(ceil_div(rows, run_rows)));
  const auto convert_rows = [&](int64_t begin, int64_t end, Statistics& sum) {
    std::vector<float> values(static_cast<size_t>(job.treatment == Treatment::kRound ? cols : 0));
    for (int64_t r = begin; r < end; ++r) {
      uint8_t* const row_codes = codes.get() + r * code_bytes;
      uint8_t* const row_scales = scales.get() + r * scale_bytes;
      const uint8_t* const from = band.codes.get() + r * code_bytes;
      if (is_as_is) {
        std::memcpy(row_codes, from, static_cast<size_t>(code_bytes));
        std::memcpy(row_scales, band.scales.get() + r * scale_bytes, static_cast<size_t>(scale_bytes));
        measure_row(row_codes, row_scales, cols, tensor_scale, !is_exact, sum);
      } else if (is_exact) {
        const uint8_t* const from_scales = band.scales.get() + r * (cols / kMxfp4Block);
        const int64_t num_rounded =
            numeric::mxfp4_to_nvfp4(from, from_scales, cols / kMxfp4Block, exponent, row_codes, row_scales);
        measure_row(row_codes, row_scales, cols, tensor_scale, !is_exact, sum);
        if (num_rounded > 0) measure_rounding(from, from_scales, row_codes, row_scales, cols, tensor_scale, sum);
      } else {
        widen_row(matrix, band, band.row_begin + r, values.data());
        quantise_row(values.data(), cols, tensor_scale, options_.rule, row_codes, row_scales, sum);
      }
    }
  };
  queue_.parallel_for(static_cast<int64_t>(by_run.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      convert_rows(i * run_rows, std::min(rows, (i + 1) * run_rows), by_run[static_cast<size_t>(i)]);
    }
  });
  for (const Statistics& run : by_run) measured.add(run);
  output_.write(codes_of(job, band.matrix), std::move(codes), static_cast<uint64_t>(rows * code_bytes));
  output_.write(scales_of(job, band.matrix), std::move(scales), static_cast<uint64_t>(rows * scale_bytes));
}

void JobRunner::write_scalar(size_t tensor, float value) {
  auto data = std::make_unique_for_overwrite<uint8_t[]>(sizeof(value));
  std::memcpy(data.get(), &value, sizeof(value));
  output_.write(tensor, std::move(data), sizeof(value));
}

}  // namespace tessera::convert
