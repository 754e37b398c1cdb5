// SPDX-License-Identifier: Apache-2.0
#pragma once
// One request on its way through the server: what workers and the engine bring, the transport takes as parts of an HTTP
// answer. Text is put together on the transport's thread; the engine's thread only hands over token ids, at most
// kQueueTokens of each prompt, and pauses a request whose client reads too slowly.
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/token_queue.h"
#include "server/figures.h"
#include "server/prepare.h"

namespace tessera::server {

// Told, by any thread, that an exchange has something new. Must return at once.
class Waker {
 public:
  virtual ~Waker() = default;
  virtual void wake() noexcept = 0;
};

struct ReplyHead {
  int status = 200;
  std::string content_type = "application/json";
  bool is_stream = false;
  int64_t retry_after_seconds = 0;  // 0: says nothing
};

struct ReplyPart {
  std::optional<ReplyHead> head;  // with the first part that has anything
  std::string text;               // more of the body
  bool is_last = false;           // the body is complete
};

// 503, of a request that may go well later: memory that others have now, say. Whole answers carry Retry-After.
ApiError exhausted(std::string_view what);
inline constexpr int64_t kExhaustedRetrySeconds = 1;

// What all exchanges share; outlives them.
struct ExchangeContext {
  const Serving& serving;
  engine::Engine& engine;
  ReplayStore& replay;
  IdSource& ids;
  Figures& figures;
};

class Exchange final : public std::enable_shared_from_this<Exchange> {
 public:
  static constexpr int64_t kQueueTokens = 128;  // at least the choices of a prompt

  Exchange(const ExchangeContext& context, ErrorStyle errors, std::weak_ptr<Waker> waker)
      : context_(context), errors_(errors), waker_(std::move(waker)) {}

  // By whoever prepares the answer, once: a whole body, an error, or requests for the engine, which are submitted.
  void reply(ReplyHead head, std::string body);
  void refuse(const ApiError& error, int64_t retry_after_seconds = 0);
  void start(PreparedAnswer prepared);
  // By any thread: something of the answer was lost for want of memory. take() throws std::bad_alloc from now on.
  void lose() noexcept;

  // By the transport's thread. What is new; nothing where nothing is: Waker::wake says when to ask again.
  ReplyPart take();
  // What may be sent while nothing is new; only of a stream.
  std::string keep_alive() const { return answer_.writer->keep_alive(); }
  // By the transport's thread: the client is gone, nothing is taken any more. The requests leave the engine before its
  // next step, or at their next token where there is no memory to say so.
  void cancel() noexcept;
  bool is_cancelled();
  // By the transport's thread: ends the answer with this error.
  void abort(const ApiError& error);

 private:
  class PromptSink;
  struct Event {
    size_t sink_idx = 0;
    double at = 0;  // seconds, by a steady clock
    engine::TokenQueue::Event what;
  };
  // One sequence of the engine's: which choices its tokens belong to.
  struct SinkState {
    size_t first_choice = 0;
    int num_choices = 1;
    size_t prompt_idx = 0;
    int64_t num_queued = 0;          // tokens; under lock_
    std::vector<char> is_stopped{};  // by its choices: no more tokens; under lock_
  };
  struct Choice {
    Choice(const AnswerOptions& options, IdSource& id_source) : assembler(options, id_source) {}
    AnswerAssembler assembler;
    size_t sink_idx = 0;  // whose tokens they are
    bool has_ended = false;
    double last_at = 0;  // of its last token; 0: none came
  };

  // Called by sinks, on the engine's thread.
  bool push(size_t sink_idx, engine::TokenQueue::Event event);
  int64_t room(size_t sink_idx);

  std::optional<engine::Refusal> submit(engine::Request request, SinkState state);
  void refuse(const engine::Refusal& refusal);
  void notify(bool& is_notified);
  void cancel_requests() noexcept;
  void cancel_in_engine(std::span<const engine::RequestId> ids) noexcept;
  void take_event(const Event& event, std::string& out);
  void take_token(const Event& event, const engine::Token& token, std::string& out);
  void take_prompt(size_t prompt_idx, int64_t first_position, std::span<const engine::Logprobs> logprobs,
                   std::string& out);
  void take_outcome(const engine::Outcome& outcome);
  void echo_beginnings(std::string& out);
  void end_choice(size_t choice_idx, Ending ending, std::string& out);
  void stop_choice(size_t choice_idx);
  void finish(ReplyPart& part);
  void give_up(const ApiError& error, ReplyPart& part);
  TokenLogprob logprob_of(int32_t id, const engine::Logprobs& logprobs) const;
  bool is_shown(int32_t id) const;
  const std::string& bytes_of(int32_t id) const;

  const ExchangeContext context_;
  const ErrorStyle errors_;
  const std::weak_ptr<Waker> waker_;

  std::mutex lock_;
  std::optional<ReplyPart> whole_;  // under lock_, like all down to the next empty line
  std::vector<Event> events_;
  std::vector<SinkState> sinks_;
  std::vector<engine::RequestId> request_ids_;
  bool is_started_ = false, is_notified_ = false, is_cancelled_ = false, was_short_ = false;
  bool is_lost_ = false;

  // The transport's, once started.
  PreparedAnswer answer_;
  std::deque<Choice> choices_;
  Usage usage_;
  std::optional<ApiError> error_;
  size_t num_open_sinks_ = 0, num_ended_ = 0;
  bool has_head_ = false, has_begun_ = false, is_done_ = false;
  std::vector<double> gaps_;
};

}  // namespace tessera::server
