// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <map>
#include <mutex>

#include "base/error.h"
#include "base/strings.h"

namespace tessera::comm {

namespace {

constexpr int kLeastVersion = 21800;

template <class Function>
void find(void* handle, const std::string& library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr) {
    fail(ErrorCode::kDeviceError, fmt::format("{}: expected function {}, found none", printable(library), name));
  }
}

NcclLibrary open(const std::string& name) {
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    fail(ErrorCode::kDeviceError, fmt::format("NCCL, which several GPUs need, can't be opened: {}",
                                              printable(why != nullptr ? why : "unknown")));
  }
  NcclLibrary library{};
  find(handle, name, "ncclGetVersion", library.get_version);
  find(handle, name, "ncclGetUniqueId", library.get_unique_id);
  find(handle, name, "ncclCommInitRankConfig", library.comm_init_rank_config);
  find(handle, name, "ncclCommGetAsyncError", library.comm_get_async_error);
  find(handle, name, "ncclCommAbort", library.comm_abort);
  find(handle, name, "ncclAllGather", library.all_gather);
  find(handle, name, "ncclBroadcast", library.broadcast);
  find(handle, name, "ncclSend", library.send);
  find(handle, name, "ncclRecv", library.receive);
  find(handle, name, "ncclGroupStart", library.group_start);
  find(handle, name, "ncclGroupEnd", library.group_end);
  find(handle, name, "ncclGetErrorString", library.get_error_string);
  int version = 0;
  if (library.get_version(&version) != kNcclSuccess || version < kLeastVersion) {
    fail(ErrorCode::kDeviceError,
         fmt::format("{}: expected version {} or later, found {}", printable(name), kLeastVersion, version));
  }
  return library;
}

}  // namespace

const NcclLibrary& nccl_library(const std::string& name) {
  static std::mutex lock;
  static std::map<std::string, NcclLibrary> libraries;
  const std::lock_guard guard(lock);
  const auto known = libraries.find(name);
  return known != libraries.end() ? known->second : libraries.emplace(name, open(name)).first->second;
}

}  // namespace tessera::comm
