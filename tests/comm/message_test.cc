// SPDX-License-Identifier: Apache-2.0
// What comes out of a byte stream between ranks, and that nothing else does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "base/rng.h"
#include "comm/message.h"

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;

constexpr MessageKey kKey = {1, 2, 3};

std::vector<uint8_t> payload_of(size_t size) {
  std::vector<uint8_t> payload(size);
  for (size_t i = 0; i < size; ++i) payload[i] = static_cast<uint8_t>(i * 31);
  return payload;
}

std::string refusal_of(MessageReader& reader, std::span<const uint8_t> bytes) {
  reader.feed(bytes);
  try {
    Message message;
    while (reader.next(message)) {
    }
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
    return error.what();
  }
  return "";
}

TEST(Messages, HmacIsTheStandards) {
  // RFC 4231, test case 2.
  const std::string key = "Jefe", data = "what do ya want for nothing?";
  const auto bytes = [](const std::string& text) {
    return std::span(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  };
  const MessageKey mac = mac_of(bytes(key), {bytes(data).first(10), bytes(data).subspan(10)});
  EXPECT_THAT(std::vector<uint8_t>(mac.begin(), mac.begin() + 8),
              ::testing::ElementsAre(0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e));
}

TEST(Messages, ComeOutWholeWhereverTheStreamIsCut) {
  MessageWriter writer(kKey, Direction::kToRoot);
  std::vector<uint8_t> stream;
  const size_t sizes[] = {0, 1, 1000, 17};
  for (const size_t size : sizes) {
    const auto bytes = writer.seal(MessageKind::kData, payload_of(size));
    stream.insert(stream.end(), bytes.begin(), bytes.end());
  }
  for (const size_t step : {1, 7, 52, 5000}) {
    MessageReader reader(kKey, Direction::kToRoot);
    std::vector<size_t> found;
    Message message;
    for (size_t at = 0; at < stream.size(); at += step) {
      reader.feed(std::span(stream).subspan(at, std::min<size_t>(step, stream.size() - at)));
      while (reader.next(message)) {
        found.push_back(message.payload.size());
        EXPECT_EQ(message.payload, payload_of(found.back()));
      }
    }
    EXPECT_THAT(found, ::testing::ElementsAreArray(sizes)) << step;
  }
}

TEST(Messages, RepeatedSkippedAndReflectedOnesAreRefused) {
  MessageWriter writer(kKey, Direction::kToRoot);
  const auto first = writer.seal(MessageKind::kData, payload_of(3)), second = writer.seal(MessageKind::kData, {});
  MessageReader repeated(kKey, Direction::kToRoot), skipped(kKey, Direction::kToRoot);
  MessageReader reflected(kKey, Direction::kFromRoot);
  EXPECT_EQ(refusal_of(repeated, first), "");
  EXPECT_THAT(refusal_of(repeated, first), HasSubstr("expected number 1, found 0"));
  EXPECT_THAT(refusal_of(skipped, second), HasSubstr("expected number 0, found 1"));
  EXPECT_THAT(refusal_of(reflected, first), HasSubstr("MAC"));
}

TEST(Messages, StrangersBytesAreRefusedAtOnce) {
  MessageReader reader(kKey, Direction::kToRoot, 64);
  const std::string web = "G";
  EXPECT_THAT(refusal_of(reader, std::span(reinterpret_cast<const uint8_t*>(web.data()), 1)),
              HasSubstr("expected a message of Tessera"));
  // A length that would have to be kept is refused before a byte of it is.
  MessageWriter writer(kKey, Direction::kToRoot);
  MessageReader small(kKey, Direction::kToRoot, 64);
  const std::vector<uint8_t> large = writer.seal(MessageKind::kData, payload_of(65));
  EXPECT_THAT(refusal_of(small, std::span(large).first(kMessageHeaderBytes)), HasSubstr("at most 64 bytes, found 65"));
}

// Any changed bit, any cut, any noise: refused or waited for, never given out.
TEST(Messages, MutatedStreamsGiveNothing) {
  MessageWriter writer(kKey, Direction::kFromRoot);
  const std::vector<uint8_t> good = writer.seal(MessageKind::kData, payload_of(200));
  Rng rng(2026);
  for (int round = 0; round < 20000; ++round) {
    std::vector<uint8_t> bytes = good;
    switch (rng.below(4)) {
      case 0:
        bytes[rng.below(bytes.size())] ^= static_cast<uint8_t>(1u << rng.below(8));
        break;
      case 1:
        bytes.resize(rng.below(bytes.size()));
        break;
      case 2:
        bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(rng.below(bytes.size() - 1)),
                     static_cast<uint8_t>(rng.below(256)));
        break;
      default:
        bytes.resize(1 + rng.below(300));
        for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng.below(256));
    }
    MessageReader reader(kKey, Direction::kFromRoot);
    reader.feed(bytes);
    Message message;
    bool is_given = false;
    try {
      is_given = reader.next(message);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kDataLoss);
    }
    // An insertion behind the MAC, or of an equal byte, leaves the message as it is.
    EXPECT_TRUE(!is_given || std::equal(good.begin(), good.end(), bytes.begin())) << round;
  }
}

}  // namespace
}  // namespace tessera::comm
