// SPDX-License-Identifier: Apache-2.0
#include "engine/score.h"

#include <algorithm>
#include <cmath>

namespace tessera::engine {

double negative_log_likelihood(std::span<const float> logits, int32_t id) {
  const double largest = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - largest);
  return std::log(sum) + (largest - static_cast<double>(logits[static_cast<size_t>(id)]));
}

double TextScore::perplexity() const {
  return num_tokens == 0 ? 1 : std::exp(nats / static_cast<double>(num_tokens));
}

TextScore score_text(model::Runner& runner, std::span<const int32_t> ids, ProgressSink* progress,
                     const std::atomic<bool>* cancel) {
  TextScore score;
  const auto state = runner.new_sequence(static_cast<int64_t>(ids.size()));
  const size_t vocab = static_cast<size_t>(runner.facts().vocab_size);
  for (size_t begin = 0; begin < ids.size() && (cancel == nullptr || !cancel->load());) {
    const size_t count = std::min(ids.size() - begin, static_cast<size_t>(runner.max_step_tokens()));
    const model::SequenceSlice slice{state.get(), ids.subspan(begin, count), model::LogitRows::kAll};
    const TensorView logits = runner.step({&slice, 1});
    for (size_t i = 0; i < count && begin + i + 1 < ids.size(); ++i) {
      score.nats += negative_log_likelihood({logits.as<float>() + i * vocab, vocab}, ids[begin + i + 1]);
      ++score.num_tokens;
    }
    begin += count;
    if (progress != nullptr) progress->advance(count);
  }
  return score;
}

}  // namespace tessera::engine
