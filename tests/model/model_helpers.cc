// SPDX-License-Identifier: Apache-2.0
#include "model/model_helpers.h"

#include <algorithm>

#include "backends/registry.h"

namespace tessera::testing {

model::LoadedModel load(const std::string& folder, ops::InputMode input, ops::CacheMode cache, int num_threads,
                        int64_t max_step_tokens) {
  model::LoadOptions options;
  options.precision = {input, cache};
  options.num_threads = num_threads;
  options.max_step_tokens = max_step_tokens;
  return model::load_model(folder, options, backends::all_backends(), test_machine(), nullptr, nullptr);
}

model::LoadedModel load_fused(const std::string& folder, ops::Precision precision, const device::Machine& machine,
                              bool is_fused) {
  model::LoadOptions options;
  options.precision = precision;
  options.num_threads = 2;
  if (!is_fused) {
    options.forced = ops::parse_forced(
        "norm_rope=none,mhc_post_pre=none,linear_group=none,all_experts=none,pool_norm=none,attention_rope=none");
  }
  return model::load_model(folder, options, backends::all_backends(), machine, nullptr, nullptr);
}

int num_fused(const model::LoadedModel& loaded) {
  return static_cast<int>(std::count_if(loaded.plan.begin(), loaded.plan.end(), [](const ops::PlanLine& line) {
    return line.op == ops::NormRope::kName || line.op == ops::MhcPostPre::kName || line.op == ops::LinearGroup::kName ||
           line.op == ops::AllExperts::kName || line.op == ops::PoolNorm::kName || line.op == ops::AttentionRope::kName;
  }));
}

std::vector<float> feed(model::Runner& runner, model::SequenceState& state, std::span<const int32_t> ids,
                        model::LogitRows rows, int64_t chunk) {
  std::vector<float> logits;
  const size_t step = static_cast<size_t>(chunk == 0 ? runner.max_step_tokens() : chunk);
  for (size_t begin = 0; begin < ids.size(); begin += step) {
    const model::SequenceSlice slice{&state, ids.subspan(begin, std::min(step, ids.size() - begin)), rows};
    const TensorView view = runner.step({&slice, 1});
    logits.insert(logits.end(), view.as<float>(), view.as<float>() + view.shape.num_elements());
  }
  return logits;
}

std::vector<int32_t> random_ids(Rng& rng, int64_t count, int32_t vocab) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = static_cast<int32_t>(rng.below(static_cast<uint64_t>(vocab)));
  return ids;
}

int32_t argmax(std::span<const float> row) {
  return static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
}

}  // namespace tessera::testing
