// SPDX-License-Identifier: Apache-2.0
// One step ahead: behind a step whose draws only the device knows, the next is queued, where it can be nothing but the
// same sequences' next tokens. What came of the first is then delivered while the next one computes. Who has ended is
// run along once more, and leaves after that.
#include <algorithm>
#include <exception>

#include "base/error.h"
#include "engine/step_loop_parts.h"

namespace tessera::engine {

// The step under way draws all of its tokens by itself, and every consumer has room for two.
bool StepLoop::knows_next() const noexcept {
  for (const Running& slice : running_) {
    Live* live = nullptr;
    const Choice* choice = find(slice.key, live);
    if (choice == nullptr || !slice.is_decode || slice.rows != model::LogitRows::kNone || slice.draw == nullptr ||
        choice->constraint != nullptr) {
      return false;
    }
    try {
      if (live->sink->room() < 2 * live->num_open) return false;
    } catch (const std::exception&) {
      return false;  // it is asked again before the next step
    }
  }
  return true;
}

// The slices of the step after the one under way. False: it is not known, or there is no memory for them.
bool StepLoop::prepare_ahead() noexcept {
  try {
    if (!knows_next() || scheduler_.grow_ahead() != static_cast<int64_t>(running_.size())) return false;
    leaving_.reserve(running_.size());  // who ends needs no memory to leave
    for (const Running& slice : running_) {
      Live* live = nullptr;
      const Choice& choice = *find(slice.key, live);
      Running next = slice;
      ++next.first;
      model::Draw& draw =
          ahead_draws_.emplace_back(*choice.sampler.draw_in_step(static_cast<int64_t>(choice.ids.size()) + 1));
      draw.mask = slice.draw->mask;  // of all the request's tokens
      next.draw = &draw;
      next_draws_.push_back(&draw);
      ahead_.push_back(next);
    }
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void StepLoop::queue_ahead() {
  forget_ahead();
  is_ahead_ = prepare_ahead() && runner_.queue_next(next_draws_);
}

const StepLoop::Running* StepLoop::find_ahead(SequenceKey key) const {
  const auto found =
      std::find_if(ahead_.begin(), ahead_.end(), [key](const Running& slice) { return slice.key == key; });
  return is_ahead_ && found != ahead_.end() ? &*found : nullptr;
}

void StepLoop::take_up_ahead() {
  running_.swap(ahead_), draws_.swap(ahead_draws_), slices_.clear();
  stats_.num_decode_tokens = static_cast<int64_t>(running_.size());
  forget_ahead();
}

void StepLoop::forget_ahead() noexcept {
  ahead_.clear(), ahead_draws_.clear(), next_draws_.clear();
  is_ahead_ = false;
}

// For who leaves the loop: what is queued ends, and nobody learns what it drew.
void StepLoop::drop_ahead() noexcept {
  try {
    if (is_ahead_) runner_.finish_step();
  } catch (const std::exception&) {
    // Nothing is queued after it.
  }
  forget_ahead();
  leaving_.clear();
}

int64_t StepLoop::leaving_bytes() const {
  int64_t bytes = 0;
  for (const Leaving& one : leaving_) {
    bytes += budget_.bytes(one.num_tokens, one.state->capacity());
  }
  return bytes;
}

// Nothing that runs them is queued any more: whoever has ended is never in a step that is queued after that.
void StepLoop::part_with_leaving(bool has_run) noexcept {
  for (const Leaving& one : leaving_) {
    if (options_.prefixes == nullptr) break;
    try {
      if (!has_run) {
        options_.prefixes->forget(*one.request, one.ids);
      } else if (one.is_offered) {
        TESSERA_CHECK(one.state->position() == static_cast<int64_t>(one.ids.size()), "all of its tokens have run");
        options_.prefixes->offer(*one.request, one.ids, *one.state);
      }
    } catch (const std::exception&) {
      // Its request has its answer.
    }
  }
  leaving_.clear();
}

}  // namespace tessera::engine
