// SPDX-License-Identifier: Apache-2.0
// Sequence states: what restore refuses, capacities, and a step's own checks.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/file.h"
#include "checkpoint/checkpoint.h"
#include "model/model_helpers.h"
#include "testing/goldens.h"
#include "testing/temporary_folder.h"

namespace tessera::model {
namespace {

class SequenceTest : public ::testing::Test {
 protected:
  SequenceTest() : loaded_(testing::load(testing::tiny_model(), ops::InputMode::kA16, ops::CacheMode::kFp8)) {}
  Runner& runner() { return *loaded_.runner; }
  LoadedModel loaded_;
  const std::vector<int32_t> ids_ = std::vector<int32_t>(150, 77);
};

TEST_F(SequenceTest, RestoreRefusesDamageAndOtherModels) {
  const auto state = runner().new_sequence(200);
  testing::feed(runner(), *state, ids_, LogitRows::kNone);
  const std::vector<uint8_t> saved = state->save();
  EXPECT_NO_THROW(runner().restore(saved));
  for (const size_t at : {size_t{0}, size_t{9}, size_t{16}, size_t{24}, size_t{40}, size_t{48}, size_t{60},
                          saved.size() / 2, saved.size() - 1}) {
    std::vector<uint8_t> damaged = saved;
    damaged[at] ^= 0x40;
    try {
      runner().restore(damaged);
      ADD_FAILURE() << at;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDataLoss) << error.what();
    }
  }
  for (size_t size = 0; size < saved.size(); size += 1 + saved.size() / 50) {
    EXPECT_THROW(runner().restore(std::span(saved).first(size)), Error) << size;
  }
  const auto other = testing::load(testing::tiny_model(), ops::InputMode::kA16, ops::CacheMode::kExact);
  EXPECT_THROW(other.runner->restore(saved), Error) << "another precision";
  // One value of the config, one byte of a block scale: another model.
  const testing::TemporaryFolder folder;
  const auto expect_refusal = [&](const char* what) {
    const auto changed = testing::load(folder.path(), ops::InputMode::kA16, ops::CacheMode::kFp8);
    EXPECT_THROW(changed.runner->restore(saved), Error) << what;
  };
  for (const char* name : {"config.json", "model.safetensors"}) {
    std::filesystem::copy_file(testing::tiny_model() + "/" + name, folder.file(name));
  }
  std::string config = read_file(folder.file("config.json"), 1 << 20);
  const size_t at = config.find("\"index_topk\": 16");
  ASSERT_NE(at, std::string::npos);
  folder.write("config.json", config.substr(0, at) + "\"index_topk\": 15" + config.substr(at + 16));
  expect_refusal("index_topk");
  folder.write("config.json", config);
  {
    const checkpoint::Checkpoint checkpoint = checkpoint::Checkpoint::open(folder.path());
    const checkpoint::LocatedTensor* scales = checkpoint.find("layers.3.ffn.experts.7.w2.weight_scale");
    ASSERT_NE(scales, nullptr);
    std::fstream file(folder.file("model.safetensors"), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(scales->entry->file_offset + scales->entry->num_bytes - 1));
    uint8_t last = 0;
    scales->read_part(scales->entry->num_bytes - 1, 1, &last);
    file.put(static_cast<char>(last ^ 1));
  }
  expect_refusal("a block scale");
  std::vector<uint8_t> huge = saved;
  const int64_t capacity = int64_t{1} << 62;
  std::memcpy(huge.data() + 16, &capacity, 8);
  EXPECT_THROW(runner().restore(huge), Error) << "bounded before anything is allocated";
}

TEST_F(SequenceTest, CapacityAndIdsAreChecked) {
  EXPECT_THROW(runner().new_sequence(runner().facts().max_positions + 1), Error);
  EXPECT_THROW(runner().new_sequence(-1), Error);
  const auto state = runner().new_sequence(3);
  EXPECT_THROW(testing::feed(runner(), *state, std::vector<int32_t>(4, 1), LogitRows::kNone), Error);
  EXPECT_THROW(testing::feed(runner(), *state, std::vector<int32_t>{1024}, LogitRows::kNone), Error);
  EXPECT_THROW(testing::feed(runner(), *state, std::vector<int32_t>{-1}, LogitRows::kNone), Error);
  EXPECT_EQ(state->position(), 0);
  EXPECT_NO_THROW(testing::feed(runner(), *state, std::vector<int32_t>(3, 1), LogitRows::kNone));
  EXPECT_THROW(runner().draft({}), Error) << "no draft block";
}

TEST_F(SequenceTest, CacheSpecCountsTheBytes) {
  const CacheSpec& spec = runner().cache_spec();
  // A page of 256 tokens. Two CSA layers: 64 entries of 584 and 64 keys of 68 bytes each; two HCA layers: two entries.
  const int64_t page = 2 * 64 * (584 + 68) + 2 * 2 * 584;
  EXPECT_EQ(spec.bytes(1280) - spec.bytes(1024), page);
  EXPECT_EQ(spec.bytes(1) - spec.bytes(0), page) << "taken as a whole";
  EXPECT_EQ(spec.bytes(256), spec.bytes(1));
  EXPECT_EQ(spec.page_bytes, page);
}

TEST_F(SequenceTest, LogitRowsAreTheOnesAsked) {
  const auto a = runner().new_sequence(10), b = runner().new_sequence(10);
  const std::vector<int32_t> ids = {5, 6, 7};
  const SequenceSlice slices[] = {{a.get(), ids, LogitRows::kAll}, {b.get(), ids, LogitRows::kLast}};
  const TensorView logits = runner().step(slices);
  EXPECT_EQ(logits.shape, (Shape{4, 1024}));
  for (int64_t i = 0; i < 1024; ++i) EXPECT_EQ(logits.as<float>()[2 * 1024 + i], logits.as<float>()[3 * 1024 + i]);
}

TEST(SlowArena, TheLargestStepFitsForEveryShape) {
  // The arena is sized by a formula; the deepest layers must fit at the largest step of every kind of config.
  for (const auto input : {ops::InputMode::kF32, ops::InputMode::kA4}) {
    const auto loaded = testing::load(testing::tiny_model(), input, ops::CacheMode::kFp8, 2, 512);
    const auto state = loaded.runner->new_sequence(1100);
    EXPECT_NO_THROW(testing::feed(*loaded.runner, *state, std::vector<int32_t>(1100, 9), LogitRows::kAll));
  }
}

}  // namespace
}  // namespace tessera::model
