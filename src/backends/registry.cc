// SPDX-License-Identifier: Apache-2.0
#include "backends/registry.h"

#include <array>

namespace tessera::backends {

// Backends in a language that this build lacks are left out.
#define IF_cxx(...) __VA_ARGS__
#ifdef TESSERA_CUDA
#define IF_cuda(...) __VA_ARGS__
#else
#define IF_cuda(...)
#endif

#define BACKEND(folder, language, options) IF_##language(extern const ops::Backend folder##_backend;)
#include "backends/backends.def"
#undef BACKEND

namespace {

#define BACKEND(folder, language, options) IF_##language(&folder##_backend, )
constexpr std::array kBackends = {
#include "backends/backends.def"
};
#undef BACKEND

}  // namespace

std::span<const ops::Backend* const> all_backends() {
  return kBackends;
}

}  // namespace tessera::backends
