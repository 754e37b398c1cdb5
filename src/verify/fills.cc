// SPDX-License-Identifier: Apache-2.0
#include "verify/fills.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "numeric/bf16.h"
#include "numeric/e2m1.h"
#include "numeric/e4m3.h"
#include "ops/reference_rows.h"

namespace tessera::verify {

namespace {

constexpr int64_t kPeriod = 1'000'003;  // a prime: drawing hundreds of millions of values would take minutes

// Fills [0, count) by draw(), and from kPeriod on with what came kPeriod earlier.
template <class T, class Draw>
void fill_values(T* values, int64_t count, const Draw& draw) {
  for (int64_t i = 0; i < std::min(count, kPeriod); ++i) values[i] = draw();
  for (int64_t i = kPeriod; i < count; i += kPeriod) {
    std::memcpy(values + i, values, static_cast<size_t>(std::min(kPeriod, count - i)) * sizeof(T));
  }
}

}  // namespace

std::vector<float> adversarial(Rng& rng, int64_t rows, int64_t cols) {
  std::vector<float> x(static_cast<size_t>(rows * cols));
  const uint64_t loud_column = rng.below(static_cast<uint64_t>(cols));
  for (int64_t r = 0; r < rows; ++r) {
    float* row = x.data() + r * cols;
    const uint64_t kind = rng.below(12);
    for (int64_t c = 0; c < cols; ++c) {
      row[c] = rng.normal();
      if (static_cast<uint64_t>(c) == loud_column || kind == 0) row[c] *= 50;
      if (rng.below(40) == 0) row[c] = rng.below(2) == 0 ? 0.0f : -0.0f;
      if (kind == 1) row[c] = 0;
      if (kind == 2) row[c] = row[0];
      if (kind == 3 && c % 16 != static_cast<int64_t>(rng.below(16))) row[c] = 0;
      if (kind == 4) row[c] = std::ldexp(row[c], -135);
    }
  }
  return x;
}

std::vector<float> normal_values(Rng& rng, int64_t rows, int64_t cols, float scale) {
  std::vector<float> x(static_cast<size_t>(rows * cols));
  for (float& value : x) value = rng.normal() * scale;
  return x;
}

device::Tensor as_tensor(const std::vector<float>& values, DType dtype, const Shape& shape) {
  device::Tensor tensor(dtype, shape);
  ops::store_floats(tensor, 0, shape.num_elements(), values.data());
  return tensor;
}

RandomWeight random_weight(Rng& rng, ops::WeightFormat format, int64_t rows, int64_t cols) {
  RandomWeight weight;
  weight.view.format = format;
  weight.view.rows = rows, weight.view.cols = cols;
  weight.data = device::Buffer(static_cast<size_t>(weight.view.data_bytes()));
  weight.scales = device::Buffer(static_cast<size_t>(weight.view.scale_bytes()));
  weight.view.data = weight.data.data(), weight.view.block_scales = weight.scales.data();
  switch (format) {
    case ops::WeightFormat::kF32:
      fill_values(weight.data.as<float>(), rows * cols, [&] { return rng.normal(); });
      break;
    case ops::WeightFormat::kBf16:
      fill_values(weight.data.as<uint16_t>(), rows * cols, [&] { return numeric::bf16_from_float(rng.normal()); });
      break;
    case ops::WeightFormat::kFp8Block:
      fill_values(weight.data.as<uint8_t>(), rows * cols,
                  [&] { return static_cast<uint8_t>(rng.below(0x7F) | rng.below(2) << 7); });
      fill_values(weight.scales.as<float>(), weight.view.scale_bytes() / 4, [&, folds = rng.below(2) == 0] {
        return folds ? std::ldexp(1.0f, -5 - static_cast<int>(rng.below(8))) : std::ldexp(rng.uniform() + 0.5f, -8);
      });
      break;
    case ops::WeightFormat::kNvfp4:
      fill_values(weight.data.as<uint8_t>(), weight.view.data_bytes(),
                  [&] { return static_cast<uint8_t>(rng.below(256)); });
      fill_values(weight.scales.as<uint8_t>(), weight.view.scale_bytes(),
                  [&] { return static_cast<uint8_t>(rng.below(0x7F)); });
      weight.view.tensor_scale = 1e-4f * (rng.uniform() + 0.5f);
      break;
  }
  return weight;
}

std::vector<double> RandomWeight::values() const {
  std::vector<double> out;
  for (int64_t r = 0; r < view.rows; ++r) {
    for (int64_t c = 0; c < view.cols; ++c) {
      const int64_t i = r * view.cols + c;
      switch (view.format) {
        case ops::WeightFormat::kF32:
          out.push_back(static_cast<double>(data.as<float>()[i]));
          break;
        case ops::WeightFormat::kBf16:
          out.push_back(static_cast<double>(numeric::bf16_to_float(data.as<uint16_t>()[i])));
          break;
        case ops::WeightFormat::kFp8Block: {
          const float scale = scales.as<float>()[r / 128 * ((view.cols + 127) / 128) + c / 128];
          out.push_back(static_cast<double>(numeric::e4m3_to_float(data.as<uint8_t>()[i])) *
                        static_cast<double>(scale));
          break;
        }
        case ops::WeightFormat::kNvfp4: {
          const uint8_t code = static_cast<uint8_t>(data.as<uint8_t>()[i / 2] >> (4 * (i % 2)) & 15);
          const float scale = numeric::e4m3_to_float(scales.as<uint8_t>()[i / 16]);
          out.push_back(static_cast<double>(numeric::e2m1_to_float(code)) * static_cast<double>(scale) *
                        static_cast<double>(view.tensor_scale));
          break;
        }
      }
    }
  }
  return out;
}

}  // namespace tessera::verify
