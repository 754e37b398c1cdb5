// SPDX-License-Identifier: Apache-2.0
#pragma once
// A file that appears whole or not at all: written beside its target under a temporary name, flushed, then renamed.
#include <string>

#include "base/file.h"

namespace tessera {

class AtomicFile {
 public:
  // Creates PATH.tmp-RANDOM; a link is followed to the file it means. Throws kInvalidArgument where the folder can't be
  // written or PATH is a folder, a device, a pipe.
  explicit AtomicFile(const std::string& path, FileAccess access = FileAccess::kUsual);
  // Without commit() the temporary file is removed.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t bytes) { file_.write(data, bytes); }
  void write_at(uint64_t offset, const void* data, size_t bytes) { file_.write_at(offset, data, bytes); }
  // Flushes file and folder to the disk and renames. After it the target holds exactly what was written.
  void commit();

 private:
  std::string path_;
  std::string temporary_path_;
  File file_;
  bool is_committed_ = false;
};

}  // namespace tessera
