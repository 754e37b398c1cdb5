// SPDX-License-Identifier: Apache-2.0
#pragma once
// Writes a small model's tensors as published checkpoints have them, with random variations wherever the layout leaves
// a choice, and says which values a reader must find.
#include <map>
#include <string>
#include <vector>

#include "model/config.h"
#include "testing/stored_tensors.h"

namespace tessera::testing {

enum class Layout {
  kOfficial,           // FP8 with E8M0 scales, experts MXFP4
  kBase,               // FP8 with F32 scales, experts too
  kModelOptMixed,      // experts NVFP4 with shared globals, draft experts MXFP4, the rest FP8
  kModelOptUnequal,    // experts and dense maps NVFP4, each with its own global
  kAllNvfp4,           // every linear map, head, compressor and indexer too
  kCompressedTensors,  // experts packed with reciprocals, dense FP8 with BF16 .weight_scale, draft plain
  kFp8Inverse,         // FP8 with .weight_scale_inv
  kAnything,           // any format for any map; experts of a layer differ, so that no model runs on it
};
constexpr Layout kAllLayouts[] = {Layout::kOfficial,        Layout::kBase,     Layout::kModelOptMixed,
                                  Layout::kModelOptUnequal, Layout::kAllNvfp4, Layout::kCompressedTensors,
                                  Layout::kFp8Inverse,      Layout::kAnything};
const char* to_string(Layout layout);

struct LayoutModel {
  Tensors tensors;
  std::map<std::string, std::vector<float>> values;  // what each linear map holds, by official name without ".weight"
};

// `plain` holds the model in F32 under official names; its linear maps are first varied by powers of two by block, so
// that a scale from a wrong place shows.
LayoutModel make_layout(Layout layout, const Tensors& plain, const model::Config& config, Rng& rng);

// The same in F32: `plain` with the values of `model`.
Tensors plain_layout(const Tensors& plain, const LayoutModel& model);

// Under Hugging Face names, experts one by one; draft blocks, which have none there, are dropped.
Tensors with_hf_names(const Tensors& tensors);

}  // namespace tessera::testing
