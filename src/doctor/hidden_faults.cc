// SPDX-License-Identifier: Apache-2.0
// Mistakes that leave no trace in the weights themselves: tried on the sample, the widest first.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "base/error.h"
#include "doctor/examination.h"
#include "model/load_model.h"

namespace tessera::doctor {

namespace {

constexpr int64_t kOwnTokens = 32, kLeastDistinct = 8, kMaxShift = 3;
constexpr const char* kTokenizerAdvice = "take tokenizer.json from the release that the weights come from";
constexpr int64_t kMaxIdShift = 4, kShiftTokens = 64;
constexpr double kOwnSurprise = 0.2;  // share of ln(vocabulary) that a sound model's own likeliest text may cost
// Share of a sound model's own text that the tokenizer makes into the same ids again: nearly all of it where the
// tokenizer is the model's.
constexpr double kSurvives = 0.7;

void add_exchange(std::vector<Repair>& repairs, const std::string& a, const std::string& b) {
  repairs.push_back({.kind = RepairKind::kReadFrom, .tensor = a, .other = b});
  repairs.push_back({.kind = RepairKind::kReadFrom, .tensor = b, .other = a});
}

// Share of `ids` that is there again, wherever, after the way through text.
double surviving_share(const text::Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  std::string text;
  for (const int32_t id : ids) {
    if (id < tokenizer.vocab_size()) text += tokenizer.token_bytes(id);
  }
  std::multiset<int32_t> again;
  for (const int32_t id : tokenizer.encode(text)) again.insert(id);
  int64_t kept = 0;
  for (const int32_t id : ids) {
    const auto at = again.find(id);
    if (at == again.end()) continue;
    again.erase(at);
    ++kept;
  }
  return static_cast<double>(kept) / static_cast<double>(std::max<size_t>(ids.size(), 1));
}

}  // namespace

std::vector<Hypothesis> Examination::wide_hypotheses() const {
  std::vector<Hypothesis> out;
  const auto add = [&](const char* kind, const std::string& where, const std::string& claim, const char* advice,
                       std::vector<Repair> repairs) {
    if (!repairs.empty()) {
      out.push_back({{Severity::kFault, kind, where, claim, advice}, std::move(repairs)});
    }
  };
  for (const char* table : {"head", "embed"}) {
    for (int64_t shift = -kMaxShift; shift <= kMaxShift; ++shift) {
      if (shift == 0) continue;
      add("token-order", table,
          fmt::format("its rows lie {} token ids too {}", std::abs(shift), shift > 0 ? "late" : "early"),
          "copy the tensor from the original", {{.kind = RepairKind::kRollRows, .tensor = table, .shift = shift}});
    }
  }
  const auto shared = [](int64_t layer, const char* matrix) {
    return fmt::format("layers.{}.ffn.shared_experts.{}", layer, matrix);
  };
  const char* const kSwapped = "w1 (gate) and w3 (up) are exchanged";
  const char* const kSwapBack = "exchange w1 and w3, or convert again from the original";
  std::vector<Repair> all;
  for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
    std::vector<Repair> one;
    add_exchange(one, shared(layer, "w1"), shared(layer, "w3"));
    all.insert(all.end(), one.begin(), one.end());
    add("gate-up-swapped", shared(layer, "w1"), kSwapped, kSwapBack, std::move(one));
  }
  add("gate-up-swapped", shared(0, "w1").replace(7, 1, "*"), kSwapped, kSwapBack, std::move(all));
  add_fp8_shifts(out);
  add_layer_exchanges(out);
  return out;
}

// FP8 block scales that moved by one block, matrix by matrix, and all together.
void Examination::add_fp8_shifts(std::vector<Hypothesis>& out) const {
  const char* const kAdvice = "convert again: scale [i, j] belongs to rows 128 i and columns 128 j onward";
  for (const int64_t shift : {1, -1}) {
    const std::string claim = fmt::format("its FP8 block scales lie one block too {}", shift > 0 ? "late" : "early");
    std::vector<Repair> every;
    for (const model::WeightRow& row : model::make_weight_spec(config_, 0)) {
      if (row.kind != model::WeightKind::kLinear || row.expert >= 0) continue;
      if (weights_.format(row.name) != ops::WeightFormat::kFp8Block) continue;
      const Shape shape = weights_.local_shape(row.name);
      if (shape[0] <= 128 && shape[1] <= 128) continue;
      every.push_back({.kind = RepairKind::kShiftFp8Scales, .tensor = row.name, .shift = shift});
      out.push_back({{Severity::kFault, "scale-order", row.name, claim, kAdvice}, {every.back()}});
    }
    if (every.size() > 1) {
      out.push_back({{Severity::kFault, "scale-order", "layers.*.attn", claim, kAdvice}, every});
    }
  }
}

