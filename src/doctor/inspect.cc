// SPDX-License-Identifier: Apache-2.0
#include "doctor/inspect.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>

#include "base/error.h"
#include "base/strings.h"
#include "model/draft_names.h"
#include "model/load_model.h"
#include "model/sequence_caches.h"

#include "model/weight_format.h"
#include "model/weight_spec.h"

namespace tessera::doctor {

namespace {

using model::WeightKind;
using model::WeightRow;

constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr std::array<uint64_t, 12> kMemories = {8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048};
// Share of a memory that weights and caches may take, and what a GPU's runtime and activations take besides.
constexpr double kUsable = 0.94;
constexpr uint64_t kRuntimeBytes = 2 * kGiB;
constexpr int kMaxGpus = 64;
constexpr size_t kMaxProblems = 10;

struct Gpu {
  const char* name;
  uint64_t gib;
};
// Memory sizes as their makers state them.
constexpr Gpu kGpus[] = {{"RTX 4090", 24}, {"RTX 5090", 32}, {"RTX PRO 6000", 96}, {"A100 80GB", 80},
                         {"H100", 80},     {"H200", 141},    {"B200", 180},        {"B300", 288}};

std::string family_of(const WeightRow& row) {
  const std::string& name = row.name;
  const auto has = [&](std::string_view part) { return name.find(part) != std::string::npos; };
  if (name.starts_with("mtp.")) return "draft";
  if (row.expert >= 0) return "experts";
  if (has("shared_experts")) return "shared experts";
  if (name == "embed" || name == "head") return "embedding and head";
  if (row.kind == WeightKind::kVector && !has("gate.")) return "norms and mixing";
  if (has("indexer")) return "indexer";
  if (has("compressor")) return "compressor";
  if (has("ffn.gate")) return "router";
  return "attention";
}

std::string size_name(const model::Config& config) {
  if (config.num_layers == 43 && config.hidden_size == 4096) return "DeepSeek-V4 Flash";
  if (config.num_layers == 61 && config.hidden_size == 7168) return "DeepSeek-V4 Pro";
  return fmt::format("DeepSeek-V4 architecture, {} layers of {}", config.num_layers, config.hidden_size);
}

class Inspector {
 public:
  Inspector(const std::string& directory, const ops::Precision& precision) {
    out_.directory = directory;
    out_.config = model::load_config(directory);
    checkpoint_ = std::make_unique<checkpoint::Checkpoint>(checkpoint::Checkpoint::open(directory));
    out_.caches = cache_spec_of(out_.config, precision);
  }

  Inspection run() {
    const auto& tensors = checkpoint_->tensors();
    out_.num_files = checkpoint_->num_files(), out_.num_tensors = tensors.size();
    for (const auto& tensor : tensors) out_.num_bytes += tensor.entry->num_bytes;
    const int64_t drafts = model::num_draft_layers(*checkpoint_, out_.config);
    out_.draft = out_.config.has_dspark ? "DSpark" : drafts > 0 ? "MTP" : "none";
    std::set<std::string> used;
    for (const WeightRow& row : model::make_weight_spec(out_.config, drafts)) add_row(row, used);
    add_rest(used);
    out_.what = size_name(out_.config);
    for (const FamilyFormat& family : out_.families) {
      if (family.family == "experts" || family.family == "attention") {
        out_.what += fmt::format(", {} {}", family.family, family.format);
      }
    }
    add_memory();
    return std::move(out_);
  }

 private:
  FamilyFormat& family(const std::string& name, const std::string& format) {
    for (FamilyFormat& known : out_.families) {
      if (known.family == name && known.format == format) return known;
    }
    return out_.families.emplace_back(FamilyFormat{name, format});
  }

