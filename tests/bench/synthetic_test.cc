// SPDX-License-Identifier: Apache-2.0
// Models of random weights: the published shapes, values that every kind of layer can work on, states that were never
// computed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "backends/registry.h"
#include "base/error.h"
#include "bench/e2e/bench_model.h"
#include "bench/shapes/published.h"
#include "bench/synthetic/random_caches.h"
#include "bench/synthetic/synthetic_weights.h"
#include "model/model.h"
#include "testing/apart_executor.h"
#include "testing/op_harness.h"
#include "testing/trace_recorder.h"

namespace tessera {
namespace {

using bench::published_config;
using bench::SyntheticWeights;
using bench::with_layers;
using Ratios = std::vector<int64_t>;

class SyntheticTest : public testing::RandomTest {};

int64_t count_of(const model::Config& config, int64_t ratio) {
  return std::count(config.compress_ratios.begin(), config.compress_ratios.end(), ratio);
}

TEST(PublishedShapes, HaveTheirLayers) {
  const model::Config flash = published_config("flash"), pro = published_config("pro");
  EXPECT_EQ(flash.num_layers, 43);
  EXPECT_EQ(count_of(flash, 0), 2);
  EXPECT_EQ(count_of(flash, 4), 21);
  EXPECT_EQ(count_of(flash, 128), 20);
  EXPECT_EQ(pro.num_layers, 61);
  EXPECT_EQ(count_of(pro, 4), 30);
  EXPECT_EQ(count_of(pro, 128), 31);
  // As published, where the router's biases are not counted.
  for (const auto& [config, parameters] : {std::pair{flash, 284332230231}, std::pair{pro, 1572997179491}}) {
    int64_t count = 0;
    for (const model::WeightRow& row : model::make_weight_spec(config, 0)) {
      if (row.kind != model::WeightKind::kTable && !row.name.ends_with("gate.bias")) count += row.shape.num_elements();
    }
    EXPECT_EQ(count, parameters);
  }
  EXPECT_EQ(with_layers(flash, 4).compress_ratios, (Ratios{0, 4, 128, 4}));
  EXPECT_EQ(with_layers(flash, 1).compress_ratios, (Ratios{4}));
  EXPECT_EQ(with_layers(pro, 4).compress_ratios, (Ratios{4, 128, 4, 128}));
  EXPECT_EQ(with_layers(flash, 43).compress_ratios, flash.compress_ratios);
  EXPECT_THROW(with_layers(flash, 44), Error);
  EXPECT_THROW(published_config("flush"), Error);
}

class DenseFormatTest : public SyntheticTest, public ::testing::WithParamInterface<ops::WeightFormat> {};

TEST_P(DenseFormatTest, WeightsAreValidAndDoNotDependOnThreads) {
  const model::Config config = published_config("small");
  SyntheticWeights one(config, seed_, 1, {}, GetParam()), three(config, seed_, 3, {}, GetParam()),
      other(config, seed_ + 1, 1, {}, GetParam());
  EXPECT_EQ(one.format("layers.0.attn.wq_b"), GetParam());
  EXPECT_EQ(one.format("layers.0.ffn.experts.0.w1"), ops::WeightFormat::kNvfp4);
  uint64_t total = 0;
  for (const model::WeightRow& row : model::make_weight_spec(config, 0)) {
    SCOPED_TRACE(row.name);
    if (row.kind == model::WeightKind::kTable) {
      const device::Tensor table = one.load_table(row.name);
      for (int64_t t = 0; t < row.shape[0]; ++t) {
        const int32_t* ids = table.as<int32_t>() + t * row.shape[1];
        EXPECT_EQ(std::set<int32_t>(ids, ids + row.shape[1]).size(), static_cast<size_t>(row.shape[1]));
        EXPECT_TRUE(std::all_of(ids, ids + row.shape[1], [&](int32_t e) { return e >= 0 && e < config.num_experts; }));
      }
      total += static_cast<uint64_t>(table.view().num_bytes());
      continue;
    }
    if (row.kind == model::WeightKind::kVector) {
      const device::Tensor vector = one.load_vector(row.name);
      for (int64_t i = 0; i < row.shape.num_elements(); ++i) EXPECT_TRUE(std::isfinite(vector.as<float>()[i]));
      total += static_cast<uint64_t>(vector.view().num_bytes());
      continue;
    }
    const model::Matrix a = one.load_matrix(row.name), b = three.load_matrix(row.name), c = other.load_matrix(row.name);
    EXPECT_EQ(std::memcmp(a.data.data(), b.data.data(), a.data.size()), 0);
    EXPECT_NE(std::memcmp(a.data.data(), c.data.data(), a.data.size()), 0);
    std::vector<float> values(static_cast<size_t>(row.shape[1]));
    double squares = 0;
    for (int64_t n = 0; n < row.shape[0]; ++n) {
      ops::decode_weight_row(a.view, n, values.data());
      for (const float value : values) {
        EXPECT_TRUE(std::isfinite(value));
        squares += std::pow(static_cast<double>(value) * static_cast<double>(a.view.tensor_scale), 2);
      }
    }
    const double length = std::sqrt(squares / static_cast<double>(row.shape[0]));
    const double wanted = row.name == "embed" ? std::sqrt(static_cast<double>(row.shape[1])) : 1;
    if (a.view.format == ops::WeightFormat::kFp8Block) {  // times powers of two; these have a block or two
      EXPECT_TRUE(a.view.scales_fold && ops::do_scales_fold(a.view));
      EXPECT_LT(std::abs(std::log2(length / wanted)), 1.25);
    } else {
      EXPECT_NEAR(length, wanted, 0.1 * length);
    }
    total += a.data.size() + a.scales.size();
  }
  EXPECT_EQ(total, one.total_bytes());
}

// Where a device makes them, they lie in its memory and have the bytes that the host makes.
TEST_P(DenseFormatTest, WeightsMadeByADeviceHaveTheSameBytes) {
  const model::Config config = published_config("small");
  const auto check = [&](device::Executor& executor, const device::Machine& machine) {
    SyntheticWeights host(config, seed_, 2, {}, GetParam()), made(config, seed_, 2, {}, GetParam());
    made.make_in(executor, machine);
    int64_t num_matrices = 0;
    for (const model::WeightRow& row : model::make_weight_spec(config, 0)) {
      if (row.kind != model::WeightKind::kLinear && row.kind != model::WeightKind::kPlain) continue;
      SCOPED_TRACE(row.name);
      const model::Matrix expected = host.load_matrix(row.name), found = made.load_matrix(row.name);
      EXPECT_EQ(found.view.tensor_scale, expected.view.tensor_scale);
      EXPECT_EQ(found.view.format, expected.view.format);
      for (const auto& [a, b] : {std::pair{&found.data, &expected.data}, {&found.scales, &expected.scales}}) {
        ASSERT_EQ(a->size(), b->size());
        if (a->size() == 0) continue;
        EXPECT_EQ(&a->memory(), &executor.memory());
        std::vector<unsigned char> bytes(a->size(), 0xA5);
        executor.memory().download(bytes.data(), a->data(), bytes.size());
        ASSERT_EQ(std::memcmp(bytes.data(), b->data(), bytes.size()), 0);
      }
      // Every kind of matrix, not every one: an emulated GPU is slow.
      if (++num_matrices == 40) break;
    }
    EXPECT_EQ(num_matrices, 40);
  };
  testing::ApartExecutor apart(2);
  check(apart, device::probe_machine());
  std::string why_not;
  device::Machine machine = device::probe_machine();
  machine.gpu = testing::find_test_gpu(why_not);
  if (machine.gpu) check(testing::gpu_stage_memory().executor(), machine);
}

INSTANTIATE_TEST_SUITE_P(Dense, DenseFormatTest,
                         ::testing::Values(ops::WeightFormat::kNvfp4, ops::WeightFormat::kFp8Block),
                         [](const auto& info) { return info.param == ops::WeightFormat::kNvfp4 ? "Nvfp4" : "Fp8"; });

// Of ranks: whole matrices are those of one rank, of the others each rank has its share.
TEST_F(SyntheticTest, RanksHaveSharesOfTheWeights) {
  const model::Config config = published_config("small");
  SyntheticWeights whole(config, seed_, 1);
  for (const auto experts : {model::ExpertSplit::kById, model::ExpertSplit::kByWidth}) {
    std::vector<std::unique_ptr<SyntheticWeights>> ranks;
    for (int64_t r = 0; r < 2; ++r) {
      const model::Shard shard{r, 2, model::AttentionSplit::kByGroup, experts};
      ranks.push_back(std::make_unique<SyntheticWeights>(config, seed_, 1, shard));
      EXPECT_EQ(ranks.back()->shard().rank, r);
    }
    EXPECT_EQ(ranks[0]->total_bytes(), ranks[1]->total_bytes());
    EXPECT_LT(ranks[0]->total_bytes(), whole.total_bytes());
    const auto data = [](SyntheticWeights& weights, const std::string& name) {
      const model::Matrix matrix = weights.load_matrix(name);
      const auto* bytes = matrix.data.as<uint8_t>();
      return std::vector<uint8_t>(bytes, bytes + matrix.data.size());
    };
    for (const char* name : {"embed", "layers.0.attn.wq_a", "layers.0.ffn.gate"}) {
      EXPECT_EQ(data(*ranks[0], name), data(whole, name)) << name;
      EXPECT_EQ(data(*ranks[1], name), data(whole, name)) << name;
    }
    EXPECT_EQ(ranks[1]->local_shape("layers.0.attn.wq_b")[0] * 2, whole.local_shape("layers.0.attn.wq_b")[0]);
    EXPECT_EQ(ranks[1]->local_shape("layers.0.attn.wo_b")[1] * 2, whole.local_shape("layers.0.attn.wo_b")[1]);
    EXPECT_NE(data(*ranks[0], "layers.0.attn.wq_b"), data(*ranks[1], "layers.0.attn.wq_b"));
    if (experts == model::ExpertSplit::kById) {
      EXPECT_EQ(data(*ranks[0], "layers.0.ffn.experts.3.w2"), data(whole, "layers.0.ffn.experts.3.w2"));
      EXPECT_EQ(data(*ranks[1], "layers.0.ffn.experts.15.w1"), data(whole, "layers.0.ffn.experts.15.w1"));
    } else {
      EXPECT_EQ(ranks[0]->local_shape("layers.0.ffn.experts.3.w2"),
                (Shape{config.hidden_size, config.expert_inner / 2}));
    }
    EXPECT_EQ(ranks[0]->load_vector("layers.0.attn.attn_sink").view().shape, Shape{config.num_heads / 2});
  }
}

// Who keeps all heads has the others' parts, so that it computes what they do.
TEST_F(SyntheticTest, AllHeadsAreThoseOfTheRanks) {
  const model::Config config = published_config("small");
  for (const auto dense : {ops::WeightFormat::kNvfp4, ops::WeightFormat::kFp8Block}) {
    std::vector<std::unique_ptr<SyntheticWeights>> ranks;
    for (int64_t r = 0; r < 2; ++r) {
      model::Shard shard{r, 2, model::AttentionSplit::kByGroup, model::ExpertSplit::kByWidth};
      shard.keeps_all_heads = true;
      ranks.push_back(std::make_unique<SyntheticWeights>(config, seed_, 1, shard, dense));
    }
    const auto bytes = [](const device::Buffer& buffer) {
      return std::string(buffer.as<char>(), buffer.as<char>() + buffer.size());
    };
    const model::Shard all = model::with_whole_attention(ranks[0]->shard());
    for (const char* name : {"layers.0.attn.wq_b", "layers.0.attn.wo_a"}) {
      const model::Matrix whole = ranks[0]->load_part(name, all, nullptr);
      const model::Matrix first = ranks[0]->load_matrix(name), second = ranks[1]->load_matrix(name);
      EXPECT_EQ(bytes(whole.data), bytes(first.data) + bytes(second.data)) << name;
      EXPECT_EQ(bytes(whole.scales), bytes(first.scales) + bytes(second.scales)) << name;
      EXPECT_EQ(whole.view.tensor_scale, second.view.tensor_scale);
    }
    const char* wo_b = "layers.0.attn.wo_b";
    EXPECT_EQ(bytes(ranks[0]->load_part(wo_b, ranks[1]->shard(), nullptr).data),
              bytes(ranks[1]->load_matrix(wo_b).data));
    const char* sink = "layers.0.attn.attn_sink";
    const device::Tensor whole = ranks[1]->load_vector_part(sink, all);
    for (int64_t r = 0; r < 2; ++r) {
      const device::Tensor part = ranks[static_cast<size_t>(r)]->load_vector(sink);
      for (int64_t i = 0; i < config.num_heads / 2; ++i) {
        EXPECT_EQ(whole.as<float>()[r * config.num_heads / 2 + i], part.as<float>()[i]);
      }
    }
    model::Shard own = ranks[0]->shard();
    own.keeps_all_heads = false;
    EXPECT_GT(ranks[0]->total_bytes(), SyntheticWeights(config, seed_, 1, own, dense).total_bytes());
  }
}

TEST_F(SyntheticTest, RoutersAndIndexersChooseVariously) {
  const model::Config config = published_config("small");
  constexpr int64_t kTokens = 128;
  SyntheticWeights weights(config, seed_, 2);
  ops::Planner planner(backends::all_backends(), device::probe_machine());
  model::Model model(config, planner, weights, {}, 0, kTokens, device::make_executor(device::probe_machine(), 2), {});
  testing::TraceRecorder recorder({"expert_ids", "selection", "out"});
  model.set_tracer(&recorder);
  const auto state = model.new_sequence(4096);
  bench::fill_caches(*state, 2048, seed_);
  EXPECT_EQ(state->position(), 2048);
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < kTokens; ++t) {
    ids.push_back(static_cast<int32_t>(rng_.below(static_cast<uint64_t>(config.vocab_size))));
  }
  const model::SequenceSlice slice{state.get(), ids, model::LogitRows::kAll};
  const TensorView logits = model.step({&slice, 1});
  for (int64_t i = 0; i < logits.shape.num_elements(); ++i) ASSERT_TRUE(std::isfinite(logits.as<float>()[i]));
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    const std::vector<int32_t>& experts = recorder.ints(prefix + "ffn.expert_ids");
    ASSERT_EQ(static_cast<int64_t>(experts.size()), kTokens * config.experts_per_token);
    EXPECT_GE(std::set<int32_t>(experts.begin(), experts.end()).size(), 12u) << prefix << " of 16 experts";
    if (config.compress_ratios[static_cast<size_t>(layer)] != 4) continue;
    const std::vector<int32_t>& chosen = recorder.ints(prefix + "attn.indexer.selection");
    EXPECT_GE(std::set<int32_t>(chosen.begin(), chosen.end()).size(), 100u) << prefix << " of 544 entries";
  }
  // A second token reads what the fill and the step left.
  EXPECT_GT(bench::cache_bytes_read(*state, 1, config), bench::cache_bytes_read(*state, 0, config));
}

TEST_F(SyntheticTest, LayersFollowMemory) {
  bench::ModelOptions options;
  options.synthetic = "flash";
  options.load.max_step_tokens = 512;
  EXPECT_EQ(bench::layers_that_fit(options, 0), 1) << "at least one is tried";
  EXPECT_EQ(bench::layers_that_fit(options, uint64_t{1} << 50), 43);
  const int64_t some = bench::layers_that_fit(options, uint64_t{20} << 30);
  EXPECT_GE(some, 3);
  EXPECT_LE(some, 5);
}

}  // namespace
}  // namespace tessera
