// SPDX-License-Identifier: Apache-2.0
#include "doctor/kinship.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace tessera::doctor {

namespace {

using model::Matrix;
using model::WeightSource;
using ops::WeightFormat;

constexpr int64_t kSample = 256, kExpertRows = 96, kTableRows = 1024, kGroupSample = 64;
constexpr int64_t kInnerSample = 128, kInnerColumns = 1024;  // experts are many
// A permutation is believed where it shows a kinship this many times that of a meaningless one, and of the stored one.
constexpr double kOverNoise = 3, kOverStored = 3, kLeast = 0.025;
constexpr double kProfileFits = 0.3, kProfileAdvantage = 0.3;
constexpr double kGroupFits = 0.3, kGroupFitsNot = 0.15;
constexpr double kGateFits = 0.06, kGateRatio = 3;

struct Order {
  const char* kind;
  const char* text;
  RepairKind repair;
  std::vector<int> (*permutation)(size_t);
};
// `permutation` undoes the mistake on the reader's Gram matrix.
const Order kOrders[] = {
    {"nibble-order", "the two 4-bit codes of every byte are exchanged (even element must be the low nibble)",
     RepairKind::kSwapNibbles, swapped_nibbles},
    {"nibble-order", "the 4-bit codes lie as in GGUF (elements j and j + 8 of a block share a byte)",
     RepairKind::kGgufOrder, gguf_order},
};

double strength(const Gram& gram, const std::vector<const Gram*>& kin) {
  double sum = 0;
  for (const Gram* other : kin) {
    const double value = alignment(gram, *other);
    sum += value * value;
  }
  return kin.empty() ? 0 : std::sqrt(sum / static_cast<double>(kin.size()));
}

class Layer {
 public:
  Layer(WeightSource& weights, const ResidualKin& residual, int64_t layer)
      : weights_(weights), config_(weights.config()), residual_(residual), p_(fmt::format("layers.{}.", layer)) {
    ratio_ = config_.compress_ratios[static_cast<size_t>(layer)];
  }

  KinshipReport run() {
    const Matrix wq_a = load("attn.wq_a"), wkv = load("attn.wkv"), wo_a = load("attn.wo_a"), wo_b = load("attn.wo_b");
    std::vector<Gram> kin = residual_.grams;
    kin.push_back(reader_gram(dense(load("ffn.gate").view), residual_.indices));
    if (ratio_ != 0) {
      for (const char* name : {"attn.compressor.wkv", "attn.compressor.wgate"}) {
        kin.push_back(reader_gram(dense(load(name).view), residual_.indices));
      }
    }
    const DenseMatrix output = dense(wo_b.view);
    kin.push_back(writer_gram(output, residual_.indices));
    std::vector<const Gram*> all;
    for (const Gram& gram : kin) all.push_back(&gram);

    test_reader("attn.wq_a", wq_a, reader_gram(dense(wq_a.view), residual_.indices), all);
    test_reader("attn.wkv", wkv, reader_gram(dense(wkv.view), residual_.indices), all);
    test_query(wq_a);
    test_values(wkv, wo_a);
    test_output(wo_a, wo_b, output);
    for (int64_t e = -1; e < config_.num_experts; ++e) test_expert(e, all);
    return std::move(report_);
  }

 private:
  Matrix load(const std::string& name) { return weights_.load_matrix(p_ + name); }

  void add(const std::string& name, const char* kind, std::string evidence, std::vector<Repair> repairs,
           bool needs_trial = false) {
    report_.suspects.push_back({{Severity::kFault, kind, p_ + name, std::move(evidence),
                                 "convert the checkpoint again with a converter that keeps this order"},
                                std::move(repairs),
                                needs_trial});
  }

  // `gram` is what the matrix reads; `kin` what belongs to the same space.
  void test_reader(const std::string& name, const Matrix& matrix, const Gram& gram,
                   const std::vector<const Gram*>& kin) {
    const size_t n = gram.size();
    const double stored = strength(gram, kin);
    double noise = 1e-4;
    for (int i = 0; i < kControls; ++i) noise = std::max(noise, strength(gram.permuted(control_order(n, i)), kin));
    double best = stored;
    std::vector<double> undone_by;
    for (const Order& order : kOrders) {
      undone_by.push_back(strength(gram.permuted(order.permutation(n)), kin));
      best = std::max(best, undone_by.back());
    }
    ++report_.num_tests;
    report_.num_kin += best > kOverNoise * noise && best > 2 * kLeast ? 1 : 0;
    if (matrix.view.format != WeightFormat::kNvfp4) return;
    for (size_t i = 0; i < undone_by.size(); ++i) {
      const Order& order = kOrders[i];
      const double undone = undone_by[i];
      if (undone < kLeast || undone < kOverNoise * noise || undone < kOverStored * stored) continue;
      add(name, order.kind,
          fmt::format("{}: kinship with the matrices of the same space is {:.3f} as stored and {:.3f} undone "
                      "(meaningless orders: up to {:.3f})",
                      order.text, stored, undone, noise),
          {{.kind = order.repair, .tensor = p_ + name}});
      return;
    }
  }

