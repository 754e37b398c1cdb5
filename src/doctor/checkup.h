// SPDX-License-Identifier: Apache-2.0
#pragma once
// All that `tessera check` does, and its result as JSON.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "doctor/deep_check.h"

namespace tessera::doctor {

struct CheckupOptions {
  bool writes_hashes = false;         // write hashes.json, but not over one that says otherwise
  bool replaces_hashes = false;       // with writes_hashes: whatever it says
  std::optional<DeepOptions> deep{};  // nothing: structure, scales and hashes only
};

struct Checkup {
  std::vector<Finding> findings;  // all of them, the deep examination's too
  std::optional<DeepReport> deep{};
  size_t num_hashed = 0;  // tensors that were compared with hashes.json
};

// Structure, scales, hashes, and the deep examination where it is asked for. `backends` and `machine` are looked at for
// that one only. Throws as check_structure and check_deep do. `progress` may be null.
Checkup check_up(const std::string& directory, const CheckupOptions& options,
                 std::span<const ops::Backend* const> backends, const device::Machine& machine, ProgressSink* progress);

// One object: is_sound, findings, tensors_hashed, and what the deep examination says; docs/doctor.md.
std::string to_json(const Checkup& checkup);

}  // namespace tessera::doctor
