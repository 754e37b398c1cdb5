// SPDX-License-Identifier: Apache-2.0
#pragma once
// Division by a number that a launch fixes. Source: Granlund and Montgomery, "Division by Invariant Integers using
// Multiplication" (1994).
#include <cstdint>

#include "base/host_device.h"

namespace tessera::backends::cuda_common {

class FastDivisor {
 public:
  FastDivisor() = default;
  // Of 1 to 2^31.
  explicit FastDivisor(uint32_t divisor) : divisor_(divisor) {
    while (uint64_t{1} << shift_ < divisor) ++shift_;
    magic_ = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift_) - divisor)) / divisor + 1);
  }
  TESSERA_HOST_DEVICE uint32_t divisor() const { return divisor_; }
  // Of a number below 2^31.
  __device__ uint32_t quotient(uint32_t n) const { return (__umulhi(n, magic_) + n) >> shift_; }

 private:
  uint32_t divisor_ = 1, magic_ = 1;
  int shift_ = 0;
};

}  // namespace tessera::backends::cuda_common
