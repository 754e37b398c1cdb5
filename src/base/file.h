// SPDX-License-Identifier: Apache-2.0
#pragma once
// Checked POSIX files. Every call names the path in its error and passes the file seam (base/test_seams.h).
// Reading uses pread, never mmap: a file that shrinks while mapped would end the process.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace tessera {

// Who may read and write a new file: as the process' umask says, or its owner alone.
enum class FileAccess { kUsual, kPrivate };

class File {
 public:
  // Throws kNotFound where the path does not exist, kDataLoss where it is not a regular file or can't be opened.
  static File open_read(const std::string& path);
  // Creates a file that is not there yet, following no link. Throws kInvalidArgument where that is not possible (the
  // path is the user's choice), naming `shown`.
  static File create_new(const std::string& path, const std::string& shown, FileAccess access = FileAccess::kUsual);
  // A file of the folder of `path` that has no name until give_name(): it is gone when the process ends, however that
  // ends. Nothing where the file system has no such files, or refuses one.
  static std::optional<File> create_unnamed(const std::string& path, FileAccess access = FileAccess::kUsual);

  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  const std::string& path() const { return path_; }
  uint64_t size() const;

  // Reads exactly `bytes` at `offset`; throws kDataLoss where the file ends before. Threads may call it at once.
  void read_at(uint64_t offset, void* out, size_t bytes) const;
  // A hint: these bytes will be read soon. The system may fetch them from the disk meanwhile; beyond the end there are
  // none. May wait for the disk's queue.
  void will_read(uint64_t offset, uint64_t bytes) const noexcept;
  // Appends at the current end of what this object wrote. Throws kResourceExhausted on a full disk.
  void write(const void* data, size_t bytes);
  // Writes at `offset`, whatever write() did; a gap before it reads as zeros. Throws as write(). Threads may call it at
  // once.
  void write_at(uint64_t offset, const void* data, size_t bytes);
  // Of an unnamed file: flushed to the disk, it is `path` from now on. Throws kResourceExhausted where that fails, if
  // something is there too.
  void give_name();
  // Flushes to the disk and closes; throws where either fails.
  void sync_and_close();

 private:
  File(int descriptor, std::string path) : descriptor_(descriptor), path_(std::move(path)) {}
  void close_quietly() noexcept;
  int descriptor_ = -1;
  std::string path_;
};

// The whole file. Throws kDataLoss where it is larger than `max_bytes`.
std::string read_file(const std::string& path, uint64_t max_bytes);

// Whether something is there, or a folder is. Throws kDataLoss where that cannot be seen (permissions, say).
bool file_exists(const std::string& path);
bool folder_exists(const std::string& path);

}  // namespace tessera
