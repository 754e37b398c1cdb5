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

}  // namespace tessera
