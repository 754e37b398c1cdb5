// SPDX-License-Identifier: Apache-2.0
// The runtime interface of the emulated GPU. A stream runs what it is given when somebody waits for it and no sooner,
// so that whoever takes memory back too early, or reads a result that nobody waited for, is found out.
// Size: a function for each call of the interface, all of which read and write the one GPU's state.
#include "device/cuda/emulated/stream.h"

#include "device/cuda/emulated/capability.h"
#include "device/cuda/emulated/faults.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::device::emulated {

namespace {

// What the emulated GPU says of itself. An odd number of multiprocessors, so that work never divides evenly.
constexpr int kMultiprocessors = 3;
constexpr size_t kMemoryBytes = size_t{8} << 30, kSharedBytesUnasked = 48 << 10;
constexpr size_t kAlignment = 256;
constexpr unsigned char kFreshByte = 0xFF;

struct Gpu {
  std::recursive_mutex mutex;  // one grid at a time; guards all below
  int compute_major = 9, compute_minor = 0;
  size_t most_shared_bytes() const { return size_t{compute_major == 12 ? 99u : 227u} << 10; }  // of a block
  bool is_lost = false;            // a kernel broke a rule: every later call fails, as on a GPU
  std::map<void*, size_t> memory;  // of the GPU: begins and sizes
  std::map<void*, size_t> locked;  // of the host, page-locked
  size_t used = 0, most_used = 0;
  std::set<cudaStream_t> streams;
  std::map<const void*, size_t> shared_limits;  // by kernel
};

Gpu& gpu() {
  static Gpu& one = *new Gpu;  // outlives whoever gives memory back at the program's end
  return one;
}

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t result(cudaError_t code) {
  if (code == cudaSuccess && gpu().is_lost) code = cudaErrorLaunchFailure;
  if (code != cudaSuccess) last_error = code;
  return code;
}

}  // namespace

// One piece of work: a kernel's grid, a copy, a fill, an event.
class Work {
 public:
  virtual ~Work() = default;
  virtual void run() const = 0;
  // It happens on a GPU that is lost, too.
  virtual bool outlives_gpu() const { return false; }
};

class Graph {
 public:
  std::vector<std::shared_ptr<const Work>> works;
};

class Stream {
 public:
  // Not run yet, oldest first.
  std::deque<std::shared_ptr<const Work>> waiting;
  // Null: not captured.
  std::unique_ptr<Graph> captured;
  bool is_spoilt = false;  // something was called that can't be captured

  void run_one() {
    const std::shared_ptr<const Work> work = std::move(waiting.front());
    waiting.pop_front();
    work->run();
  }
  void run_all() {
    while (!waiting.empty()) run_one();
  }
};

// A point of a stream that an event named once.
struct Point {
  Stream* stream = nullptr;  // null: it lies in a graph
  bool is_reached = false;
  std::chrono::steady_clock::time_point time;

  void wait() {
    while (!is_reached) stream->run_one();
  }
};

struct EventTime {
  std::shared_ptr<Point> last;  // null: never recorded
};

struct Pool {};

namespace {

// Blocks of a cluster, along x; 0: clusters that the emulated GPU does not have.
int cluster_of(const cudaLaunchConfig_t& config) {
  constexpr unsigned kMostBlocks = 8;  // what every GPU with clusters has
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id != cudaLaunchAttributeClusterDimension) continue;
    const auto& size = config.attrs[i].val.clusterDim;
    if (size.y != 1 || size.z != 1 || size.x > kMostBlocks) return 0;
    return static_cast<int>(size.x);
  }
  return 1;
}

class GridWork final : public Work {
 public:
  GridWork(const cudaLaunchConfig_t& config, std::shared_ptr<const ThreadCode> code)
      : grid_(config.gridDim),
        block_(config.blockDim),
        shared_bytes_(config.dynamicSmemBytes),
        cluster_(cluster_of(config)),
        code_(std::move(code)) {}
  void run() const override {
    if (!gpu().is_lost && !run_grid(*code_, grid_, block_, shared_bytes_, cluster_)) gpu().is_lost = true;
  }

 private:
  dim3 grid_, block_;
  size_t shared_bytes_;
  int cluster_;
  std::shared_ptr<const ThreadCode> code_;
};

