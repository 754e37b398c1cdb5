// SPDX-License-Identifier: Apache-2.0
#include "server/grammar_constraint.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/strings.h"
#include "server/api_error.h"
#include "text/chat/markers.h"
#include "text/grammar/pattern.h"
#include "text/grammar/schema_fault.h"

namespace tessera::server {

namespace {

using text::GrammarDefinition;

enum class Phase { kReasoning, kFree, kGrammar };

struct Markers {
  int32_t end_think = -1, markup = -1;
  std::vector<int32_t> not_in_reasoning;  // its end is </think> alone
  // Not to be spelled in other tokens: in reasoning, and outside calls. Null: the tokenizer does not know it.
  std::shared_ptr<const text::SpelledMarker> end_of_reasoning, markup_of_calls;
  const text::Tokenizer* tokenizer = nullptr;
};

void forbid(std::span<uint32_t> mask, std::span<const int32_t> ids) {
  for (const int32_t id : ids) mask[static_cast<size_t>(id / 32)] &= ~(uint32_t{1} << (id % 32));
}

// How much of a marker the text ends with that was drawn.
class Spelling {
 public:
  explicit Spelling(const text::SpelledMarker* marker) : marker_(marker) {}
  void add(std::string_view bytes) {
    if (marker_ != nullptr) matched_ = marker_->advance(matched_, bytes);
  }
  std::span<const int32_t> completing() const {
    return marker_ == nullptr ? std::span<const int32_t>() : marker_->completing(matched_);
  }

 private:
  const text::SpelledMarker* marker_;
  size_t matched_ = 0;
};

class Constraint final : public engine::TokenConstraint {
 public:
  Constraint(Phase phase, Phase after_reasoning, const Markers& markers, std::unique_ptr<text::GrammarMatcher> matcher)
      : phase_(phase),
        after_reasoning_(after_reasoning),
        markers_(markers),
        end_of_reasoning_(markers.end_of_reasoning.get()),
        markup_(markers.markup_of_calls.get()),
        matcher_(std::move(matcher)) {}

  Allowed allowed(std::span<uint32_t> mask) override {
    if (phase_ == Phase::kFree && markup_.completing().empty()) return Allowed::kAll;
    if (phase_ == Phase::kGrammar) return matcher_->fill(mask) ? Allowed::kSome : Allowed::kNone;
    std::fill(mask.begin(), mask.end(), ~uint32_t{0});
    forbid(mask, markup_.completing());
    if (phase_ == Phase::kReasoning) {
      forbid(mask, markers_.not_in_reasoning);
      forbid(mask, end_of_reasoning_.completing());
    }
    return Allowed::kSome;
  }
  void drawn(int32_t id) override {
    if (phase_ == Phase::kGrammar) {
      TESSERA_CHECK(matcher_->accept(id), "what a mask allows its grammar accepts");
    } else if (phase_ == Phase::kReasoning) {
      if (id != markers_.end_think) return spell(id);
      phase_ = after_reasoning_;
      markup_ = Spelling(markers_.markup_of_calls.get());
    } else if (id == markers_.markup) {
      phase_ = Phase::kGrammar;
    } else {
      spell(id);
    }
  }
  bool has_ended() const override { return phase_ == Phase::kGrammar && matcher_->has_ended(); }

 private:
  void spell(int32_t id) {
    if (id >= markers_.tokenizer->vocab_size()) return;
    const std::string& bytes = markers_.tokenizer->token_bytes(id);
    end_of_reasoning_.add(bytes);
    markup_.add(bytes);
  }

  Phase phase_;
  const Phase after_reasoning_;
  const Markers& markers_;
  Spelling end_of_reasoning_, markup_;
  const std::unique_ptr<text::GrammarMatcher> matcher_;
};

class Source final : public engine::ConstraintSource {
 public:
  Source(Phase phase, Phase after_reasoning, Markers markers, std::shared_ptr<const text::Grammar> grammar)
      : phase_(phase), after_reasoning_(after_reasoning), markers_(std::move(markers)), grammar_(std::move(grammar)) {}
  std::unique_ptr<engine::TokenConstraint> begin() const override {
    return std::make_unique<Constraint>(phase_, after_reasoning_, markers_, grammar_->begin());
  }

