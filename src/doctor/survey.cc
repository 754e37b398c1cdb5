// SPDX-License-Identifier: Apache-2.0
#include "doctor/survey.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "base/error.h"
#include "doctor/gram.h"
#include "ops/linear/linear.h"

namespace tessera::doctor {

namespace {

using model::WeightKind;
using model::WeightRow;

constexpr double kNothing = -1000;               // log2_rms of a matrix of zeros
constexpr double kExpertBand = 0.7;              // experts of a layer lie within 0.1 of their median in trained models
constexpr double kLayerBand = 0.7;               // layers differ more: only a suspicion
constexpr double kSureBand = 6;                  // nobody trains a matrix 64 times its siblings' size
constexpr double kLeastRms = -24, kMostRms = 7;  // log2 of the RMS of any trained linear map
constexpr int64_t kSampledRows = 512;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// "layers.3.ffn.experts.12.w1" -> "layers.3.ffn.experts.*.w1"; others: over layers. Empty: no siblings.
std::string family_of(const WeightRow& row) {
  if (row.kind != WeightKind::kLinear) return "";
  if (row.expert >= 0) {
    const std::string id = fmt::format(".experts.{}.", row.expert);
    const size_t at = row.name.find(id);
    return at == std::string::npos ? "" : row.name.substr(0, at) + ".experts.*." + row.name.substr(at + id.size());
  }
  if (!row.name.starts_with("layers.")) return "";
  return "layers.*" + row.name.substr(row.name.find('.', 7));
}

MatrixFacts measure(const std::string& name, const ops::WeightView& view) {
  MatrixFacts facts{name, view.format, view.tensor_scale, kNothing, fit_scales(view)};
  const int64_t step = std::max<int64_t>(1, view.rows / kSampledRows);
  std::vector<float> row(static_cast<size_t>(view.cols));
  double square = 0, count = 0;
  for (int64_t r = 0; r < view.rows; r += step) {
    ops::decode_weight_row(view, r, row.data());
    for (const float x : row) square += static_cast<double>(x) * x;
    count += static_cast<double>(view.cols);
  }
  if (square > 0) facts.log2_rms = 0.5 * std::log2(square / count) + std::log2(static_cast<double>(view.tensor_scale));
  return facts;
}

class Surveyor {
 public:
  Surveyor(model::WeightSource& weights, const std::vector<WeightRow>& rows) : weights_(weights), rows_(rows) {}

  Survey run(ProgressSink* progress) {
    for (const WeightRow& row : rows_) {
      try {
        read(row);
      } catch (const Error& error) {
        survey_.is_readable = false;
        const bool is_nan = std::string_view(error.what()).find("NaN") != std::string_view::npos ||
                            std::string_view(error.what()).find("scale") != std::string_view::npos ||
                            std::string_view(error.what()).find("finite") != std::string_view::npos;
        add(Severity::kFault, is_nan ? "not-finite" : "unreadable", row.name, error.what(),
            "download or convert this tensor again; nothing can run with it");
      }
      if (progress != nullptr) progress->advance(1);
    }
    compare_siblings();
    compare_biases();
    return std::move(survey_);
  }

 private:
  void add(Severity severity, std::string kind, std::string where, std::string evidence, std::string advice,
           std::vector<Repair> repairs = {}, bool needs_trial = false) {
    survey_.suspects.push_back({{severity, std::move(kind), std::move(where), std::move(evidence), std::move(advice)},
                                std::move(repairs),
                                needs_trial});
  }

  void read(const WeightRow& row) {
    if (row.kind == WeightKind::kTable) {
      weights_.load_table(row.name);
      return;
    }
    if (row.kind == WeightKind::kVector) {
      read_vector(row);
      return;
    }
    const model::Matrix matrix = weights_.load_matrix(row.name);
    const MatrixFacts facts = measure(row.name, matrix.view);
    survey_.matrices.push_back(facts);
    families_[family_of(row)].push_back(survey_.matrices.size() - 1);
    if (facts.log2_rms == kNothing) {
      add(Severity::kFault, "missing-weights", row.name, "every value is zero: the tensor was never written",
          "convert or download this tensor again");
      return;
    }
    if (facts.fit.is_wrong) {
      add(Severity::kFault, "scale-order", row.name,
          fmt::format("its block scales are stored {}: scales and codes correlate {:.2f} in that order and {:.2f} as "
                      "stored",
                      describe(facts.fit.best_order), facts.fit.best_other, facts.fit.as_stored),
          "convert again: checkpoints hold block scales row by row",
          {{.kind = RepairKind::kReorderScales, .tensor = row.name, .order = facts.fit.best_order}});
    } else if (facts.fit.fits_no_order) {
      add(Severity::kWarning, "scale-order", row.name,
          fmt::format("block scales and codes do not seem to belong together: correlation {:.2f}, expected -0.5 or "
                      "less, in no order that is known",
                      facts.fit.as_stored),
          "compare the tensor with the original");
    }
  }

