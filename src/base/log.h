// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the library's messages and progress go. The library never prints: a program passes sinks in.
#include <cstdint>
#include <string_view>

namespace tessera {

enum class LogLevel { kDebug, kInfo, kWarning };

class LogSink {
 public:
  virtual ~LogSink() = default;
  virtual void write(LogLevel level, std::string_view message) = 0;
};

// Progress of one phase of long work ("read", "prefill"). Calls come from one thread.
class ProgressSink {
 public:
  virtual ~ProgressSink() = default;
  // `total` in `unit` ("B", "tokens").
  virtual void begin(std::string_view phase, uint64_t total, std::string_view unit) = 0;
  virtual void advance(uint64_t amount) = 0;
  virtual void end() = 0;
};

// A phase counted in bytes, ended however its scope ends. The sink may be null.
class BytePhase {
 public:
  BytePhase(ProgressSink* sink, std::string_view name, uint64_t total_bytes) : sink_(sink) {
    if (sink_ != nullptr) sink_->begin(name, total_bytes, "B");
  }
  ~BytePhase() {
    if (sink_ != nullptr) sink_->end();
  }
  BytePhase(const BytePhase&) = delete;
  BytePhase& operator=(const BytePhase&) = delete;

 private:
  ProgressSink* sink_;
};

}  // namespace tessera
