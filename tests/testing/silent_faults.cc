// SPDX-License-Identifier: Apache-2.0
// Faults that leave every tensor plausible by itself: the model answers, only worse.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "testing/planted_faults.h"

namespace tessera::testing {

namespace {

using C = EditableCheckpoint;

void multiply(C& checkpoint, const std::string& name, float factor) {
  Stored& held = checkpoint.tensor(name);
  for (size_t i = 0; i + 4 <= held.bytes.size(); i += 4) {
    float value = 0;
    std::memcpy(&value, held.bytes.data() + i, 4);
    value *= factor;
    std::memcpy(held.bytes.data() + i, &value, 4);
  }
}

void add(C& checkpoint, const std::string& name, float offset) {
  Stored& held = checkpoint.tensor(name);
  for (size_t i = 0; i + 4 <= held.bytes.size(); i += 4) {
    float value = 0;
    std::memcpy(&value, held.bytes.data() + i, 4);
    value += offset;
    std::memcpy(held.bytes.data() + i, &value, 4);
  }
}

void flip_signs(C& checkpoint, const std::string& name) {
  for (uint8_t& byte : checkpoint.tensor(name).bytes) byte ^= 0x88;
}

// Row r of the tensor becomes row r + 1.
void roll_rows(C& checkpoint, const std::string& name) {
  Stored& held = checkpoint.tensor(name);
  const auto row = static_cast<int64_t>(held.bytes.size()) / held.shape[0];
  std::rotate(held.bytes.begin(), held.bytes.end() - row, held.bytes.end());
}

// Every tensor of layer `a` that begins with `part`, against that of layer `b`.
void exchange_layers(C& checkpoint, int a, int b, const std::string& part) {
  const std::string from = fmt::format("layers.{}.", a), to = fmt::format("layers.{}.", b);
  size_t count = 0;
  for (auto& [name, held] : checkpoint.tensors()) {
    if (!name.starts_with(from + part)) continue;
    std::swap(held, checkpoint.tensor(to + name.substr(from.size())));
    ++count;
  }
  if (count == 0) throw std::out_of_range(from + part);
}

void copy_expert(C& checkpoint, const std::string& prefix, int from, int to) {
  for (const char* matrix : {"w1", "w2", "w3"}) {
    for (const char* part : {".weight", ".weight_scale", ".weight_scale_2"}) {
      checkpoint.tensor(fmt::format("{}{}.{}{}", prefix, to, matrix, part)) =
          checkpoint.tensor(fmt::format("{}{}.{}{}", prefix, from, matrix, part));
    }
  }
}

}  // namespace

std::vector<PlantedFault> silent_faults() {
  std::vector<PlantedFault> out;
  const auto plant = [&](const char* name, const char* description, const char* kind, const char* where,
                         std::function<void(C&)> change) {
    out.push_back({name, description, kind, where, std::move(change), {}});
  };
  plant("attention output doubled", "weight_scale_2 of layer 3's wo_b twice too large", "scale-size",
        "layers.3.attn.wo_b", [](C& c) { multiply(c, "layers.3.attn.wo_b.weight_scale_2", 2); });
  plant("attention output halved", "weight_scale_2 of layer 4's wo_a half of what it was", "scale-size",
        "layers.4.attn.wo_a", [](C& c) { multiply(c, "layers.4.attn.wo_a.weight_scale_2", 0.5f); });
  plant("sign of a matrix", "every code of layer 2's wo_b negated", "sign", "layers.2.attn.wo_b",
        [](C& c) { flip_signs(c, "layers.2.attn.wo_b.weight"); });
  plant("experts of a layer too large", "every expert's scales of layer 1 times 448", "scale-size",
        "layers.1.ffn.experts", [](C& c) {
          for (int e = 0; e < 16; ++e) {
            for (const char* w : {"w1", "w2", "w3"}) {
              multiply(c, fmt::format("layers.1.ffn.experts.{}.{}.weight_scale_2", e, w), 448);
            }
          }
        });
  plant("norm less 1", "layer 3's ffn_norm stored as its difference from 1", "norm-offset", "layers.3.ffn_norm",
        [](C& c) { add(c, "layers.3.ffn_norm.weight", -1); });
  plant("sink too high", "50 added to layer 2's attention sinks", "sink-level", "layers.2.attn.attn_sink",
        [](C& c) { add(c, "layers.2.attn.attn_sink", 50); });
  plant("router bias too large", "layer 3's router bias times 100", "scale-size", "layers.3.ffn.gate.bias",
        [](C& c) { multiply(c, "layers.3.ffn.gate.bias", 100); });
  plant("mixing of the wrong sign", "layer 2's hc_attn_scale negated", "sign", "layers.2.hc_attn_scale",
        [](C& c) { multiply(c, "layers.2.hc_attn_scale", -1); });
  plant("mixing erased", "layer 3's hc_ffn_fn zero", "missing-weights", "layers.3.hc_ffn_fn",
        [](C& c) { multiply(c, "layers.3.hc_ffn_fn", 0); });
  plant("routing table one id off", "rows of layer 0's tid2eid moved on by one", "table-order",
        "layers.0.ffn.gate.tid2eid", [](C& c) { roll_rows(c, "layers.0.ffn.gate.tid2eid"); });
  plant("embedding one id off", "rows of the embedding moved on by one", "token-order", "embed",
        [](C& c) { roll_rows(c, "embed.weight"); });
  plant("head one id off", "rows of the head moved on by one", "token-order", "head",
        [](C& c) { roll_rows(c, "head.weight"); });
  plant("head overwritten", "the head is a copy of the embedding", "duplicate-weights", "head",
        [](C& c) { c.tensor("head.weight") = c.tensor("embed.weight"); });
  plant("expert overwritten", "expert 5 of layer 0 is a copy of expert 4", "duplicate-weights",
        "layers.0.ffn.experts.5", [](C& c) { copy_expert(c, "layers.0.ffn.experts.", 4, 5); });
  plant("layers exchanged", "layers 2 and 4", "layer-order", "layers.2.", [](C& c) { exchange_layers(c, 2, 4, ""); });
  plant("a matrix of another layer", "wkv of layers 1 and 3 exchanged", "layer-order", "layers.1.attn.wkv",
        [](C& c) { exchange_layers(c, 1, 3, "attn.wkv."); });
  plant("scales upside down", "rows of layer 4's wq_b scales in reverse", "scale-order", "layers.4.attn.wq_b",
        [](C& c) {
          Stored& scales = c.tensor("layers.4.attn.wq_b.weight_scale");
          const size_t row = scales.bytes.size() / static_cast<size_t>(scales.shape[0]);
          std::vector<uint8_t> reversed(scales.bytes.size());
          for (size_t r = 0; r < reversed.size() / row; ++r) {
            std::memcpy(reversed.data() + r * row, scales.bytes.data() + scales.bytes.size() - (r + 1) * row, row);
          }
          scales.bytes = reversed;
        });
  plant("wrong routed_scaling_factor", "config.json: routed_scaling_factor 4.5", "config", "routed_scaling_factor",
        [](C& c) {
          std::string& config = c.file("config.json");
          const std::string from = "\"routed_scaling_factor\": 1.5";
          config.replace(config.find(from), from.size(), "\"routed_scaling_factor\": 4.5");
        });
  plant("wrong index_topk", "config.json: index_topk 1", "config", "index_topk", [](C& c) {
    std::string& config = c.file("config.json");
    const std::string from = "\"index_topk\": 16";
    config.replace(config.find(from), from.size(), "\"index_topk\": 1");
  });
  plant("merges cut", "tokenizer.json with its first 20 merges alone", "tokenizer", "tokenizer.json", [](C& c) {
    std::string& text = c.file("tokenizer.json");
    const std::string merge_end = "\n   ]";
    size_t end = text.find("\"merges\"");
    for (int i = 0; i < 20; ++i) end = text.find(merge_end, end) + merge_end.size();
    text.erase(end, text.rfind(merge_end) + merge_end.size() - end);
  });
  // What later tokens alone pay for.
  for (PlantedFault& fault : out) {
    if (fault.kind == "sink-level" || fault.where == "index_topk") fault.num_tokens = 160;
  }
  return out;
}

}  // namespace tessera::testing
