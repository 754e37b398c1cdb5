// SPDX-License-Identifier: Apache-2.0
// A step that can't be recorded is refused, and the error names the op and what it did: allocations, copies from and to
// the host, waits, memory given back. (GPU scalars read by the host and tensors left there end in one of these.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backends/registry.h"
#include "base/error.h"
#include "model/model.h"
#include "model/weight_source.h"
#include "testing/apart_executor.h"
#include "testing/goldens.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using testing::ApartExecutor;
using ::testing::HasSubstr;

// What the planted op does besides its work; nothing where empty.
std::function<void()> g_deed;

void do_it() {
  if (g_deed) g_deed();
}

constexpr ops::Variant<ops::Rope> kRope[] = {
    {"planted", [](const ops::Rope::Desc&, std::string&) { return true; }, nullptr, nullptr,
     [](const ops::Rope::Desc& desc, const ops::Rope::Args& args, device::Queue& queue) {
       do_it();
       ops::rope_reference(desc, args, queue);
     }}};
constexpr ops::Backend kPlanted{.name = "planted",
                                .available = [](const device::Machine&, std::string&) { return true; },
                                .verification = ops::Verification::kCompiledOnly,
                                .variants = ops::make_variants(kRope)};

class RecordingTest : public ::testing::Test {
 protected:
  RecordingTest() {
    const std::string folder = testing::tiny_model();
    const model::Config config = model::load_config(folder);
    const checkpoint::Checkpoint checkpoint = checkpoint::Checkpoint::open(folder);
    model::WeightSource weights(checkpoint, config, 0, model::Shard{}, nullptr, model::Inexact::kRound);
    const ops::Backend* const backends[] = {&kPlanted, backends::all_backends().back()};
    ops::Planner planner(backends, device::probe_machine());
    auto executor = std::make_unique<ApartExecutor>(2, ApartExecutor::Records::kYes);
    executor_ = executor.get();
    model_ = std::make_unique<model::Model>(config, planner, weights, ops::Precision{}, 0, 4, std::move(executor),
                                            model::Bypass{});
    state_ = model_->new_sequence(64);
  }
  ~RecordingTest() override { g_deed = nullptr; }

  // The message of the error that recording a decode step ends in.
  std::string message_of_step() {
    const int32_t id = 5;
    const model::SequenceSlice slice{state_.get(), {&id, 1}, model::LogitRows::kLast};
    try {
      model_->step({&slice, 1});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDeviceError);
      EXPECT_FALSE(executor_->queue().is_recording());
      EXPECT_EQ(state_->position(), 0);
      return error.what();
    }
    ADD_FAILURE() << "the step was recorded";
    return "";
  }

  ApartExecutor* executor_ = nullptr;
  std::unique_ptr<model::Model> model_;
  std::unique_ptr<model::SequenceState> state_;
};

TEST_F(RecordingTest, NamesTheOpAndWhatItDid) {
  const auto names = [](const char* what) {
    return AllOf(HasSubstr("while recording layers.0.attn."), HasSubstr("(rope, planted): "), HasSubstr(what));
  };
  device::MemorySpace& memory = executor_->memory();
  const device::Buffer there(256, memory);
  std::vector<char> here(256);
  g_deed = [&] { const device::Buffer scratch(100, memory); };
  EXPECT_THAT(message_of_step(), names("an allocation can't be recorded"));
  g_deed = [&] { memory.upload(there.data(), here.data(), here.size()); };
  EXPECT_THAT(message_of_step(), names("a copy from the host can't be recorded"));
  g_deed = [&] { memory.download(here.data(), there.data(), here.size()); };
  EXPECT_THAT(message_of_step(), names("a copy to the host can't be recorded"));
  g_deed = [&] { memory.queue_download(here.data(), there.data(), 4); };
  EXPECT_THAT(message_of_step(), names("a copy to the host can't be recorded"));
  g_deed = [&] { executor_->synchronize(); };
  EXPECT_THAT(message_of_step(), names("a wait can't be recorded"));
  // What may not throw is told when the op ends.
  auto lost = std::make_unique<device::Buffer>(100, memory);
  g_deed = [&] { lost.reset(); };
  EXPECT_THAT(message_of_step(), names("giving memory back can't be recorded"));
  // An op's own complaint gets its name too.
  g_deed = [] { fail(ErrorCode::kDeviceError, "src/x.cu:1: cudaMalloc(...): cudaErrorStreamCaptureUnsupported"); };
  EXPECT_THAT(message_of_step(), names("cudaErrorStreamCaptureUnsupported"));
}

