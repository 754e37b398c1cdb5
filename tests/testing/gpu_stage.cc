// SPDX-License-Identifier: Apache-2.0
#include "testing/gpu_stage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "device/cuda/graph.h"
#include "device/cuda/memory.h"
#include "device/gpu_executor.h"

namespace tessera::testing {

namespace {

constexpr size_t kGuardBytes = 256;
constexpr unsigned char kGuard = 0xA5, kPoison = 0xFF;

// Kept between calls, so that they don't allocate.
struct Gpu {
  device::cuda::StreamQueue queue;
  device::cuda::Memory image;

  void reserve(size_t bytes) {
    if (bytes <= image.size()) return;
    image = device::cuda::Memory();
    image = device::cuda::Memory(device::cuda::Memory::Kind::kDevice, bytes * 2);
  }
};

Gpu& gpu() {
  static Gpu one;
  return one;
}

}  // namespace

std::optional<device::GpuDevice> find_test_gpu(std::string& why_not) {
  static std::string reason;
  static const std::optional<device::GpuDevice> found = device::find_gpu(0, reason);
  why_not = reason;
  return found;
}

void GpuStage::add(ops::WeightView& weight) {
  add(weight.data, weight.data_bytes(), Access::kInput);
  add(weight.block_scales, weight.scale_bytes(), Access::kInput);
}

void GpuStage::add(const ops::WeightView*& weights, int64_t count) {
  std::vector<ops::WeightView>& copies = weights_.emplace_back(weights, weights + count);
  for (ops::WeightView& weight : copies) add(weight);
  weights = copies.data();
  add(weights, count * static_cast<int64_t>(sizeof(ops::WeightView)), Access::kInput);
}

void GpuStage::add_array(void** user, int64_t bytes, Access access) {
  if (*user == nullptr) return;
  for (Array& array : arrays_) {
    if (array.host != *user) continue;
    array.bytes = std::max(array.bytes, bytes);
    array.access = std::max(array.access, access);  // read and written: an output
    array.users.push_back(user);
    return;
  }
  arrays_.push_back({*user, bytes, access, 0, {user}});
}

void GpuStage::run_staged(void (*work)(void* object, device::Queue& queue), void* object) {
  // The image: guard, array, guard, array, ..., guard. Arrays start as aligned as allocations of CUDA are.
  size_t size = kGuardBytes;
  for (Array& array : arrays_) {
    array.offset = size;
    size += round_up(static_cast<size_t>(array.bytes), size_t{256}) + kGuardBytes;
  }
  Gpu& on = gpu();
  on.reserve(size);
  unsigned char* base = on.image.as<unsigned char>();
  for (const Array& array : arrays_) {
    for (void** user : array.users) *user = base + array.offset;
  }
  // Addresses are replaced by now also where an array holds addresses.
  std::vector<unsigned char> before(size, kGuard), eager(size), replayed(size);
  for (const Array& array : arrays_) {
    const size_t bytes = static_cast<size_t>(array.bytes);
    if (bytes == 0) continue;
    if (array.access == Access::kScratch) {
      std::memset(before.data() + array.offset, kPoison, bytes);
    } else {
      std::memcpy(before.data() + array.offset, array.host, bytes);
    }
  }
  const auto run_once = [&](std::vector<unsigned char>& after, const auto& queue_work) {
    device::cuda::copy(on.queue, base, before.data(), size);
    queue_work();
    device::cuda::copy(on.queue, after.data(), base, size);
    on.queue.synchronize();
  };
  run_once(eager, [&] { work(object, on.queue); });
  const device::cuda::Graph graph(on.queue, [&] { work(object, on.queue); });
  run_once(replayed, [&] { graph.launch(on.queue); });

  size_t at = 0;  // what lies before is checked
  const auto expect_untouched = [&](size_t end, const char* what) {
    EXPECT_EQ(std::memcmp(eager.data() + at, before.data() + at, end - at), 0) << what << " written at " << at;
    at = end;
  };
  for (const Array& array : arrays_) {
    const size_t bytes = static_cast<size_t>(array.bytes);
    expect_untouched(array.offset, "outside arrays");
    if (array.access == Access::kInput) expect_untouched(array.offset + bytes, "an input");
    at = array.offset + bytes;
    if (array.access != Access::kOutput || bytes == 0) continue;
    EXPECT_EQ(std::memcmp(eager.data() + array.offset, replayed.data() + array.offset, bytes), 0)
        << "a graph's result differs";
    std::memcpy(const_cast<void*>(array.host), eager.data() + array.offset, bytes);
  }
  expect_untouched(size, "outside arrays");
}

}  // namespace tessera::testing
