// SPDX-License-Identifier: Apache-2.0
#include "bench/targets/targets.h"

#include <fmt/format.h>

#include "base/error.h"
#include "base/strings.h"
#include "bench/targets/target_rows.h"
#include "device/device_choice.h"

namespace tessera::bench {

double TargetRow::reached() const {
  if (target.us > 0) return target.us / us();
  if (target.share_of_read > 0) return share_of_read() / target.share_of_read;
  return target.tflops > 0 ? tflops() / target.tflops : 0;
}

std::string to_string(const Target& target) {
  if (target.us > 0) return fmt::format("<= {:.1f} us", target.us);
  if (target.share_of_read > 0) return fmt::format(">= {:.0f} % of read", 100 * target.share_of_read);
  return target.tflops > 0 ? fmt::format(">= {:.0f} TFLOP/s", target.tflops) : "";
}

TargetReport run_targets(const TargetOptions& options, const std::function<void(const TargetRow&)>& on_row) {
  const device::Machine machine = device::machine_of(options.device);
  TargetReport report;
  report.is_on_gpu = machine.gpu.has_value();
  report.device = report.is_on_gpu ? printable(machine.gpu->name) : "cpu";
  const double begin = seconds_now();
  const TakeTargetRow take = [&](TargetRow row) {
    report.rows.push_back(std::move(row));
    if (on_row) on_row(report.rows.back());
  };
  add_op_targets(options, report.ceilings, take);
  add_layer_targets(options, take);
  report.seconds = seconds_now() - begin;
  if (report.rows.empty()) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("--only: no row's name contains \"{}\"", printable(options.only, 60)));
  }
  return report;
}

}  // namespace tessera::bench
