// SPDX-License-Identifier: Apache-2.0
#include "base/env.h"

#include <array>
#include <cstdlib>
#include <cstring>

#include "base/error.h"

namespace tessera {

namespace {

constexpr std::array kVariables = {
    EnvVariable{"TESSERA_MODEL", "default of --model"},
    EnvVariable{"TESSERA_DEVICE", "default of --device"},
    EnvVariable{"TESSERA_FORCE", "OP=VARIANT[,...]: bind these ops to these variants, to bisect a wrong kernel"},
    EnvVariable{"TESSERA_BACKENDS", "NAME[,...]: use only these backends, and the reference where they lack an op"},
    EnvVariable{"TESSERA_BYPASS",
                "PART[,...]: leave a part of the model out, to bisect; the program says so and exits 7"},
    EnvVariable{"TESSERA_MEMORY_BYTES", "pretend that this many bytes of memory are available"},
    EnvVariable{"TESSERA_PEER_SUMS",
                "auto, whole, shares or off: whether and how GPUs of one machine add up sums in each other's memory "
                "[auto]"},
    EnvVariable{"TESSERA_PLACEMENT",
                "off: neither hold threads on processors nor deal memory out over nodes; on: hold them even where "
                "others may want the same [auto]"},
    EnvVariable{"TESSERA_API_KEY", "the key that `tessera bench serve` gives to the server"},
    EnvVariable{"RANK", "with --ranks or --gpus: which rank this process is, as its launcher says; needs WORLD_SIZE"},
    EnvVariable{"WORLD_SIZE", "number of ranks that the launcher started"},
    EnvVariable{"LOCAL_RANK", "which of its machine's ranks, and so GPUs, this process is [0]"},
    EnvVariable{"LOCAL_WORLD_SIZE", "how many of the ranks are on this machine"},
    EnvVariable{"MASTER_ADDR", "where rank 0 is [127.0.0.1, if all ranks are on one machine]"},
    EnvVariable{"MASTER_PORT", "the port at which it listens for the others [29500]"},
    EnvVariable{"OMPI_COMM_WORLD_RANK", "Open MPI's RANK"},
    EnvVariable{"OMPI_COMM_WORLD_SIZE", "Open MPI's WORLD_SIZE"},
    EnvVariable{"OMPI_COMM_WORLD_LOCAL_RANK", "Open MPI's LOCAL_RANK"},
    EnvVariable{"OMPI_COMM_WORLD_LOCAL_SIZE", "Open MPI's LOCAL_WORLD_SIZE"},
    EnvVariable{"SLURM_PROCID", "SLURM's RANK"},
    EnvVariable{"SLURM_STEP_NUM_TASKS", "SLURM's WORLD_SIZE, of what srun starts"},
    EnvVariable{"SLURM_NTASKS", "how many tasks a SLURM job has, whose script is none of them"},
    EnvVariable{"SLURM_LOCALID", "SLURM's LOCAL_RANK"},
    EnvVariable{"SLURM_STEP_NUM_NODES", "on how many machines SLURM's ranks are"},
    EnvVariable{"LWS_WORKER_INDEX", "LeaderWorkerSet's RANK"},
    EnvVariable{"LWS_GROUP_SIZE", "LeaderWorkerSet's WORLD_SIZE"},
    EnvVariable{"LWS_LEADER_ADDRESS", "LeaderWorkerSet's MASTER_ADDR"},
    EnvVariable{"CUDA_VISIBLE_DEVICES", "CUDA's own: a task of Open MPI or SLURM that sees one GPU takes that one"},
    EnvVariable{"TORCHELASTIC_RUN_ID", "torchrun's own: its RANK is taken where the task around it has another number"},
    EnvVariable{"NCCL_NVLS_ENABLE", "NCCL's own: 1 lets it use NVLink multicast [0]"},
    EnvVariable{"HWLOC_SYNTHETIC",
                "an imagined machine (hwloc(7)) whose placement `tessera devices` shows; nobody is pinned"},
    EnvVariable{"LD_LIBRARY_PATH", "folders in which `tessera devices` looks for CUDA libraries of two releases"},
    EnvVariable{"XDG_STATE_HOME", "where `tessera chat` keeps its history [~/.local/state]"},
    EnvVariable{"HOME", "the user's folder"},
#ifdef TESSERA_CUDA_EMULATED
    EnvVariable{"TESSERA_EMULATED_SUMS",
                "exact or fast: whether the emulated GPU adds Blackwell's products to the bit or in FP32 [exact]"},
#endif
    EnvVariable{"NO_COLOR", "any value: no colours and no moving progress bars"},
};

}  // namespace

std::span<const EnvVariable> env_variables() {
  return kVariables;
}

std::optional<std::string> env_value(const char* name) {
  bool is_listed = false;
  for (const EnvVariable& variable : kVariables) is_listed = is_listed || std::strcmp(variable.name, name) == 0;
  TESSERA_CHECK(is_listed, name);
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

}  // namespace tessera
