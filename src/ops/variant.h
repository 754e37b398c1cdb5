// SPDX-License-Identifier: Apache-2.0
#pragma once
// One way to compute one op. An op is a tag type with three members:
//   Op::Desc   what is fixed when the model is built: dimensions, dtypes, layouts, precision; has to_string()
//   Op::Args   pointers and run-time sizes of one call
//   Op::kName  its name in plans, traces and TESSERA_FORCE
// A fused op (decision 0023) has a fourth, Op::kIsFused: it does what a sequence of others does, whose bits it gives.
#include <cstdint>
#include <string>

#include "device/machine.h"
#include "device/queue.h"

namespace tessera::ops {

struct PackedLayout;  // ops/packed_layout.h

template <class Op>
constexpr bool is_fused() {
  return requires {
    Op::kIsFused;
  };
}

template <class Op>
struct Variant {
  using Desc = typename Op::Desc;
  using Args = typename Op::Args;

  const char* name;
  // False where this variant can't compute `desc`; then `why_not` says so in words a user understands.
  bool (*supports)(const Desc& desc, std::string& why_not);
  // The arrangement of weight bits that run() expects; null: as in the checkpoint. Null function: no weights.
  const PackedLayout* (*packed_layout)(const Desc& desc);
  // Scratch bytes that a call with at most `max_tokens` rows needs in Args::workspace. Null: none.
  int64_t (*workspace_bytes)(const Desc& desc, int64_t max_tokens);
  // Computes. No allocation and no host read of device data. Zero rows is a no-op.
  void (*run)(const Desc& desc, const Args& args, device::Queue& queue);
  // False where this machine lacks what the variant needs beyond its backend. Null: nothing.
  bool (*runs_on)(const device::Machine& machine, std::string& why_not) = nullptr;
};

}  // namespace tessera::ops