  void read_vector(const WeightRow& row) {
    const device::Tensor values = weights_.load_vector(row.name);
    const int64_t count = values.view().shape.num_elements();
    const float* x = values.as<float>();
    const bool is_zero = std::all_of(x, x + count, [](float v) { return v == 0; });
    const bool is_bias = row.name.ends_with("ffn.gate.bias");
    if (is_bias) biases_.emplace_back(row.name, is_zero);
    if (is_zero && row.name.ends_with("norm.weight")) {
      add(Severity::kFault, "missing-weights", row.name, "every value is zero: the norm erases its input",
          "convert or download this tensor again");
    }
  }

  void compare_siblings() {
    for (const auto& [family, members] : families_) {
      if (family.empty()) continue;
      std::vector<double> sizes;
      for (const size_t i : members) {
        if (survey_.matrices[i].log2_rms != kNothing) sizes.push_back(survey_.matrices[i].log2_rms);
      }
      if (sizes.empty()) continue;
      const double middle = median(sizes);
      std::vector<double> distances;
      for (const double size : sizes) distances.push_back(std::abs(size - middle));
      const double spread = 1.4826 * median(distances);
      const bool is_experts = family.find("experts.*") != std::string::npos;
      const bool can_compare = sizes.size() >= 4;
      for (const size_t i : members) compare(survey_.matrices[i], middle, spread, is_experts, can_compare);
    }
  }

  void compare(const MatrixFacts& facts, double middle, double spread, bool is_experts, bool can_compare) {
    if (facts.log2_rms == kNothing) return;
    const double off = facts.log2_rms - middle;
    const double band = std::max(is_experts ? kExpertBand : kLayerBand, 6 * spread);
    const bool is_scaled = facts.format == ops::WeightFormat::kNvfp4 || facts.format == ops::WeightFormat::kFp8Block;
    const bool is_absurd = facts.log2_rms < kLeastRms || facts.log2_rms > kMostRms;
    const bool is_off = can_compare && std::abs(off) > band;
    if (!is_absurd && !is_off) return;
    // What the size would be with 1 / scale in place of the scale.
    const double inverse = facts.log2_rms - 2 * std::log2(static_cast<double>(facts.tensor_scale));
    const bool is_inverse_sane = inverse > kLeastRms && inverse < kMostRms;
    const bool is_reciprocal =
        facts.format == ops::WeightFormat::kNvfp4 &&
        (is_off && std::abs(off) > kSureBand ? std::abs(inverse - middle) < 2 || (is_absurd && is_inverse_sane)
                                             : is_absurd && is_inverse_sane);
    if (is_reciprocal) {
      const double factor = 1 / (static_cast<double>(facts.tensor_scale) * facts.tensor_scale);
      add(Severity::kFault, "reciprocal-scale", facts.name,
          fmt::format("its tensor scale {:.6g} is the reciprocal of the right one, {:.6g}: with it the values have RMS "
                      "2^{:.1f}, siblings 2^{:.1f}",
                      facts.tensor_scale, 1 / facts.tensor_scale, facts.log2_rms, is_off ? middle : inverse),
          "store the number that multiplies (weight_scale_2), not its reciprocal (weight_global_scale)",
          {{.kind = RepairKind::kMultiply, .tensor = facts.name, .factor = factor}});
      return;
    }
    const double factor = std::exp2(-std::round(off));
    const bool is_sure = is_absurd || (is_experts && can_compare) || std::abs(off) > kSureBand;
    add(Severity::kFault, "scale-size", facts.name,
        is_off
            ? fmt::format("its values have RMS 2^{:.2f}, its siblings 2^{:.2f} (+- {:.2f}): {} by a factor of {:.3g}",
                          facts.log2_rms, middle, spread, off > 0 ? "too large" : "too small", std::exp2(std::abs(off)))
            : fmt::format("its values have RMS 2^{:.1f}: no trained matrix is that {}", facts.log2_rms,
                          facts.log2_rms > 0 ? "large" : "small"),
        "take the tensor's scale from the original, or convert it again",
        is_scaled && is_off && factor != 1
            ? std::vector<Repair>{{.kind = RepairKind::kMultiply, .tensor = facts.name, .factor = factor}}
            : std::vector<Repair>{},
        !is_sure);
  }

  // A router's correction bias is trained in every layer that has one, or in none.
  void compare_biases() {
    const auto num_zero = std::count_if(biases_.begin(), biases_.end(), [](const auto& bias) { return bias.second; });
    for (const auto& [name, is_zero] : biases_) {
      if (!is_zero) continue;
      const bool is_alone = num_zero < static_cast<int64_t>(biases_.size());
      add(is_alone ? Severity::kFault : Severity::kWarning, "router-bias", name,
          is_alone ? "every value is zero, those of other layers are not: the bias was dropped"
                   : "every value is zero in every layer: dropped, or never trained",
          "copy the bias (e_score_correction_bias) from the original; without it the router picks other experts");
    }
  }

  model::WeightSource& weights_;
  const std::vector<WeightRow>& rows_;
  Survey survey_;
  std::map<std::string, std::vector<size_t>> families_;
  std::vector<std::pair<std::string, bool>> biases_;
};

}  // namespace

Survey survey_weights(model::WeightSource& weights, const std::vector<WeightRow>& rows, ProgressSink* progress) {
  if (progress != nullptr) progress->begin("survey weights", rows.size(), "tensors");
  Survey survey = Surveyor(weights, rows).run(progress);
  if (progress != nullptr) progress->end();
  return survey;
}

}  // namespace tessera::doctor
