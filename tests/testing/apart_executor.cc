// SPDX-License-Identifier: Apache-2.0
#include "testing/apart_executor.h"

#include <cstring>

#include "base/error.h"

namespace tessera::testing {

ApartMemory::~ApartMemory() {
  for (const auto& [data, bytes] : pieces_) device::host_memory().release(const_cast<char*>(data), bytes);
}

void* ApartMemory::allocate(size_t bytes) {
  queue_.refuse_while_recording("an allocation");
  if (bytes > room_) fail(ErrorCode::kResourceExhausted, "this memory is full");
  room_ -= bytes;
  void* data = device::host_memory().allocate(bytes);
  pieces_[static_cast<const char*>(data)] = bytes;
  return data;
}

void ApartMemory::release(void* data, size_t bytes) noexcept {
  queue_.note_while_recording("giving memory back");
  pieces_.erase(static_cast<const char*>(data));
  device::host_memory().release(data, bytes);
}

bool ApartMemory::owns(const void* data, size_t bytes) const {
  const char* begin = static_cast<const char*>(data);
  const auto after = pieces_.upper_bound(begin);
  if (after == pieces_.begin()) return false;
  const auto& [piece, size] = *std::prev(after);
  return begin + bytes <= piece + size;
}

void ApartMemory::expect_owned(const void* data, size_t bytes, const char* what) const {
  if (bytes > 0 && !owns(data, bytes)) fail(ErrorCode::kInternal, std::string(what) + ": not in this memory");
}

void ApartMemory::expect_foreign(const void* data, const char* what) const {
  if (owns(data, 1)) fail(ErrorCode::kInternal, std::string(what) + ": not the host's memory");
}

void ApartMemory::upload(void* target, const void* host, size_t bytes) {
  queue_.refuse_while_recording("a copy from the host");
  expect_owned(target, bytes, "target of an upload");
  expect_foreign(host, "source of an upload");
  if (bytes > 0) std::memcpy(target, host, bytes);
  ++num_uploads_;
}

void ApartMemory::download(void* host, const void* source, size_t bytes) {
  queue_.refuse_while_recording("a copy to the host");
  expect_owned(source, bytes, "source of a download");
  expect_foreign(host, "target of a download");
  if (bytes > 0) std::memcpy(host, source, bytes);
  ++num_downloads_;
  downloaded_bytes_ += bytes;
}

void ApartMemory::copy(void* target, const void* source, size_t bytes) {
  expect_owned(target, bytes, "target of a copy");
  expect_owned(source, bytes, "source of a copy");
  if (bytes > 0) std::memmove(target, source, bytes);
}

namespace {

class Repetition final : public device::Recording {
 public:
  Repetition(void (*call)(void*), void* object) : call_(call), object_(object) {}
  void launch() override { call_(object_); }

 private:
  void (*call_)(void*);
  void* object_;
};

}  // namespace

std::unique_ptr<device::Recording> ApartExecutor::record_call(void (*call)(void*), void* object) {
  if (!can_record_) fail(ErrorCode::kInternal, "this executor records nothing");
  call(object);
  return std::make_unique<Repetition>(call, object);
}

}  // namespace tessera::testing
