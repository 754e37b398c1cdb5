// SPDX-License-Identifier: Apache-2.0
#include "server/exchange.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <new>
#include <utility>

namespace tessera::server {

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

ApiError error_of(const engine::Outcome& outcome) {
  if (outcome.error_code == ErrorCode::kCancelled)
    return unavailable(outcome.error.empty() ? "cancelled" : outcome.error);
  if (outcome.error_code == ErrorCode::kInvalidArgument) {  // a grammar that nothing fits
    ApiError error;
    error.code = kInvalidValue;
    error.message = outcome.error;
    return error;
  }
  if (outcome.error_code == ErrorCode::kResourceExhausted) return exhausted(outcome.error);
  return internal_error(outcome.error);
}

}  // namespace

ApiError exhausted(std::string_view what) {
  ApiError error = internal_error(what);
  error.status = 503, error.code = "resource_exhausted";
  return error;
}

class Exchange::PromptSink final : public engine::Sink {
 public:
  PromptSink(std::shared_ptr<Exchange> exchange, size_t sink_idx)
      : exchange_(std::move(exchange)), sink_idx_(sink_idx) {}
  int64_t room() const override { return exchange_->room(sink_idx_); }
  void begun(int64_t num_cached_tokens) override {
    exchange_->push(sink_idx_, engine::TokenQueue::Begun{num_cached_tokens});
  }
  void prompt_logprobs(int64_t first_position, std::span<const engine::Logprobs> logprobs) override {
    exchange_->push(sink_idx_, engine::TokenQueue::PromptLogprobs{first_position, {logprobs.begin(), logprobs.end()}});
  }
  bool token(const engine::Token& token) override { return exchange_->push(sink_idx_, token); }
  void choice_finished(int choice, engine::FinishReason reason) override {
    exchange_->push(sink_idx_, engine::TokenQueue::ChoiceEnd{choice, reason});
  }
  void finished(const engine::Outcome& outcome) override {
    exchange_->context_.figures.add_outcome(outcome);  // whoever is left to hear of it
    try {
      exchange_->push(sink_idx_, outcome);
    } catch (const std::exception&) {
      exchange_->lose();
    }
  }

 private:
  const std::shared_ptr<Exchange> exchange_;
  const size_t sink_idx_;
};

// Under lock_: whether the waker must be called once it is released.
void Exchange::notify(bool& is_needed) {
  is_needed = !is_notified_;
  is_notified_ = true;
}

void Exchange::reply(ReplyHead head, std::string body) {
  bool wakes = false;
  {
    const std::lock_guard<std::mutex> hold(lock_);
    whole_ = ReplyPart{std::move(head), std::move(body), true};
    notify(wakes);
  }
  if (const std::shared_ptr<Waker> waker = wakes ? waker_.lock() : nullptr) waker->wake();
}

void Exchange::refuse(const ApiError& error, int64_t retry_after_seconds) {
  reply({error.status, "application/json", false, retry_after_seconds}, error_body(errors_, error));
}

void Exchange::refuse(const engine::Refusal& refusal) {
  using Reason = engine::Refusal::Reason;
  ApiError error;
  error.message = refusal.message;
  error.code = kInvalidValue;
  if (refusal.reason == Reason::kFull) {
    error.status = 429;
    error.type = "rate_limit_error";
    error.code = "overloaded";
  } else if (refusal.reason == Reason::kDraining) {
    error = unavailable("draining");
  }
  const bool is_full = refusal.reason == Reason::kFull;
  refuse(error, is_full ? std::max<int64_t>(1, refusal.retry_after_seconds) : 0);
}

std::optional<engine::Refusal> Exchange::submit(engine::Request request, SinkState state) {
  size_t sink_idx = 0;
  {
    const std::lock_guard<std::mutex> hold(lock_);
    sink_idx = sinks_.size();
    sinks_.push_back(std::move(state));
    sinks_.back().is_stopped.assign(static_cast<size_t>(sinks_.back().num_choices), 0);
    request_ids_.reserve(sinks_.size());  // nothing fails between the engine's yes and its place here
  }
  auto answer = context_.engine.submit(std::move(request), std::make_shared<PromptSink>(shared_from_this(), sink_idx));
  if (auto* refusal = std::get_if<engine::Refusal>(&answer)) return std::move(*refusal);
  bool is_cancelled = false;
  const engine::RequestId id = std::get<engine::RequestId>(answer);
  {
    const std::lock_guard<std::mutex> hold(lock_);
    is_cancelled = is_cancelled_;
    if (!is_cancelled) request_ids_.push_back(id);
  }
  if (is_cancelled) cancel_in_engine({&id, 1});
  return std::nullopt;
}

