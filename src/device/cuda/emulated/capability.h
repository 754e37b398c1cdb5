// SPDX-License-Identifier: Apache-2.0
#pragma once
// The emulated GPU runs every instruction that it knows; what it says of itself decides which backends take it. And
// what else a test may ask of it.
#include <cstdint>

namespace tessera::device::emulated {

// From now on; 9.0 before.
void set_compute_capability(int major, int minor);

// Whether Blackwell's tensor cores add in FP32, in place of the bits of the models of them
// (backends/cuda_common/ptx/emulated/product_sums.h): TESSERA_EMULATED_SUMS, or what was set since.
bool sums_are_fast();
void set_sums_are_fast(bool are_fast);

// What happens by chance from now on follows from `seed`: in which order threads run, which blocks of a cluster run
// ahead, what is late. While no grid runs.
void seed_chance(uint32_t seed);

}  // namespace tessera::device::emulated
