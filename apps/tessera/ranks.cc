// SPDX-License-Identifier: Apache-2.0
#include "ranks.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "base/env.h"
#include "base/error.h"
#include "base/strings.h"
#include "bench/plan/machine_plan.h"
#include "checkpoint_facts.h"
#include "comm/agreement.h"
#include "comm/echo.h"
#include "comm/message.h"
#include "comm/nccl.h"
#include "comm/tcp_communicator.h"
#include "commit.h"
#include "device/device_choice.h"
#include "program_identity.h"
#include "usage.h"
#include "verb.h"

namespace tessera::app {

namespace {

constexpr double kEndSeconds = 20;       // for others to end their last step, and to give back what they hold
constexpr double kLastWordsSeconds = 5;  // for others to say why they end
constexpr double kTellSeconds = 5;       // for others to be there, by one that fails before it has come
constexpr double kStopSeconds = 1;       // for others to hear that they are stopped, or for either after Ctrl-C
constexpr double kStepTimeouts = 1.25;   // a rank that comes to no step is wedged after so many times its silence

// What rank 0 says where it was told to end: no fault of anybody's.
std::string stopped_with(int code) {
  return fmt::format("stopped, with exit code {}", code);
}

// A launcher may hand a signal to one rank after the other, and end one that does not heed it yet.
bool is_interrupted_soon() {
  constexpr auto kPatience = std::chrono::milliseconds(500);
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!interrupted() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return interrupted();
}

comm::Environment launcher_variables() {
  comm::Environment found;
  for (const char* name : comm::kLauncherVariables) {
    if (auto value = env_value(name)) found[name] = std::move(*value);
  }
  return found;
}

std::string new_secret() {
  std::string secret;
  for (const uint8_t byte : comm::random_nonce()) secret += fmt::format("{:02x}", byte);
  return secret;
}

bool is_open_to_others(const std::string& path) {
  using std::filesystem::perms;
  const std::filesystem::file_status status = std::filesystem::status(path);
  if (!std::filesystem::is_regular_file(status)) return false;  // a pipe, which is gone, say
  return (status.permissions() & (perms::group_all | perms::others_all)) != perms::none;
}

std::string peer_sums_setting() {
  const std::string value = env_value("TESSERA_PEER_SUMS").value_or("auto");
  if (value != "auto" && value != "whole" && value != "shares" && value != "off") {
    fail_usage(
        fmt::format("TESSERA_PEER_SUMS: expected auto, whole, shares or off, found \"{}\"", printable(value, 40)));
  }
  return value;
}

// What gives the rest its meaning.
std::vector<comm::Fact> facts_of_program(const char* verb) {
  return {{"version", fmt::format("{} {}", TESSERA_VERSION, TESSERA_COMMIT)},
          {"program", program_identity()},
          {"verb", verb}};
}

// By the flags that set them, so that whoever reads of a difference knows what to change: verbs call some otherwise,
// and some have none.
std::vector<comm::Fact> facts_of(std::string_view split, std::vector<comm::Fact> facts, const RankFlags& ranks,
                                 const ModelFlags& flags, const model::LoadOptions& load, const Sequences& sequences) {
  const auto flag_of = [&](std::initializer_list<const char*> names, const char* otherwise) {
    const auto has = [&](const char* name) { return ranks.command->get_option_no_throw(name) != nullptr; };
    const auto found = std::find_if(names.begin(), names.end(), has);
    return std::string(found != names.end() ? *found : otherwise);
  };
  std::string forced;
  for (const auto& [op, variant] : load.forced) forced += fmt::format("{}={} ", op, variant);
  const device::Machine machine = device::machine_of(flags.device);
  const comm::Fact settings[] = {
      {"--mode", std::string(ops::to_string(load.precision.input))},
      {"--cache", std::string(ops::to_string(load.precision.cache))},
      {"--rank-split", std::string(split)},
      {"--rank-heads", std::string(load.shard.keeps_all_heads ? kAllHeads : kOwnHeads)},
      {"--rank-caches", std::string(load.shard.shards_entries ? kSharded : kReplicated)},
      {"--rank-timeout", fmt::format("{:g}", ranks.timeout_seconds)},
      {"device", machine.gpu ? machine.gpu->name : "cpu"},
      {flag_of({"--max-step-tokens", "--step-tokens"}, "tokens of a step"), std::to_string(load.max_step_tokens)},
      {flag_of({"--max-running", "--batches"}, "sequences at once"), std::to_string(sequences.count)},
      {flag_of({"--max-model-len", "--contexts"}, "longest sequence"), std::to_string(sequences.longest)},
      {"--allow-inexact", load.allow_inexact ? "given" : "not given"},
      {"TESSERA_FORCE", forced},
      {"TESSERA_BACKENDS", env_value("TESSERA_BACKENDS").value_or("")},
      {"TESSERA_PEER_SUMS", peer_sums_setting()},
      {"TESSERA_BYPASS",
       fmt::format("{}{}{}", load.bypass.routed_experts, load.bypass.shared_experts, load.bypass.compressed_entries)}};
  facts.insert(facts.end(), std::begin(settings), std::end(settings));
  return facts;
}

}  // namespace

Ranks::Ranks(const RankFlags& flags, ModelFlags& model, int end_code)
    : flags_(flags), model_(model), end_code_(end_code) {}

void Ranks::set_up() {
  if (!refuse_stray_rank_flags(flags_)) return;
  // First of all, so that others learn of what is wrong with the rest.
  place_ = comm::place_from(launcher_variables());
  inherited_ = inheritance(flags_.secret_file);
  on_gpus_ = flags_.is_given("--gpus");
  check_rank_flags(flags_);
  peer_sums_setting();  // one line of complaint, before there are others
  if (flags_.split != kAutoSplit) split_ = named_split(flags_.split);
  const char* flag = flag_name();
  const int64_t asked = on_gpus_ ? flags_.gpus : flags_.ranks;
  // The environment's TESSERA_DEVICE counts as given too, but nobody asked for it here.
  const bool is_from_environment = env_value("TESSERA_DEVICE").value_or("") == model_.device;
  if (on_gpus_ && flags_.is_given("--device") && !is_from_environment) {
    fail_usage(fmt::format("--gpus takes cuda:0 on: expected no --device, found {}", printable(model_.device, 40)));
  }
  if (!on_gpus_ && model_.device != "cpu") {
    fail_usage(fmt::format("--ranks takes processors: expected --device cpu, found {}", printable(model_.device, 40)));
  }
  if (flags_.only_last_rank && asked < 2) {
    fail_usage(fmt::format("--only-last-rank: expected {} of 2 or more, found {}", flag, asked));
  }
  if (flags_.only_last_rank && place_.world != 1) {
    fail_usage(fmt::format("--only-last-rank: expected no launcher, found {}", place_.source));
  }
  std::string launcher = "none";
  const bool has_launcher = place_.source != comm::RankPlace{}.source;
  const int job_tasks = place_.job_tasks;
  if (place_.world == 1) {
    // One task or pod for the whole program, which starts its ranks by itself.
    if (has_launcher) {
      launcher = fmt::format("one of a single process ({})", place_.source);
    } else if (place_.job_tasks > 0) {
      launcher = "the script of a SLURM job (SLURM_PROCID without SLURM_STEP_NUM_TASKS); start them with srun";
    }
    place_ = {.rank = flags_.only_last_rank ? static_cast<int>(asked) - 1 : 0, .world = static_cast<int>(asked)};
    starts_others_ = asked > 1 && !flags_.only_last_rank;
  } else if (place_.world != asked) {
    fail_usage(fmt::format("{}: expected {}, the number of ranks that {} speaks of, found {}", flag, place_.world,
                           place_.source, asked));
  }
  if (on_gpus_) {
    model_.device = fmt::format("cuda:{}", place_.gpu);
    // NCCL's multicast takes memory, and not every host's works. Set while there is one thread.
    if (!env_value("NCCL_NVLS_ENABLE")) setenv("NCCL_NVLS_ENABLE", "0", 1);
  }
  // One of a single process may be given what those of many are.
  const bool lacks_launcher = starts_others_ || flags_.only_last_rank || (is_alone() && !has_launcher);
  for (const char* name : {"--rank-secret-file", "--rank-listen"}) {
    if (!lacks_launcher || !flags_.is_given(name)) continue;
    fail_usage(
        fmt::format("{}: expected a launcher that starts the ranks (RANK and WORLD_SIZE), found {}", name, launcher));
  }
  if (is_alone() || flags_.only_last_rank) return;
  // Who asked the job for so many tasks may have meant these.
  if (starts_others_ && job_tasks > 1) {
    print_note(
        fmt::format("{} {}: all on this machine; srun, which starts ranks as tasks of a job (SLURM_NTASKS is "
                    "{}), has not started this one",
                    flag, asked, job_tasks));
  }
  if (!starts_others_ && flags_.secret_file.empty()) {
    fail_usage("--rank-secret-file: expected a file, since a launcher starts the ranks, found none");
  }
  if (!on_gpus_ && model_.threads == 0 && place_.address == "127.0.0.1") {
    model_.threads = std::max(1, device::usable_cores() / place_.world);
  }
}

Ranks::~Ranks() = default;

// The same on all ranks that were told the same; what came out is among what they agree on.
template <class Stored>
void Ranks::choose_split(const model::Config& config, const ModelFlags& model, const model::LoadOptions& load,
                         const Sequences& sequences, const Stored& stored) {
  const bool is_split_named = flags_.split != kAutoSplit, are_heads_named = flags_.heads != kAutoHeads;
  const bool are_caches_auto = flags_.caches == kAutoCaches;
  if (!on_gpus_) {
    if (!is_split_named) split_ = cpu_split(config, place_.world);
  } else if (!is_split_named || !are_heads_named || are_caches_auto) {
    const device::Machine machine = device::machine_of(model.device);
    const model::StoredModel& weights = stored();
    bench::PlanChoice choice;
    if (is_split_named) choice.attention = split_.attention, choice.experts = split_.experts;
    if (!are_caches_auto) choice.shards_entries = flags_.caches == kSharded;
    const RankSplit best =
        gpu_split(weights, place_.world, *machine.gpu, {sequences, load.max_step_tokens, load.precision}, choice);
    if (is_split_named) {
      split_.shards_entries = best.shards_entries, split_.keeps_all_heads = best.keeps_all_heads;
      if (are_caches_auto && best.shards_entries && !is_follower()) {
        if (best.fits) {
          print_note("--rank-caches sharded: what is planned for fits in no other way");
        } else {
          print_warning("--rank-caches sharded: takes the least memory; what is planned for does not fit");
        }
      }
    } else {
      split_ = best;
      if (!is_follower() && !split_.why.empty()) print_note(split_.why);
    }
  }
  // Whoever has whole attention has all heads anyway.
  if (are_heads_named) {
    split_.keeps_all_heads = flags_.heads == kAllHeads && split_.attention == model::AttentionSplit::kByGroup;
  }
  if (!are_caches_auto) split_.shards_entries = flags_.caches == kSharded;
}

// Before anybody is started or waited for.
void Ranks::check_cut(const model::Config& config) const {
  try {
    for (const model::WeightRow& row : model::make_weight_spec(config, 0)) model::slice_of(row, config, shard());
  } catch (const Error& error) {
    fail_usage(fmt::format("{}: expected a number that divides what --rank-split {} cuts, found {}: {}", flag_name(),
                           split_.name, place_.world, error.what()));
  }
}

void Ranks::join(const char* verb, const ModelFolder& folder, const ModelFlags& model, model::LoadOptions& load,
                 const Sequences& sequences) {
  choose_step_tokens(folder, model, place_.world, load);
  if (is_alone()) return;
  const auto choose = [&](const Sequences& known) {
    choose_split(folder.config, model, load, known,
                 [&] { return model::checkpoint_model(folder.directory, folder.config); });
    check_cut(folder.config);
  };
  join_on(verb, model, load, sequences, choose, [&] { return checkpoint_facts(folder.directory); });
}

void Ranks::join_made(const char* verb, const model::StoredModel& stored, const std::string& made,
                      const ModelFlags& model, model::LoadOptions& load, const Sequences& sequences) {
  if (is_alone()) return;
  const auto choose = [&](const Sequences& known) {
    choose_split(stored.config, model, load, known, [&]() -> const model::StoredModel& { return stored; });
    check_cut(stored.config);
  };
  join_on(verb, model, load, sequences, choose, [&] { return std::vector<comm::Fact>{{"checkpoint", made}}; });
}

template <class Choose, class Weights>
void Ranks::join_on(const char* verb, const ModelFlags& model, model::LoadOptions& load, Sequences sequences,
                    const Choose& choose, const Weights& weights) {
  choose(sequences);
  load.shard = shard();
  if (flags_.only_last_rank) {
    make_echo(model);
    load.comm = comm_.get();
    return;
  }
  comm::BootstrapOptions options = bootstrap_options();
  // Once on a machine, not for each of its ranks; of a secret that has been taken.
  if (!starts_others_ && !inherited_ && place_.local_rank == 0 && is_open_to_others(flags_.secret_file)) {
    log_.write(LogLevel::kWarning, fmt::format("{}: others than its owner can read or change the ranks' secret (chmod "
                                               "600)",
                                               printable(flags_.secret_file)));
  }
  comm::Socket listener;
  if (!is_follower()) options.watch = this;
  if (starts_others_) {
    listener = comm::listen_at("127.0.0.1", 0);
    options.place.port = place_.port = comm::port_of(listener);
    others_.start(verb, place_.world, place_.port, options.secret);
  }
  meet(options, std::move(listener));
  comm::agree(*bootstrap_, facts_of_program(verb));
  // A prompt is known to rank 0 alone.
  if (const int64_t longest = all_of(sequences.longest).front(); sequences.longest == 0 && longest > 0) {
    sequences.longest = load.sequence_tokens = longest;
    choose(sequences);
    load.shard = shard();
  }
  comm::agree(*bootstrap_, facts_of(split_.name, weights(), flags_, model, load, sequences));
  if (on_gpus_) {
    const device::Machine machine = device::machine_of(model.device);
    comm::differ(*bootstrap_, {"GPU", machine.gpu->uuid},
                 "expected one for each rank (LOCAL_RANK says which of its machine's a rank has)");
    executor_ = device::make_executor(machine, 1);
    comm::NcclOptions nccl;
    nccl.limit_seconds = step_seconds();
    comm_ = comm::make_nccl(*bootstrap_, executor_->memory(), nccl);
    comm_->begin_to_connect(*executor_);
    std::string why_not = "TESSERA_PEER_SUMS=off";
    const std::optional<comm::PeerOptions> peer = peer_options();
    if (peer) {
      why_not.clear();
      comm_ = comm::make_peer(*bootstrap_, std::move(comm_), why_not, *peer);
      if (!why_not.empty() && !is_follower()) {
        log_.write(LogLevel::kWarning, fmt::format("small sums go through NCCL: {}", why_not));
      }
    }
    if (!why_not.empty() && split_.shards_entries) {
      if (flags_.caches == kSharded && peer) {  // else meet_ranks() finds out
        tessera::fail(ErrorCode::kUnsupported,
                      fmt::format("--rank-caches sharded: expected GPUs that reach each other's memory, "
                                  "found {}; say replicated",
                                  why_not));
      }
      if (flags_.caches == kAutoCaches) {
        split_.shards_entries = load.shard.shards_entries = false;  // the same on all ranks, as the reason is
        if (!is_follower()) {
          log_.write(LogLevel::kWarning,
                     fmt::format("each rank has all caches, though what was planned for does not fit "
                                 "so: {}",
                                 why_not));
        }
      }
    }
  } else {
    comm_ = comm::make_tcp(*bootstrap_, step_seconds());
  }
  load.comm = comm_.get();
}

// Returns when all ranks are there.
void Ranks::meet(const comm::BootstrapOptions& options, comm::Socket listener) {
  has_come_ = true;
  // A terminal's Ctrl-C and a launcher's SIGTERM go to all: it is rank 0 that ends the others.
  const auto leave_signals_to_rank_0 = [] {
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, SIG_IGN);
  };
  if (inherited_) leave_signals_to_rank_0();  // it watches this one already
  if (!is_follower()) {
    stops_on_interrupt_ = true;
    interrupts_.emplace([this] {
      if (has_met_) stop(end_code_);  // before, fault() sees it
    });
  }
  try {
    bootstrap_ = std::make_unique<comm::Bootstrap>(options, &log_, this, std::move(listener));
  } catch (const std::exception& error) {
    // What fault() said, not what another rank failed with before.
    const bool is_stopped = std::string_view(error.what()).find(stopped_with(end_code_)) != std::string_view::npos;
    if (stops_on_interrupt_ && is_stopped) stop(end_code_);
    throw;
  }
  has_met_ = true;
  if (inherited_) outlive_rank_0();
  if (is_follower()) leave_signals_to_rank_0();
}

