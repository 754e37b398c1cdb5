// SPDX-License-Identifier: Apache-2.0
#pragma once
// Small models with weights computed from their tensors' names, whose outputs are published: T0 (unit-test size) and T1
// (the real model's head, window and index sizes).
// value = f(hash of official name and element index), exactly representable in BF16;
// docs/contracts/generated_models.md.
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::testing {

enum class Generated { kT0, kT1 };

// config.json of the model.
std::string generated_config(Generated which);
// config.json of one with as few and as narrow layers as have every kind of cache, for the emulated GPU, which takes
// 0.6 s for a token of the bundled model under AddressSanitizer. Its cache is exact: others want larger heads.
std::string smallest_config();
// Writes config.json and model.safetensors (F32, official names, draft block included) into `folder`.
void write_generated_model(Generated which, const std::string& folder);
// The same of another shape, by its config.json, for tests that want one.
void write_generated_model(const std::string& config, const std::string& folder);
// ids[t] = (3 t^2 + 7 t + 5) mod vocab.
std::vector<int32_t> generated_ids(Generated which, int64_t count);

}  // namespace tessera::testing