// Two layers of one kind exchanged, or the same part of two layers.
void Examination::add_layer_exchanges(std::vector<Hypothesis>& out) const {
  const std::vector<model::WeightRow> rows = model::make_weight_spec(config_, 0);
  std::map<std::string, const model::WeightRow*> by_name;
  for (const model::WeightRow& row : rows) by_name[row.name] = &row;
  for (const char* part : {"", "attn.", "ffn.", "attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b",
                           "ffn.gate", "ffn.shared_experts."}) {
    for (int64_t a = 0; a < config_.num_layers; ++a) {
      for (int64_t b = a + 1; b < config_.num_layers; ++b) {
        const std::string from = fmt::format("layers.{}.", a), to = fmt::format("layers.{}.", b);
        std::vector<Repair> repairs;
        bool is_same_kind = true;
        for (const model::WeightRow& row : rows) {
          if (!row.name.starts_with(from + part)) continue;
          const auto other = by_name.find(to + row.name.substr(from.size()));
          is_same_kind = is_same_kind && other != by_name.end() && other->second->shape == row.shape;
          if (!is_same_kind) break;
          const bool is_matrix = row.kind == model::WeightKind::kLinear || row.kind == model::WeightKind::kPlain;
          is_same_kind = !is_matrix || weights_.format(row.name) == weights_.format(other->first);
          if (is_same_kind) add_exchange(repairs, row.name, other->first);
        }
        if (!is_same_kind || repairs.empty()) continue;
        out.push_back({{Severity::kFault, "layer-order", fmt::format("layers.{}.{}", a, part),
                        fmt::format("these are the weights of layers.{}.{}, and the reverse", b, part),
                        "exchange them, or copy both from the original"},
                       std::move(repairs)});
      }
    }
  }
}

// What the model says after its begin token, and whether it does so with confidence and without falling into a loop,
// as a sound model does in its own ids, whatever the tokenizer makes of text.
std::vector<int32_t> Examination::own_text(bool& is_confident) const {
  is_confident = false;
  model::LoadOptions options;
  options.precision = {ops::InputMode::kA16, ops::CacheMode::kFp8};
  options.num_threads = options_.num_threads;
  options.max_step_tokens = 1;
  options.sequence_tokens = kOwnTokens + 1;
  options.with_draft = false;
  options.allow_inexact = true;
  std::vector<int32_t> ids;
  try {
    const model::LoadedModel loaded =
        model::load_model(checkpoint_.directory(), options, backends_, machine_, nullptr, nullptr);
    const auto state = loaded.runner->new_sequence(kOwnTokens + 1);
    double cost = 0;
    int32_t id = static_cast<int32_t>(config_.bos_id);
    for (int64_t t = 0; t < kOwnTokens; ++t) {
      const model::SequenceSlice slice{state.get(), {&id, 1}, model::LogitRows::kLast};
      const TensorView row = loaded.runner->step({&slice, 1});
      const float* begin = row.as<float>();
      const float* best = std::max_element(begin, begin + config_.vocab_size);
      double total = 0;
      for (int64_t v = 0; v < config_.vocab_size; ++v) total += std::exp(static_cast<double>(begin[v]) - *best);
      cost += std::log(total) / static_cast<double>(kOwnTokens);
      id = static_cast<int32_t>(best - begin);
      ids.push_back(id);
    }
    is_confident = cost < kOwnSurprise * std::log(static_cast<double>(config_.vocab_size)) &&
                   static_cast<int64_t>(std::set<int32_t>(ids.begin(), ids.end()).size()) >= kLeastDistinct;
  } catch (const Error&) {
    return {};  // it does not fit, or makes no finite logits: nothing learnt
  }
  return ids;
}

// The sample's cost where token ids mean what stands `shift` ids further on, from the first merged token on: a
// tokenizer with tokens more or fewer than the one that the model was trained with.
Score Examination::score_shifted(const text::Tokenizer& tokenizer, int64_t shift) {
  int32_t first = 0;
  while (first < tokenizer.vocab_size() && (tokenizer.is_special(first) || tokenizer.token_bytes(first).size() < 2)) {
    ++first;
  }
  std::vector<int32_t> ids(ids_.begin(), ids_.begin() + std::min<int64_t>(kShiftTokens, std::ssize(ids_)));
  for (int32_t& id : ids) {
    const int64_t moved = id + shift;
    if (id >= first && moved >= first && moved < config_.vocab_size) id = static_cast<int32_t>(moved);
  }
  StackOptions options = stack_options({ops::InputMode::kF32, ops::CacheMode::kExact});
  options.keeps_layers = false;
  LayerStack stack(weights_, backends_, machine_, *executor_, options, ids);
  const device::Tensor streams = stack.embed();
  for (size_t layer = 0; layer < stack.num_layers(); ++layer) stack.run_layer(layer, streams, nullptr);
  return score(stack.logits(streams), ids, config_.vocab_size);
}

