// SPDX-License-Identifier: Apache-2.0
#pragma once
// Parts of a workspace, one after another.
#include <cstdint>

#include "base/integer_math.h"

namespace tessera::backends::cuda_common {

// Begins at `base`; null: only bytes are counted.
class Workspace {
 public:
  explicit Workspace(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    constexpr int64_t kAlignment = 256;
    T* at = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += round_up<int64_t>(count * static_cast<int64_t>(sizeof(T)), kAlignment);
    return at;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace tessera::backends::cuda_common
