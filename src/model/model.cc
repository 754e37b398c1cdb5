// SPDX-License-Identifier: Apache-2.0
#include "model/model.h"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <new>

#include "base/error.h"
#include "base/integer_math.h"
#include "base/strings.h"
#include "model/memory_fit.h"
#include "model/placed_weights.h"
#include "model/sequence_snapshot.h"

namespace tessera::model {

namespace {

// Activations that the deepest point of a step holds at once, in bytes: generous per-token sums of what the layers take
// (the arena throws where this is short, and a test runs every layer kind at the largest step).
size_t arena_capacity(const Config& c, int64_t tokens, DType activation, int64_t head_parts) {
  const int64_t width = dtype_bits(activation) / 8;
  const int64_t heads = c.num_heads * c.head_dim, index = c.index_num_heads * c.index_head_dim;
  const int64_t compressors = 4 * 4 * (c.head_dim + c.index_head_dim);
  const int64_t values = 20 * c.hidden_size + c.q_lora_rank + 2 * heads + 2 * c.head_dim + c.index_head_dim + index +
                         c.index_num_heads + c.o_groups * c.o_lora_rank + c.experts_per_token * c.hidden_size +
                         4 * c.expert_inner;
  const int64_t plain = 4 * (c.num_experts + 2 * c.experts_per_token + 2 * c.index_topk + 52) + compressors;
  const int64_t alignment = 64 * static_cast<int64_t>(device::kBufferAlignment);
  // When logits are computed all that is left is what a draft block began and ended with, and the head's input.
  const int64_t head =
      tokens * 12 * c.hidden_size * width + VocabularyHead::scratch_bytes(c.vocab_size, head_parts, tokens);
  return static_cast<size_t>(std::max(tokens * (values * width + plain), head) + alignment);
}

std::vector<int64_t> compression_ratios(const CacheLayout& layout) {
  std::vector<int64_t> ratios;
  for (const LayerCacheLayout& layer : layout.layers) {
    if (layer.ratio != 0 && std::find(ratios.begin(), ratios.end(), layer.ratio) == ratios.end()) {
      ratios.push_back(layer.ratio);
    }
  }
  return ratios;
}

uint64_t mix(uint64_t hash, uint64_t value) {
  return (hash ^ value) * 0x9E3779B97F4A7C15 + 0x165667B19E3779F9;
}

// Of what computes and what is left out.
uint64_t plan_fingerprint(const ops::Planner& planner, const Bypass& bypass) {
  std::string text = fmt::format("{}{}{}", bypass.routed_experts, bypass.shared_experts, bypass.compressed_entries);
  for (const ops::PlanLine& line : planner.lines()) {
    text += fmt::format("\n{} {} {} {}", line.where, line.op, line.desc, line.chosen);
  }
  return XXH3_64bits(text.data(), text.size());
}

constexpr int64_t kHostLogitRows = 512;

}  // namespace

Model::Model(const Config& config, ops::Planner& planner, ModelWeights& weights, const ops::Precision& precision,
             int64_t num_draft_layers, int64_t max_step_tokens, std::unique_ptr<device::Executor> executor,
             const Bypass& bypass, comm::Communicator* comm)
    : config_(config),
      max_step_tokens_(max_step_tokens),
      fewest_tokens_to_cut_(weights.shard().fewest_tokens_to_cut),
      precision_(precision),
      executor_(std::move(executor)),
      comm_(comm) {
  TESSERA_CHECK(weights.shard().world == (comm == nullptr ? 1 : comm->world()) &&
                    weights.shard().rank == (comm == nullptr ? 0 : comm->rank()),
                "the weights of this rank");
  const device::InterleavedMemory interleaved = executor_->interleave();
  device::MemorySpace& memory = executor_->memory();
  PlacedWeights placed(weights, memory, executor_->queue());
  LayerBuilder builder{config_, planner, placed, precision, max_step_tokens, ring_slots(config, max_step_tokens),
                       memory};
  builder.comm = comm;
  CacheLayout layout;
  const DType activation = precision.activation();
  embedding_ = placed.load_matrix("embed");
  const DType stored = embedding_.view.format == ops::WeightFormat::kF32 ? DType::kF32 : DType::kBF16;
  ops::Embedding::Desc embed{
      .vocab = config.vocab_size, .hidden = config.hidden_size, .weight = stored, .activation = activation};
  embed_streams_ = builder.bind<ops::Embedding>("embed", embed);
  embed.streams = 1;
  for (int64_t n = 0; n < config.num_layers; ++n) {
    blocks_.push_back(std::make_unique<Block>(builder, fmt::format("layers.{}.", n),
                                              config.compress_ratios[static_cast<size_t>(n)], config.is_hashed(n),
                                              bypass, n > 0));
    layout.layers.push_back(blocks_.back()->cache_layout());
  }
  head_ = std::make_unique<OutputHead>(builder, "");
  projection_ = VocabularyHead(builder);
  finite_check_ = builder.bind<ops::FiniteCheck>("finite_check", {.width = config.vocab_size});
  sample_ = std::make_unique<SampleStep>(builder, *executor_);
  if (num_draft_layers > 0) {
    embed_rows_ = builder.bind<ops::Embedding>("mtp.0.embed", embed);
    draft_ = std::make_unique<DraftBlock>(builder, "mtp.0.");
    layout.layers.push_back(draft_->cache_layout());
    layout.num_draft_layers = 1;
  }
  layout.snapshot_fingerprint =
      mix(mix(weights.fingerprint(), config.fingerprint()),
          static_cast<uint64_t>(precision.input) * 16 + static_cast<uint64_t>(precision.cache));
  layout.fingerprint = mix(layout.snapshot_fingerprint, static_cast<uint64_t>(builder.window_slots));
  facts_.state_identity =
      fmt::format("{:016x}-{:016x}", layout.snapshot_fingerprint, plan_fingerprint(planner, bypass));
  comm::Communicator* sharding = weights.shard().shards_entries ? comm : nullptr;
  cache_spec_ = make_cache_spec(layout, sharding == nullptr ? 1 : comm->world());
  // Behind the identity of states, which don't depend on who computes what.
  for (const auto& block : blocks_) block->prepare_own_tokens(builder);
  facts_.num_draft_layers = layout.num_draft_layers;
  pool_ = std::make_unique<CachePool>(std::move(layout), memory, sharding, &executor_->queue());

  workspace_ = device::Buffer(static_cast<size_t>(builder.workspace_bytes), memory);
  streams_buffer_ = device::Tensor(
      activation, {round_up(max_step_tokens, weights.shard().world), ops::kHcStreams, config.hidden_size}, memory);
  logits_ = device::Tensor(DType::kF32, {max_step_tokens, config.vocab_size}, memory);
  outcomes_ = device::Tensor(DType::kI32, {2 * max_step_tokens}, memory);
  if (!memory.is_host()) {
    reserve_host_logits(std::min(max_step_tokens, kHostLogitRows));
    for (device::Tensor& outcomes : host_outcomes_) {
      outcomes = device::Tensor(DType::kI32, outcomes_.view().shape, executor_->staging());
    }
  }
  for (auto& end : ends_) end = executor_->make_point();
  arena_ = device::Arena(arena_capacity(config, max_step_tokens, activation, projection_.num_parts()), memory);
  batch_ = std::make_unique<StepBatch>(compression_ratios(pool_->layout()),
                                       StepBatch::Limits{.max_tokens = max_step_tokens,
                                                         .window_slots = builder.window_slots,
                                                         .index_top_k = config.index_topk,
                                                         .mask_words = ops::mask_words(config.vocab_size)},
                                       executor_->staging(), memory);
  const size_t rows = static_cast<size_t>(max_step_tokens);
  slices_.rows.reserve(rows), slices_.states.reserve(rows);
  slices_.token_ids.reserve(rows), slices_.logit_rows.reserve(rows);
  slices_.draws.reserve(rows), slices_.drawn.reserve(rows), slices_.masks.reserve(rows);

  facts_.vocab_size = static_cast<int32_t>(config.vocab_size);
  facts_.max_positions = config.max_positions;
  facts_.bos_id = static_cast<int32_t>(config.bos_id);
  for (const int64_t id : config.eos_ids) facts_.eos_ids.push_back(static_cast<int32_t>(id));
  facts_.precision = fmt::format("{} x {}", to_string(precision.input), to_string(precision.cache));
  facts_.weight_bytes = static_cast<int64_t>(weights.total_bytes());
  executor_->end_loading();
}

size_t Model::step_bytes(const Config& config, const ops::Precision& precision, int64_t max_step_tokens,
                         int64_t world) {
  const DType activation = precision.activation();
  const int64_t streams = ops::kHcStreams * config.hidden_size * dtype_bits(activation) / 8;
  const int64_t scores = 4 * score_floats(max_step_tokens, config.max_positions / 4 + 1);
  // A head in FP8 may stay whole where the vocabulary divides (slice_of()): then some MiB are counted and not taken.
  const int64_t head_parts = config.vocab_size % world == 0 ? world : 1;
  return arena_capacity(config, max_step_tokens, activation, head_parts) +
         static_cast<size_t>(round_up(max_step_tokens, world) * streams + max_step_tokens * config.vocab_size * 4 +
                             scores);
}

void Model::check_capacity(int64_t capacity) const {
  if (capacity < 0 || capacity > config_.max_positions) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("a sequence of {} tokens: this model takes at most {}", capacity, config_.max_positions));
  }
}

