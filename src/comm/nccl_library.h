// SPDX-License-Identifier: Apache-2.0
#pragma once
// The few functions of NCCL that are called, opened at run time. Their signatures are stated here, so that nothing of
// NCCL is needed to build. Source: NCCL's public interface (NVIDIA, "NCCL API", 2.18 and later).
#include <cstddef>
#include <string>

namespace tessera::comm {

// ncclUniqueId.
struct NcclIdentity {
  char bytes[128];
};

// ncclConfig_t as of 2.18; later ones take its size from the first field.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21801;
  int blocking = 0;
  int cluster_size = kUnset, least_blocks = kUnset, most_blocks = kUnset;
  const char* net_name = nullptr;
  int split_share = kUnset;

  static constexpr int kUnset = -2147483647 - 1;
};

constexpr int kNcclSuccess = 0, kNcclInProgress = 7;
constexpr int kNcclBytes = 1;  // ncclUint8

struct NcclLibrary {
  int (*get_version)(int* version);
  int (*get_unique_id)(NcclIdentity* identity);
  int (*comm_init_rank_config)(void** comm, int world, NcclIdentity identity, int rank, NcclConfig* config);
  int (*comm_get_async_error)(void* comm, int* error);
  int (*comm_abort)(void* comm);
  int (*all_gather)(const void* send, void* receive, size_t count, int type, void* comm, void* stream);
  int (*broadcast)(const void* send, void* receive, size_t count, int type, int root, void* comm, void* stream);
  int (*send)(const void* data, size_t count, int type, int peer, void* comm, void* stream);
  int (*receive)(void* data, size_t count, int type, int peer, void* comm, void* stream);
  int (*group_start)();
  int (*group_end)();
  const char* (*get_error_string)(int code);
};

// Opened once, never closed. Throws kDeviceError where the library, or one of the functions in it, is not there, or it
// is older than 2.18.
const NcclLibrary& nccl_library(const std::string& name);

}  // namespace tessera::comm
