// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which rank this process is, as its flags or its launcher say.
#include <map>
#include <string>

namespace tessera::comm {

struct RankPlace {
  int rank = 0, world = 1;
  int local_rank = 0;                 // of those on its machine
  int gpu = 0;                        // which of the GPUs that it sees
  std::string address = "127.0.0.1";  // of rank 0
  std::string address_source = {};    // who said so: "MASTER_ADDR", "LWS_LEADER_ADDRESS"; empty: nobody
  int port = 29500;
  int job_tasks = 0;  // alone in the script of a SLURM job: how many tasks that has, of which srun started none
  std::string source = "alone";  // who said so: "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "LWS_WORKER_INDEX"
};

// What place_from() looks at.
// clang-format off
constexpr const char* kLauncherVariables[] = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES", "SLURM_NTASKS",
    "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID"};
// clang-format on
// Those of them that are set, by name.
using Environment = std::map<std::string, std::string>;

// The first launcher that says both rank and number of ranks: RANK and WORLD_SIZE (with LOCAL_RANK), Open MPI's,
// SLURM's, LeaderWorkerSet's. MASTER_ADDR and MASTER_PORT hold for all; without the first LWS_LEADER_ADDRESS, then this
// machine, which a launcher that speaks of several does not get. A task of Open MPI or SLURM that sees one GPU
// (CUDA_VISIBLE_DEVICES) has that one, all else the one of its local rank: its rank where nothing says one and rank 0
// is on this machine, the first where rank 0 is at an address. Without any launcher one rank, as the script of a SLURM
// job is, which has a rank's number but is no task of srun's. RANK that another
// launcher contradicts is refused, but torchrun's (TORCHELASTIC_RUN_ID), whose agents may themselves be tasks. Throws
// kInvalidArgument naming the variable.
RankPlace place_from(const Environment& environment);

}  // namespace tessera::comm
