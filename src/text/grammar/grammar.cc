// SPDX-License-Identifier: Apache-2.0
#include "text/grammar/grammar.h"

#include <fmt/format.h>
#include <xgrammar/compiler.h>
#include <xgrammar/config.h>
#include <xgrammar/matcher.h>

#include <time.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/strings.h"
#include "text/chat/markers.h"
#include "text/chat/python_json.h"
#include "text/grammar/call_grammar.h"
#include "text/grammar/schema_text.h"

// What XGrammar has to say: it calls these two (XGRAMMAR_LOG_CUSTOMIZE).
namespace xgrammar {

namespace {

// The first warning of this thread's conversion: each is of something that was left out of a grammar.
thread_local std::string t_warning;

}  // namespace

[[noreturn]] void LogFatalImpl(const std::string&, int, const std::string& message);
void LogMessageImpl(const std::string&, int, int, const std::string& message);

void LogFatalImpl(const std::string&, int, const std::string& message) {
  constexpr std::string_view kEndOfCheck = " is false: ";  // behind what was checked, in the source's words
  const size_t found = message.find(kEndOfCheck);
  throw std::runtime_error(found == std::string::npos ? message : message.substr(found + kEndOfCheck.size()));
}

void LogMessageImpl(const std::string&, int, int, const std::string& message) {
  if (t_warning.empty()) t_warning = message;
}

}  // namespace xgrammar

namespace tessera::text {

namespace {

// Nesting of what XGrammar walks: bodies have 64 levels, and a definition's references are not followed endlessly.
constexpr int kMaxRecursion = 2000;

xgrammar::TokenizerInfo make_vocabulary(const Tokenizer& tokenizer, int32_t vocab_size,
                                        std::span<const int32_t> end_ids) {
  const std::optional<int32_t> markup = tokenizer.added_token(kDsmlToken);
  // A token without bytes is never allowed.
  std::vector<std::string> tokens(static_cast<size_t>(vocab_size));
  for (int32_t id = 0; id < std::min(vocab_size, tokenizer.vocab_size()); ++id) {
    const bool is_text = !tokenizer.is_special(id) || id == markup;
    if (is_text) tokens[static_cast<size_t>(id)] = tokenizer.token_bytes(id);
  }
  // Marked special or not, the markers of the chat format are no text.
  for (const std::string_view marker :
       {kBosToken, kEosToken, kUserToken, kAssistantToken, kLatestReminderToken, kThinkToken, kEndThinkToken}) {
    if (const auto id = tokenizer.added_token(marker)) tokens[static_cast<size_t>(*id)].clear();
  }
  return xgrammar::TokenizerInfo(tokens, xgrammar::VocabType::RAW, vocab_size,
                                 std::vector<int32_t>(end_ids.begin(), end_ids.end()));
}

// Of this thread: a busy machine does not make a mask slow.
double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

class Matcher final : public GrammarMatcher {
 public:
  Matcher(const xgrammar::CompiledGrammar& compiled, std::optional<int32_t> banned, double mask_seconds)
      : matcher_(compiled), banned_(banned), mask_seconds_(mask_seconds) {}

  bool fill(std::span<uint32_t> mask) override {
    const double begin = processor_seconds();
    const bool has_any = fill_in(mask);
    const double taken = std::exchange(accept_seconds_, 0) + processor_seconds() - begin;
    if (taken > mask_seconds_) {
      fail(ErrorCode::kInvalidArgument,
           fmt::format("grammar: expected the tokens that may come next within {:.0f} ms, found them after {:.0f}; a "
                       "simpler schema or pattern would do",
                       1e3 * mask_seconds_, 1e3 * taken));
    }
    return has_any;
  }
  bool accept(int32_t id) override {
    const double begin = processor_seconds();
    const bool is_taken = !matcher_.IsTerminated() && id != banned_ && matcher_.AcceptToken(id);
    accept_seconds_ = processor_seconds() - begin;
    return is_taken;
  }
  bool has_ended() const override { return matcher_.IsTerminated(); }

 private:
  bool fill_in(std::span<uint32_t> mask) {
    if (matcher_.IsTerminated()) return false;
    int64_t size = static_cast<int64_t>(mask.size());
    DLTensor tensor{};
    tensor.data = mask.data();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = 1;
    tensor.dtype = {kDLInt, 32, 1};
    tensor.shape = &size;
    std::fill(mask.begin(), mask.end(), ~uint32_t{0});  // where every token may come nothing is filled in
    matcher_.FillNextTokenBitmask(&tensor);
    if (banned_) mask[static_cast<size_t>(*banned_ / 32)] &= ~(uint32_t{1} << (*banned_ % 32));
    return std::any_of(mask.begin(), mask.end(), [](uint32_t word) { return word != 0; });
  }

