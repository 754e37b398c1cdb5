// SPDX-License-Identifier: Apache-2.0
#include "bindings/python/loaded_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <mutex>

#include "backends/registry.h"
#include "base/env.h"
#include "base/error.h"
#include "base/file.h"
#include "base/strings.h"
#include "device/device_choice.h"
#include "model/memory_fit.h"
#include "model/model.h"
#include "text/chat/prompt.h"

namespace tessera::python {

namespace {

constexpr int64_t kDefaultModelLen = 131072;

void check_range(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return;
  fail(ErrorCode::kInvalidArgument, fmt::format("{}: expected {} to {}, found {}", name, least, most, value));
}

model::LoadOptions load_options(const ModelOptions& options) {
  const auto input = ops::input_mode_from_name(options.mode);
  const auto cache = ops::cache_mode_from_name(options.cache);
  const auto check_name = [](bool is_known, const char* name, const char* expected, const std::string& found) {
    if (is_known) return;
    fail(ErrorCode::kInvalidArgument,
         fmt::format("{}: expected {}, found \"{}\"", name, expected, printable(found, 40)));
  };
  check_name(input.has_value(), "mode", "f32, a16, a8 or a4", options.mode);
  check_name(cache.has_value(), "cache", "exact or fp8", options.cache);
  check_range("threads", options.num_threads, 0, 4096);
  if (options.max_running) check_range("max_running", *options.max_running, 1, 4096);
  if (options.max_step_tokens) check_range("max_step_tokens", *options.max_step_tokens, 2, 65536);
  model::LoadOptions load;
  load.precision = {*input, *cache};
  load.num_threads = options.num_threads;
  load.allow_inexact = options.allow_inexact;
  load.forced = ops::parse_forced(env_value("TESSERA_FORCE").value_or(""));
  load.with_draft = false;
  return load;
}

}  // namespace

LoadedModel::LoadedModel(const std::string& directory, const ModelOptions& options, ProgressSink* progress)
    : directory_(directory) {
  model::LoadOptions load = load_options(options);
  const device::Machine machine = device::machine_of(options.device);
  const int64_t max_running = options.max_running.value_or(model::default_running(options.device));
  if (!std::filesystem::is_directory(directory)) {
    fail(ErrorCode::kNotFound,
         fmt::format("{}: no such folder; a model is a folder with config.json, tokenizer.json and *.safetensors",
                     printable(directory)));
  }
  const model::Config config = model::load_config(directory);
  load.max_step_tokens =
      options.max_step_tokens.value_or(model::default_step_tokens(directory, config, load, machine, load.shard.world));
  const std::string path = (std::filesystem::path(directory) / "tokenizer.json").string();
  if (file_exists(path)) tokenizer_.emplace(text::Tokenizer::load(path));
  if (tokenizer_ && tokenizer_->vocab_size() > config.vocab_size) {
    fail_data(path, "token ids", fmt::format("at most {}, vocab_size of config.json", config.vocab_size),
              fmt::format("{}", tokenizer_->vocab_size()));
  }
  effort_table_ = text::effort_table_of_model(directory);
  check_range("max_model_len", options.max_model_len, 0, config.max_positions);
  max_model_len_ = options.max_model_len > 0 ? options.max_model_len : std::min(config.max_positions, kDefaultModelLen);
  const auto one = static_cast<int64_t>(
      model::sequence_bytes(config, load.precision, max_model_len_, model::ring_slots(config, load.max_step_tokens)));
  const int64_t room = model::room_for_caches(directory, machine,
                                              model::Model::step_bytes(config, load.precision, load.max_step_tokens));
  load.extra_bytes = std::max(one, std::min(one * max_running, room));
  loaded_ = model::load_model(directory, load, backends::all_backends(), machine, nullptr, progress);
  facts_ = loaded_.runner->facts();
  // One sequence of the longest length runs in any case, as its exact size is.
  const model::CacheSpec& spec = loaded_.runner->cache_spec();
  budget_ = std::make_unique<engine::ReservedBudget>(spec, std::max(load.extra_bytes, spec.bytes(max_model_len_)));
  engine::EngineOptions engine_options;
  engine_options.steps.max_running = max_running;
  engine_options.steps.max_mixed_step_tokens =
      options.max_step_tokens.value_or(model::default_mixed_step_tokens(machine, load.max_step_tokens, max_running));
  engine_ = std::make_unique<engine::Engine>(*loaded_.runner, *budget_, engine_options);
}

engine::RequestId LoadedModel::submit(engine::Request request, std::shared_ptr<engine::Sink> sink) {
  const std::shared_lock<std::shared_mutex> hold(lock_);
  if (engine_ == nullptr) fail(ErrorCode::kInvalidArgument, "model: expected an open one, found it closed");
  const int64_t room = max_model_len_ - static_cast<int64_t>(request.prompt.size());
  if (room < 0) {
    fail(ErrorCode::kInvalidArgument, fmt::format("prompt: expected at most {} tokens (max_model_len), found {}",
                                                  max_model_len_, request.prompt.size()));
  }
  request.max_tokens = std::min(request.max_tokens, room);
  std::variant<engine::RequestId, engine::Refusal> answer = engine_->submit(std::move(request), std::move(sink));
  if (const auto* id = std::get_if<engine::RequestId>(&answer)) return *id;
  const auto& refusal = std::get<engine::Refusal>(answer);
  using Reason = engine::Refusal::Reason;
  const bool is_full = refusal.reason == Reason::kFull || refusal.reason == Reason::kDraining;
  fail(is_full ? ErrorCode::kResourceExhausted : ErrorCode::kInvalidArgument, refusal.message);
}

void LoadedModel::cancel(engine::RequestId id) {
  const std::shared_lock<std::shared_mutex> hold(lock_);
  if (engine_ != nullptr) engine_->cancel(id);
}

void LoadedModel::close() {
  const std::unique_lock<std::shared_mutex> hold(lock_);
  engine_.reset();
  budget_.reset();
  loaded_.runner.reset();
}

bool LoadedModel::is_closed() const {
  const std::shared_lock<std::shared_mutex> hold(lock_);
  return engine_ == nullptr;
}

const text::Tokenizer& LoadedModel::tokenizer() const {
  if (!tokenizer_) {
    fail(ErrorCode::kNotFound, fmt::format("{}/tokenizer.json: no such file; give token ids", printable(directory_)));
  }
  return *tokenizer_;
}

const text::Tokenizer& LoadedModel::chat_tokenizer() const {
  text::check_chat_tokens(tokenizer(), directory_ + "/tokenizer.json");
  return *tokenizer_;
}

}  // namespace tessera::python