 private:
  const Phase phase_, after_reasoning_;
  const Markers markers_;
  const std::shared_ptr<const text::Grammar> grammar_;
};

// Names the field, as a request's own checks do.
[[noreturn]] void refuse(std::string_view field, const std::string& fault) {
  ApiError error;
  error.code = kInvalidValue;
  error.param = field;
  error.message = fmt::format("{}: {}", field, printable(fault, 400));
  throw RequestError(std::move(error));
}

std::string tool_field(const ChatRequest& request, size_t tool_idx) {
  return fmt::format("tools[{}].{}", tool_idx, request.tools.parameters_field);
}

// The tools that the answer may call, and whether it must.
void add_tools(const ChatRequest& request, GrammarDefinition& definition) {
  const ToolPolicy& policy = request.tools;
  for (size_t i = 0; i < policy.tools.size(); ++i) {
    const Tool& tool = policy.tools[i];
    if (policy.choice == ToolChoice::kNamed && tool.name != policy.named) continue;
    if (!tool.parameters.empty()) {
      const auto use = tool.is_strict ? text::SchemaUse::kStrictTool : text::SchemaUse::kTool;
      if (const auto fault = text::find_schema_fault(tool.parameters, use)) {
        refuse(tool_field(request, i), *fault);
      }
    }
    definition.tools.push_back({tool.name, tool.parameters, tool.is_strict});
  }
  definition.allows_parallel = policy.allows_parallel;
}

void add_content(const OutputFormat& format, GrammarDefinition& definition) {
  definition.text = format.definition;
  std::optional<std::string> fault;
  if (format.kind == OutputFormat::Kind::kRegex) {
    definition.content = GrammarDefinition::Content::kRegex;
    fault = text::find_pattern_fault(format.definition, text::PatternUse::kAnswer);
  } else if (format.kind == OutputFormat::Kind::kJsonObject) {
    definition.content = GrammarDefinition::Content::kJson;
  } else {
    definition.content = GrammarDefinition::Content::kJsonSchema;
    fault = text::find_schema_fault(format.definition, text::SchemaUse::kAnswer);
  }
  if (fault) refuse(format.field, *fault);
}

}  // namespace

std::shared_ptr<const engine::ConstraintSource> make_constraint(const ChatRequest& request, bool starts_in_reasoning,
                                                                text::GrammarCompiler& grammars,
                                                                const text::Tokenizer& tokenizer,
                                                                const std::vector<int32_t>& eos_ids,
                                                                Compiling compiling) {
  const ToolPolicy& policy = request.tools;
  const bool has_strict =
      std::any_of(policy.tools.begin(), policy.tools.end(), [](const Tool& tool) { return tool.is_strict; });
  const bool has_format = request.format.kind != OutputFormat::Kind::kText;
  const bool must_call = policy.must_call();
  const bool may_call_freely = policy.may_call() && !must_call && !has_format;
  if (!must_call && !has_format && !(may_call_freely && has_strict)) return {};

  GrammarDefinition definition;
  definition.is_in_block = may_call_freely;
  if (has_format && !must_call) add_content(request.format, definition);
  if (policy.may_call()) add_tools(request, definition);
  if (compiling == Compiling::kKnownOnly && !grammars.knows(definition)) {
    throw GrammarUnknown(definition.key());
  }
  std::shared_ptr<const text::Grammar> grammar;
  try {
    grammar = grammars.compile(definition);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) throw;
    refuse(has_format && !must_call ? request.format.field : std::string_view("tools"), error.what());
  }

  Markers markers;
  markers.end_think = tokenizer.added_token(text::kEndThinkToken).value_or(-1);
  markers.markup = tokenizer.added_token(text::kDsmlToken).value_or(-1);
  markers.not_in_reasoning = eos_ids;
  if (markers.markup >= 0) markers.not_in_reasoning.push_back(markers.markup);
  markers.end_of_reasoning = grammars.end_of_reasoning(), markers.markup_of_calls = grammars.markup_of_calls();
  markers.tokenizer = &tokenizer;
  const Phase after = may_call_freely ? Phase::kFree : Phase::kGrammar;
  return std::make_shared<Source>(starts_in_reasoning ? Phase::kReasoning : after, after, markers, grammar);
}

}  // namespace tessera::server
