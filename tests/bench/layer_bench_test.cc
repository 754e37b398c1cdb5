// SPDX-License-Identifier: Apache-2.0
// One layer alone: the same streams as within run_layer() wherever the layer's memory is, and rows that say what was
// read.
#include "bench/e2e/layer_bench.h"

#include <gtest/gtest.h>

#include <cstring>

#include "backends/registry.h"
#include "base/error.h"
#include "bench/e2e/bench_layer.h"
#include "bench/shapes/published.h"
#include "bench/synthetic/random_caches.h"
#include "numeric/bf16.h"
#include "testing/apart_executor.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

using bench::SyntheticWeights;
using testing::ApartExecutor;

class LayerBenchTest : public testing::RandomTest {
 protected:
  std::unique_ptr<model::Model> make(std::unique_ptr<device::Executor> executor, int64_t most_tokens) {
    SyntheticWeights weights(config_, seed_, 2);
    weights.make_in(*executor, device::probe_machine());
    return std::make_unique<model::Model>(config_, planner_, weights, ops::Precision{}, 0, most_tokens,
                                          std::move(executor), model::Bypass{});
  }
  std::vector<int32_t> ids(int64_t count) {
    std::vector<int32_t> out;
    for (int64_t i = 0; i < count; ++i) {
      out.push_back(static_cast<int32_t>(rng_.below(static_cast<uint64_t>(config_.vocab_size))));
    }
    return out;
  }

  const model::Config config_ = bench::published_config("small");
  ops::Planner planner_{backends::all_backends(), device::probe_machine()};
};

TEST_F(LayerBenchTest, QueuedLayersGiveTheBitsOfLayersRun) {
  const auto host = make(device::make_executor(device::probe_machine(), 2), 16);
  const auto apart = make(std::make_unique<ApartExecutor>(2, ApartExecutor::Records::kYes), 16);
  for (const int64_t tokens : {1, 13}) {
    const std::vector<int32_t> chosen = ids(tokens);
    device::Tensor expected(DType::kBF16, {tokens, ops::kHcStreams, config_.hidden_size});
    for (int64_t i = 0; i < expected.view().shape.num_elements(); ++i) {
      expected.as<uint16_t>()[i] = numeric::bf16_from_float(rng_.normal());
    }
    const device::Tensor placed = expected.clone_into(apart->executor().memory());
    const auto a = host->new_sequence(400), b = apart->new_sequence(400);
    bench::fill_caches(*a, 256, seed_), bench::fill_caches(*b, 256, seed_);
    const auto slice = [&](model::SequenceState& state) {
      return model::SequenceSlice{&state, chosen, tokens == 1 ? model::LogitRows::kLast : model::LogitRows::kNone};
    };
    const model::SequenceSlice on_host = slice(*a), on_device = slice(*b);
    apart->prepare({&on_device, 1});
    for (size_t layer = 0; layer < static_cast<size_t>(config_.num_layers); ++layer) {
      host->run_layer(layer, {&on_host, 1}, expected);
      apart->queue_layer(layer, placed);
      const auto bytes = static_cast<size_t>(expected.view().num_bytes());
      EXPECT_EQ(std::memcmp(placed.view().data, expected.view().data, bytes), 0)
          << "layer " << layer << ", " << tokens << " tokens";
    }
    EXPECT_EQ(b->position(), 256) << "measuring moves no sequence";
  }
}

