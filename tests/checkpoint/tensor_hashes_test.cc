// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/tensor_hashes.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/rng.h"
#include "checkpoint/safetensors_writer.h"
#include "testing/seed.h"
#include "testing/temporary_folder.h"

namespace tessera::checkpoint {

namespace {

ErrorCode code_of(const std::string& text) {
  try {
    parse_hashes(text, "hashes.json");
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kInternal;
}

TEST(TensorHashes, PublishedValues) {
  // XXH3-128 of nothing with seed 0, from the specification's sanity checks.
  EXPECT_EQ(TensorHasher().hex(), "99aa06d3014798d86001c324468d497f");
}

TEST(TensorHashes, PartsDoNotMatter) {
  const uint64_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  std::string bytes(1 + rng.below(5000), '\0');
  for (char& c : bytes) c = static_cast<char>(rng.next_u32());
  TensorHasher whole, parts;
  whole.update(bytes.data(), bytes.size());
  for (size_t done = 0; done < bytes.size();) {
    const size_t count = std::min<size_t>(1 + rng.below(700), bytes.size() - done);
    parts.update(bytes.data() + done, count);
    done += count;
  }
  EXPECT_EQ(whole.hex(), parts.hex());
  bytes[rng.below(bytes.size())] ^= 1;
  TensorHasher changed;
  changed.update(bytes.data(), bytes.size());
  EXPECT_NE(whole.hex(), changed.hex());
}

TEST(TensorHashes, OfAFileAndBack) {
  const testing::TemporaryFolder folder;
  std::vector<float> values(3000, 1.5f);
  write_safetensors(folder.file("model.safetensors"), {{"a", {values.data(), DType::kF32, {3000}}},
                                                       {"empty", {nullptr, DType::kF32, {0}}},
                                                       {"\xC3\xA9 \"q\"", {values.data(), DType::kF32, {2}}}});
  const Checkpoint checkpoint = Checkpoint::open(folder.path());
  TensorHashes hashes;
  for (const LocatedTensor& tensor : checkpoint.tensors()) {
    hashes.emplace_back(tensor.entry->name, hash_tensor(tensor, nullptr));
  }
  TensorHasher expected;
  expected.update(values.data(), values.size() * 4);
  EXPECT_EQ(hashes.at(0).second, expected.hex());
  EXPECT_TRUE(load_hashes(folder.path()).empty());
  write_hashes(folder.path(), {hashes.rbegin(), hashes.rend()});
  EXPECT_EQ(load_hashes(folder.path()), hashes);
}

TEST(TensorHashes, HostileFiles) {
  const std::string hex(32, 'A');
  const auto text = [](const std::string& algorithm, const std::string& hash) {
    return R"({"algorithm":")" + algorithm + R"(","tensors":{"t":")" + hash + "\"}}";
  };
  EXPECT_EQ(parse_hashes(text("xxh3-128", hex), "x").at(0).second, std::string(32, 'a'));
  EXPECT_EQ(code_of(text("sha256", hex)), ErrorCode::kDataLoss);
  EXPECT_EQ(code_of(text("xxh3-128", hex.substr(1))), ErrorCode::kDataLoss);
  EXPECT_EQ(code_of(text("xxh3-128", hex.substr(1) + "g")), ErrorCode::kDataLoss);
  EXPECT_EQ(code_of("{}"), ErrorCode::kDataLoss);
  EXPECT_EQ(code_of("[]"), ErrorCode::kDataLoss);
  EXPECT_EQ(code_of(R"({"algorithm":"xxh3-128","tensors":{"t":1}})"), ErrorCode::kDataLoss);
}

}  // namespace

}  // namespace tessera::checkpoint
