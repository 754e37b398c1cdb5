// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cmath>

#include "bindings/c/boundary.h"

using namespace tessera;
using namespace tessera::bindings;

struct tessera_attention {
  tessera_context* context;
  int64_t max_tokens;
  ops::Bound<ops::Attention> op;
  ops::Bound<ops::CacheWrite> store;
  std::string kernel;
  device::Buffer workspace;
};

namespace {

ops::EntryLayout layout_of(const tessera_attention_desc& desc) {
  check_size(desc.head_dim, 1, ops::kMaxHeadDim, "desc.head_dim");
  check_size(desc.rope_dim, 0, desc.head_dim, "desc.rope_dim");
  ops::EntryLayout layout{.width = desc.head_dim, .rope_dim = desc.rope_dim};
  switch (desc.cache) {
    case TESSERA_CACHE_F32:
      layout.format = ops::EntryFormat::kF32;
      return layout;
    case TESSERA_CACHE_BF16:
      layout.format = ops::EntryFormat::kBf16;
      return layout;
    case TESSERA_CACHE_FP8:
      layout.format = ops::EntryFormat::kKvFp8Bf16;
      check_flag(layout.nope_dim() % ops::kKvGroup == 0, "desc.head_dim - desc.rope_dim", "a multiple of 64",
                 layout.nope_dim());
      return layout;
    default:
      fail(ErrorCode::kInvalidArgument,
           fmt::format("desc.cache: expected a TESSERA_CACHE_ value, found {}", desc.cache));
  }
}

using Bases = ops::SequenceBases<const uint8_t>;

// All but the caches.
void check_step(const tessera_attention& attention, const tessera_attention_step& step, int64_t least_slots,
                bool has_entries) {
  check_pointer(step.q, kDataAlignment, "step.q");
  check_pointer(step.out, kDataAlignment, "step.out");
  check_pointer(step.positions, alignof(int64_t), "step.positions");
  check_pointer(step.sink, alignof(float), "step.sink");
  check_size(step.window_slots, attention.op.desc.window - 1 + least_slots, int64_t{1} << 40, "step.window_slots");
  if (!has_entries) {
    check_flag(step.selected == nullptr, "step.selected", "NULL without compressed entries", 1);
    return;
  }
  check_pointer(step.num_entries, alignof(int32_t), "step.num_entries");
  if (step.selected == nullptr) return;
  check_pointer(step.selected, alignof(int32_t), "step.selected");
  check_size(step.selected_stride, 1, int64_t{1} << 31, "step.selected_stride");
}

void run(const tessera_attention& attention, const tessera_attention_step& step, const Bases& windows,
         const Bases& entries) {
  attention.context->executor->make_current();
  const ops::Attention::Desc& desc = attention.op.desc;
  const Shape shape = {step.num_tokens, desc.heads, desc.head_dim};
  attention.op.run({.q = {const_cast<void*>(step.q), desc.activation, shape},
                    .positions = step.positions,
                    .window_cache = windows,
                    .window_slots = step.window_slots,
                    .entry_cache = entries,
                    .num_entries = step.num_entries,
                    .selected = step.selected,
                    .selected_stride = step.selected_stride,
                    .sink = step.sink,
                    .out = {step.out, desc.activation, shape},
                    .num_tokens = step.num_tokens,
                    .workspace = attention.workspace.data()},
                   attention.context->queue());
}

void store(const tessera_attention& attention, const void* rows, const int64_t* slots, int64_t num_rows,
           const ops::SequenceBases<uint8_t>& caches) {
  check_pointer(rows, kDataAlignment, "rows");
  check_pointer(slots, alignof(int64_t), "slots");
  attention.context->executor->make_current();
  const ops::CacheWrite::Desc& desc = attention.store.desc;
  attention.store.run({.rows = {const_cast<void*>(rows), desc.activation, {num_rows, desc.layout.width}},
                       .slots = slots,
                       .cache = caches,
                       .num_rows = num_rows},
                      attention.context->queue());
}

}  // namespace

