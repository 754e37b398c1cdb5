// SPDX-License-Identifier: Apache-2.0
#pragma once
// The strings of DeepSeek-V4's chat format that have a meaning. The bars are U+FF5C, the low blocks U+2581.
// Source: encoding/encoding_dsv4.py of deepseek-ai/DeepSeek-V4-Flash; docs/formats/chat.md.
#include <string_view>

namespace tessera::text {

inline constexpr std::string_view kBosToken = "<\uFF5Cbegin\u2581of\u2581sentence\uFF5C>";
inline constexpr std::string_view kEosToken = "<\uFF5Cend\u2581of\u2581sentence\uFF5C>";
inline constexpr std::string_view kUserToken = "<\uFF5CUser\uFF5C>";
inline constexpr std::string_view kAssistantToken = "<\uFF5CAssistant\uFF5C>";
inline constexpr std::string_view kLatestReminderToken = "<\uFF5Clatest_reminder\uFF5C>";
inline constexpr std::string_view kThinkToken = "<think>";
inline constexpr std::string_view kEndThinkToken = "</think>";

// Tool calls. Only the middle, kDsmlToken, is a token of its own; tags are matched as text.
inline constexpr std::string_view kDsmlToken = "\uFF5CDSML\uFF5C";
inline constexpr std::string_view kToolCallsTag = "<\uFF5CDSML\uFF5Ctool_calls";
inline constexpr std::string_view kEndToolCallsTag = "</\uFF5CDSML\uFF5Ctool_calls>";
inline constexpr std::string_view kInvokeTag = "<\uFF5CDSML\uFF5Cinvoke";
inline constexpr std::string_view kEndInvokeTag = "</\uFF5CDSML\uFF5Cinvoke";
inline constexpr std::string_view kParameterTag = "<\uFF5CDSML\uFF5Cparameter";
inline constexpr std::string_view kEndParameterTag = "</\uFF5CDSML\uFF5Cparameter";

}  // namespace tessera::text
