// SPDX-License-Identifier: Apache-2.0
#pragma once
// A CPU that pretends to be a GPU: its memory is not the host's, so whatever works on one must copy there and back.
// A copy whose far end does not lie in this memory throws kInternal. What computes finds the bytes all the same.
#include <limits>
#include <map>

#include "device/executor.h"

namespace tessera::testing {

class ApartMemory final : public device::MemorySpace {
 public:
  // Refuses, as a GPU's does, what can't be recorded in `queue`.
  explicit ApartMemory(device::Queue& queue) : queue_(queue) {}
  ~ApartMemory() override;
  void* allocate(size_t bytes) override;
  void release(void* data, size_t bytes) noexcept override;
  void upload(void* target, const void* host, size_t bytes) override;
  void download(void* host, const void* source, size_t bytes) override;
  void queue_download(void* host, const void* source, size_t bytes) override { download(host, source, bytes); }
  void copy(void* target, const void* source, size_t bytes) override;
  bool is_host() const override { return false; }

  // From now on it has room for so many bytes more: then allocate() throws kResourceExhausted.
  void set_room(size_t bytes) { room_ = bytes; }

  size_t num_uploads() const { return num_uploads_; }
  size_t num_downloads() const { return num_downloads_; }
  size_t downloaded_bytes() const { return downloaded_bytes_; }

 private:
  bool owns(const void* data, size_t bytes) const;
  void expect_owned(const void* data, size_t bytes, const char* what) const;
  void expect_foreign(const void* data, const char* what) const;

  device::Queue& queue_;
  std::map<const char*, size_t> pieces_;
  size_t room_ = std::numeric_limits<size_t>::max();
  size_t num_uploads_ = 0, num_downloads_ = 0, downloaded_bytes_ = 0;
};

// With Records::kYes it records too: what was recorded is called again at every launch, so the work must outlive it.
class ApartExecutor final : public device::Executor {
 public:
  enum class Records { kNo, kYes };
  explicit ApartExecutor(int num_threads = 1, Records records = Records::kNo)
      : queue_(num_threads), memory_(queue_), can_record_(records == Records::kYes) {}
  device::Queue& queue() override { return queue_; }
  ApartMemory& memory() override { return memory_; }
  device::MemorySpace& staging() override { return device::host_memory(); }
  void synchronize() override { queue_.refuse_while_recording("a wait"); }
  bool can_record() const override { return can_record_; }

 private:
  std::unique_ptr<device::Recording> record_call(void (*call)(void*), void* object) override;

  device::Queue queue_;
  ApartMemory memory_;
  bool can_record_;
};

}  // namespace tessera::testing
