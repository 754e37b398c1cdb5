// SPDX-License-Identifier: Apache-2.0
// tessera serve: the model behind OpenAI's and Anthropic's APIs.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <optional>

#include "base/error.h"
#include "base/strings.h"
#include "cache_tiers.h"
#include "commit.h"
#include "console.h"
#include "device/device_choice.h"
#include "engine/engine.h"
#include "engine/prefix_cache.h"
#include "interrupt.h"
#include "loading_server.h"
#include "model/memory_fit.h"
#include "model/model.h"
#include "model_flags.h"
#include "ranks.h"
#include "server/http/api_keys.h"
#include "server/http/chat_page.h"
#include "server/http/http_server.h"
#include "server/json_text.h"
#include "server/service.h"
#include "service_manager.h"
#include "text/chat/effort.h"
#include "text/chat/prompt.h"
#include "usage.h"
#include "verb.h"

namespace tessera::app {

namespace {

// One word of a shell.
std::string shell_quoted(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? "'\\''" : std::string(1, c);
  return quoted + "'";
}

// Of what caches may take, the least that is left for prefixes where --prefix-cache-memory does not say.
constexpr double kPrefixShare = 0.25;
constexpr int64_t kDefaultModelLen = 131072;
constexpr double kGiB = 1 << 30;

struct Flags {
  ModelFlags model;
  RankFlags ranks;
  server::http::HttpOptions http;
  std::string name, key_file;
  int64_t max_running = 0, max_model_len = 0, max_step_tokens = 0, max_mixed_step_tokens = 0, max_waiting = 1024,
          max_waiting_tokens = 1 << 20;
  int64_t port = 8000;
  double cache_gib = 0;
  std::optional<double> prefix_gib;
  CacheTierFlags tiers;
  int64_t max_body_mib = 64;
  bool thinks = false, logs_requests = false, is_quiet = false;
};

// Bytes.
struct CacheMemory {
  int64_t running = 0;   // of answers that are made
  int64_t prefixes = 0;  // of snapshots for later ones
};

// Requests at --log-requests; warnings always.
class ServeLog final : public LogSink {
 public:
  explicit ServeLog(bool logs_requests) : logs_requests_(logs_requests) {}
  void write(LogLevel level, std::string_view message) override {
    if (level == LogLevel::kWarning) return print_warning(message);
    if (level == LogLevel::kInfo || logs_requests_) print_note(message);
  }

 private:
  bool logs_requests_;
};

class ServeEvents final : public server::http::ServerEvents {
 public:
  explicit ServeEvents(bool is_quiet) : is_quiet_(is_quiet) {}
  void draining(double seconds) override {
    interrupted() = true;  // ranks are waited for no longer than by other verbs
    notify_service_manager("STOPPING=1");
    if (is_quiet_ || seconds == 0) return;  // nothing is waited for
    print_note(fmt::format("ending: no new requests; those that run have {:.0f} s (once more ends them now)", seconds));
  }

 private:
  bool is_quiet_;
};

// Clients' answers end with an error where a rank is lost, before the program does.
class LossWords {
 public:
  LossWords(Ranks& ranks, server::http::HttpServer& http) : ranks_(ranks) {
    ranks_.tell_of_loss([&http](const std::string& what) { http.break_off("ending: " + what); });
  }
  ~LossWords() { ranks_.tell_of_loss(nullptr); }
  LossWords(const LossWords&) = delete;
  LossWords& operator=(const LossWords&) = delete;

 private:
  Ranks& ranks_;
};

class Serve final : public Verb {
 public:
  explicit Serve(CLI::App& app);
  CLI::App* command() const override { return command_; }
  int run() override;

