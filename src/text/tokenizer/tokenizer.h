// SPDX-License-Identifier: Apache-2.0
#pragma once
// The tokenizer of a model's tokenizer.json: byte-level BPE with a sequence of regular-expression splits.
//   text -> added tokens cut out -> splits, each on every piece of the one before -> bytes -> BPE -> ids
// A file that asks for anything this can't do exactly is refused, naming the field.
// Source: the file format of huggingface/tokenizers; docs/formats/tokenizer.md.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/json.h"
#include "text/tokenizer/added_tokens.h"
#include "text/tokenizer/bpe.h"
#include "text/tokenizer/deepseek_split.h"
#include "text/tokenizer/regex_split.h"

namespace tessera::text {

// Whether text such as "<|User|>" becomes that token. Ignoring is for text that must not control the model.
enum class AddedTokenMatching { kMatch, kIgnore };

class Tokenizer {
 public:
  // DIRECTORY/tokenizer.json.
  static Tokenizer load(const std::string& path);
  static Tokenizer parse(std::string_view json, const std::string& where);

  // No token is added before or after. Invalid UTF-8 is read as U+FFFD. Threads may call it at once.
  std::vector<int32_t> encode(std::string_view text, AddedTokenMatching matching = AddedTokenMatching::kMatch) const;

  // Ids are below it; some may have no token.
  int32_t vocab_size() const { return static_cast<int32_t>(tokens_.size()); }
  // The bytes of a token (part of a UTF-8 sequence, perhaps); empty for an id without a token.
  const std::string& token_bytes(int32_t id) const;
  // Marked special in the file: markers such as the end of text.
  bool is_special(int32_t id) const;
  // Merges whose token has a lower id than that of the merge before. Training gives a merge's token the next id, so
  // there is none unless ids were exchanged afterwards.
  int64_t num_merges_out_of_order() const { return num_out_of_order_; }
  // The id of an added token with this content.
  std::optional<int32_t> added_token(std::string_view content) const;

 private:
  struct Token {
    std::string bytes;
    bool is_special = false;
  };

  Tokenizer() = default;
  void read_vocabulary(const JsonCursor& model);
  void read_merges(const JsonCursor& model);
  void read_added_tokens(const JsonCursor& root);
  void read_pre_tokenizer(const JsonCursor& field);
  void read_split(const JsonCursor& split, std::vector<std::string>& expressions);
  void encode_plain(std::string_view text, Bpe::Scratch& scratch, std::vector<int32_t>& ids) const;

  std::vector<Token> tokens_;
  std::unordered_map<std::string, int32_t> vocabulary_;  // as the file writes tokens
  std::unordered_map<std::string, int32_t> added_ids_;
  AddedTokens added_;
  int64_t num_out_of_order_ = 0;
  std::vector<RegexSplit> splits_;
  std::unique_ptr<DeepSeekSplit> all_splits_;  // does what splits_ do, where it can
  std::unique_ptr<Bpe> bpe_;
};

}  // namespace tessera::text
