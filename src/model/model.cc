// SPDX-License-Identifier: Apache-2.0
#include "model/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace tessera::model {

namespace {

// Activations that the deepest point of a step holds at once, in bytes: generous per-token sums of what the layers take
// (the arena throws where this is short, and a test runs every layer kind at the largest step).
size_t arena_capacity(const Config& c, int64_t tokens, DType activation) {
  const int64_t width = dtype_bits(activation) / 8;
  const int64_t heads = c.num_heads * c.head_dim, index = c.index_num_heads * c.index_head_dim;
  const int64_t compressor = 4 * 4 * std::max(c.head_dim, c.index_head_dim);
  const int64_t values = 12 * c.hidden_size + c.q_lora_rank + 2 * heads + 2 * c.head_dim + index + c.index_num_heads +
                         c.o_groups * c.o_lora_rank + c.experts_per_token * c.hidden_size + 4 * c.expert_inner;
  const int64_t plain = 4 * (c.num_experts + 2 * c.experts_per_token + c.index_topk + 32) + compressor;
  const int64_t alignment = 64 * static_cast<int64_t>(device::kBufferAlignment);
  return static_cast<size_t>(tokens * (values * width + plain) + alignment);
}

uint64_t mix(uint64_t hash, uint64_t value) {
  return (hash ^ value) * 0x9E3779B97F4A7C15 + 0x165667B19E3779F9;
}

}  // namespace

Model::Model(const Config& config, ops::Planner& planner, ModelWeights& weights, const ops::Precision& precision,
             int64_t num_draft_layers, int64_t max_step_tokens, int num_threads, const Bypass& bypass)
    : config_(config), max_step_tokens_(max_step_tokens), precision_(precision), queue_(num_threads) {
  LayerBuilder builder{config_,   planner,         weights,
                       precision, max_step_tokens, config.sliding_window + max_step_tokens - 1};
  const DType activation = precision.activation();
  embedding_ = weights.load_matrix("embed");
  const DType stored = embedding_.view.format == ops::WeightFormat::kF32 ? DType::kF32 : DType::kBF16;
  ops::Embedding::Desc embed{
      .vocab = config.vocab_size, .hidden = config.hidden_size, .weight = stored, .activation = activation};
  embed_streams_ = builder.bind<ops::Embedding>("embed", embed);
  embed.streams = 1;
  for (int64_t n = 0; n < config.num_layers; ++n) {
    blocks_.push_back(std::make_unique<Block>(builder, fmt::format("layers.{}.", n),
                                              config.compress_ratios[static_cast<size_t>(n)], config.is_hashed(n),
                                              bypass));
    cache_layout_.layers.push_back(blocks_.back()->cache_layout());
  }
  head_ = std::make_unique<OutputHead>(builder, "");
  projection_ = LinearLayer(builder, "head", InputRole::kPlain, DType::kF32);
  sample_ = builder.bind<ops::Sample>("sample", {.vocab = config.vocab_size});
  if (num_draft_layers > 0) {
    embed_rows_ = builder.bind<ops::Embedding>("mtp.0.embed", embed);
    draft_ = std::make_unique<DraftBlock>(builder, "mtp.0.");
    cache_layout_.layers.push_back(draft_->cache_layout());
    cache_layout_.num_draft_layers = 1;
  }
  cache_layout_.fingerprint =
      mix(mix(mix(weights.fingerprint(), config.fingerprint()),
              static_cast<uint64_t>(precision.input) * 16 + static_cast<uint64_t>(precision.cache)),
          static_cast<uint64_t>(builder.window_slots));
  cache_spec_ = make_cache_spec(cache_layout_);

  workspace_ = device::Buffer(static_cast<size_t>(builder.workspace_bytes));
  streams_buffer_ = device::Tensor(activation, {max_step_tokens, ops::kHcStreams, config.hidden_size});
  logits_buffer_ = device::Tensor(DType::kF32, {max_step_tokens, config.vocab_size});
  arena_ = device::Arena(arena_capacity(config, max_step_tokens, activation));
  batch_.slices.reserve(static_cast<size_t>(max_step_tokens));
  for (auto* ids : {&batch_.token_ids, &batch_.logit_rows}) ids->reserve(static_cast<size_t>(max_step_tokens));
  for (auto* places : {&batch_.positions, &batch_.window_slots}) places->reserve(static_cast<size_t>(max_step_tokens));

  facts_.vocab_size = static_cast<int32_t>(config.vocab_size);
  facts_.max_positions = config.max_positions;
  facts_.bos_id = static_cast<int32_t>(config.bos_id);
  for (const int64_t id : config.eos_ids) facts_.eos_ids.push_back(static_cast<int32_t>(id));
  facts_.num_draft_layers = cache_layout_.num_draft_layers;
  facts_.precision = fmt::format("{} x {}", to_string(precision.input), to_string(precision.cache));
  facts_.weight_bytes = static_cast<int64_t>(weights.total_bytes());
}

