// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reads slices of stored linear maps into memory, in the format in which they are multiplied.
#include <cstdint>

#include "base/log.h"
#include "device/buffer.h"
#include "model/weight_format.h"
#include "ops/weight_view.h"

namespace tessera::model {

// An owned linear map.
struct Matrix {
  device::Buffer data, scales;
  ops::WeightView view;
};

// The format in memory of a slice of a map [n, k]: that on disk, with two exceptions. MXFP4 becomes NVFP4. FP8 blocks
// that the cut between ranks goes through can't be kept, since a slice's blocks begin at its first row and column: such
// a slice becomes FP32, on every rank.
ops::WeightFormat format_in_memory(const StoredTensor& stored, const Shape& shape, const WeightSlice& slice);

class MatrixReader {
 public:
  // `progress` may be null; it is advanced by the bytes read.
  explicit MatrixReader(ProgressSink* progress) : progress_(progress) {}

  // The rows and columns of `slice` of a map of `shape` [n, k]. Memory beyond the result: a few rows, or the MXFP4
  // scales of the slice. `global_exponent` is for MXFP4 (mxfp4_scaling). Throws kUnsupported for NVFP4 columns that are
  // not whole groups of 16; kDataLoss for NaN, infinity, a negative block scale, a tensor scale that is not finite and
  // above 0, naming tensor and element (within the slice).
  Matrix read(const StoredTensor& stored, const Shape& shape, const WeightSlice& slice, int global_exponent = 0);

  void read_bytes(const checkpoint::LocatedTensor& tensor, uint64_t begin, uint64_t num_bytes, void* out);

  // Of MXFP4, so far: blocks that NVFP4 can't hold exactly and that were rounded.
  int64_t num_rounded_blocks() const { return num_rounded_blocks_; }

 private:
  struct Rows;
  void read_rows(const Rows& rows, void* out);
  void read_plain(const StoredTensor& stored, const Shape& shape, const WeightSlice& slice, const Matrix& matrix);
  void read_mxfp4(const StoredTensor& stored, const Shape& shape, const WeightSlice& slice, int global_exponent,
                  const Matrix& matrix);
  void read_fp8_as_float(const StoredTensor& stored, const Shape& shape, const WeightSlice& slice,
                         const Matrix& matrix);
  void advance(uint64_t bytes);

  ProgressSink* progress_;
  int64_t num_rounded_blocks_ = 0;
};

}  // namespace tessera::model
