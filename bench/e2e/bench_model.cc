// SPDX-License-Identifier: Apache-2.0
#include "bench/e2e/bench_model.h"

#include <algorithm>

#include "backends/registry.h"
#include "base/rng.h"
#include "bench/ops/timing.h"

namespace tessera::bench {

namespace {

using model::LogitRows;

int32_t likeliest(const TensorView& logits) {
  const float* row = logits.as<float>();
  return static_cast<int32_t>(std::max_element(row, row + logits.shape[1]) - row);
}

void run_once(model::Runner& runner, const std::vector<int32_t>& ids, int64_t decode_tokens, ModelRow& row) {
  const auto count = static_cast<int64_t>(ids.size());
  const auto state = runner.new_sequence(count + decode_tokens);
  int32_t next = 0;
  const double start = seconds_now();
  for (int64_t at = 0; at < count;) {
    const int64_t size = std::min(runner.max_step_tokens(), count - at);
    const bool is_last = at + size == count;
    const model::SequenceSlice slice{state.get(),
                                     std::span(ids).subspan(static_cast<size_t>(at), static_cast<size_t>(size)),
                                     is_last ? LogitRows::kLast : LogitRows::kNone};
    const TensorView logits = runner.step({&slice, 1});
    if (is_last) next = likeliest(logits);
    at += size;
  }
  const double middle = seconds_now();
  for (int64_t i = 0; i < decode_tokens; ++i) {
    const model::SequenceSlice slice{state.get(), {&next, 1}, LogitRows::kLast};
    next = likeliest(runner.step({&slice, 1}));
  }
  row.prefill_tokens_per_second.push_back(static_cast<double>(count) / (middle - start));
  row.decode_tokens_per_second.push_back(static_cast<double>(decode_tokens) / (seconds_now() - middle));
}

}  // namespace

std::vector<ModelRow> run_model(const ModelOptions& options, const std::function<void(const ModelRow&)>& on_row) {
  const model::LoadedModel loaded = model::load_model(options.directory, options.load, backends::all_backends(),
                                                      device::probe_machine(), nullptr, nullptr);
  model::Runner& runner = *loaded.runner;
  std::vector<ModelRow> rows;
  for (const int64_t context : options.contexts) {
    if (context + options.decode_tokens > runner.facts().max_positions) continue;
    Rng rng(static_cast<uint64_t>(context));
    std::vector<int32_t> ids(static_cast<size_t>(context));
    for (int32_t& id : ids) id = static_cast<int32_t>(rng.below(static_cast<uint64_t>(runner.facts().vocab_size)));
    ModelRow row{context, {}, {}};
    run_once(runner, ids, 1, row);  // not counted
    row = {context, {}, {}};
    for (int64_t i = 0; i < options.repeats; ++i) run_once(runner, ids, options.decode_tokens, row);
    on_row(row);
    rows.push_back(row);
  }
  return rows;
}

}  // namespace tessera::bench