extern "C" {

tessera_status tessera_attention_create(tessera_context* context, const tessera_attention_desc* desc,
                                        int64_t max_tokens, tessera_attention** attention) {
  return guarded([&] {
    check_not_null(context, "context");
    check_not_null(desc, "desc");
    check_not_null(attention, "attention");
    check_size(max_tokens, 1, kMaxTokens, "max_tokens");
    check_size(desc->heads, 1, 4096, "desc.heads");
    check_size(desc->window, 1, kMaxSize, "desc.window");
    if (!std::isfinite(desc->scale)) fail(ErrorCode::kInvalidArgument, "desc.scale: expected a finite number");
    const ops::EntryLayout layout = layout_of(*desc);
    const DType activation = dtype_of(desc->activation, "desc.activation");
    const bool is_f32 = layout.format == ops::EntryFormat::kF32;
    check_flag((activation == DType::kF32) == is_f32, "desc.activation",
               is_f32 ? "TESSERA_F32 with TESSERA_CACHE_F32" : "TESSERA_BF16 with this cache", desc->activation);
    context->executor->make_current();
    auto made = std::make_unique<tessera_attention>();
    made->context = context;
    made->max_tokens = max_tokens;
    ops::Planner planner = context->planner();
    made->store = planner.bind<ops::CacheWrite>("store", {.layout = layout, .activation = activation});
    made->op = planner.bind<ops::Attention>("attention", {.heads = desc->heads,
                                                          .head_dim = desc->head_dim,
                                                          .window = desc->window,
                                                          .scale = desc->scale,
                                                          .layout = layout,
                                                          .activation = activation});
    made->kernel = planner.lines().back().chosen;
    made->workspace = device::Buffer(static_cast<size_t>(made->op.workspace_bytes(max_tokens)), context->memory());
    *attention = made.release();
  });
}

int64_t tessera_attention_entry_bytes(const tessera_attention* attention) {
  return attention == nullptr ? 0 : attention->op.desc.layout.entry_bytes();
}

tessera_status tessera_attention_store(tessera_attention* attention, const void* rows, const int64_t* slots,
                                       int64_t num_rows, uint8_t* cache) {
  return guarded([&] {
    check_not_null(attention, "attention");
    check_size(num_rows, 0, kMaxTokens, "num_rows");
    if (num_rows == 0) return;
    check_pointer(cache, kDataAlignment, "cache");
    store(*attention, rows, slots, num_rows, cache);
  });
}

tessera_status tessera_attention_store_batch(tessera_attention* attention, const void* rows, const int64_t* slots,
                                             const int32_t* places, int64_t num_rows, uint8_t* const* caches) {
  return guarded([&] {
    check_not_null(attention, "attention");
    check_size(num_rows, 0, kMaxTokens, "num_rows");
    if (num_rows == 0) return;
    check_pointer(caches, alignof(void*), "caches");
    check_pointer(places, alignof(int32_t), "places");
    store(*attention, rows, slots, num_rows, {caches, places});
  });
}

tessera_status tessera_attention_run(tessera_attention* attention, const tessera_attention_step* step) {
  return guarded([&] {
    check_not_null(attention, "attention");
    check_not_null(step, "step");
    check_tokens(step->num_tokens, attention->max_tokens);
    if (step->num_tokens == 0) return;
    check_pointer(step->window_cache, kDataAlignment, "step.window_cache");
    if (step->entry_cache != nullptr) check_pointer(step->entry_cache, kDataAlignment, "step.entry_cache");
    check_step(*attention, *step, step->num_tokens, step->entry_cache != nullptr);
    run(*attention, *step, step->window_cache, step->entry_cache);
  });
}

tessera_status tessera_attention_run_batch(tessera_attention* attention, const tessera_attention_batch* batch) {
  return guarded([&] {
    check_not_null(attention, "attention");
    check_not_null(batch, "batch");
    const tessera_attention_step& step = batch->step;
    check_tokens(step.num_tokens, attention->max_tokens);
    if (step.num_tokens == 0) return;
    check_flag(step.window_cache == nullptr, "batch.step.window_cache", "NULL", 1);
    check_flag(step.entry_cache == nullptr, "batch.step.entry_cache", "NULL", 1);
    check_pointer(batch->window_caches, alignof(void*), "batch.window_caches");
    check_pointer(batch->places, alignof(int32_t), "batch.places");
    if (batch->entry_caches != nullptr) check_pointer(batch->entry_caches, alignof(void*), "batch.entry_caches");
    check_step(*attention, step, 1, batch->entry_caches != nullptr);
    run(*attention, step, {batch->window_caches, batch->places},
        batch->entry_caches == nullptr ? Bases() : Bases(batch->entry_caches, batch->places));
  });
}

const char* tessera_attention_kernel(const tessera_attention* attention) {
  return attention == nullptr ? nullptr : attention->kernel.c_str();
}

void tessera_attention_destroy(tessera_attention* attention) {
  delete attention;
}
}
