// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reads slices of stored linear maps into memory, in the format in which they are multiplied.
#include <algorithm>
#include <cstdint>

#include "base/integer_math.h"
#include "base/log.h"
#include "device/buffer.h"
#include "device/queue.h"
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
  // `progress` may be null; it is advanced by the bytes read. With a queue, its threads read and check pieces side by
  // side: one thread is slower than a good disk.
  explicit MatrixReader(ProgressSink* progress, device::Queue* queue = nullptr) : progress_(progress), queue_(queue) {}

  // Where matrices are read to from now on: memory that functions of the host can write. It must outlive them.
  void set_memory(device::MemorySpace& memory) { memory_ = &memory; }

  // The rows and columns of `slice` of a map of `shape` [n, k]. Memory beyond the result: a few rows, or the MXFP4
  // scales of the slice. `global_exponent` is for MXFP4 (mxfp4_scaling). Throws kUnsupported for NVFP4 columns that are
  // not whole groups of 16; kDataLoss for NaN, infinity, a negative block scale, a tensor scale that is not finite and
  // above 0, naming tensor and element (within the slice).
  Matrix read(const StoredTensor& stored, const Shape& shape, const WeightSlice& slice, int global_exponent = 0);

  void read_bytes(const checkpoint::LocatedTensor& tensor, uint64_t begin, uint64_t num_bytes, void* out);

  // Calls function(begin, end) on pieces of `num_bytes` bytes, by the queue's threads where there is one; returns when
  // all are done.
  template <class Function>
  void for_pieces(uint64_t num_bytes, const Function& function);
  // The same on runs of so many pieces.
  template <class Function>
  void for_each_piece(int64_t num_pieces, const Function& function);

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
  void check_values(const StoredTensor& stored, const Matrix& matrix);
  void advance(uint64_t bytes);

  ProgressSink* progress_;
  device::Queue* queue_;
  device::MemorySpace* memory_ = &device::host_memory();
  int64_t num_rounded_blocks_ = 0;
};

constexpr uint64_t kPieceBytes = 512 << 10;

template <class Function>
void MatrixReader::for_each_piece(int64_t num_pieces, const Function& function) {
  if (queue_ != nullptr && num_pieces > 1) return queue_->parallel_for(num_pieces, 1, function);
  if (num_pieces > 0) function(int64_t{0}, num_pieces);
}

template <class Function>
void MatrixReader::for_pieces(uint64_t num_bytes, const Function& function) {
  for_each_piece(ceil_div(static_cast<int64_t>(num_bytes), static_cast<int64_t>(kPieceBytes)), [&](int64_t begin,
                                                                                                   int64_t end) {
    function(static_cast<uint64_t>(begin) * kPieceBytes, std::min(static_cast<uint64_t>(end) * kPieceBytes, num_bytes));
  });
}

}  // namespace tessera::model
