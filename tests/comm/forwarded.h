// SPDX-License-Identifier: Apache-2.0
#pragma once
// A communicator that hands its calls on, for tests that look at them or change what comes.
#include <span>
#include <string>

#include "comm/communicator.h"

namespace tessera::testing {

class Forwarded : public comm::Communicator {
 public:
  explicit Forwarded(comm::Communicator& other) : Communicator(other.rank(), other.world()), other_(other) {}
  void abort(const std::string& why) noexcept override { other_.abort(why); }
  void check() override { other_.check(); }

 protected:
  void do_all_reduce(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    other_.all_reduce(in, out, queue);
  }
  void do_all_gather(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    other_.all_gather(in, out, queue);
  }
  void do_gather_together(std::span<const Gathered> arrays, device::Queue& queue) override {
    other_.all_gather(arrays, queue);
  }
  void do_reduce_scatter(const TensorView& in, const TensorView& out, device::Queue& queue) override {
    other_.reduce_scatter(in, out, queue);
  }
  void do_all_to_all(const comm::Runs& send, const comm::Runs& receive, device::Queue& queue) override {
    other_.all_to_all(send, receive, queue);
  }
  void do_broadcast(const TensorView& data, int root, device::Queue& queue) override {
    other_.broadcast(data, root, queue);
  }
  void do_barrier(device::Queue& queue) override { other_.barrier(queue); }

 private:
  comm::Communicator& other_;
};

}  // namespace tessera::testing