size_t Model::step_bytes(const Config& config, const ops::Precision& precision, int64_t max_step_tokens) {
  const DType activation = precision.activation();
  const int64_t streams = ops::kHcStreams * config.hidden_size * dtype_bits(activation) / 8;
  return arena_capacity(config, max_step_tokens, activation) +
         static_cast<size_t>(max_step_tokens * (streams + config.vocab_size * 4));
}

std::unique_ptr<SequenceState> Model::new_sequence(int64_t capacity) {
  if (capacity < 0 || capacity > config_.max_positions) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("a sequence of {} tokens: this model takes at most {}", capacity, config_.max_positions));
  }
  reserve_scores(capacity);
  return std::make_unique<SequenceCaches>(cache_layout_, capacity);
}

std::unique_ptr<SequenceState> Model::restore(std::span<const uint8_t> bytes) {
  auto state = SequenceCaches::restore(cache_layout_, config_.max_positions, bytes);
  reserve_scores(state->capacity());
  return state;
}

// The indexer's scratch grows with the longest sequence, here, so that no step allocates.
void Model::reserve_scores(int64_t capacity) {
  const bool has_indexer = std::any_of(cache_layout_.layers.begin(), cache_layout_.layers.end(),
                                       [](const LayerCacheLayout& layer) { return layer.has_indexer; });
  const size_t bytes = has_indexer ? static_cast<size_t>(kScoreRows * (capacity / 4 + 1)) * sizeof(float) : 0;
  if (bytes > index_scores_.size()) index_scores_ = device::Buffer(bytes);
}

void Model::fill_batch(std::span<const SequenceSlice> slices, bool is_draft) {
  batch_.slices.clear(), batch_.token_ids.clear(), batch_.positions.clear();
  batch_.window_slots.clear(), batch_.logit_rows.clear();
  for (const SequenceSlice& slice : slices) {
    SequenceCaches* state = dynamic_cast<SequenceCaches*>(slice.state);
    TESSERA_CHECK(state != nullptr && &state->layout() == &cache_layout_, "a state belongs to the runner that made it");
    const int64_t first_row = static_cast<int64_t>(batch_.token_ids.size());
    const int64_t count = static_cast<int64_t>(slice.ids.size());
    const int64_t position = is_draft ? state->draft_position() : state->position();
    TESSERA_CHECK(first_row + count <= max_step_tokens_,
                  fmt::format("a step takes at most {} tokens", max_step_tokens_));
    if (position + count > state->capacity()) {
      fail(ErrorCode::kInvalidArgument, fmt::format("the sequence holds {} tokens; {} more exceed its capacity of {}",
                                                    position, count, state->capacity()));
    }
    batch_.slices.push_back({state, first_row, count, position});
    for (int64_t i = 0; i < count; ++i) {
      const int32_t id = slice.ids[static_cast<size_t>(i)];
      if (id < 0 || id >= config_.vocab_size) {
        fail(ErrorCode::kInvalidArgument,
             fmt::format("token id {}: this model has ids 0 to {}", id, config_.vocab_size - 1));
      }
      batch_.token_ids.push_back(id);
      batch_.positions.push_back(position + i);
      batch_.window_slots.push_back((position + i) % cache_layout_.layers.front().window_slots);
      if (slice.logits == LogitRows::kAll || (slice.logits == LogitRows::kLast && i + 1 == count)) {
        batch_.logit_rows.push_back(static_cast<int32_t>(first_row + i));
      }
    }
  }
}

