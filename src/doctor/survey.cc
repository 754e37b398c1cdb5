// SPDX-License-Identifier: Apache-2.0
#include "doctor/survey.h"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "base/error.h"
#include "doctor/gram.h"
#include "doctor/vector_survey.h"
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
constexpr size_t kLeastUnfitSiblings = 3;
constexpr double kSiblingsFit = -0.4;

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

MatrixFacts measure(const std::string& name, const ops::WeightView& view, model::StoredFormat stored) {
  MatrixFacts facts{name, view.format, view.tensor_scale, kNothing, 0, fit_scales(view), stored};
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
    compare_expert_layers();
    report_unfit();
    for (Suspect& suspect : vectors_.suspects()) survey_.suspects.push_back(std::move(suspect));
    find_copies();
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
    const model::StoredFormat stored = weights_.stored(row.name).format;
    const int64_t rounded_before = weights_.num_rounded_blocks();
    const model::Matrix matrix = weights_.load_matrix(row.name);
    const bool is_rounded = weights_.num_rounded_blocks() > rounded_before;
    const MatrixFacts facts = measure(row.name, matrix.view, stored);
    const uint64_t hash =
        XXH3_64bits_withSeed(matrix.scales.data(), static_cast<size_t>(matrix.view.scale_bytes()),
                             XXH3_64bits(matrix.data.data(), static_cast<size_t>(matrix.view.data_bytes())));
    if (facts.log2_rms != kNothing) by_content_[hash].push_back(row.name);
    survey_.matrices.push_back(facts);
    family_of_.push_back(family_of(row));
    families_[family_of_.back()].push_back(survey_.matrices.size() - 1);
    if (facts.log2_rms == kNothing && is_rounded) {
      add(Severity::kFault, "scale-range", row.name,
          "every MXFP4 block is rounded to zero: the scales of this matrix, or of w1 beside w3, span more than NVFP4 "
          "holds",
          "compare the E8M0 scales of the expert with the original");
      return;
    }
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
      unfit_.push_back(survey_.matrices.size() - 1);
    }
  }

  void read_vector(const WeightRow& row) {
    const device::Tensor values = weights_.load_vector(row.name);
    vectors_.add(row.name, values.as<float>(), values.view().shape.num_elements());
  }

  // Scales that fit their codes in no known order: sure where the same matrix fits in the other layers.
  void report_unfit() {
    for (const size_t i : unfit_) {
      const MatrixFacts& facts = survey_.matrices[i];
      std::vector<double> others;
      for (const size_t j : families_[family_of_[i]]) {
        if (j != i && survey_.matrices[j].fit.can_judge) others.push_back(survey_.matrices[j].fit.as_stored);
      }
      const bool is_alone = others.size() >= kLeastUnfitSiblings && median(others) < kSiblingsFit;
      // Where no layer's fits, the quantiser works otherwise, or all are damaged alike: the sample must tell.
      const bool is_usual = others.empty() && families_[family_of_[i]].size() > kLeastUnfitSiblings;
      add(is_alone   ? Severity::kFault
          : is_usual ? Severity::kNote
                     : Severity::kWarning,
          "scale-order", facts.name,
          fmt::format(
              "block scales and codes do not belong together in any order that is known: correlation {:.2f}, {}",
              facts.fit.as_stored,
              is_alone ? fmt::format("that of its siblings {:.2f}", median(others))
                       : std::string("expected -0.5 or less")),
          "compare the tensor with the original");
    }
  }

  // Two trained matrices are never the same to the last bit.
  void find_copies() {
    for (const auto& [hash, names] : by_content_) {
      for (size_t i = 1; i < names.size(); ++i) {
        add(Severity::kFault, "duplicate-weights", names[i],
            fmt::format("its values are those of {}, bit for bit: one was written over the other", names[0]),
            "copy both from the original");
      }
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
      for (const size_t i : members) {
        if (sizes.size() > 1) survey_.matrices[i].off = survey_.matrices[i].log2_rms - middle;
      }
      for (const size_t i : members) compare(survey_.matrices[i], middle, spread, is_experts, can_compare);
    }
  }

  // All experts of a layer against those of other layers, which no comparison inside the layer can see.
  void compare_expert_layers() {
    std::map<std::string, std::vector<std::pair<std::string, double>>> layers;  // by matrix: family, median size
    for (const auto& [family, members] : families_) {
      if (family.find("experts.*") == std::string::npos) continue;
      std::vector<double> sizes;
      for (const size_t i : members) {
        if (survey_.matrices[i].log2_rms != kNothing) sizes.push_back(survey_.matrices[i].log2_rms);
      }
      if (!sizes.empty()) layers[family.substr(family.size() - 2)].emplace_back(family, median(sizes));
    }
    for (const auto& [matrix, families] : layers) {
      if (families.size() < 4) continue;
      std::vector<double> sizes, distances;
      for (const auto& [family, size] : families) sizes.push_back(size);
      const double middle = median(sizes);
      for (const double size : sizes) distances.push_back(std::abs(size - middle));
      const double spread = 1.4826 * median(distances);
      for (const auto& [family, size] : families) {
        const double off = size - middle;
        if (std::abs(off) < std::max(kLayerBand, 6 * spread)) continue;
        std::vector<Repair> repairs;
        for (const size_t i : families_[family]) {
          repairs.push_back({.kind = RepairKind::kMultiply,
                             .tensor = survey_.matrices[i].name,
                             .factor = std::exp2(-std::round(4 * off) / 4)});
        }
        add(Severity::kFault, "scale-size", family,
            fmt::format("the experts of this layer have RMS 2^{:.2f}, those of other layers 2^{:.2f} (+- {:.2f}): too "
                        "{} by a factor of {:.3g}",
                        size, middle, spread, off > 0 ? "large" : "small", std::exp2(std::abs(off))),
            "take the tensors' scales from the original, or convert them again", std::move(repairs),
            std::abs(off) < kSureBand);
      }
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
    const bool has_tensor_scale =
        facts.stored == model::StoredFormat::kNvfp4 || facts.stored == model::StoredFormat::kNvfp4Reciprocal;
    const bool is_reciprocal =
        has_tensor_scale &&
        (is_off && std::abs(off) > kSureBand ? std::abs(inverse - middle) < 2 || (is_absurd && is_inverse_sane)
                                             : is_absurd && is_inverse_sane);
    if (is_reciprocal) {
      const double factor = 1 / (static_cast<double>(facts.tensor_scale) * facts.tensor_scale);
      add(Severity::kFault, "reciprocal-scale", facts.name,
          fmt::format("its tensor scale {:.6g} is the reciprocal of the right one, {:.6g}: with it the values have RMS "
                      "2^{:.1f}, siblings 2^{:.1f}",
                      facts.tensor_scale, 1 / facts.tensor_scale, facts.log2_rms, is_off ? middle : inverse),
          facts.stored == model::StoredFormat::kNvfp4
              ? "store the number that multiplies (weight_scale_2), not its reciprocal (weight_global_scale)"
              : "store the reciprocal of the number that multiplies, as weight_global_scale means",
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

  model::WeightSource& weights_;
  const std::vector<WeightRow>& rows_;
  Survey survey_;
  std::map<std::string, std::vector<size_t>> families_;
  std::vector<std::string> family_of_;  // by matrix
  std::vector<size_t> unfit_;
  VectorSurvey vectors_;
  std::map<uint64_t, std::vector<std::string>> by_content_;
};

}  // namespace

Survey survey_weights(model::WeightSource& weights, const std::vector<WeightRow>& rows, ProgressSink* progress) {
  if (progress != nullptr) progress->begin("survey weights", rows.size(), "tensors");
  Survey survey = Surveyor(weights, rows).run(progress);
  if (progress != nullptr) progress->end();
  return survey;
}

}  // namespace tessera::doctor
