// SPDX-License-Identifier: Apache-2.0
#pragma once
// A file that appears whole or not at all: written beside its target without a name, or where the file system has no
// such files under a temporary one; flushed, then renamed. Without a name nothing is left of it even if the process is
// killed.
#include <string>

#include "base/file.h"

namespace tessera {

class AtomicFile {
 public:
  // A temporary name is PATH.tmp-RANDOM; a link is followed to the file it means. Throws kInvalidArgument where the
  // folder can't be written or PATH is a folder, a device, a pipe.
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
  File create(FileAccess access);

  std::string path_;
  std::string temporary_path_;
  bool is_named_ = false;  // temporary_path_ is there
  File file_;
  bool is_committed_ = false;
};

}  // namespace tessera
