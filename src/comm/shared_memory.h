// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory of every rank that all of them read and write as if it were their own: pages of caches of which a machine has
// one copy (docs/decisions/0035-one-copy-of-entries.md).
//
// Nothing orders what ranks do in it. Whoever writes what others may still read of before waits for them first
// (Communicator::barrier()); ranks that write the same bytes to the same place need not.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/shared_part.h"
#include "device/memory_space.h"

namespace tessera::comm {

class SharedMemory {
 public:
  SharedMemory(std::unique_ptr<SharedPart> own, std::vector<uint8_t*> parts)
      : own_(std::move(own)), parts_(std::move(parts)) {}
  int world() const { return static_cast<int>(parts_.size()); }
  // Where the part of a rank, its own too, lies on this one.
  uint8_t* of(int rank) const { return parts_[static_cast<size_t>(rank)]; }

 private:
  std::unique_ptr<SharedPart> own_;
  std::vector<uint8_t*> parts_;
};

// A part of so many zero bytes on each rank, of the same kind as `memory`, in which what ranks tell each other for it
// lies. All ranks call it together, outside of steps, with the same size and the same `tag`, which says that they mean
// the same by it. `own_fault`: why this rank has no memory left for what goes with it; empty: it has. Null on every
// rank alike where one of them can't reach another's: then `why_not` is the first one's
// reason. A rank by itself (echo.h) finds its own part in place of the others'. Throws kResourceExhausted, on every
// rank alike, where one has no memory left, kInternal where sizes or tags differ; else as Communicator.
std::unique_ptr<SharedMemory> make_shared_memory(Communicator& comm, device::MemorySpace& memory, device::Queue& queue,
                                                 size_t bytes, uint64_t tag, const std::string& own_fault,
                                                 std::string& why_not);

}  // namespace tessera::comm