class CopyWork final : public Work {
 public:
  CopyWork(void* target, const void* source, size_t bytes) : target_(target), source_(source), bytes_(bytes) {}
  void run() const override { std::memmove(target_, source_, bytes_); }

 private:
  void* target_;
  const void* source_;
  size_t bytes_;
};

// From memory of the host that may be another's once the call has returned.
class UploadWork final : public Work {
 public:
  UploadWork(void* target, const void* source, size_t bytes)
      : target_(target), bytes_(static_cast<const char*>(source), static_cast<const char*>(source) + bytes) {}
  void run() const override { std::memcpy(target_, bytes_.data(), bytes_.size()); }

 private:
  void* target_;
  std::vector<char> bytes_;
};

class FillWork final : public Work {
 public:
  FillWork(void* target, int value, size_t bytes) : target_(target), value_(value), bytes_(bytes) {}
  void run() const override { std::memset(target_, value_, bytes_); }

 private:
  void* target_;
  int value_;
  size_t bytes_;
};

class EventWork final : public Work {
 public:
  explicit EventWork(std::shared_ptr<Point> point) : point_(std::move(point)) {}
  void run() const override {
    point_->time = std::chrono::steady_clock::now();
    point_->is_reached = true;
  }
  bool outlives_gpu() const override { return true; }

 private:
  std::shared_ptr<Point> point_;
};

class WaitWork final : public Work {
 public:
  explicit WaitWork(std::shared_ptr<Point> point) : point_(std::move(point)) {}
  void run() const override { point_->wait(); }

 private:
  std::shared_ptr<Point> point_;
};

void release(void* data) {
  const auto found = gpu().memory.find(data);
  gpu().used -= found->second;
  gpu().memory.erase(found);
  std::free(data);
}

class ReleaseWork final : public Work {
 public:
  explicit ReleaseWork(void* data) : data_(data) {}
  void run() const override { release(data_); }
  bool outlives_gpu() const override { return true; }

 private:
  void* data_;
};

// Puts the work behind what the stream has, or into the graph that it is captured for.
cudaError_t queue(cudaStream_t stream, std::shared_ptr<const Work> work) {
  if (stream->captured == nullptr) {
    stream->waiting.push_back(std::move(work));
  } else if (stream->is_spoilt) {
    return result(cudaErrorStreamCaptureInvalidated);
  } else {
    stream->captured->works.push_back(std::move(work));
  }
  return result(cudaSuccess);
}

// A call that no capture takes.
cudaError_t refuse_capture(cudaStream_t stream) {
  if (stream == nullptr || stream->captured == nullptr) return result(cudaSuccess);
  stream->is_spoilt = true;
  return result(cudaErrorStreamCaptureUnsupported);
}

// What `call` returns before it has done anything (or after it, where it gives something back): an error that a test
// asked for, or cudaSuccess.
cudaError_t planned(std::string_view call) {
  const std::scoped_lock lock(gpu().mutex);
  bool is_lost = false;
  const cudaError_t code = fault_of(call, is_lost);
  if (is_lost) {
    for (Stream* stream : gpu().streams)
      std::erase_if(stream->waiting, [](const auto& work) { return !work->outlives_gpu(); });
  }
  return result(code);
}

thread_local cudaStream_t captured_here = nullptr;  // the stream that this thread captures

cudaError_t allocate(void** data, size_t bytes) {
  *data = nullptr;
  if (bytes > kMemoryBytes - gpu().used) return result(cudaErrorMemoryAllocation);
  if (posix_memalign(data, kAlignment, std::max<size_t>(bytes, 1)) != 0) return result(cudaErrorMemoryAllocation);
  std::memset(*data, kFreshByte, bytes);
  gpu().memory.emplace(*data, bytes);
  gpu().used += bytes;
  gpu().most_used = std::max(gpu().most_used, gpu().used);
  return result(cudaSuccess);
}

// Whether the address lies in one of the pieces (by their begins).
bool is_in(const std::map<void*, size_t>& pieces, const void* address) {
  auto after = pieces.upper_bound(const_cast<void*>(address));
  if (after == pieces.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return static_cast<const char*>(address) < static_cast<const char*>(begin) + bytes;
}

}  // namespace

