// SPDX-License-Identifier: Apache-2.0
#include "verify/stage.h"

#include <fmt/format.h>

#include <cstring>
#include <memory>

#include "base/integer_math.h"

namespace tessera::verify {

namespace {

constexpr size_t kGuardBytes = 256;
constexpr unsigned char kGuard = 0xA5, kPoison = 0xFF;

}  // namespace

unsigned char* StageMemory::reserve(size_t bytes) {
  if (bytes > image_.size()) {
    image_ = device::Buffer();
    image_ = device::Buffer(bytes + bytes / 2, executor_.memory());
  }
  return image_.as<unsigned char>();
}

void Stage::add(ops::WeightView& weight) {
  const int64_t scale_bytes = layout_ == nullptr ? weight.scale_bytes() : layout_->scale_bytes(weight);
  add(weight.data, layout_ == nullptr ? weight.data_bytes() : layout_->data_bytes(weight), Access::kInput);
  add(weight.block_scales, scale_bytes, Access::kInput);
}

void Stage::add(const ops::WeightView*& weights, int64_t count) {
  std::vector<ops::WeightView>& copies = weights_.emplace_back(weights, weights + count);
  for (ops::WeightView& weight : copies) add(weight);
  weights = copies.data();
  add(weights, count * static_cast<int64_t>(sizeof(ops::WeightView)), Access::kInput);
}

void Stage::add_array(void** user, int64_t bytes, Access access) {
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

std::vector<std::string> Stage::run_staged(void (*work)(void* object, device::Queue& queue), void* object) {
  // The image: guard, array, guard, array, ..., guard. Arrays start as aligned as allocations of CUDA are.
  size_t size = kGuardBytes;
  for (Array& array : arrays_) {
    array.offset = size;
    size += round_up(static_cast<size_t>(array.bytes), size_t{256}) + kGuardBytes;
  }
  device::Executor& executor = memory_.executor();
  unsigned char* const base = memory_.reserve(size);
  for (const Array& array : arrays_) {
    for (void** user : array.users) *user = base + array.offset;
  }
  // Addresses are replaced by now also where an array holds addresses.
  std::vector<unsigned char> before(size, kGuard), eager(size), replayed;
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
    executor.memory().upload(base, before.data(), size);
    queue_work();
    executor.memory().download(after.data(), base, size);
    executor.synchronize();
  };
  run_once(eager, [&] { work(object, executor.queue()); });
  if (executor.can_record()) {
    replayed.resize(size);
    const std::unique_ptr<device::Recording> recording = executor.record([&] { work(object, executor.queue()); });
    run_once(replayed, [&] { recording->launch(); });
  }

  std::vector<std::string> faults;
  size_t at = 0;  // what lies before is checked
  const auto expect_untouched = [&](size_t end, const char* what) {
    for (const auto* after : {&eager, &replayed}) {
      if (after->empty() || std::memcmp(after->data() + at, before.data() + at, end - at) == 0) continue;
      faults.push_back(fmt::format("wrote {} ({})", what, after == &eager ? "eager" : "recorded"));
    }
    at = end;
  };
  for (const Array& array : arrays_) {
    const size_t bytes = static_cast<size_t>(array.bytes);
    expect_untouched(array.offset, "outside its arrays");
    if (array.access == Access::kInput) expect_untouched(array.offset + bytes, "into an input");
    at = array.offset + bytes;
    if (array.access != Access::kOutput || bytes == 0) continue;
    if (!replayed.empty() && std::memcmp(eager.data() + array.offset, replayed.data() + array.offset, bytes) != 0) {
      faults.push_back("recorded, it gave other bits than eagerly");
    }
    std::memcpy(const_cast<void*>(array.host), eager.data() + array.offset, bytes);
  }
  expect_untouched(size, "outside its arrays");
  return faults;
}

}  // namespace tessera::verify
