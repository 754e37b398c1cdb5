// SPDX-License-Identifier: Apache-2.0
// AVX-512 with VBMI (Ice Lake, Zen 4 and later). Variants named bf16 use dot products of BF16 pairs, which Ice Lake
// lacks; those named fma do without.
#include "ops/backend.h"
#include "backends/avx512/kernels.h"

namespace tessera::backends {

namespace {

using namespace tessera::ops;

bool available(const device::Machine& machine, std::string& why_not) {
  if (machine.cpu.avx512) return true;
  why_not = "the processor lacks AVX-512 F, BW, VL, DQ or VBMI";
  return false;
}

}  // namespace

extern constinit const Backend avx512_backend = {"avx512", available, Verification::kRunOnHardware, make_variants()};

}  // namespace tessera::backends