// Evidence against the tokenizer that is its own: ids out of order, or that what the model writes with confidence does
// not survive the way through text.
bool Examination::has_foreign_merges(const text::Tokenizer& tokenizer, DeepReport& report) const {
  std::string evidence;
  if (const int64_t count = tokenizer.num_merges_out_of_order(); count > 0) {
    evidence = fmt::format(
        "its ids were exchanged: the tokens of {} merges have lower ids than that of the merge before", count);
  } else {
    bool is_confident = false;
    const std::vector<int32_t> ids = own_text(is_confident);
    const double share = surviving_share(tokenizer, ids);
    if (!is_confident || share >= kSurvives) return false;
    evidence = fmt::format(
        "of {} tokens that the model writes with confidence this tokenizer makes only {:.0f} % again "
        "when it reads them: its merges are not those that the model was trained with",
        ids.size(), 100 * share);
  }
  report.findings.push_back({Severity::kFault, "tokenizer", checkpoint_.directory() + "/tokenizer.json",
                             fmt::format("{}; text made by it costs {:.2f} nats a token (guessing: {:.2f})", evidence,
                                         score_.mean(), report.uniform),
                             kTokenizerAdvice});
  return true;
}

// Or that the sample becomes likely once every id is moved.
bool Examination::has_moved_ids(const text::Tokenizer& tokenizer, DeepReport& report) {
  for (int64_t shift = 1; shift <= kMaxIdShift; ++shift) {
    for (const int64_t signed_shift : {shift, -shift}) {
      const Score shifted = score_shifted(tokenizer, signed_shift);
      const std::vector<double> before(score_.surprises.begin(),
                                       score_.surprises.begin() + std::ssize(shifted.surprises));
      const Comparison comparison = compare(before, shifted.surprises);
      if (!is_convincing(comparison)) continue;
      report.findings.push_back(
          {Severity::kFault, "tokenizer", checkpoint_.directory() + "/tokenizer.json",
           fmt::format("its ids mean other tokens to the weights: with every id of a merged token {} by {} the sample "
                       "costs {:.2f} instead of {:.2f} nats a token",
                       signed_shift > 0 ? "raised" : "lowered", shift, comparison.after, comparison.before),
           kTokenizerAdvice});
      return true;
    }
  }
  return false;
}

void Examination::explain_surprise(const text::Tokenizer* tokenizer, DeepReport& report, ProgressSink* progress) {
  if (!report.can_judge_text || !report.can_judge_weights || has_fault(report.findings)) return;
  if (!is_poor(score_)) {
    if (!costs_too_much(score_)) return;
    report.findings.push_back(
        {Severity::kWarning, "unexplained", checkpoint_.directory(),
         fmt::format("the sample costs {:.3f} nats a token where the model itself expects {:.3f}: a sound model is "
                     "about right about itself on text that it knows",
                     score_.mean(), score_.expected),
         "compare with the same check on the original, or try --sample with text that this model knows"});
    return;
  }
  const bool can_blame_text = is_near_guessing(score_) && options_.sample_ids.empty() && tokenizer != nullptr;
  if (can_blame_text && has_foreign_merges(*tokenizer, report)) return;
  try_hypotheses(wide_hypotheses(), Stop::kWhenExplained, report, progress);
  if (!is_poor(score_) || has_fault(report.findings)) return;
  if (can_blame_text && has_moved_ids(*tokenizer, report)) return;
  const bool is_own_sample = !options_.sample_text.empty() || !options_.sample_ids.empty();
  report.findings.push_back(
      {is_own_sample && !is_near_guessing(score_) ? Severity::kWarning : Severity::kFault, "unexplained",
       checkpoint_.directory(),
       fmt::format("the sample costs {:.2f} nats a token where the model itself expects {:.2f} (guessing: {:.2f}), and "
                   "none of {} mistakes that were tried explains it: damaged weights, a setting of config.json or "
                   "another release's tokenizer remain",
                   score_.mean(), score_.expected, report.uniform, report.num_tried),
       "compare every tensor's hash, config.json and tokenizer.json with the release; or try --sample with text that "
       "this model knows"});
}

}  // namespace tessera::doctor
