// SPDX-License-Identifier: Apache-2.0
#include "server/replay_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/json.h"
#include "text/chat/markers.h"

namespace tessera::server {

namespace {

// Room that a call takes beside its texts: an entry of the map, a node of the list.
constexpr size_t kOverheadBytes = 256;

// Equal as JSON values: whatever order the keys have, and 1 is 1.0.
bool is_same(const Json& a, const Json& b) {
  using Kind = Json::Kind;
  const auto is_number = [](const Json& value) { return value.kind() == Kind::kInt || value.kind() == Kind::kDouble; };
  if (is_number(a) && is_number(b)) {
    return a.kind() == b.kind() && a.kind() == Kind::kInt ? a.integer() == b.integer() : a.number() == b.number();
  }
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kBool:
      return a.boolean() == b.boolean();
    case Kind::kBigInt:
      return a.big_integer() == b.big_integer();
    case Kind::kString:
      return a.string() == b.string();
    case Kind::kArray:
      return std::equal(a.array().begin(), a.array().end(), b.array().begin(), b.array().end(), is_same);
    case Kind::kObject: {
      // Sorted, so that many keys take no time squared. Keys are unique.
      const auto sorted = [](const Json& value) {
        std::vector<const Json::Member*> members;
        for (const Json::Member& member : value.object()) members.push_back(&member);
        std::sort(members.begin(), members.end(), [](const auto* x, const auto* y) { return x->first < y->first; });
        return members;
      };
      const auto left = sorted(a), right = sorted(b);
      return std::equal(left.begin(), left.end(), right.begin(), right.end(), [](const auto* x, const auto* y) {
        return x->first == y->first && is_same(x->second, y->second);
      });
    }
    case Kind::kNull:
    case Kind::kInt:
    case Kind::kDouble:
      break;
  }
  return true;
}

bool is_same_json(const std::string& a, const std::string& b) {
  if (a == b) return true;
  try {
    return is_same(Json::parse_python(a, "sampled"), Json::parse_python(b, "arguments"));
  } catch (const Error&) {
    return false;
  }
}

std::string key_of(const std::string& owner, const std::string& id) {
  return owner + '\0' + id;
}

// What a block of calls ends with behind its last call.
std::string block_end() {
  return fmt::format(">\n{}", text::kEndToolCallsTag);
}

// The calls' part of the sampled text: what stands behind reasoning and content. Its end is added where the one call
// that is allowed ended the answer. Nothing where the text is not just these three (and the end token).
std::string calls_text(bool starts_in_reasoning, const FinishedAnswer& answer) {
  std::string front = answer.reasoning;
  if (starts_in_reasoning) front += text::kEndThinkToken;
  front += answer.content;
  std::string_view text = answer.sampled_text;
  if (!text.starts_with(front)) return "";
  text.remove_prefix(front.size());
  if (text.ends_with(text::kEosToken)) text.remove_suffix(text::kEosToken.size());
  const size_t last = text.rfind(text::kEndInvokeTag);
  if (last == std::string_view::npos) return "";
  const size_t end = last + text::kEndInvokeTag.size();
  return block_end().starts_with(text.substr(end)) ? std::string(text.substr(0, end)) + block_end() : "";
}

}  // namespace

size_t ReplayStore::Record::num_bytes() const {
  size_t bytes = reasoning.size() + sampled_calls.size();
  for (size_t i = 0; i < calls.size(); ++i) {
    bytes += 2 * keys[i].size() + calls[i].id.size() + calls[i].name.size() + calls[i].arguments.size();
    bytes += kOverheadBytes;
  }
  return bytes;
}

void ReplayStore::remember(const std::string& owner, bool starts_in_reasoning, const FinishedAnswer& answer) {
  if (answer.reason != FinishReason::kToolCalls || !answer.parse_fault.empty()) return;
  Record record;
  record.sampled_calls = calls_text(starts_in_reasoning, answer);
  if (record.sampled_calls.empty()) return;
  record.calls = answer.calls;
  record.reasoning = answer.reasoning;
  for (const AnswerCall& call : answer.calls) record.keys.push_back(key_of(owner, call.id));
  const size_t num_bytes = record.num_bytes();
  if (num_bytes > max_bytes_) return;

  const std::lock_guard lock(mutex_);
  while (num_bytes_ + num_bytes > max_bytes_) forget_locked(std::prev(records_.end()));
  records_.push_front(std::move(record));
  num_bytes_ += num_bytes;
  for (const std::string& key : records_.front().keys) by_key_[key] = records_.begin();
}

void ReplayStore::restore(const std::string& owner, std::vector<text::Message>& messages) {
  const std::lock_guard lock(mutex_);
  for (text::Message& message : messages) {
    if (message.role != text::Role::kAssistant || message.tool_calls.empty()) continue;
    const Record* record = find_locked(owner, message);
    ++(record == nullptr ? num_misses_ : num_hits_);
    if (record == nullptr) continue;
    message.sampled_calls = record->sampled_calls;
    if (message.reasoning.empty()) message.reasoning = record->reasoning;
  }
}

const ReplayStore::Record* ReplayStore::find_locked(const std::string& owner, const text::Message& message) {
  const auto found = by_key_.find(key_of(owner, message.tool_calls.front().id));
  if (found == by_key_.end()) return nullptr;
  const Record& record = *found->second;
  const bool is_same_answer = std::equal(
      record.calls.begin(), record.calls.end(), message.tool_calls.begin(), message.tool_calls.end(),
      [](const AnswerCall& ours, const text::ToolCall& theirs) {
        return ours.id == theirs.id && ours.name == theirs.name && is_same_json(ours.arguments, theirs.arguments);
      });
  if (!is_same_answer) return nullptr;
  records_.splice(records_.begin(), records_, found->second);
  return &record;
}

void ReplayStore::forget_locked(Records::iterator record) {
  num_bytes_ -= record->num_bytes();
  for (const std::string& key : record->keys) by_key_.erase(key);
  records_.erase(record);
}

ReplayStore::Stats ReplayStore::stats() const {
  const std::lock_guard lock(mutex_);
  return {records_.size(), num_bytes_, num_hits_, num_misses_};
}

}  // namespace tessera::server
