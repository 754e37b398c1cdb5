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
#include "model/draw_check.h"
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

constexpr int32_t kNotWanted = -1;  // logit row of a draw whose row the host doesn't want, until it has one

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
  cache_spec_ = make_cache_spec(layout);
  facts_.num_draft_layers = layout.num_draft_layers;
  pool_ = std::make_unique<CachePool>(std::move(layout), memory);

  workspace_ = device::Buffer(static_cast<size_t>(builder.workspace_bytes), memory);
  streams_buffer_ = device::Tensor(
      activation, {round_up(max_step_tokens, weights.shard().world), ops::kHcStreams, config.hidden_size}, memory);
  logits_ = device::Tensor(DType::kF32, {max_step_tokens, config.vocab_size}, memory);
  outcomes_ = device::Tensor(DType::kI32, {2 * max_step_tokens}, memory);
  if (!memory.is_host()) {
    reserve_host_logits(std::min(max_step_tokens, kHostLogitRows));
    host_outcomes_ = device::Tensor(DType::kI32, outcomes_.view().shape, executor_->staging());
  }
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

void Model::reserve(int64_t bytes) {
  // Pages come by slabs, the last of which need not be full.
  const int64_t page_bytes = pool_->pages().page_bytes(), slab = PagePool::pages_per_slab(page_bytes) * page_bytes;
  executor_->memory().reserve(static_cast<size_t>(bytes + slab));
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

// The indexer's scratch grows with the longest sequence, here, so that no step allocates.
void Model::reserve_scores(int64_t capacity) {
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

void Model::read_slices(std::span<const SequenceSlice> slices, bool is_draft) {
  slices_.rows.clear(), slices_.states.clear(), slices_.token_ids.clear(), slices_.logit_rows.clear();
  slices_.draws.clear(), slices_.drawn.clear(), slices_.masks.clear();
  check_draws(slices, facts_.vocab_size);
  for (const SequenceSlice& slice : slices) {
    SequenceCaches* state = dynamic_cast<SequenceCaches*>(slice.state);
    TESSERA_CHECK(state != nullptr && &state->pool() == pool_.get(), "a state belongs to the runner that made it");
    const int64_t first_row = static_cast<int64_t>(slices_.token_ids.size());
    const int64_t count = static_cast<int64_t>(slice.ids.size());
    const int64_t position = is_draft ? state->draft_position() : state->position();
    TESSERA_CHECK(first_row + count <= max_step_tokens_,
                  fmt::format("a step takes at most {} tokens", max_step_tokens_));
    if (position + count > state->capacity()) {
      fail(ErrorCode::kInvalidArgument, fmt::format("the sequence holds {} tokens; {} more exceed its capacity of {}",
                                                    position, count, state->capacity()));
    }
    slices_.rows.push_back({state->place(), first_row, count, position});
    slices_.states.push_back(state);
    for (int64_t i = 0; i < count; ++i) {
      const int32_t id = slice.ids[static_cast<size_t>(i)];
      if (id < 0 || id >= config_.vocab_size) {
        fail(ErrorCode::kInvalidArgument,
             fmt::format("token id {}: this model has ids 0 to {}", id, config_.vocab_size - 1));
      }
      slices_.token_ids.push_back(id);
      if (slice.logits == LogitRows::kAll || (slice.logits == LogitRows::kLast && i + 1 == count)) {
        slices_.logit_rows.push_back(static_cast<int32_t>(first_row + i));
      }
    }
    if (slice.draw == nullptr) continue;
    const bool is_wanted = slice.logits != LogitRows::kNone;
    slices_.drawn.push_back(slice.draw);
    const std::span<const uint32_t> mask = slice.draw->mask;
    const auto same = std::find_if(slices_.masks.begin(), slices_.masks.end(),
                                   [&](std::span<const uint32_t> one) { return one.data() == mask.data(); });
    slices_.draws.push_back({slice.draw->params, slice.draw->position,
                             is_wanted ? static_cast<int32_t>(slices_.logit_rows.size()) - 1 : kNotWanted,
                             mask.empty() ? -1 : static_cast<int32_t>(same - slices_.masks.begin())});
    if (!mask.empty() && same == slices_.masks.end()) slices_.masks.push_back(mask);
  }
  slices_.num_wanted = static_cast<int64_t>(slices_.logit_rows.size());
  if (!executor_->memory().is_host()) reserve_host_logits(slices_.num_wanted);
  size_t next = 0;  // draw
  for (size_t i = 0; i < slices.size(); ++i) {
    if (slices[i].draw == nullptr) continue;
    int32_t& logit_row = slices_.draws[next++].logit_row;
    if (logit_row != kNotWanted) continue;
    logit_row = static_cast<int32_t>(slices_.logit_rows.size());
    slices_.logit_rows.push_back(static_cast<int32_t>(slices_.rows[i].first_row + slices_.rows[i].num_rows - 1));
  }
}

void Model::make_room() {
  int64_t missing = 0;
  std::vector<int32_t>& shared = slices_.shared_pages;
  shared.clear();
  const auto end_of = [](const SliceRows& slice) { return slice.first_position + slice.num_rows; };
  for (size_t i = 0; i < slices_.states.size(); ++i) {
    missing += slices_.states[i]->pages_missing(slices_.rows[i].first_position, end_of(slices_.rows[i]), shared);
  }
  // Of the owners of a page that all write into it, the last one finds itself its only owner.
  std::sort(shared.begin(), shared.end());
  for (auto first = shared.begin(); first != shared.end();) {
    const auto end = std::upper_bound(first, shared.end(), *first);
    missing += std::min<int64_t>(end - first, pool_->pages().owners(*first) - 1);
    first = end;
  }
  if (missing == 0) return;
  const device::InterleavedMemory interleaved = executor_->interleave();
  pool_->pages().reserve(missing);
  has_changed_states_ = true;
  for (size_t i = 0; i < slices_.states.size(); ++i) {
    slices_.states[i]->make_room(slices_.rows[i].first_position, end_of(slices_.rows[i]));
  }
  has_changed_states_ = false;  // who has room needs none again
}

template <class Run>
TensorView Model::run_whole(const Run& run) {
  has_changed_states_ = false;
  try {
    if (is_queue_behind_) executor_->synchronize();
    is_queue_behind_ = false;
    make_room();
    return run();
  } catch (const std::exception& error) {
    // What is still queued reads the batch where the next step's is about to be written.
    try {
      is_queue_behind_ = true;
      executor_->synchronize();
      is_queue_behind_ = false;
      if (comm_ != nullptr) comm_->end_step();
    } catch (const std::exception&) {
      // The next step waits first.
    }
    const auto* ours = dynamic_cast<const Error*>(&error);
    if (ours == nullptr || ours->code() != ErrorCode::kResourceExhausted || !has_changed_states_) throw;
    fail(ErrorCode::kDeviceError, std::string("in the middle of a step: ") + error.what());
  }
}

int64_t Model::recorded_rows() const {
  const size_t num_rows = slices_.token_ids.size();
  const bool is_decode =
      num_rows > 0 && num_rows == slices_.logit_rows.size() &&
      std::all_of(slices_.rows.begin(), slices_.rows.end(), [](const SliceRows& slice) { return slice.num_rows == 1; });
  if (!executor_->can_record() || tracer_ != nullptr || !is_decode) return 0;
  return std::min(static_cast<int64_t>(std::bit_ceil(num_rows)), max_step_tokens_);
}

StepContext Model::context(bool is_recorded) {
  arena_.reset_to(0);
  return {.queue = executor_->queue(),
          .arena = arena_,
          .workspace = workspace_.data(),
          .tracer = tracer_,
          .batch = *batch_,
          .caches = *pool_,
          .index_scores = index_scores_.as<float>(),
          .num_scores = static_cast<int64_t>(index_scores_.size() / sizeof(float)),
          .score_stride = score_stride_,
          .is_recorded = is_recorded,
          .activation = precision_.activation()};
}

template <class Work>
void Model::queue_step(bool is_draft, const Work& work) {
  if (comm_ != nullptr) comm_->begin_step(tracer_ == nullptr);
  const int64_t num_rows = recorded_rows();
  batch_->fill(slices_.rows, slices_.token_ids, slices_.logit_rows, slices_.draws, slices_.masks, num_rows);
  last_launched_ = nullptr;
  if (num_rows == 0) {
    has_changed_states_ = true;
    return work(context(false));
  }
  if (recorded_version_ != pool_->version()) forget_recorded();
  recorded_version_ = pool_->version();
  const bool draws = !slices_.draws.empty();
  const auto is_it = [&](const Recorded& one) {
    return one.num_rows == num_rows && one.is_draft == is_draft && one.draws == draws;
  };
  auto found = std::find_if(recorded_.begin(), recorded_.end(), is_it);
  if (found == recorded_.end()) {
    recorded_.push_back({num_rows, is_draft, draws, executor_->record([&] { work(context(true)); })});
    found = std::prev(recorded_.end());
  }
  last_launched_ = found->work.get();
  last_launched_->launch();  // all of it or nothing
  has_changed_states_ = true;
}

TensorView Model::embed(const StepContext& context, int64_t first, const TensorView& out, int64_t streams) const {
  const ops::Bound<ops::Embedding>& op = streams == 1 ? embed_rows_ : embed_streams_;
  const TensorView weight{const_cast<void*>(embedding_.view.data), op.desc.weight, {op.desc.vocab, op.desc.hidden}};
  op.run({.weight = weight, .ids = context.batch.token_ids() + first, .num_tokens = out.shape[0], .out = out},
         context.queue);
  context.trace("embed", "", out);
  return out;
}

void Model::queue_head(const StepContext& context, const OutputHead& head, const TensorView& streams) {
  const int64_t rows = context.batch.num_logit_rows();
  head.run(context, projection_, streams, context.batch.logit_rows(), rows, rows_of(logits_, 0, rows));
  // One pass over what leaves the model: a NaN must not become a token.
  finite_check_.run({.values = logits_.as<float>(), .first_bad = outcomes_.as<int32_t>(), .num_rows = rows},
                    context.queue);
  const int64_t num_draws = context.batch.num_draws();
  if (num_draws == 0) return;
  sample_->queue(logits_.as<float>(), context.batch.draws(), context.batch.masks(), num_draws,
                 outcomes_.as<int32_t>() + rows, context.workspace);
}

TensorView Model::read_outcome() {
  device::MemorySpace& memory = executor_->memory();
  const int64_t num_rows = batch_->num_logit_rows(), vocab = config_.vocab_size;
  TensorView logits = rows_of(logits_, 0, slices_.num_wanted);
  const int32_t* outcomes = outcomes_.as<int32_t>();
  if (!memory.is_host()) {
    const TensorView on_host = rows_of(host_logits_, 0, slices_.num_wanted);
    memory.queue_download(on_host.data, logits.data, static_cast<size_t>(logits.num_bytes()));
    memory.queue_download(host_outcomes_.view().data, outcomes,
                          static_cast<size_t>(num_rows + batch_->num_draws()) * sizeof(int32_t));
    logits = on_host;
    outcomes = host_outcomes_.as<int32_t>();
  }
  executor_->synchronize();
  if (comm_ != nullptr) comm_->end_step();
  for (size_t row = 0; row < slices_.logit_rows.size(); ++row) {
    if (outcomes[row] < 0) continue;
    float value = 0;
    memory.download(&value, logits_.as<float>() + static_cast<int64_t>(row) * vocab + outcomes[row], sizeof(value));
    fail(ErrorCode::kNotFinite,
         fmt::format("logit {} at position {} is {}; run with --trace-op to find the first op whose output is not "
                     "finite",
                     outcomes[row], batch_->position(slices_.logit_rows[row]), value));
  }
  for (size_t i = 0; i < slices_.drawn.size(); ++i)
    slices_.drawn[i]->token = outcomes[num_rows + static_cast<int64_t>(i)];
  return logits;
}

TensorView Model::step(std::span<const SequenceSlice> slices) {
  read_slices(slices, false);
  const TensorView logits = run_whole([this] {
    queue_step(false, [this](const StepContext& step) {
      const TensorView streams = rows_of(streams_buffer_, 0, step.num_tokens());
      StepContext cut = step;
      cut.run = run_of(step);
      if (cut.run.is_cut()) {
        queue_cut_blocks(cut);
      } else {
        queue_blocks(step, embed(step, 0, streams, ops::kHcStreams));
      }
      queue_head(step, *head_, streams);
    });
    num_step_rows_ = static_cast<int64_t>(slices_.token_ids.size());
    return read_outcome();
  });
  for (size_t i = 0; i < slices_.states.size(); ++i) slices_.states[i]->advance(slices_.rows[i].num_rows);
  return logits;
}

void Model::queue_blocks(const StepContext& context, const TensorView& streams) const {
  const ArenaScope scope(context.arena);
  Block::Handover handover = blocks_.front()->take_handover(context);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    blocks_[i]->run(context, i, streams, i + 1 < blocks_.size() ? blocks_[i + 1].get() : nullptr, handover);
  }
}

TokenRun Model::run_of(const StepContext& context) const {
  const bool are_few = context.num_tokens() < fewest_tokens_to_cut_;
  if (comm_ == nullptr || comm_->world() == 1 || are_few || context.is_recorded || tracer_ != nullptr) return {};
  return cut_tokens(*comm_, context.num_tokens());
}

void Model::queue_cut_blocks(const StepContext& context) const {
  const ArenaScope scope(context.arena);
  const TokenRun& run = context.run;
  const TensorView own = context.take(context.activation, {run.rows, ops::kHcStreams, config_.hidden_size});
  const TensorView streams = embed(context, run.first, rows_of(own, 0, run.count), ops::kHcStreams);
  for (size_t i = 0; i < blocks_.size(); ++i) blocks_[i]->run(context, i, streams);
  const bool are_read = context.batch.num_logit_rows() > 0 || draft_ != nullptr;
  if (are_read) comm_->all_gather(own, rows_of(streams_buffer_, 0, run.all_rows()), context.queue);
}

void Model::prepare(std::span<const SequenceSlice> slices) {
  read_slices(slices, false);
  make_room();
  last_launched_ = nullptr;
  const int64_t num_rows = recorded_rows();
  is_prepared_to_record_ = num_rows > 0;
  batch_->fill(slices_.rows, slices_.token_ids, slices_.logit_rows, {}, {}, num_rows);
}

void Model::queue_layer(size_t layer, const TensorView& streams) {
  TESSERA_CHECK(layer < blocks_.size(), "draft blocks have another input");
  TESSERA_CHECK(streams.shape[0] == batch_->num_rows(), "streams of the batch");
  blocks_[layer]->run(context(is_prepared_to_record_), layer, streams);
}

bool Model::repeat_step(int64_t times) {
  if (last_launched_ == nullptr || recorded_version_ != pool_->version()) return false;
  if (comm_ != nullptr) comm_->begin_step(true);
  is_queue_behind_ = true;
  for (int64_t i = 0; i < times; ++i) last_launched_->launch();
  executor_->synchronize();
  is_queue_behind_ = false;
  if (comm_ != nullptr) comm_->end_step();
  return true;
}

void Model::run_layer(size_t layer, std::span<const SequenceSlice> slices, const TensorView& streams) {
  is_prepared_to_record_ = false;
  read_slices(slices, false);
  make_room();
  last_launched_ = nullptr;
  batch_->fill(slices_.rows, slices_.token_ids, slices_.logit_rows, {}, {});
  device::MemorySpace& memory = executor_->memory();
  const TensorView placed = rows_of(streams_buffer_, 0, batch_->num_rows());
  const size_t bytes = static_cast<size_t>(placed.num_bytes());
  memory.upload(placed.data, streams.data, bytes);
  queue_layer(layer, placed);
  memory.download(streams.data, placed.data, bytes);
}

TensorView Model::draft(std::span<const SequenceSlice> slices) {
  if (draft_ == nullptr) fail(ErrorCode::kUnsupported, "this model was loaded without a draft block");
  read_slices(slices, true);
  for (size_t i = 0; i < slices_.states.size(); ++i) {
    const SliceRows& slice = slices_.rows[i];
    TESSERA_CHECK(slice.first_position + slice.num_rows == slices_.states[i]->position(),
                  "the draft block follows every step with the same slices");
  }
  TESSERA_CHECK(num_step_rows_ == static_cast<int64_t>(slices_.token_ids.size()), "draft() follows step()");
  const TensorView logits = run_whole([this] {
    queue_step(true, [this](const StepContext& step) {
      const TensorView next = embed(step, 0, step.take_rows(config_.hidden_size), 1);
      const TensorView streams =
          draft_->run(step, blocks_.size(), rows_of(streams_buffer_, 0, step.num_tokens()), next);
      queue_head(step, draft_->head(), streams);
    });
    return read_outcome();
  });
  for (size_t i = 0; i < slices_.states.size(); ++i) slices_.states[i]->advance_draft(slices_.rows[i].num_rows);
  return logits;
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