// Rank 0, while it waits for the others.
std::string Ranks::fault() {
  const std::string why = starts_others_ ? others_.fault() : "";
  // Asked behind it: one that it has started may have ended by the same Ctrl-C.
  return interrupted() ? comm::failed_rank(0, static_cast<size_t>(place_.world)) + stopped_with(end_code_) : why;
}

comm::BootstrapOptions Ranks::bootstrap_options() const {
  comm::BootstrapOptions options;
  options.place = place_;
  options.secret = starts_others_ ? new_secret() : inherited_ ? inherited_->secret : read_secret(flags_.secret_file);
  options.listen_address = flags_.listen, options.listen_source = "--rank-listen";
  options.join_seconds = flags_.wait_seconds;
  options.lost_seconds = flags_.timeout_seconds, options.is_ending = &interrupted();
  options.heartbeat_seconds = std::min(1.0, flags_.timeout_seconds / 15);  // whatever the others' patience
  return options;
}

// None: all sums go through NCCL.
std::optional<comm::PeerOptions> Ranks::peer_options() const {
  const std::string setting = peer_sums_setting();
  if (setting == "off") return std::nullopt;
  comm::PeerOptions options{.limit_seconds = step_seconds()};
  if (setting != "auto") options.way = setting == "whole" ? comm::PeerWay::kWhole : comm::PeerWay::kShares;
  return options;
}

