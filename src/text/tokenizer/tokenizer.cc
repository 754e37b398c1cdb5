// SPDX-License-Identifier: Apache-2.0
#include "text/tokenizer/tokenizer.h"

#include <fmt/format.h>

#include <array>

#include "base/error.h"
#include "base/file.h"
#include "base/strings.h"
#include "text/tokenizer/byte_alphabet.h"

namespace tessera::text {

namespace {

constexpr uint64_t kMaxFileBytes = 64 << 20;  // eight times DeepSeek-V4's
// The largest id a vocabulary of `entries` may use: some are left out on purpose, but ids index a table.
int64_t max_id(size_t entries) {
  return 2 * static_cast<int64_t>(entries) + 65536;
}

[[noreturn]] void refuse(const JsonCursor& field, std::string_view expected) {
  fail(ErrorCode::kUnsupported, fmt::format("{}: field {}: expected {}, found {}", printable(field.file()),
                                            printable(field.path()), expected, describe(field.value())));
}

// Refuses a flag that is set and that this tokenizer has not got; absent, null, false and "" are fine.
void require_unset(const JsonCursor& object, const char* key) {
  const auto field = object.find(key);
  if (!field) return;
  const Json& value = field->value();
  const bool is_unset = (value.kind() == Json::Kind::kBool && !value.boolean()) ||
                        (value.kind() == Json::Kind::kString && value.string().empty());
  if (!is_unset) refuse(*field, "null or false");
}

void require_string(const JsonCursor& object, const char* key, std::string_view only) {
  const JsonCursor field = object.at(key);
  if (field.string() != only) refuse(field, fmt::format("\"{}\"", only));
}

}  // namespace

Tokenizer Tokenizer::load(const std::string& path) {
  return parse(read_file(path, kMaxFileBytes), path);
}

Tokenizer Tokenizer::parse(std::string_view text, const std::string& where) {
  const Json json = Json::parse(text, where);
  const JsonCursor root(json, where);
  const JsonCursor model = root.at("model");
  if (model.find("type")) require_string(model, "type", "BPE");
  for (const char* key : {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                          "byte_fallback", "ignore_merges"}) {
    require_unset(model, key);
  }
  if (const auto normalizer = root.find("normalizer")) {
    const auto steps = normalizer->find("normalizers");
    if (!steps || !steps->elements().empty()) refuse(*normalizer, "null or an empty sequence");
  }
  Tokenizer tokenizer;
  tokenizer.read_vocabulary(model);
  tokenizer.read_added_tokens(root);
  tokenizer.read_merges(model);
  tokenizer.read_pre_tokenizer(root.at("pre_tokenizer"));
  return tokenizer;
}

void Tokenizer::read_vocabulary(const JsonCursor& model) {
  const auto vocabulary = model.at("vocab").members();
  for (const auto& [text, field] : vocabulary) {
    const size_t id = static_cast<size_t>(field.integer(0, max_id(vocabulary.size())));
    if (id >= tokens_.size()) tokens_.resize(id + 1);
    if (!tokens_[id].bytes.empty()) field.fail_expected("every id once");
    if (text.empty()) field.fail_expected("a token that is not empty");
    // What is not written in the byte alphabet can only be an added token's own text.
    tokens_[id].bytes = alphabet_to_bytes(text).value_or(text);
    vocabulary_.emplace(text, static_cast<int32_t>(id));
  }
}

void Tokenizer::read_added_tokens(const JsonCursor& root) {
  const auto list = root.find("added_tokens");
  if (!list) return;
  for (const JsonCursor& item : list->elements()) {
    const size_t id = static_cast<size_t>(item.at("id").integer(0, max_id(vocabulary_.size())));
    const std::string& content = item.at("content").string();
    if (content.empty()) item.at("content").fail_expected("a text that is not empty");
    for (const char* key : {"single_word", "lstrip", "rstrip"}) require_unset(item, key);
    if (id >= tokens_.size()) tokens_.resize(id + 1);
    if (!added_ids_.emplace(content, static_cast<int32_t>(id)).second)
      item.at("content").fail_expected("every content once");
    // An added token may stand in the vocabulary too, under its own id; never under another's.
    const auto same = vocabulary_.find(content);
    const bool is_listed = same != vocabulary_.end();
    if (is_listed ? same->second != static_cast<int32_t>(id) : !tokens_[id].bytes.empty()) {
      item.at("id").fail_expected(is_listed ? fmt::format("{}, as in the vocabulary", same->second)
                                            : "an id that no other token has");
    }
    const auto special = item.find("special");
    tokens_[id] = {content, special && special->boolean()};
    added_.add(content, static_cast<int32_t>(id));
  }
}

void Tokenizer::read_merges(const JsonCursor& model) {
  std::unordered_map<uint64_t, Merge> merges;
  int32_t rank = 0, last = -1;
  for (const JsonCursor& item : model.at("merges").elements()) {
    std::string left, right;
    if (item.value().kind() == Json::Kind::kArray) {
      const auto parts = item.elements();
      if (parts.size() != 2) item.fail_expected("two tokens");
      left = parts[0].string(), right = parts[1].string();
    } else {
      const std::string& pair = item.string();
      const size_t space = pair.find(' ');
      if (space == std::string::npos || pair.find(' ', space + 1) != std::string::npos)
        item.fail_expected("\"left right\"");
      left = pair.substr(0, space), right = pair.substr(space + 1);
    }
    const auto id_of = [&](const std::string& text) {
      const auto at = vocabulary_.find(text);
      if (at == vocabulary_.end())
        item.fail_expected(fmt::format("\"{}\" to be in the vocabulary", printable(text, 60)));
      return at->second;
    };
    const int32_t product = id_of(left + right);
    num_out_of_order_ += product < last ? 1 : 0;
    last = product;
    merges.try_emplace(Bpe::merge_key(id_of(left), id_of(right)), Merge{rank++, product});
  }
  std::array<int32_t, 256> byte_ids{};
  for (int byte = 0; byte < 256; ++byte) {
    std::string text;
    append_utf8(text, byte_to_code_point(static_cast<uint8_t>(byte)));
    const auto at = vocabulary_.find(text);
    if (at == vocabulary_.end()) {
      fail_data(model.file(), "field model.vocab", "a token for each of the 256 bytes",
                fmt::format("none for byte 0x{:02x}", byte));
    }
    byte_ids[static_cast<size_t>(byte)] = at->second;
  }
  bpe_ = std::make_unique<Bpe>(byte_ids, merges);
}

void Tokenizer::read_split(const JsonCursor& split, std::vector<std::string>& expressions) {
  require_string(split, "behavior", "Isolated");
  require_unset(split, "invert");
  const JsonCursor pattern = split.at("pattern");
  const std::string where = fmt::format("{}: field {}", split.file(), pattern.path());
  if (const auto regex = pattern.find("Regex")) {
    splits_.emplace_back(regex->string(), where);
    expressions.push_back(regex->string());
  } else {
    expressions.emplace_back();  // of no expression
    splits_.push_back(RegexSplit::literal(pattern.at("String").string(), where));
  }
}

void Tokenizer::read_pre_tokenizer(const JsonCursor& field) {
  if (field.at("type").string() != "Sequence") refuse(field.at("type"), "\"Sequence\"");
  bool has_byte_level = false;
  std::vector<std::string> expressions;
  for (const JsonCursor& stage : field.at("pretokenizers").elements()) {
    if (has_byte_level) refuse(stage, "ByteLevel to be the last stage");
    const std::string& type = stage.at("type").string();
    if (type == "Split") {
      read_split(stage, expressions);
    } else if (type == "ByteLevel") {
      require_unset(stage, "add_prefix_space");
      // Absent means true in the format.
      if (stage.at("use_regex").boolean()) refuse(stage.at("use_regex"), "false");
      has_byte_level = true;
    } else {
      refuse(stage.at("type"), "\"Split\" or \"ByteLevel\"");
    }
  }
  if (!has_byte_level) refuse(field.at("pretokenizers"), "a last stage of type ByteLevel");
  all_splits_ = DeepSeekSplit::find(expressions, field.file());
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, AddedTokenMatching matching) const {
  std::vector<int32_t> ids;
  std::string repaired;
  if (!is_valid_utf8(text)) {
    repaired = replace_invalid_utf8(text);
    text = repaired;
  }
  Bpe::Scratch scratch;
  size_t done = 0;
  while (matching == AddedTokenMatching::kMatch) {
    const AddedTokens::Found found = added_.find(text, done);
    if (found.id < 0) break;
    encode_plain(text.substr(done, found.begin - done), scratch, ids);
    ids.push_back(found.id);
    done = found.begin + found.length;
  }
  encode_plain(text.substr(done), scratch, ids);
  return ids;
}

void Tokenizer::encode_plain(std::string_view text, Bpe::Scratch& scratch, std::vector<int32_t>& ids) const {
  if (text.empty()) return;
  std::vector<std::string_view> pieces, finer;
  if (all_splits_ != nullptr) {
    all_splits_->split(text, pieces);
  } else {
    pieces.push_back(text);
    for (const RegexSplit& split : splits_) {
      finer.clear();
      for (const std::string_view piece : pieces) split.split(piece, finer);
      pieces.swap(finer);
    }
  }
  for (const std::string_view piece : pieces) bpe_->encode(piece, scratch, ids);
}

const std::string& Tokenizer::token_bytes(int32_t id) const {
  TESSERA_CHECK(id >= 0 && id < vocab_size(), fmt::format("id {}", id));
  return tokens_[static_cast<size_t>(id)].bytes;
}

bool Tokenizer::is_special(int32_t id) const {
  TESSERA_CHECK(id >= 0 && id < vocab_size(), fmt::format("id {}", id));
  return tokens_[static_cast<size_t>(id)].is_special;
}

std::optional<int32_t> Tokenizer::added_token(std::string_view content) const {
  const auto at = added_ids_.find(std::string(content));
  return at == added_ids_.end() ? std::nullopt : std::optional<int32_t>(at->second);
}

}  // namespace tessera::text
