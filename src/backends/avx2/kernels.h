// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the kernel files of this folder export: plain functions on raw pointers, called from backend.cc and, through
// function pointers, from cpu_common.

namespace tessera::backends::avx2 {}  // namespace tessera::backends::avx2
