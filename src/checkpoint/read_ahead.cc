// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/read_ahead.h"

#include <algorithm>
#include <utility>

namespace tessera::checkpoint {

namespace {

constexpr uint64_t kPieceBytes = 4 << 20;  // asked for at once

}  // namespace

ReadAhead::ReadAhead(std::vector<FilePart> parts, uint64_t window_bytes, ReadAheadSink* sink)
    : parts_(std::move(parts)),
      window_bytes_(window_bytes),
      sink_(sink),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

ReadAhead::~ReadAhead() = default;

void ReadAhead::used(uint64_t num_bytes) {
  {
    const std::lock_guard lock(mutex_);
    used_bytes_ += num_bytes;
  }
  has_room_.notify_one();
}

bool ReadAhead::wait_for_room(uint64_t asked, const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  return has_room_.wait(lock, stop, [&] { return asked <= used_bytes_ + window_bytes_; });
}

void ReadAhead::run(const std::stop_token& stop) {
  uint64_t asked = 0;
  for (const FilePart& part : parts_) {
    for (uint64_t begin = 0; begin < part.num_bytes; begin += kPieceBytes) {
      const uint64_t num_bytes = std::min(kPieceBytes, part.num_bytes - begin);
      asked += num_bytes;
      if (!wait_for_room(asked, stop)) return;
      const FilePart piece{part.file, part.offset + begin, num_bytes};
      if (sink_ != nullptr) {
        sink_->will_read(piece);
      } else {
        piece.file->will_read(piece.offset, piece.num_bytes);
      }
    }
  }
}

}  // namespace tessera::checkpoint
