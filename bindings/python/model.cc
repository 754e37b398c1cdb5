// SPDX-License-Identifier: Apache-2.0
// tessera._tessera.Model and Stream. Python's lock is held by nobody who waits or computes.
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <random>

#include "base/error.h"
#include "base/json.h"
#include "base/strings.h"
#include "bindings/python/errors.h"
#include "bindings/python/loaded_model.h"
#include "bindings/python/module.h"
#include "engine/token_queue.h"
#include "text/chat/answer_parser.h"
#include "text/chat/encode.h"
#include "text/chat/read_messages.h"
#include "text/detokenizer.h"
#include "text/stop_matcher.h"

namespace tessera::python {

namespace {

using ModelPtr = std::shared_ptr<LoadedModel>;
constexpr auto kSignalInterval = std::chrono::milliseconds(50);  // between looks whether Ctrl-C was pressed

// One request: its tokens as they come, as text.
class Stream {
 public:
  Stream(ModelPtr model, engine::Request request, std::vector<std::string> stops)
      : model_(std::move(model)),
        eos_ids_(model_->facts().eos_ids),
        num_prompt_tokens_(static_cast<int64_t>(request.prompt.size())),
        stops_(std::move(stops)) {
    if (const text::Tokenizer* tokenizer = model_->tokenizer_or_null()) {
      detokenizer_.emplace(*tokenizer, text::Detokenizer::Special::kSkip);
    }
    // Room for all tokens: whoever reads slowly, in a notebook perhaps, holds up nobody and loses nothing.
    queue_ = std::make_shared<engine::TokenQueue>(model_->max_model_len() + 1, nullptr);
    id_ = model_->submit(std::move(request), queue_);
  }
  ~Stream() { abort(); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  engine::RequestId id() const { return id_; }
  void abort() { model_->cancel(id_); }

  // The next token as (id, text, logprob, [(id, logprob)]), waited for; then perhaps (None, rest of the text, None,
  // []); None after the end. With the GIL.
  nb::object next() {
    while (!is_finished_) {
      std::optional<engine::TokenQueue::Event> event;
      {
        const nb::gil_scoped_release release;
        event = queue_->pop_within(kSignalInterval);
      }
      if (PyErr_CheckSignals() != 0) {
        abort();
        throw nb::python_error();
      }
      if (!event) continue;
      if (const auto* token = std::get_if<engine::Token>(&*event)) {
        if (!stops_.has_matched()) return delta(*token);
      } else if (auto* scored = std::get_if<engine::TokenQueue::PromptLogprobs>(&*event)) {
        prompt_logprobs_.insert(prompt_logprobs_.end(), scored->logprobs.begin(), scored->logprobs.end());
      } else if (auto* outcome = std::get_if<engine::Outcome>(&*event)) {
        if (nb::object last = finish(std::move(*outcome)); !last.is_none()) return last;
      }
    }
    return nb::none();
  }

  bool is_finished() const { return is_finished_; }
  bool has_met_stop() const { return stops_.has_matched(); }
  std::string finish_reason() const { return std::string(engine::to_string(reason_)); }
  int64_t num_prompt_tokens() const { return num_prompt_tokens_; }
  int64_t num_tokens() const { return num_tokens_; }

  // (logprob, [(id, logprob)]) of each of the prompt's tokens but the first.
  nb::list prompt_logprobs() const {
    nb::list out;
    for (const engine::Logprobs& one : prompt_logprobs_) out.append(nb::make_tuple(one.token, likeliest(one)));
    return out;
  }
  nb::tuple seconds() const {
    return nb::make_tuple(outcome_.waited_seconds, outcome_.first_token_seconds, outcome_.seconds);
  }

 private:
  static nb::list likeliest(const engine::Logprobs& logprobs) {
    nb::list out;
    for (const engine::TokenLogprob& one : logprobs.likeliest) out.append(nb::make_tuple(one.id, one.logprob));
    return out;
  }

  static nb::object text_object(const std::string& text) {
    PyObject* const object = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
    if (object == nullptr) throw nb::python_error();
    return nb::steal(object);
  }

  nb::object delta(const engine::Token& token) {
    ++num_tokens_;
    std::string text;
    const bool is_end = std::find(eos_ids_.begin(), eos_ids_.end(), token.id) != eos_ids_.end();
    if (!is_end && detokenizer_) text = stops_.push(detokenizer_->push(token.id));
    if (stops_.has_matched()) abort();
    nb::object logprob = nb::none();
    nb::list top;
    if (token.logprobs) logprob = nb::float_(token.logprobs->token), top = likeliest(*token.logprobs);
    return nb::make_tuple(token.id, text_object(text), logprob, top);
  }

  nb::object finish(engine::Outcome outcome) {
    is_finished_ = true;
    outcome_ = std::move(outcome);
    reason_ = outcome_.reasons.empty() ? engine::FinishReason::kCancelled : outcome_.reasons.front();
    if (stops_.has_matched()) reason_ = engine::FinishReason::kStop;
    if (reason_ == engine::FinishReason::kFailed) throw Error(outcome_.error_code, outcome_.error);
    if (!detokenizer_) return nb::none();
    std::string rest = stops_.push(detokenizer_->finish());
    rest += stops_.finish();
    if (rest.empty()) return nb::none();
    return nb::make_tuple(nb::none(), text_object(rest), nb::none(), nb::list());
  }

  ModelPtr model_;
  std::vector<int32_t> eos_ids_;
  int64_t num_prompt_tokens_, num_tokens_ = 0;
  std::optional<text::Detokenizer> detokenizer_;
  text::StopMatcher stops_;
  std::shared_ptr<engine::TokenQueue> queue_;
  engine::RequestId id_ = 0;
  std::vector<engine::Logprobs> prompt_logprobs_;
  bool is_finished_ = false;
  engine::FinishReason reason_ = engine::FinishReason::kNone;
  engine::Outcome outcome_;
};

std::unique_ptr<Stream> submit(const ModelPtr& model, std::vector<int32_t> prompt, int64_t max_tokens,
                               float temperature, float top_p, int32_t top_k, float min_p, float repetition_penalty,
                               float frequency_penalty, float presence_penalty, std::optional<uint64_t> seed,
                               const std::map<int32_t, float>& logit_bias, std::vector<std::string> stops,
                               std::vector<int32_t> stop_ids, bool ignores_end, std::optional<int> logprobs,
                               std::optional<int> prompt_logprobs) {
  for (const std::string& stop : stops) {
    if (stop.empty()) fail(ErrorCode::kInvalidArgument, "stop: expected texts of at least one character, found \"\"");
  }
  engine::Request request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  request.sampling.params = {.temperature = temperature,
                             .top_p = top_p,
                             .min_p = min_p,
                             .top_k = top_k,
                             .repetition_penalty = repetition_penalty,
                             .frequency_penalty = frequency_penalty,
                             .presence_penalty = presence_penalty,
                             .seed = seed ? *seed : uint64_t{std::random_device{}()} << 32 | std::random_device{}()};
  request.sampling.logit_bias.assign(logit_bias.begin(), logit_bias.end());
  request.stop_ids = std::move(stop_ids);
  request.stop_at_end_token = !ignores_end;
  request.logprobs = logprobs;
  request.prompt_logprobs = prompt_logprobs;
  const nb::gil_scoped_release release;
  return std::make_unique<Stream>(model, std::move(request), std::move(stops));
}

// Messages as JSON text, as OpenAI's chat completions have them.
text::Prompt render(const LoadedModel& model, const std::string& messages, const std::optional<std::string>& tools,
                    bool thinks, const std::string& effort, bool keeps_reasoning) {
  const nb::gil_scoped_release release;
  text::ChatOptions options;
  options.thinking = thinks ? text::Thinking::kOn : text::Thinking::kOff;
  options.effort_table = model.effort_table();
  options.drops_old_reasoning = !keeps_reasoning;
  if (effort != "default") {
    const auto found = text::effort_from_api_name(effort, options.effort_table);
    if (!found) {
      fail(ErrorCode::kInvalidArgument,
           fmt::format("effort: expected default, minimal, low, medium, high, xhigh, max or ultra, found \"{}\"",
                       printable(effort, 40)));
    }
    options.effort = *found;
  }
  try {
    const Json list = Json::parse_python(messages, "messages");
    std::optional<Json> functions;
    if (tools) functions = Json::parse_python(*tools, "tools");
    std::vector<text::Message> read =
        functions ? text::read_messages(JsonCursor(list, "messages"), JsonCursor(*functions, "tools"))
                  : text::read_messages(JsonCursor(list, "messages"));
    text::check_answerable(read);
    return text::render_chat(read, options);
  } catch (const Error& error) {
    // The caller's objects, not a file.
    if (error.code() != ErrorCode::kDataLoss) throw;
    fail(ErrorCode::kInvalidArgument, error.what());
  }
}

nb::tuple parse_answer(const std::string& text, bool starts_in_reasoning, bool is_cut_off) {
  text::AnswerParser parser(starts_in_reasoning);
  parser.push(text);
  parser.finish(is_cut_off ? text::Ending::kCutOff : text::Ending::kEndToken);
  const text::Answer& answer = parser.answer();
  nb::list calls;
  for (const text::ParsedCall& call : answer.calls) {
    calls.append(nb::make_tuple(call.name, call.arguments, call.is_complete));
  }
  return nb::make_tuple(answer.reasoning, answer.content, calls, answer.fault);
}

std::string detokenize(const LoadedModel& model, const std::vector<int32_t>& ids, bool skips_special) {
  const nb::gil_scoped_release release;
  using Special = text::Detokenizer::Special;
  const text::Tokenizer& tokenizer = model.tokenizer();
  text::Detokenizer detokenizer(tokenizer, skips_special ? Special::kSkip : Special::kKeep);
  std::string text;
  for (const int32_t id : ids) {
    if (id < 0 || id >= tokenizer.vocab_size()) {
      fail(ErrorCode::kInvalidArgument, fmt::format("ids: expected 0 to {}, found {}", tokenizer.vocab_size() - 1, id));
    }
    text += detokenizer.push(id);
  }
  return text + detokenizer.finish();
}

ModelPtr open_model(const std::string& directory, const std::string& device, const std::string& mode,
                    const std::string& cache, int threads, int64_t max_model_len, std::optional<int64_t> max_running,
                    std::optional<int64_t> max_step_tokens, bool allow_inexact) {
  const nb::gil_scoped_release release;
  SignalCheck signals;
  return std::make_shared<LoadedModel>(
      directory, ModelOptions{device, mode, cache, threads, max_model_len, max_running, max_step_tokens, allow_inexact},
      &signals);
}

}  // namespace

void add_model(nb::module_& m) {
  using nb::arg;
  nb::class_<Stream>(m, "Stream")
      .def("next", &Stream::next)
      .def("abort", &Stream::abort, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("id", &Stream::id)
      .def_prop_ro("is_finished", &Stream::is_finished)
      .def_prop_ro("has_met_stop", &Stream::has_met_stop)
      .def_prop_ro("finish_reason", &Stream::finish_reason)
      .def_prop_ro("num_prompt_tokens", &Stream::num_prompt_tokens)
      .def_prop_ro("num_tokens", &Stream::num_tokens)
      .def_prop_ro("prompt_logprobs", &Stream::prompt_logprobs)
      .def_prop_ro("seconds", &Stream::seconds);
  nb::class_<LoadedModel>(m, "Model")
      .def("submit", &submit, arg("prompt"), nb::kw_only(), arg("max_tokens"), arg("temperature"), arg("top_p"),
           arg("top_k"), arg("min_p"), arg("repetition_penalty"), arg("frequency_penalty"), arg("presence_penalty"),
           arg("seed").none(), arg("logit_bias"), arg("stop"), arg("stop_ids"), arg("ignore_eos"),
           arg("logprobs").none(), arg("prompt_logprobs").none())
      .def("abort", &LoadedModel::cancel, arg("request_id"), nb::call_guard<nb::gil_scoped_release>())
      .def("close", &LoadedModel::close, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("is_closed", &LoadedModel::is_closed)
      .def_prop_ro("directory", &LoadedModel::directory)
      .def_prop_ro("max_model_len", &LoadedModel::max_model_len)
      .def_prop_ro("facts",
                   [](const LoadedModel& model) {
                     const model::ModelFacts& facts = model.facts();
                     return nb::make_tuple(facts.vocab_size, facts.max_positions, facts.bos_id, facts.eos_ids,
                                           facts.precision, facts.weight_bytes);
                   })
      .def(
          "tokenize",
          [](const LoadedModel& model, const std::string& text, bool is_special) {
            const nb::gil_scoped_release release;
            using Matching = text::AddedTokenMatching;
            return model.tokenizer().encode(text, is_special ? Matching::kMatch : Matching::kIgnore);
          },
          arg("text"), arg("special"))
      .def("detokenize", &detokenize, arg("ids"), arg("skip_special"))
      .def("check_chat", [](const LoadedModel& model) { model.chat_tokenizer(); })
      .def(
          "render_chat",
          [](const LoadedModel& model, const std::string& messages, const std::optional<std::string>& tools,
             bool thinks, const std::string& effort, bool keeps_reasoning) {
            const text::Prompt prompt = render(model, messages, tools, thinks, effort, keeps_reasoning);
            return nb::make_tuple(prompt.text, prompt.starts_in_reasoning);
          },
          arg("messages"), arg("tools").none(), arg("think"), arg("effort"), arg("keep_reasoning"));
  m.def("open_model", &open_model, arg("directory"), arg("device"), arg("mode"), arg("cache"), arg("threads"),
        arg("max_model_len"), arg("max_running").none(), arg("max_step_tokens").none(), arg("allow_inexact"));
  m.def("parse_answer", &parse_answer, arg("text"), arg("starts_in_reasoning"), arg("is_cut_off"));
}

}  // namespace tessera::python
