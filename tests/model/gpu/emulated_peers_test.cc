// SPDX-License-Identifier: Apache-2.0
// A rank's layers whose kernels make the sums over ranks themselves, through peer memory, on an emulated GPU: a rank
// that is alone sends nothing and waits for nobody, but takes every step of that way. Its kernels run one after
// another, so more ranks could not wait for each other; what they would send is in tests/backends/rank_turn_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "backends/registry.h"
#include "comm/communicator.h"
#include "comm/cuda/peer_sum.h"
#include "comm/peer.h"
#include "device/buffer.h"
#include "device/device_choice.h"
#include "device/executor.h"
#include "model/model_helpers.h"
#include "testing/compare.h"
#include "testing/goldens.h"
#include "testing/seed.h"
#include "testing/trace_recorder.h"

namespace tessera {
namespace {

using model::LogitRows;

class Alone final : public comm::Communicator {
 public:
  // `lends_peers`: kernels may make sums themselves.
  explicit Alone(bool lends_peers)
      : Communicator(0, 1), lends_peers_(lends_peers), executor_(device::make_executor(device::machine_of("cuda"), 1)) {
    calls_ = device::Buffer(device::kPeerCounters * sizeof(uint32_t), executor_->memory());
    ended_ = device::Buffer(sizeof(uint32_t), executor_->staging());
    const uint32_t none[device::kPeerCounters] = {};
    executor_->memory().upload(calls_.data(), none, sizeof none);
    *ended_.as<uint32_t>() = 0;
    view_.world = 1, view_.capacity = comm::PeerOptions().capacity(1);
    view_.calls = calls_.as<uint32_t>(), view_.ended = ended_.as<uint32_t>();
  }
  const device::PeerView* peer_view(DType in, int64_t count, int num_launches) const override {
    return lends_peers_ && comm::PeerOptions().is_fused(1, in, count, num_launches) ? &view_ : nullptr;
  }
  void abort(const std::string&) noexcept override {}
  void check() override {}

  int64_t num_sums() const { return num_sums_; }
  // Sums that were made over peer memory, in kernels of whatever kind.
  uint32_t num_calls() const {
    uint32_t calls[device::kPeerCounters];
    executor_->memory().download(calls, calls_.data(), sizeof calls);
    EXPECT_EQ(calls[1], 0u);
    return calls[0];
  }

 protected:
  void do_all_reduce(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    ++num_sums_;
    comm::peer_sum_on_gpu(view_, comm::PeerWay::kWhole, in.data, in.dtype == DType::kBF16, out.data,
                          out.dtype == DType::kBF16, in.shape.num_elements(), queue);
  }
  void do_all_gather(const TensorView&, const TensorView&, device::Queue&) override { FAIL(); }
  void do_reduce_scatter(const TensorView&, const TensorView&, device::Queue&) override { FAIL(); }
  void do_all_to_all(const comm::Runs&, const comm::Runs&, device::Queue&) override { FAIL(); }
  void do_broadcast(const TensorView&, int, device::Queue&) override { FAIL(); }
  void do_barrier(device::Queue&) override { FAIL(); }

 private:
  const bool lends_peers_;
  std::unique_ptr<device::Executor> executor_;
  device::Buffer calls_, ended_;
  device::PeerView view_;
  int64_t num_sums_ = 0;
};

model::LoadedModel load(Alone& comm) {
  model::LoadOptions options;
  options.num_threads = 2;
  options.comm = &comm;
  options.shard = {0, 1, model::AttentionSplit::kByGroup, model::ExpertSplit::kByWidth};
  return model::load_model(testing::tiny_model(), options, backends::all_backends(), testing::test_machine(), nullptr,
                           nullptr);
}

// Of a prompt of 9 tokens and steps of one, recorded ones among them; the prompt traced or not.
std::vector<float> logits_of(const model::LoadedModel& loaded, std::span<const int32_t> ids, model::Tracer* tracer) {
  const auto state = loaded.runner->new_sequence(16);
  loaded.runner->set_tracer(tracer);
  std::vector<float> logits = testing::feed(*loaded.runner, *state, ids.first(9), LogitRows::kAll);
  loaded.runner->set_tracer(nullptr);
  for (const size_t count : {3, 1, 1}) {
    const std::vector<float> rest = testing::feed(
        *loaded.runner, *state, ids.subspan(static_cast<size_t>(state->position()), count), LogitRows::kAll);
    logits.insert(logits.end(), rest.begin(), rest.end());
  }
  return logits;
}

TEST(EmulatedPeers, SumsInsideTheLayersKernelsChangeNoBit) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Rng rng(seed);
  setenv("TESSERA_DEVICE", "cuda:0", 1);
  Alone with_peers(true), without_peers(false);
  const auto with = load(with_peers), without = load(without_peers);
  const auto count = [](const model::LoadedModel& loaded, const char* end) {
    return std::count_if(loaded.plan.begin(), loaded.plan.end(),
                         [&](const ops::PlanLine& line) { return line.where.ends_with(end); });
  };
  EXPECT_GE(count(with, ".turn_of_ranks"), with.config.num_layers);
  EXPECT_EQ(count(without, ".turn_of_ranks"), 0);
  EXPECT_GE(count(with, ".begin"), with.config.num_layers - 1) << "a layer's end reads for the next";
  EXPECT_EQ(count(without, ".begin"), 0);
  const std::vector<int32_t> ids = testing::random_ids(rng, 14, with.runner->facts().vocab_size);
  const std::vector<float> expected = logits_of(without, ids, nullptr);
  EXPECT_GT(without_peers.num_sums(), 0);
  EXPECT_TRUE(testing::same_bits(logits_of(with, ids, nullptr), expected));
  EXPECT_EQ(with_peers.num_sums(), 0) << "all sums are parts of other kernels";
  EXPECT_EQ(with_peers.num_calls(), without_peers.num_calls());
  // Whoever looks sees attention's output whole: the sums are made by themselves then.
  testing::TraceRecorder trace({"attn_out"});
  EXPECT_TRUE(testing::same_bits(logits_of(with, ids, &trace), expected));
  EXPECT_EQ(with_peers.num_sums(), 2 * with.config.num_layers);
  EXPECT_FALSE(trace.floats("layers.0.attn_out").empty());
}

}  // namespace
}  // namespace tessera
