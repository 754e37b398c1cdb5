// SPDX-License-Identifier: Apache-2.0
#include "testing/temporary_folder.h"

#include <stdlib.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <vector>

namespace tessera::testing {

namespace fs = std::filesystem;

TemporaryFolder::TemporaryFolder() {
  std::string pattern = (fs::temp_directory_path() / "tessera-test-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
  path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

std::string TemporaryFolder::write(const std::string& name, const std::string& content) const {
  std::ofstream(file(name), std::ios::binary) << content;
  return file(name);
}

std::string TemporaryFolder::listing() const {
  std::vector<std::string> names;
  for (const auto& item : fs::directory_iterator(path_)) names.push_back(item.path().filename().string());
  std::sort(names.begin(), names.end());
  std::string out;
  for (const std::string& name : names) out += name + "\n";
  return out;
}

std::string shared_data() {
  if (const char* given = std::getenv("TESSERA_SHARED_DATA"); given != nullptr && fs::is_directory(given)) return given;
  return "";
}

}  // namespace tessera::testing
