// SPDX-License-Identifier: Apache-2.0
// Reads JSON strings, one per line, and writes their token ids, one line each: what tools/compare_tokenizer.py
// compares. With a text, says how fast that is encoded instead, in processor time, the best of five times.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <iostream>
#include <string>

#include "base/file.h"
#include "base/json.h"
#include "text/tokenizer/tokenizer.h"

namespace {

void time_encoding(const tessera::text::Tokenizer& tokenizer, const std::string& path) {
  const std::string text = tessera::read_file(path, uint64_t{1} << 30);
  double best = 1e30;
  size_t num_tokens = 0;
  for (int i = 0; i < 5; ++i) {
    const std::clock_t begin = std::clock();
    num_tokens = tokenizer.encode(text).size();
    best = std::min(best, static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
  }
  std::printf("%zu bytes, %zu tokens, %.1f MB/s\n", text.size(), num_tokens,
              static_cast<double>(text.size()) / best / 1e6);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) {
    std::fprintf(stderr,
                 "usage: tokenize_strings TOKENIZER_JSON < lines of JSON strings\n"
                 "       tokenize_strings TOKENIZER_JSON TEXT\n");
    return 2;
  }
  const tessera::text::Tokenizer tokenizer = tessera::text::Tokenizer::load(argv[1]);
  if (argc == 3) {
    time_encoding(tokenizer, argv[2]);
    return 0;
  }
  std::string line;
  while (std::getline(std::cin, line)) {
    const tessera::Json text = tessera::Json::parse(line, "stdin");
    for (const int32_t id : tokenizer.encode(text.string())) std::printf("%d ", id);
    std::printf("\n");
  }
  return 0;
}
