// SPDX-License-Identifier: Apache-2.0
#pragma once
// A model for the protocols' tests, ids that can be foreseen, and answers pushed in any parts.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "server/answer.h"
#include "server/ids.h"
#include "server/request.h"

namespace tessera::server {

inline ServedModel served_model(bool has_grammars = true) {
  ServedModel model;
  model.names = {"tiny"};
  model.vocab_size = 1000;
  model.max_model_len = 4096;
  model.has_grammars = has_grammars;
  return model;
}

class CountedIds : public IdSource {
 public:
  std::string next(std::string_view prefix) override { return std::string(prefix) + std::to_string(++count_); }

 private:
  int count_ = 0;
};

// `text` in random parts of 1 to `most` bytes, as tokens would cut it.
inline std::vector<std::string> cut(const std::string& text, std::mt19937& random, size_t most) {
  std::vector<std::string> parts;
  for (size_t pos = 0; pos < text.size();) {
    parts.push_back(text.substr(pos, 1 + random() % most));
    pos += parts.back().size();
  }
  return parts;
}

// The JSON of each data line of a stream; [DONE] becomes the string "[DONE]".
inline std::vector<nlohmann::ordered_json> data_lines(std::string_view stream) {
  std::vector<nlohmann::ordered_json> out;
  for (size_t begin = 0; begin < stream.size();) {
    const size_t end = stream.find("\n\n", begin);
    EXPECT_NE(end, std::string_view::npos) << stream.substr(begin);
    if (end == std::string_view::npos) break;
    std::string_view lines = stream.substr(begin, end - begin);
    begin = end + 2;
    const size_t data = lines.find("data: ");
    if (data == std::string_view::npos) continue;
    lines.remove_prefix(data + 6);
    EXPECT_EQ(lines.find('\n'), std::string_view::npos);
    out.push_back(lines == "[DONE]" ? nlohmann::ordered_json("[DONE]") : nlohmann::ordered_json::parse(lines));
  }
  return out;
}

}  // namespace tessera::server
