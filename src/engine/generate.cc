// SPDX-License-Identifier: Apache-2.0
#include "engine/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <utility>

#include "base/error.h"

namespace tessera::engine {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Loop {
 public:
  Loop(model::Runner& runner, Sequence& sequence, const GenerateOptions& options, GenerateObserver& observer)
      : runner_(runner),
        options_(options),
        observer_(observer),
        max_tokens_(std::min(options.max_tokens, sequence.state().capacity() - sequence.next_position())),
        sampler_(options.sampling, runner.facts().vocab_size),
        sequence_(sequence),
        constraint_(options.constraint == nullptr ? nullptr : options.constraint->begin()) {
    for (const int32_t id : sequence.prompt()) sampler_.observe(id);
  }
  ~Loop() { drop_ahead(); }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  void prefill(ProgressSink* progress) {
    const size_t total = sequence_.pending().size();
    if (progress != nullptr) progress->begin("prefill", total, "tokens");
    while (!sequence_.pending().empty() && !is_cancelled()) {
      const size_t left = sequence_.pending().size();
      const bool marks_here = options_.mark_before_last != nullptr && left == 1;
      if (marks_here) *options_.mark_before_last = sequence_.state().mark();
      const size_t end = options_.mark_before_last != nullptr && left > 1 ? left - 1 : left;
      const size_t count = std::min(end, static_cast<size_t>(runner_.max_step_tokens()));
      run(count);
      if (progress != nullptr) progress->advance(count);
    }
    if (progress != nullptr) progress->end();
    if (!sequence_.pending().empty()) sequence_.finish(FinishReason::kCancelled);
  }

  void decode(ProgressSink* progress) {
    if (progress != nullptr)
      progress->begin("decode", static_cast<uint64_t>(std::max<int64_t>(0, max_tokens_)), "tokens");
    while (sequence_.finish_reason() == FinishReason::kNone) {
      if (static_cast<int64_t>(sequence_.generated().size()) >= max_tokens_) {
        sequence_.finish(FinishReason::kLength);
      } else if (is_cancelled()) {
        sequence_.finish(FinishReason::kCancelled);
      } else {
        if (is_ahead_) {
          run_ahead();
        } else if (!sequence_.pending().empty()) {
          run(1, true);
        }
        const std::optional<model::Draw>& draw = draws_[turn_];
        accept(draw ? Sampler::drawn(*draw) : sampler_.draw(runner_, last_row_, sequence_.next_position(), mask_));
        if (progress != nullptr) progress->advance(1);
      }
    }
    drop_ahead();
    if (progress != nullptr) progress->end();
  }

 private:
  bool is_cancelled() const { return options_.cancel != nullptr && options_.cancel->load(); }

  // The next `count` pending tokens. After the last of them there is a token to draw: the step draws it, where it can.
  void run(size_t count, bool may_go_ahead = false) {
    const int64_t first = sequence_.state().position();
    const bool is_drawn = count == sequence_.pending().size() && max_tokens_ > 0;
    std::optional<model::Draw>& draw = draws_[turn_];
    draw = is_drawn ? sampler_.draw_in_step(sequence_.next_position()) : std::nullopt;
    if (is_drawn && constraint_ != nullptr) ask_constraint(*constraint_, runner_.facts().vocab_size, mask_);
    if (draw) draw->mask = mask_;
    const model::SequenceSlice slice{.state = &sequence_.state(),
                                     .ids = sequence_.pending().first(count),
                                     .logits = observer_.wants_logits() ? model::LogitRows::kAll
                                               : is_drawn && !draw      ? model::LogitRows::kLast
                                                                        : model::LogitRows::kNone,
                                     .draw = draw ? &*draw : nullptr};
    may_go_ahead = may_go_ahead && draw && constraint_ == nullptr && !observer_.wants_logits();
    if (may_go_ahead && runner_.can_run_ahead()) {
      runner_.queue_step({&slice, 1});
      queue_ahead();
      return finish_step();
    }
    const TensorView logits = runner_.step({&slice, 1});
    const std::span<const float> rows(logits.as<float>(), static_cast<size_t>(logits.shape.num_elements()));
    if (observer_.wants_logits()) observer_.logits(first, rows);
    if (is_drawn && !draw) last_row_ = rows.last(static_cast<size_t>(runner_.facts().vocab_size));
  }

  // Behind the step that is queued the next, while nobody knows its token: where it turns out to be the last, it was
  // run for nothing.
  void queue_ahead() {
    std::optional<model::Draw>& next = draws_[1 - turn_];
    const bool is_last = static_cast<int64_t>(sequence_.generated().size()) + 2 > max_tokens_;
    next = is_last ? std::nullopt : sampler_.draw_in_step(sequence_.next_position() + 1);
    if (!next) return;
    model::Draw* const place = &*next;
    is_ahead_ = runner_.queue_next({&place, 1});
  }

