// SPDX-License-Identifier: Apache-2.0
// Stands in for NCCL: ranks are threads of one process, memory is the host's, calls are done when they return. What a
// test wants to go wrong it says through fake_nccl_*.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kSuccess = 0, kSystemError = 2, kInProgress = 7;

struct Group {
  std::mutex lock;
  std::condition_variable changed;
  std::map<std::pair<int, int>, std::deque<std::vector<char>>> boxes;  // by sender and receiver
  int num_here = 0;
  bool is_aborted = false;
};

struct Comm {
  Comm(std::shared_ptr<Group> its_group, int its_rank, int its_world)
      : group(std::move(its_group)), rank(its_rank), world(its_world) {}
  std::shared_ptr<Group> group;
  int rank, world;
  std::atomic<int> num_polls{0};  // of a state that is first "in progress"
};

struct Wanted {
  bool is_send;
  const void* from;
  void* to;
  size_t bytes;
  int peer;
  Comm* comm;
};

std::mutex groups_lock;
std::map<std::string, std::shared_ptr<Group>> groups;
std::vector<std::unique_ptr<Comm>> comms;
std::atomic<int> next_identity{1}, async_error{0}, open_comms{0};
std::atomic<bool> holds_aborts{false}, refuses_ranks{false};
thread_local int depth = 0;
thread_local std::vector<Wanted> wanted;

void send(Comm& comm, int peer, const void* data, size_t bytes) {
  const std::lock_guard lock(comm.group->lock);
  const char* begin = static_cast<const char*>(data);
  comm.group->boxes[{comm.rank, peer}].emplace_back(begin, begin + bytes);
  comm.group->changed.notify_all();
}

int receive(Comm& comm, int peer, void* data, size_t bytes) {
  Group& group = *comm.group;
  std::unique_lock lock(group.lock);
  std::deque<std::vector<char>>& box = group.boxes[{peer, comm.rank}];
  group.changed.wait(lock, [&] { return !box.empty() || group.is_aborted; });
  if (group.is_aborted || box.front().size() != bytes) return kSystemError;
  std::memcpy(data, box.front().data(), bytes);
  box.pop_front();
  return kSuccess;
}

int run(const std::vector<Wanted>& all) {
  for (const Wanted& one : all) {
    if (one.is_send) send(*one.comm, one.peer, one.from, one.bytes);
  }
  for (const Wanted& one : all) {
    if (!one.is_send && receive(*one.comm, one.peer, one.to, one.bytes) != kSuccess) return kSystemError;
  }
  return kSuccess;
}

}  // namespace

extern "C" {

struct Identity {
  char bytes[128];
};

void fake_nccl_set_async_error(int code) {
  async_error = code;
}
void fake_nccl_refuse_ranks(int are_refused) {
  refuses_ranks = are_refused != 0;
}
void fake_nccl_hold_aborts(int is_held) {
  holds_aborts = is_held != 0;
}
int fake_nccl_open_comms() {
  return open_comms;
}

int ncclGetVersion(int* version) {
  *version = 22809;
  return kSuccess;
}
int ncclGetUniqueId(Identity* identity) {
  std::memset(identity->bytes, 0, sizeof(identity->bytes));
  std::strcpy(identity->bytes, std::to_string(next_identity++).c_str());
  return kSuccess;
}
int ncclCommInitRankConfig(void** comm, int world, Identity identity, int rank, void* config) {
  size_t size = 0;
  int blocking = 1;
  std::memcpy(&size, config, sizeof(size));
  std::memcpy(&blocking, static_cast<char*>(config) + 16, sizeof(blocking));
  if (size < 20 || blocking != 0 || refuses_ranks) return kSystemError;
  const std::lock_guard lock(groups_lock);
  std::shared_ptr<Group>& group = groups[identity.bytes];
  if (group == nullptr) group = std::make_shared<Group>();
  ++open_comms;
  comms.push_back(std::make_unique<Comm>(group, rank, world));
  *comm = comms.back().get();
  return kInProgress;
}
int ncclCommGetAsyncError(void* comm, int* error) {
  Comm& self = *static_cast<Comm*>(comm);
  *error = self.num_polls++ < 3 ? kInProgress : async_error.load();
  return kSuccess;
}
// As NCCL's, which a rank's threads may be waiting in: those come back. The object lives on.
int ncclCommAbort(void* comm) {
  while (holds_aborts) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  Group& group = *static_cast<Comm*>(comm)->group;
  const std::lock_guard lock(group.lock);
  group.is_aborted = true;
  group.changed.notify_all();
  --open_comms;
  return kSuccess;
}
int ncclSend(const void* data, size_t count, int, int peer, void* comm, void*) {
  wanted.push_back({true, data, nullptr, count, peer, static_cast<Comm*>(comm)});
  return kSuccess;
}
int ncclRecv(void* data, size_t count, int, int peer, void* comm, void*) {
  wanted.push_back({false, nullptr, data, count, peer, static_cast<Comm*>(comm)});
  return kSuccess;
}
int ncclGroupStart() {
  ++depth;
  return kSuccess;
}
int ncclGroupEnd() {
  if (--depth > 0) return kSuccess;
  const std::vector<Wanted> all = std::move(wanted);
  wanted.clear();
  return run(all);
}
int ncclAllGather(const void* from, void* to, size_t count, int, void* comm, void*) {
  Comm& self = *static_cast<Comm*>(comm);
  std::vector<Wanted> all;
  for (int r = 0; r < self.world; ++r) {
    all.push_back({true, from, nullptr, count, r, &self});
    all.push_back({false, nullptr, static_cast<char*>(to) + static_cast<size_t>(r) * count, count, r, &self});
  }
  return run(all);
}
int ncclBroadcast(const void* from, void* to, size_t count, int, int root, void* comm, void*) {
  Comm& self = *static_cast<Comm*>(comm);
  for (int r = 0; r < self.world && root == self.rank; ++r) send(self, r, from, count);
  return receive(self, root, to, count);
}
const char* ncclGetErrorString(int code) {
  return code == kSystemError ? "unhandled system error" : code == 3 ? "internal error" : "no error";
}

}  // extern "C"
