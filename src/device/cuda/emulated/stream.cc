// SPDX-License-Identifier: Apache-2.0
// The runtime interface of the emulated GPU. Streams run what they are given before the call returns, so that all other
// ways to wait have nothing to do; a captured stream keeps it for the graph.
#include "device/cuda/emulated/stream.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace tessera::device::emulated {

namespace {

// What the emulated GPU says of itself. An odd number of multiprocessors, so that work never divides evenly.
constexpr int kComputeMajor = 9, kComputeMinor = 0, kMultiprocessors = 3;
constexpr size_t kMemoryBytes = size_t{8} << 30, kSharedBytes = 227 << 10, kSharedBytesUnasked = 48 << 10;
constexpr size_t kAlignment = 256;
constexpr unsigned char kFreshByte = 0xFF;

struct Gpu {
  std::recursive_mutex mutex;      // one grid at a time; guards all below
  bool is_lost = false;            // a kernel broke a rule: every later call fails, as on a GPU
  std::map<void*, size_t> memory;  // of the GPU
  size_t used = 0;
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

// One piece of work: a kernel's grid, a copy or a fill.
class Work {
 public:
  virtual ~Work() = default;
  virtual void run() const = 0;
};

class Graph {
 public:
  std::vector<std::shared_ptr<const Work>> works;
};

class Stream {
 public:
  // Null: not captured.
  std::unique_ptr<Graph> captured;
  bool is_spoilt = false;  // something was called that can't be captured
};

struct EventTime {
  std::chrono::steady_clock::time_point time;
};

struct Pool {};

namespace {

class GridWork final : public Work {
 public:
  GridWork(const cudaLaunchConfig_t& config, std::shared_ptr<const ThreadCode> code)
      : grid_(config.gridDim),
        block_(config.blockDim),
        shared_bytes_(config.dynamicSmemBytes),
        code_(std::move(code)) {}
  void run() const override {
    if (!gpu().is_lost && !run_grid(*code_, grid_, block_, shared_bytes_)) gpu().is_lost = true;
  }

 private:
  dim3 grid_, block_;
  size_t shared_bytes_;
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

class FillWork final : public Work {
 public:
  FillWork(void* target, int value, size_t bytes) : target_(target), value_(value), bytes_(bytes) {}
  void run() const override { std::memset(target_, value_, bytes_); }

