// SPDX-License-Identifier: Apache-2.0
// What a model is loaded with where nobody says otherwise.
#include "model/load_model.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

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

}  // namespace
}  // namespace tessera::model
