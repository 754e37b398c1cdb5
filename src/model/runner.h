// SPDX-License-Identifier: Apache-2.0
#pragma once
// The narrow waist between the model and whoever decides what to run: token ids in, logits out. One runner serves many
// sequences; a step takes several tokens of several sequences. Not thread-safe: one step at a time.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/cache_spec.h"
#include "model/trace.h"
#include "ops/sample/sample.h"
#include "tensor/tensor_view.h"

namespace tessera::model {

using ops::SamplingParams;

struct ModelFacts {
  int32_t vocab_size = 0;
  int64_t max_positions = 0;  // longest sequence the model was made for
  int32_t bos_id = 0;
  std::vector<int32_t> eos_ids;
  int num_draft_layers = 0;  // MTP blocks that draft() can run: 0 or 1
  std::string precision;     // "a16 x fp8"
  int64_t weight_bytes = 0;  // as held in memory
  // Of weights, config, precision and the variants that compute: what the bits of a state follow from besides its
  // tokens, this program's build and the machine. No spaces.
  std::string state_identity;
};

// A point of a sequence to which it can be rolled back. Belongs to the sequence that made it.
class StateMark {
 public:
  virtual ~StateMark() = default;
  virtual int64_t position() const = 0;
};

// A point of a sequence from which others go on, of any capacity. It has a copy of what later tokens overwrite (of the
// rings what the next token attends, compressor states), and shares the pages in which entries lie with whoever else
// has them: none of these changes them. It must not outlive its runner.
class StateSnapshot {
 public:
  virtual ~StateSnapshot() = default;
  // Tokens seen.
  virtual int64_t position() const = 0;
  // Memory that it shares with nobody: at most CacheSpec::snapshot_bytes.
  virtual int64_t own_bytes() const = 0;
  // Its pages, CacheSpec::page_bytes each, by numbers that stand for the same page as long as somebody has it.
  virtual std::span<const int32_t> pages() const = 0;
  // What it has besides its pages, and the n-th of those in CacheSpec::page_bytes bytes, for Runner::restore_snapshot.
  // The same point of the same tokens gives the same bytes, and nothing of what somebody else left in a page.
  virtual std::vector<uint8_t> save() const = 0;
  virtual void save_page(size_t n, std::span<uint8_t> out) const = 0;
};

// All that a sequence is between steps: window rings, compressed entries, indexer keys, compressor states, position.
class SequenceState {
 public:
  virtual ~SequenceState() = default;
  // Tokens processed so far; the next token has this position.
  virtual int64_t position() const = 0;
  // Tokens that fit (given to new_sequence).
  virtual int64_t capacity() const = 0;
  // An independent copy; both continue bitwise as one would have. They share what neither changes.
  virtual std::unique_ptr<SequenceState> fork() const = 0;
  // This point, for Runner::resume. Throws as new_sequence where memory ends.
  virtual std::unique_ptr<StateSnapshot> snapshot() const = 0;
  // Marks this point; rollback() returns to it and drops every token after it. Marks after the point become void.
  virtual std::unique_ptr<StateMark> mark() const = 0;
  virtual void rollback(const StateMark& mark) = 0;
  // A self-describing copy of the bytes, for Runner::restore on a runner of the same model and precision.
  virtual std::vector<uint8_t> save() const = 0;
};

enum class LogitRows { kNone, kLast, kAll };

// Different masks that the draws of one step may have; what lies at the same place is one mask.
inline constexpr int64_t kMaxMasksPerStep = 256;

// A token that a step draws from the logits after a slice's last token, where they were computed. What needs more than
// these parameters (penalties, bias) is drawn by sample().
struct Draw {
  SamplingParams params{};  // penalties do nothing
  uint64_t position = 0;    // of the token
  // [ops::mask_words(vocab)] of the tokens that may be drawn, bit id % 32 of word id / 32; empty: all.
  std::span<const uint32_t> mask{};
  int32_t token = -1;  // out; -1 where no logit is a number
};

// Consecutive new tokens of one sequence. A state appears at most once in a step.
struct SequenceSlice {
  SequenceState* state = nullptr;
  std::span<const int32_t> ids;
  LogitRows logits = LogitRows::kLast;  // to the host: rows of the whole vocabulary
  Draw* draw = nullptr;                 // null: none. Costs no row
};

struct SampleRequest {
  // One row; not changed. Drawing from a row that step() or draft() just returned costs no copy of it to the device.
  std::span<const float> logits;
  SamplingParams params{};
  uint64_t position = 0;                // of the token to draw
  std::span<const int32_t> counts{};    // [vocab] occurrences so far, for penalties; empty: none
  std::span<const int32_t> bias_ids{};  // logit bias
  std::span<const float> bias_values{};
  std::span<const uint32_t> mask{};  // as of a Draw
};

class Runner {
 public:
  virtual ~Runner() = default;
  virtual const ModelFacts& facts() const = 0;
  virtual const CacheSpec& cache_spec() const = 0;
  // Most tokens that one step takes over all its slices, and so the chunk length of a prefill.
  virtual int64_t max_step_tokens() const = 0;

