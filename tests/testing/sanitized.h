// SPDX-License-Identifier: Apache-2.0
#pragma once
// Whether this program runs under a sanitizer, where everything takes several times as long: tests of many cases of one
// kind take fewer of them then.

namespace tessera::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kIsSanitized = true;
#else
constexpr bool kIsSanitized = false;
#endif

}  // namespace tessera::testing
