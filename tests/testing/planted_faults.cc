// SPDX-License-Identifier: Apache-2.0
#include "testing/planted_faults.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "base/atomic_file.h"
#include "numeric/e4m3.h"
#include "numeric/nvfp4.h"
#include "tensor/scale_layout.h"

namespace tessera::testing {

namespace {

constexpr const char* kFiles[] = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"};

// Ends in `suffix` and begins with `prefix`.
template <class Change>
void for_each(EditableCheckpoint& checkpoint, const std::string& prefix, const std::string& suffix, Change change) {
  size_t count = 0;
  for (auto& [name, held] : checkpoint.tensors()) {
    if (!name.starts_with(prefix) || !name.ends_with(suffix)) continue;
    change(held);
    ++count;
  }
  if (count == 0) throw std::out_of_range(prefix + "*" + suffix);
}

void swap_nibbles(Stored& held) {
  for (uint8_t& byte : held.bytes) byte = static_cast<uint8_t>(byte << 4 | byte >> 4);
}

void pack_as_gguf(Stored& held) {
  for (size_t block = 0; block < held.bytes.size(); block += 8) {
    uint8_t element[16];
    for (size_t j = 0; j < 8; ++j) {
      element[2 * j] = held.bytes[block + j] & 15, element[2 * j + 1] = held.bytes[block + j] >> 4;
    }
    for (size_t j = 0; j < 8; ++j) held.bytes[block + j] = static_cast<uint8_t>(element[j] | element[j + 8] << 4);
  }
}

void swizzle(Stored& held) {
  std::vector<uint8_t> out(held.bytes.size());
  if (sf128x4_size(held.shape[0], held.shape[1]) != static_cast<int64_t>(out.size())) {
    throw std::out_of_range("a matrix that fills whole tiles");
  }
  sf128x4_swizzle(held.bytes.data(), held.shape[0], held.shape[1], out.data());
  held.bytes = out;
}

void shift_columns(Stored& held) {
  const size_t width = static_cast<size_t>(held.shape[1]);
  std::vector<uint8_t> out(held.bytes.size());
  for (size_t i = 0; i < out.size(); ++i) out[i] = held.bytes[i / width * width + (i % width + 1) % width];
  held.bytes = out;
}

float number(const Stored& held) {
  float value = 0;
  std::memcpy(&value, held.bytes.data(), 4);
  return value;
}

void set_number(Stored& held, float value) {
  std::memcpy(held.bytes.data(), &value, 4);
}

const char* const kParts[] = {".weight", ".weight_scale", ".weight_scale_2"};

void exchange(EditableCheckpoint& checkpoint, const std::string& a, const std::string& b) {
  for (const char* part : kParts) std::swap(checkpoint.tensor(a + part), checkpoint.tensor(b + part));
}

void exchange_experts(EditableCheckpoint& checkpoint, const std::string& layer, int a, int b) {
  for (const char* matrix : {".w1", ".w2", ".w3"}) {
    exchange(checkpoint, fmt::format("{}.ffn.experts.{}{}", layer, a, matrix),
             fmt::format("{}.ffn.experts.{}{}", layer, b, matrix));
  }
}

// Row r of the result is row order(r).
template <class Order>
void permute_rows(Stored& held, Order order) {
  const size_t rows = static_cast<size_t>(held.shape[0]), bytes = held.bytes.size() / rows;
  std::vector<uint8_t> out(held.bytes.size());
  for (size_t r = 0; r < rows; ++r) {
    std::memcpy(out.data() + r * bytes, held.bytes.data() + static_cast<size_t>(order(r)) * bytes, bytes);
  }
  held.bytes = out;
}

void replace(std::string& text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  if (at == std::string::npos) throw std::out_of_range(from);
  text.replace(at, from.size(), to);
}

// Tokens 300 and up exchange their ids pairwise across the vocabulary: as large as before, but of another training.
void make_stale(std::string& tokenizer) {
  const size_t vocab = tokenizer.find("\"vocab\""), merges = tokenizer.find("\"merges\"");
  std::string out;
  for (size_t i = 0; i < tokenizer.size();) {
    const bool is_id = i > vocab && i < merges && tokenizer[i] == ':' && tokenizer[i + 1] == ' ' &&
                       tokenizer[i + 2] >= '0' && tokenizer[i + 2] <= '9';
    if (!is_id) {
      out += tokenizer[i++];
      continue;
    }
    size_t end = i + 2;
    int id = 0;
    while (tokenizer[end] >= '0' && tokenizer[end] <= '9') id = 10 * id + (tokenizer[end++] - '0');
    out += fmt::format(": {}", id < 300 ? id : 300 + (id - 300 + 1) % (1024 - 300));
    i = end;
  }
  tokenizer = out;
}

}  // namespace

EditableCheckpoint EditableCheckpoint::read(const std::string& folder) {
  EditableCheckpoint out;
  out.tensors_ = read_tensors(folder);
  for (const char* name : kFiles) {
    const std::string path = folder + "/" + name;
    if (file_exists(path)) out.files_[name] = read_file(path, 64 << 20);
  }
  return out;
}

void EditableCheckpoint::write(const std::string& folder) const {
  write_tensors(folder, tensors_);
  for (const auto& [name, text] : files_) {
    AtomicFile file(folder + "/" + name);
    file.write(text.data(), text.size());
    file.commit();
  }
}

void convert_to_fp8(EditableCheckpoint& checkpoint, const std::string& prefix) {
  std::vector<std::string> names;
  for (const auto& [name, held] : checkpoint.tensors()) {
    if (name.starts_with(prefix) && name.ends_with(".weight_scale_2"))
      names.push_back(name.substr(0, name.size() - 15));
  }
  if (names.empty()) throw std::out_of_range(prefix);
  for (const std::string& name : names) {
    const Stored codes = checkpoint.tensor(name + ".weight"), scales = checkpoint.tensor(name + ".weight_scale");
    const float global = number(checkpoint.tensor(name + ".weight_scale_2"));
    const int64_t rows = codes.shape[0], cols = codes.shape[1] * 2;
    std::vector<float> values(static_cast<size_t>(rows * cols));
    for (int64_t r = 0; r < rows; ++r) {
      numeric::nvfp4_dequantize_row(codes.bytes.data() + r * cols / 2, scales.bytes.data() + r * cols / 16, cols,
                                    values.data() + r * cols);
    }
    const int64_t tall = (rows + 127) / 128, wide = (cols + 127) / 128;
    std::vector<float> block(static_cast<size_t>(tall * wide), 0.0f);
    const auto of = [&](int64_t r, int64_t c) -> float& {
      return block[static_cast<size_t>(r / 128 * wide + c / 128)];
    };
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        float& x = values[static_cast<size_t>(r * cols + c)];
        x *= global;
        of(r, c) = std::max(of(r, c), std::abs(x));
      }
    }
    for (float& amax : block) amax = amax == 0 ? 1 : amax / 448;
    Stored fp8{DType::kF8E4M3, {rows, cols}, std::vector<uint8_t>(values.size())};
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        const size_t i = static_cast<size_t>(r * cols + c);
        fp8.bytes[i] = numeric::e4m3_from_float(values[i] / of(r, c));
      }
    }
    Stored fp8_scales{DType::kF32, {tall, wide}, std::vector<uint8_t>(block.size() * 4)};
    std::memcpy(fp8_scales.bytes.data(), block.data(), fp8_scales.bytes.size());
    for (const char* part : kParts) checkpoint.erase(name + part);
    checkpoint.set(name + ".weight", std::move(fp8));
    checkpoint.set(name + ".scale", std::move(fp8_scales));
  }
}

