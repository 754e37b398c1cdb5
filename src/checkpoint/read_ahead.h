// SPDX-License-Identifier: Apache-2.0
#pragma once
// Has the operating system read from the disk what a loader will want next, while the loader checks, uploads and packs
// what it has. Hints only: without them the same bytes are read, later.
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

#include "checkpoint/safetensors.h"

namespace tessera::checkpoint {

// Bytes of a file that has been opened.
struct FilePart {
  const SafetensorsFile* file = nullptr;
  uint64_t offset = 0, num_bytes = 0;
};

// Is told what is wanted, by the thread of a ReadAhead.
class ReadAheadSink {
 public:
  virtual ~ReadAheadSink() = default;
  virtual void will_read(const FilePart& part) = 0;
};

class ReadAhead {
 public:
  // `parts` in about the order in which they will be read. A thread asks for them, in pieces, and stays at most
  // `window_bytes` ahead of what used() has counted. `sink`: null for the files themselves
  // (SafetensorsFile::will_read); it and the files outlive this.
  ReadAhead(std::vector<FilePart> parts, uint64_t window_bytes, ReadAheadSink* sink = nullptr);
  ~ReadAhead();  // asks for nothing more
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // So many of the parts' bytes, whichever, have been read. Any thread.
  void used(uint64_t num_bytes);

 private:
  void run(const std::stop_token& stop);
  // False: it is to stop.
  bool wait_for_room(uint64_t asked, const std::stop_token& stop);

  const std::vector<FilePart> parts_;
  const uint64_t window_bytes_;
  ReadAheadSink* const sink_;
  std::mutex mutex_;
  std::condition_variable_any has_room_;
  uint64_t used_bytes_ = 0;
  std::jthread thread_;  // last: it uses all of the above
};

}  // namespace tessera::checkpoint
