// SPDX-License-Identifier: Apache-2.0
#include "backends/registry.h"

#include <array>

namespace tessera::backends {

#define BACKEND(folder, language, options) extern const ops::Backend folder##_backend;
#include "backends/backends.def"
#undef BACKEND

namespace {

#define BACKEND(folder, language, options) &folder##_backend,
constexpr std::array kBackends = {
#include "backends/backends.def"
};
#undef BACKEND

}  // namespace

std::span<const ops::Backend* const> all_backends() {
  return kBackends;
}

}  // namespace tessera::backends
