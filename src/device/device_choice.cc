// SPDX-License-Identifier: Apache-2.0
#include "device/device_choice.h"

#include <fmt/format.h>

#include <charconv>

#include "base/error.h"
#include "base/strings.h"
#include "device/gpu_executor.h"

namespace tessera::device {

Machine machine_of(const std::string& device) {
  Machine machine = probe_machine();
  if (device == "cpu") return machine;
  int ordinal = 0;
  bool is_gpu = device == "cuda";
  if (device.starts_with("cuda:")) {
    const char *begin = device.data() + 5, *end = device.data() + device.size();
    const auto [stop, error] = std::from_chars(begin, end, ordinal);
    is_gpu = error == std::errc() && stop == end && ordinal >= 0;
  }
  if (!is_gpu) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("device: expected cpu, cuda or cuda:N, found \"{}\"", printable(device, 40)));
  }
  std::string why_not;
  machine.gpu = find_gpu(ordinal, why_not);
  if (!machine.gpu.has_value()) {
    fail(
        ErrorCode::kDeviceError,
        fmt::format("{} can't be used: {}; tessera devices says more, and --device cpu always works", device, why_not));
  }
  return machine;
}

}  // namespace tessera::device
