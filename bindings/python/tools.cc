// SPDX-License-Identifier: Apache-2.0
// check and convert, on folders; tensors' names.
#include <nanobind/stl/string.h>

#include <atomic>
#include <optional>

#include "backends/registry.h"
#include "base/error.h"
#include "bindings/python/errors.h"
#include "bindings/python/module.h"
#include "convert/convert.h"
#include "convert/report.h"
#include "device/device_choice.h"
#include "doctor/checkup.h"
#include "model/weight_names.h"

namespace tessera::python {

namespace {

std::string check_folder(const std::string& directory, bool is_deep, const std::string& device, int num_threads) {
  const nb::gil_scoped_release release;
  doctor::CheckupOptions options;
  device::Machine machine;
  if (is_deep) {
    machine = device::machine_of(device);
    options.deep.emplace().num_threads = num_threads;
  }
  SignalCheck signals;
  return doctor::to_json(doctor::check_up(directory, options, backends::all_backends(), machine, &signals));
}

// Ctrl-C stops a conversion as its owner allows: it can be resumed then.
class StopAtSignal final : public ProgressSink {
 public:
  void begin(std::string_view phase, uint64_t total, std::string_view unit) override {
    look([&] { signals_.begin(phase, total, unit); });
  }
  void advance(uint64_t amount) override {
    look([&] { signals_.advance(amount); });
  }
  void end() override {}
  const std::atomic<bool>& is_stopped() const { return is_stopped_; }
  void rethrow() {
    if (raised_) throw nb::python_error(std::move(*raised_));
  }

 private:
  template <class Look>
  void look(Look&& ask) {
    try {
      ask();
    } catch (nb::python_error& error) {
      const nb::gil_scoped_acquire hold;
      raised_.emplace(std::move(error));
      is_stopped_ = true;
    }
  }

  SignalCheck signals_;
  std::optional<nb::python_error> raised_;
  std::atomic<bool> is_stopped_{false};
};

std::string convert_folder(const std::string& in, const std::string& out, const std::string& families,
                           const std::string& method, uint64_t max_shard_bytes, bool allow_inexact, bool resumes,
                           bool forces, bool is_trial, int num_threads) {
  convert::Options options;
  options.families = convert::parse_families(families);
  if (method != "amax" && method != "four-over-six") {
    fail(ErrorCode::kInvalidArgument, "method: expected \"amax\" or \"four-over-six\", found \"" + method + "\"");
  }
  if (resumes && forces) fail(ErrorCode::kInvalidArgument, "resume and force: expected one of them at most");
  options.rule = method == "amax" ? numeric::Nvfp4WeightRule::kAmax : numeric::Nvfp4WeightRule::kFourOverSix;
  options.max_shard_bytes = max_shard_bytes;
  options.allow_inexact = allow_inexact;
  options.existing = resumes  ? convert::Existing::kResume
                     : forces ? convert::Existing::kReplace
                              : convert::Existing::kRefuse;
  options.is_trial = is_trial;
  options.num_threads = num_threads;
  options.version = tessera_version();
  const nb::gil_scoped_release release;
  StopAtSignal signals;
  try {
    return convert::report_json(convert::convert(in, out, options, nullptr, &signals, &signals.is_stopped()).families);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kCancelled) signals.rethrow();
    throw;
  }
}

}  // namespace

void add_tools(nb::module_& m) {
  using nb::arg;
  m.def("check", &check_folder, arg("directory"), arg("deep"), arg("device"), arg("threads"));
  m.def("convert", &convert_folder, arg("source"), arg("target"), arg("families"), arg("method"),
        arg("max_shard_bytes"), arg("allow_inexact"), arg("resume"), arg("force"), arg("trial"), arg("threads"));
  m.def(
      "hf_name", [](const std::string& official) { return model::hf_name(official); }, arg("official"));
}

}  // namespace tessera::python