StepContext Model::context() {
  arena_.reset_to(0);
  return {.queue = queue_,
          .arena = arena_,
          .workspace = workspace_.data(),
          .tracer = tracer_,
          .slices = batch_.slices,
          .num_tokens = static_cast<int64_t>(batch_.token_ids.size()),
          .token_ids = batch_.token_ids.data(),
          .positions = batch_.positions.data(),
          .window_slots = batch_.window_slots.data(),
          .index_scores = index_scores_.as<float>(),
          .activation = precision_.activation()};
}

TensorView Model::embed(const StepContext& context, const TensorView& out, int64_t streams) const {
  const ops::Bound<ops::Embedding>& op = streams == 1 ? embed_rows_ : embed_streams_;
  const TensorView weight{const_cast<void*>(embedding_.view.data), op.desc.weight, {op.desc.vocab, op.desc.hidden}};
  op.run({.weight = weight, .ids = context.token_ids, .num_tokens = context.num_tokens, .out = out}, context.queue);
  context.trace("embed", "", out);
  return out;
}

TensorView Model::run_head(const StepContext& context, const OutputHead& head, const TensorView& streams) {
  const int64_t rows = static_cast<int64_t>(batch_.logit_rows.size());
  const TensorView logits = rows_of(logits_buffer_, 0, rows);
  head.run(context, projection_, streams, batch_.logit_rows.data(), rows, logits);
  // One pass over what leaves the model: a NaN must not become a token.
  const float* values = logits.as<float>();
  for (int64_t i = 0; i < logits.shape.num_elements(); ++i) {
    if (!std::isfinite(values[i])) {
      const int32_t row = batch_.logit_rows[static_cast<size_t>(i / config_.vocab_size)];
      fail(ErrorCode::kNotFinite,
           fmt::format("logit {} at position {} is {}; run with --trace-op to find the first op "
                       "whose output is not finite",
                       i % config_.vocab_size, batch_.positions[static_cast<size_t>(row)], values[i]));
    }
  }
  return logits;
}

TensorView Model::step(std::span<const SequenceSlice> slices) {
  fill_batch(slices, false);
  const StepContext step = context();
  streams_ = embed(step, rows_of(streams_buffer_, 0, step.num_tokens), ops::kHcStreams);
  for (size_t i = 0; i < blocks_.size(); ++i) blocks_[i]->run(step, i, streams_);
  const TensorView logits = run_head(step, *head_, streams_);
  for (const SliceRows& slice : batch_.slices) slice.state->advance(slice.num_rows);
  return logits;
}

void Model::run_layer(size_t layer, std::span<const SequenceSlice> slices, const TensorView& streams) {
  const bool is_draft = layer >= blocks_.size();
  TESSERA_CHECK(!is_draft, "draft blocks have another input");
  fill_batch(slices, false);
  blocks_[layer]->run(context(), layer, streams);
}

TensorView Model::draft(std::span<const SequenceSlice> slices) {
  if (draft_ == nullptr) fail(ErrorCode::kUnsupported, "this model was loaded without a draft block");
  fill_batch(slices, true);
  const StepContext step = context();
  for (const SliceRows& slice : batch_.slices) {
    TESSERA_CHECK(slice.first_position + slice.num_rows == slice.state->position(),
                  "the draft block follows every step with the same slices");
  }
  TESSERA_CHECK(streams_.shape.rank() > 0 && streams_.shape[0] == step.num_tokens, "draft() follows step()");
  const TensorView next = embed(step, step.take_rows(config_.hidden_size), 1);
  const TensorView streams = draft_->run(step, blocks_.size(), streams_, next);
  const TensorView logits = run_head(step, draft_->head(), streams);
  for (const SliceRows& slice : batch_.slices) slice.state->advance_draft(slice.num_rows);
  return logits;
}

int32_t Model::sample(const SampleRequest& request) {
  TESSERA_CHECK(static_cast<int64_t>(request.logits.size()) == config_.vocab_size, "one row of logits");
  int32_t token = 0;
  sample_.run({.logits = request.logits.data(),
               .params = request.params,
               .position = request.position,
               .counts = request.counts.empty() ? nullptr : request.counts.data(),
               .bias_ids = request.bias_ids.data(),
               .bias_values = request.bias_values.data(),
               .num_bias = static_cast<int64_t>(request.bias_ids.size()),
               .token = &token,
               .workspace = workspace_.data()},
              queue_);
  return token;
}

}  // namespace tessera::model