TEST_F(LayerBenchTest, RowsSayWhatIsRead) {
  constexpr int64_t kTokens = 24, kContext = 512;
  for (const auto records : {ApartExecutor::Records::kNo, ApartExecutor::Records::kYes}) {
    SyntheticWeights weights(config_, seed_, 2);
    model::Model model(config_, planner_, weights, {}, 0, kTokens, std::make_unique<ApartExecutor>(2, records), {});
    const auto state = model.new_sequence(kContext + kTokens);
    bench::fill_caches(*state, kContext, seed_);
    bench::LayerBench bench(model, config_, weights, device::probe_machine(), seed_);
    EXPECT_GT(bench.ceilings().read_gbs.best, 0);
    for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
      SCOPED_TRACE(layer);
      const bench::LayerRow one = bench.time(*state, layer, 1, 0), many = bench.time(*state, layer, kTokens, 0);
      EXPECT_EQ(one.ratio, config_.compress_ratios[static_cast<size_t>(layer)]);
      EXPECT_EQ(one.bytes,
                weights.token_bytes(layer) + bench::cache_bytes_read(*state, static_cast<size_t>(layer), config_));
      EXPECT_EQ(one.num_experts, static_cast<double>(config_.experts_per_token));
      EXPECT_GT(many.num_experts, one.num_experts);
      EXPECT_LE(many.num_experts, static_cast<double>(config_.num_experts));
      EXPECT_GT(many.bytes, one.bytes);
      EXPECT_LE(many.bytes, weights.layer_bytes(layer, static_cast<double>(config_.num_experts)) +
                                kTokens * bench::cache_bytes_read(*state, static_cast<size_t>(layer), config_));
      for (const bench::LayerRow& row : {one, many}) {
        EXPECT_GE(row.time.seconds.size(), 5u);
        EXPECT_EQ(row.time.seconds.size(), row.read_time.seconds.size());
        EXPECT_GT(row.time.quantile(0), 0);
        EXPECT_TRUE(records == ApartExecutor::Records::kYes || row.calls == 1);
      }
    }
    EXPECT_EQ(state->position(), kContext);
  }
}

TEST_F(LayerBenchTest, SequencesOfABatchDecodeAToken) {
  constexpr int64_t kSequences = 3, kContext = 256;
  SyntheticWeights weights(config_, seed_, 2);
  model::Model model(config_, planner_, weights, {}, 0, kSequences,
                     std::make_unique<ApartExecutor>(2, ApartExecutor::Records::kYes), {});
  std::vector<std::unique_ptr<model::SequenceState>> states;
  std::vector<model::SequenceState*> batch;
  for (int64_t i = 0; i < kSequences; ++i) {
    states.push_back(model.new_sequence(kContext + 1));
    bench::fill_caches(*states.back(), kContext, seed_);
    batch.push_back(states.back().get());
  }
  bench::LayerBench bench(model, config_, weights, device::probe_machine(), seed_, 1 << 20);
  const bench::LayerRow row = bench.time({batch, 1}, 1, 0);
  EXPECT_EQ(row.tokens, kSequences);
  EXPECT_EQ(row.bytes,
            weights.layer_bytes(1, row.num_experts) + kSequences * bench::cache_bytes_read(*states[0], 1, config_));
  EXPECT_GE(row.num_experts, static_cast<double>(config_.experts_per_token));
  EXPECT_TRUE(bench.launches({batch, 1}, 1).empty()) << "a CPU launches nothing";
  for (const auto& state : states) EXPECT_EQ(state->position(), kContext);
}

TEST_F(LayerBenchTest, KindsAreThoseOfTheShape) {
  bench::LayerOptions options;
  options.shape = "small", options.context = 300, options.tokens = 4, options.seconds = 0, options.load.num_threads = 2;
  std::vector<std::string> kinds;
  const bench::LayerReport report = bench::run_layer(
      options, [&](const bench::LayerReport&, const bench::KindRows& rows) { kinds.push_back(rows.kind); });
  EXPECT_EQ(kinds, (std::vector<std::string>{"swa", "csa", "hca"}));
  EXPECT_EQ(report.context, 256);
  for (const bench::KindRows& kind : report.kinds) EXPECT_EQ(kind.rows.size(), 2u);
  options.kind = "hca", options.tokens = 1;
  const bench::LayerReport one = bench::run_layer(options, nullptr);
  ASSERT_EQ(one.kinds.size(), 1u);
  ASSERT_EQ(one.kinds[0].rows.size(), 1u);
  EXPECT_EQ(one.kinds[0].rows[0].ratio, 128);
  options.shape = "pro", options.kind = "swa";  // all of its layers are compressed
  EXPECT_THROW(bench::run_layer(options, nullptr), Error);
}

}  // namespace
}  // namespace tessera
