// SPDX-License-Identifier: Apache-2.0
#pragma once
// Marks functions that both host and device compile. Bits are reinterpreted with __builtin_bit_cast, which nvcc accepts
// in device code without relaxed constexpr.
#ifdef __CUDACC__
#define TESSERA_HOST_DEVICE __host__ __device__
#else
#define TESSERA_HOST_DEVICE
#endif