 private:
  void check_flags();
  int answer(Ranks& ranks);
  int follow(Ranks& ranks);
  ModelFolder open(model::LoadOptions& load);
  CacheMemory cache_memory(const ModelFolder& folder, const model::LoadOptions& load, int64_t room) const;
  void check_room(const CacheMemory& memory, const device::Machine& machine) const;
  CacheMemory agreed_memory(const ModelFolder& folder, const model::LoadOptions& load, const model::Runner& runner,
                            Ranks& ranks) const;
  model::CacheRoom room_for(const CacheMemory& memory) const {
    return {memory.running, memory.prefixes, flags_.max_running, flags_.max_model_len};
  }
  // A server that is ready takes no more of a GPU's memory: what grows with the longest sequence grows now. Every rank
  // of its own, before there are orders.
  void take_memory(Ranks& ranks, model::Runner& own, const CacheMemory& memory) const {
    ranks.least(0);  // none takes what rank 0 refuses
    own.new_sequence(flags_.max_model_len);
    own.reserve(room_for(memory));
  }
  server::Serving serving(const ModelFolder& folder, const model::ModelFacts& facts,
                          text::GrammarCompiler& grammars) const;
  void print_figures(const model::LoadedModel& loaded, const CacheMemory& memory) const;
  void print_address(uint16_t port, const std::string& name) const;

