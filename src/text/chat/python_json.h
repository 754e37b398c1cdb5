// SPDX-License-Identifier: Apache-2.0
#pragma once
// JSON text as Python's json.dumps(value, ensure_ascii=False) writes it: ", " and ": " between things, keys in their
// order, text other than controls, quotes and backslashes as it is, floats as the shortest digits that read back equal,
// with ".0" or an exponent of at least two digits. The model was trained on exactly this text.
// Source: Lib/json/encoder.py and float.__repr__ of CPython 3.
#include <string>
#include <string_view>

#include "base/json.h"

namespace tessera::text {

std::string python_json(const Json& value);

// Appends `text`, UTF-8, as the inside of a JSON string, without the quotes. Works on any part of a text that is cut
// between bytes.
void append_json_escaped(std::string& out, std::string_view text);

// `text` in quotes.
std::string json_quoted(std::string_view text);

}  // namespace tessera::text