void Exchange::start(PreparedAnswer prepared) try {
  answer_ = std::move(prepared);
  std::vector<engine::Request> requests = answer_.requests;
  for (const engine::Request& request : requests) {
    usage_.num_prompt_tokens += static_cast<int64_t>(request.prompt.size());
    for (int i = 0; i < request.num_choices; ++i) {
      choices_.emplace_back(answer_.options, context_.ids);
      choices_.back().sink_idx = static_cast<size_t>(&request - requests.data());
    }
  }
  num_open_sinks_ = requests.size();
  size_t first_choice = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    const int num_choices = requests[i].num_choices;
    if (const auto refusal = submit(std::move(requests[i]), {first_choice, num_choices, i, 0, {}})) {
      cancel_requests();
      return refuse(*refusal);
    }
    first_choice += static_cast<size_t>(num_choices);
  }
  bool wakes = false;
  {
    const std::lock_guard<std::mutex> hold(lock_);
    is_started_ = true;
    notify(wakes);
  }
  if (const std::shared_ptr<Waker> waker = wakes ? waker_.lock() : nullptr) waker->wake();
} catch (...) {
  cancel_requests();  // those that were submitted before memory ran out, say
  throw;
}

int64_t Exchange::room(size_t sink_idx) {
  const std::lock_guard<std::mutex> hold(lock_);
  const SinkState& sink = sinks_[sink_idx];
  const int64_t room = is_cancelled_ ? std::numeric_limits<int64_t>::max() : kQueueTokens - sink.num_queued;
  if (room < sink.num_choices) was_short_ = true;
  return room;
}

bool Exchange::push(size_t sink_idx, engine::TokenQueue::Event event) {
  bool wakes = false;
  {
    const std::lock_guard<std::mutex> hold(lock_);
    if (const auto* token = std::get_if<engine::Token>(&event)) {
      SinkState& sink = sinks_[sink_idx];
      if (sink.is_stopped[static_cast<size_t>(token->choice)] != 0) return false;
      ++sink.num_queued;
    }
    if (is_cancelled_) return true;
    events_.push_back({sink_idx, now(), std::move(event)});
    if (!is_started_) return true;
    notify(wakes);
  }
  if (const std::shared_ptr<Waker> waker = wakes ? waker_.lock() : nullptr) waker->wake();
  return true;
}

void Exchange::lose() noexcept {
  bool wakes = false;
  {
    const std::lock_guard<std::mutex> hold(lock_);
    is_lost_ = true;
    notify(wakes);
  }
  if (const std::shared_ptr<Waker> waker = wakes ? waker_.lock() : nullptr) waker->wake();
}

void Exchange::cancel_requests() noexcept {
  std::vector<engine::RequestId> ids;
  {
    const std::lock_guard<std::mutex> hold(lock_);
    is_cancelled_ = true;
    events_.clear();
    ids.swap(request_ids_);
  }
  cancel_in_engine(ids);
}

// Where there is no memory to say so they end at their next token, for which the engine must see that they have room.
void Exchange::cancel_in_engine(std::span<const engine::RequestId> ids) noexcept {
  try {
    for (const engine::RequestId id : ids) context_.engine.cancel(id);
    return;
  } catch (const std::exception&) {
    const std::lock_guard<std::mutex> hold(lock_);
    for (SinkState& sink : sinks_) std::fill(sink.is_stopped.begin(), sink.is_stopped.end(), char{1});
  }
  context_.engine.wake();
}

void Exchange::cancel() noexcept {
  if (is_done_) return;
  is_done_ = true;
  cancel_requests();
  bool is_lost = false;
  {
    const std::lock_guard<std::mutex> hold(lock_);
    is_lost = is_lost_;
  }
  context_.figures.add_finished(is_lost ? "error" : "cancelled");
}

bool Exchange::is_cancelled() {
  const std::lock_guard<std::mutex> hold(lock_);
  return is_cancelled_;
}

void Exchange::abort(const ApiError& error) {
  error_ = error;
}

const std::string& Exchange::bytes_of(int32_t id) const {
  static const std::string kNone;
  return id >= 0 && id < context_.serving.tokenizer->vocab_size() ? context_.serving.tokenizer->token_bytes(id) : kNone;
}

TokenLogprob Exchange::logprob_of(int32_t id, const engine::Logprobs& logprobs) const {
  TokenLogprob out;
  out.token = {bytes_of(id), static_cast<double>(logprobs.token), id};
  for (const engine::TokenLogprob& other : logprobs.likeliest) {
    out.top.push_back({bytes_of(other.id), static_cast<double>(other.logprob), other.id});
  }
  return out;
}

