// SPDX-License-Identifier: Apache-2.0
#include "rank_flags.h"

#include <fmt/format.h>

#include "base/error.h"
#include "base/file.h"
#include "base/strings.h"
#include "comm/bootstrap.h"
#include "comm/communicator.h"
#include "rank_processes.h"
#include "rank_split.h"
#include "usage.h"

namespace tessera::app {

void add_rank_flags(CLI::App& command, RankFlags& flags) {
  flags.command = &command;
  command
      .add_option("--gpus", flags.gpus,
                  "Share the model over N GPUs, cuda:0 on, a process each; of 1 the other flags of ranks are idle")
      ->type_name("N")
      ->check(not_empty("a whole number"))
      ->group("Ranks");
  command.add_option("--ranks", flags.ranks, "Share the model over N processes of --device cpu: to try it, not fast")
      ->type_name("N")
      ->check(not_empty("a whole number"))
      ->group("Ranks");
  command
      .add_option("--rank-split", flags.split,
                  "Cut experts (each whole: one rank's results), heads too, heads and experts' width, or that alone; "
                  "auto: GPUs by tessera plan")
      ->type_name("auto|experts|heads|width|experts-width")
      ->capture_default_str()
      ->group("Ranks");
  command
      .add_option("--rank-heads", flags.heads,
                  "Whose maps of attention's heads a rank holds: its own, or all, for faster prompts; auto: all where "
                  "memory allows")
      ->type_name("auto|own|all")
      ->capture_default_str()
      ->group("Ranks");
  command
      .add_option("--rank-caches", flags.caches,
                  "Each rank has all compressed entries, or all ranks one copy, for more tokens in all; "
                  "auto: that where nothing else fits")
      ->type_name("auto|replicated|sharded")
      ->capture_default_str()
      ->group("Ranks");
  command
      .add_option("--rank-secret-file", flags.secret_file,
                  "File with a secret of 16 characters or more, the same for all ranks: where a launcher starts them")
      ->type_name("FILE")
      ->check(not_empty("a file"))
      ->group("Ranks");
  command
      .add_option("--rank-listen", flags.listen,
                  "Address at which rank 0 awaits the others; * is every network "
                  "[MASTER_ADDR]")
      ->type_name("ADDRESS")
      ->check(not_empty("an address"))
      ->group("Ranks");
  command.add_option("--rank-wait", flags.wait_seconds, "Seconds in which all ranks have to come")
      ->type_name("S")
      ->check(not_empty("a number"))
      ->capture_default_str()
      ->group("Ranks");
  command.add_option("--rank-timeout", flags.timeout_seconds, "Seconds of silence after which a rank is lost")
      ->type_name("S")
      ->check(not_empty("a number"))
      ->capture_default_str()
      ->group("Ranks");
}

bool refuse_stray_rank_flags(const RankFlags& flags) {
  if (flags.is_given("--gpus") || flags.is_given("--ranks")) return true;
  for (const char* name : {"--rank-split", "--rank-heads", "--rank-caches", "--rank-secret-file", "--rank-listen",
                           "--rank-wait", "--rank-timeout"}) {
    if (flags.is_given(name)) fail_usage(fmt::format("{}: expected --gpus or --ranks besides, found neither", name));
  }
  return false;
}

void check_rank_flags(const RankFlags& flags) {
  const bool on_gpus = flags.is_given("--gpus");
  if (on_gpus && flags.is_given("--ranks")) fail_usage("give --gpus or --ranks, not both");
  const char* flag = on_gpus ? "--gpus" : "--ranks";
  const int64_t asked = on_gpus ? flags.gpus : flags.ranks;
  if (asked < 1 || asked > comm::kMaxWorld) {
    fail_usage(fmt::format("{}: expected 1 to {}, found {}", flag, comm::kMaxWorld, asked));
  }
  if (flags.heads != kAutoHeads && flags.heads != kOwnHeads && flags.heads != kAllHeads) {
    fail_usage(fmt::format("--rank-heads: expected auto, own or all, found \"{}\"", printable(flags.heads, 40)));
  }
  if (flags.caches != kAutoCaches && flags.caches != kReplicated && flags.caches != kSharded) {
    fail_usage(
        fmt::format("--rank-caches: expected auto, replicated or sharded, found \"{}\"", printable(flags.caches, 40)));
  }
  const auto check = [](const char* name, double value, double least) {
    if (value >= least && value <= 1e6) return;
    fail_usage(fmt::format("{}: expected {} to 1000000, found {}", name, least, value));
  };
  check("--rank-wait", flags.wait_seconds, 0.1);
  check("--rank-timeout", flags.timeout_seconds, 0.5);
  if (!flags.listen.empty() && flags.listen != "*" && !comm::may_name_host(flags.listen)) {
    fail_usage(fmt::format("--rank-listen: expected a host's name or IP address, without a port, or *, found \"{}\"",
                           printable(flags.listen, 80)));
  }
}

std::string read_secret(const std::string& path) {
  std::string secret;
  try {
    secret = read_file(path, kMaxSecretBytes);
  } catch (const Error& error) {
    tessera::fail(error.code(), fmt::format("--rank-secret-file {}", error.what()));
  }
  while (secret.ends_with('\n') || secret.ends_with('\r')) secret.pop_back();
  const size_t found = secret.find_first_not_of(" \t\r\n") == std::string::npos ? 0 : secret.size();
  if (found < comm::kLeastSecretBytes) {
    fail_usage(fmt::format("--rank-secret-file {}: expected at least {} characters, found {}", printable(path),
                           comm::kLeastSecretBytes, found));
  }
  return secret;
}

}  // namespace tessera::app
