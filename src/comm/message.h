// SPDX-License-Identifier: Apache-2.0
#pragma once
// Messages between ranks over a byte stream, each with version, number, length and a MAC.
//   magic u32 | version u16 | kind u16 | number u64 | length u32 | payload | HMAC-SHA-256, little-endian
// The MAC is over a byte for the direction and everything before it. Numbers count from 0 in each direction, so a
// message that is repeated, left out or sent back is refused like a forged one.
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

using MessageKey = std::array<uint8_t, 32>;
using Nonce = std::array<uint8_t, 16>;

enum class MessageKind : uint16_t {
  kChallenge = 1,  // rank 0's first bytes: a nonce; its MAC has a key that everybody knows
  kHello,          // the answer: who it is
  kWelcome,        // rank 0 knows the secret too
  kReady,          // all ranks are there
  kWaiting,        // which ranks are not there yet, in words
  kData,           // of all_gather
  kOrder,          // of send_order
  kHeartbeat,
  kLost,      // which rank, and why
  kFarewell,  // the sender ends as it should
};

enum class Direction : uint8_t { kToRoot, kFromRoot };

constexpr size_t kMessageHeaderBytes = 20, kMacBytes = 32;
constexpr size_t kMaxPayloadBytes = 4 << 20;
constexpr uint16_t kMessageVersion = 2;

// HMAC-SHA-256 of the parts, one after the other.
MessageKey mac_of(std::span<const uint8_t> key, std::initializer_list<std::span<const uint8_t>> parts);
// Random bytes of the operating system's quality. Throws kInternal where there are none.
Nonce random_nonce();

// Numbers and seals outgoing messages.
class MessageWriter {
 public:
  MessageWriter(const MessageKey& key, Direction direction) : key_(key), direction_(direction) {}
  void set_key(const MessageKey& key) { key_ = key; }
  // The bytes to send. At most kMaxPayloadBytes.
  std::vector<uint8_t> seal(MessageKind kind, std::span<const uint8_t> payload);

 private:
  MessageKey key_;
  Direction direction_;
  uint64_t next_ = 0;
};

struct Message {
  MessageKind kind{};
  std::vector<uint8_t> payload;
};

// Takes bytes as they come and gives out messages that are whole and genuine. Nothing is kept of a message before its
// header is known to be possible, and never more than one of `max_payload` bytes.
class MessageReader {
 public:
  MessageReader(const MessageKey& key, Direction direction, size_t max_payload = kMaxPayloadBytes)
      : key_(key), direction_(direction), max_payload_(max_payload) {}

  void feed(std::span<const uint8_t> bytes) { pending_.insert(pending_.end(), bytes.begin(), bytes.end()); }
  // The next message; false where more bytes are needed. Throws kDataLoss, saying what is wrong, for bytes that no
  // other rank has sent; then the connection is of no more use.
  bool next(Message& message);
  // Bytes that are worth reading before next() is asked again.
  size_t wanted_bytes() const { return kMessageHeaderBytes + max_payload_ + kMacBytes - pending_.size(); }
  // Forgets the bytes that were fed.
  void clear() { pending_.clear(); }
  // What follows has another key and counts on.
  void set_key(const MessageKey& key, size_t max_payload) { key_ = key, max_payload_ = max_payload; }

 private:
  MessageKey key_;
  Direction direction_;
  size_t max_payload_;
  uint64_t next_ = 0;
  std::vector<uint8_t> pending_;
};

// Little-endian integers of payloads.
void append_u32(std::vector<uint8_t>& bytes, uint32_t value);
// Reads at `at` and moves it on. Throws kDataLoss where the payload ends before.
uint32_t read_u32(std::span<const uint8_t> bytes, size_t& at);

}  // namespace tessera::comm