  void scale_rows(DenseMatrix& matrix, const std::string& norm) {
    const device::Tensor weight = weights_.load_vector(p_ + norm);
    for (int64_t r = 0; r < matrix.rows; ++r) {
      for (int64_t k = 0; k < matrix.cols; ++k) {
        matrix.values[static_cast<size_t>(r * matrix.cols + k)] *= weight.as<float>()[r];
      }
    }
  }

  void test_query(const Matrix& wq_a) {
    const std::vector<int64_t> indices = block_sample(config_.q_lora_rank, kSample);
    DenseMatrix low = dense(wq_a.view);
    scale_rows(low, "attn.q_norm.weight");
    const Gram written = writer_gram(low, indices);
    for (const char* name : {"attn.wq_b", "attn.indexer.wq_b"}) {
      if (ratio_ != 4 && name[5] == 'i') continue;
      const Matrix wq_b = load(name);
      test_reader(name, wq_b, reader_gram(dense(wq_b.view, kTableRows), indices), {&written});
    }
  }

  // Rows of wo_a read whole heads, one after the other; all heads share keys and values.
  void test_values(const Matrix& wkv, const Matrix& wo_a) {
    const std::vector<int64_t> indices = block_sample(config_.nope_dim() / 16 * 16, kSample);
    if (indices.empty()) return;
    DenseMatrix values = dense(wkv.view);
    scale_rows(values, "attn.kv_norm.weight");
    const Gram written = writer_gram(values, indices);
    const DenseMatrix reader = dense(wo_a.view, kTableRows);
    Gram gram(indices);
    for (int64_t r = 0; r < reader.rows; ++r) {
      for (int64_t h = 0; h < config_.heads_per_group(); ++h) gram.add(reader.row(r) + h * config_.head_dim);
    }
    gram.finish();
    test_reader("attn.wo_a", wo_a, gram, {&written});
  }

  // Group by group: which rows of wo_a write what columns of wo_b read.
  void test_output(const Matrix& wo_a, const Matrix& wo_b, const DenseMatrix& output) {
    const int64_t groups = config_.o_groups, rank = config_.o_lora_rank;
    const DenseMatrix low = dense(wo_a.view);
    const std::vector<int64_t> inside = block_sample(rank / 16 * 16, kGroupSample);
    if (inside.size() < 16) return;
    std::vector<Gram> read, written, transposed;
    for (int64_t g = 0; g < groups; ++g) {
      std::vector<int64_t> here, there;
      for (const int64_t i : inside) here.push_back(g * rank + i), there.push_back(i * groups + g);
      read.push_back(reader_gram(output, here));
      written.push_back(writer_gram(low, here));
      transposed.push_back(writer_gram(low, there));
    }
    const std::vector<int> swap = swapped_nibbles(inside.size());
    std::vector<int64_t> source(static_cast<size_t>(groups));
    double stored = 0, best = 0, across = 0, swapped = 0;
    for (int64_t g = 0; g < groups; ++g) {
      const size_t i = static_cast<size_t>(g);
      double most = -1;
      for (int64_t h = 0; h < groups; ++h) {
        const double value = alignment(read[i], written[static_cast<size_t>(h)]);
        if (value > most) most = value, source[i] = h;
      }
      const double n = static_cast<double>(groups);
      stored += alignment(read[i], written[i]) / n, best += most / n;
      across += alignment(read[i], transposed[i]) / n;
      swapped += alignment(read[i].permuted(swap), written[i]) / n;
    }
    ++report_.num_tests;
    report_.num_kin += std::max({best, across, swapped}) > kGroupFits ? 1 : 0;
    if (stored > kGroupFitsNot) return;
    std::vector<int64_t> rows(static_cast<size_t>(groups * rank));
    const auto fill = [&](auto&& row_of) {
      for (int64_t g = 0; g < groups; ++g) {
        for (int64_t i = 0; i < rank; ++i) rows[static_cast<size_t>(g * rank + i)] = row_of(g, i);
      }
    };
    const Repair repair{.kind = RepairKind::kPermuteRows, .tensor = p_ + "attn.wo_a"};
    const auto repairs = [&] {
      Repair filled = repair;
      filled.rows = rows;
      return can_repair(filled, wo_a.view.format) ? std::vector<Repair>{filled} : std::vector<Repair>{};
    };
    std::vector<int64_t> sorted = source;
    std::sort(sorted.begin(), sorted.end());
    const bool is_permutation = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
    if (across > kGroupFits) {
      fill([&](int64_t g, int64_t i) { return i * groups + g; });
      add("attn.wo_a", "output-groups",
          fmt::format("its rows run through the {} output groups first (transposed): what wo_b reads matches them to "
                      "{:.2f} in that order and {:.2f} as stored",
                      groups, across, stored),
          repairs());
    } else if (best > kGroupFits && is_permutation) {
      fill([&](int64_t g, int64_t i) { return source[static_cast<size_t>(g)] * rank + i; });
      add("attn.wo_a", "output-groups",
          fmt::format("its {} output groups are in another order: group 0 is stored as group {}; what wo_b reads "
                      "matches them to {:.2f} in that order and {:.2f} as stored",
                      groups, source[0], best, stored),
          repairs());
    } else if (swapped > kGroupFits && wo_b.view.format == WeightFormat::kNvfp4) {
      add("attn.wo_b", kOrders[0].kind,
          fmt::format("{}: kinship with wo_a is {:.2f} as stored and {:.2f} undone", kOrders[0].text, stored, swapped),
          {{.kind = RepairKind::kSwapNibbles, .tensor = p_ + "attn.wo_b"}});
    }
  }

