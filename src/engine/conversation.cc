// SPDX-License-Identifier: Apache-2.0
#include "engine/conversation.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace tessera::engine {

namespace {

// A mark costs about one window per layer; two turns back is what taking back a question needs.
constexpr size_t kMaxMarks = 3;

}  // namespace

void Conversation::clear() {
  seen_.clear();
  marks_.clear();
  state_.reset();
}

std::unique_ptr<model::SequenceState> Conversation::take_state(std::span<const int32_t> prompt) {
  if (state_ == nullptr) return runner_->new_sequence(capacity_);
  const auto [mine, theirs] = std::mismatch(seen_.begin(), seen_.end(), prompt.begin(), prompt.end());
  const int64_t shared = mine - seen_.begin();
  if (shared == num_tokens() && theirs != prompt.end()) return std::move(state_);
  // The last token of a prompt is always run: its logits are wanted.
  const int64_t reusable = std::min(shared, static_cast<int64_t>(prompt.size()) - 1);
  while (!marks_.empty() && marks_.back()->position() > reusable) marks_.pop_back();
  if (marks_.empty()) {
    state_.reset();  // before the new one is made: both may not fit
    return runner_->new_sequence(capacity_);
  }
  state_->rollback(*marks_.back());
  return std::move(state_);
}

GenerateResult Conversation::answer(std::span<const int32_t> prompt, const GenerateOptions& options,
                                    GenerateObserver& observer, ProgressSink* progress) {
  if (static_cast<int64_t>(prompt.size()) > capacity_) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("conversation: expected at most {} tokens, found {}", capacity_, prompt.size()));
  }
  std::unique_ptr<model::SequenceState> state = take_state(prompt);
  num_reused_ = state->position();
  Sequence sequence({prompt.begin(), prompt.end()}, std::move(state));
  std::vector<std::unique_ptr<model::StateMark>> marks = std::move(marks_);
  clear();
  GenerateOptions marking = options;
  std::unique_ptr<model::StateMark> mark;
  marking.mark_before_last = &mark;
  GenerateResult result = generate(*runner_, sequence, marking, observer, progress);
  state_ = sequence.take_state();
  const std::span<const int32_t> ids = sequence.ids().first(static_cast<size_t>(state_->position()));
  seen_.assign(ids.begin(), ids.end());
  marks_ = std::move(marks);
  if (mark != nullptr && (marks_.empty() || marks_.back()->position() < mark->position()))
    marks_.push_back(std::move(mark));
  if (marks_.size() > kMaxMarks) marks_.erase(marks_.begin());
  return result;
}

}  // namespace tessera::engine