// An echoed prompt, as far as it is known before the engine has run it.
void Exchange::echo_beginnings(std::string& out) {
  size_t choice_idx = 0;
  for (size_t p = 0; p < answer_.requests.size(); ++p) {
    const engine::Request& request = answer_.requests[p];
    const size_t count = request.prompt_logprobs ? 1 : request.prompt.size();
    for (int i = 0; i < answer_.num_choices; ++i, ++choice_idx) {
      // The begin token that was put before a text is no part of it; nothing foretells a first token.
      for (size_t at = answer_.has_added_begin[p] ? 1 : 0; at < count; ++at) {
        TokenLogprob first;
        first.token = {bytes_of(request.prompt[at]), std::numeric_limits<double>::quiet_NaN(), request.prompt[at]};
        const AnswerDelta delta = choices_[choice_idx].assembler.push_echo(
            first.token.bytes, request.prompt_logprobs && answer_.has_logprobs ? &first : nullptr);
        if (answer_.is_stream) out += answer_.writer->delta(static_cast<int>(choice_idx), delta);
      }
    }
  }
}

ReplyPart Exchange::take() {
  std::vector<Event> events;
  bool wakes_engine = false, is_given_up = false;
  {
    const std::lock_guard<std::mutex> hold(lock_);
    is_notified_ = false;
    if (is_lost_) throw std::bad_alloc();
    if (whole_) {
      is_done_ = true;
      return *std::exchange(whole_, std::nullopt);
    }
    if (is_done_) return {};
    if (!is_started_ && !error_) return {};
    is_given_up = !is_started_;
    if (is_started_) {
      events.swap(events_);
      for (SinkState& sink : sinks_) sink.num_queued = 0;
      wakes_engine = std::exchange(was_short_, false);
    }
  }
  if (is_given_up) {  // perhaps when some of its requests were submitted
    cancel_requests();
    ReplyPart part{ReplyHead{error_->status, "application/json", false, 0}, error_body(errors_, *error_), true};
    is_done_ = true;
    return part;
  }
  if (wakes_engine) context_.engine.wake();
  ReplyPart part;
  if (!has_head_ && answer_.is_stream) {
    has_head_ = true;
    part.head = {200, "text/event-stream", true, 0};
  }
  for (const Event& event : events) {
    const auto* begun = std::get_if<engine::TokenQueue::Begun>(&event.what);
    if (begun != nullptr) usage_.num_cached_tokens += begun->num_cached_tokens;
  }
  const bool is_begun = !events.empty() || error_ || num_open_sinks_ == 0;
  if (!has_begun_ && (is_begun || !answer_.writer->begins_with_usage())) {
    has_begun_ = true;
    if (answer_.is_stream) part.text = answer_.writer->begin(static_cast<int>(choices_.size()), usage_);
  }
  if (answer_.echoes && has_begun_) {
    echo_beginnings(part.text);
    answer_.echoes = false;
  }
  for (const Event& event : events) take_event(event, part.text);
  context_.figures.add_gaps(gaps_);
  gaps_.clear();
  if (error_) {
    give_up(*error_, part);
  } else if (num_open_sinks_ == 0) {
    finish(part);
  }
  return part;
}

void Exchange::take_event(const Event& event, std::string& out) {
  if (const auto* token = std::get_if<engine::Token>(&event.what)) return take_token(event, *token, out);
  if (const auto* outcome = std::get_if<engine::Outcome>(&event.what)) return take_outcome(*outcome);
  if (std::holds_alternative<engine::TokenQueue::Begun>(event.what)) return;
  if (const auto* prompt = std::get_if<engine::TokenQueue::PromptLogprobs>(&event.what)) {
    return take_prompt(sinks_[event.sink_idx].prompt_idx, prompt->first_position, prompt->logprobs, out);
  }
  const auto& end = std::get<engine::TokenQueue::ChoiceEnd>(event.what);
  const size_t choice_idx = sinks_[event.sink_idx].first_choice + static_cast<size_t>(end.choice);
  switch (end.reason) {
    case engine::FinishReason::kEndOfText:
      return end_choice(choice_idx, Ending::kEndToken, out);
    case engine::FinishReason::kStop:
      return end_choice(choice_idx, Ending::kStopped, out);
    case engine::FinishReason::kLength:
      return end_choice(choice_idx, Ending::kLength, out);
    default:
      return;  // the outcome says why
  }
}