cudaError_t launch_code(const cudaLaunchConfig_t& config, const void* kernel, std::shared_ptr<const ThreadCode> code) {
  const std::scoped_lock lock(gpu().mutex);
  if (const cudaError_t fault = planned("cudaLaunchKernelEx"); fault != cudaSuccess) return fault;
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  const bool is_grid =
      grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= 0x7FFFFFFF && grid.y <= 65535 && grid.z <= 65535;
  const bool is_block =
      block.x > 0 && block.y > 0 && block.z > 0 && block.z <= 64 && uint64_t{block.x} * block.y * block.z <= 1024;
  const auto cluster = static_cast<unsigned>(cluster_of(config));
  if (!is_grid || !is_block || cluster == 0 || grid.x % cluster != 0) return result(cudaErrorInvalidConfiguration);
  const auto asked = gpu().shared_limits.find(kernel);
  const size_t limit = asked == gpu().shared_limits.end() ? kSharedBytesUnasked : asked->second;
  if (config.dynamicSmemBytes > std::min(limit, gpu().most_shared_bytes())) return result(cudaErrorInvalidValue);
  return queue(config.stream, std::make_shared<const GridWork>(config, std::move(code)));
}

}  // namespace tessera::device::emulated

using namespace tessera::device::emulated;  // NOLINT: this file defines the interface

const cudaStream_t cudaStreamLegacy = [] {
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, 0);
  return stream;
}();

void tessera::device::emulated::set_compute_capability(int major, int minor) {
  const std::scoped_lock lock(gpu().mutex);
  gpu().compute_major = major, gpu().compute_minor = minor;
}

cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}

cudaError_t cudaGetDeviceCount(int* count) {
  if (const cudaError_t fault = planned("cudaGetDeviceCount"); fault != cudaSuccess) return fault;
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int ordinal) {
  if (ordinal != 0) return result(cudaErrorInvalidDevice);
  std::snprintf(properties->name, sizeof(properties->name), "emulated GPU");
  const std::scoped_lock lock(gpu().mutex);
  if (const cudaError_t fault = planned("cudaGetDeviceProperties"); fault != cudaSuccess) return fault;
  properties->major = gpu().compute_major, properties->minor = gpu().compute_minor;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int ordinal) {
  if (const cudaError_t fault = planned("cudaDeviceGetAttribute"); fault != cudaSuccess) return fault;
  if (ordinal != 0) return result(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = kMultiprocessors;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = gpu().compute_major;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(gpu().most_shared_bytes());
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* ordinal) {
  if (const cudaError_t fault = planned("cudaGetDevice"); fault != cudaSuccess) return fault;
  *ordinal = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int ordinal) {
  if (const cudaError_t fault = planned("cudaSetDevice"); fault != cudaSuccess) return fault;
  return result(ordinal == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const std::scoped_lock lock(gpu().mutex);
  if (const cudaError_t fault = planned("cudaMemGetInfo"); fault != cudaSuccess) return fault;
  *total = kMemoryBytes, *free = kMemoryBytes - gpu().used;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  if (const cudaError_t fault = planned("cudaDeviceGetDefaultMemPool"); fault != cudaSuccess) return fault;
  static Pool one;
  *pool = &one;
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  if (const cudaError_t fault = planned("cudaMemPoolSetAttribute"); fault != cudaSuccess) return fault;
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr attribute, void* value) {
  const std::scoped_lock lock(gpu().mutex);
  if (attribute != cudaMemPoolAttrReservedMemCurrent) return result(cudaErrorInvalidValue);
  *static_cast<uint64_t*>(value) = gpu().most_used;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, size_t bytes) {
  const std::scoped_lock lock(gpu().mutex);
  if (const cudaError_t fault = planned("cudaMalloc"); fault != cudaSuccess) return fault;
  const cudaError_t code = refuse_capture(captured_here);
  return code == cudaSuccess ? allocate(data, bytes) : code;
}

// Waits for all that was queued.
cudaError_t cudaFree(void* data) {
  const std::scoped_lock lock(gpu().mutex);
  for (Stream* stream : gpu().streams) stream->run_all();
  if (data == nullptr) return result(cudaSuccess);
  if (!gpu().memory.contains(data)) return result(cudaErrorInvalidValue);
  release(data);
  return planned("cudaFree");
}

cudaError_t cudaMallocAsync(void** data, size_t bytes, cudaStream_t stream) {
  const std::scoped_lock lock(gpu().mutex);
  if (const cudaError_t fault = planned("cudaMallocAsync"); fault != cudaSuccess) return fault;
  const cudaError_t code = refuse_capture(stream);
  return code == cudaSuccess ? allocate(data, bytes) : code;
}

cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  const std::scoped_lock lock(gpu().mutex);
  const cudaError_t code = refuse_capture(stream);
  if (code != cudaSuccess || data == nullptr) return code;
  if (!gpu().memory.contains(data)) return result(cudaErrorInvalidValue);
  const cudaError_t queued = queue(stream, std::make_shared<const ReleaseWork>(data));
  return queued == cudaSuccess ? planned("cudaFreeAsync") : queued;
}

cudaError_t cudaMallocHost(void** data, size_t bytes) {
  const std::scoped_lock lock(gpu().mutex);
  if (const cudaError_t fault = planned("cudaMallocHost"); fault != cudaSuccess) return fault;
  if (posix_memalign(data, kAlignment, std::max<size_t>(bytes, 1)) != 0) return result(cudaErrorMemoryAllocation);
  gpu().locked.emplace(*data, bytes);
  return result(cudaSuccess);
}

// Does not wait for copies that were queued: whether a driver does is nowhere said.
cudaError_t cudaFreeHost(void* data) {
  const std::scoped_lock lock(gpu().mutex);
  if (data != nullptr && gpu().locked.erase(data) == 0) return result(cudaErrorInvalidValue);
  std::free(data);
  return planned("cudaFreeHost");
}

// Of ordinary memory of the host, what is copied is what it holds now; into it, the call waits.
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  const std::scoped_lock lock(gpu().mutex);
  if (const cudaError_t fault = planned("cudaMemcpyAsync"); fault != cudaSuccess) return fault;
  const auto is_ordinary = [](const void* at) { return !is_in(gpu().memory, at) && !is_in(gpu().locked, at); };
  if (is_ordinary(target)) {
    const cudaError_t code = refuse_capture(stream);
    if (code != cudaSuccess) return code;
    stream->run_all();
    std::memcpy(target, source, bytes);
    return result(cudaSuccess);
  }
  if (stream->captured == nullptr && is_ordinary(source)) {
    return queue(stream, std::make_shared<const UploadWork>(target, source, bytes));
  }
  return queue(stream, std::make_shared<const CopyWork>(target, source, bytes));
}

cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
  const std::scoped_lock lock(gpu().mutex);
  if (const cudaError_t fault = planned("cudaMemsetAsync"); fault != cudaSuccess) return fault;
  return queue(stream, std::make_shared<const FillWork>(target, value, bytes));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  const std::scoped_lock lock(gpu().mutex);
  if (const cudaError_t fault = planned("cudaStreamCreateWithFlags"); fault != cudaSuccess) return fault;
  *stream = new Stream;
  gpu().streams.insert(*stream);
  return result(cudaSuccess);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::scoped_lock lock(gpu().mutex);
  stream->run_all();
  gpu().streams.erase(stream);
  delete stream;
  return planned("cudaStreamDestroy");
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const std::scoped_lock lock(gpu().mutex);
  if (const cudaError_t fault = planned("cudaStreamSynchronize"); fault != cudaSuccess) return fault;
  const cudaError_t code = refuse_capture(stream);
  if (code != cudaSuccess) return code;
  stream->run_all();
  return result(cudaSuccess);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (const cudaError_t fault = planned("cudaStreamBeginCapture"); fault != cudaSuccess) return fault;
  if (stream == nullptr || stream->captured != nullptr) return result(cudaErrorStreamCaptureUnsupported);
  stream->captured = std::make_unique<Graph>();
  stream->is_spoilt = false;
  captured_here = stream;
  return result(cudaSuccess);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  if (stream->captured == nullptr) return result(cudaErrorInvalidValue);
  captured_here = nullptr;
  std::unique_ptr<Graph> captured = std::move(stream->captured);
  if (stream->is_spoilt) return result(cudaErrorStreamCaptureInvalidated);
  const cudaError_t code = planned("cudaStreamEndCapture");
  if (code == cudaSuccess) *graph = captured.release();
  return code;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  if (const cudaError_t fault = planned("cudaStreamIsCapturing"); fault != cudaSuccess) return fault;
  if (stream == nullptr || stream->captured == nullptr) {
    *status = cudaStreamCaptureStatusNone;
  } else {
    *status = stream->is_spoilt ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  }
  return result(cudaSuccess);
}