void Model::meet_ranks() {
  if (pool_->pages().is_sharded()) pool_->pages().reserve(1);
}

namespace {

// Of sharded pages and what has no pages neither can stand in for the other: each has room for all that it may be.
int64_t pages_of(const CacheSpec& spec, const CacheRoom& room) {
  return spec.page_bytes == 0 ? 0 : ceil_div(room.running + room.prefixes, spec.page_bytes);
}
int64_t unpaged_bytes(const CacheSpec& spec, const CacheRoom& room) {
  return std::min(room.most_running * spec.bytes(0), std::max(room.running, spec.bytes(0))) + room.prefixes;
}

}  // namespace

int64_t Model::reserved_bytes(const CacheRoom& room) const {
  if (!pool_->pages().is_sharded()) return Runner::reserved_bytes(room);
  return pool_->pages().bytes_for(pages_of(cache_spec_, room)) + unpaged_bytes(cache_spec_, room) +
         pool_->near_bytes(room.most_tokens);
}

void Model::reserve(const CacheRoom& room) {
  PagePool& pages = pool_->pages();
  if (pages.is_sharded()) {
    pages.reserve(std::max<int64_t>(pages_of(cache_spec_, room) - pages.num_used(), 0));
    executor_->memory().reserve(static_cast<size_t>(unpaged_bytes(cache_spec_, room)));
    return;
  }
  // Pages come by slabs, the last of which need not be full.
  const int64_t page_bytes = pages.shape().bytes(), slab = PagePool::pages_per_slab(page_bytes) * page_bytes;
  executor_->memory().reserve(static_cast<size_t>(room.running + room.prefixes + slab));
}

