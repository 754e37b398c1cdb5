// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a server sends, read as it comes: an HTTP/1.1 answer, and the events of a stream. Bytes may be cut anywhere;
// what is read does not depend on where.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::bench {

// One answer with its head, and a body that is chunked, counted, or ends with the connection.
// Source: RFC 9112, sections 4, 6 and 7.
class ResponseReader {
 public:
  static constexpr size_t kMaxHeadBytes = size_t{64} << 10;

  // Takes what came next. Throws kDataLoss where it is no such answer.
  void feed(std::string_view bytes);
  // The connection ended. True where the answer is whole.
  bool finish();
  // 0 until the head is there.
  int status() const { return status_; }
  // Of the named field, in small letters; empty where absent.
  std::string_view field(std::string_view name) const;
  bool is_complete() const { return state_ == State::kDone; }
  // What of the body has come since it was last taken.
  std::string take_body();

 private:
  enum class State { kHead, kCounted, kToEnd, kChunkSize, kChunk, kChunkEnd, kTrailer, kDone };
  struct Field {
    std::string name, value;
  };
  void read_head();
  bool read_line(std::string& line);
  bool advance();

  State state_ = State::kHead;
  std::string pending_, body_;
  std::vector<Field> fields_;
  int status_ = 0;
  uint64_t left_ = 0;  // of a counted body, or of a chunk
};

// The data of a text/event-stream's events; names and comments are left out.
// Source: HTML standard, section 9.2.6.
class EventReader {
 public:
  static constexpr size_t kMaxEventBytes = size_t{16} << 20;

  // Takes what came next. Throws kDataLoss for an event beyond the limit.
  void feed(std::string_view bytes);
  // The next whole event's data. False where there is none yet.
  bool next(std::string& data);

 private:
  void line(std::string_view text);

  std::string line_, data_;
  bool has_data_ = false, after_return_ = false, is_first_ = true;
  std::vector<std::string> events_;
  size_t num_taken_ = 0;
};

}  // namespace tessera::bench
