// SPDX-License-Identifier: Apache-2.0
// What a model is loaded with where nobody says otherwise.
#include "model/load_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "backends/registry.h"
#include "base/error.h"
#include "base/strings.h"
#include "model/memory_fit.h"
#include "model/model.h"
#include "testing/goldens.h"
#include "testing/temporary_folder.h"

namespace tessera::model {
namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;

device::Machine gpu_of(uint64_t memory, uint64_t free) {
  device::Machine machine;
  machine.gpu.emplace();
  machine.gpu->memory_bytes = memory, machine.gpu->memory_free_bytes = free;
  return machine;
}

TEST(DefaultSteps, AreSmallOnAProcessor) {
  const Config config = load_config(testing::tiny_model());
  EXPECT_EQ(default_running("cpu"), 16);
  EXPECT_EQ(default_step_tokens(testing::tiny_model(), config, {}, device::Machine{}, 1), 64);
  EXPECT_EQ(default_mixed_step_tokens(device::Machine{}, 64, 16), 64);
}

TEST(DefaultSteps, TakeAnEighthOfWhatWeightsLeaveOnAGpu) {
  const Config config = load_config(testing::tiny_model());
  const testing::TemporaryFolder folder;
  LoadOptions options;
  const auto step = [&](int64_t tokens) { return Model::step_bytes(config, options.precision, tokens); };
  const auto steps = [&](uint64_t left) {
    return default_step_tokens(folder.path(), config, options, gpu_of(100 * kGiB, left), 1);
  };
  EXPECT_EQ(default_running("cuda:0"), 256);
  EXPECT_EQ(steps(8 * step(8192)), 8192) << "all of it free";
  EXPECT_EQ(steps(uint64_t{64} * step(8192)), 8192) << "the most";
  EXPECT_EQ(steps(8 * step(8192) - 8), 4096);
  EXPECT_EQ(steps(8 * step(4096) - 8), 2048);
  EXPECT_EQ(steps(8 * step(2048) - 8), 1024);
  EXPECT_EQ(steps(0), 512) << "the least, which the fit check refuses then";
  // What else has to fit.
  options.extra_bytes = static_cast<int64_t>(8 * step(4096) - step(2048) -
                                             sequence_bytes(config, options.precision, 0, ring_slots(config, 8192)));
  EXPECT_EQ(steps(8 * step(4096)), 2048);
  options.extra_bytes = 0;
  // Weights of the folder, of which each rank has its part; ranks do not look at what is free.
  std::ofstream(folder.path() + "/a.safetensors") << std::string(1 << 20, 'x');
  std::ofstream(folder.path() + "/other") << std::string(1 << 20, 'x');
  std::filesystem::create_symlink("nowhere", folder.path() + "/b.safetensors");
  EXPECT_EQ(file_bytes(folder.path()), 1 << 20);
  EXPECT_EQ(steps(8 * step(4096)), 2048);
  EXPECT_EQ(steps(8 * step(4096) + (1 << 20)), 4096);
  const uint64_t of_two = Model::step_bytes(config, options.precision, 4096, 2);
  const auto machine = [&](uint64_t memory) { return gpu_of(memory, 0); };
  EXPECT_EQ(default_step_tokens(folder.path(), config, options, machine(8 * of_two + (1 << 19)), 2), 4096);
  EXPECT_EQ(default_step_tokens(folder.path(), config, options, machine(8 * of_two + (1 << 19) - 8), 2), 2048);
  options.extra_bytes = static_cast<int64_t>(kGiB);
  EXPECT_EQ(default_step_tokens(folder.path(), config, options, machine(8 * of_two + (1 << 19)), 2), 4096)
      << "the first rank alone knows of it";
}

TEST(DefaultSteps, AreShorterBesideAnswers) {
  const device::Machine gpu = gpu_of(kGiB, kGiB);
  EXPECT_EQ(default_mixed_step_tokens(gpu, 4096, 256), 512);
  EXPECT_EQ(default_mixed_step_tokens(gpu, 4096, 16), 512);
  EXPECT_EQ(default_mixed_step_tokens(gpu, 4096, 1024), 2048) << "answers have room";
  EXPECT_EQ(default_mixed_step_tokens(gpu, 512, 1024), 512);
}

// Experts kept in twice their bytes.
bool is_there(const device::Machine&, std::string&) {
  return true;
}
bool takes_all(const ops::MoeExperts::Desc&, std::string&) {
  return true;
}
int64_t twice_data(const ops::WeightView& view) {
  return 2 * view.data_bytes();
}
int64_t twice_scales(const ops::WeightView& view) {
  return 2 * view.scale_bytes();
}
void copy_to(const ops::WeightView&, const ops::WeightView&, device::Queue&) {}
constexpr ops::PackedLayout kTwice = {"twice", twice_data, twice_scales, copy_to, copy_to};
const ops::PackedLayout* twice(const ops::MoeExperts::Desc&) {
  return &kTwice;
}
constexpr ops::Variant<ops::MoeExperts> kExperts[] = {{"twice", takes_all, twice, nullptr, nullptr}};
constinit const ops::Backend kPadding = {"padding", is_there, ops::Verification::kEmulated,
                                         ops::make_variants(kExperts)};

std::string refusal_of(const device::Machine& machine) {
  std::vector<const ops::Backend*> all{&kPadding};
  for (const ops::Backend* backend : backends::all_backends()) all.push_back(backend);
  try {
    load_model(testing::tiny_model(), {}, all, machine, nullptr, nullptr);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kResourceExhausted) << error.what();
    return error.what();
  }
  return "";
}

// A load that is short by the padding alone must not end in an allocation that fails, minutes later.
TEST(LoadModel, CountsThePaddingOfExperts) {
  device::Machine machine = device::probe_machine();
  machine.memory_available_bytes = 64 * kGiB;
  const LoadedModel plain = load_model(testing::tiny_model(), {}, backends::all_backends(), machine, nullptr, nullptr);
  const Config& c = plain.config;
  // Of NVFP4 a byte to two values and one to a block of 16.
  const auto experts =
      static_cast<uint64_t>(c.num_layers * c.num_experts * 3 * c.hidden_size * c.expert_inner / 16 * 9);
  const uint64_t own = static_cast<uint64_t>(plain.runner->facts().weight_bytes) +
                       sequence_bytes(c, {}, 0, ring_slots(c, LoadOptions{}.max_step_tokens)) +
                       Model::step_bytes(c, {}, LoadOptions{}.max_step_tokens);
  machine.memory_available_bytes = own + experts - 1;
  EXPECT_THAT(refusal_of(machine), ::testing::HasSubstr("(" + format_bytes(experts) +
                                                        " of it padding to the kernels' "
                                                        "units)"));
  machine.memory_available_bytes = own + experts;
  EXPECT_EQ(refusal_of(machine), "");
}

}  // namespace
}  // namespace tessera::model
