// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where C++ ends: no exception leaves, errors become codes and a message of the calling thread; and the checks of what
// comes in.
#include <cstdint>
#include <map>
#include <memory>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "bindings/c/tessera.h"
#include "device/executor.h"
#include "ops/packed_weight.h"
#include "ops/planner.h"

struct tessera_context {
  tessera::device::Machine machine;
  std::unique_ptr<tessera::device::Executor> executor;
  std::map<void*, tessera::device::Buffer> allocations;  // of tessera_allocate
  // Chosen at the first call of each rule and dtype.
  std::map<std::pair<tessera_nvfp4_rule, tessera_dtype>, tessera::ops::Bound<tessera::ops::QuantizeNvfp4>> quantizers{};

  tessera::device::Queue& queue() const { return executor->queue(); }
  tessera::device::MemorySpace& memory() const { return executor->memory(); }
  tessera::ops::Planner planner() const;
};

namespace tessera::bindings {

// Calls call(object); TESSERA_OK, or what its exception says.
tessera_status call_guarded(void (*call)(void* object), void* object) noexcept;

template <class Work>
tessera_status guarded(Work&& work) noexcept {
  return call_guarded([](void* object) { (*static_cast<std::remove_reference_t<Work>*>(object))(); }, &work);
}

constexpr size_t kDataAlignment = 16;             // of arrays that kernels read in vectors
constexpr int64_t kMaxSize = int64_t{1} << 24;    // of one dimension
constexpr int64_t kMaxTokens = int64_t{1} << 20;  // of a call

// Each throws kInvalidArgument, naming the parameter.
void check_not_null(const void* pointer, const char* name);
void check_pointer(const void* pointer, size_t alignment, const char* name);  // not null either
void check_size(int64_t value, int64_t least, int64_t most, const char* name);
void check_tokens(int64_t num_tokens, int64_t max_tokens);
void check_flag(bool is_right, const char* name, const char* expected, int64_t found);

DType dtype_of(tessera_dtype dtype, const char* name);
ops::InputMode input_mode_of(tessera_input_mode mode, const char* name);
// The activation of an input mode: throws unless F32 goes with F32 and BF16 with the others.
DType activation_of(tessera_dtype dtype, ops::InputMode input);
// A weight that must be [rows, cols].
ops::WeightView weight_of(const tessera_weight* weight, int64_t rows, int64_t cols, const char* name);

// A weight of the context's device as a bound op wants it. Waits until it is packed: kernels of the next call read
// weights before the kernel before them has ended.
template <class Op>
ops::PackedWeight packed_for(const tessera_context& context, const ops::Bound<Op>& op, const ops::WeightView& weight) {
  ops::PackedWeight packed = ops::pack_weight(op.packed_layout(), weight, context.queue(), context.memory());
  if (op.packed_layout() != nullptr) context.executor->synchronize();
  return packed;
}

}  // namespace tessera::bindings
