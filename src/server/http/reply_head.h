// SPDX-License-Identifier: Apache-2.0
#pragma once
// The text before an answer's body: its first line and fields (RFC 9112, sections 4 and 5).
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "server/exchange.h"
#include "server/http/request_head.h"

namespace tessera::server::http {

// What stands behind a status in the first line: "Not Found" of 404.
std::string_view status_text(int status);
// Both fields that say when to ask again.
std::string retry_fields(int64_t seconds);
// The fields of every answer. Pages of `cors_origin` may read it; "": those of no other site.
std::string common_fields(const RequestHead& head, bool keeps_alive, const std::string& cors_origin);
// All of an answer's head, up to the empty line; `length`: of the body, in bytes, where it is no stream.
std::string head_text(const RequestHead& head, const ReplyHead& reply, size_t length, bool keeps_alive,
                      const std::string& cors_origin);

}  // namespace tessera::server::http