 private:
  void* target_;
  int value_;
  size_t bytes_;
};

template <class T, class... Arguments>
cudaError_t queue(cudaStream_t stream, Arguments&&... arguments) {
  const std::scoped_lock lock(gpu().mutex);
  auto work = std::make_shared<const T>(std::forward<Arguments>(arguments)...);
  if (stream != nullptr && stream->captured != nullptr) {
    if (stream->is_spoilt) return result(cudaErrorStreamCaptureInvalidated);
    stream->captured->works.push_back(std::move(work));
  } else {
    work->run();
  }
  return result(cudaSuccess);
}

// A call that no capture takes.
cudaError_t refuse_capture(cudaStream_t stream) {
  if (stream == nullptr || stream->captured == nullptr) return result(cudaSuccess);
  stream->is_spoilt = true;
  return result(cudaErrorStreamCaptureUnsupported);
}

thread_local cudaStream_t captured_here = nullptr;  // the stream that this thread captures

cudaError_t allocate(void** data, size_t bytes) {
  const std::scoped_lock lock(gpu().mutex);
  *data = nullptr;
  if (bytes > kMemoryBytes - gpu().used) return result(cudaErrorMemoryAllocation);
  if (posix_memalign(data, kAlignment, std::max<size_t>(bytes, 1)) != 0) return result(cudaErrorMemoryAllocation);
  std::memset(*data, kFreshByte, bytes);
  gpu().memory.emplace(*data, bytes);
  gpu().used += bytes;
  return result(cudaSuccess);
}

cudaError_t release(void* data) {
  const std::scoped_lock lock(gpu().mutex);
  if (data == nullptr) return result(cudaSuccess);
  const auto found = gpu().memory.find(data);
  if (found == gpu().memory.end()) return result(cudaErrorInvalidValue);
  gpu().used -= found->second;
  gpu().memory.erase(found);
  std::free(data);
  return result(cudaSuccess);
}

}  // namespace

cudaError_t launch_code(const cudaLaunchConfig_t& config, const void* kernel, std::shared_ptr<const ThreadCode> code) {
  const std::scoped_lock lock(gpu().mutex);
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  const bool is_grid =
      grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= 0x7FFFFFFF && grid.y <= 65535 && grid.z <= 65535;
  const bool is_block =
      block.x > 0 && block.y > 0 && block.z > 0 && block.z <= 64 && uint64_t{block.x} * block.y * block.z <= 1024;
  if (!is_grid || !is_block) return result(cudaErrorInvalidConfiguration);
  const auto asked = gpu().shared_limits.find(kernel);
  const size_t limit = asked == gpu().shared_limits.end() ? kSharedBytesUnasked : asked->second;
  if (config.dynamicSmemBytes > limit) return result(cudaErrorInvalidValue);
  return queue<GridWork>(config.stream, config, std::move(code));
}

}  // namespace tessera::device::emulated

using namespace tessera::device::emulated;  // NOLINT: this file defines the interface

const char* cudaGetErrorName(cudaError_t code) {
  switch (code) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorStreamCaptureUnsupported:
      return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated:
      return "cudaErrorStreamCaptureInvalidated";
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t code) {
  switch (code) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
  }
  return "unrecognized error code";
}

cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int ordinal) {
  if (ordinal != 0) return result(cudaErrorInvalidDevice);
  std::snprintf(properties->name, sizeof(properties->name), "emulated GPU");
  properties->major = kComputeMajor, properties->minor = kComputeMinor;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int ordinal) {
  if (ordinal != 0) return result(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = kMultiprocessors;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = kComputeMajor;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(kSharedBytes);
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* ordinal) {
  *ordinal = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int ordinal) {
  return result(ordinal == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const std::scoped_lock lock(gpu().mutex);
  *total = kMemoryBytes, *free = kMemoryBytes - gpu().used;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  static Pool one;
  *pool = &one;
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, size_t bytes) {
  const cudaError_t code = refuse_capture(captured_here);
  return code == cudaSuccess ? allocate(data, bytes) : code;
}

cudaError_t cudaFree(void* data) {
  return release(data);
}

cudaError_t cudaMallocAsync(void** data, size_t bytes, cudaStream_t stream) {
  const cudaError_t code = refuse_capture(stream);
  return code == cudaSuccess ? allocate(data, bytes) : code;
}

cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  const cudaError_t code = refuse_capture(stream);
  return code == cudaSuccess ? release(data) : code;
}

cudaError_t cudaMallocHost(void** data, size_t bytes) {
  return result(posix_memalign(data, kAlignment, std::max<size_t>(bytes, 1)) == 0 ? cudaSuccess
                                                                                  : cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void* data) {
  std::free(data);
  return result(cudaSuccess);
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return queue<CopyWork>(stream, target, source, bytes);
}

cudaError_t cudaMemsetAsync(void* target, int value, size_t bytes, cudaStream_t stream) {
  return queue<FillWork>(stream, target, value, bytes);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new Stream;
  return result(cudaSuccess);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return result(cudaSuccess);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return refuse_capture(stream);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
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
  *graph = captured.release();
  return result(cudaSuccess);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  if (stream == nullptr || stream->captured == nullptr) {
    *status = cudaStreamCaptureStatusNone;
  } else {
    *status = stream->is_spoilt ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  }
  return result(cudaSuccess);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  return result(cudaSuccess);
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new EventTime{};
  return result(cudaSuccess);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return result(cudaSuccess);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  event->time = std::chrono::steady_clock::now();
  return result(cudaSuccess);
}

cudaError_t cudaEventSynchronize(cudaEvent_t) {
  return result(cudaSuccess);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t second) {
  *milliseconds = std::chrono::duration<float, std::milli>(second->time - first->time).count();
  return result(cudaSuccess);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = graph->works.size();
  return result(cudaSuccess);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = new Graph(*graph);
  return result(cudaSuccess);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  const cudaError_t code = refuse_capture(stream);
  if (code != cudaSuccess) return code;
  const std::scoped_lock lock(gpu().mutex);
  for (const auto& work : executable->works) work->run();
  return result(cudaSuccess);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return result(cudaSuccess);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return result(cudaSuccess);
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  const std::scoped_lock lock(gpu().mutex);
  if (value < 0 || static_cast<size_t>(value) > kSharedBytes) return result(cudaErrorInvalidValue);
  gpu().shared_limits[kernel] = static_cast<size_t>(value);
  return result(cudaSuccess);
}
