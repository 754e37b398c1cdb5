// SPDX-License-Identifier: Apache-2.0
#pragma once
// What every report of measurements begins with, so that a figure can be had again (bench/results/schema.json).
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace tessera::app {

// Today, UTC, as in 2026-11-25.
std::string today();

// Which program ran, down to its bits, by which command line, when, and on which processor; of measurements on a GPU
// of this machine (`device_flag` is --device's value) its driver too. `what`: the verb. Reports add device and rows.
nlohmann::ordered_json record_head(std::string_view what, std::string_view device_flag);

}  // namespace tessera::app
