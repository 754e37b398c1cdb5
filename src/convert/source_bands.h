// SPDX-License-Identifier: Apache-2.0
#pragma once
// The source's bytes in bands of a few MiB, read ahead by a thread in the order in which a conversion needs them. This
// is what bounds memory: a matrix is held whole only where it is small enough.
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "convert/bounded_queue.h"
#include "convert/plan.h"

namespace tessera::convert {

constexpr uint64_t kBandBytes = 8 << 20;
// A job whose source takes more is read twice: once for its largest magnitude, once to be rounded.
constexpr uint64_t kResidentBytes = 192 << 20;
constexpr uint64_t kReadAheadBytes = 192 << 20;

// Rows [row_begin, row_end) of matrix `matrix` of a job; for kCopy and kReciprocal bytes [row_begin, row_end).
struct Band {
  size_t matrix = 0;
  int64_t row_begin = 0, row_end = 0;
  std::unique_ptr<uint8_t[]> codes;   // values or codes, as stored
  std::unique_ptr<uint8_t[]> scales;  // NVFP4 and MXFP4: their rows of block scales
  std::vector<float> fp8_scales;      // FP8: [ceil(rows / 128), ceil(cols / 128)]; row_begin is a multiple of 128
  uint64_t num_bytes = 0;
};

// How often a job's source is read: twice where a scale for all of it is needed first and it is not held in memory.
int num_passes(const Job& job);
// Bytes of a job's source, once.
uint64_t source_bytes(const Job& job);
// The bands of one pass, in order, without data.
std::vector<Band> bands_of(const Job& job);
// Reads a band's data. Throws kDataLoss where the file has shrunk, or an FP8 scale is negative or not finite.
void read_band(const Job& job, Band& band);
// Row `row` (of the whole matrix, inside the band) of an F32, BF16 or FP8 matrix as FP32. FP8's NaN stays NaN.
void widen_row(const PlannedMatrix& matrix, const Band& band, int64_t row, float* out);

// Reads every band of some jobs, all passes, on its own thread.
class SourceReader {
 public:
  SourceReader(const Plan& plan, std::vector<size_t> jobs);
  ~SourceReader();
  // The next band in order. Throws what reading threw.
  Band next();

 private:
  void run();
  const Plan& plan_;
  std::vector<size_t> jobs_;
  BoundedQueue<Band> queue_;
  std::thread thread_;
};

}  // namespace tessera::convert
