// SPDX-License-Identifier: Apache-2.0
#pragma once
// Folders before and after a conversion, in tests.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>

#include "base/error.h"
#include "convert/convert.h"

namespace tessera::testing {

inline std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// Every file of a folder and below, by path.
inline std::map<std::string, std::string> all_files(const std::string& folder) {
  std::map<std::string, std::string> files;
  if (!std::filesystem::exists(folder)) return files;
  for (const auto& item : std::filesystem::recursive_directory_iterator(folder)) {
    if (item.is_regular_file()) files[item.path().lexically_relative(folder).string()] = content_of(item.path());
  }
  return files;
}

inline convert::Options convert_options(const std::string& families, uint64_t max_shard_bytes = 1 << 30) {
  convert::Options options;
  options.families = convert::parse_families(families);
  options.max_shard_bytes = max_shard_bytes;
  options.num_threads = 2;
  options.version = "test";
  return options;
}

// The error's text, with its code.
inline std::string convert_error(const std::string& in, const std::string& out, const convert::Options& options,
                                 ErrorCode expected) {
  try {
    convert::convert(in, out, options, nullptr, nullptr, nullptr);
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(expected)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "expected an error";
  return "";
}

}  // namespace tessera::testing
