// SPDX-License-Identifier: Apache-2.0
#pragma once
// What sequences cost of the memory for caches, and how much there is. The scheduler knows caches by this alone, so
// that whoever stores them decides what a token costs.
#include <cstdint>

#include "model/cache_spec.h"

namespace tessera::engine {

class CacheBudget {
 public:
  virtual ~CacheBudget() = default;
  virtual int64_t total_bytes() const = 0;
  // Bytes that a sequence takes that holds `num_tokens` and may grow to `capacity` of them. Does not fall as num_tokens
  // rises. The same at every call.
  virtual int64_t bytes(int64_t num_tokens, int64_t capacity) const = 0;
};

// A sequence is granted the room for its capacity from its beginning, so that no step meets the end of memory.
class ReservedBudget final : public CacheBudget {
 public:
  ReservedBudget(model::CacheSpec spec, int64_t total_bytes) : spec_(std::move(spec)), total_bytes_(total_bytes) {}
  int64_t total_bytes() const override { return total_bytes_; }
  int64_t bytes(int64_t, int64_t capacity) const override { return spec_.bytes(capacity); }

 private:
  model::CacheSpec spec_;
  int64_t total_bytes_;
};

}  // namespace tessera::engine
