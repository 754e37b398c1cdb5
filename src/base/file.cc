// SPDX-License-Identifier: Apache-2.0
#include "base/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/strings.h"
#include "base/test_seams.h"

namespace tessera {

namespace {

// One read or write call may move at most about 2 GiB on Linux; smaller pieces also keep progress visible.
constexpr size_t kMaxCallBytes = size_t{1} << 28;

// What a descriptor's file gets its name by: to link a descriptor itself is the administrator's alone.
constexpr const char* kDescriptors = "/proc/self/fd";

mode_t mode_of(FileAccess access) {
  return access == FileAccess::kPrivate ? 0600 : 0666;
}

// True where the test seam makes this call fail (as a failing disk would).
bool seam_fails() {
  if (!seams::is_failing_file_call()) return false;
  errno = EIO;
  return true;
}

std::string system_error(const std::string& path, const char* action) {
  return fmt::format("{}: cannot {}: {}", printable(path), action, std::strerror(errno));
}

struct stat checked_stat(int descriptor, const std::string& path) {
  struct stat info {};
  if (seam_fails() || ::fstat(descriptor, &info) != 0) fail(ErrorCode::kDataLoss, system_error(path, "stat"));
  return info;
}

}  // namespace

File File::open_read(const std::string& path) {
  // Without O_NONBLOCK, opening a FIFO would wait for a writer before the check below sees what it is.
  const int descriptor = seam_fails() ? -1 : ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (descriptor < 0) {
    fail(errno == ENOENT || errno == ENOTDIR ? ErrorCode::kNotFound : ErrorCode::kDataLoss, system_error(path, "open"));
  }
  File file(descriptor, path);
  if (!S_ISREG(checked_stat(descriptor, path).st_mode)) fail_data(path, "file", "a regular file", "something else");
  return file;
}

File File::create_new(const std::string& path, const std::string& shown, FileAccess access) {
  const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  const int descriptor = seam_fails() ? -1 : ::open(path.c_str(), flags, mode_of(access));
  if (descriptor < 0) fail(ErrorCode::kInvalidArgument, system_error(shown, "create"));
  return File(descriptor, path);
}

std::optional<File> File::create_unnamed(const std::string& path, FileAccess access) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  if (seam_fails() || ::access(kDescriptors, F_OK) != 0) return std::nullopt;
  const int descriptor =
      ::open(folder.empty() ? "." : folder.c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, mode_of(access));
  if (descriptor < 0) return std::nullopt;
  return File(descriptor, path);
}

void File::give_name() {
  const std::string here = fmt::format("{}/{}", kDescriptors, descriptor_);
  if (seam_fails() || ::fsync(descriptor_) != 0 ||
      ::linkat(AT_FDCWD, here.c_str(), AT_FDCWD, path_.c_str(), AT_SYMLINK_FOLLOW) != 0) {
    fail(ErrorCode::kResourceExhausted, system_error(path_, "name"));
  }
}

File::File(File&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)), path_(std::move(other.path_)) {}

File& File::operator=(File&& other) noexcept {
  if (this != &other) {
    close_quietly();
    descriptor_ = std::exchange(other.descriptor_, -1);
    path_ = std::move(other.path_);
  }
  return *this;
}

File::~File() {
  close_quietly();
}

void File::close_quietly() noexcept {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

uint64_t File::size() const {
  return static_cast<uint64_t>(checked_stat(descriptor_, path_).st_size);
}

void File::read_at(uint64_t offset, void* out, size_t bytes) const {
  char* destination = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t got =
        seam_fails() ? -1
                     : ::pread(descriptor_, destination, std::min(bytes, kMaxCallBytes), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(ErrorCode::kDataLoss, system_error(path_, "read"));
    if (got == 0) fail_data(path_, "file", fmt::format("{} more bytes at offset {}", bytes, offset), "its end");
    destination += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<size_t>(got);
  }
}

void File::will_read(uint64_t offset, uint64_t bytes) const noexcept {
  // Linux follows the first part of a hint alone, as much as the disk reads ahead or takes at once (mm/readahead.c,
  // force_page_cache_ra), seldom less than this. What comes of it is of no interest: a file system that knows no hints
  // has none to follow.
  constexpr uint64_t kHintBytes = 128 << 10;
  for (uint64_t done = 0; done < bytes; done += kHintBytes) {
    static_cast<void>(::posix_fadvise(descriptor_, static_cast<off_t>(offset + done),
                                      static_cast<off_t>(std::min(kHintBytes, bytes - done)), POSIX_FADV_WILLNEED));
  }
}

void File::write(const void* data, size_t bytes) {
  const char* source = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t put = seam_fails() ? -1 : ::write(descriptor_, source, std::min(bytes, kMaxCallBytes));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail(ErrorCode::kResourceExhausted, system_error(path_, "write"));
    source += put;
    bytes -= static_cast<size_t>(put);
  }
}

void File::write_at(uint64_t offset, const void* data, size_t bytes) {
  const char* source = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t put =
        seam_fails() ? -1 : ::pwrite(descriptor_, source, std::min(bytes, kMaxCallBytes), static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail(ErrorCode::kResourceExhausted, system_error(path_, "write"));
    source += put;
    offset += static_cast<uint64_t>(put);
    bytes -= static_cast<size_t>(put);
  }
}

void File::sync_and_close() {
  if (seam_fails() || ::fsync(descriptor_) != 0) fail(ErrorCode::kResourceExhausted, system_error(path_, "sync"));
  const int descriptor = std::exchange(descriptor_, -1);
  if (::close(descriptor) != 0) fail(ErrorCode::kResourceExhausted, system_error(path_, "close"));
}

std::string read_file(const std::string& path, uint64_t max_bytes) {
  const File file = File::open_read(path);
  const uint64_t size = file.size();
  if (size > max_bytes) {
    fail_data(path, "file size", fmt::format("at most {} bytes", max_bytes), fmt::format("{} bytes", size));
  }
  std::string text(size, '\0');
  file.read_at(0, text.data(), text.size());
  return text;
}

namespace {

// Nothing where nothing is there. A folder on the way that must not be searched hides what is in it.
std::optional<struct stat> found_at(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0) return info;
  if (errno != ENOENT && errno != ENOTDIR) fail(ErrorCode::kDataLoss, system_error(path, "look for it"));
  return std::nullopt;
}

}  // namespace

bool file_exists(const std::string& path) {
  return found_at(path).has_value();
}

bool folder_exists(const std::string& path) {
  const std::optional<struct stat> info = found_at(path);
  return info && S_ISDIR(info->st_mode);
}

}  // namespace tessera
