// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs an op on arrays that the host has, in the memory of an executor: copies them there with guards between them,
// runs eagerly and, where the executor can record, as a recording too, and copies what was written back. Every run also
// checks that nothing was written outside the arrays or into inputs, and that both ways gave the same bits.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <string>
#include <type_traits>
#include <vector>

#include "base/integer_math.h"
#include "device/buffer.h"
#include "device/executor.h"
#include "ops/packed_layout.h"
#include "ops/paged_entries.h"
#include "ops/weight_view.h"
#include "tensor/tensor_view.h"

namespace tessera::verify {

enum class Access {
  kInput,
  kOutput,   // holds poison, or what the op updates, before
  kScratch,  // holds anything before and after
};

// Where stages work, kept between them so that they do not allocate. `executor` must outlive it.
class StageMemory {
 public:
  explicit StageMemory(device::Executor& executor) : executor_(executor) {}
  device::Executor& executor() const { return executor_; }
  // At least `bytes`; what was there before is lost.
  unsigned char* reserve(size_t bytes);

 private:
  device::Executor& executor_;
  device::Buffer image_;
};

// The arrays of one call. add() only remembers; run() replaces the addresses.
class Stage {
 public:
  // `layout` as the weights that will be added are packed; null: as in the checkpoint.
  explicit Stage(StageMemory& memory, const ops::PackedLayout* layout = nullptr) : memory_(memory), layout_(layout) {}

  // `address` (a pointer variable) is of an array of `bytes`; null stays null. Two arrays that begin at one address are
  // one array.
  template <class T>
  void add(T*& address, int64_t bytes, Access access) {
    add_array(reinterpret_cast<void**>(const_cast<std::remove_const_t<T>**>(&address)), bytes, access);
  }
  // Caches of `bytes` each; with a table, of the places that `num_rows` rows name. The table lies there too.
  template <class T>
  void add(ops::SequenceBases<T>& bases, int64_t num_rows, int64_t bytes, Access access) {
    if (bases.all == nullptr) return add(bases.only, bytes, access);
    int64_t count = 0;
    for (int64_t i = 0; i < num_rows; ++i) count = std::max<int64_t>(count, bases.places[i] + 1);
    add(bases.places, num_rows * 4, Access::kInput);
    add_table(bases, count, bytes, access);
  }
  // The caches of the table's first `count` places.
  template <class T>
  void add_table(ops::SequenceBases<T>& bases, int64_t count, int64_t bytes, Access access) {
    if (bases.all == nullptr) return add(bases.only, bytes, access);
    std::vector<void*>& copies = tables_.emplace_back();
    for (int64_t i = 0; i < count; ++i) {
      copies.push_back(const_cast<std::remove_const_t<T>*>(bases.all[i]));
    }
    for (void*& address : copies) add(address, bytes, access);
    bases.all = reinterpret_cast<T* const*>(copies.data());
    add(bases.all, count * static_cast<int64_t>(sizeof(void*)), Access::kInput);
  }
  // `num_entries` entries of `entry_bytes` for each row that `num_rows` names, in whole pages. The table lies there
  // too.
  template <class T>
  void add(ops::PagedEntries<T>& entries, int64_t num_rows, int64_t num_entries, int64_t entry_bytes, Access access) {
    if (entries.pages == nullptr) return add(entries.arrays, num_rows, num_entries * entry_bytes, access);
    const int64_t per_page = int64_t{1} << entries.shift, num_pages = ceil_div(num_entries, per_page);
    int64_t count = 0;
    for (int64_t i = 0; i < num_rows; ++i) count = std::max<int64_t>(count, entries.places[i] + 1);
    add(entries.places, num_rows * 4, Access::kInput);
    std::vector<void*>& copies = tables_.emplace_back(static_cast<size_t>(count * entries.stride));
    for (int64_t i = 0; i < num_rows; ++i) {
      const int64_t first = entries.places[i] * entries.stride;
      for (int64_t n = first; n < first + num_pages; ++n) {
        copies[static_cast<size_t>(n)] = const_cast<std::remove_const_t<T>*>(entries.pages[n]);
      }
    }
    for (void*& page : copies) add(page, entries.offset + per_page * entry_bytes, access);
    entries.pages = reinterpret_cast<T* const*>(copies.data());
    add(entries.pages, count * entries.stride * static_cast<int64_t>(sizeof(void*)), Access::kInput);
  }
  void add(TensorView& view, Access access) { add(view.data, view.num_bytes(), access); }
  void add(ops::WeightView& weight);
  // An array of `count` weights; it lies there too.
  void add(const ops::WeightView*& weights, int64_t count);

  // Copies, calls work(queue) with the addresses replaced, checks and copies back as said above. Returns what was
  // wrong, a sentence each. Throws what `work` does, and kDeviceError where the device fails.
  template <class Work>
  std::vector<std::string> run(Work&& work) {
    return run_staged(
        [](void* object, device::Queue& queue) { (*static_cast<std::remove_reference_t<Work>*>(object))(queue); },
        &work);
  }

 private:
  struct Array {
    const void* host;
    int64_t bytes;
    Access access;
    size_t offset;              // in the image
    std::vector<void**> users;  // pointer variables that hold the address
  };
  void add_array(void** user, int64_t bytes, Access access);
  std::vector<std::string> run_staged(void (*work)(void* object, device::Queue& queue), void* object);

  StageMemory& memory_;
  const ops::PackedLayout* layout_;
  std::vector<Array> arrays_;
  std::deque<std::vector<ops::WeightView>> weights_;
  std::deque<std::vector<void*>> tables_;
};

}  // namespace tessera::verify
