// SPDX-License-Identifier: Apache-2.0
#include "eval_file.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "base/file.h"
#include "base/json.h"
#include "base/strings.h"

namespace tessera::app {

namespace {

constexpr uint64_t kMaxFileBytes = uint64_t{1} << 30;

std::vector<int32_t> read_ids(const JsonCursor& field, int64_t vocab_size) {
  std::vector<int32_t> ids;
  for (const JsonCursor& id : field.elements()) ids.push_back(static_cast<int32_t>(id.integer(0, vocab_size - 1)));
  return ids;
}

void check_length(const std::string& where, const char* field, size_t tokens, int64_t max_tokens) {
  if (tokens == 0 || static_cast<int64_t>(tokens) > max_tokens)
    fail_data(where, fmt::format("field {}", field), fmt::format("1 to {} tokens", max_tokens), std::to_string(tokens));
}

EvalItem read_item(const JsonCursor& root, const text::Tokenizer& tokenizer, int64_t vocab_size, int64_t max_tokens) {
  EvalItem item;
  const char* field = "prompt_ids";
  if (const auto ids = root.find("prompt_ids")) {
    item.prompt_ids = read_ids(*ids, vocab_size);
  } else {
    field = "prompt";
    item.prompt_ids = tokenizer.encode(root.at("prompt").string());
  }
  check_length(root.file(), field, item.prompt_ids.size(), max_tokens);
  item.expected = root.at("expected").string();
  const auto task = root.find("task");
  item.task = task ? task->string() : "all";
  return item;
}

std::vector<ScoredText> read_segments(const std::string& path, int64_t vocab_size, int64_t max_tokens) {
  const Json json = Json::parse(read_file(path, kMaxFileBytes), path);
  const JsonCursor root(json, path);
  std::vector<ScoredText> texts;
  for (const JsonCursor& segment : root.at("segments").elements()) {
    texts.push_back({read_ids(segment, vocab_size), 0});
    check_length(path, segment.path().c_str(), texts.back().ids.size(), max_tokens);
  }
  if (const auto bytes = root.find("bytes")) {
    const std::vector<JsonCursor> counts = bytes->elements();
    if (counts.size() != texts.size())
      fail_data(path, "field bytes", fmt::format("{} numbers, one a segment", texts.size()),
                std::to_string(counts.size()));
    for (size_t i = 0; i < counts.size(); ++i) texts[i].num_bytes = counts[i].integer(0, int64_t{1} << 40);
  }
  return texts;
}

}  // namespace

std::vector<EvalItem> read_eval_file(const std::string& path, const text::Tokenizer& tokenizer, int64_t vocab_size,
                                     int64_t max_tokens) {
  const std::string text = read_file(path, kMaxFileBytes);
  std::vector<EvalItem> items;
  int64_t line = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view content(text.data() + begin, end - begin);
    begin = end + 1;
    ++line;
    if (content.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string where = fmt::format("{}: line {}", path, line);
    const Json json = Json::parse(content, where);
    items.push_back(read_item(JsonCursor(json, where), tokenizer, vocab_size, max_tokens));
    items.back().line = line;
  }
  if (items.empty()) fail_data(path, "prompts", "at least one line", "none");
  return items;
}

bool is_plain_text(const std::string& path) {
  return !path.ends_with(".json");
}

std::vector<ScoredText> read_scored_texts(const std::string& path, const text::Tokenizer* tokenizer, int32_t bos_id,
                                          int64_t vocab_size, int64_t window, int64_t max_tokens) {
  std::vector<ScoredText> texts;
  if (!is_plain_text(path)) {
    texts = read_segments(path, vocab_size, max_tokens);
  } else {
    const std::string text = read_file(path, kMaxFileBytes);
    if (!is_valid_utf8(text)) fail_data(path, "text", "UTF-8", "bytes that are not");
    const std::vector<int32_t> ids = tokenizer->encode(text);
    const size_t step = static_cast<size_t>(window - 1);
    for (size_t begin = 0; begin < ids.size(); begin += step) {
      ScoredText part{{bos_id}, 0};
      for (size_t i = begin; i < std::min(begin + step, ids.size()); ++i) {
        part.ids.push_back(ids[i]);
        part.num_bytes += static_cast<int64_t>(tokenizer->token_bytes(ids[i]).size());
      }
      texts.push_back(std::move(part));
    }
  }
  if (std::none_of(texts.begin(), texts.end(), [](const ScoredText& text) { return text.ids.size() > 1; }))
    fail_data(path, "text", "at least one token to score", "none");
  return texts;
}

}  // namespace tessera::app
