// SPDX-License-Identifier: Apache-2.0
#include "base/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>

#include "base/error.h"
#include "base/strings.h"
#include "base/test_seams.h"

namespace tessera {

namespace {

// Not to be guessed, so that nobody can put a link there first. A name may have 255 bytes.
std::string temporary_name(const std::string& path) {
  constexpr size_t kMostBytes = 200;
  std::random_device random;
  const std::filesystem::path target(path);
  const std::string name = target.filename().string().substr(0, kMostBytes);
  return target.parent_path() / fmt::format("{}.tmp-{:08x}{:08x}", name, random(), random());
}

// Where a link points to; anything there that is not a regular file (a device, a FIFO, a folder) must stay.
std::string checked_target(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_type type = fs::status(path, error).type();
  const bool is_link = fs::is_symlink(fs::symlink_status(path, error));
  if (type == fs::file_type::not_found && !is_link) return path;
  if (type != fs::file_type::regular) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("{}: expected a regular file or nothing there, found {}", printable(path),
                     type == fs::file_type::directory   ? "a folder"
                     : type == fs::file_type::not_found ? "a link to nothing"
                     : type == fs::file_type::none      ? "a path that can't be looked up"
                                                        : "a device, pipe or socket"));
  }
  return is_link ? fs::canonical(path, error).string() : path;
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

AtomicFile::AtomicFile(const std::string& path, FileAccess access)
    : path_(checked_target(path)), temporary_path_(temporary_name(path_)), file_(create(access)) {}

AtomicFile::~AtomicFile() {
  if (is_named_ && !is_committed_) ::unlink(temporary_path_.c_str());
}

File AtomicFile::create(FileAccess access) {
  if (std::optional<File> file = File::create_unnamed(temporary_path_, access)) return std::move(*file);
  File file = File::create_new(temporary_path_, path_, access);
  is_named_ = true;
  return file;
}

// A link can't take the place of a file, a rename can: hence a temporary name, for a moment.
void AtomicFile::commit() {
  if (!is_named_) file_.give_name();
  is_named_ = true;
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
