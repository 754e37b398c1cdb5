// SPDX-License-Identifier: Apache-2.0
#pragma once
// A request as the engine's side wants it, whichever API it came through: checked, with defaults filled in. What
// depends on the tokenized prompt (the context's length) is left to whoever tokenizes: api_error.h, context_exceeded.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/json.h"
#include "engine/sampler.h"
#include "server/schema.h"
#include "text/chat/encode.h"
#include "text/chat/message.h"

namespace tessera::server {

// What parsing must know of the model and the server.
struct ServedModel {
  std::vector<std::string> names;  // that requests may give; the first is the one that answers show
  int32_t vocab_size = 0;
  int64_t max_model_len = 0;  // prompt and answer together
  text::EffortTable effort_table = text::EffortTable::kPreview;
  bool thinks_by_default = false;
  // Whether output can be held to a grammar. Without, requests that ask for it are refused: response_format other than
  // text, tool_choice other than auto and none.
  bool has_grammars = false;
};

// Bounds that every API shares.
inline constexpr int kMaxChoices = 16;
inline constexpr int kMaxTopLogprobs = 20;
inline constexpr size_t kMaxStops = 16, kMaxStopBytes = 256;
inline constexpr size_t kMaxLogitBiases = 1024;
inline constexpr size_t kMaxTools = 256;
inline constexpr size_t kMaxSchemaBytes = size_t{256} << 10;
inline constexpr size_t kMaxMessages = 16384;
inline constexpr size_t kMaxParts = 4096;                   // of one message's content
inline constexpr size_t kMaxTextLength = size_t{16} << 20;  // code points of one text
inline constexpr size_t kMaxNameLength = 128;               // of tools and models
inline constexpr size_t kMaxIdLength = 256;
inline constexpr size_t kMaxPatternLength = 4096;
inline constexpr size_t kMaxPrompts = 128;                 // of one /v1/completions request, times n
inline constexpr int64_t kMaxTokens = int64_t{1} << 21;    // of a prompt given as ids, or of an answer
inline constexpr size_t kMaxBodyValues = size_t{3} << 20;  // JSON values in a body

// What every generating endpoint has.
struct GenerationOptions {
  std::string model;                  // as the request names it
  engine::SamplingOptions sampling;   // params.seed is not filled in
  std::optional<uint64_t> seed;       // none: whoever runs the request draws one; choice i uses seed + i
  std::optional<int64_t> max_tokens;  // none: the endpoint's default, or what the context leaves if that is less
  int num_choices = 1;
  std::vector<std::string> stops;  // looked for in the content, not in reasoning or calls
  bool is_stream = false;
  bool streams_usage = false;  // a last chunk with usage
  int num_logprobs = -1;       // per token, beside its own; -1: no log probabilities at all
  bool ignores_end_token = false;
  std::string cache_salt;            // prompts share cached prefixes only with the same salt
  int priority = 0;                  // lower is sooner
  std::vector<std::string> ignored;  // fields of the body that mean nothing here, for a log line
};

struct Tool {
  std::string name;
  std::string parameters;  // JSON Schema text; empty: none given
  bool is_strict = false;
};

enum class ToolChoice { kAuto, kNone, kRequired, kNamed };

// Which calls the answer may make. Where may_call() is false, the token of the calls' markup must not be drawn; that
// keeps the prompt, and its cached prefix, the same for every choice.
struct ToolPolicy {
  std::vector<Tool> tools;
  ToolChoice choice = ToolChoice::kAuto;
  std::string named;                                          // of kNamed
  bool allows_parallel = true;                                // else the answer ends after its first call
  std::string_view parameters_field = "function.parameters";  // of a tool, as the API names it
  bool may_call() const { return !tools.empty() && choice != ToolChoice::kNone; }
  bool must_call() const { return choice == ToolChoice::kRequired || choice == ToolChoice::kNamed; }
};

// What the content must look like.
struct OutputFormat {
  enum class Kind { kText, kJsonObject, kJsonSchema, kRegex };
  Kind kind = Kind::kText;
  std::string definition;  // the JSON Schema's text, or the regular expression
  std::string_view field;  // that it came in, as the API names it
};

// A conversation to go on with: /v1/chat/completions, /v1/responses, /v1/messages.
struct ChatRequest {
  GenerationOptions options;
  std::vector<text::Message> messages;  // the leading system message holds tools and the response format
  text::ChatOptions chat;
  std::optional<int64_t> thinking_budget;  // most tokens of reasoning
  ToolPolicy tools;
  OutputFormat format;
};

// Text as it is, or token ids.
using Prompt = std::variant<std::string, std::vector<int32_t>>;

// Tokens of an answer of /v1/completions, as of OpenAI's; a chat's default is what the context leaves.
inline constexpr int64_t kDefaultCompletionTokens = 16;

// /v1/completions. Answers are numbered prompt by prompt, num_choices each.
struct CompletionRequest {
  GenerationOptions options;
  std::vector<Prompt> prompts;
  bool adds_begin_token = true;  // to text that does not begin with it
  bool echoes = false;  // the prompt comes back before its answer, with its log probabilities where they are asked for
};

// Parses a body: at most kMaxBodyValues values, 64 levels. Throws RequestError (malformed_json).
Json parse_body(std::string_view body);

}  // namespace tessera::server
