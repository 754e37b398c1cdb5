// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/stream_queue.h"

#include "base/error.h"
#include "device/cuda/check.h"

namespace tessera::device::cuda {

namespace {

cudaStream_t make_stream(int ordinal) {
  cudaStream_t stream = nullptr;
  TESSERA_CUDA_CHECK(cudaSetDevice(ordinal));
  // Not ordered with the default stream, which libraries beside us may use.
  TESSERA_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

bool can_overlap(int ordinal) {
  int major = 0;
  TESSERA_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal));
  return major >= 9;
}

}  // namespace

StreamQueue::StreamQueue(int ordinal)
    : Queue(static_cast<void*>(make_stream(ordinal)), can_overlap(ordinal)), is_owned_(true) {}

StreamQueue::StreamQueue(int ordinal, cudaStream_t borrowed)
    : Queue(static_cast<void*>(borrowed), false), is_owned_(false) {
  TESSERA_CUDA_CHECK(cudaSetDevice(ordinal));
}

StreamQueue::~StreamQueue() {
  if (is_owned_) cudaStreamDestroy(handle());
}

void StreamQueue::check_recording() const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  TESSERA_CUDA_CHECK(cudaStreamIsCapturing(handle(), &status));
  if (status == cudaStreamCaptureStatusActive) return;
  fail(ErrorCode::kDeviceError,
       "a call that was not checked spoilt the recording (an allocation, a wait, work elsewhere)");
}

void StreamQueue::synchronize() const {
  refuse_while_recording("a wait");
  TESSERA_CUDA_CHECK(cudaStreamSynchronize(handle()));
}

Event::Event() {
  TESSERA_CUDA_CHECK(cudaEventCreate(&event_));
}

Event::~Event() {
  cudaEventDestroy(event_);
}

void Event::record(const StreamQueue& queue) {
  TESSERA_CUDA_CHECK(cudaEventRecord(event_, queue.handle()));
}

void Event::hold_back(const StreamQueue& queue) const {
  TESSERA_CUDA_CHECK(cudaStreamWaitEvent(queue.handle(), event_, 0));
}

void Event::wait() const {
  TESSERA_CUDA_CHECK(cudaEventSynchronize(event_));
}

bool Event::has_passed() const {
  const cudaError_t code = cudaEventQuery(event_);
  if (code == cudaErrorNotReady) return false;
  TESSERA_CUDA_CHECK(code);
  return true;
}

float Event::milliseconds_between(const Event& first, const Event& second) {
  float milliseconds = 0;
  TESSERA_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, first.event_, second.event_));
  return milliseconds;
}

}  // namespace tessera::device::cuda
