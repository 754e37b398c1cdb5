// SPDX-License-Identifier: Apache-2.0
// AMX tiles with BF16 products (Sapphire Rapids and later); what tiles do not suit is left to avx512.
#include "ops/backend.h"
#include "backends/amx/kernels.h"

namespace tessera::backends {

namespace {

using namespace tessera::ops;

bool available(const device::Machine& machine, std::string& why_not) {
  if (machine.cpu.amx_bf16) return true;
  why_not = "the processor or the kernel lacks AMX tiles with BF16";
  return false;
}

}  // namespace

extern constinit const Backend amx_backend = {"amx", available, Verification::kCompiledOnly, make_variants()};

}  // namespace tessera::backends
