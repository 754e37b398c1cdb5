// SPDX-License-Identifier: Apache-2.0
#include "testing/checkpoint_layouts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "model/weight_names.h"
#include "model/weight_spec.h"
#include "numeric/bf16.h"
#include "numeric/mxfp4.h"
#include "numeric/nvfp4.h"

namespace tessera::testing {

namespace {

using model::WeightKind;
using model::WeightRow;

enum class Format { kPlain, kFp8E8m0, kFp8F32, kFp8Bf16, kFp8Inverse, kMxfp4, kNvfp4, kCompressed };

// Decoding, written out here once more: what is held against the program must not be the program.
double e2m1(uint32_t code) {
  constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (code & 8) != 0 ? -kValues[code & 7] : kValues[code & 7];
}
double e4m3(uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const double value = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (byte & 0x80) != 0 ? -value : value;
}
uint32_t nibble(const std::vector<uint8_t>& bytes, int64_t element) {
  return bytes[static_cast<size_t>(element / 2)] >> (4 * (element % 2)) & 15u;
}

Stored stored_floats(const std::vector<float>& values, const Shape& shape, DType dtype) {
  const size_t width = dtype == DType::kF32 ? 4 : 2;
  Stored out{dtype, shape, std::vector<uint8_t>(values.size() * width)};
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t narrow = numeric::bf16_from_float(values[i]);
    if (dtype == DType::kF32) std::memcpy(out.bytes.data() + 4 * i, &values[i], 4);
    if (dtype != DType::kF32) std::memcpy(out.bytes.data() + 2 * i, &narrow, 2);
  }
  return out;
}

std::vector<float> floats_of(const Stored& stored) {
  std::vector<float> values(stored.bytes.size() / 4);
  std::memcpy(values.data(), stored.bytes.data(), stored.bytes.size());
  return values;
}

bool is_expert(const std::string& name) {
  return name.find("ffn.experts.") != std::string::npos;
}
// What the official release has in FP8.
bool is_dense(const std::string& name) {
  constexpr std::array kEnds = {".wq_a", ".wq_b", "attn.wkv", ".wo_a", ".wo_b", "e_proj", "h_proj"};
  if (name.find("compressor") != std::string::npos) return false;
  return name.find("shared_experts.") != std::string::npos ||
         std::any_of(kEnds.begin(), kEnds.end(), [&](const char* end) { return name.ends_with(end); });
}

class LayoutWriter {
 public:
  LayoutWriter(Layout layout, Rng& rng) : layout_(layout), rng_(rng), has_narrow_experts_(rng.below(2) == 0) {}

  void add(const std::string& name, const Shape& shape, const std::vector<float>& values, float shared_amax) {
    name_ = name, rows_ = shape[0], cols_ = shape[1];
    std::vector<float>& out = model_.values[name];
    out.resize(values.size());
    switch (format_of(name)) {
      case Format::kPlain:
        plain(values, out);
        return;
      case Format::kFp8E8m0:
        fp8(values, out, DType::kF8E8M0, ".scale");
        return;
      case Format::kFp8F32:
        fp8(values, out, DType::kF32, ".scale");
        return;
      case Format::kFp8Bf16:
        fp8(values, out, DType::kBF16, ".weight_scale");
        return;
      case Format::kFp8Inverse:
        fp8(values, out, rng_.below(2) == 0 ? DType::kF32 : DType::kBF16, ".weight_scale_inv");
        return;
      case Format::kMxfp4:
        mxfp4(values, out);
        return;
      case Format::kNvfp4:
      case Format::kCompressed:
        nvfp4(values, out, shared_amax, format_of_ == Format::kCompressed);
        return;
    }
  }

  LayoutModel& model() { return model_; }

 private:
  Format format_of(const std::string& name) {
    const bool expert = is_expert(name), dense = is_dense(name), draft = name.starts_with("mtp.");
    switch (layout_) {
      case Layout::kOfficial:
        format_of_ = expert ? Format::kMxfp4 : dense ? Format::kFp8E8m0 : Format::kPlain;
        break;
      case Layout::kBase:
        format_of_ = expert || dense ? Format::kFp8F32 : Format::kPlain;
        break;
      case Layout::kModelOptMixed:
        format_of_ = expert ? (draft ? Format::kMxfp4 : Format::kNvfp4) : dense ? Format::kFp8E8m0 : Format::kPlain;
        break;
      case Layout::kModelOptUnequal:
        format_of_ = expert || dense ? Format::kNvfp4 : Format::kPlain;
        break;
      case Layout::kAllNvfp4:
        format_of_ = Format::kNvfp4;
        break;
      case Layout::kCompressedTensors:
        format_of_ = draft ? Format::kPlain : expert ? Format::kCompressed : dense ? Format::kFp8Bf16 : Format::kPlain;
        break;
      case Layout::kFp8Inverse:
        format_of_ = expert || dense ? Format::kFp8Inverse : Format::kPlain;
        break;
      case Layout::kAnything:
        format_of_ = static_cast<Format>(rng_.below(8));
        break;
    }
    return format_of_;
  }

