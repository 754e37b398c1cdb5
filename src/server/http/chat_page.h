// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <string_view>

namespace tessera::server::http {

// The HTML of GET /: chat_page.html, which needs nothing else from anywhere.
std::string_view chat_page();

}  // namespace tessera::server::http
