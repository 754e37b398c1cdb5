// SPDX-License-Identifier: Apache-2.0
#pragma once
// Names of responses, messages and tool calls.
#include <string>
#include <string_view>

namespace tessera::server {

class IdSource {
 public:
  virtual ~IdSource() = default;
  // A new name that begins with `prefix`, in letters, digits, - and _.
  virtual std::string next(std::string_view prefix) = 0;
};

// `prefix` and 128 random bits of the operating system as 32 hexadecimal digits: names that nobody can guess, since a
// tool call's name fetches the text that was sampled for it. Threads may call it at once.
class RandomIds : public IdSource {
 public:
  // Throws kInternal where the system has no random bits.
  std::string next(std::string_view prefix) override;
};

}  // namespace tessera::server
