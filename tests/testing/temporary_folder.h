// SPDX-License-Identifier: Apache-2.0
#pragma once
// A folder that is removed with everything in it.
#include <string>

namespace tessera::testing {

class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  // Writes a file of the folder; returns its path.
  std::string write(const std::string& name, const std::string& content) const;
  // Names of the folder's files, sorted.
  std::string listing() const;

 private:
  std::string path_;
};

// ../shared/data of the source tree, or TESSERA_SHARED_DATA; empty where there is none.
std::string shared_data();

}  // namespace tessera::testing