  xgrammar::GrammarMatcher matcher_;
  const std::optional<int32_t> banned_;
  const double mask_seconds_;
  double accept_seconds_ = 0;  // of the last token
};

class Compiled final : public Grammar {
 public:
  Compiled(xgrammar::CompiledGrammar compiled, std::optional<int32_t> banned, double mask_seconds)
      : compiled_(std::move(compiled)),
        banned_(banned),
        mask_seconds_(mask_seconds),
        size_bytes_(compiled_.MemorySizeBytes()) {}
  std::unique_ptr<GrammarMatcher> begin() const override {
    return std::make_unique<Matcher>(compiled_, banned_, mask_seconds_);
  }
  size_t size_bytes() const override { return size_bytes_; }

 private:
  const xgrammar::CompiledGrammar compiled_;
  const std::optional<int32_t> banned_;  // the markup of calls, where none may be made
  const double mask_seconds_;
  const size_t size_bytes_;
};

// Without the automaton the time of a mask grows with the ways in which a text fits: (.+)+ in exponentially many.
xgrammar::Grammar pattern_automaton(const std::string& pattern) {
  const std::string canonical = canonical_pattern(pattern, PatternUse::kAnswer);
  return xgrammar::Grammar::FromEBNF(canonical.empty() ? R"(root ::= "")"
                                                       : fmt::format("root ::= Regex({})", json_quoted(canonical)));
}

xgrammar::Grammar content_grammar(const GrammarDefinition& definition) {
  if (definition.content == GrammarDefinition::Content::kRegex) return pattern_automaton(definition.text);
  const bool is_any = definition.content == GrammarDefinition::Content::kJson;
  return xgrammar::Grammar::FromJSONSchema(is_any ? R"({"type": "object", "additionalProperties": true})"
                                                  : schema_for_compiler(definition.text, PatternUse::kJsonString),
                                           /*any_whitespace=*/false);
}

xgrammar::Grammar call_grammar(const GrammarDefinition& definition) {
  auto made = xgrammar::Grammar::FromStructuralTag(call_block_tag(definition));
  if (const auto* grammar = std::get_if<xgrammar::Grammar>(&made)) return *grammar;
  return std::visit([](const auto& error) -> xgrammar::Grammar { throw std::runtime_error(error.what()); },
                    std::get<xgrammar::StructuralTagError>(made));
}

// What XGrammar warns of is left out of the grammar. How it would go on ("...; ignoring multipleOf") does not matter.
void refuse_warning(const std::string& where) {
  const std::string warning = std::exchange(xgrammar::t_warning, "");
  if (!warning.empty()) throw std::runtime_error(where + warning.substr(0, warning.find(';')));
}

// Null where the tokenizer does not know the marker.
std::shared_ptr<const SpelledMarker> spelled(const Tokenizer& tokenizer, std::string_view marker) {
  return tokenizer.added_token(marker) ? std::make_shared<const SpelledMarker>(tokenizer, marker) : nullptr;
}

}  // namespace

class GrammarCompiler::Body final : public TrialWork {
 public:
  Body(const Tokenizer& tokenizer, int32_t vocab_size, std::span<const int32_t> end_ids, double mask_seconds)
      : markup_(tokenizer.added_token(kDsmlToken)),
        vocabulary_(make_vocabulary(tokenizer, vocab_size, end_ids)),
        mask_seconds_(mask_seconds) {
    xgrammar::SetMaxRecursionDepth(kMaxRecursion);
  }

  std::shared_ptr<const Grammar> compile(const GrammarDefinition& definition) const {
    const bool has_content = definition.content != GrammarDefinition::Content::kNone;
    const bool has_calls = !definition.tools.empty();
    TESSERA_CHECK(has_content || has_calls, "a grammar is of something");
    xgrammar::t_warning.clear();
    std::vector<xgrammar::Grammar> parts;
    if (has_content) parts.push_back(content_grammar(definition));
    refuse_warning("");
    for (const CallableTool& tool : definition.tools) {
      if (!tool.is_strict) continue;
      GrammarDefinition alone;
      alone.tools = {tool};
      call_grammar(alone);
      refuse_warning(fmt::format("tool \"{}\": ", printable(tool.name, 80)));
    }
    if (has_calls) parts.push_back(call_grammar(definition));
    const xgrammar::Grammar whole = parts.size() == 1 ? parts[0] : xgrammar::Grammar::Union(parts);
    // One of its own: it has threads and a cache that are not wanted.
    xgrammar::GrammarCompiler compiler(vocabulary_, /*max_threads=*/1, /*cache_enabled=*/false);
    return std::make_shared<Compiled>(compiler.CompileGrammar(whole), has_calls ? std::nullopt : markup_,
                                      mask_seconds_);
  }

