// SPDX-License-Identifier: Apache-2.0
#pragma once
// --trace-op: one line per op's output on stderr, and the first output that is not finite.
#include <optional>
#include <string>

#include "model/trace.h"

namespace tessera::app {

class TracePrinter final : public model::Tracer {
 public:
  // prints false: only looks for the first fault.
  explicit TracePrinter(bool prints) : prints_(prints) {}
  void tensor(std::string_view name, const TensorView& value) override;
  // "layers.3.attn.wq_a: NaN at element 17 of [5, 128]", of the first such output.
  const std::optional<std::string>& first_fault() const { return first_fault_; }

 private:
  bool prints_;
  std::optional<std::string> first_fault_;
};

}  // namespace tessera::app
