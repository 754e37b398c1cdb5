// SPDX-License-Identifier: Apache-2.0
#pragma once
// A runner of several ranks (docs/decisions/0031-several-gpus.md): rank 0 has a MirroredRunner, which does what it is
// asked on its own share of the model and lets every other rank do the same; those are in follow().
//
// What a rank does alone (sequences, forks, snapshots, marks) rank 0 does first, and tells the others of it where it
// went well; what all compute together (step, draft) they are told of first, but for a step that is queued behind
// another: there is time, and whether there can be one rank 0 finds out. Where it can't tell them the group has ended,
// and what is queued ends with it. Faults of a request come to every rank alike.
// A rank whose share fails where rank 0's does not ends the group, and so does any other fault of rank 0's: its
// LossSink learns that from the thread that asked for the step, which goes on to others.
#include <memory>

#include "comm/bootstrap.h"
#include "model/runner.h"

namespace tessera::model {

// Of rank 0. Both outlive it, and it outlives what it makes. restore() and restore_snapshot() throw kUnsupported: a
// saved state is of one rank's share.
class MirroredRunner final : public Runner {
 public:
  MirroredRunner(Runner& runner, comm::Bootstrap& bootstrap);
  ~MirroredRunner() override;  // the others leave follow()

  const ModelFacts& facts() const override { return runner_.facts(); }
  const CacheSpec& cache_spec() const override { return runner_.cache_spec(); }
  int64_t max_step_tokens() const override { return runner_.max_step_tokens(); }
  std::unique_ptr<SequenceState> new_sequence(int64_t capacity) override;
  std::unique_ptr<SequenceState> restore(std::span<const uint8_t> bytes) override;
  std::unique_ptr<SequenceState> resume(const StateSnapshot& snapshot, int64_t capacity) override;
  std::unique_ptr<StateSnapshot> restore_snapshot(std::span<const uint8_t> saved,
                                                  std::span<const std::span<const uint8_t>> pages) override;
  TensorView step(std::span<const SequenceSlice> slices) override;
  bool can_run_ahead() const override { return runner_.can_run_ahead(); }
  void queue_step(std::span<const SequenceSlice> slices) override;
  bool queue_next(std::span<Draw* const> draws) override;
  TensorView finish_step() override;
  TensorView draft(std::span<const SequenceSlice> slices) override;
  // Rank 0's alone: the others never learn what was drawn but by the next step.
  int32_t sample(const SampleRequest& request) override { return runner_.sample(request); }
  // On every rank: traced steps run op by op, and their sums over ranks are of other kernels.
  void set_tracer(Tracer* tracer) override;

 private:
  class Orders;
  // Tells the others what the slices are; own_ are those of runner_.
  void send_slices(uint8_t order, std::span<const SequenceSlice> slices);
  // part(), a call that all ranks make; what it throws goes to the others too.
  template <class Part>
  auto run_alike(const Part& part);
  Runner& runner_;
  std::unique_ptr<Orders> orders_;
  std::vector<SequenceSlice> own_;  // the slices with the states of runner_
  bool tells_masks_ = false;        // the others have all that the last step's draws have
};

// Of every other rank: does on `runner` what rank 0's MirroredRunner does, until that is destroyed. Throws kDeviceError
// where a rank is lost, kInternal where the ranks no longer agree, and what else `runner` threw and rank 0's did not.
void follow(Runner& runner, comm::Bootstrap& bootstrap);

}  // namespace tessera::model
