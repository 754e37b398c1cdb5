// SPDX-License-Identifier: Apache-2.0
#include "server/thinking_budget.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "text/chat/answer_parser.h"

namespace tessera::server {

namespace {

struct Terms {
  ThinkingBudget budget;
  std::shared_ptr<const engine::ConstraintSource> inner;
  std::shared_ptr<const std::vector<uint32_t>> allowed;
  const text::Tokenizer& tokenizer;
  std::vector<int32_t> eos_ids;
};

class Constraint final : public engine::TokenConstraint {
 public:
  explicit Constraint(std::shared_ptr<const Terms> terms)
      : terms_(std::move(terms)), inner_(terms_->inner == nullptr ? nullptr : terms_->inner->begin()) {
    is_used_up_ = terms_->budget.num_tokens == 0;
    if (!is_used_up_) reasoning_.emplace(true);
  }

  Allowed allowed(std::span<uint32_t> mask) override {
    const auto end = static_cast<size_t>(terms_->budget.end_think_id);
    const uint32_t end_bit = uint32_t{1} << (end % 32);
    if (must_end()) {
      is_used_up_ = true;
      mask[end / 32] |= end_bit;
      return Allowed::kSome;
    }
    const Allowed others = allowed_besides(mask);
    if (!is_used_up_ || others == Allowed::kNone) return others;
    // A model that was cut short may go on reasoning in its content and end that, too: a second end is no text.
    if (others == Allowed::kAll) std::fill(mask.begin(), mask.end(), ~uint32_t{0});
    mask[end / 32] &= ~end_bit;
    return Allowed::kSome;
  }
  std::span<const uint32_t> shared_mask() const override {
    if (must_end() || is_used_up_) return {};
    if (inner_ != nullptr) return inner_->shared_mask();
    if (terms_->allowed == nullptr) return {};
    return *terms_->allowed;
  }
  void drawn(int32_t id) override {
    if (inner_ != nullptr) inner_->drawn(id);
    if (!reasoning_) return;
    ++num_tokens_;
    const std::vector<int32_t>& ends = terms_->eos_ids;
    const bool has_text = id < terms_->tokenizer.vocab_size() && std::find(ends.begin(), ends.end(), id) == ends.end();
    if (has_text) reasoning_->push(terms_->tokenizer.token_bytes(id));
    if (!reasoning_->is_reasoning()) reasoning_.reset();
  }
  bool has_ended() const override { return inner_ != nullptr && inner_->has_ended(); }

 private:
  bool must_end() const { return reasoning_ && num_tokens_ >= terms_->budget.num_tokens; }
  Allowed allowed_besides(std::span<uint32_t> mask) {
    if (inner_ != nullptr) return inner_->allowed(mask);
    if (terms_->allowed == nullptr) return Allowed::kAll;
    std::copy(terms_->allowed->begin(), terms_->allowed->end(), mask.begin());
    return Allowed::kSome;
  }

  const std::shared_ptr<const Terms> terms_;
  const std::unique_ptr<engine::TokenConstraint> inner_;
  // As the answer will be read: reasoning ends by its marker, however that is spelled, or by a call. None: it has.
  std::optional<text::AnswerParser> reasoning_;
  int64_t num_tokens_ = 0;
  bool is_used_up_ = false;
};

class Source final : public engine::ConstraintSource {
 public:
  explicit Source(std::shared_ptr<const Terms> terms) : terms_(std::move(terms)) {}
  std::unique_ptr<engine::TokenConstraint> begin() const override { return std::make_unique<Constraint>(terms_); }

 private:
  const std::shared_ptr<const Terms> terms_;
};

}  // namespace

std::shared_ptr<const engine::ConstraintSource> with_thinking_budget(
    const ThinkingBudget& budget, std::shared_ptr<const engine::ConstraintSource> inner,
    std::shared_ptr<const std::vector<uint32_t>> allowed, const text::Tokenizer& tokenizer,
    const std::vector<int32_t>& eos_ids) {
  return std::make_shared<Source>(
      std::make_shared<Terms>(Terms{budget, std::move(inner), std::move(allowed), tokenizer, eos_ids}));
}

}  // namespace tessera::server
