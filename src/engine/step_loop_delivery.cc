// SPDX-License-Identifier: Apache-2.0
// What comes of a step: tokens to their sinks, states to the prefix store, ends.
#include <algorithm>
#include <new>
#include <utility>

#include "engine/logprobs.h"
#include "engine/step_loop_parts.h"

namespace tessera::engine {

ErrorCode code_of(const std::exception& error) {
  if (const auto* ours = dynamic_cast<const Error*>(&error)) return ours->code();
  return dynamic_cast<const std::bad_alloc*>(&error) != nullptr ? ErrorCode::kResourceExhausted : ErrorCode::kInternal;
}

Sampler sampler_of(const Request& request, uint64_t choice, int32_t vocab_size) {
  SamplingOptions options = request.sampling;
  options.params.seed += choice;
  return Sampler(options, vocab_size);
}

void StepLoop::deliver(const TensorView& logits) {
  num_device_failures_ = 0;
  const size_t vocab = static_cast<size_t>(runner_.facts().vocab_size);
  const float* next_row = logits.as<float>();
  for (const Running& slice : running_) {
    const std::span<const float> rows(next_row, static_cast<size_t>(slice.num_rows()) * vocab);
    next_row += rows.size();
    Live* live = nullptr;
    Choice* choice = find(slice.key, live);
    if (choice == nullptr) continue;  // another choice of its request failed just now
    scheduler_.ran(slice.key, slice.count);
    uint64_t num_drawing = 1;
    try {
      if (slice.rows == model::LogitRows::kAll) deliver_prompt_logprobs(*live, slice, rows);
      offer(*live, *choice, slice);
      if (!slice.is_last) continue;
      if (static_cast<int64_t>(choice->ids.size()) == live->num_prompt()) {
        if (live->draws()) fork(*live);
        num_drawing = live->choices.size();
      }
    } catch (const std::exception& error) {
      end(*live, FinishReason::kFailed, code_of(error), error.what());
      continue;
    }
    if (!live->draws()) {
      end(*live, FinishReason::kLength, ErrorCode::kInternal, "");
      continue;
    }
    for (SequenceKey key = slice.key; key < slice.key + num_drawing; ++key) {
      if (Choice* drawing = find(key, live); drawing != nullptr) {
        draw(*live, *drawing, slice, rows.last(std::min(vocab, rows.size())));
      }
    }
  }
}

void StepLoop::deliver_prompt_logprobs(Live& live, const Running& slice, std::span<const float> rows) {
  const size_t vocab = static_cast<size_t>(runner_.facts().vocab_size);
  std::vector<Logprobs> logprobs;
  const int64_t first = std::max(slice.first, live.num_scored);
  const int64_t end = std::min(slice.first + slice.count, live.num_prompt() - 1);
  for (int64_t position = first; position < end; ++position) {
    const std::span<const float> row = rows.subspan(static_cast<size_t>(position - slice.first) * vocab, vocab);
    logprobs.push_back(
        logprobs_of(row, live.request.prompt[static_cast<size_t>(position) + 1], *live.request.prompt_logprobs));
  }
  live.num_scored = end;
  live.sink->prompt_logprobs(first + 1, logprobs);
}

// A beginning of the prompt has run, all of it or as much as the store asked for.
void StepLoop::offer(Live& live, const Choice& choice, const Running& slice) {
  const int64_t end = slice.first + slice.count;
  if (options_.prefixes == nullptr || end > live.num_prompt()) return;
  if (end < live.num_prompt() && end != options_.prefixes->next_offer(live.request, slice.first)) return;
  options_.prefixes->offer(live.request, std::span(choice.ids).first(static_cast<size_t>(end)), *choice.state);
}

// The prompt has run: from here on the choices differ.
void StepLoop::fork(Live& live) {
  const Choice& first = *live.choices[0];
  for (int i = 1; i < live.request.num_choices; ++i) {
    const SequenceKey key = first.key + static_cast<uint64_t>(i);
    auto choice = std::make_unique<Choice>(
        Choice{key, i, first.ids, sampler_of(live.request, static_cast<uint64_t>(i), runner_.facts().vocab_size),
               make_with_room([&] { return first.state->fork(); })});
    for (const int32_t id : choice->ids) choice->sampler.observe(id);
    if (live.request.constraint != nullptr) choice->constraint = live.request.constraint->begin();
    scheduler_.fork(first.key, key);
    live.choices.push_back(std::move(choice));
  }
}

void StepLoop::draw(Live& live, Choice& choice, const Running& slice, std::span<const float> row) {
  bool goes_on = false;
  Token token{.choice = choice.index};
  try {
    if (slice.draw != nullptr) {
      token.id = Sampler::drawn(*slice.draw);
    } else {
      const std::span<const uint32_t> shared = live.shared_mask(choice);
      const bool asks = choice.constraint != nullptr && shared.empty();
      if (asks) ask_constraint(*choice.constraint, runner_.facts().vocab_size, choice.mask);
      token.id = choice.sampler.draw(runner_, row, static_cast<int64_t>(choice.ids.size()),
                                     asks ? std::span<const uint32_t>(choice.mask) : shared);
    }
    if (choice.constraint != nullptr) choice.constraint->drawn(token.id);
    if (live.request.logprobs) token.logprobs = logprobs_of(row, token.id, *live.request.logprobs);
    choice.ids.push_back(token.id);
    choice.sampler.observe(token.id);
    scheduler_.drew(choice.key);
    ++stats_.num_drawn;
    if (live.outcome.num_generated_tokens++ == 0) live.outcome.first_token_seconds = clock_.now() - live.submitted;
    goes_on = live.sink->token(token);
  } catch (const std::exception& error) {
    return end(live, FinishReason::kFailed, code_of(error), error.what());
  }
  const auto is_in = [&](const std::vector<int32_t>& ids) {
    return std::find(ids.begin(), ids.end(), token.id) != ids.end();
  };
  const bool is_complete = choice.constraint != nullptr && choice.constraint->has_ended();
  if (is_complete || (live.request.stop_at_end_token && is_in(runner_.facts().eos_ids))) {
    end_choice(live, choice, FinishReason::kEndOfText);
  } else if (!goes_on || is_in(live.request.stop_ids)) {
    end_choice(live, choice, FinishReason::kStop);
  } else if (static_cast<int64_t>(choice.ids.size()) == live.capacity) {
    end_choice(live, choice, FinishReason::kLength);
  }
}

// Gives back all that a choice holds; its state, which the store may want, when no step that is queued runs it.
void StepLoop::release(const Live& live, Choice& choice, bool is_offered) {
  scheduler_.remove(choice.key);
  drop_saved(choice);
  if (const Running* queued = find_ahead(choice.key)) {
    const int64_t num_tokens = queued->first + queued->count;
    leaving_.push_back({live.asked, std::move(choice.ids), std::move(choice.state), num_tokens, is_offered});
  }
  choice.state.reset();
  choice.is_open = false;
}

void StepLoop::end_choice(Live& live, Choice& choice, FinishReason reason) {
  try {
    if (options_.prefixes != nullptr && find_ahead(choice.key) == nullptr) {
      const size_t num_seen = static_cast<size_t>(choice.state->position());
      options_.prefixes->offer(live.request, std::span(choice.ids).first(num_seen), *choice.state);
    }
    release(live, choice, true);
    --live.num_open;
    live.outcome.reasons[static_cast<size_t>(choice.index)] = reason;
    live.sink->choice_finished(choice.index, reason);
  } catch (const std::exception& error) {
    return end(live, FinishReason::kFailed, code_of(error), error.what());
  }
  if (live.num_open == 0) finish(live);
}

void StepLoop::end(Live& live, FinishReason reason, ErrorCode code, const std::string& error) {
  for (const auto& choice : live.choices) {
    if (choice->is_open) release(live, *choice, false);
  }
  if (code == ErrorCode::kDeviceError) ++num_device_failures_;
  live.outcome.error_code = code;
  try {
    live.outcome.error = error;
  } catch (const std::exception&) {
    live.outcome.error = kOutOfMemory;
  }
  for (int i = 0; i < live.request.num_choices; ++i) {
    FinishReason& ended = live.outcome.reasons[static_cast<size_t>(i)];
    if (ended != FinishReason::kNone) continue;
    ended = reason;
    try {
      live.sink->choice_finished(i, reason);
    } catch (const std::exception&) {
      // It is ending already.
    }
  }
  finish(live);
}

void StepLoop::finish(Live& live) {
  if (!live.has_begun) room_.leave(live.num_prompt());
  const std::vector<FinishReason>& reasons = live.outcome.reasons;
  const auto has = [&](FinishReason reason) {
    return std::find(reasons.begin(), reasons.end(), reason) != reasons.end();
  };
  ++(has(FinishReason::kFailed)      ? totals_.num_failed
     : has(FinishReason::kCancelled) ? totals_.num_cancelled
                                     : totals_.num_completed);
  live.outcome.seconds = clock_.now() - live.submitted;
  try {
    live.sink->finished(live.outcome);
  } catch (const std::exception&) {
    // The last call: nothing is left to end.
  }
  requests_.erase(live.id);
}

}  // namespace tessera::engine