void Ranks::make_echo(const ModelFlags& model) {
  const std::optional<comm::PeerOptions> peer = peer_options();
  if (!on_gpus_ || !peer || world() > device::kMaxPeers) {
    comm_ = comm::make_echo(place_.rank, world());
    return;
  }
  executor_ = device::make_executor(device::machine_of(model.device), 1);
  try {
    comm_ = comm::make_peer_echo(place_.rank, world(), *peer);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    log_.write(LogLevel::kWarning, fmt::format("small sums are no kernels that poll: {}", error.what()));
    comm_ = comm::make_echo(place_.rank, world());
  }
}

double Ranks::step_seconds() const {
  return kStepTimeouts * flags_.timeout_seconds;
}

void Ranks::agree_on(const model::LoadedModel& loaded) {
  if (is_alone()) return;
  std::map<std::string, std::set<std::string>> kernels;
  for (const ops::PlanLine& line : loaded.plan) kernels[line.op].insert(line.chosen);
  std::vector<comm::Fact> facts;
  for (const auto& [op, chosen] : kernels) {
    facts.push_back({"kernels of " + op, fmt::format("{}", fmt::join(chosen, " "))});
  }
  comm::agree(*bootstrap_, facts);
  loaded.runner->meet_ranks();
}

std::vector<int64_t> Ranks::all_of(int64_t own) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&own);
  std::vector<int64_t> values;
  for (const std::vector<uint8_t>& one : bootstrap_->all_gather({bytes, sizeof(own)})) {
    TESSERA_CHECK(one.size() == sizeof(own), "a number of every rank");
    std::memcpy(&values.emplace_back(), one.data(), sizeof(own));
  }
  return values;
}

