// SPDX-License-Identifier: Apache-2.0
#pragma once
// On the emulated GPU: sums of Blackwell's products in FP32, or the models' bits, while one lives.
#include "device/cuda/emulated/capability.h"

namespace tessera::testing {

class SumsMode {
 public:
  explicit SumsMode(bool is_fast) { device::emulated::set_sums_are_fast(is_fast); }
  ~SumsMode() { device::emulated::set_sums_are_fast(was_fast_); }
  SumsMode(const SumsMode&) = delete;
  SumsMode& operator=(const SumsMode&) = delete;

 private:
  bool was_fast_ = device::emulated::sums_are_fast();
};

}  // namespace tessera::testing