  void add_row(const WeightRow& row, std::set<std::string>& used) {
    std::set<std::string> own;
    try {
      const model::StoredTensor stored = model::resolve_weight(*checkpoint_, out_.config, row, own);
      const std::string format = row.kind == WeightKind::kTable ? "table" : std::string(to_string(stored.format));
      FamilyFormat& part = family(family_of(row), format);
      ++part.num_matrices;
      part.num_values += row.shape.num_elements();
      uint64_t bytes = 0;
      for (const std::string& name : own) {
        // A fused tensor belongs to many rows: counted once.
        if (used.insert(name).second) bytes += checkpoint_->find(name)->entry->num_bytes;
      }
      part.num_bytes += bytes;
      // The program holds integers and vectors in 4 bytes, matrices as they are (MXFP4 grows by its finer scales).
      const bool is_matrix = row.kind == WeightKind::kLinear || row.kind == WeightKind::kPlain;
      out_.loaded_bytes += is_matrix
                               ? format == "mxfp4" ? static_cast<uint64_t>(row.shape.num_elements()) * 9 / 16 : bytes
                               : static_cast<uint64_t>(row.shape.num_elements()) * 4;
    } catch (const Error& error) {
      if (out_.problems.size() < kMaxProblems) out_.problems.push_back(error.what());
    }
  }

  void add_rest(const std::set<std::string>& used) {
    const model::DraftNames draft_names(out_.config);
    for (const auto& tensor : checkpoint_->tensors()) {
      if (used.contains(tensor.entry->name)) continue;
      const bool is_draft = draft_names.has(tensor.entry->name);
      FamilyFormat& part = family(is_draft ? "draft" : "unknown", tensor.entry->dtype_text);
      ++part.num_matrices;
      part.num_values += tensor.entry->shape.num_elements();
      part.num_bytes += tensor.entry->num_bytes;
    }
  }

  void add_memory() {
    for (const model::CacheKind& kind : out_.caches.kinds) {
      out_.fixed_bytes += kind.entry_bytes * kind.fixed_entries;
      if (kind.ratio > 0)
        out_.bytes_per_token += static_cast<double>(kind.entry_bytes) / static_cast<double>(kind.ratio);
    }
    const auto tokens_in = [&](double usable) {
      return max_tokens_in(static_cast<uint64_t>(usable), out_.loaded_bytes, out_.caches, out_.config.max_positions);
    };
    for (const uint64_t gib : kMemories) {
      out_.contexts.push_back({gib * kGiB, tokens_in(kUsable * static_cast<double>(gib * kGiB))});
    }
    for (const Gpu& gpu : kGpus) {
      GpuRow row{gpu.name, gpu.gib * kGiB, 0, 0};
      for (int count = 1; count <= kMaxGpus && row.num_gpus == 0; count *= 2) {
        const double usable =
            count * (kUsable * static_cast<double>(gpu.gib * kGiB) - static_cast<double>(kRuntimeBytes));
        const int64_t tokens = tokens_in(usable);
        // A GPU that holds the weights and no useful context does not hold the model.
        if (tokens < std::min<int64_t>(out_.config.max_positions, 4096)) continue;
        row.num_gpus = count, row.max_tokens = tokens;
      }
      out_.gpus.push_back(row);
    }
  }

  std::unique_ptr<checkpoint::Checkpoint> checkpoint_;
  Inspection out_;
};

}  // namespace

model::CacheSpec cache_spec_of(const model::Config& config, const ops::Precision& precision) {
  model::CacheLayout layout;
  const DType activation = precision.activation();
  for (const int64_t ratio : config.compress_ratios) {
    model::LayerCacheLayout layer;
    layer.ratio = ratio;
    layer.window = layer.window_slots = config.sliding_window;
    layer.kv = ops::kv_entry_layout(precision, config.head_dim, config.rope_dim);
    layer.compressor = {.ratio = ratio, .width = config.head_dim, .activation = activation};
    layer.has_indexer = ratio == 4;
    if (layer.has_indexer) {
      layer.index = ops::index_entry_layout(precision, config.index_head_dim);
      layer.index_compressor = {.ratio = ratio, .width = config.index_head_dim, .activation = activation};
    }
    layout.layers.push_back(layer);
  }
  return model::make_cache_spec(layout);
}

int64_t max_tokens_in(uint64_t memory_bytes, uint64_t loaded_bytes, const model::CacheSpec& caches,
                      int64_t max_positions) {
  if (loaded_bytes >= memory_bytes) return 0;
  const uint64_t room = memory_bytes - loaded_bytes;
  const auto fits = [&](int64_t tokens) { return static_cast<uint64_t>(caches.bytes(tokens)) <= room; };
  if (fits(max_positions)) return max_positions;
  int64_t low = 0, high = max_positions;  // low fits or is 0; high does not
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

Inspection inspect(const std::string& directory, const ops::Precision& precision) {
  return Inspector(directory, precision).run();
}

}  // namespace tessera::doctor
