// SPDX-License-Identifier: Apache-2.0
#include "doctor/gram.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "ops/linear/linear.h"

namespace tessera::doctor {

namespace {

constexpr int64_t kBlock = 16;

template <class Place>
std::vector<int> in_blocks(size_t count, Place place) {
  std::vector<int> order(count);
  for (size_t i = 0; i < count; ++i) {
    order[i] = static_cast<int>(i / kBlock * kBlock) + place(static_cast<int>(i % kBlock));
  }
  return order;
}

}  // namespace

DenseMatrix dense(const ops::WeightView& weight, int64_t max_rows) {
  const int64_t step = max_rows == 0 || weight.rows <= max_rows ? 1 : weight.rows / max_rows;
  DenseMatrix out;
  out.rows = weight.rows / step, out.cols = weight.cols;
  out.values.resize(static_cast<size_t>(out.rows * out.cols));
  for (int64_t r = 0; r < out.rows; ++r) {
    float* row = out.values.data() + r * out.cols;
    ops::decode_weight_row(weight, r * step, row);
    for (int64_t k = 0; k < out.cols; ++k) row[k] *= weight.tensor_scale;
  }
  return out;
}

Gram::Gram(std::vector<int64_t> indices) : indices_(std::move(indices)) {
  products_.assign(indices_.size() * indices_.size(), 0);
  gathered_.resize(indices_.size());
}

void Gram::add(const float* vector) {
  const size_t n = indices_.size();
  for (size_t i = 0; i < n; ++i) gathered_[i] = vector[indices_[i]];
  for (size_t i = 0; i < n; ++i) {
    const double x = gathered_[i];
    double* row = products_.data() + i * n;
    for (size_t j = 0; j < n; ++j) row[j] += x * static_cast<double>(gathered_[j]);
  }
}

void Gram::add_rows_of(const DenseMatrix& matrix, int64_t column) {
  const size_t n = indices_.size();
  for (size_t i = 0; i < n; ++i) gathered_[i] = matrix.row(indices_[i])[column];
  for (size_t i = 0; i < n; ++i) {
    const double x = gathered_[i];
    double* row = products_.data() + i * n;
    for (size_t j = 0; j < n; ++j) row[j] += x * static_cast<double>(gathered_[j]);
  }
}

void Gram::finish() {
  const size_t n = indices_.size();
  profile_.resize(n);
  double mean = 0, square = 0;
  for (size_t i = 0; i < n; ++i) {
    profile_[i] = std::log(products_[i * n + i] + 1e-30);
    mean += profile_[i] / static_cast<double>(n);
    products_[i * n + i] = 0;
  }
  for (double& value : profile_) value -= mean, square += value * value;
  for (double& value : profile_) value *= square > 1e-12 ? 1 / std::sqrt(square) : 0;
  const double norm = std::sqrt(std::inner_product(products_.begin(), products_.end(), products_.begin(), 0.0));
  for (double& value : products_) value *= norm > 0 ? 1 / norm : 0;
}

Gram Gram::permuted(std::span<const int> order) const {
  const size_t n = indices_.size();
  TESSERA_CHECK(order.size() == n && profile_.size() == n, "a permutation of a finished sample");
  Gram out(indices_);
  out.profile_.resize(n);
  for (size_t i = 0; i < n; ++i) {
    const size_t from = static_cast<size_t>(order[i]);
    out.profile_[i] = profile_[from];
    for (size_t j = 0; j < n; ++j) {
      out.products_[i * n + j] = products_[from * n + static_cast<size_t>(order[j])];
    }
  }
  return out;
}

double alignment(const Gram& a, const Gram& b) {
  TESSERA_CHECK(a.products_.size() == b.products_.size(), "Gram matrices over the same sample");
  return std::inner_product(a.products_.begin(), a.products_.end(), b.products_.begin(), 0.0);
}

double profile_alignment(const Gram& a, const Gram& b) {
  TESSERA_CHECK(a.profile_.size() == b.profile_.size(), "Gram matrices over the same sample");
  return std::inner_product(a.profile_.begin(), a.profile_.end(), b.profile_.begin(), 0.0);
}

Gram reader_gram(const DenseMatrix& matrix, const std::vector<int64_t>& indices) {
  Gram gram(indices);
  for (int64_t r = 0; r < matrix.rows; ++r) gram.add(matrix.row(r));
  gram.finish();
  return gram;
}

Gram writer_gram(const DenseMatrix& matrix, const std::vector<int64_t>& indices, int64_t max_columns) {
  Gram gram(indices);
  const int64_t step = std::max<int64_t>(1, matrix.cols / max_columns);
  for (int64_t c = 0; c < matrix.cols; c += step) gram.add_rows_of(matrix, c);
  gram.finish();
  return gram;
}

std::vector<int64_t> block_sample(int64_t width, int64_t max_count) {
  const int64_t blocks = width / kBlock, taken = std::min(blocks, std::max<int64_t>(max_count / kBlock, 1));
  std::vector<int64_t> indices;
  for (int64_t b = 0; b < taken; ++b) {
    for (int64_t i = 0; i < kBlock; ++i) indices.push_back(b * blocks / taken * kBlock + i);
  }
  return indices;
}

std::vector<int> swapped_nibbles(size_t count) {
  return in_blocks(count, [](int i) { return i ^ 1; });
}

std::vector<int> gguf_order(size_t count) {
  return in_blocks(count, [](int i) { return i < 8 ? 2 * i : 2 * (i - 8) + 1; });
}

std::vector<int> control_order(size_t count, int variant) {
  static constexpr int kFactors[kControls] = {5, 3, 11, 13}, kOffsets[kControls] = {3, 7, 5, 2};
  return in_blocks(count, [&](int i) { return (kFactors[variant] * i + kOffsets[variant]) % 16; });
}

}  // namespace tessera::doctor
