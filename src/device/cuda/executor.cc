// SPDX-License-Identifier: Apache-2.0
// gpu_executor.h with CUDA.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstring>
#include <new>

#include "base/error.h"
#include "base/strings.h"
#include "device/cuda/check.h"
#include "device/cuda/graph.h"
#include "device/cuda/loading_memory.h"
#include "device/gpu_executor.h"

namespace tessera::device {

namespace cuda {

namespace {

// The GPU's own memory. Small pieces share the driver's pool, so that 100,000 matrices are not rounded up to its pages
// one by one; what is given back stays in the pool for the next piece.
class GpuMemory final : public MemorySpace {
 public:
  GpuMemory(StreamQueue& queue, int ordinal) : queue_(queue) {
    cudaMemPool_t pool = nullptr;
    TESSERA_CUDA_CHECK(cudaDeviceGetDefaultMemPool(&pool, ordinal));
    uint64_t keep = UINT64_MAX;
    TESSERA_CUDA_CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
  }
  // While a step is recorded CUDA would take some of these: memory of the graph's own, copies of what the host's memory
  // holds at each launch. All are mistakes there.
  void* allocate(size_t bytes) override {
    queue_.refuse_while_recording("an allocation of GPU memory");
    void* const data = take(bytes);
    try {
      TESSERA_CUDA_CHECK(cudaMemsetAsync(data, 0, bytes, queue_.handle()));
    } catch (...) {
      cudaFreeAsync(data, queue_.handle());
      throw;
    }
    return data;
  }
  void release(void* data, size_t) noexcept override {
    // Memory that a recording can't free is lost with it.
    if (!queue_.note_while_recording("giving GPU memory back")) cudaFreeAsync(data, queue_.handle());
  }
  // The pool keeps what comes back.
  void reserve(size_t bytes) override {
    if (bytes == 0) return;
    queue_.refuse_while_recording("an allocation of GPU memory");
    TESSERA_CUDA_CHECK(cudaFreeAsync(take(bytes), queue_.handle()));
    queue_.synchronize();
  }
  void upload(void* target, const void* host, size_t bytes) override {
    queue_.refuse_while_recording("a copy from the host");
    move(target, host, bytes);
  }
  void download(void* host, const void* source, size_t bytes) override {
    queue_download(host, source, bytes);
    queue_.synchronize();
  }
  void queue_download(void* host, const void* source, size_t bytes) override {
    queue_.refuse_while_recording("a copy to the host");
    move(host, source, bytes);
  }
  void copy(void* target, const void* source, size_t bytes) override { move(target, source, bytes); }
  bool is_host() const override { return false; }

 private:
  void* take(size_t bytes) {
    void* data = nullptr;
    const cudaError_t code = cudaMallocAsync(&data, bytes, queue_.handle());
    if (code == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      size_t free = 0, total = 0;
      TESSERA_CUDA_CHECK(cudaMemGetInfo(&free, &total));
      fail(ErrorCode::kResourceExhausted, fmt::format("the GPU has {} of {} left, {} are needed", format_bytes(free),
                                                      format_bytes(total), format_bytes(bytes)));
    }
    TESSERA_CUDA_CHECK(code);
    return data;
  }
  void move(void* target, const void* source, size_t bytes) {
    if (bytes > 0) {
      TESSERA_CUDA_CHECK(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, queue_.handle()));
    }
  }
  StreamQueue& queue_;
};

// Page-locked host memory: the GPU copies it without a detour.
class PinnedMemory final : public MemorySpace {
 public:
  explicit PinnedMemory(const StreamQueue& queue) : queue_(queue) {}
  void* allocate(size_t bytes) override {
    queue_.refuse_while_recording("an allocation of page-locked memory");
    void* data = nullptr;
    if (cudaMallocHost(&data, bytes) != cudaSuccess) {
      cudaGetLastError();
      throw std::bad_alloc();
    }
    std::memset(data, 0, bytes);
    return data;
  }
  void release(void* data, size_t) noexcept override { cudaFreeHost(data); }
  void upload(void* target, const void* host, size_t bytes) override { host_memory().upload(target, host, bytes); }
  void download(void* host, const void* source, size_t bytes) override { host_memory().download(host, source, bytes); }
  void queue_download(void* host, const void* source, size_t bytes) override { download(host, source, bytes); }
  void copy(void* target, const void* source, size_t bytes) override { host_memory().copy(target, source, bytes); }
  bool is_host() const override { return true; }

