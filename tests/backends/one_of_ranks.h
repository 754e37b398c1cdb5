// SPDX-License-Identifier: Apache-2.0
#pragma once
// One rank of several for kernels that exchange words with other ranks' (device/peer_view.h): the memory of all lies on
// one GPU, this rank's kernels run, and what the others would send is put there before.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "base/error.h"
#include "device/buffer.h"
#include "device/device_choice.h"
#include "device/executor.h"
#include "device/peer_view.h"
#include "numeric/bf16.h"
#include "testing/op_harness.h"

namespace tessera::testing {

using Bytes = std::vector<uint8_t>;

class PeerSlots {
 public:
  PeerSlots(device::Executor& executor, int world, int64_t capacity)
      : memory_(executor.memory()),
        ended_(sizeof(uint32_t), executor.staging()),
        empty_(static_cast<size_t>(2 * world * capacity) * sizeof(uint64_t), 0xFF) {
    *ended_.as<uint32_t>() = 0;
    const std::vector<uint32_t> none(device::kPeerCounters);
    for (int r = 0; r < world; ++r) {
      slots_.emplace_back(empty_.size(), memory_);
      memory_.upload(slots_.back().data(), empty_.data(), empty_.size());
      calls_.emplace_back(device::kPeerCounters * sizeof(uint32_t), memory_);
      memory_.upload(calls_.back().data(), none.data(), calls_.back().size());
    }
    for (int r = 0; r < world; ++r) {
      device::PeerView& view = views_.emplace_back();
      view.rank = r, view.world = world, view.capacity = capacity;
      for (size_t p = 0; p < slots_.size(); ++p) view.slots[p] = slots_[p].as<uint64_t>();
      view.calls = calls_[static_cast<size_t>(r)].as<uint32_t>(), view.ended = ended_.as<uint32_t>();
    }
  }
  const device::PeerView& view(int rank) const { return views_[static_cast<size_t>(rank)]; }

  // What `sender` sends to `receiver` in a call.
  void send(int receiver, int sender, size_t call, const Bytes& words) {
    memory_.upload(place(receiver, sender, call), words.data(), words.size());
  }
  Bytes sent(int receiver, int sender, size_t call, size_t num_bytes) const {
    Bytes bytes(num_bytes);
    memory_.download(bytes.data(), place(receiver, sender, call), num_bytes);
    return bytes;
  }
  // As the receiver would.
  void free(int receiver, int sender, size_t call, size_t num_bytes) {
    send(receiver, sender, call, Bytes(empty_.begin(), empty_.begin() + static_cast<int64_t>(num_bytes)));
  }
  // Calls of a rank that have ended, then blocks that have ended the next.
  std::vector<uint32_t> calls(int rank) const {
    std::vector<uint32_t> calls(device::kPeerCounters);
    memory_.download(calls.data(), view(rank).calls, calls.size() * sizeof(uint32_t));
    return calls;
  }
  bool is_free(int rank) const {
    Bytes bytes(empty_.size());
    memory_.download(bytes.data(), view(rank).slots[rank], bytes.size());
    return bytes == empty_;
  }

 private:
  uint64_t* place(int receiver, int sender, size_t call) const {
    const device::PeerView& to = view(receiver);
    return to.slots[receiver] + (static_cast<int64_t>(call % 2) * to.world + sender) * to.capacity;
  }

  device::MemorySpace& memory_;
  device::Buffer ended_;
  Bytes empty_;
  std::vector<device::Buffer> slots_, calls_;
  std::vector<device::PeerView> views_;
};

// Of the program's GPU; skipped without one.
class OneOfRanks : public RandomTest {
 protected:
  void SetUp() override {
    try {
      executor_ = device::make_executor(device::machine_of("cuda"), 1);
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
  }
  // value() gives the values, in turn.
  template <class Value>
  static device::Tensor filled(DType dtype, const Shape& shape, const Value& value) {
    device::Tensor tensor(dtype, shape);
    for (int64_t i = 0; i < shape.num_elements(); ++i) {
      if (dtype == DType::kF32) {
        tensor.as<float>()[i] = value();
      } else {
        tensor.as<uint16_t>()[i] = numeric::bf16_from_float(value());
      }
    }
    return tensor;
  }
  device::Tensor random(DType dtype, const Shape& shape) {
    return filled(dtype, shape, [&] { return static_cast<float>(rng_.normal()); });
  }
  device::Tensor placed(const device::Tensor& host) { return host.clone_into(executor_->memory()); }
  // NaN all over.
  device::Tensor poisoned(DType dtype, const Shape& shape) {
    device::Tensor tensor(dtype, shape, executor_->memory());
    const Bytes nans(static_cast<size_t>(tensor.view().num_bytes()), 0xFF);
    executor_->memory().upload(tensor.view().data, nans.data(), nans.size());
    return tensor;
  }
  static Bytes bytes_of(const TensorView& view) {
    Bytes bytes(static_cast<size_t>(view.num_bytes()));
    std::memcpy(bytes.data(), view.data, bytes.size());
    return bytes;
  }
  Bytes download(const device::Tensor& tensor) {
    Bytes bytes(static_cast<size_t>(tensor.view().num_bytes()));
    executor_->memory().download(bytes.data(), tensor.view().data, bytes.size());
    return bytes;
  }
  // The GPU's first variant that computes it; null: none does.
  static const ops::Variant<ops::MhcPostPre>* variant_of(const ops::MhcPostPre::Desc& desc) {
    for (const ops::Backend* backend : backends::all_backends()) {
      for (const ops::Variant<ops::MhcPostPre>& variant : backend->variants_of<ops::MhcPostPre>()) {
        std::string why_not;
        if (backend->is_on_gpu && variant.supports(desc, why_not)) return &variant;
      }
    }
    return nullptr;
  }

  std::unique_ptr<device::Executor> executor_;
  device::Queue host_{2};
};

}  // namespace tessera::testing
