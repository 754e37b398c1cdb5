// SPDX-License-Identifier: Apache-2.0
#include "comm/rank_place.h"

#include <fmt/format.h>

#include <charconv>
#include <optional>

#include "base/error.h"
#include "base/strings.h"
#include "comm/communicator.h"
#include "comm/tcp.h"

namespace tessera::comm {

namespace {

struct Launcher {
  const char *rank, *world, *local;
  const char *local_world, *machines;  // how many ranks this machine has, or how many machines there are; "": not said
  const char* address;                 // who is asked for rank 0's
  const char* job_world;               // of a job whose script has rank 0's number and is no rank; "": always a rank
};

constexpr const char *kMasterAddress = "MASTER_ADDR", *kLeaderAddress = "LWS_LEADER_ADDRESS";

constexpr Launcher kLaunchers[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "", kMasterAddress, ""},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "",
     kMasterAddress, ""},
    // srun alone sets SLURM_STEP_NUM_TASKS. The script that sbatch starts has SLURM_PROCID=0 too, and the job's
    // SLURM_NTASKS, which srun --preserve-env (salloc's shell) leaves as it is in steps of one task.
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_STEP_NUM_NODES", kMasterAddress,
     "SLURM_NTASKS"},
    {"LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "", "", "LWS_GROUP_SIZE", kLeaderAddress, ""},  // a pod each
};

// Nothing where the variable is not set, or is no number.
std::optional<int> number_in(const Environment& environment, const char* name) {
  const auto found = environment.find(name);
  if (found == environment.end()) return std::nullopt;
  const std::string& text = found->second;
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

int number_of(const Environment& environment, const char* name, int least, int most) {
  const std::optional<int> value = number_in(environment, name);
  if (!value || *value < least || *value > most) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("{}: expected {} to {}, found \"{}\"", name, least, most, printable(environment.at(name), 40)));
  }
  return *value;
}

// Half of an answer is a mistake, not silence.
[[noreturn]] void refuse_half(const char* there, const char* lacking) {
  fail(ErrorCode::kInvalidArgument, fmt::format("{} is set: expected {} too, found nothing", there, lacking));
}

// Whether it is the script of a job, not one of the tasks that it may start.
bool is_job_script(const Environment& environment, const Launcher& launcher) {
  return *launcher.job_world != 0 && !environment.contains(launcher.world) &&
         number_in(environment, launcher.rank) == 0;
}

bool says(const Environment& environment, const Launcher& launcher) {
  if (!environment.contains(launcher.rank) || is_job_script(environment, launcher)) return false;
  if (!environment.contains(launcher.world)) refuse_half(launcher.rank, launcher.world);
  return true;
}

// Where no launcher says which rank this is. One rank needs no number.
void refuse_world_alone(const Environment& environment) {
  for (const Launcher& launcher : kLaunchers) {
    if (environment.contains(launcher.world) && number_of(environment, launcher.world, 1, kMaxWorld) > 1) {
      refuse_half(launcher.world, launcher.rank);
    }
  }
}

// A RANK that every task was handed, where another launcher numbers them: the same for all, they would wait for ranks
// that nobody is. One launcher inside another is no contradiction: mpirun under SLURM or in a pod (which is why RANK
// alone is looked at), torchrun under any, a group of another size than the outer one's, or one that was started by
// hand in the first of its tasks, such as the script of a SLURM job.
void refuse_contradiction(const Environment& environment, const RankPlace& place) {
  const Launcher& used = kLaunchers[0];
  if (place.source != used.rank || environment.contains("TORCHELASTIC_RUN_ID")) return;
  for (const Launcher& other : kLaunchers) {
    const int rank = number_in(environment, other.rank).value_or(0);
    if (rank == 0 || rank == place.rank || number_in(environment, other.world) != place.world) continue;
    fail(ErrorCode::kInvalidArgument,
         fmt::format("{}: expected {}, which {} says of {} ranks as {} does, found \"{}\"; unset {} and {}, or {}",
                     used.rank, rank, other.rank, place.world, used.world, place.rank, used.rank, used.world,
                     other.rank));
  }
}

// Without a word of it: all ranks that find rank 0 on this machine are on it, others may each have one of their own.
int local_rank_of(const Environment& environment, const Launcher& launcher, const RankPlace& place, bool has_address) {
  if (!environment.contains(launcher.local)) {
    const bool is_here =
        !has_address || place.address == "localhost" || place.address == "::1" || place.address.starts_with("127.");
    return is_here ? place.rank : 0;
  }
  const int most = environment.contains(launcher.local_world)
                       ? number_of(environment, launcher.local_world, 1, place.world)
                       : place.world;
  return number_of(environment, launcher.local, 0, most - 1);
}

// Whether it shows each task a GPU of its own. Others, and this program, let all ranks of a machine see the same.
bool sees_own_gpu(const Environment& environment, const Launcher& launcher) {
  const auto visible = environment.find("CUDA_VISIBLE_DEVICES");
  return launcher.rank != std::string_view("RANK") && visible != environment.end() &&
         visible->second.find(',') == std::string::npos;
}

// The variable that says that ranks are on other machines too; null: none does.
const char* of_several_machines(const Environment& environment, const Launcher& launcher, int world) {
  if (world == 1) return nullptr;
  if (environment.contains(launcher.local_world) && number_of(environment, launcher.local_world, 1, world) < world) {
    return launcher.local_world;
  }
  if (environment.contains(launcher.machines) && number_of(environment, launcher.machines, 1, kMaxWorld) > 1) {
    return launcher.machines;
  }
  return nullptr;
}

}  // namespace

RankPlace place_from(const Environment& environment) {
  RankPlace place;
  if (environment.contains("MASTER_PORT")) place.port = number_of(environment, "MASTER_PORT", 1, 65535);
  for (const char* name : {kLeaderAddress, kMasterAddress}) {
    if (const auto found = environment.find(name); found != environment.end()) {
      place.address = found->second, place.address_source = name;
    }
  }
  const bool has_address = !place.address_source.empty();
  const Launcher* chosen = nullptr;
  for (const Launcher& launcher : kLaunchers) {
    if (is_job_script(environment, launcher)) {
      place.job_tasks = number_in(environment, launcher.job_world).value_or(1);
    }
    if (!says(environment, launcher)) continue;
    chosen = &launcher;
    place.world = number_of(environment, launcher.world, 1, kMaxWorld);
    place.rank = number_of(environment, launcher.rank, 0, place.world - 1);
    place.local_rank = local_rank_of(environment, launcher, place, has_address);
    place.source = launcher.rank;
    place.gpu = sees_own_gpu(environment, launcher) ? 0 : place.local_rank;
    break;
  }
  if (chosen == nullptr) {
    refuse_world_alone(environment);
    return place;
  }
  refuse_contradiction(environment, place);
  if (has_address && place.world > 1 && !may_name_host(place.address)) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("{}: expected a host's name or IP address, without a port, found \"{}\"", place.address_source,
                     printable(place.address, 80)));
  }
  const char* elsewhere = of_several_machines(environment, *chosen, place.world);
  if (elsewhere != nullptr && !has_address) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format(
             "{}: expected the address of rank 0's machine, since {} is {} and there are {} ranks, found nothing",
             chosen->address, elsewhere, printable(environment.at(elsewhere), 40), place.world));
  }
  return place;
}

}  // namespace tessera::comm
