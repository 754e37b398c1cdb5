// SPDX-License-Identifier: Apache-2.0
#pragma once
// Fields that several request bodies share, and how checked bodies become requests. Readers expect a body that `check`
// has let pass.
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "server/request.h"
#include "server/schema.h"

namespace tessera::server {

// A member that is there and not null.
const Json* given(const Json& object, std::string_view key);
std::string text_or(const Json& object, std::string_view key, std::string_view otherwise = "");
bool flag_or(const Json& object, std::string_view key, bool otherwise = false);

// model, sampling, stops, limits, streaming: what /v1/chat/completions and /v1/completions share.
std::vector<Field> generation_fields();
// `max_tokens_keys`: the first that is given counts. Throws RequestError (model_not_found is a 404).
GenerationOptions read_generation(const Json& body, const Schema& schema, const ServedModel& model,
                                  const std::vector<std::string>& max_tokens_keys);

// The fields without those of these names.
std::vector<Field> without(std::vector<Field> fields, const std::vector<std::string>& names);
void append(std::vector<Field>& fields, std::vector<Field> more);

// A JSON Schema document, and one that describes a tool's parameters: of an object.
Schema schema_document();
Schema parameters_document();
// A text: a string, or parts {"type", "text"} of these types.
Schema text_parts(const std::vector<std::string>& types);
Schema text_content(const std::vector<std::string>& types);
// The text of such a content: parts are joined with an empty line.
std::string read_text(const Json& content);

// The levels that reasoning_effort and its like take.
Schema effort_names();
// Sets thinking and effort from a level's name; "none" turns thinking off.
void set_effort(text::ChatOptions& options, std::string_view name, const ServedModel& model);

// Refuses what needs a grammar where the server has none. `field` is what asks for it.
void require_grammars(const ServedModel& model, const std::string& field, std::string_view neutral,
                      std::string_view found);

// Adds tools as lines of the prompt to the leading system message, which is made where there is none, moves system
// messages that lead into it (joined with an empty line), and turns later ones into user messages: the chat
// format has no place for them, and moving them to the front would change the prefix that is cached.
void arrange_system(std::vector<text::Message>& messages, std::vector<std::string> tool_texts,
                    std::string response_format);

// Adds a tool given flat, {"name", "description", PARAMETERS_KEY}, to the policy. Returns the line of the prompt that
// describes it, as chat completions would give it: {"name", "description", "parameters"}. The key must outlive it.
std::string read_flat_tool(const Json& tool, std::string_view parameters_key, ToolPolicy& policy);
// A part of a tool's result that is not text becomes what the model knows for it.
std::string read_result(const Json& content);
// {"type", "text"} with any type: what read_result reads.
Schema result_content();
// A number that the schema let pass as an integer.
int64_t integer_of(const Json& value);

// 400 where the conversation ends in a message that leads to no answer; `field` is the messages' array.
void check_answerable(const std::vector<text::Message>& messages, const std::string& field);
// 400 where tool_choice and tools do not go together, or need grammars that are not there. `field`: the choice's.
void check_tools(const ToolPolicy& policy, const ServedModel& model, const std::string& field);

}  // namespace tessera::server
