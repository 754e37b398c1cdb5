// SPDX-License-Identifier: Apache-2.0
// A stack gives the same bits wherever its memory is, and copies what it is given there and back.
#include "doctor/layer_stack.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "backends/registry.h"
#include "doctor/op_recorder.h"
#include "testing/apart_executor.h"
#include "testing/compare.h"

namespace tessera::doctor {

namespace {

struct Result {
  std::vector<float> logits;
  std::vector<std::vector<float>> outputs;  // of every op
};

Result run(model::WeightSource& weights, device::Executor& executor, const ops::Precision& precision) {
  std::vector<int32_t> ids(40);
  std::iota(ids.begin(), ids.end(), 3);
  const device::Machine machine = device::probe_machine();
  LayerStack stack(weights, backends::all_backends(), machine, executor, {precision, false}, ids);
  const device::Tensor streams = stack.embed();
  Result result;
  OpRecorder recorder;
  for (size_t layer = 0; layer < stack.num_layers(); ++layer) {
    recorder.clear();
    stack.run_layer(layer, streams, &recorder);
    for (const OpRecorder::Output& output : recorder.outputs()) result.outputs.push_back(output.values);
  }
  result.logits = stack.logits(streams);
  return result;
}

TEST(LayerStack, MemoryApartGivesTheSameBits) {
  const std::string folder = std::string(TESSERA_SOURCE_DIR) + "/models/tiny-v4";
  const model::Config config = model::load_config(folder);
  const checkpoint::Checkpoint checkpoint = checkpoint::Checkpoint::open(folder);
  for (const ops::Precision precision : {ops::Precision{ops::InputMode::kF32, ops::CacheMode::kExact},
                                         ops::Precision{ops::InputMode::kA16, ops::CacheMode::kFp8}}) {
    model::WeightSource weights(checkpoint, config, 0, model::Shard{}, nullptr, model::Inexact::kRound);
    const std::unique_ptr<device::Executor> host = device::make_executor(device::probe_machine(), 2);
    testing::ApartExecutor apart(2);
    const Result expected = run(weights, *host, precision), found = run(weights, apart, precision);
    EXPECT_TRUE(testing::same_bits(found.logits, expected.logits));
    ASSERT_EQ(found.outputs.size(), expected.outputs.size());
    ASSERT_GT(found.outputs.size(), 6u * 10);
    for (size_t i = 0; i < found.outputs.size(); ++i) {
      EXPECT_TRUE(testing::same_bits(found.outputs[i], expected.outputs[i])) << i;
    }
    EXPECT_GT(apart.memory().num_uploads(), 6u);
    EXPECT_GE(apart.memory().num_downloads(), found.outputs.size());
  }
}

}  // namespace

}  // namespace tessera::doctor
