// SPDX-License-Identifier: Apache-2.0
#pragma once
// The flags that say how several processes share a model (docs/several_gpus.md).
#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

namespace tessera::app {

struct RankFlags {
  const CLI::App* command = nullptr;  // of which they are
  int64_t ranks = 0, gpus = 0;
  std::string split = "auto", heads = "auto", caches = "auto", secret_file, listen;
  double wait_seconds = 300, timeout_seconds = 15;
  bool only_last_rank = false;  // without the others (comm/echo.h): for measurements. It sees most of a prompt

  bool is_given(const char* name) const { return command->count(name) > 0; }
};

// Adds --gpus, --ranks, --rank-split, --rank-heads, --rank-caches, --rank-secret-file, --rank-listen, --rank-wait and
// --rank-timeout.
void add_rank_flags(CLI::App& command, RankFlags& flags);

// Whether --gpus or --ranks is given. Throws kInvalidArgument where neither is, but another of the flags.
bool refuse_stray_rank_flags(const RankFlags& flags);
// Where one is: throws kInvalidArgument for values that are none, whoever starts the ranks; but for --rank-split's
// (named_split()).
void check_rank_flags(const RankFlags& flags);

// What --rank-secret-file names. Throws kInvalidArgument, naming it, for a secret that is too short.
std::string read_secret(const std::string& path);

}  // namespace tessera::app
