// SPDX-License-Identifier: Apache-2.0
#include "base/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "base/strings.h"
#include "base/test_seams.h"

namespace tessera {

namespace {

std::string temporary_name(const std::string& path) {
  static std::atomic<int> counter{0};
  return fmt::format("{}.tmp-{}-{}", path, ::getpid(), counter++);
}

// Makes the rename itself durable. A folder that can't be opened or flushed (some network disks) is not an error:
// the file's own bytes are safe by then.
void sync_folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  const int descriptor = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return;
  (void)::fsync(descriptor);
  ::close(descriptor);
}

}  // namespace

AtomicFile::AtomicFile(std::string path)
    : path_(std::move(path)), temporary_path_(temporary_name(path_)), file_(File::create(temporary_path_)) {}

AtomicFile::~AtomicFile() {
  if (!is_committed_) ::unlink(temporary_path_.c_str());
}

void AtomicFile::commit() {
  file_.sync_and_close();
  const bool seam_fails = seams::is_failing_file_call();
  if (seam_fails) errno = EIO;
  if (seam_fails || std::rename(temporary_path_.c_str(), path_.c_str()) != 0) {
    fail(ErrorCode::kResourceExhausted, fmt::format("{}: cannot rename from {}: {}", printable(path_),
                                                    printable(temporary_path_), std::strerror(errno)));
  }
  is_committed_ = true;
  sync_folder_of(path_);
}

}  // namespace tessera
