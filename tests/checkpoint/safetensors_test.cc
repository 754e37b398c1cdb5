// SPDX-License-Identifier: Apache-2.0
// Every rule of the format broken alone, truncation at every byte, random damage, and the writer's round trip.
#include "checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <random>

#include "base/error.h"
#include "base/test_seams.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/safetensors_writer.h"
#include "testing/seed.h"
#include "testing/temporary_folder.h"

namespace tessera::checkpoint {
namespace {

std::string file_of(const std::string& header, const std::string& data, int64_t length = -1) {
  const uint64_t n = length < 0 ? header.size() : static_cast<uint64_t>(length);
  std::string out;
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>(n >> (8 * i)));
  return out + header + data;
}

// The message of opening such a file; empty where it opens. Only kDataLoss or kNotFound may come, in one line that
// names the file.
std::string error_of(const std::string& bytes) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("x.safetensors", bytes);
  try {
    SafetensorsFile::open(path);
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.code(), ErrorCode::kDataLoss) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_NE(message.find("x.safetensors"), std::string::npos) << message;
    return message;
  }
  return "";
}

const char* const kGood =
    R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[],"data_offsets":[8,9]},"e":{"dtype":"BF16","shape":[0,3],"data_offsets":[9,9]}})";
const std::string kData = "12345678x";

TEST(Safetensors, ReadsAGoodFile) {
  const testing::TemporaryFolder folder;
  const SafetensorsFile file =
      SafetensorsFile::open(folder.write("x.safetensors", file_of(std::string(kGood) + "   ", kData)));
  ASSERT_EQ(file.entries().size(), 3u);
  EXPECT_EQ(file.metadata()[0].second, "pt");
  const TensorEntry* b = file.find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->shape.num_elements(), 1);
  char byte = 0;
  file.read(*b, &byte);
  EXPECT_EQ(byte, 'x');
  char part[3];
  file.read_part(*file.find("a"), 2, 3, part);
  EXPECT_EQ(std::string(part, 3), "345");
  EXPECT_EQ(file.find("c"), nullptr);
  EXPECT_EQ(file.find("e")->num_bytes, 0u);
}

