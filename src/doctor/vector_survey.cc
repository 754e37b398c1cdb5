// SPDX-License-Identifier: Apache-2.0
#include "doctor/vector_survey.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace tessera::doctor {

namespace {

constexpr size_t kLeastSiblings = 3;
// In multiples of the siblings' own spread, and the least that counts at all.
constexpr double kManySpreads = 4, kLeastLevel = 0.5, kLeastSinkLevel = 3, kLeastLog2 = 1.2;
constexpr double kLessOneSpreads = 3;  // a mistake that is common needs less of it
constexpr double kSameDeviation = 1;   // log2
constexpr double kWarnsLevel = 10;     // a sink that high keeps its heads from attending to anything
constexpr double kWarnsLog2 = 4;       // sixteen times its siblings' size is odd, whatever the sample says

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

struct Band {
  double middle = 0, spread = 0;
};

template <class Range, class Measure>
Band band_of(const Range& others, Measure measure) {
  std::vector<double> values, distances;
  for (const auto& other : others) values.push_back(measure(other));
  Band band{median(values), 0};
  for (const double value : values) distances.push_back(std::abs(value - band.middle));
  // The largest distance too: of five layers the median says little.
  band.spread = std::max(1.4826 * median(distances), *std::max_element(distances.begin(), distances.end()) / 2);
  return band;
}

std::string tail_of(const std::string& name) {
  return name.starts_with("layers.") ? name.substr(name.find('.', 7) + 1) : "";
}

bool is_bias(const std::string& name) {
  return name.ends_with("ffn.gate.bias");
}

}  // namespace

void VectorSurvey::add(const std::string& name, const float* values, int64_t count) {
  Facts facts{.name = name};
  const double n = static_cast<double>(count);
  int64_t num_negative = 0, num_zero = 0;
  for (int64_t i = 0; i < count; ++i) {
    facts.mean += values[i] / n;
    facts.rms += static_cast<double>(values[i]) * values[i] / n;
    num_negative += values[i] < 0, num_zero += values[i] == 0;
  }
  facts.rms = std::sqrt(facts.rms);
  facts.deviation = std::sqrt(std::max(0.0, facts.rms * facts.rms - facts.mean * facts.mean));
  facts.is_zero = num_zero == count;
  facts.is_positive = num_negative == 0 && num_zero == 0;
  facts.is_negative = num_negative == count;
  vectors_.push_back(std::move(facts));
}

// A norm, sink or bias whose values all lie higher or lower than those of other layers by more than these differ.
void VectorSurvey::test_level(const Facts& facts, const std::vector<Facts>& others, std::vector<Suspect>& out) const {
  const bool is_norm = facts.name.ends_with("norm.weight"), is_sink = facts.name.ends_with("attn_sink");
  if (!is_norm && !is_sink) return;
  const Band band = band_of(others, [](const Facts& other) { return other.mean; });
  const double off = facts.mean - band.middle;
  // Frameworks that store a norm as its difference from 1 make the one mistake that is common: the level falls by 1 and
  // the values differ as before.
  const Band others_differ = band_of(others, [](const Facts& other) { return std::log2(other.deviation + 1e-30); });
  const bool is_less_one =
      is_norm && std::abs(off + 1) < 0.4 &&
      std::abs(std::log2(facts.deviation + 1e-30) - others_differ.middle) < kSameDeviation + others_differ.spread;
  if (is_norm && !is_less_one) return;  // test_size has the rest
  if (std::abs(off) <
      std::max(is_sink ? kLeastSinkLevel : kLeastLevel, (is_less_one ? kLessOneSpreads : kManySpreads) * band.spread))
    return;
  const double offset = is_less_one ? 1 : -off;
  Suspect suspect{
      {Severity::kFault, is_norm ? "norm-offset" : "sink-level", facts.name,
       fmt::format("its values have mean {:.3f}, those of other layers {:.3f} (+- {:.3f}){}", facts.mean, band.middle,
                   band.spread,
                   is_less_one ? ": as if stored less 1, as frameworks do that multiply by 1 + weight" : ""),
       is_less_one ? "store the factor itself: add 1 to every value" : "copy it from the original"},
      {{.kind = RepairKind::kAdd, .tensor = facts.name, .offset = offset}},
      true,
      is_sink && std::abs(off) > kWarnsLevel ? Severity::kWarning : Severity::kNote};
  out.push_back(std::move(suspect));
}

