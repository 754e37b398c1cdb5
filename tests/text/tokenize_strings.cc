// SPDX-License-Identifier: Apache-2.0
// Reads JSON strings, one per line, and writes their token ids, one line each: what tools/compare_tokenizer.py
// compares.
#include <cstdio>
#include <iostream>
#include <string>

#include "base/json.h"
#include "text/tokenizer/tokenizer.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: tokenize_strings TOKENIZER_JSON < lines of JSON strings\n");
    return 2;
  }
  const tessera::text::Tokenizer tokenizer = tessera::text::Tokenizer::load(argv[1]);
  std::string line;
  while (std::getline(std::cin, line)) {
    const tessera::Json text = tessera::Json::parse(line, "stdin");
    for (const int32_t id : tokenizer.encode(text.string())) std::printf("%d ", id);
    std::printf("\n");
  }
  return 0;
}
