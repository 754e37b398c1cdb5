// SPDX-License-Identifier: Apache-2.0
// A step of the model: what its slices are, what is queued of it, what comes of it.
#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "model/draw_check.h"
#include "model/model.h"

namespace tessera::model {

namespace {

constexpr int32_t kNotWanted = -1;  // logit row of a draw whose row the host doesn't want, until it has one

}  // namespace

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

bool Model::make_room(bool alone) {
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
  if (missing == 0) return true;
  if (alone && !pool_->pages().can_reserve_alone(missing)) return false;
  const device::InterleavedMemory interleaved = executor_->interleave();
  pool_->pages().reserve(missing);
  has_changed_states_ = true;
  for (size_t i = 0; i < slices_.states.size(); ++i) {
    slices_.states[i]->make_room(slices_.rows[i].first_position, end_of(slices_.rows[i]));
  }
  has_changed_states_ = false;  // who has room needs none again
  return true;
}

void Model::await_ranks(const StepContext& context) const {
  if (pool_->pages().is_sharded()) comm_->barrier(context.queue);
}

template <class Run>
auto Model::run_part(const Run& run) {
  try {
    return run();
  } catch (const std::exception& error) {
    num_queued_ = 0;
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

template <class Work>
void Model::queue_whole(bool is_draft, const Work& work) {
  run_part([&] {
    has_changed_states_ = false;
    if (is_queue_behind_) executor_->synchronize();
    is_queue_behind_ = false;
    make_room();
    queue_work(is_draft, work);
    queue_outcome();
  });
  num_queued_ = 1;
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
void Model::queue_work(bool is_draft, const Work& work) {
  if (comm_ != nullptr) comm_->begin_step(tracer_ == nullptr);
  const int64_t num_rows = recorded_rows();
  batch_->fill(slices_.rows, slices_.token_ids, slices_.logit_rows, slices_.draws, slices_.masks, num_rows);
  last_launched_ = nullptr;
  if (num_rows == 0) {
    has_changed_states_ = true;
    const StepContext step = context(false);
    await_ranks(step);
    return work(step);
  }
  if (recorded_version_ != pool_->version()) forget_recorded();
  recorded_version_ = pool_->version();
  const bool draws = !slices_.draws.empty();
  const auto is_it = [&](const Recorded& one) {
    return one.num_rows == num_rows && one.is_draft == is_draft && one.draws == draws;
  };
  auto found = std::find_if(recorded_.begin(), recorded_.end(), is_it);
  if (found == recorded_.end()) {
    recorded_.push_back({num_rows, is_draft, draws, executor_->record([&] {
                           const StepContext step = context(true);
                           await_ranks(step);
                           work(step);
                         })});
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

void Model::queue_outcome() {
  slices_.num_checked = batch_->num_logit_rows();
  turn_ = 1 - turn_;
  slices_.turn = turn_;
  device::MemorySpace& memory = executor_->memory();
  if (!memory.is_host()) {
    const TensorView logits = rows_of(logits_, 0, slices_.num_wanted);
    memory.queue_download(host_logits_.view().data, logits.data, static_cast<size_t>(logits.num_bytes()));
    memory.queue_download(host_outcomes_[turn_].view().data, outcomes_.as<int32_t>(),
                          static_cast<size_t>(slices_.num_checked + batch_->num_draws()) * sizeof(int32_t));
  }
  ends_[turn_]->set();
}

TensorView Model::read_outcome(const Slices& step) {
  device::MemorySpace& memory = executor_->memory();
  const bool is_host = memory.is_host(), goes_on = num_queued_ == 2;
  ends_[step.turn]->wait();
  if (comm_ != nullptr) comm_->end_step();
  const int32_t* outcomes = (is_host ? outcomes_ : host_outcomes_[step.turn]).as<int32_t>();
  for (size_t row = 0; row < step.logit_rows.size(); ++row) {
    if (outcomes[row] < 0) continue;
    std::string found = "not finite";
    if (!goes_on) {  // else the next step's may be there by now
      float value = 0;
      memory.download(&value, logits_.as<float>() + static_cast<int64_t>(row) * config_.vocab_size + outcomes[row],
                      sizeof(value));
      found = fmt::format("{}", value);
    }
    fail(ErrorCode::kNotFinite,
         fmt::format("logit {} at position {} is {}; run with --trace-op to find the first op whose output is not "
                     "finite",
                     outcomes[row], step.position(step.logit_rows[row]), found));
  }
  for (size_t i = 0; i < step.drawn.size(); ++i) {
    step.drawn[i]->token = outcomes[step.num_checked + static_cast<int64_t>(i)];
  }
  return rows_of(is_host ? logits_ : host_logits_, 0, step.num_wanted);
}

int64_t Model::Slices::position(int64_t row) const {
  const auto after = std::find_if(rows.begin(), rows.end(),
                                  [row](const SliceRows& slice) { return row < slice.first_row + slice.num_rows; });
  return after->first_position + row - after->first_row;
}

TensorView Model::step(std::span<const SequenceSlice> slices) {
  queue_step(slices);
  return finish_step();
}

void Model::queue_step(std::span<const SequenceSlice> slices) {
  TESSERA_CHECK(num_queued_ == 0, "one step after the other, but for queue_next()");
  read_slices(slices, false);
  queue_whole(false, [this](const StepContext& step) {
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
}

// The graph of the step that is queued, once more: it reads the batch, whose addresses stay, and of that all but the
// ids is known.
bool Model::queue_next(std::span<Draw* const> draws) {
  return run_part([&] {
    TESSERA_CHECK(num_queued_ == 1 && draws.size() == slices_.rows.size(), "a draw for each slice of one step");
    const bool is_drawn = slices_.drawn.size() == slices_.rows.size() && slices_.num_wanted == 0;
    if (!can_run_ahead() || last_launched_ == nullptr || !is_drawn) return false;
    for (size_t i = 0; i < slices_.rows.size(); ++i) {
      TESSERA_CHECK(draws[i]->mask.data() == slices_.drawn[i]->mask.data(), "the masks of the step before");
      if (slices_.rows[i].first_position + 2 > slices_.states[i]->capacity()) return false;
    }
    earlier_ = slices_;
    move_on(draws);
    if (!has_room_ahead()) {
      slices_ = earlier_;
      return false;
    }
    if (comm_ != nullptr) comm_->begin_step(true);
    const int32_t* drawn = outcomes_.as<int32_t>() + batch_->num_logit_rows();
    batch_->fill(slices_.rows, slices_.token_ids, slices_.logit_rows, slices_.draws, slices_.masks, batch_->num_rows());
    batch_->take_ids(drawn, static_cast<int64_t>(slices_.rows.size()));
    last_launched_->launch();
    queue_outcome();
    num_queued_ = 2;
    return true;
  });
}

void Model::move_on(std::span<Draw* const> draws) {
  for (size_t i = 0; i < slices_.rows.size(); ++i) {
    ++slices_.rows[i].first_position;
    slices_.token_ids[i] = 0;  // until the one that was drawn takes its place
    slices_.draws[i].params = draws[i]->params, slices_.draws[i].position = draws[i]->position;
    slices_.drawn[i] = draws[i];
  }
}

bool Model::has_room_ahead() {
  bool has_room = true;
  try {
    has_room = make_room(true);  // the other ranks do not know of the step yet
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kResourceExhausted) throw;
    has_room = false;
  }
  has_changed_states_ = true;  // by the step that is queued
  TESSERA_CHECK(recorded_version_ == pool_->version(), "pages change no address that was recorded");
  return has_room;
}

TensorView Model::finish_step() {
  TESSERA_CHECK(num_queued_ > 0, "a step that was queued");
  const Slices& step = num_queued_ == 2 ? earlier_ : slices_;
  const TensorView logits = run_part([&] {
    // What was queued ahead may long have ended; what stalls counts from when somebody waits for it.
    if (comm_ != nullptr) comm_->begin_step(tracer_ == nullptr);
    return read_outcome(step);
  });
  --num_queued_;
  for (size_t i = 0; i < step.states.size(); ++i) step.states[i]->advance(step.rows[i].num_rows);
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
  queue_blocks(context, streams);
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
  TESSERA_CHECK(num_queued_ == 0, "the draft follows a step that has ended");
  read_slices(slices, true);
  for (size_t i = 0; i < slices_.states.size(); ++i) {
    const SliceRows& slice = slices_.rows[i];
    TESSERA_CHECK(slice.first_position + slice.num_rows == slices_.states[i]->position(),
                  "the draft block follows every step with the same slices");
  }
  TESSERA_CHECK(num_step_rows_ == static_cast<int64_t>(slices_.token_ids.size()), "draft() follows step()");
  queue_whole(true, [this](const StepContext& step) {
    const TensorView next = embed(step, 0, step.take_rows(config_.hidden_size), 1);
    const TensorView streams = draft_->run(step, blocks_.size(), rows_of(streams_buffer_, 0, step.num_tokens()), next);
    queue_head(step, draft_->head(), streams);
  });
  const TensorView logits = run_part([this] { return read_outcome(slices_); });
  num_queued_ = 0;
  for (size_t i = 0; i < slices_.states.size(); ++i) slices_.states[i]->advance_draft(slices_.rows[i].num_rows);
  return logits;
}

}  // namespace tessera::model
