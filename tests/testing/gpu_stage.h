// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs a GPU's variant on arrays in host memory, as tests have them: copies them to the GPU, runs, compares and copies
// back. Beside what the test itself asks, every call checks that nothing was written outside the arrays or into inputs,
// and that the same work recorded as a graph gives the same bits. Without CUDA in the build there is no GPU.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "base/integer_math.h"
#include "device/gpu_facts.h"
#include "device/queue.h"
#include "ops/backend.h"

namespace tessera::testing {

// The GPU that tests use; none: `why_not` says why.
std::optional<device::GpuDevice> find_test_gpu(std::string& why_not);

enum class Access {
  kInput,
  kOutput,   // holds the test's poison, or what the op updates, before
  kScratch,  // holds anything before and after
};

// The arrays of one call. add() only remembers; run() replaces the addresses.
class GpuStage {
 public:
  // `address` (a pointer variable) is of an array of `bytes`; null stays null. Two arrays that begin at one address are
  // one array.
  template <class T>
  void add(T*& address, int64_t bytes, Access access) {
    add_array(reinterpret_cast<void**>(const_cast<std::remove_const_t<T>**>(&address)), bytes, access);
  }
  // Caches of `bytes` each; with a table, of the places that `num_rows` rows name. The table lies on the GPU too.
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
  void add(TensorView& view, Access access) { add(view.data, view.num_bytes(), access); }
  void add(ops::WeightView& weight);
  // An array of `count` weights; it lies on the GPU too.
  void add(const ops::WeightView*& weights, int64_t count);

  // Copies, calls work(queue) with the addresses replaced, and checks and copies back as said above. Failures are
  // reported to GoogleTest.
  template <class Work>
  void run(Work&& work) {
    run_staged(
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
  void run_staged(void (*work)(void* object, device::Queue& queue), void* object);

  std::vector<Array> arrays_;
  std::deque<std::vector<ops::WeightView>> weights_;
  std::deque<std::vector<void*>> tables_;
};

}  // namespace tessera::testing