// For the point that the event names now; none: for nothing.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const std::scoped_lock lock(gpu().mutex);
  if (const cudaError_t fault = planned("cudaStreamWaitEvent"); fault != cudaSuccess) return fault;
  if (event->last == nullptr || event->last->is_reached) return result(cudaSuccess);
  if (event->last->stream == nullptr) return result(cudaErrorCapturedEvent);
  return queue(stream, std::make_shared<const WaitWork>(event->last));
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  if (const cudaError_t fault = planned("cudaEventCreate"); fault != cudaSuccess) return fault;
  *event = new EventTime{};
  return result(cudaSuccess);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return planned("cudaEventDestroy");
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const std::scoped_lock lock(gpu().mutex);
  if (const cudaError_t fault = planned("cudaEventRecord"); fault != cudaSuccess) return fault;
  auto point = std::make_shared<Point>();
  if (stream->captured == nullptr) point->stream = stream;
  const cudaError_t code = queue(stream, std::make_shared<const EventWork>(point));
  if (code == cudaSuccess) event->last = std::move(point);
  return code;
}

// Asking makes some progress, so that whoever asks again and again sees the event reached.
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::scoped_lock lock(gpu().mutex);
  if (const cudaError_t fault = planned("cudaEventQuery"); fault != cudaSuccess) return fault;
  if (event->last == nullptr || event->last->is_reached) return result(cudaSuccess);
  if (event->last->stream == nullptr) return result(cudaErrorCapturedEvent);
  event->last->stream->run_one();
  return event->last->is_reached ? result(cudaSuccess) : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const std::scoped_lock lock(gpu().mutex);
  if (const cudaError_t fault = planned("cudaEventSynchronize"); fault != cudaSuccess) return fault;
  if (event->last == nullptr) return result(cudaSuccess);
  if (event->last->stream == nullptr && !event->last->is_reached) return result(cudaErrorCapturedEvent);
  event->last->wait();
  return result(cudaSuccess);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t second) {
  const std::scoped_lock lock(gpu().mutex);
  if (const cudaError_t fault = planned("cudaEventElapsedTime"); fault != cudaSuccess) return fault;
  if (first->last == nullptr || second->last == nullptr) return result(cudaErrorInvalidValue);
  if (!first->last->is_reached || !second->last->is_reached) return result(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(second->last->time - first->last->time).count();
  return result(cudaSuccess);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  if (const cudaError_t fault = planned("cudaGraphGetNodes"); fault != cudaSuccess) return fault;
  *count = graph->works.size();
  return result(cudaSuccess);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  if (const cudaError_t fault = planned("cudaGraphInstantiate"); fault != cudaSuccess) return fault;
  *executable = new Graph(*graph);
  return result(cudaSuccess);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  const std::scoped_lock lock(gpu().mutex);
  if (const cudaError_t fault = planned("cudaGraphLaunch"); fault != cudaSuccess) return fault;
  const cudaError_t code = refuse_capture(stream);
  if (code != cudaSuccess) return code;
  stream->waiting.insert(stream->waiting.end(), executable->works.begin(), executable->works.end());
  return result(cudaSuccess);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return planned("cudaGraphDestroy");
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return planned("cudaGraphExecDestroy");
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  const std::scoped_lock lock(gpu().mutex);
  if (const cudaError_t fault = planned("cudaFuncSetAttribute"); fault != cudaSuccess) return fault;
  if (value < 0 || static_cast<size_t>(value) > gpu().most_shared_bytes()) return result(cudaErrorInvalidValue);
  gpu().shared_limits[kernel] = static_cast<size_t>(value);
  return result(cudaSuccess);
}

cudaError_t cudaOccupancyMaxActiveClusters(int* count, const void*, const cudaLaunchConfig_t* config) {
  if (const cudaError_t fault = planned("cudaOccupancyMaxActiveClusters"); fault != cudaSuccess) return fault;
  const int blocks = cluster_of(*config);
  if (blocks == 0) return result(cudaErrorInvalidConfiguration);
  *count = std::max(1, kMultiprocessors / blocks);
  return result(cudaSuccess);
}
