// SPDX-License-Identifier: Apache-2.0
#pragma once
// How hard the model is told to think: a text right after the begin token, in thinking mode. Releases differ in which
// level stands for which text:
//               default  low      high     max
//   preview     -        refused  -        text A     (April 2026, and its DSpark and base releases)
//   official    -        -        text A   text B     (0731, 0813 and later)
// Source: encoding/encoding_dsv4.py of deepseek-ai/DeepSeek-V4-Flash and DeepSeek-V4-Flash-0731; docs/formats/chat.md.
#include <optional>
#include <string>
#include <string_view>

namespace tessera::text {

enum class Effort { kDefault, kLow, kHigh, kMax };
enum class EffortTable { kPreview, kOfficial };

// The text that the table gives a level; empty for none. Throws kInvalidArgument for kLow of the preview.
std::string_view effort_text(Effort effort, EffortTable table);

// "default", "low", "high" and "max"; "preview" and "official". Nothing for other names.
std::optional<Effort> effort_from_name(std::string_view name);
std::optional<EffortTable> effort_table_from_name(std::string_view name);
std::string_view to_string(Effort effort);
std::string_view to_string(EffortTable table);

// The levels that other programs' names mean, as DeepSeek's service folds them: official minimal and low to low;
// medium, high and xhigh to high; max and ultra to max. Preview: minimal, low, medium and high to high; xhigh, max and
// ultra to max. Nothing for other names. Source: api-docs.deepseek.com, guides/thinking_mode.
std::optional<Effort> effort_from_api_name(std::string_view name, EffortTable table);

// Which table a model folder wants. Evidence, in this order: DIRECTORY/encoding/encoding_dsv4.py, which in official
// releases holds the opening words of text B; the release date 0731 or 0813 in the folder's name. Else preview, whose
// levels add the least.
EffortTable effort_table_of_model(const std::string& directory);

}  // namespace tessera::text
