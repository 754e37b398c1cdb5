// SPDX-License-Identifier: Apache-2.0
#pragma once
// A connection between rank 0 and another rank: sealed messages over a socket that does not block.
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/message.h"
#include "comm/tcp.h"

namespace tessera::comm {

using Clock = std::chrono::steady_clock;

class Connection {
 public:
  // `key` seals and opens until set_key(); `out` is the direction of what this side sends.
  Connection(Socket socket, std::string peer, const MessageKey& key, Direction out, size_t max_payload)
      : socket_(std::move(socket)),
        peer_(std::move(peer)),
        writer_(key, out),
        reader_(key, out == Direction::kToRoot ? Direction::kFromRoot : Direction::kToRoot, max_payload),
        last_heard_(Clock::now()) {}

  int descriptor() const { return socket_.descriptor(); }
  const std::string& peer() const { return peer_; }
  Clock::time_point last_heard() const { return last_heard_; }
  bool wants_to_write() const { return !outgoing_.empty(); }

  void send(MessageKind kind, std::span<const uint8_t> payload) {
    const std::vector<uint8_t> bytes = writer_.seal(kind, payload);
    outgoing_.insert(outgoing_.end(), bytes.begin(), bytes.end());
    flush();
  }
  // Sends what the socket takes. False: the connection broke.
  bool flush();
  // Takes what is there. False: the other side has closed.
  bool fill();
  // As MessageReader::next; whatever is genuine was heard.
  bool next(Message& message) {
    if (!reader_.next(message)) return false;
    last_heard_ = Clock::now();
    return true;
  }
  // Both directions; messages of more than `max_payload` bytes are refused from now on.
  void set_key(const MessageKey& key, size_t max_payload = kMaxPayloadBytes) {
    writer_.set_key(key), reader_.set_key(key, max_payload);
  }
  // Drops what was read and is no message yet.
  void forget_heard() { reader_.clear(); }
  // Silence counts from now.
  void restart_silence() { last_heard_ = Clock::now(); }
  // Nothing more is sent; the other side reads what was.
  void end_sending() { shut_down_writing(socket_); }

 private:
  Socket socket_;
  std::string peer_;
  MessageWriter writer_;
  MessageReader reader_;
  std::vector<uint8_t> outgoing_;
  Clock::time_point last_heard_;
};

// Keys of the handshake. kChallenge is sealed with a key that everybody knows, kHello with one made of the secret and
// the challenge's nonce, and everything after it with one made of the secret and both nonces.
MessageKey challenge_key();
MessageKey hello_key(const std::string& secret, std::span<const uint8_t> root_nonce);
MessageKey session_key(const std::string& secret, std::span<const uint8_t> root_nonce,
                       std::span<const uint8_t> own_nonce);

}  // namespace tessera::comm