std::unique_ptr<SequenceState> Model::new_sequence(int64_t capacity) {
  check_capacity(capacity);
  const device::InterleavedMemory interleaved = executor_->interleave();
  reserve_scores(capacity);
  return std::make_unique<SequenceCaches>(*pool_, capacity);
}

std::unique_ptr<SequenceState> Model::restore(std::span<const uint8_t> bytes) {
  const device::InterleavedMemory interleaved = executor_->interleave();
  auto state = SequenceCaches::restore(*pool_, config_.max_positions, bytes);
  reserve_scores(state->capacity());
  return state;
}

std::unique_ptr<SequenceState> Model::resume(const StateSnapshot& snapshot, int64_t capacity) {
  check_capacity(capacity);
  const device::InterleavedMemory interleaved = executor_->interleave();
  reserve_scores(capacity);
  return SequenceCaches::resume(*pool_, capacity, snapshot);
}

std::unique_ptr<StateSnapshot> Model::restore_snapshot(std::span<const uint8_t> saved,
                                                       std::span<const std::span<const uint8_t>> pages) {
  const device::InterleavedMemory interleaved = executor_->interleave();
  return SequenceSnapshot::restore(*pool_, config_.max_positions, saved, pages);
}

// The indexer's scratch grows with the longest sequence, as does that for other ranks' entries, here, so that no step
// allocates.
void Model::reserve_scores(int64_t capacity) {
  pool_->reserve_near(capacity);
  const std::vector<LayerCacheLayout>& layers = pool_->layout().layers;
  const bool has_indexer =
      std::any_of(layers.begin(), layers.end(), [](const LayerCacheLayout& layer) { return layer.has_indexer; });
  const int64_t stride = capacity / 4 + 1;
  if (!has_indexer || stride <= score_stride_) return;
  // Where this throws, the old one serves on.
  const auto floats = static_cast<size_t>(score_floats(max_step_tokens_, stride));
  device::Buffer grown(floats * sizeof(float), executor_->memory());
  forget_recorded();  // they have the old one's address
  index_scores_ = std::move(grown);
  score_stride_ = stride;
}

// Only who asks for the logits of whole prompts wants as many rows as a step takes: pinned memory for them comes then.
// Where this throws, the old one serves on.
void Model::reserve_host_logits(int64_t rows) {
  const int64_t have = host_logits_.view().data == nullptr ? 0 : host_logits_.view().shape[0];
  if (rows <= have) return;
  const Shape shape{std::min(static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows))), max_step_tokens_),
                    config_.vocab_size};
  try {
    host_logits_ = device::Tensor(DType::kF32, shape, executor_->staging());
  } catch (const std::bad_alloc&) {
    fail(ErrorCode::kResourceExhausted,
         fmt::format("no pinned memory for {} of logits, of {} tokens of a step",
                     format_bytes(static_cast<uint64_t>(4 * shape.num_elements())), rows));
  }
}

int32_t Model::sample(const SampleRequest& request) {
  // A row of the last step is still where the ops compute. Logits may be anybody's: pointers into different arrays have
  // an order by std::less only, and no difference.
  const TensorView& ours = (host_logits_.view().data != nullptr ? host_logits_ : logits_).view();
  const float *row = request.logits.data(), *first = ours.as<float>(), *end = first + ours.shape.num_elements();
  const bool is_ours = !std::less<>()(row, first) && std::less<>()(row, end);
  return sample_->run(request, is_ours ? logits_.as<float>() + (row - first) : nullptr, workspace_.data());
}

}  // namespace tessera::model
