// SPDX-License-Identifier: Apache-2.0
#pragma once
// /openapi.json: every route, and bodies written from the schemas that requests are checked against.
#include <string>
#include <string_view>

namespace tessera::server {

// An OpenAPI 3.1 document. `version` is the program's.
std::string render_openapi(std::string_view version);

}  // namespace tessera::server