  Stored& tensor(const char* suffix) { return model_.tensors[name_ + suffix]; }

  void plain(const std::vector<float>& values, std::vector<float>& out) {
    // Experts of a layer must agree in what they are kept as.
    const bool is_narrow = is_expert(name_) && layout_ != Layout::kAnything ? has_narrow_experts_ : rng_.below(2) == 0;
    for (size_t i = 0; i < values.size(); ++i) out[i] = is_narrow ? numeric::bf16_round(values[i]) : values[i];
    tensor(".weight") = stored_floats(out, {rows_, cols_}, is_narrow ? DType::kBF16 : DType::kF32);
  }

  void fp8(const std::vector<float>& values, std::vector<float>& out, DType dtype, const char* suffix) {
    const int64_t block_cols = (cols_ + 127) / 128, block_rows = (rows_ + 127) / 128;
    std::vector<float> scales(static_cast<size_t>(block_rows * block_cols), 0);
    const auto scale_at = [&](int64_t i) -> float& {
      return scales[static_cast<size_t>(i / cols_ / 128 * block_cols + i % cols_ / 128)];
    };
    const int64_t count = rows_ * cols_;
    for (int64_t i = 0; i < count; ++i)
      scale_at(i) = std::max(scale_at(i), std::fabs(values[static_cast<size_t>(i)]) / 448);
    Stored stored_scales{dtype, {block_rows, block_cols}, {}};
    for (float& scale : scales) {
      const float odd = scale * (1 + rng_.uniform());
      scale = dtype == DType::kF32 ? odd : numeric::bf16_round(odd * 1.01f);
      if (dtype != DType::kF8E8M0) continue;
      stored_scales.bytes.push_back(numeric::e8m0_from_float_up(odd));
      scale = std::ldexp(1.0f, stored_scales.bytes.back() - 127);
    }
    if (dtype != DType::kF8E8M0) stored_scales = stored_floats(scales, {block_rows, block_cols}, dtype);
    Stored codes{DType::kF8E4M3, {rows_, cols_}, std::vector<uint8_t>(values.size())};
    for (int64_t i = 0; i < count; ++i) {
      const size_t at = static_cast<size_t>(i);
      codes.bytes[at] = scale_at(i) == 0 ? uint8_t{0} : numeric::e4m3_from_float(values[at] / scale_at(i));
      out[at] = static_cast<float>(e4m3(codes.bytes[at]) * static_cast<double>(scale_at(i)));
    }
    tensor(".weight") = codes, tensor(suffix) = stored_scales;
  }

  void mxfp4(const std::vector<float>& values, std::vector<float>& out) {
    Stored codes{DType::kI8, {rows_, cols_ / 2}, std::vector<uint8_t>(values.size() / 2)};
    Stored scales{DType::kF8E8M0, {rows_, cols_ / 32}, std::vector<uint8_t>(values.size() / 32)};
    numeric::q4_quantize(values.data(), rows_ * cols_, codes.bytes.data(), scales.bytes.data());
    for (size_t b = 0; b < scales.bytes.size(); ++b) {
      if (rng_.below(30) != 0) continue;
      // A block of zeros of either sign, whose scale says nothing.
      for (size_t i = 0; i < 16; ++i) codes.bytes[16 * b + i] = static_cast<uint8_t>(rng_.below(256) & 0x88);
      scales.bytes[b] = static_cast<uint8_t>(rng_.below(3) == 0 ? 0 : rng_.below(255));
    }
    for (int64_t i = 0; i < rows_ * cols_; ++i) {
      out[static_cast<size_t>(i)] =
          static_cast<float>(std::ldexp(e2m1(nibble(codes.bytes, i)), scales.bytes[static_cast<size_t>(i / 32)] - 127));
    }
    // Official: I8 codes, .scale; others save the same bytes as U8 or as elements of four bits.
    const uint64_t choice = rng_.below(3);
    if (choice == 1) codes.dtype = DType::kU8;
    if (choice == 2) codes.dtype = DType::kF4, codes.shape = {rows_, cols_};
    if (rng_.below(3) == 0) scales.dtype = DType::kU8;
    const bool is_packed = choice == 1 && rng_.below(3) == 0;
    tensor(is_packed ? ".weight_packed" : ".weight") = codes;
    tensor(is_packed || rng_.below(3) == 0 ? ".weight_scale" : ".scale") = scales;
  }

