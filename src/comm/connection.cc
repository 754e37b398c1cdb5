// SPDX-License-Identifier: Apache-2.0
#include "comm/connection.h"

#include <algorithm>

namespace tessera::comm {

namespace {

std::span<const uint8_t> bytes_of(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

}  // namespace

bool Connection::flush() {
  while (!outgoing_.empty()) {
    const int64_t count = write_some(socket_, outgoing_);
    if (count <= 0) return count == 0;
    outgoing_.erase(outgoing_.begin(), outgoing_.begin() + count);
  }
  return true;
}

// One message's bytes at most, so that a stranger can't make this side keep more.
bool Connection::fill() {
  std::vector<uint8_t> bytes(std::min<size_t>(reader_.wanted_bytes(), 64 << 10));
  const int64_t count = read_some(socket_, bytes);
  if (count > 0) reader_.feed(std::span(bytes).first(static_cast<size_t>(count)));
  return count >= 0;
}

MessageKey challenge_key() {
  return mac_of(bytes_of("tessera"), {bytes_of("challenge")});
}

MessageKey hello_key(const std::string& secret, std::span<const uint8_t> root_nonce) {
  return mac_of(bytes_of(secret), {bytes_of("hello"), root_nonce});
}

MessageKey session_key(const std::string& secret, std::span<const uint8_t> root_nonce,
                       std::span<const uint8_t> own_nonce) {
  return mac_of(bytes_of(secret), {bytes_of("session"), root_nonce, own_nonce});
}

}  // namespace tessera::comm