  CLI::App* command_;
  Flags flags_;
};

Serve::Serve(CLI::App& app) : command_(app.add_subcommand("serve", "Answer requests over HTTP")) {
  CLI::App& c = *command_;
  server::http::HttpOptions& http = flags_.http;
  c.footer(R"(
Speaks OpenAI's API (/v1/chat/completions, /v1/completions, /v1/responses, /v1/models), Anthropic's (/v1/messages),
/tokenize, /health/{live,ready,deep}, /metrics and /openapi.json; a page to chat with is at /. Requests get 503 while the
weights load; once they are there, the address and a curl to paste go to stdout. Everything else goes to stderr.

Examples:
  tessera serve
  tessera serve --model /models/DeepSeek-V4-Flash-NVFP4 --device cuda:0 --api-key-file keys.txt --host 0.0.0.0
  OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python my_agent.py

SIGTERM or Ctrl-C lets running answers finish, then ends; a second one ends at once.
Exit codes: 0 ended when asked to, 1 failure, 2 usage, 3 bad model or file, 4 does not fit, 5 device, driver
            or a lost rank.)");
  add_model_flags(c, flags_.model);
  add_rank_flags(c, flags_.ranks);
  c.add_option("--host", http.host, "Address to listen on; 0.0.0.0 is every network: use keys then")
      ->capture_default_str()
      ->group("Network");
  c.add_option("--port", flags_.port, "Port; 0 takes a free one")
      ->type_name("UINT")
      ->capture_default_str()
      ->group("Network");
  c.add_option("--api-key-file", flags_.key_file,
               "File with one key a line; clients must give one (Bearer or x-api-key)")
      ->type_name("FILE")
      ->check(not_empty("a file"))
      ->group("Network");
  c.add_option("--tls-cert", http.tls_cert, "Certificate chain in PEM: HTTPS")->type_name("FILE")->group("Network");
  c.add_option("--tls-key", http.tls_key, "Its private key in PEM")->type_name("FILE")->group("Network");
  c.add_option("--cors-origin", http.cors_origin,
               "The one other site whose pages may ask, such as https://chat.example")
      ->type_name("ORIGIN")
      ->group("Network");
  c.add_option("--served-model-name", flags_.name, "What clients call the model [the folder's name]")
      ->type_name("NAME")
      ->group("Service");
  c.add_option("--max-model-len", flags_.max_model_len,
               "Most tokens of prompt and answer together [the model's, at most 131072]")
      ->type_name("N")
      ->group("Service");
  c.add_option("--max-running", flags_.max_running, "Most answers that are made at once [16; with a GPU 256]")
      ->type_name("N")
      ->group("Service");
  c.add_option("--max-step-tokens", flags_.max_step_tokens,
               "Most tokens of one step: answers and pieces of prompts [64; with a GPU 512 to 8192, as memory allows]")
      ->type_name("N")
      ->group("Service");
  c.add_option("--max-mixed-step-tokens", flags_.max_mixed_step_tokens,
               "Most tokens of a step in which answers wait for pieces of prompts [--max-step-tokens; with a GPU 512]")
      ->type_name("N")
      ->group("Service");
  c.add_option("--cache-memory", flags_.cache_gib,
               "GiB for caches of running answers [room for --max-running whole ones, if there is so much]")
      ->type_name("GIB")
      ->group("Service");
  c.add_option("--prefix-cache-memory", flags_.prefix_gib,
               "GiB for states of prompts that later requests begin with; 0: off [as much as --cache-memory, if there "
               "is so much]")
      ->type_name("GIB")
      ->group("Service");
  c.add_option("--prefix-cache-host-memory", flags_.tiers.host_gib,
               "GiB of host memory for states that a GPU's prefix cache gave up; 0: off")
      ->type_name("GIB")
      ->capture_default_str()
      ->group("Service");
  c.add_option("--prefix-cache-disk", flags_.tiers.disk_folder,
               "Folder that keeps states of prompts across restarts; of one server at a time [none]")
      ->type_name("DIR")
      ->check(not_empty("a folder"))
      ->group("Service");
  c.add_option("--prefix-cache-disk-size", flags_.tiers.disk_gib, "GiB that it may hold")
      ->type_name("GIB")
      ->capture_default_str()
      ->group("Service");
  c.add_option("--max-waiting", flags_.max_waiting, "Requests that may wait; more get 429")
      ->type_name("N")
      ->capture_default_str()
      ->group("Service");
  c.add_option("--max-waiting-tokens", flags_.max_waiting_tokens, "Prompt tokens that may wait; more get 429")
      ->type_name("N")
      ->capture_default_str()
      ->group("Service");
  c.add_option("--max-body", flags_.max_body_mib, "MiB of a request's body; more gets 413")
      ->type_name("MIB")
      ->capture_default_str()
      ->group("Service");
  c.add_option("--request-timeout", http.request_seconds, "Seconds for a whole answer; 0: no limit")
      ->type_name("S")
      ->capture_default_str()
      ->group("Service");
  c.add_option("--drain", http.drain_seconds, "Seconds that running answers get at the end")
      ->type_name("S")
      ->capture_default_str()
      ->group("Service");
  c.add_flag("--think", flags_.thinks, "Reason first where a request does not say")->group("Service");
  c.add_flag("--log-requests", flags_.logs_requests, "A line on stderr for each request")->group("Output");
  c.add_flag("--quiet", flags_.is_quiet, "No progress, no figures at the start, no word of the end")->group("Output");
}

void Serve::check_flags() {
  const auto check = [](const char* flag, double value, double least, double most) {
    if (value >= least && value <= most) return;
    fail_usage(fmt::format("{}: expected {} to {}, found {}", flag, least, most, value));
  };
  const auto number = [](int64_t value) { return static_cast<double>(value); };
  const auto given = [this](const char* flag) { return command_->count(flag) > 0; };
  check("--port", number(flags_.port), 0, 65535);
  flags_.http.port = static_cast<uint16_t>(flags_.port);
  if (given("--max-running")) check("--max-running", number(flags_.max_running), 1, 4096);
  if (given("--max-step-tokens")) check("--max-step-tokens", number(flags_.max_step_tokens), 2, 65536);
  if (given("--max-mixed-step-tokens")) {
    check("--max-mixed-step-tokens", number(flags_.max_mixed_step_tokens), 2, 65536);
  }
  if (given("--max-model-len")) check("--max-model-len", number(flags_.max_model_len), 1, 1e9);
  check("--max-waiting", number(flags_.max_waiting), 1, 1e6);
  check("--max-waiting-tokens", number(flags_.max_waiting_tokens), 1, 1e12);
  check("--max-body", number(flags_.max_body_mib), 1, 1024);
  check("--cache-memory", flags_.cache_gib, 0, 1e6);
  check("--prefix-cache-memory", flags_.prefix_gib.value_or(0), 0, 1e6);
  check("--prefix-cache-host-memory", flags_.tiers.host_gib, 0, 1e6);
  check("--prefix-cache-disk-size", flags_.tiers.disk_gib, 0.001, 1e6);
  if (flags_.prefix_gib == 0.0 && (flags_.tiers.host_gib > 0 || !flags_.tiers.disk_folder.empty())) {
    fail_usage("--prefix-cache-memory: expected more than 0 with a host or disk tier below it, found 0");
  }
  check("--request-timeout", flags_.http.request_seconds, 0, 1e7);
  check("--drain", flags_.http.drain_seconds, 0, 1e7);
  if (flags_.http.tls_cert.empty() != flags_.http.tls_key.empty()) {
    fail_usage("--tls-cert and --tls-key: expected both or neither, found one");
  }
  const std::string& origin = flags_.http.cors_origin;
  const bool is_origin = origin.empty() || origin == "*" || origin.find("://") != std::string::npos;
  const bool is_plain = std::all_of(origin.begin(), origin.end(), [](char c) { return c > ' ' && c <= '~'; });
  if (!is_origin || !is_plain) {
    fail_usage(
        fmt::format("--cors-origin: expected one such as https://chat.example, found \"{}\"", printable(origin, 100)));
  }
  if (!is_valid_utf8(flags_.name)) fail_usage("--served-model-name: expected UTF-8, found bytes that are not");
  flags_.http.max_body_bytes = static_cast<uint64_t>(flags_.max_body_mib) << 20;
  if (!flags_.key_file.empty()) flags_.http.api_keys = server::http::read_key_file(flags_.key_file);
}

// What running answers may take: as said, or room for all of them at their longest, or what the weights leave; and what
// is kept of prompts: as said, or as much again, if that is left.
CacheMemory Serve::cache_memory(const ModelFolder& folder, const model::LoadOptions& load, int64_t room) const {
  const int64_t window_slots = model::ring_slots(folder.config, load.max_step_tokens);
  const auto one = static_cast<double>(model::sequence_bytes(folder.config, load.precision, flags_.max_model_len,
                                                             window_slots, load.shard.entry_ranks()));
  const auto left = static_cast<double>(room);
  const double for_prefixes = flags_.prefix_gib ? *flags_.prefix_gib * kGiB : kPrefixShare * left;
  double running = flags_.cache_gib * kGiB;
  if (running == 0) {
    running = std::max(one, std::min(one * static_cast<double>(flags_.max_running), left - for_prefixes));
  }
  const double prefixes = flags_.prefix_gib ? for_prefixes : std::clamp(left - running, 0.0, running);
  return {static_cast<int64_t>(running), static_cast<int64_t>(prefixes)};
}

// Caches that the machine could not hold by themselves: more was asked for, and the flags that ask are named.
void Serve::check_room(const CacheMemory& memory, const device::Machine& machine) const {
  const auto bytes = [](int64_t count) { return format_bytes(static_cast<uint64_t>(count)); };
  const auto available = static_cast<int64_t>(machine.free_bytes());
  const int64_t needed = memory.running + memory.prefixes;
  if (needed <= available) return;
  fail(
      ErrorCode::kResourceExhausted,
      fmt::format("does not fit: {} of caches for answers (--cache-memory) and {} for prefixes (--prefix-cache-memory) "
                  "need {} beside the weights, {} has {} available; {} are missing",
                  bytes(memory.running), bytes(memory.prefixes), bytes(needed),
                  machine.gpu ? flags_.model.device : "this machine", bytes(available), bytes(needed - available)));
}

server::Serving Serve::serving(const ModelFolder& folder, const model::ModelFacts& facts,
                               text::GrammarCompiler& grammars) const {
  server::Serving out;
  std::string name = flags_.name;
  if (name.empty()) name = std::filesystem::weakly_canonical(folder.directory).filename().string();
  out.model.names = {replace_invalid_utf8(name)};
  out.model.vocab_size = facts.vocab_size;
  out.model.max_model_len = flags_.max_model_len;
  out.model.effort_table = text::effort_table_of_model(folder.directory);
  out.model.thinks_by_default = flags_.thinks;
  out.model.has_grammars = true;
  out.tokenizer = &*folder.tokenizer;
  out.grammars = &grammars;
  out.bos_id = facts.bos_id;
  out.eos_ids = facts.eos_ids;
  out.version = TESSERA_VERSION;
  out.created = static_cast<int64_t>(std::time(nullptr));
  const std::string identity =
      fmt::format("{}|{}|{}|{}|{}", name, facts.precision, facts.weight_bytes, TESSERA_VERSION, TESSERA_COMMIT);
  out.fingerprint = fmt::format("fp_{:016x}", std::hash<std::string>()(identity));
  return out;
}

void Serve::print_figures(const model::LoadedModel& loaded, const CacheMemory& memory) const {
  const model::ModelFacts& facts = loaded.runner->facts();
  const model::CacheSpec& spec = loaded.runner->cache_spec();
  constexpr int64_t kMany = 1 << 20;
  const int64_t fixed = spec.bytes(0), one = spec.bytes(flags_.max_model_len);
  const int64_t num_answers = memory.running / std::max<int64_t>(one, 1);
  // Of ranks that were told otherwise.
  const auto otherwise = [](const char* flag, double gib, int64_t bytes) {
    const auto given = static_cast<int64_t>(gib * kGiB);
    return given == 0 || given == bytes ? ""
                                        : fmt::format(" (the least that a rank has; {} is {} here)", flag,
                                                      format_bytes(static_cast<uint64_t>(given)));
  };
  const std::string of_caches = otherwise("--cache-memory", flags_.cache_gib, memory.running);
  const std::string of_prefixes = otherwise("--prefix-cache-memory", flags_.prefix_gib.value_or(0), memory.prefixes);
  print_note(fmt::format("weights {} ({}), loaded in {:.1f} s", format_bytes(static_cast<uint64_t>(facts.weight_bytes)),
                         facts.precision, loaded.load_seconds));
  print_note(fmt::format(
      "caches {}{}: a token takes {:.0f} B, a sequence {} besides; {} answer{} of {} tokens fit, at most {} are made "
      "at once",
      format_bytes(static_cast<uint64_t>(memory.running)), of_caches,
      static_cast<double>(spec.bytes(kMany) - fixed) / static_cast<double>(kMany),
      format_bytes(static_cast<uint64_t>(fixed)), num_answers, num_answers == 1 ? "" : "s", flags_.max_model_len,
      flags_.max_running));
  if (memory.prefixes == 0) return print_note("prefix cache off" + of_prefixes);
  print_note(
      fmt::format("prefix cache {}{}: a snapshot takes {} besides its pages of {}, which snapshots share, for {} "
                  "tokens each",
                  format_bytes(static_cast<uint64_t>(memory.prefixes)), of_prefixes,
                  format_bytes(static_cast<uint64_t>(spec.snapshot_bytes)),
                  format_bytes(static_cast<uint64_t>(spec.page_bytes)), spec.page_tokens));
}

void Serve::print_address(uint16_t port, const std::string& name) const {
  const server::http::HttpOptions& http = flags_.http;
  const bool is_every = http.host == "0.0.0.0" || http.host == "::";
  std::string host = is_every ? "127.0.0.1" : http.host;
  if (host.find(':') != std::string::npos) host = "[" + host + "]";
  const std::string base = fmt::format("{}://{}:{}", http.tls_cert.empty() ? "http" : "https", host, port);
  const server::JsonObject question{
      {"model", name},
      {"messages", server::JsonArray{server::JsonObject{{"role", "user"}, {"content", "Compute 257-7."}}}}};
  const std::string key = http.api_keys.empty() ? "" : " -H \"Authorization: Bearer $TESSERA_API_KEY\"";
  print_result(fmt::format("{}\ncurl {}/v1/chat/completions{} -H 'Content-Type: application/json' -d {}\n", base, base,
                           key, shell_quoted(question.text())));
}

// Of ranks, what each has left when its share of the weights is there; caches have one size on all of them. Ranks of
// one machine's processors share its memory. Throws kResourceExhausted on rank 0 where they do not fit on all.
CacheMemory Serve::agreed_memory(const ModelFolder& folder, const model::LoadOptions& load, const model::Runner& runner,
                                 Ranks& ranks) const {
  const device::Machine machine = device::machine_of(flags_.model.device);
  const auto left = static_cast<int64_t>(machine.free_bytes() / (machine.gpu ? 1 : ranks.world()));
  const auto needed = [&](const CacheMemory& memory) { return runner.reserved_bytes(room_for(memory)); };
  CacheMemory own = cache_memory(folder, load, (left - needed({})) / 5 * 4);
  // Beside sharded caches there is more than these: what nobody asked for makes room for that.
  const auto shrink = [](int64_t& bytes) { bytes -= std::min(bytes, bytes / 16 + 1); };
  while (needed(own) > left &&
         ((!flags_.prefix_gib && own.prefixes > 0) || (flags_.cache_gib == 0 && own.running > 0))) {
    if (!flags_.prefix_gib) shrink(own.prefixes);
    if (flags_.cache_gib == 0) shrink(own.running);
  }
  CacheMemory agreed;
  agreed.running = ranks.least(own.running);
  agreed.prefixes = ranks.least(own.prefixes);
  const int64_t least_left = ranks.least(left);
  // Rank 0 says so for all: whoever else did would race it to the exit code.
  if (!ranks.is_follower() && needed(agreed) > least_left) {
    const auto bytes = [](int64_t count) { return format_bytes(static_cast<uint64_t>(count)); };
    fail(ErrorCode::kResourceExhausted,
         fmt::format("caches: expected at most the {} that the weights leave on the rank with the least, found {} for "
                     "answers and {} for prefixes{}; lower --cache-memory, --prefix-cache-memory or --max-model-len",
                     bytes(least_left), bytes(agreed.running), bytes(agreed.prefixes),
                     load.shard.shards_entries
                         ? fmt::format(", {} with what sharded caches have besides", bytes(needed(agreed)))
                         : ""));
  }
  return agreed;
}

int Serve::run() {
  Ranks ranks(flags_.ranks, flags_.model, kExitOk);
  return ranks.run([&] {
    check_flags();
    if (!ranks.is_alone() && (flags_.tiers.host_gib > 0 || !flags_.tiers.disk_folder.empty())) {
      fail_usage("--prefix-cache-host-memory and --prefix-cache-disk: expected one rank, found several");
    }
    return ranks.is_follower() ? follow(ranks) : answer(ranks);
  });
}

int Serve::follow(Ranks& ranks) {
  model::LoadOptions load = load_options(flags_.model);
  const ModelFolder folder = open(load);
  ranks.join("serve", folder, flags_.model, load, {flags_.max_running, flags_.max_model_len});
  load.extra_bytes = 0;  // what ranks have room for is known once all have loaded
  const model::LoadedModel loaded = load_weights(folder, flags_.model, load, true);
  ranks.agree_on(loaded);
  const CacheMemory memory = agreed_memory(folder, load, *loaded.runner, ranks);
  take_memory(ranks, *loaded.runner, memory);
  ranks.follow(*loaded.runner);
  return kExitOk;
}

// The model's folder, and what is asked of it.
ModelFolder Serve::open(model::LoadOptions& load) {
  ModelFolder folder = open_folder(flags_.model, TokenizerNeed::kRequired);
  text::check_chat_tokens(*folder.tokenizer, folder.tokenizer_path);
  const int64_t longest = folder.config.max_positions;
  if (flags_.max_model_len > longest) {
    fail_usage(fmt::format("--max-model-len: expected at most {}, the model's longest sequence, found {}", longest,
                           flags_.max_model_len));
  }
  if (flags_.max_model_len == 0) flags_.max_model_len = std::min(longest, kDefaultModelLen);
  if (flags_.max_step_tokens > 0) load.max_step_tokens = flags_.max_step_tokens;
  if (flags_.max_running == 0) flags_.max_running = model::default_running(flags_.model.device);
  load.sequence_tokens = 0;
  // Steps take what is asked for caches into account.
  load.extra_bytes = static_cast<int64_t>((flags_.cache_gib + flags_.prefix_gib.value_or(0)) * kGiB);
  return folder;
}

int Serve::answer(Ranks& ranks) {
  server::http::HttpServer::check(flags_.http);
  model::LoadOptions load = load_options(flags_.model);
  const ModelFolder folder = open(load);

  std::signal(SIGPIPE, SIG_IGN);
  // These fork: before the weights are there, and before the socket is, which others would keep open.
  const std::vector<int32_t> end_ids(folder.config.eos_ids.begin(), folder.config.eos_ids.end());
  text::GrammarCompiler grammars(*folder.tokenizer, static_cast<int32_t>(folder.config.vocab_size), end_ids);
  ranks.join("serve", folder, flags_.model, load, {flags_.max_running, flags_.max_model_len});
  load.extra_bytes = 0;  // what ranks have room for is known once all have loaded
  server::Figures figures;
  ServeLog log(flags_.logs_requests);
  ServeEvents events(flags_.is_quiet);
  flags_.http.handles_signals = true;
  server::http::HttpServer http(flags_.http, figures, &events, &log);
  ranks.leave_interrupts_to_verb();
  LoadingServer server(http, ranks);
  CacheMemory memory;
  if (ranks.is_alone()) {
    const device::Machine machine = device::machine_of(flags_.model.device);
    const uint64_t step = model::Model::step_bytes(folder.config, load.precision, load.max_step_tokens);
    memory = cache_memory(folder, load, model::room_for_caches(folder.directory, machine, step));
    check_room(memory, machine);
    load.extra_bytes = memory.running + memory.prefixes;
  }
  const model::LoadedModel loaded = load_weights(folder, flags_.model, load, flags_.is_quiet);
  ranks.agree_on(loaded);
  if (!ranks.is_alone()) memory = agreed_memory(folder, load, *loaded.runner, ranks);
  const model::CacheSpec& spec = loaded.runner->cache_spec();
  if (spec.bytes(flags_.max_model_len) > memory.running) {
    fail(ErrorCode::kResourceExhausted,
         fmt::format("--cache-memory: expected room for one answer of {} tokens, {}, found {}; raise it, or lower "
                     "--max-model-len",
                     flags_.max_model_len, format_bytes(static_cast<uint64_t>(spec.bytes(flags_.max_model_len))),
                     format_bytes(static_cast<uint64_t>(memory.running))));
  }
  if (flags_.max_mixed_step_tokens == 0) {
    flags_.max_mixed_step_tokens = model::default_mixed_step_tokens(device::machine_of(flags_.model.device),
                                                                    load.max_step_tokens, flags_.max_running);
  }
  take_memory(ranks, *loaded.runner, memory);
  model::Runner& runner = ranks.lead(*loaded.runner);
  const model::ModelFacts& facts = runner.facts();
  const engine::ReservedBudget budget(spec, memory.running);
  CacheTiers tiers;
  if (memory.prefixes > 0) {
    tiers = make_cache_tiers(flags_.tiers, facts, device::machine_of(flags_.model.device), log);
  }
  engine::PrefixCache prefixes(
      runner, {.budget_bytes = memory.prefixes,
               // No more often than steps end anyway.
               .interval_tokens = std::max(engine::PrefixCacheOptions{}.interval_tokens, load.max_step_tokens),
               .host = tiers.host.get(),
               .disk = tiers.disk.get()});
  engine::EngineOptions options;
  options.waiting = {flags_.max_waiting, flags_.max_waiting_tokens};
  options.steps.max_running = flags_.max_running;
  options.steps.max_mixed_step_tokens = flags_.max_mixed_step_tokens;
  if (memory.prefixes > 0) options.steps.prefixes = &prefixes;
  engine::Engine engine(runner, budget, options);
  server::ServiceOptions service_options;
  service_options.max_preparing = static_cast<size_t>(flags_.max_waiting);
  service_options.page = server::http::chat_page();
  service_options.tiers = tiers.all();
  server::Service service(serving(folder, facts, grammars), engine, figures, service_options, &log);
  if (!flags_.is_quiet) print_figures(loaded, memory);
  if (!flags_.is_quiet) print_cache_tiers(tiers);
  std::optional<LossWords> words;  // from when there may be answers
  const bool has_served = server.serve(service, [&] {
    words.emplace(ranks, http);
    print_address(http.port(), service.serving().model.names.front());
    notify_service_manager("READY=1");
  });
  return has_served && load.bypass.any() ? kExitMismatch : kExitOk;
}

}  // namespace

std::unique_ptr<Verb> add_serve(CLI::App& app) {
  return std::make_unique<Serve>(app);
}

}  // namespace tessera::app