  void nvfp4(const std::vector<float>& values, std::vector<float>& out, float shared_amax, bool is_compressed) {
    const bool has_own = layout_ == Layout::kModelOptUnequal || layout_ == Layout::kAllNvfp4;
    const float amax = has_own ? numeric::abs_max(values.data(), rows_ * cols_) * (1 + rng_.uniform()) : shared_amax;
    float global = numeric::nvfp4_weight_scale(amax, numeric::Nvfp4WeightRule::kAmax);
    const float reciprocal = 1 / global;
    if (is_compressed) global = 1 / reciprocal;
    Stored codes{DType::kU8, {rows_, cols_ / 2}, std::vector<uint8_t>(values.size() / 2)};
    Stored scales{DType::kF8E4M3, {rows_, cols_ / 16}, std::vector<uint8_t>(values.size() / 16)};
    const auto rule = rng_.below(2) == 0 ? numeric::Nvfp4WeightRule::kAmax : numeric::Nvfp4WeightRule::kFourOverSix;
    numeric::nvfp4_quantize_weight_row(values.data(), rows_ * cols_, global, rule, codes.bytes.data(),
                                       scales.bytes.data());
    for (int64_t i = 0; i < rows_ * cols_; ++i) {
      const double value = e2m1(nibble(codes.bytes, i)) * e4m3(scales.bytes[static_cast<size_t>(i / 16)]);
      out[static_cast<size_t>(i)] = static_cast<float>(value * static_cast<double>(global));
    }
    const Shape one = rng_.below(2) == 0 ? Shape{} : Shape{1};
    tensor(is_compressed ? ".weight_packed" : ".weight") = codes;
    tensor(".weight_scale") = scales;
    tensor(is_compressed ? ".weight_global_scale" : ".weight_scale_2") =
        stored_floats({is_compressed ? reciprocal : global}, one, DType::kF32);
    if (rng_.below(2) == 0) {
      tensor(is_compressed ? ".input_global_scale" : ".input_scale") = stored_floats({0.01f}, one, DType::kF32);
    }
  }

  Layout layout_;
  Rng& rng_;
  bool has_narrow_experts_;
  LayoutModel model_;
  std::string name_;
  Format format_of_ = Format::kPlain;
  int64_t rows_ = 0, cols_ = 0;
};

// Powers of two by 128 x 128, by row and by 16 columns: at most 2^9 apart.
std::vector<float> varied(std::vector<float> values, const Shape& shape, Rng& rng) {
  const int64_t phase = static_cast<int64_t>(rng.below(12));
  for (int64_t i = 0; i < shape.num_elements(); ++i) {
    const int64_t r = i / shape[1] + phase, c = i % shape[1];
    const int64_t power = (r / 128 + 2 * (c / 128)) % 4 + r % 3 + c / 32 % 3 + 2 * (c / 16 % 2);
    values[static_cast<size_t>(i)] = std::ldexp(values[static_cast<size_t>(i)], -static_cast<int>(power));
  }
  return values;
}

}  // namespace

const char* to_string(Layout layout) {
  constexpr std::array kNames = {"official",           "base",        "modelopt mixed", "modelopt unequal", "all nvfp4",
                                 "compressed-tensors", "fp8 inverse", "anything"};
  return kNames[static_cast<size_t>(layout)];
}

LayoutModel make_layout(Layout layout, const Tensors& plain, const model::Config& config, Rng& rng) {
  LayoutWriter writer(layout, rng);
  std::map<std::string, std::vector<float>> values;
  const std::vector<WeightRow> rows = model::make_weight_spec(config, 1);
  for (const WeightRow& row : rows) {
    if (row.kind == WeightKind::kLinear)
      values[row.name] = varied(floats_of(plain.at(row.name + ".weight")), row.shape, rng);
  }
  for (const WeightRow& row : rows) {
    if (row.kind == WeightKind::kLinear) {
      float amax = numeric::abs_max(values[row.name].data(), row.shape.num_elements());
      std::string partner = row.name;
      if (is_expert(row.name) && !row.name.ends_with("w2")) partner.back() = row.name.back() == '1' ? '3' : '1';
      amax = std::max(amax, numeric::abs_max(values[partner].data(), row.shape.num_elements()));
      writer.add(row.name, row.shape, values[row.name], amax);
      continue;
    }
    const std::string name = row.name + (row.kind == WeightKind::kPlain ? ".weight" : "");
    const Stored& stored = plain.at(name);
    const bool is_narrow = row.kind != WeightKind::kTable && rng.below(2) == 0;  // all values are BF16 numbers
    writer.model().tensors[name] = is_narrow ? stored_floats(floats_of(stored), stored.shape, DType::kBF16) : stored;
  }
  return writer.model();
}

Tensors plain_layout(const Tensors& plain, const LayoutModel& model) {
  Tensors out = plain;
  for (const auto& [name, values] : model.values) {
    std::memcpy(out.at(name + ".weight").bytes.data(), values.data(), values.size() * sizeof(float));
  }
  return out;
}

Tensors with_hf_names(const Tensors& tensors) {
  Tensors out;
  for (const auto& [name, stored] : tensors) {
    if (name.starts_with("mtp.")) continue;
    std::string hf = model::hf_name(name);
    const size_t dot = name.rfind('.');
    if (hf.empty()) hf = model::hf_name(name.substr(0, dot)) + name.substr(dot);
    out[hf] = stored;
  }
  return out;
}

}  // namespace tessera::testing