  // A number that all pages taken and given back so far have made, where ranks share them: the same on all of them.
  virtual uint64_t page_history() const { return 0; }
  // All ranks call it once they have loaded: makes what they reach of each other's memory, which the first step would
  // else. Throws kUnsupported, on every rank alike, where one does not reach another's. Nothing for one rank.
  virtual void meet_ranks() {}
  // Sequences and snapshots that stay within the room take no more memory of a device from now on; all ranks call it
  // together, with the same room. Throws kResourceExhausted where it has not so much, where ranks share caches on all
  // of them alike. On a CPU memory is taken as it is used.
  virtual void reserve(const CacheRoom& /*room*/) {}
  // Bytes that this rank does not have yet and would take then; of sharded caches all that goes with them.
  virtual int64_t reserved_bytes(const CacheRoom& room) const { return room.running + room.prefixes; }

  // An empty sequence that may grow to `capacity` tokens; entries of its caches take memory as it grows. Throws
  // kInvalidArgument above max_positions, std::bad_alloc (a GPU's: kResourceExhausted) where memory ends.
  virtual std::unique_ptr<SequenceState> new_sequence(int64_t capacity) = 0;
  // The inverse of save(). Throws kDataLoss where the bytes are of another model, precision or version, or damaged,
  // kResourceExhausted where memory ends.
  virtual std::unique_ptr<SequenceState> restore(std::span<const uint8_t> bytes) = 0;

  // A sequence that has seen what the snapshot, one of this runner's, has seen, and continues bitwise as the one it was
  // taken of would have. Throws as new_sequence, kInvalidArgument also where the capacity is below its position.
  virtual std::unique_ptr<SequenceState> resume(const StateSnapshot& snapshot, int64_t capacity) = 0;

  // The inverse of StateSnapshot::save and save_page, of all its pages in order; it has pages of its own. Throws
  // kDataLoss where sizes or model do not fit (damage inside them is the caller's to exclude), and as new_sequence
  // where memory ends: nothing has changed then.
  virtual std::unique_ptr<StateSnapshot> restore_snapshot(std::span<const uint8_t> saved,
                                                          std::span<const std::span<const uint8_t>> pages) = 0;

  // Runs the slices' tokens and their draws. Returns FP32 logits [rows, vocab] in host memory, the slices' requested
  // rows in order; valid until the next call. Throws, with the states as they were, kInvalidArgument for ids out of
  // range or a full sequence and kResourceExhausted where memory ends; throws kNotFinite for logits that are not
  // finite: then the states are as before the call only as far as positions go, drop them.
  virtual TensorView step(std::span<const SequenceSlice> slices) = 0;

  // A step in two halves, so that the next one can be queued before anybody knows what this one drew. Between them no
  // call but these three, and none of the states either, but that those which no queued step has may be destroyed;
  // sequences that turn out to have ended are run along. False: step() alone is to be used.
  virtual bool can_run_ahead() const { return false; }
  // step(), up to where it waits. Throws as step(), and nothing is queued then.
  virtual void queue_step(std::span<const SequenceSlice> slices);
  // Behind the one step that is queued, the next: of each slice the token that its draw gives, and the draw draws[i]
  // after that, whose mask is the same words. False, and nothing has changed, where that step gives rows to the host,
  // has more tokens than one of a sequence or one that is not drawn from, or was not recorded, where a sequence is full
  // or memory ends, and on several ranks where it has more masks than others are told. Throws as step(): then nothing
  // is queued any more.
  virtual bool queue_next(std::span<Draw* const> draws);
  // The rest of step(), of the first step that is queued. Where it throws nothing is queued any more: the states have
  // not seen the next step's tokens either, as far as positions go.
  virtual TensorView finish_step();

  // Runs the draft block (MTP) on the tokens of the step just made: the same slices, with ids[i] the token that
  // follows slice token i. Returns logits for the token after that. Throws kUnsupported without a draft block.
  virtual TensorView draft(std::span<const SequenceSlice> slices) = 0;

  // Draws one token from a row of logits (ops/sample): the token that a step's draw would have been. Throws kNotFinite
  // where no allowed logit is a number.
  virtual int32_t sample(const SampleRequest& request) = 0;

  // Null: none. Tracing makes steps slower and changes no value.
  virtual void set_tracer(Tracer* tracer) = 0;
};

}  // namespace tessera::model
