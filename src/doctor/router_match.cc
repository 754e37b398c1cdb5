// SPDX-License-Identifier: Apache-2.0
#include "doctor/router_match.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "doctor/gram.h"

namespace tessera::doctor {

namespace {

constexpr int64_t kLeastExperts = 4;
// In deviations of what other experts' rows measure. Healthy experts reach 1.4 to 9, w3 at most 1.7.
constexpr double kBelongs = 4, kBelongsNot = 1.2, kSuspect = 3;

using Table = std::vector<double>;  // [router row, expert]

// Removes what is common to a router row or to an expert.
void centre(Table& table, size_t n) {
  for (int by_row = 0; by_row < 2; ++by_row) {
    for (size_t i = 0; i < n; ++i) {
      double mean = 0;
      for (size_t j = 0; j < n; ++j) mean += table[by_row ? i * n + j : j * n + i] / static_cast<double>(n);
      for (size_t j = 0; j < n; ++j) table[by_row ? i * n + j : j * n + i] -= mean;
    }
  }
}

// Robust standard deviation of all entries (most of them are noise).
double deviation(const Table& table) {
  Table sizes(table.size());
  std::transform(table.begin(), table.end(), sizes.begin(), [](double x) { return std::abs(x); });
  std::nth_element(sizes.begin(), sizes.begin() + static_cast<int64_t>(sizes.size() / 2), sizes.end());
  return sizes[sizes.size() / 2] * 1.4826;
}

// Mean of the rows over the matrix's norm.
std::vector<double> mean_row(const DenseMatrix& matrix) {
  std::vector<double> mean(static_cast<size_t>(matrix.cols));
  double square = 0;
  for (int64_t r = 0; r < matrix.rows; ++r) {
    for (int64_t k = 0; k < matrix.cols; ++k) {
      const double x = matrix.row(r)[k];
      mean[static_cast<size_t>(k)] += x, square += x * x;
    }
  }
  for (double& x : mean) x *= square > 0 ? 1 / std::sqrt(square) : 0;
  return mean;
}

// Unit rows of the router, less what all of them share.
DenseMatrix unit_rows(DenseMatrix gate) {
  for (int64_t k = 0; k < gate.cols; ++k) {
    float mean = 0;
    for (int64_t e = 0; e < gate.rows; ++e) mean += gate.row(e)[k] / static_cast<float>(gate.rows);
    for (int64_t e = 0; e < gate.rows; ++e) gate.values[static_cast<size_t>(e * gate.cols + k)] -= mean;
  }
  for (int64_t e = 0; e < gate.rows; ++e) {
    double square = 1e-30;
    for (int64_t k = 0; k < gate.cols; ++k) square += static_cast<double>(gate.row(e)[k]) * gate.row(e)[k];
    for (int64_t k = 0; k < gate.cols; ++k) {
      gate.values[static_cast<size_t>(e * gate.cols + k)] /= static_cast<float>(std::sqrt(square));
    }
  }
  return gate;
}

}  // namespace

RouterReport test_router(model::WeightSource& weights, int64_t layer) {
  RouterReport report;
  const model::Config& config = weights.config();
  if (config.is_hashed(layer) || config.num_experts < kLeastExperts) return report;
  const size_t n = static_cast<size_t>(config.num_experts);
  const std::string prefix = fmt::format("layers.{}.ffn.", layer);
  const DenseMatrix gate = unit_rows(dense(weights.load_matrix(prefix + "gate").view));
  Table by_w1(n * n), by_w3(n * n);
  for (size_t f = 0; f < n; ++f) {
    for (const bool is_up : {false, true}) {
      const std::string name = fmt::format("{}experts.{}.{}", prefix, f, is_up ? "w3" : "w1");
      const std::vector<double> mean = mean_row(dense(weights.load_matrix(name).view));
      for (size_t e = 0; e < n; ++e) {
        double sum = 0;
        for (size_t k = 0; k < mean.size(); ++k) sum += mean[k] * gate.row(static_cast<int64_t>(e))[k];
        (is_up ? by_w3 : by_w1)[e * n + f] = sum;
      }
    }
  }
  centre(by_w1, n), centre(by_w3, n);
  const double noise1 = std::max(deviation(by_w1), 1e-12), noise3 = std::max(deviation(by_w3), 1e-12);
  for (size_t f = 0; f < n; ++f) {
    const double own = by_w1[f * n + f] / noise1, up = by_w3[f * n + f] / noise3;
    report.typical += std::max(own, up) / static_cast<double>(n);
    const std::string name = fmt::format("{}experts.{}", prefix, f);
    if (up > kSuspect && up > 2 * own) {
      report.suspects.push_back(
          {{Severity::kFault, "gate-up-swapped", name + ".w1",
            fmt::format("w1 (gate) and w3 (up) are exchanged: the gate must open for what the router sends here, which "
                        "w3 does (by {:.1f} deviations) and w1 does not ({:.1f})",
                        up, own),
            "exchange w1 and w3 of this expert, or convert again from the original"},
           {{.kind = RepairKind::kReadFrom, .tensor = name + ".w1", .other = name + ".w3"},
            {.kind = RepairKind::kReadFrom, .tensor = name + ".w3", .other = name + ".w1"}},
           up < kBelongs});
      continue;
    }
    size_t best = f;
    for (size_t e = 0; e < n; ++e) {
      if (by_w1[e * n + f] > by_w1[best * n + f]) best = e;
    }
    const double other = by_w1[best * n + f] / noise1;
    if (best == f || other < kBelongs || own > kBelongsNot) continue;
    // The tensors of expert f belong to row `best`: expert `best` must read its weights from here.
    const std::string target = fmt::format("{}experts.{}", prefix, best);
    Suspect suspect{{Severity::kFault, "expert-order", name,
                     fmt::format("these are the weights of expert {}: its gates open for what row {} of the router "
                                 "sends (by {:.1f} deviations) and not for row {} ({:.1f})",
                                 best, best, other, f, own),
                     "convert again, keeping experts in the router's order"},
                    {},
                    false};
    for (const char* matrix : {".w1", ".w2", ".w3"}) {
      suspect.repairs.push_back({.kind = RepairKind::kReadFrom, .tensor = target + matrix, .other = name + matrix});
    }
    report.suspects.push_back(std::move(suspect));
  }
  return report;
}

}  // namespace tessera::doctor
