// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs every variant that a machine can use against the scalar reference, on fresh random data: what a user asks for
// when a machine's answers look wrong, and sends us.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/log.h"
#include "device/machine.h"
#include "ops/backend.h"

namespace tessera::verify {

struct Options {
  uint64_t seed = 0;
  bool is_quick = false;  // small shapes only
  std::string op = {};    // empty: all of them
  int num_threads = 0;    // Queue's meaning
};

// A call whose result was wrong.
struct Failure {
  std::string shape;    // "Flash wq_a [4096 -> 1024] nvfp4 a16, 17 tokens, mixed"
  std::string what;     // "y: relative error 0.1 > 0.004; worst at 5: 1, expected 2"
  uint64_t stream = 0;  // which numbers of the seed it was made of
};

// What became of one call.
struct Call {
  std::string shape;  // as a failure's
  // Of all outputs: values, and those whose bits are not the reference's (sums in another order may differ).
  int64_t num_values = 0, num_different = 0;
  bool is_sound = false;
};

// One variant of one op.
struct Row {
  std::string op, variant;  // "linear", "cuda.mma"
  int num_cases = 0;
  // Of the output that came closest to its bound or passed it: relative error and bound; bound 0: bits are demanded.
  double error = 0, bound = 0;
  std::string worst_shape;
  double seconds = 0;  // of its calls on the host's clock, copies to and from the device and the recorded runs included
  std::vector<Call> calls;
  int num_failed = 0;
  std::vector<Failure> failures;  // the first few of them
  bool is_reference = false;      // nothing else computes this op there: run staged against itself
};

struct Report {
  uint64_t seed = 0;
  bool has_recorded = false;  // calls ran as recordings too
  double seconds = 0;
  std::vector<Row> rows;
  std::vector<std::string> unavailable;  // backends that this machine can't run, and why
  std::string stopped;                   // why it ended early: a device was lost; empty: it did not
  int num_cases() const;
  bool is_sound() const;
};

// Tries the variants of `backends` that `machine` can use; a backend named "ref" holds the references. A shape that
// only the reference supports is run by it, in the same way. Maps and experts of more than 17 tokens are also run with
// the first few of them alone, which must have the same bits. Throws kDeviceError where the device can't be used at
// all, kInvalidArgument where no op has that name.
Report verify(std::span<const ops::Backend* const> backends, const device::Machine& machine, const Options& options,
              ProgressSink* progress);

}  // namespace tessera::verify