 private:
  const StreamQueue& queue_;
};

class GraphRecording final : public Recording {
 public:
  GraphRecording(const StreamQueue& queue, void (*call)(void*), void* object)
      : queue_(queue), graph_(queue, [&] { call(object); }) {}
  void launch() override { graph_.launch(queue_); }

 private:
  const StreamQueue& queue_;
  Graph graph_;
};

class EventPoint final : public QueuePoint {
 public:
  explicit EventPoint(const StreamQueue& queue) : queue_(queue) {}
  void set() override {
    queue_.refuse_while_recording("a point to wait for");
    event_.record(queue_);
  }
  void wait() override {
    queue_.refuse_while_recording("a wait");
    event_.wait();
  }

 private:
  const StreamQueue& queue_;
  Event event_;
};

class GpuExecutor final : public Executor {
 public:
  explicit GpuExecutor(int ordinal)
      : ordinal_(ordinal), queue_(ordinal), memory_(queue_, ordinal), pinned_(queue_), loading_(queue_) {}
  GpuExecutor(int ordinal, cudaStream_t borrowed)
      : ordinal_(ordinal), queue_(ordinal, borrowed), memory_(queue_, ordinal), pinned_(queue_), loading_(queue_) {}
  void make_current() override { TESSERA_CUDA_CHECK(cudaSetDevice(ordinal_)); }
  Queue& queue() override { return queue_; }
  MemorySpace& memory() override { return memory_; }
  MemorySpace& staging() override { return pinned_; }
  MemorySpace& loading() override { return loading_; }
  void end_loading() override { loading_.clear(); }
  void synchronize() override { queue_.synchronize(); }
  std::unique_ptr<QueuePoint> make_point() override { return std::make_unique<EventPoint>(queue_); }
  bool can_record() const override { return true; }

 private:
  std::unique_ptr<Recording> record_call(void (*call)(void*), void* object) override {
    return std::make_unique<GraphRecording>(queue_, call, object);
  }

  int ordinal_;
  StreamQueue queue_;
  GpuMemory memory_;
  PinnedMemory pinned_;
  LoadingMemory loading_;
};

}  // namespace

}  // namespace cuda

std::optional<GpuDevice> find_gpu(int ordinal, std::string& why_not) {
  int count = 0;
  cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaSuccess && ordinal >= count) {
    why_not = fmt::format("GPU {} of {}", ordinal, count);
    return std::nullopt;
  }
  cudaDeviceProp properties{};
  if (code == cudaSuccess) code = cudaGetDeviceProperties(&properties, ordinal);
  if (code != cudaSuccess) {
    cudaGetLastError();  // what was reported here shall not surface in a later call
    why_not = fmt::format("{} ({})", cudaGetErrorName(code), cudaGetErrorString(code));
    return std::nullopt;
  }
  size_t free = 0, total = 0;
  code = cudaSetDevice(ordinal);
  if (code == cudaSuccess) code = cudaMemGetInfo(&free, &total);
  if (code != cudaSuccess) {
    cudaGetLastError();
    why_not = fmt::format("{} ({})", cudaGetErrorName(code), cudaGetErrorString(code));
    return std::nullopt;
  }
  std::string uuid = "GPU-";
  for (const char byte : properties.uuid.bytes) uuid += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return GpuDevice{properties.name, properties.major, properties.minor, total, ordinal, free, uuid};
}

std::unique_ptr<Executor> make_gpu_executor(const GpuDevice& gpu, void* stream) {
  if (stream == nullptr) return std::make_unique<cuda::GpuExecutor>(gpu.ordinal);
  return std::make_unique<cuda::GpuExecutor>(gpu.ordinal, static_cast<cudaStream_t>(stream));
}

}  // namespace tessera::device
