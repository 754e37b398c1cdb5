// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which directions of a space a matrix reads or writes. Matrices that share a space (the residual stream, the low-rank
// query, an expert's inner width) were trained together and so use correlated directions of it: the off-diagonal parts
// of their Gram matrices point the same way. A matrix whose rows or columns are permuted by mistake loses that kinship,
// and undoing the permutation restores it. Needs no run of the model; random weights show no kinship at all.
#include <cstdint>
#include <span>
#include <vector>

#include "model/weight_source.h"

namespace tessera::doctor {

// A matrix widened to FP32, tensor scale included.
struct DenseMatrix {
  int64_t rows = 0, cols = 0;
  std::vector<float> values;
  const float* row(int64_t r) const { return values.data() + r * cols; }
};

// At most `max_rows` rows, evenly spread; all where it is 0.
DenseMatrix dense(const ops::WeightView& weight, int64_t max_rows = 0);

// Gram matrix over sampled indices of a space, without its diagonal, of Frobenius norm 1 (0 where it vanishes); and the
// logarithms of the diagonal, standardised.
class Gram {
 public:
  explicit Gram(std::vector<int64_t> indices);
  // `vector` is indexed by the space's full index.
  void add(const float* vector);
  // vector[i] = matrix[i][column]: a producer writes its space along the rows.
  void add_rows_of(const DenseMatrix& matrix, int64_t column);
  void finish();

  size_t size() const { return indices_.size(); }
  // The same with indices exchanged inside the sample: entry i becomes entry order[i].
  Gram permuted(std::span<const int> order) const;

  friend double alignment(const Gram& a, const Gram& b);          // of the off-diagonals, -1 to 1
  friend double profile_alignment(const Gram& a, const Gram& b);  // correlation of the logarithms of the diagonals

 private:
  std::vector<int64_t> indices_;
  std::vector<double> products_;  // [n, n]
  std::vector<double> profile_;
  std::vector<float> gathered_;
};

// Column Gram of `matrix` over `indices`.
Gram reader_gram(const DenseMatrix& matrix, const std::vector<int64_t>& indices);
// Row Gram of `matrix` over `indices` (of rows), from at most `max_columns` columns, evenly spread.
Gram writer_gram(const DenseMatrix& matrix, const std::vector<int64_t>& indices, int64_t max_columns = 2048);

// Whole blocks of 16 indices, evenly spread over [0, width), at most `max_count` of them; width a multiple of 16.
std::vector<int64_t> block_sample(int64_t width, int64_t max_count);

// Mistakes in the order of the 16 codes of a block, as permutations of a block_sample.
std::vector<int> swapped_nibbles(size_t count);  // 2j <-> 2j + 1
std::vector<int> gguf_order(size_t count);       // the code of 2j holds j, that of 2j + 1 holds j + 8
// Permutations that nobody makes by mistake, `variant` 0 to kControls - 1: what they measure is noise.
constexpr int kControls = 4;
std::vector<int> control_order(size_t count, int variant);

}  // namespace tessera::doctor
