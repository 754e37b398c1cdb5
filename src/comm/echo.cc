// SPDX-License-Identifier: Apache-2.0
#include "comm/echo.h"

#include <fmt/format.h>

#include "base/error.h"
#include "comm/rank_sum.h"

namespace tessera::comm {

namespace {

class Echo final : public Communicator {
 public:
  using Communicator::Communicator;
  void abort(const std::string&) noexcept override {}
  void check() override {}

 protected:
  void do_all_reduce(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    sum_ranks(in.data, in.dtype, world(), 0, out.data, out.dtype, in.shape.num_elements(), queue);
  }
  void do_all_gather(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    for (int r = 0; r < world(); ++r) copy(in.data, at(out.data, r * in.num_bytes()), in.num_bytes(), queue);
  }
  void do_reduce_scatter(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    // Of parts that lie apart, as those that come from others do.
    const int64_t count = out.shape.num_elements();
    sum_ranks(in.data, in.dtype, world(), count, out.data, out.dtype, count, queue);
  }
  void do_all_to_all(const Runs& send, const Runs& receive, device::Queue& queue) override {
    int64_t done = 0;
    for (size_t r = 0; r < send.bytes.size(); ++r) {
      if (send.bytes[r] != receive.bytes[r]) {
        fail(ErrorCode::kUnsupported, fmt::format("all_to_all of a rank by itself: rank {}: expected {} bytes back, as "
                                                  "it is sent, found {}",
                                                  r, send.bytes[r], receive.bytes[r]));
      }
      copy(at(send.data, done), at(receive.data, done), send.bytes[r], queue);
      done += send.bytes[r];
    }
  }
  void do_broadcast(const TensorView&, int, device::Queue&) override {}
  void do_barrier(device::Queue&) override {}

 private:
  static void* at(void* data, int64_t bytes) { return static_cast<char*>(data) + bytes; }

  // As the sum of one rank, which is a kernel on a GPU; in BF16 a signalling NaN becomes a quiet one.
  static void copy(void* from, void* to, int64_t bytes, device::Queue& queue) {
    const DType dtype = bytes % 4 == 0 ? DType::kF32 : DType::kBF16;
    const int64_t width = dtype == DType::kF32 ? 4 : 2;
    if (bytes % width != 0) fail(ErrorCode::kUnsupported, "a rank by itself: expected an even number of bytes");
    if (bytes > 0) sum_ranks(from, dtype, 1, 0, to, dtype, bytes / width, queue);
  }
};

}  // namespace

std::unique_ptr<Communicator> make_echo(int rank, int world) {
  return std::make_unique<Echo>(rank, world);
}

}  // namespace tessera::comm