std::vector<PlantedFault> planted_faults() {
  using C = EditableCheckpoint;
  std::vector<PlantedFault> out;
  const auto add = [&](const char* name, const char* description, const char* kind, const char* where,
                       std::function<void(C&)> plant) {
    out.push_back({name, description, kind, where, plant, {}});
  };

  add("swapped nibbles everywhere", "both codes of every byte of the experts exchanged, in every layer", "nibble-order",
      "ffn.experts.", [](C& c) {
        for_each(c, "layers.", ".weight", [](Stored& h) {
          if (h.dtype == DType::kU8) swap_nibbles(h);
        });
      });
  add("swapped nibbles in one matrix", "the same in layer 3's query projection alone", "nibble-order",
      "layers.3.attn.wq_b", [](C& c) { swap_nibbles(c.tensor("layers.3.attn.wq_b.weight")); });
  add("GGUF nibble order", "elements j and j + 8 share a byte, in the experts of layer 2", "nibble-order",
      "layers.2.ffn.experts.", [](C& c) {
        for (int e = 0; e < 16; ++e) {
          for (const char* w : {"w1", "w3"})
            pack_as_gguf(c.tensor(fmt::format("layers.2.ffn.experts.{}.{}.weight", e, w)));
        }
      });
  add("swizzled scales", "block scales stored in the tensor cores' layout under a linear shape, in layer 1's experts",
      "scale-order", "layers.1.ffn.experts.",
      [](C& c) { for_each(c, "layers.1.ffn.experts.", ".w1.weight_scale", swizzle); });
  add("scales one block off", "block scales shifted by one along the row, in layer 4's attention output", "scale-order",
      "layers.4.attn.wo_a", [](C& c) { shift_columns(c.tensor("layers.4.attn.wo_a.weight_scale")); });
  add("w1 and w3 swapped in one expert", "gate and up exchanged in expert 9 of layer 5", "gate-up-swapped",
      "layers.5.ffn.experts.9", [](C& c) { exchange(c, "layers.5.ffn.experts.9.w1", "layers.5.ffn.experts.9.w3"); });
  add("w1 and w3 swapped everywhere", "gate and up exchanged in every routed expert", "gate-up-swapped", "ffn.experts.",
      [](C& c) {
        for (int layer = 0; layer < 6; ++layer) {
          for (int e = 0; e < 16; ++e) {
            const std::string p = fmt::format("layers.{}.ffn.experts.{}.", layer, e);
            exchange(c, p + "w1", p + "w3");
          }
        }
      });
  add("one global twice too large", "weight_scale_2 of one expert's w2 doubled", "scale-size",
      "layers.2.ffn.experts.7.w2", [](C& c) {
        Stored& global = c.tensor("layers.2.ffn.experts.7.w2.weight_scale_2");
        set_number(global, 2 * number(global));
      });
  add("one reciprocal global", "weight_scale_2 of one expert's w3 stored as 1/x", "reciprocal-scale",
      "layers.4.ffn.experts.0.w3", [](C& c) {
        Stored& global = c.tensor("layers.4.ffn.experts.0.w3.weight_scale_2");
        set_number(global, 1 / number(global));
      });
  add("every global reciprocal", "compressed-tensors globals under ModelOpt's name, in every matrix",
      "reciprocal-scale", "layers.",
      [](C& c) { for_each(c, "layers.", ".weight_scale_2", [](Stored& h) { set_number(h, 1 / number(h)); }); });
  add("missing shared expert", "all codes of layer 3's shared expert zero", "missing-weights",
      "layers.3.ffn.shared_experts", [](C& c) {
        for_each(c, "layers.3.ffn.shared_experts.", ".weight", [](Stored& h) { h.bytes.assign(h.bytes.size(), 0); });
      });
  add("transposed wo_a groups", "rows of wo_a run through the output groups first, in layer 2", "output-groups",
      "layers.2.attn.wo_a", [](C& c) {
        for (const char* part : {".weight", ".weight_scale"}) {
          permute_rows(c.tensor(std::string("layers.2.attn.wo_a") + part), [](size_t r) { return r % 2 * 64 + r / 2; });
        }
      });
  add("exchanged wo_a groups", "the output groups of layer 5's wo_a exchanged", "output-groups", "layers.5.attn.wo_a",
      [](C& c) {
        for (const char* part : {".weight", ".weight_scale"}) {
          permute_rows(c.tensor(std::string("layers.5.attn.wo_a") + part), [](size_t r) { return (r + 64) % 128; });
        }
      });
  add("two experts exchanged", "experts 3 and 11 of layer 4 against their router rows", "expert-order",
      "layers.4.ffn.experts.", [](C& c) { exchange_experts(c, "layers.4", 3, 11); });
  add("experts rotated", "all experts of layer 3 moved on by one against the router", "expert-order",
      "layers.3.ffn.experts.", [](C& c) {
        for (int e = 15; e > 0; --e) exchange_experts(c, "layers.3", e, e - 1);
      });
  add("router bias dropped", "e_score_correction_bias of layer 4 zero", "router-bias", "layers.4.ffn.gate.bias",
      [](C& c) {
        Stored& bias = c.tensor("layers.4.ffn.gate.bias");
        bias.bytes.assign(bias.bytes.size(), 0);
      });
  add("NaN scale", "one block scale byte is 0x7f", "not-finite", "layers.2.attn.wkv",
      [](C& c) { c.tensor("layers.2.attn.wkv.weight_scale").bytes[77] = 0x7F; });
  add("wrong rope_theta", "config.json: rope_theta 1000000", "config", "rope_theta",
      [](C& c) { replace(c.file("config.json"), "\"rope_theta\": 10000,", "\"rope_theta\": 1000000,"); });
  add("wrong compress_rope_theta", "config.json: compress_rope_theta 10000", "config", "compress_rope_theta", [](C& c) {
    replace(c.file("config.json"), "\"compress_rope_theta\": 160000", "\"compress_rope_theta\": 10000");
  });
  add("wrong compress_ratios", "config.json: layers 2 and 3 exchanged", "config", "compress_ratios",
      [](C& c) { replace(c.file("config.json"), "4,\n  128,\n  4,", "128,\n  4,\n  4,"); });
  add("too few layers", "config.json: num_hidden_layers 5", "config", "num_hidden_layers",
      [](C& c) { replace(c.file("config.json"), "\"num_hidden_layers\": 6", "\"num_hidden_layers\": 5"); });
  add("stale tokenizer", "as many ids, but those of other tokens", "tokenizer", "tokenizer.json",
      [](C& c) { make_stale(c.file("tokenizer.json")); });
  add("tokenizer of another size", "config and weights have more ids than the tokenizer thinks of specials",
      "tokenizer", "tokenizer.json", [](C& c) { replace(c.file("tokenizer.json"), "\"id\": 1,", "\"id\": 1030,"); });
  add("FP8 scales one block off", "every wq_b in FP8 with block scales of the next block", "scale-order", "attn",
      [](C& c) {
        for (int layer = 0; layer < 6; ++layer) {
          const std::string name = fmt::format("layers.{}.attn.wq_b", layer);
          convert_to_fp8(c, name);
          Stored& scales = c.tensor(name + ".scale");
          std::vector<float> values(scales.bytes.size() / 4);
          std::memcpy(values.data(), scales.bytes.data(), scales.bytes.size());
          // Heads of very different size, which the norm behind the projection undoes, so that scales differ as they do
          // in large models.
          for (size_t i = 0; i < values.size(); ++i) values[i] *= i / 4 % 2 == 0 ? 1.0f : 64.0f;
          std::rotate(values.begin(), values.begin() + 1, values.end());
          std::memcpy(scales.bytes.data(), values.data(), scales.bytes.size());
        }
      });
  out.push_back({"truncated shard", "the last kilobyte of the shard is missing", "damaged-file", "", [](C&) {},
                 [](const std::string& folder) {
                   const std::string path = folder + "/model.safetensors";
                   std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1024);
                 }});
  for (PlantedFault& fault : silent_faults()) out.push_back(std::move(fault));
  return out;
}

}  // namespace tessera::testing