TEST_F(RecordingTest, EagerStepsMayDoAllOfIt) {
  device::MemorySpace& memory = executor_->memory();
  g_deed = [&] {
    const device::Buffer scratch(100, memory);
    executor_->synchronize();
  };
  const int32_t ids[] = {5, 6, 7};
  const model::SequenceSlice slice{state_.get(), ids, model::LogitRows::kLast};
  model_->step({&slice, 1});
  EXPECT_EQ(state_->position(), 3);
}

TEST_F(RecordingTest, OfALogitRowThatIsOnlyDrawnFromTheTokenComesBack) {
  const std::vector<int32_t> ids = {5, 6, 7};
  const auto other = model_->new_sequence(64);
  const model::SequenceSlice plain{other.get(), ids, model::LogitRows::kLast};
  const TensorView logits = model_->step({&plain, 1});
  const std::vector<float> row(logits.as<float>(), logits.as<float>() + logits.shape.num_elements());
  model::Draw draw{.params = {.temperature = 1, .seed = 3}, .position = 3};
  const model::SequenceSlice slice{state_.get(), ids, model::LogitRows::kNone, &draw};
  const size_t before = executor_->memory().downloaded_bytes();
  EXPECT_EQ(model_->step({&slice, 1}).shape[0], 0);
  EXPECT_EQ(executor_->memory().downloaded_bytes() - before, 2 * sizeof(int32_t)) << "is it finite; the token";
  EXPECT_EQ(draw.token, model_->sample({.logits = row, .params = draw.params, .position = 3}));
}

TEST(Recording, BetweenOpsTheLastOneIsNamed) {
  ApartExecutor executor(1, ApartExecutor::Records::kYes);
  const auto message_of = [&](const std::function<void()>& work) -> std::string {
    try {
      executor.record([&] { work(); });
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message_of([&] { executor.synchronize(); }),
            "while recording a step, before its first op: a wait can't be recorded");
  EXPECT_EQ(message_of([&] {
              executor.queue().begin_op({"linear", "mma", "layers.3.attn.wq_a"});
              executor.queue().end_op();
              executor.synchronize();
            }),
            "while recording a step, after layers.3.attn.wq_a (linear, mma): a wait can't be recorded");
  std::unique_ptr<device::Buffer> lost = std::make_unique<device::Buffer>(8, executor.memory());
  EXPECT_EQ(message_of([&] { lost.reset(); }),
            "while recording a step, before its first op: giving memory back can't be recorded");
  EXPECT_EQ(message_of([] {}), "");
  executor.synchronize();  // no recording is left open
}

// For measuring: what the last step recorded is launched again, and nothing else. (Launching it twice takes a GPU: here
// what is recorded lives as long as the step.)
TEST_F(RecordingTest, NothingIsRepeatedButARecordedStep) {
  EXPECT_FALSE(model_->repeat_step(1));  // no step was made
  const auto step = [&](const std::vector<int32_t>& ids) {
    const model::SequenceSlice slice{state_.get(), ids, model::LogitRows::kLast};
    model_->step({&slice, 1});
  };
  step({5, 6});
  EXPECT_FALSE(model_->repeat_step(1));  // not recorded
  step({7});
  EXPECT_TRUE(model_->repeat_step(0));
  const int32_t id = 8;
  const model::SequenceSlice slice{state_.get(), {&id, 1}, model::LogitRows::kLast};
  model_->prepare({&slice, 1});
  EXPECT_FALSE(model_->repeat_step(0));  // the batch is another
  EXPECT_EQ(state_->position(), 3);
}

}  // namespace
}  // namespace tessera