  void run_ahead() {
    is_ahead_ = false;
    turn_ = 1 - turn_;
    queue_ahead();
    finish_step();
  }

  void finish_step() {
    try {
      runner_.finish_step();
    } catch (...) {
      is_ahead_ = false;
      throw;
    }
  }

  void drop_ahead() noexcept {
    if (!std::exchange(is_ahead_, false)) return;
    try {
      runner_.finish_step();
    } catch (const std::exception&) {
      // Of a token that nobody asked for.
    }
  }

  void accept(int32_t id) {
    sequence_.append(id);
    sampler_.observe(id);
    if (constraint_ != nullptr) constraint_->drawn(id);
    const std::vector<int32_t>& ends = runner_.facts().eos_ids;
    const bool is_end = (options_.stop_at_end_token && std::find(ends.begin(), ends.end(), id) != ends.end()) ||
                        (constraint_ != nullptr && constraint_->has_ended());
    if (is_end) sequence_.finish(FinishReason::kEndOfText);
    if (!observer_.token(id) && !is_end) sequence_.finish(FinishReason::kStop);
  }

  model::Runner& runner_;
  const GenerateOptions& options_;
  GenerateObserver& observer_;
  int64_t max_tokens_;
  Sampler sampler_;
  Sequence& sequence_;
  std::unique_ptr<TokenConstraint> constraint_;      // null: none
  std::vector<uint32_t> mask_;                       // of the token to draw; empty: all
  std::array<std::optional<model::Draw>, 2> draws_;  // of the last step, and of the one that is queued behind it
  size_t turn_ = 0;                                  // of the last step
  bool is_ahead_ = false;                            // another is queued
  std::span<const float> last_row_;                  // without one
};

void check(const model::ModelFacts& facts, std::span<const int32_t> prompt, const GenerateOptions& options) {
  if (prompt.empty()) fail(ErrorCode::kInvalidArgument, "prompt: expected at least one token, found none");
  if (static_cast<int64_t>(prompt.size()) > facts.max_positions) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("prompt: expected at most {} tokens, this model's longest sequence, found {}", facts.max_positions,
                     prompt.size()));
  }
  for (const int32_t id : prompt) {
    if (id < 0 || id >= facts.vocab_size) {
      fail(ErrorCode::kInvalidArgument,
           fmt::format("prompt: expected token ids from 0 to {}, found {}", facts.vocab_size - 1, id));
    }
  }
  if (options.max_tokens < 0) {
    fail(ErrorCode::kInvalidArgument, fmt::format("max-tokens: expected 0 or more, found {}", options.max_tokens));
  }
  if (const auto fault = find_fault(options.sampling, facts.vocab_size)) fail(ErrorCode::kInvalidArgument, *fault);
}

}  // namespace

GenerateResult generate(model::Runner& runner, Sequence& sequence, const GenerateOptions& options,
                        GenerateObserver& observer, ProgressSink* progress) {
  check(runner.facts(), sequence.prompt(), options);
  if (sequence.pending().empty() || sequence.next_position() > sequence.state().capacity()) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("sequence: expected a state that has seen fewer than the prompt's {} tokens and holds them, found "
                     "{} seen and room for {}",
                     sequence.prompt().size(), sequence.state().position(), sequence.state().capacity()));
  }
  Loop loop(runner, sequence, options, observer);
  GenerateResult result;
  const auto start = Clock::now();
  loop.prefill(progress);
  result.times.prefill_seconds = seconds_since(start);
  const auto decode_start = Clock::now();
  loop.decode(options.shows_decode ? progress : nullptr);
  result.times.decode_seconds = seconds_since(decode_start);
  result.ids.assign(sequence.generated().begin(), sequence.generated().end());
  result.finish_reason = sequence.finish_reason();
  result.num_prompt_tokens = std::min(static_cast<int64_t>(sequence.prompt().size()), sequence.state().position());
  return result;
}

GenerateResult generate(model::Runner& runner, std::span<const int32_t> prompt, const GenerateOptions& options,
                        GenerateObserver& observer, ProgressSink* progress) {
  check(runner.facts(), prompt, options);
  const int64_t length = static_cast<int64_t>(prompt.size());
  const int64_t num_new = std::min(options.max_tokens, runner.facts().max_positions - length);
  Sequence sequence({prompt.begin(), prompt.end()}, runner.new_sequence(length + num_new));
  return generate(runner, sequence, options, observer, progress);
}

}  // namespace tessera::engine
