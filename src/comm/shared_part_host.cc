// SPDX-License-Identifier: Apache-2.0
// The host's memory, as a file without a name that other processes of the machine open by the number that it has here.
// As all of the host's, it is taken as it is written.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "comm/message.h"
#include "comm/shared_part.h"

namespace tessera::comm {

namespace {

struct Address {
  int64_t process = 0, file = 0;
  uint64_t bytes = 0;
  Nonce nonce{};  // also behind the bytes: process numbers are those of a container
};
static_assert(sizeof(Address) <= kSharedAddressBytes);

std::string words(const char* what, int code) {
  return fmt::format("{}: {}", what, std::generic_category().message(code));
}

// Owns a descriptor.
class File {
 public:
  explicit File(int file) : file_(file) {}
  ~File() {
    if (file_ >= 0) close(file_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int number() const { return file_; }

 private:
  int file_;
};

// Owns a mapping of a part and the number behind it; null where there is none.
class Mapping {
 public:
  Mapping(int file, uint64_t bytes) : bytes_(bytes + sizeof(Nonce)) {
    void* data = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (data != MAP_FAILED) data_ = static_cast<uint8_t*>(data);
  }
  ~Mapping() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  Mapping(Mapping&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  Mapping& operator=(Mapping&&) = delete;
  uint8_t* data() const { return data_; }
  uint8_t* nonce() const { return data_ + bytes_ - sizeof(Nonce); }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_;
};

class HostPart final : public SharedPart {
 public:
  HostPart(int file, size_t bytes) : file_(std::in_place, file), own_(file, bytes) {
    address_ = {getpid(), file, bytes, random_nonce()};
    if (own_.data() != nullptr) std::memcpy(own_.nonce(), address_.nonce.data(), sizeof(Nonce));
  }
  uint8_t* data() const override { return own_.data(); }
  std::vector<uint8_t> address() const override {
    std::vector<uint8_t> bytes(sizeof(address_));
    std::memcpy(bytes.data(), &address_, bytes.size());
    return bytes;
  }
  uint8_t* reach(std::span<const uint8_t> bytes, std::string& why_not) override {
    Address address;
    TESSERA_CHECK(bytes.size() == sizeof(address), "an address of the host's memory");
    std::memcpy(&address, bytes.data(), sizeof(address));
    const std::string path = fmt::format("/proc/{}/fd/{}", address.process, address.file);
    const File file(open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (file.number() < 0) {
      why_not = words(path.c_str(), errno);
      return nullptr;
    }
    // A file of another machine's or container's process with that number may be anything.
    struct stat facts {};
    const bool is_whole = fstat(file.number(), &facts) == 0 && S_ISREG(facts.st_mode) &&
                          static_cast<uint64_t>(facts.st_size) == address.bytes + sizeof(Nonce);
    why_not = fmt::format("{}: not of that rank, which is of another machine or container", path);
    if (!is_whole) return nullptr;
    Mapping mapping(file.number(), address.bytes);
    if (mapping.data() == nullptr) {
      why_not = words(path.c_str(), errno);
      return nullptr;
    }
    if (std::memcmp(mapping.nonce(), address.nonce.data(), sizeof(Nonce)) != 0) return nullptr;
    why_not.clear();
    others_.push_back(std::move(mapping));
    return others_.back().data();
  }
  // A descriptor for each slab of a server's pages would be more than a process has.
  void settle() noexcept override { file_.reset(); }
  void let_go() noexcept override { others_.clear(); }

 private:
  std::optional<File> file_;
  const Mapping own_;
  std::vector<Mapping> others_;
  Address address_;
};

}  // namespace

std::unique_ptr<SharedPart> make_host_part(size_t bytes, std::string& why_not) {
  const int file = memfd_create("tessera-shared", MFD_CLOEXEC);
  if (file < 0) {
    why_not = words("memfd_create", errno);
    return nullptr;
  }
  const bool has_size = ftruncate(file, static_cast<off_t>(bytes + sizeof(Nonce))) == 0;
  const int code = errno;
  auto part = std::make_unique<HostPart>(file, has_size ? bytes : 0);
  if (has_size && part->data() != nullptr) return part;
  fail(ErrorCode::kResourceExhausted, words("memory that ranks share", has_size ? ENOMEM : code));
}

}  // namespace tessera::comm
