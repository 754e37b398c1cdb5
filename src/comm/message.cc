// SPDX-License-Identifier: Apache-2.0
#include "comm/message.h"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include "base/error.h"

namespace tessera::comm {

namespace {

constexpr uint32_t kMagic = 0x43525354;  // "TSRC"

template <class T>
void append(std::vector<uint8_t>& bytes, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) bytes.push_back(static_cast<uint8_t>(value >> (8 * i)));
}

template <class T>
T load(const uint8_t* bytes) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value = static_cast<T>(value | static_cast<T>(bytes[i]) << (8 * i));
  return value;
}

MessageKey message_mac(const MessageKey& key, Direction direction, std::span<const uint8_t> bytes) {
  const std::array<uint8_t, 1> side{static_cast<uint8_t>(direction)};
  return mac_of(key, {side, bytes});
}

[[noreturn]] void refuse(const std::string& expected, const std::string& found) {
  fail_data("message", "header", expected, found);
}

}  // namespace

MessageKey mac_of(std::span<const uint8_t> key, std::initializer_list<std::span<const uint8_t>> parts) {
  std::vector<uint8_t> bytes;
  for (const std::span<const uint8_t> part : parts) bytes.insert(bytes.end(), part.begin(), part.end());
  MessageKey mac{};
  unsigned size = 0;
  const unsigned char* made =
      HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), bytes.data(), bytes.size(), mac.data(), &size);
  TESSERA_CHECK(made != nullptr && size == mac.size(), "HMAC");
  return mac;
}

Nonce random_nonce() {
  Nonce nonce{};
  TESSERA_CHECK(RAND_bytes(nonce.data(), static_cast<int>(nonce.size())) == 1, "no random bytes");
  return nonce;
}

std::vector<uint8_t> MessageWriter::seal(MessageKind kind, std::span<const uint8_t> payload) {
  TESSERA_CHECK(payload.size() <= kMaxPayloadBytes, fmt::format("a message of {} bytes", payload.size()));
  std::vector<uint8_t> bytes;
  bytes.reserve(kMessageHeaderBytes + payload.size() + kMacBytes);
  append(bytes, kMagic);
  append(bytes, kMessageVersion);
  append(bytes, static_cast<uint16_t>(kind));
  append(bytes, next_++);
  append(bytes, static_cast<uint32_t>(payload.size()));
  bytes.insert(bytes.end(), payload.begin(), payload.end());
  const MessageKey mac = message_mac(key_, direction_, bytes);
  bytes.insert(bytes.end(), mac.begin(), mac.end());
  return bytes;
}

bool MessageReader::next(Message& message) {
  // Refused by the first byte that is wrong, not when a header is complete: a stranger may send less than one.
  for (size_t i = 0; i < std::min<size_t>(pending_.size(), 4); ++i) {
    if (pending_[i] != static_cast<uint8_t>(kMagic >> (8 * i))) refuse("a message of Tessera", "other bytes");
  }
  if (pending_.size() < kMessageHeaderBytes) return false;
  const uint16_t version = load<uint16_t>(pending_.data() + 4), kind = load<uint16_t>(pending_.data() + 6);
  const uint64_t number = load<uint64_t>(pending_.data() + 8);
  const uint32_t length = load<uint32_t>(pending_.data() + 16);
  if (version != kMessageVersion) refuse(fmt::format("version {}", kMessageVersion), fmt::format("{}", version));
  if (length > max_payload_) refuse(fmt::format("at most {} bytes", max_payload_), fmt::format("{}", length));
  if (number != next_) refuse(fmt::format("number {}", next_), fmt::format("{}", number));
  const size_t sealed = kMessageHeaderBytes + length;
  if (pending_.size() < sealed + kMacBytes) return false;
  const MessageKey mac = message_mac(key_, direction_, std::span(pending_).first(sealed));
  if (CRYPTO_memcmp(mac.data(), pending_.data() + sealed, kMacBytes) != 0) {
    fail_data("message", "MAC", "one made with the shared secret", "another");
  }
  ++next_;
  message.kind = static_cast<MessageKind>(kind);
  message.payload.assign(pending_.begin() + kMessageHeaderBytes, pending_.begin() + static_cast<ptrdiff_t>(sealed));
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<ptrdiff_t>(sealed + kMacBytes));
  return true;
}

void append_u32(std::vector<uint8_t>& bytes, uint32_t value) {
  append(bytes, value);
}

uint32_t read_u32(std::span<const uint8_t> bytes, size_t& at) {
  if (bytes.size() < at + 4)
    fail_data("message", "payload", fmt::format("{} bytes", at + 4), fmt::format("{}", bytes.size()));
  const uint32_t value = load<uint32_t>(bytes.data() + at);
  at += 4;
  return value;
}

}  // namespace tessera::comm