  // The first mask too: where that takes too long no request needs to be taken for it.
  std::shared_ptr<const Grammar> compile_with_mask(const GrammarDefinition& definition) const {
    std::vector<uint32_t> mask(static_cast<size_t>((vocabulary_.GetVocabSize() + 31) / 32));
    std::shared_ptr<const Grammar> made = compile(definition);
    if (!made->begin()->fill(mask)) {
      fail(ErrorCode::kInvalidArgument, "expected a grammar that some answer fits, found one that none fits");
    }
    return made;
  }

  void run(const GrammarDefinition& definition) const override { compile_with_mask(definition); }

 private:
  const std::optional<int32_t> markup_;
  const xgrammar::TokenizerInfo vocabulary_;
  const double mask_seconds_;
};

GrammarCompiler::GrammarCompiler(const Tokenizer& tokenizer, int32_t vocab_size, std::span<const int32_t> end_ids,
                                 const Limits& limits)
    : limits_(limits),
      body_(std::make_unique<Body>(tokenizer, vocab_size, end_ids, limits.mask_seconds)),
      end_of_reasoning_(spelled(tokenizer, kEndThinkToken)),
      markup_of_calls_(spelled(tokenizer, kDsmlToken)),
      trial_(*body_, limits.trial) {}

GrammarCompiler::~GrammarCompiler() = default;

// Its key is in the list and in the map.
size_t GrammarCompiler::Kept::cost_bytes() const {
  return (grammar == nullptr ? refusal.size() : grammar->size_bytes()) + 2 * key.size();
}

bool GrammarCompiler::knows(const GrammarDefinition& definition) const {
  const std::string key = definition.key();
  const std::lock_guard<std::mutex> hold(lock_);
  return by_key_.contains(key);
}

std::shared_ptr<const Grammar> GrammarCompiler::compile(const GrammarDefinition& definition) {
  const std::string key = definition.key();
  {
    const std::lock_guard<std::mutex> hold(lock_);
    const auto found = by_key_.find(key);
    if (found != by_key_.end()) {
      ++stats_.num_hits;
      kept_.splice(kept_.begin(), kept_, found->second);
      if (kept_.front().grammar == nullptr) fail(ErrorCode::kInvalidArgument, kept_.front().refusal);
      return kept_.front().grammar;
    }
    ++stats_.num_misses;
  }
  try {
    const std::shared_ptr<const Grammar> made = make(definition);
    keep({key, made, ""});
    return made;
  } catch (const Error& error) {
    // Others are of this moment.
    if (error.code() == ErrorCode::kInvalidArgument) keep({key, nullptr, error.what()});
    throw;
  }
}

std::shared_ptr<const Grammar> GrammarCompiler::make(const GrammarDefinition& definition) {
  trial_.run(definition);
  std::shared_ptr<const Grammar> made;
  try {
    made = body_->compile_with_mask(definition);
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail(ErrorCode::kInvalidArgument, printable(error.what(), 300));
  }
  if (made->size_bytes() > limits_.grammar_bytes) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("expected a grammar of at most {} bytes, found {}", limits_.grammar_bytes, made->size_bytes()));
  }
  return made;
}

void GrammarCompiler::keep(Kept kept) {
  const std::lock_guard<std::mutex> hold(lock_);
  if (by_key_.contains(kept.key) || kept.cost_bytes() > limits_.cache_bytes) return;
  kept_.push_front(std::move(kept));
  try {
    by_key_[kept_.front().key] = kept_.begin();
  } catch (...) {
    kept_.pop_front();  // nobody would find it
    throw;
  }
  stats_.bytes += kept_.front().cost_bytes();
  while (stats_.bytes > limits_.cache_bytes) {
    stats_.bytes -= kept_.back().cost_bytes();
    by_key_.erase(kept_.back().key);
    kept_.pop_back();
  }
  stats_.num_kept = kept_.size();
}

GrammarCompiler::Stats GrammarCompiler::stats() const {
  const std::lock_guard<std::mutex> hold(lock_);
  return stats_;
}

}  // namespace tessera::text
