// SPDX-License-Identifier: Apache-2.0
#pragma once
// Stores vectors into a cache: entry slots[i] <- encode(rows[i]). What is quantised is rounded here, once, before any
// use; a token attends its own stored vector.
// Source: DeepSeek-V4 inference/model.py, Attention.forward and Compressor.forward.
#include <cstdint>
#include <string>

#include "ops/cache_entry.h"
#include "ops/paged_entries.h"
#include "ops/variant.h"

namespace tessera::ops {

struct CacheWrite {
  static constexpr const char* kName = "cache_write";
  struct Desc {
    EntryLayout layout;
    DType activation = DType::kBF16;
    std::string to_string() const;
  };
  struct Args {
    TensorView rows;                 // [num_rows, width] activation
    const int64_t* slots = nullptr;  // [num_rows], distinct within a sequence; -1: the row is not written
    PagedEntries<uint8_t> cache;     // entries of `layout`
    int64_t num_rows = 0;
  };
};

bool cache_write_reference_supports(const CacheWrite::Desc& desc, std::string& why_not);
void cache_write_reference(const CacheWrite::Desc& desc, const CacheWrite::Args& args, device::Queue& queue);

}  // namespace tessera::ops
