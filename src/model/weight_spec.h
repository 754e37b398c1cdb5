// SPDX-License-Identifier: Apache-2.0
#pragma once
// Every tensor of a model as a table: official name, shape, what it may be stored as, how it is cut over ranks, and the
// op that consumes it. Loading, checking and slicing follow this table and nothing else.
// Source: the tensor names and shapes of deepseek-ai/DeepSeek-V4-Flash; docs/formats/checkpoints.md.
#include <cstdint>
#include <string>
#include <vector>

#include "model/config.h"
#include "tensor/tensor_view.h"

namespace tessera::model {

enum class WeightKind : uint8_t {
  kLinear,  // "NAME.weight": a linear map in any readable weight format
  kPlain,   // "NAME.weight": a matrix that is never quantised (embedding, router): BF16 or F32
  kVector,  // small tensors kept as FP32: norms, sinks, position biases, hyper-connections, router bias
  kTable,   // integers: the hash layers' routing table
};

// How a tensor is cut when `world` ranks share a model. What is not cut is held by every rank.
enum class ShardRule : uint8_t {
  kReplicate,
  kRowsByHead,   // equal runs of rows, one per attention head
  kRowsByGroup,  // equal runs of rows, one per output group
  kColsByGroup,  // equal runs of columns, one per output group
  kExpertRows,   // of an expert, whose rows are its inner width (gate, up)
  kExpertCols,   // of an expert, whose columns are its inner width (down)
  kRowsByToken,  // equal runs of rows, one per token of the vocabulary; whole where there are none (head)
};

// How heads are dealt out (docs/decisions/0031-several-gpus.md).
enum class AttentionSplit : uint8_t {
  kWhole,    // every rank has all
  kByGroup,  // equal runs of output groups and their heads
};

// How experts are.
enum class ExpertSplit : uint8_t {
  kById,     // equal runs of whole routed experts; every rank has the shared expert
  kByWidth,  // every rank has an equal part of the inner width of each, the shared one too
};

// Which part of a model a rank holds.
struct Shard {
  int64_t rank = 0, world = 1;
  AttentionSplit attention = AttentionSplit::kByGroup;
  ExpertSplit experts = ExpertSplit::kById;
  // Steps of so many tokens and more are cut over ranks by token (layers/token_run.h). The default is from where it
  // gained on two H100: of 512 tokens a step became 2 to 10 % longer, of 1,024 2 % shorter, of 4,096 7 %
  // (docs/performance/several_gpus.md).
  int64_t fewest_tokens_to_cut = 1024;
  // Beside its own heads a rank holds the others', and computes all of them for its own tokens in steps that are cut so
  // (layers/attention_heads.h): more memory for shorter prompts. With kByGroup alone; whoever has whole attention does
  // so anyway.
  bool keeps_all_heads = false;
  // Of caches, not of weights: the ranks have one copy of compressed entries among them (CachePool).
  bool shards_entries = false;

  int64_t entry_ranks() const { return shards_entries ? world : 1; }  // that have one copy among them
  friend bool operator==(const Shard&, const Shard&) = default;
};

struct WeightRow {
  std::string name;  // official; without ".weight" for kLinear and kPlain
  Shape shape;       // [out, in] for linear maps
  WeightKind kind = WeightKind::kLinear;
  ShardRule shard = ShardRule::kReplicate;
  const char* consumer = "";  // op name
  int64_t expert = -1;        // id of a routed expert
  int64_t scale_rows = 1;     // as stored: consecutive rows that share scales, which kRowsByToken does not part
};

// `num_draft_layers` MTP blocks follow the main layers.
std::vector<WeightRow> make_weight_spec(const Config& config, int64_t num_draft_layers);

// Half-open ranges of a tensor that a rank holds; empty rows where it holds none of an expert.
struct WeightSlice {
  int64_t row_begin = 0, row_end = 0, col_begin = 0, col_end = 0;
};

// Throws kUnsupported where the world does not divide heads, groups or experts. The head is cut whatever `shard` says
// of these: each of its rows is a logit, so cutting them changes no bit.
WeightSlice slice_of(const WeightRow& row, const Config& config, const Shard& shard);

// The ranks' parts of heads together, as one rank would hold them.
Shard with_whole_attention(Shard shard);
// Every shard whose part of a tensor the rank holds, its own first: with keeps_all_heads of what is cut by rows of
// heads the whole as well, of what is cut by columns each other rank's part, since their products are rounded
// apart.
std::vector<Shard> held_shards(const WeightRow& row, const Shard& shard);

}  // namespace tessera::model