  // e = -1: the shared expert.
  void test_expert(int64_t e, const std::vector<const Gram*>& kin) {
    const std::string name = e < 0 ? "ffn.shared_experts." : fmt::format("ffn.experts.{}.", e);
    const Matrix w1 = load(name + "w1"), w2 = load(name + "w2"), w3 = load(name + "w3");
    test_reader(name + "w1", w1, reader_gram(dense(w1.view, kExpertRows), residual_.indices), kin);
    test_reader(name + "w3", w3, reader_gram(dense(w3.view, kExpertRows), residual_.indices), kin);
    const std::vector<int64_t> indices = block_sample(config_.expert_inner / 16 * 16, kInnerSample);
    if (indices.empty()) return;
    const Gram down = reader_gram(dense(w2.view, kTableRows), indices);
    const Gram gate = writer_gram(dense(w1.view), indices, kInnerColumns),
               up = writer_gram(dense(w3.view), indices, kInnerColumns);
    const auto profile = [&](const Gram& reader) {
      return (profile_alignment(reader, gate) + profile_alignment(reader, up)) / 2;
    };
    const double stored = profile(down);
    if (w2.view.format == WeightFormat::kNvfp4) {
      for (const Order& order : kOrders) {
        const double undone = profile(down.permuted(order.permutation(indices.size())));
        if (undone < kProfileFits || undone < stored + kProfileAdvantage) continue;
        add(name + "w2", order.kind,
            fmt::format("{}: its columns match the rows of w1 and w3 to {:.2f} as stored and {:.2f} undone", order.text,
                        stored, undone),
            {{.kind = order.repair, .tensor = p_ + name + "w2"}});
        break;
      }
    }
    const double by_gate = std::abs(alignment(down, gate)), by_up = std::abs(alignment(down, up));
    if (w1.view.format == w3.view.format && by_gate > kGateFits && by_gate > kGateRatio * by_up) {
      add(name + "w1", "gate-up-swapped",
          fmt::format("w1 (gate) and w3 (up) are exchanged: w2 must read along the directions that w3 writes, and "
                      "reads along those of w1 ({:.3f} against {:.3f})",
                      by_gate, by_up),
          {{.kind = RepairKind::kReadFrom, .tensor = p_ + name + "w1", .other = p_ + name + "w3"},
           {.kind = RepairKind::kReadFrom, .tensor = p_ + name + "w3", .other = p_ + name + "w1"}},
          by_gate < 2 * kGateFits);
    }
  }

  WeightSource& weights_;
  const model::Config& config_;
  const ResidualKin& residual_;
  std::string p_;
  int64_t ratio_ = 0;
  KinshipReport report_;
};

}  // namespace

ResidualKin residual_kin(WeightSource& weights) {
  ResidualKin kin;
  kin.indices = block_sample(weights.config().hidden_size / 16 * 16, kSample);
  for (const char* name : {"embed", "head"}) {
    kin.grams.push_back(reader_gram(dense(weights.load_matrix(name).view, kTableRows), kin.indices));
  }
  return kin;
}

KinshipReport test_kinship(WeightSource& weights, const ResidualKin& residual, int64_t layer) {
  return Layer(weights, residual, layer).run();
}

}  // namespace tessera::doctor