// End tokens never are, special tokens only where the chat format may mean something by them.
bool Exchange::is_shown(int32_t id) const {
  const std::vector<int32_t>& ends = context_.serving.eos_ids;
  if (std::find(ends.begin(), ends.end(), id) != ends.end()) return false;
  const text::Tokenizer& tokenizer = *context_.serving.tokenizer;
  return answer_.options.is_chat || id >= tokenizer.vocab_size() || !tokenizer.is_special(id);
}

void Exchange::take_token(const Event& event, const engine::Token& token, std::string& out) {
  const size_t choice_idx = sinks_[event.sink_idx].first_choice + static_cast<size_t>(token.choice);
  Choice& choice = choices_[choice_idx];
  if (choice.has_ended) return;
  if (choice.last_at > 0) gaps_.push_back(event.at - choice.last_at);
  choice.last_at = event.at;
  AnswerDelta delta;
  if (is_shown(token.id)) {
    std::optional<TokenLogprob> logprob;
    if (token.logprobs) logprob = logprob_of(token.id, *token.logprobs);
    delta = choice.assembler.push(bytes_of(token.id), logprob ? &*logprob : nullptr);
  } else {
    delta = choice.assembler.push("");
  }
  if (answer_.is_stream) out += answer_.writer->delta(static_cast<int>(choice_idx), delta);
  if (choice.assembler.has_stopped()) {
    stop_choice(choice_idx);
    end_choice(choice_idx, Ending::kStopped, out);
  }
}

// What the engine still draws for the choice is not wanted.
void Exchange::stop_choice(size_t choice_idx) {
  const std::lock_guard<std::mutex> hold(lock_);
  SinkState& sink = sinks_[choices_[choice_idx].sink_idx];
  sink.is_stopped[choice_idx - sink.first_choice] = 1;
}

void Exchange::take_prompt(size_t prompt_idx, int64_t first_position, std::span<const engine::Logprobs> logprobs,
                           std::string& out) {
  const engine::Request& request = answer_.requests[prompt_idx];
  const size_t first_choice = prompt_idx * static_cast<size_t>(answer_.num_choices);
  for (size_t i = 0; i < logprobs.size(); ++i) {
    const int32_t id = request.prompt[static_cast<size_t>(first_position) + i];
    const TokenLogprob logprob = logprob_of(id, logprobs[i]);
    for (size_t c = first_choice; c < first_choice + static_cast<size_t>(answer_.num_choices); ++c) {
      const AnswerDelta delta = choices_[c].assembler.push_echo(logprob.token.bytes, &logprob);
      if (answer_.is_stream) out += answer_.writer->delta(static_cast<int>(c), delta);
    }
  }
}

void Exchange::take_outcome(const engine::Outcome& outcome) {
  --num_open_sinks_;
  const bool is_cut = std::any_of(outcome.reasons.begin(), outcome.reasons.end(), [](engine::FinishReason reason) {
    return reason == engine::FinishReason::kCancelled || reason == engine::FinishReason::kFailed;
  });
  if (is_cut || !outcome.error.empty()) error_ = error_of(outcome);
}

void Exchange::end_choice(size_t choice_idx, Ending ending, std::string& out) {
  Choice& choice = choices_[choice_idx];
  if (choice.has_ended) return;
  choice.has_ended = true;
  ++num_ended_;
  const AnswerDelta last = choice.assembler.finish(ending);
  const FinishedAnswer& answer = choice.assembler.answer();
  usage_.add(answer);
  context_.figures.add_finished(to_string(answer.reason));
  if (!answer.calls.empty()) {
    context_.replay.remember(answer_.owner, answer_.options.starts_in_reasoning, answer);
  }
  if (answer_.is_stream) out += answer_.writer->end(static_cast<int>(choice_idx), last, answer);
}

void Exchange::finish(ReplyPart& part) {
  if (num_ended_ != choices_.size()) return give_up(internal_error("a choice did not end"), part);
  is_done_ = part.is_last = true;
  if (answer_.is_stream) {
    part.text += answer_.writer->done(usage_);
    return;
  }
  std::vector<FinishedAnswer> answers;
  for (const Choice& choice : choices_) answers.push_back(choice.assembler.answer());
  part.head = ReplyHead{};
  part.text = answer_.writer->whole(answers, usage_);
}

void Exchange::give_up(const ApiError& error, ReplyPart& part) {
  is_done_ = part.is_last = true;
  cancel_requests();
  context_.figures.add_finished("error");
  if (answer_.is_stream) {
    part.text += answer_.writer->error(error);
    return;
  }
  part.head = ReplyHead{error.status, "application/json", false, error.status == 503 ? kExhaustedRetrySeconds : 0};
  part.text = error_body(errors_, error);
}

}  // namespace tessera::server
