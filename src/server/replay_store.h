// SPDX-License-Identifier: Apache-2.0
#pragma once
// Exact replay of tool calls. A client sends past calls back as JSON; written anew they may differ from what the model
// sampled (spacing, the order of keys, 1.0 and 1), and then the prompt's cached prefix ends there. So the sampled text
// is remembered by the calls' ids and put back, where the client's calls still mean the same.
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "server/answer.h"
#include "text/chat/message.h"

namespace tessera::server {

class ReplayStore {
 public:
  // Keeps at most `max_bytes` of text and bookkeeping; the answers that were used longest ago go first.
  explicit ReplayStore(size_t max_bytes) : max_bytes_(max_bytes) {}

  // Remembers a finished answer with calls. `owner` separates clients (an API key's hash, the cache salt): ids of one
  // mean nothing for another. Answers that the encoder could not give back byte for byte are not kept: those with a
  // fault, those that were cut off, and those that only a stop ended. An answer that ended with the one call that is
  // allowed is: the block's end is added.
  void remember(const std::string& owner, bool starts_in_reasoning, const FinishedAnswer& answer);

  // Fills in sampled_calls of assistant messages whose calls are exactly those of one remembered answer: the same ids
  // in the same order, the same names, and arguments that are equal as JSON values. Reasoning that was remembered is
  // put back where the message has none, since clients of other APIs drop it and the chat format keeps it.
  void restore(const std::string& owner, std::vector<text::Message>& messages);

  // What is held now, and how often restore found an answer or did not know an id.
  struct Stats {
    size_t num_answers = 0, num_bytes = 0;
    uint64_t num_hits = 0, num_misses = 0;
  };
  Stats stats() const;

 private:
  struct Record {
    std::vector<std::string> keys;  // owner and id of each call
    std::vector<AnswerCall> calls;
    std::string reasoning, sampled_calls;
    size_t num_bytes() const;
  };
  using Records = std::list<Record>;

  const Record* find_locked(const std::string& owner, const text::Message& message);
  void forget_locked(Records::iterator record);

  const size_t max_bytes_;
  mutable std::mutex mutex_;
  Records records_;  // used last first
  std::unordered_map<std::string, Records::iterator> by_key_;
  size_t num_bytes_ = 0;
  uint64_t num_hits_ = 0, num_misses_ = 0;
};

}  // namespace tessera::server
