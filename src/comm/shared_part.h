// SPDX-License-Identifier: Apache-2.0
#pragma once
// A rank's own part of memory that all ranks reach (shared_memory.h), and how it reaches the others'.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace tessera::comm {

class SharedPart {
 public:
  virtual ~SharedPart() = default;  // as let_go(); its own part goes too
  virtual uint8_t* data() const = 0;
  // What another rank needs to reach it: at most kSharedAddressBytes, as many on every rank.
  virtual std::vector<uint8_t> address() const = 0;
  // Where that of another rank lies here, for as long as this; null where it can't be reached: then `why_not` is set.
  virtual uint8_t* reach(std::span<const uint8_t> address, std::string& why_not) = 0;
  // Every rank has reached it: nothing is kept for others any more.
  virtual void settle() noexcept = 0;
  // Of all others': their ranks may free them from then on.
  virtual void let_go() noexcept = 0;
};

constexpr size_t kSharedAddressBytes = 192;

// So many zero bytes of the host's memory, for ranks that are threads or processes of one machine; of the calling
// thread's GPU. Throw kResourceExhausted where memory ends; null where this build or system can't: then `why_not` is
// set.
std::unique_ptr<SharedPart> make_host_part(size_t bytes, std::string& why_not);
std::unique_ptr<SharedPart> make_gpu_part(size_t bytes, std::string& why_not);

}  // namespace tessera::comm
