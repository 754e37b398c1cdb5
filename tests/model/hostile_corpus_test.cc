// SPDX-License-Identifier: Apache-2.0
// Hundreds of damaged checkpoint folders: every rule broken alone, and pairs. Each gets one line that names a file.
#include <gtest/gtest.h>

#include <optional>
#include <random>

#include "backends/registry.h"
#include "base/error.h"
#include "model/load_model.h"
#include "testing/hostile_files.h"
#include "testing/seed.h"
#include "testing/temporary_folder.h"
#include "text/tokenizer/tokenizer.h"

namespace tessera::model {
namespace {

using testing::Damage;
using testing::Files;

// What loading such a folder says; nothing where it loads.
std::optional<std::string> refusal(const Files& files) {
  const testing::TemporaryFolder folder;
  testing::write_files(files, folder.path());
  try {
    const Config config = load_config(folder.path());
    const text::Tokenizer tokenizer = text::Tokenizer::load(folder.file("tokenizer.json"));
    if (tokenizer.vocab_size() > config.vocab_size) return "tokenizer.json: more ids than config.json has";
    LoadOptions options;
    options.num_threads = 1;
    load_model(folder.path(), options, backends::all_backends(), device::probe_machine(), nullptr, nullptr);
  } catch (const Error& error) {
    const std::string message = error.what();
    const ErrorCode code = error.code();
    EXPECT_TRUE(code == ErrorCode::kDataLoss || code == ErrorCode::kUnsupported || code == ErrorCode::kNotFound ||
                code == ErrorCode::kResourceExhausted)
        << to_string(code) << ": " << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_LT(message.size(), 1000u) << message;
    return message;
  }
  return std::nullopt;
}

TEST(HostileCorpus, TheSoundModelLoads) {
  EXPECT_EQ(refusal(testing::sound_model()), std::nullopt);
}

TEST(HostileCorpus, EachDamageAlone) {
  const Files sound = testing::sound_model();
  const std::vector<Damage> damages = testing::hostile_damages();
  EXPECT_GE(damages.size(), 150u);
  for (const Damage& damage : damages) {
    Files files = sound;
    ASSERT_TRUE(damage.apply(files)) << damage.what;
    const std::optional<std::string> message = refusal(files);
    ASSERT_TRUE(message.has_value()) << damage.what;
    EXPECT_NE(message->find(damage.file), std::string::npos) << damage.what << ": " << *message;
  }
}

TEST(HostileCorpus, Pairs) {
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const Files sound = testing::sound_model();
  const std::vector<Damage> damages = testing::hostile_damages();
  for (int pairs = 0; pairs < 300;) {
    const Damage &one = damages[random() % damages.size()], &other = damages[random() % damages.size()];
    Files files = sound;
    if (!one.apply(files) || !other.apply(files)) continue;
    EXPECT_TRUE(refusal(files).has_value()) << one.what << " and " << other.what;
    ++pairs;
  }
}

}  // namespace
}  // namespace tessera::model
