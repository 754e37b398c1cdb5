// SPDX-License-Identifier: Apache-2.0
#include "bench_serve.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/env.h"
#include "base/error.h"
#include "base/json.h"
#include "base/strings.h"
#include "commit.h"
#include "console.h"
#include "device/machine.h"
#include "interrupt.h"
#include "own_server.h"
#include "progress_bar.h"
#include "record_head.h"
#include "usage.h"
#include "verb.h"

namespace tessera::app {

namespace {

constexpr double kAskSeconds = 10;
constexpr int64_t kMaxRequests = 1000000;

class Watcher final : public bench::LoadObserver {
 public:
  explicit Watcher(ProgressBar& progress) : progress_(progress) {}
  void ended(const bench::RequestRecord&) override { progress_.advance(1); }
  bool stops() override { return interrupted(); }

 private:
  ProgressBar& progress_;
};

nlohmann::ordered_json json_of(const bench::Samples& samples) {
  return {{"p50", samples.quantile(0.5)},
          {"p90", samples.quantile(0.9)},
          {"p99", samples.quantile(0.99)},
          {"count", samples.seconds.size()}};
}

nlohmann::ordered_json json_of(const bench::LoadSummary& one) {
  return {{"load", to_string(one.point)},
          {"requests_per_second_sent", one.point.requests_per_second},
          {"concurrency", one.point.concurrency},
          {"seconds", one.seconds},
          {"was_stopped", one.was_stopped},
          {"requests", one.num_requests},
          {"answered", one.num_answered},
          {"refused_429", one.num_refused},
          {"errors", one.errors},
          {"prompt_tokens", one.prompt_tokens},
          {"cached_tokens", one.cached_tokens},
          {"output_tokens", one.output_tokens},
          {"requests_per_second", one.requests_per_second()},
          {"output_tokens_per_second", one.tokens_per_second()},
          {"first_token_seconds", json_of(one.first_token)},
          {"between_tokens_seconds", json_of(one.between_texts)},
          {"per_token_seconds", json_of(one.per_token)},
          {"whole_answer_seconds", json_of(one.whole)},
          {"refusal_seconds", json_of(one.refusal)},
          {"samples", {{"first_token_seconds", one.first_token.seconds}, {"whole_answer_seconds", one.whole.seconds}}}};
}

}  // namespace

BenchServe::BenchServe(CLI::App& bench)
    : command_(bench.add_subcommand("serve", "A server under load: how long clients wait, and how much comes")) {
  CLI::App& c = *command_;
  c.footer(R"(
Asks a server that speaks OpenAI's API, or one that it starts itself on 127.0.0.1 with the given model, for streams.
Loads are open (--rates: requests come at random moments, answered or not) or closed (--concurrency: so many at a time).
Times are from the moment a request was due. Prompts are random tokens that no load before asked, or those of a file.

Examples:
  tessera bench serve --concurrency 1,8,64
  tessera bench serve --model /models/flash --rates 1,2,4 --prompt-tokens lognormal:512,0.8 -- --device cuda:0
  tessera bench serve --url http://127.0.0.1:8000 --prompts questions.jsonl --json > result.json

TESSERA_API_KEY is sent where it is set. Ctrl-C ends the measurement and reports what there is (exit code 130).)");
  CLI::Option* url = c.add_option("--url", url_, "A server that runs [one is started]")->type_name("http://HOST:PORT");
  c.add_option("--model", model_directory_, "Folder for the server that is started [the bundled tiny-v4]")
      ->type_name("DIR")
      ->excludes(url);
  c.add_option("serve_flags", serve_flags_, "After --: flags of tessera serve for the server that is started")
      ->type_name("FLAG")
      ->excludes(url);
  c.add_option("--rates", rates_, "Requests per second of open loads, comma-separated")->delimiter(',');
  c.add_option("--concurrency", concurrency_,
               "Requests at a time of closed loads, comma-separated [1,4,16 without --rates]")
      ->delimiter(',');
  c.add_option("--requests", limits_.num_requests, "At most so many a load")->capture_default_str();
  c.add_option("--seconds", limits_.seconds, "No load sends for longer")->capture_default_str();
  c.add_option("--answer-seconds", limits_.answer_seconds, "An answer that takes longer has failed")
      ->capture_default_str();
  c.add_option("--prompt-tokens", prompt_tokens_, "N, uniform:FROM-TO, or lognormal:MEDIAN,SIGMA")
      ->type_name("DIST")
      ->capture_default_str();
  c.add_option("--output-tokens", output_tokens_, "max_tokens, likewise")->type_name("DIST")->capture_default_str();
  c.add_option("--shared-prefix", workload_.shared_prefix,
               "Share of each prompt with which all of all loads begin alike, 0 to 1")
      ->capture_default_str();
  c.add_option("--max-token-id", workload_.max_token_id, "Random prompts are of the ids 3 to this")
      ->capture_default_str();
  c.add_option("--prompts", workload_.prompts_file,
               "Ask these in turn: a JSON object a line with prompt (text or ids) or messages, perhaps max_tokens")
      ->type_name("FILE")
      ->check(not_empty("a file"));
  c.add_option("--seed", workload_.seed, "Of prompts, lengths and moments")->capture_default_str();
  c.add_flag("--json", is_json_, "One JSON object, with samples");
  c.add_option("--plot", plot_, "Also draw it")->type_name("FILE.svg");
  c.add_flag("--quiet", is_quiet_, "No progress");
}

void BenchServe::check() const {
  const auto check_one = [](const char* flag, double value, double least, double most) {
    if (value >= least && value <= most) return;
    fail_usage(fmt::format("{}: expected {:g} to {:g}, found {:g}", flag, least, most, value));
  };
  for (const double rate : rates_) check_one("--rates", rate, 0.001, 100000);
  for (const int64_t count : concurrency_) check_one("--concurrency", static_cast<double>(count), 1, 4000);
  check_one("--requests", static_cast<double>(limits_.num_requests), 1, kMaxRequests);
  check_one("--seconds", limits_.seconds, 0.01, 86400);
  check_one("--answer-seconds", limits_.answer_seconds, 0.01, 86400);
  check_one("--shared-prefix", workload_.shared_prefix, 0, 1);
  check_one("--max-token-id", static_cast<double>(workload_.max_token_id), 3, 1 << 24);
}

std::vector<bench::LoadPoint> BenchServe::points() const {
  std::vector<int64_t> closed = concurrency_;
  if (rates_.empty() && closed.empty()) closed = {1, 4, 16};
  std::vector<bench::LoadPoint> out;
  for (const double rate : rates_) out.push_back({rate, 0});
  for (const int64_t count : closed) out.push_back({0, count});
  return out;
}

std::string BenchServe::model_of(const bench::Address& address, const std::string& key) const {
  const bench::Got got = bench::get(address, "/v1/models", key, kAskSeconds);
  const std::string where = address.url() + "/v1/models";
  if (got.status != 200) {
    fail_usage(fmt::format("{}: expected status 200, found {}{}", where, got.status,
                           got.status == 401 ? "; set TESSERA_API_KEY" : ""));
  }
  const Json list = Json::parse_exact(got.body, where);
  const std::vector<JsonCursor> models = JsonCursor(list, where).at("data").elements();
  if (models.empty()) fail_usage(fmt::format("{}: expected a model, found none", where));
  return models.front().at("id").string();
}

std::string BenchServe::description(const std::string& model) const {
  const std::string shared =
      workload_.shared_prefix > 0 ? fmt::format(", {:g} of it shared", workload_.shared_prefix) : "";
  const std::string asked = workload_.prompts_file.empty()
                                ? fmt::format("prompts of {} random tokens{}", prompt_tokens_, shared)
                                : fmt::format("prompts of {}", printable(workload_.prompts_file, 100));
  return fmt::format("{}; {}, answers of {} tokens", printable(model, 100), asked, output_tokens_);
}

// Where the server that this starts computes; of another nobody knows.
std::string BenchServe::served_device() const {
  if (!url_.empty()) return "unknown";
  std::string device = env_value("TESSERA_DEVICE").value_or("cpu");
  for (size_t i = 0; i < serve_flags_.size(); ++i) {
    const std::string& flag = serve_flags_[i];
    if (flag == "--gpus" || flag.starts_with("--gpus=")) device = "cuda:0";
    if (flag == "--device" && i + 1 < serve_flags_.size()) device = serve_flags_[i + 1];
    if (flag.starts_with("--device=")) device = flag.substr(std::string("--device=").size());
  }
  return printable(device, 40);
}

void BenchServe::print_json(const std::vector<bench::LoadSummary>& summaries, const std::string& url,
                            const std::string& model) const {
  const std::string device = served_device();
  nlohmann::ordered_json out = record_head("tessera bench serve", device);
  out.update({{"device", device},
              {"server", url_.empty() ? "started for this, on the same machine" : url},
              {"serve_flags", serve_flags_},
              {"model", model},
              {"prompt_tokens", prompt_tokens_},
              {"output_tokens", output_tokens_},
              {"shared_prefix", workload_.shared_prefix},
              {"prompts", workload_.prompts_file},
              {"max_token_id", workload_.max_token_id},
              {"seed", workload_.seed},
              {"requests", limits_.num_requests},
              {"seconds", limits_.seconds},
              {"rows", nlohmann::ordered_json::array()}});
  for (const bench::LoadSummary& one : summaries) out["rows"].push_back(json_of(one));
  print_result(out.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

int BenchServe::run() {
  check();
  workload_.prompt_tokens = bench::LengthDistribution::parse(prompt_tokens_, "--prompt-tokens");
  workload_.output_tokens = bench::LengthDistribution::parse(output_tokens_, "--output-tokens");
  // Files first: nothing is measured that can't be asked or kept.
  bench::Workload(workload_).request(0);
  const std::unique_ptr<AtomicFile> plot = plot_.empty() ? nullptr : std::make_unique<AtomicFile>(plot_);
  const std::string key = env_value("TESSERA_API_KEY").value_or("");
  if (!std::all_of(key.begin(), key.end(), [](char c) { return c > ' ' && c <= '~'; })) {
    fail_usage("TESSERA_API_KEY: expected printable ASCII without spaces, found something else");
  }
  watch_interrupt(InterruptEnd::kSecondEndsProgram);
  std::unique_ptr<OwnServer> own;
  if (url_.empty()) {
    std::vector<std::string> flags = serve_flags_;
    if (!model_directory_.empty()) flags.insert(flags.begin(), {"--model", model_directory_});
    own = std::make_unique<OwnServer>(flags);
  }
  const bench::Address address = bench::Address::parse(own ? own->url() : url_, "--url");
  workload_.model = model_of(address, key);
  const bench::Workload workload(workload_);
  if (!is_json_) print_result(description(workload_.model) + "\n" + bench::load_table_head());
  std::vector<bench::LoadSummary> summaries;
  ProgressBar progress(is_quiet_);
  bench::LoadLimits limits = limits_;
  for (const bench::LoadPoint& point : points()) {
    progress.begin(to_string(point), static_cast<uint64_t>(limits_.num_requests), "requests");
    Watcher watcher(progress);
    const bench::LoadResult result = bench::run_load(address, workload, key, point, limits, workload_.seed, watcher);
    // What an earlier load asked would come from the prefix cache.
    limits.first_request += static_cast<int64_t>(result.records.size());
    summaries.push_back(bench::summary_of(result));
    progress.end();
    if (!is_json_) print_result(bench::load_table_row(summaries.back()));
    if (summaries.back().was_stopped) break;
  }
  bool is_answered = true;
  for (const bench::LoadSummary& one : summaries) {
    is_answered = is_answered && one.num_answered > 0;
    for (const std::string& note : bench::load_notes(one)) print_note(note);
  }
  if (is_json_) print_json(summaries, address.url(), workload_.model);
  if (plot) {
    const device::Machine machine = device::probe_machine();
    const std::string picture = bench::load_svg(summaries, description(workload_.model),
                                                fmt::format("measured on {}, {} cores, {}, commit {}", machine.cpu_name,
                                                            machine.num_cores, today(), TESSERA_COMMIT));
    plot->write(picture.data(), picture.size());
    plot->commit();
  }
  if (interrupted()) return kExitCancelled;
  return is_answered ? kExitOk : kExitFailure;
}

}  // namespace tessera::app
