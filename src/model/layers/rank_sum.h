// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where partial sums of ranks meet. One rank has none of it: nothing is bound, queued or rounded.
#include "comm/communicator.h"
#include "model/layers/layer_builder.h"
#include "model/layers/step_context.h"

namespace tessera::model {

class RankSum {
 public:
  RankSum() = default;
  // `is_cut`: whether ranks hold parts of what is summed.
  RankSum(const LayerBuilder& builder, bool is_cut) : comm_(is_cut ? builder.comm : nullptr) {}

  bool is_needed() const { return comm_ != nullptr; }
  // For kernels that make sums themselves (Communicator::peer_view); null where they can't or are not to.
  const device::PeerView* peers(DType in, int64_t count, int num_launches) const {
    return comm_->peer_view(in, count, num_launches);
  }
  // out = sum over ranks of in, in ascending order, rounded once (Communicator::all_reduce). In place where the types
  // agree.
  void run(const StepContext& context, const TensorView& in, const TensorView& out) const {
    comm_->all_reduce(in, out, context.queue);
  }

 private:
  comm::Communicator* comm_ = nullptr;
};

}  // namespace tessera::model
