// SPDX-License-Identifier: Apache-2.0
#include "comm/rank_place.h"

#include <fmt/format.h>

#include <charconv>

#include "base/error.h"
#include "base/strings.h"
#include "comm/communicator.h"

namespace tessera::comm {

namespace {

struct Launcher {
  const char *rank, *world, *local;
};

constexpr Launcher kLaunchers[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"},
    {"LWS_WORKER_INDEX", "LWS_GROUP_SIZE", ""},
};

int number_of(const Environment& environment, const char* name, int least, int most) {
  const std::string& text = environment.at(name);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least || value > most) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("{}: expected {} to {}, found \"{}\"", name, least, most, printable(text, 40)));
  }
  return value;
}

// Half of an answer is a mistake, not silence.
bool says(const Environment& environment, const Launcher& launcher) {
  if (!environment.contains(launcher.rank)) return false;
  if (environment.contains(launcher.world)) return true;
  fail(ErrorCode::kInvalidArgument,
       fmt::format("{} is set: expected {} too, found nothing", launcher.rank, launcher.world));
}

}  // namespace

RankPlace place_from(const Environment& environment) {
  RankPlace place;
  for (const Launcher& launcher : kLaunchers) {
    if (!says(environment, launcher)) continue;
    place.world = number_of(environment, launcher.world, 1, kMaxWorld);
    place.rank = number_of(environment, launcher.rank, 0, place.world - 1);
    if (environment.contains(launcher.local)) {
      place.local_rank = number_of(environment, launcher.local, 0, place.world - 1);
    }
    place.source = launcher.rank;
    break;
  }
  if (environment.contains("MASTER_PORT")) place.port = number_of(environment, "MASTER_PORT", 1, 65535);
  for (const char* name : {"LWS_LEADER_ADDRESS", "MASTER_ADDR"}) {
    if (const auto found = environment.find(name); found != environment.end()) place.address = found->second;
  }
  return place;
}

}  // namespace tessera::comm