int64_t Ranks::least(int64_t own) {
  return is_alone() ? own : std::ranges::min(all_of(own));
}

model::Runner& Ranks::lead(model::Runner& own) {
  if (is_alone()) return own;
  mirrored_ = std::make_unique<model::MirroredRunner>(own, *bootstrap_);
  return *mirrored_;
}

void Ranks::end() {
  if (bootstrap_ == nullptr) return;
  mirrored_.reset();
  // All have done all that was asked before any of them takes its connections down.
  bootstrap_->all_gather({}, kEndSeconds);
  bootstrap_->leave();
  others_.end(kEndSeconds);
}

void Ranks::follow(model::Runner& own) {
  model::follow(own, *bootstrap_);
}

void Ranks::stop(int code) noexcept {
  stop_code_ = code;
  if (bootstrap_ != nullptr) bootstrap_->fail(stopped_with(code));
  others_.end(kStopSeconds);
  _exit(code);
}

int Ranks::fail(const Fault& fault) {
  while (stop_code_ >= 0) pause();  // what broke is what was stopped
  if (bootstrap_ != nullptr) bootstrap_->fail(fault.message);
  const int code = say(fault);
  // Who started this one, or was to be started by it, sees how it ends.
  if (!has_come_ && !inherited_ && !starts_others_ && !is_echo()) tell_of_failure(fault.message);
  return code;
}

