// SPDX-License-Identifier: Apache-2.0
#pragma once
// Collectives: what the ranks that share a model do together (docs/decisions/0031-several-gpus.md).
//
// Every rank calls the same collectives in the same order with the same shapes. A call is ordered with the work of its
// queue: on a GPU it is queued and returns, on a CPU it is done when it returns. Arrays lie in the memory where the
// queue's ops compute, dense and row-major. A communicator is called by one thread at a time.
//
// Sums are those of rank 0, 1, 2, ... in this order in FP32, rounded once: the same bits on every rank, in every run,
// and whatever the number of elements around one.
//
// Errors: kInvalidArgument for shapes and types that don't fit a collective; kDeviceError where a rank is lost, does
// not come within the time limit or calls something else, naming it. After one the communicator is of no more use.
#include <cstdint>
#include <span>
#include <string>

#include "device/executor.h"
#include "device/peer_view.h"
#include "device/queue.h"
#include "tensor/tensor_view.h"

namespace tessera::comm {

// Consecutive runs of `bytes`, one for each rank in ascending order, without gaps.
struct Runs {
  void* data = nullptr;
  std::span<const int64_t> bytes;  // [world], on the host
};

class Communicator {
 public:
  Communicator(int rank, int world);
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int world() const { return world_; }

  // out = sum over ranks of in. in: F32 or BF16, out: the same shape, F32 or BF16; may be in where the types agree, and
  // must not overlap it otherwise.
  void all_reduce(const TensorView& in, const TensorView& out, device::Queue& queue);
  // out [world, ...] = in [...] of every rank. Any type of whole bytes. Disjoint.
  void all_gather(const TensorView& in, const TensorView& out, device::Queue& queue);
  // Of several arrays, in one call where there is such: less time than one after the other. Every rank names the same.
  struct Gathered {
    TensorView in, out;
  };
  void all_gather(std::span<const Gathered> arrays, device::Queue& queue);
  // out [...] = sum over ranks of in [world, ...] at this rank's place. Types as all_reduce; disjoint.
  void reduce_scatter(const TensorView& in, const TensorView& out, device::Queue& queue);
  // Run r of `send` goes to rank r; run r of `receive` comes from rank r. What rank a sends to b and b receives from a
  // have one size, which both know: dispatch and combine of experts. Disjoint.
  void all_to_all(const Runs& send, const Runs& receive, device::Queue& queue);
  // data of rank `root` to all. Any type of whole bytes.
  void broadcast(const TensorView& data, int root, device::Queue& queue);
  // What every rank queued before it is done before what any rank queues behind it begins.
  void barrier(device::Queue& queue);

  // Memory through which kernels can themselves exchange `count` summands of type `in` (BF16 or F32) with all ranks,
  // whose sums they round to BF16, in one queue with the sums above and on every rank in the same order; null where
  // they can't, or where all_reduce and the `num_launches` more that go with it are expected to be faster. As long as
  // the communicator. Nothing watches such a kernel but the step around it: begin_step() and end_step().
  virtual const device::PeerView* peer_view(DType /*in*/, int64_t /*count*/, int /*num_launches*/) const {
    return nullptr;
  }

  // Begins to make the connections that the first collectives would otherwise wait for, on a thread of its own, which
  // has the executor until the next collective or step waits for it: for while a model is loaded. All ranks call it.
  virtual void begin_to_connect(device::Executor& /*executor*/) {}

  // Ends the group: ranks that wait, and all later calls on any rank, throw with `why`. From any thread.
  virtual void abort(const std::string& why) noexcept = 0;
  // Throws kDeviceError where the group has ended; for GPUs, whose queues don't tell. From any thread.
  virtual void check() = 0;

  // Around a step and the wait for it, whose collectives may be replayed from a recording, without calls. Both throw as
  // check(); what is begun and does not end within the time limit ends the group, but where nothing `is_limited`: a
  // step of which somebody looks at every output takes as long as that takes.
  virtual void begin_step(bool /*is_limited*/) { check(); }
  virtual void end_step() { check(); }

 protected:
  // Arguments are valid, and no call is empty but for runs.
  virtual void do_all_reduce(const TensorView& in, const TensorView& out, device::Queue& queue) = 0;
  virtual void do_all_gather(const TensorView& in, const TensorView& out, device::Queue& queue) = 0;
  virtual void do_gather_together(std::span<const Gathered> arrays, device::Queue& queue) {
    for (const Gathered& array : arrays) do_all_gather(array.in, array.out, queue);
  }
  virtual void do_reduce_scatter(const TensorView& in, const TensorView& out, device::Queue& queue) = 0;
  virtual void do_all_to_all(const Runs& send, const Runs& receive, device::Queue& queue) = 0;
  virtual void do_broadcast(const TensorView& data, int root, device::Queue& queue) = 0;
  virtual void do_barrier(device::Queue& queue) = 0;

 private:
  bool is_to_gather(const TensorView& in, const TensorView& out) const;
  void check_runs(const Runs& runs, const char* name) const;
  const int rank_, world_;
};

// Most ranks of a group.
constexpr int kMaxWorld = 1024;

}  // namespace tessera::comm
