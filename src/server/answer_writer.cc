// SPDX-License-Identifier: Apache-2.0
#include "server/answer_writer.h"

#include <utility>

#include "server/anthropic/messages_response.h"
#include "server/openai/completion_response.h"
#include "server/openai/responses_response.h"
#include "server/sse.h"

namespace tessera::server {

namespace {

// Chat completions and completions: chunks, then [DONE]. kRender writes the whole answer.
template <class Stream, auto kRender>
class ChunkWriter final : public AnswerWriter {
 public:
  ChunkWriter(openai::AnswerHead head, bool has_logprobs, bool has_usage)
      : head_(head),
        stream_(std::move(head), has_logprobs, has_usage),
        has_logprobs_(has_logprobs),
        has_usage_(has_usage) {}

  std::string whole(std::span<const FinishedAnswer> choices, const Usage& usage) override {
    return kRender(head_, choices, usage, has_logprobs_);
  }
  std::string begin([[maybe_unused]] int num_choices, const Usage&) override {
    std::string out;
    if constexpr (requires { stream_.begin(0); }) {
      for (int choice = 0; choice < num_choices; ++choice) out += stream_.begin(choice);
    }
    return out;
  }
  std::string delta(int choice_idx, const AnswerDelta& delta) override { return stream_.delta(choice_idx, delta); }
  std::string end(int choice_idx, const AnswerDelta& last, const FinishedAnswer& answer) override {
    return stream_.end(choice_idx, last, answer.reason);
  }
  std::string done(const Usage& usage) override {
    return (has_usage_ ? stream_.usage(usage) : "") + std::string(kSseDone);
  }
  std::string error(const ApiError& error) override { return stream_.error(error); }
  std::string keep_alive() const override { return std::string(kSseKeepAlive); }

 private:
  openai::AnswerHead head_;
  Stream stream_;
  bool has_logprobs_, has_usage_;
};

using ChatWriter = ChunkWriter<openai::ChatStream, openai::render_chat>;
using CompletionWriter = ChunkWriter<openai::CompletionStream, openai::render_completion>;

// Their last event holds the whole answer with its usage: the one choice's end waits for it.
class ResponsesWriter final : public AnswerWriter {
 public:
  ResponsesWriter(openai::AnswerHead head, std::string repeated, bool has_logprobs)
      : head_(head),
        repeated_(repeated),
        stream_(std::move(head), std::move(repeated), has_logprobs),
        has_logprobs_(has_logprobs) {}

  std::string whole(std::span<const FinishedAnswer> choices, const Usage& usage) override {
    return openai::render_response(head_, repeated_, choices.front(), usage, has_logprobs_);
  }
  std::string begin(int, const Usage&) override { return stream_.begin(); }
  std::string delta(int, const AnswerDelta& delta) override { return stream_.delta(delta); }
  std::string end(int, const AnswerDelta& last, const FinishedAnswer& answer) override {
    last_ = last;
    answer_ = answer;
    return "";
  }
  std::string done(const Usage& usage) override { return stream_.end(last_, answer_, usage); }
  std::string error(const ApiError& error) override { return stream_.error(error); }
  std::string keep_alive() const override { return std::string(kSseKeepAlive); }

 private:
  openai::AnswerHead head_;
  std::string repeated_;
  openai::ResponsesStream stream_;
  bool has_logprobs_;
  AnswerDelta last_;
  FinishedAnswer answer_;
};

class MessageWriter final : public AnswerWriter {
 public:
  MessageWriter(std::string id, std::string model) : id_(id), model_(model), stream_(std::move(id), std::move(model)) {}

  std::string whole(std::span<const FinishedAnswer> choices, const Usage& usage) override {
    return anthropic::render_message(id_, model_, choices.front(), usage);
  }
  std::string begin(int, const Usage& usage) override { return stream_.begin(usage); }
  bool begins_with_usage() const override { return true; }
  std::string delta(int, const AnswerDelta& delta) override { return stream_.delta(delta); }
  std::string end(int, const AnswerDelta& last, const FinishedAnswer& answer) override {
    last_ = last;
    answer_ = answer;
    return "";
  }
  std::string done(const Usage& usage) override { return stream_.end(last_, answer_, usage); }
  std::string error(const ApiError& error) override { return anthropic::MessageStream::error(error); }
  std::string keep_alive() const override { return anthropic::MessageStream::ping(); }

 private:
  std::string id_, model_;
  anthropic::MessageStream stream_;
  AnswerDelta last_;
  FinishedAnswer answer_;
};

}  // namespace

std::string error_body(ErrorStyle style, const ApiError& error) {
  return style == ErrorStyle::kAnthropic ? anthropic_error_body(error) : openai_error_body(error);
}

std::unique_ptr<AnswerWriter> chat_writer(openai::AnswerHead head, bool has_logprobs, bool has_usage) {
  return std::make_unique<ChatWriter>(std::move(head), has_logprobs, has_usage);
}
std::unique_ptr<AnswerWriter> completion_writer(openai::AnswerHead head, bool has_logprobs, bool has_usage) {
  return std::make_unique<CompletionWriter>(std::move(head), has_logprobs, has_usage);
}
std::unique_ptr<AnswerWriter> responses_writer(openai::AnswerHead head, std::string repeated, bool has_logprobs) {
  return std::make_unique<ResponsesWriter>(std::move(head), std::move(repeated), has_logprobs);
}
std::unique_ptr<AnswerWriter> message_writer(std::string id, std::string model) {
  return std::make_unique<MessageWriter>(std::move(id), std::move(model));
}

}  // namespace tessera::server