// The others would wait --rank-wait for this one.
void Ranks::tell_of_failure(const std::string& why) const {
  try {
    comm::BootstrapOptions options = bootstrap_options();
    options.join_seconds = kTellSeconds;  // --rank-wait may be what is wrong
    comm::tell_others(options, why);
  } catch (const Error&) {
    // Without a secret nobody listens.
  }
}

// What ends this rank, and for rank 0 what ended those it has started. Returns the exit code.
int Ranks::say(const Fault& fault) {
  for (const int code : {kExitOk, kExitCancelled}) {  // behind what this rank was about to do, perhaps
    const std::string words = comm::failed_rank(0, static_cast<size_t>(place_.world)) + stopped_with(code);
    if (is_follower() && fault.message.find(words) != std::string::npos) return code;
  }
  const bool has_reader = inherited_ && inherited_->words.is_open();
  if (has_reader && hand_over(inherited_->words.descriptor(), {place_.rank, fault})) return fault.code;
  if (!starts_others_) {
    print_error(is_follower() ? named(place_.rank, place_.world, fault.message) : fault.message);
    return fault.code;
  }
  others_.end(interrupted() ? kStopSeconds : kLastWordsSeconds);
  std::vector<RankEnd> ends = others_.ends();
  ends.push_back({0, fault});
  const GroupEnd end = end_together(std::move(ends), place_.world);
  for (const std::string& line : end.lines) print_error(line);
  return end.code;
}

