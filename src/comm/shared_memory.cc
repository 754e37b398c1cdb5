// SPDX-License-Identifier: Apache-2.0
#include "comm/shared_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>

#include "base/error.h"
#include "device/buffer.h"

namespace tessera::comm {

namespace {

// What a rank tells the others: as long on each, since a collective's arrays are.
struct Word {
  uint64_t size = 0, tag = 0;  // of the call
  ErrorCode code{};            // of a reason
  uint32_t num_bytes = 0;
  std::array<char, kSharedAddressBytes> bytes{};

  std::string text() const { return {bytes.data(), std::min<size_t>(num_bytes, bytes.size())}; }
};

std::vector<Word> tell_all(Communicator& comm, device::MemorySpace& memory, device::Queue& queue, const Word& own) {
  const auto count = static_cast<int64_t>(sizeof(Word)), world = int64_t{comm.world()};
  const device::Tensor in(DType::kU8, {count}, memory), out(DType::kU8, {world * count}, memory);
  memory.upload(in.as<uint8_t>(), &own, sizeof(own));
  comm.all_gather(in, out, queue);
  std::vector<Word> all(static_cast<size_t>(world));
  memory.download(all.data(), out.as<uint8_t>(), all.size() * sizeof(Word));
  comm.check();
  return all;
}

}  // namespace

std::unique_ptr<SharedMemory> make_shared_memory(Communicator& comm, device::MemorySpace& memory, device::Queue& queue,
                                                 size_t bytes, uint64_t tag, const std::string& own_fault,
                                                 std::string& why_not) {
  const auto tell = [&](std::string_view text, ErrorCode code = {}) {
    Word own{.size = bytes, .tag = tag, .code = code};
    own.num_bytes = static_cast<uint32_t>(std::min(text.size(), own.bytes.size()));
    std::memcpy(own.bytes.data(), text.data(), own.num_bytes);
    std::vector<Word> all = tell_all(comm, memory, queue, own);
    for (const Word& other : all) {
      if (other.size == bytes && other.tag == tag) continue;
      fail(ErrorCode::kInternal,
           fmt::format("ranks share memory of {} bytes ({:016x}) here and of {} ({:016x}) elsewhere", bytes, tag,
                       other.size, other.tag));
    }
    return all;
  };
  // The first that a rank has; whether there is one.
  const auto has_reason = [&](const std::string& own, ErrorCode code) {
    const std::vector<Word> all = tell(own, code);
    const auto found = std::find_if(all.begin(), all.end(), [](const Word& word) { return word.num_bytes > 0; });
    if (found == all.end()) return false;
    why_not = found->text();
    if (found->code == ErrorCode::kResourceExhausted) fail(found->code, why_not);
    return true;
  };
  std::string reason = own_fault;
  ErrorCode code = own_fault.empty() ? ErrorCode::kUnsupported : ErrorCode::kResourceExhausted;
  std::unique_ptr<SharedPart> own;
  try {
    if (own_fault.empty()) own = memory.is_host() ? make_host_part(bytes, reason) : make_gpu_part(bytes, reason);
  } catch (const std::bad_alloc&) {
    reason = "no memory left", code = ErrorCode::kResourceExhausted;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kResourceExhausted) throw;
    reason = error.what(), code = error.code();
  }
  if (has_reason(own != nullptr ? "" : fmt::format("rank {}: {}", comm.rank(), reason), code)) return nullptr;

  const std::vector<uint8_t> address = own->address();
  const std::vector<Word> addresses = tell({reinterpret_cast<const char*>(address.data()), address.size()});
  std::vector<uint8_t*> parts;
  for (size_t rank = 0; rank < addresses.size() && reason.empty(); ++rank) {
    const std::string text = addresses[rank].text();
    const std::vector<uint8_t> theirs(text.begin(), text.end());
    parts.push_back(theirs == address ? own->data() : own->reach(theirs, reason));
    if (!reason.empty()) reason = fmt::format("memory of rank {}: {}", rank, reason);
  }
  if (!has_reason(reason, ErrorCode::kUnsupported)) {
    own->settle();
    return std::make_unique<SharedMemory>(std::move(own), std::move(parts));
  }
  // Nobody frees before all have let go.
  own->let_go();
  tell("");
  return nullptr;
}

}  // namespace tessera::comm
