// SPDX-License-Identifier: Apache-2.0
#include "bench/serve/response_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/error.h"
#include "base/strings.h"

namespace tessera::bench {

namespace {

[[noreturn]] void fail_answer(std::string_view expected, std::string_view found) {
  fail(ErrorCode::kDataLoss, fmt::format("the server's answer: expected {}, found \"{}\"", expected, printable(found)));
}

std::string small_letters(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return out;
}

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t"), end = text.find_last_not_of(" \t");
  return begin == std::string_view::npos ? std::string_view() : text.substr(begin, end - begin + 1);
}

uint64_t number(std::string_view text, int base, std::string_view what) {
  uint64_t value = 0;
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (fault != std::errc() || end != text.data() + text.size()) fail_answer(what, text);
  return value;
}

}  // namespace

void ResponseReader::feed(std::string_view bytes) {
  pending_ += bytes;
  while (advance()) {
  }
}

bool ResponseReader::finish() {
  if (state_ == State::kToEnd) state_ = State::kDone;
  return state_ == State::kDone;
}

std::string_view ResponseReader::field(std::string_view name) const {
  const auto at = std::find_if(fields_.begin(), fields_.end(), [&](const Field& one) { return one.name == name; });
  return at == fields_.end() ? std::string_view() : std::string_view(at->value);
}

std::string ResponseReader::take_body() {
  return std::exchange(body_, {});
}

// One step of reading; false where more bytes are needed.
bool ResponseReader::advance() {
  std::string line;
  switch (state_) {
    case State::kHead:
      if (pending_.find("\r\n\r\n") == std::string::npos) {
        if (pending_.size() > kMaxHeadBytes) fail_answer("a head of at most 64 KiB", pending_.substr(0, 40));
        return false;
      }
      read_head();
      return true;
    case State::kChunkSize:
      if (!read_line(line)) return false;
      left_ = number(trimmed(std::string_view(line).substr(0, line.find(';'))), 16, "a chunk's size in hexadecimal");
      state_ = left_ == 0 ? State::kTrailer : State::kChunk;
      return true;
    case State::kChunkEnd:
      if (!read_line(line)) return false;
      if (!line.empty()) fail_answer("the end of a chunk", line);
      state_ = State::kChunkSize;
      return true;
    case State::kTrailer:
      if (!read_line(line)) return false;
      if (line.empty()) state_ = State::kDone;
      return true;
    case State::kCounted:
    case State::kChunk: {
      const size_t count = static_cast<size_t>(std::min<uint64_t>(left_, pending_.size()));
      body_.append(pending_, 0, count);
      pending_.erase(0, count);
      left_ -= count;
      if (left_ > 0) return false;
      state_ = state_ == State::kChunk ? State::kChunkEnd : State::kDone;
      return true;
    }
    case State::kToEnd:
      body_ += std::exchange(pending_, {});
      return false;
    case State::kDone:
      return false;
  }
  return false;
}

bool ResponseReader::read_line(std::string& line) {
  const size_t end = pending_.find("\r\n");
  if (end == std::string::npos) {
    if (pending_.size() > kMaxHeadBytes) fail_answer("a line of at most 64 KiB", pending_.substr(0, 40));
    return false;
  }
  line = pending_.substr(0, end);
  pending_.erase(0, end + 2);
  return true;
}

void ResponseReader::read_head() {
  std::string line;
  read_line(line);
  if (line.size() < 12 || line.compare(0, 7, "HTTP/1.") != 0 || line[8] != ' ') fail_answer("HTTP/1.1", line);
  status_ = static_cast<int>(number(std::string_view(line).substr(9, 3), 10, "a status of three digits"));
  fields_.clear();
  while (read_line(line) && !line.empty()) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) fail_answer("a field of a head", line);
    fields_.push_back({small_letters(std::string_view(line).substr(0, colon)),
                       std::string(trimmed(std::string_view(line).substr(colon + 1)))});
  }
  if (status_ < 200) return;  // an interim answer; the one that counts follows
  if (small_letters(field("transfer-encoding")) == "chunked") {
    state_ = State::kChunkSize;
  } else if (!field("content-length").empty()) {
    left_ = number(field("content-length"), 10, "a length in digits");
    state_ = State::kCounted;
  } else {
    state_ = status_ == 204 || status_ == 304 ? State::kDone : State::kToEnd;
  }
}

void EventReader::feed(std::string_view bytes) {
  for (const char c : bytes) {
    // A line ends with CR, LF or both.
    if (c == '\n' && std::exchange(after_return_, false)) continue;
    after_return_ = c == '\r';
    if (c == '\n' || c == '\r') {
      line(std::exchange(line_, {}));
      continue;
    }
    line_ += c;
    if (line_.size() + data_.size() > kMaxEventBytes) fail_answer("events of at most 16 MiB", line_.substr(0, 40));
  }
}

void EventReader::line(std::string_view text) {
  if (std::exchange(is_first_, false) && text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  if (text.empty()) {
    if (has_data_) events_.push_back(std::exchange(data_, {}));
    has_data_ = false;
    return;
  }
  const size_t colon = text.find(':');
  if (text.substr(0, colon) != "data") return;
  std::string_view value = colon == std::string_view::npos ? std::string_view() : text.substr(colon + 1);
  if (value.starts_with(' ')) value.remove_prefix(1);
  if (has_data_) data_ += '\n';
  data_ += value;
  has_data_ = true;
}

bool EventReader::next(std::string& data) {
  if (num_taken_ == events_.size()) {
    events_.clear();
    num_taken_ = 0;
    return false;
  }
  data = std::move(events_[num_taken_++]);
  return true;
}

}  // namespace tessera::bench