// On the bootstrap's thread, while another may wait for what never comes, or on one that goes on whatever its step
// threw.
void Ranks::lost(int rank, const std::string& message) {
  // Whoever reads the messages may have stopped reading: then this ends without the last of them.
  std::signal(SIGALRM, [](int) { _exit(kExitDevice); });
  alarm(static_cast<unsigned>(2 * kLastWordsSeconds));
  // A launcher's rank may have ended by the signal that this one stops by; or the launcher ends all others for it: what
  // was seen before the signal is said.
  const bool was_interrupted = interrupted();
  const bool is_interrupted = stops_on_interrupt_ && message.starts_with(comm::kLostRank) && is_interrupted_soon();
  if (int code = is_interrupted ? end_code_ : stop_code_.load(); code >= 0) {
    if (is_interrupted && !was_interrupted) {
      print_error(message);
      code = kExitCancelled;
    }
    others_.end(kStopSeconds);
    _exit(code);
  }
  {
    const std::lock_guard<std::mutex> hold(tell_lock_);
    // Addresses and paths, of which the message may speak, are no stranger's business.
    const char* what = message.starts_with(comm::kLostRank) ? "was lost" : "failed";
    if (tell_ != nullptr) tell_(fmt::format("rank {} {}", rank, what));
  }
  // Rank 0 says no more where it is the one that is lost, not one that failed: its end of the pipe may yet be open.
  if (rank == 0 && inherited_ && message.starts_with(comm::kLostRank)) inherited_->words.close();
  _exit(say({kExitDevice, message}));
}

}  // namespace tessera::app
