// SPDX-License-Identifier: Apache-2.0
#pragma once
// Who says which tokens may come next: a grammar, say. The engine asks before each draw and tells what was drawn.
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace tessera::engine {

// Of one choice of one request, on the engine's thread.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
  enum class Allowed { kAll, kSome, kNone };
  // The tokens that may be drawn now. `mask` [ops::mask_words(vocab)], zeroes: kSome sets bit id % 32 of word id / 32
  // for each; kAll and kNone leave it undefined. Where none may be, the choice ends as failed.
  virtual Allowed allowed(std::span<uint32_t> mask) = 0;
  // Where those tokens are all of one mask that others are held to as well: it, until the next drawn(). allowed() need
  // not be asked then, and a step has one mask for all. Else empty.
  virtual std::span<const uint32_t> shared_mask() const { return {}; }
  // What was drawn: one that was allowed.
  virtual void drawn(int32_t id) = 0;
  // Nothing may follow what was drawn: the choice has ended as by an end token.
  virtual bool has_ended() const = 0;
};

// Of a request: makes each choice its own. Requests share it, whatever thread they come from.
class ConstraintSource {
 public:
  virtual ~ConstraintSource() = default;
  virtual std::unique_ptr<TokenConstraint> begin() const = 0;
};

// A mask of all tokens but one.
std::vector<uint32_t> mask_without(int32_t id, int32_t vocab_size);

// Asks which tokens may be drawn: `mask` is made anew, empty where all may. Throws kInvalidArgument where none may.
void ask_constraint(TokenConstraint& constraint, int32_t vocab_size, std::vector<uint32_t>& mask);

}  // namespace tessera::engine