void VectorSurvey::test_size(const Facts& facts, const std::vector<Facts>& others, std::vector<Suspect>& out) const {
  if (facts.name.ends_with("attn_sink")) return;  // a logarithm: its level counts
  // What a bias adds to every expert alike changes no choice.
  const auto size = [](const Facts& other) {
    return std::log2((is_bias(other.name) ? other.deviation : other.rms) + 1e-30);
  };
  const Band band = band_of(others, size);
  const double off = size(facts) - band.middle;
  if (std::abs(off) < std::max(kLeastLog2, kManySpreads * band.spread)) return;
  out.push_back({{Severity::kFault, "scale-size", facts.name,
                  fmt::format("its values have {} 2^{:.2f}, those of other layers 2^{:.2f} (+- {:.2f}): too {} by a "
                              "factor of {:.3g}",
                              is_bias(facts.name) ? "a spread of" : "RMS", size(facts), band.middle, band.spread,
                              off > 0 ? "large" : "small", std::exp2(std::abs(off))),
                  "copy it from the original"},
                 {{.kind = RepairKind::kMultiply, .tensor = facts.name, .factor = std::exp2(-off)}},
                 true,
                 std::abs(off) > kWarnsLog2 ? Severity::kWarning : Severity::kNote});
}

void VectorSurvey::compare(const std::vector<Facts>& family, std::vector<Suspect>& out) const {
  if (family.size() < kLeastSiblings + 1) return;
  for (size_t i = 0; i < family.size(); ++i) {
    const Facts& facts = family[i];
    std::vector<Facts> others;
    for (size_t j = 0; j < family.size(); ++j) {
      if (j != i && !family[j].is_zero) others.push_back(family[j]);
    }
    if (others.size() < kLeastSiblings) continue;
    if (facts.is_zero) {
      // Few are ever zero by design, and then in most layers.
      if (is_bias(facts.name) || facts.name.ends_with("norm.weight")) continue;
      if (others.size() + 2 < family.size()) continue;
      out.push_back({{Severity::kFault, "missing-weights", facts.name,
                      "every value is zero, those of other layers are not: the tensor was never written",
                      "convert or download this tensor again"},
                     {},
                     false});
      continue;
    }
    const bool all_positive = std::all_of(others.begin(), others.end(), [](const Facts& f) { return f.is_positive; });
    if (all_positive && facts.is_negative) {
      out.push_back({{Severity::kFault, "sign", facts.name,
                      "all its values are negative, all those of other layers positive", "change the sign"},
                     {{.kind = RepairKind::kMultiply, .tensor = facts.name, .factor = -1}},
                     true});
      continue;
    }
    const size_t before = out.size();
    test_level(facts, others, out);
    if (out.size() == before) test_size(facts, others, out);
  }
}

// A router's correction bias is trained in every layer that has one, or in none.
void VectorSurvey::test_biases(std::vector<Suspect>& out) const {
  std::vector<const Facts*> biases;
  for (const Facts& facts : vectors_) {
    if (is_bias(facts.name)) biases.push_back(&facts);
  }
  const auto num_zero = std::count_if(biases.begin(), biases.end(), [](const Facts* bias) { return bias->is_zero; });
  const bool is_alone = num_zero < static_cast<int64_t>(biases.size());
  for (const Facts* bias : biases) {
    if (!bias->is_zero) continue;
    out.push_back({{is_alone ? Severity::kFault : Severity::kWarning, "router-bias", bias->name,
                    is_alone ? "every value is zero, those of other layers are not: the bias was dropped"
                             : "every value is zero in every layer: dropped, or never trained",
                    "copy the bias (e_score_correction_bias) from the original; without it the router picks other "
                    "experts"},
                   {},
                   false});
  }
}

std::vector<Suspect> VectorSurvey::suspects() const {
  std::vector<Suspect> out;
  std::map<std::string, std::vector<Facts>> families;
  for (const Facts& facts : vectors_) {
    const bool is_norm = facts.name.ends_with("norm.weight");
    if (is_norm && facts.is_zero) {
      out.push_back({{Severity::kFault, "missing-weights", facts.name, "every value is zero: the norm erases its input",
                      "convert or download this tensor again"},
                     {},
                     false});
    }
    if (const std::string tail = tail_of(facts.name); !tail.empty()) families[tail].push_back(facts);
  }
  for (const auto& [tail, family] : families) compare(family, out);
  test_biases(out);
  return out;
}

}  // namespace tessera::doctor