TEST(Safetensors, EveryRuleBrokenAlone) {
  const auto entry = [](const std::string& fields) { return "{\"a\":{" + fields + "}}"; };
  const auto f32 = [&](const std::string& shape, const std::string& offsets) {
    return entry("\"dtype\":\"F32\",\"shape\":" + shape + ",\"data_offsets\":" + offsets);
  };
  const std::string two =
      R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":)";
  const struct {
    const char* rule;
    std::string bytes;
  } cases[] = {
      {"shorter than a length", "1234567"},
      {"empty file", ""},
      {"header longer than the file", file_of("{}", "", 3)},
      {"header length overflows", file_of("{}", "", INT64_MAX)},
      {"header above the limit", file_of("{}", "", 100'000'001)},
      {"empty header", file_of("", "")},
      {"does not begin with {", file_of(" {}", "")},
      {"an array", file_of("[]", "")},
      {"tab padding", file_of("{}\t", "")},
      {"newline padding", file_of("{}\n", "")},
      {"NUL padding", file_of(std::string("{}\0", 3), "")},
      {"text after the value", file_of("{}x", "")},
      {"two values", file_of("{} {}", "")},
      {"invalid JSON", file_of("{\"a\":}", "")},
      {"invalid UTF-8", file_of("{\"\xff\":1}", "")},
      {"duplicate tensor",
       file_of(
           R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
           "")},
      {"duplicate field", file_of(entry(R"("dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0])"), "")},
      {"metadata not an object", file_of(R"({"__metadata__":[]})", "")},
      {"metadata not of strings", file_of(R"({"__metadata__":{"a":1}})", "")},
      {"entry not an object", file_of(R"({"a":3})", "")},
      {"no dtype", file_of(entry(R"("shape":[2],"data_offsets":[0,8])"), "12345678")},
      {"no shape", file_of(entry(R"("dtype":"F32","data_offsets":[0,8])"), "12345678")},
      {"no offsets", file_of(entry(R"("dtype":"F32","shape":[2])"), "12345678")},
      {"one field more", file_of(entry(R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1)"), "12345678")},
      {"dtype not a string", file_of(entry(R"("dtype":1,"shape":[2],"data_offsets":[0,8])"), "12345678")},
      {"shape not an array", file_of(f32("2", "[0,8]"), "12345678")},
      {"negative dimension", file_of(f32("[-2]", "[0,8]"), "12345678")},
      {"fractional dimension", file_of(f32("[2.5]", "[0,8]"), "12345678")},
      {"nine dimensions", file_of(f32("[1,1,1,1,1,1,1,1,2]", "[0,8]"), "12345678")},
      {"three offsets", file_of(f32("[2]", "[0,8,8]"), "12345678")},
      {"one offset", file_of(f32("[2]", "[8]"), "12345678")},
      {"negative offset", file_of(f32("[2]", "[-8,0]"), "12345678")},
      {"begin after end", file_of(f32("[2]", "[8,0]"), "12345678")},
      {"end past the data", file_of(f32("[2]", "[0,8]"), "1234567")},
      {"size is not shape x dtype", file_of(f32("[3]", "[0,8]"), "12345678")},
      {"product overflows", file_of(f32("[4611686018427387904,16]", "[0,8]"), "12345678")},
      {"product overflows to a match", file_of(f32("[1073741824,1073741824,16,1]", "[0,0]"), "")},
      {"ends inside a byte", file_of(entry(R"("dtype":"F4","shape":[3],"data_offsets":[0,1])"), "1")},
      {"first does not begin at 0", file_of(f32("[1]", "[4,8]"), "12345678")},
      {"hole", file_of(two + "[5,9]}}", "123456789")},
      {"overlap", file_of(two + "[3,7]}}", "1234567")},
      {"same place twice", file_of(two + "[0,4]}}", "1234")},
      {"bytes after the last", file_of(two + "[4,8]}}", "123456789")},
      {"missing data", file_of(two + "[4,8]}}", "1234567")},
      {"data without tensors", file_of("{}", "x")},
      {"huge integer", file_of(f32("[99999999999999999999]", "[0,8]"), "12345678")},
  };
  for (const auto& broken : cases) EXPECT_NE(error_of(broken.bytes), "") << broken.rule;
  EXPECT_NE(error_of(file_of(two + "[5,9]}}", "123456789")).find("tensor b"), std::string::npos) << "names the tensor";
  EXPECT_EQ(error_of(file_of("{}", "")), "") << "no tensor at all is legal";
  EXPECT_EQ(error_of(file_of(two + "[4,8]}}", "12345678")), "");
}

// Pairs: every broken field with every broken offset.
TEST(Safetensors, RulesBrokenInPairs) {
  const char* dtypes[] = {"\"F32\"", "1", "null", "[]", "\"F4\""};
  const char* shapes[] = {"[2]", "[-1]", "[1e9]", "{}", "\"x\"", "[[2]]", "[9223372036854775807,2]"};
  const char* offsets[] = {"[0,8]", "[8,0]", "[1,9]", "[0]", "null", "[0,\"8\"]", "[0,9223372036854775807]"};
  int broken = 0;
  for (const char* dtype : dtypes) {
    for (const char* shape : shapes) {
      for (const char* offset : offsets) {
        const std::string header =
            std::string("{\"a\":{\"dtype\":") + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offset + "}}";
        const bool is_good =
            std::string(dtype) == "\"F32\"" && std::string(shape) == "[2]" && std::string(offset) == "[0,8]";
        EXPECT_EQ(error_of(file_of(header, "12345678")).empty(), is_good) << header;
        ++broken;
      }
    }
  }
  EXPECT_GE(broken, 200);
}

TEST(Safetensors, UnknownDtypesAreKeptForWhoNeedsThem) {
  const testing::TemporaryFolder folder;
  const SafetensorsFile file = SafetensorsFile::open(
      folder.write("x.safetensors", file_of(R"({"a":{"dtype":"F3","shape":[2],"data_offsets":[0,8]}})", "12345678")));
  EXPECT_FALSE(file.find("a")->dtype.has_value());
  EXPECT_EQ(file.find("a")->dtype_text, "F3");
}

TEST(Safetensors, TruncationAtEveryByteIsAnError) {
  const std::string whole = file_of(kGood, kData);
  for (size_t size = 0; size < whole.size(); ++size) EXPECT_NE(error_of(whole.substr(0, size)), "") << size;
}

TEST(Safetensors, RandomDamageNeverCrashes) {
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const std::string good(kGood);
  for (int i = 0; i < 10000; ++i) {
    std::string header = good;
    for (uint32_t flips = 1 + random() % 3; flips > 0; --flips)
      header[random() % header.size()] ^= static_cast<char>(1 << random() % 8);
    try {
      const SafetensorsHeader parsed = parse_safetensors_header(header, 8 + header.size() + kData.size(), "x");
      uint64_t bytes = 0;
      for (const TensorEntry& entry : parsed.entries) bytes += entry.num_bytes;
      EXPECT_EQ(bytes, kData.size()) << "what is accepted tiles the data: " << header;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
    }
  }
}

TEST(SafetensorsWriter, RoundTrip) {
  const testing::TemporaryFolder folder;
  std::vector<float> f = {1, 2, 3};
  std::vector<uint8_t> u = {4, 5, 6, 7, 8};
  int64_t scalar = 9;
  write_safetensors(folder.file("x.safetensors"),
                    {{"z.u8", {u.data(), DType::kU8, {5}}},
                     {"a \"quoted\"", {f.data(), DType::kF32, {3, 1}}},
                     {"s", {&scalar, DType::kI64, {}}},
                     {"empty", {nullptr, DType::kBF16, {0, 4}}}},
                    {{"made by", "a test"}});
  const SafetensorsFile file = SafetensorsFile::open(folder.file("x.safetensors"));
  EXPECT_EQ(file.entries().size(), 4u);
  for (const TensorEntry& entry : file.entries()) {
    if (entry.dtype == DType::kF32) {
      EXPECT_EQ(entry.file_offset % 4, 0u);
    }
  }
  std::vector<uint8_t> back(5);
  file.read(*file.find("z.u8"), back.data());
  EXPECT_EQ(back, u);
  std::vector<float> floats(3);
  file.read(*file.find("a \"quoted\""), floats.data());
  EXPECT_EQ(floats, f);
  EXPECT_EQ(file.find("empty")->shape, (Shape{0, 4}));
  EXPECT_EQ(folder.listing(), "x.safetensors\n");
  EXPECT_THROW(SafetensorsWriter(folder.file("y"), {{"a", DType::kU8, {1}}, {"a", DType::kU8, {1}}}), Error);
  {
    SafetensorsWriter unfinished(folder.file("y"), {{"a", DType::kU8, {2}}});
    unfinished.write("x", 1);
    EXPECT_THROW(unfinished.finish(), Error);
  }
  EXPECT_EQ(folder.listing(), "x.safetensors\n") << "nothing stays of an unfinished file";
}

#ifdef TESSERA_TEST_SEAMS
TEST(SafetensorsWriter, NoPartialFileWhereAnyCallFails) {
  for (int64_t nth = 1;; ++nth) {
    const testing::TemporaryFolder folder;
    float value = 1;
    bool has_failed = false;
    seams::fail_file_call(nth);
    try {
      write_safetensors(folder.file("x.safetensors"), {{"a", {&value, DType::kF32, {1}}}});
    } catch (const Error&) {
      has_failed = true;
    }
    seams::fail_file_call(0);
    EXPECT_EQ(folder.listing(), has_failed ? "" : "x.safetensors\n") << nth;
    if (!has_failed && nth > 1) break;  // the first is forgiven: the file then has a name from the beginning
  }
}
#endif

class CheckpointTest : public ::testing::Test {
 protected:
  void shard(const std::string& name, const std::string& tensor) {
    float value = 1;
    write_safetensors(folder_.file(name), {{tensor, {&value, DType::kF32, {1}}}});
  }
  void index(const std::string& map) {
    folder_.write("model.safetensors.index.json", "{\"metadata\":{\"total_size\":1},\"weight_map\":" + map + "}");
  }
  std::string error() const {
    try {
      Checkpoint::open(folder_.path());
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
  testing::TemporaryFolder folder_;
};

TEST_F(CheckpointTest, IndexAndShardsAgreeBothWays) {
  shard("m-1.safetensors", "a");
  shard("m-2.safetensors", "b");
  index(R"({"a":"m-1.safetensors","b":"m-2.safetensors"})");
  EXPECT_EQ(error(), "");
  index(R"({"a":"m-2.safetensors","b":"m-1.safetensors"})");
  EXPECT_NE(error().find("tensor a"), std::string::npos);
  index(R"({"a":"m-1.safetensors","b":"m-2.safetensors","c":"m-2.safetensors"})");
  EXPECT_NE(error().find("tensor c"), std::string::npos);
  shard("m-2.safetensors", "c");
  index(R"({"a":"m-1.safetensors","b":"m-2.safetensors"})");
  EXPECT_NE(error(), "");
  index(R"({"a":"m-1.safetensors","b":"m-3.safetensors"})");
  EXPECT_NE(error().find("m-3.safetensors"), std::string::npos) << "a missing shard is named";
}

TEST_F(CheckpointTest, HostileIndex) {
  shard("m-1.safetensors", "a");
  for (const char* name : {"../m-1.safetensors", "/etc/passwd", "", ".hidden.safetensors", "sub/m.safetensors",
                           "m-1.bin", "a\\u0000.safetensors"}) {
    index(std::string("{\"a\":\"") + name + "\"}");
    EXPECT_NE(error(), "") << name;
  }
  for (const char* text : {"{}", "[]", "", "{\"weight_map\":[]}", "{\"weight_map\":{\"a\":1}}",
                           "{\"weight_map\":{\"a\":\"m-1.safetensors\",\"a\":\"m-1.safetensors\"}}"}) {
    folder_.write("model.safetensors.index.json", text);
    EXPECT_NE(error(), "") << text;
  }
}

TEST_F(CheckpointTest, FoldersWithoutAnIndex) {
  EXPECT_NE(error().find("found neither"), std::string::npos);
  shard("part-b.safetensors", "b");
  shard("part-a.safetensors", "a");
  EXPECT_EQ(Checkpoint::open(folder_.path()).tensors().size(), 2u);
  shard("part-c.safetensors", "a");
  EXPECT_NE(error().find("to be in one file only"), std::string::npos);
  shard("model.safetensors", "m");
  EXPECT_EQ(Checkpoint::open(folder_.path()).tensors().size(), 1u) << "one model.safetensors is the whole model";
  EXPECT_THROW(Checkpoint::open(folder_.path() + "/none"), Error);
}

}  // namespace
}  // namespace tessera::checkpoint
