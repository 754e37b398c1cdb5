// SPDX-License-Identifier: Apache-2.0
#pragma once
// Who may ask. Keys are held and compared as SHA-256 digests, in a time that does not depend on what was presented.
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/prepare.h"

namespace tessera::server::http {

class ApiKeys {
 public:
  explicit ApiKeys(const std::vector<std::string>& keys);
  // Whether no key is needed.
  bool is_open() const { return digests_.empty(); }
  // Who presents one of the keys: "Bearer KEY", or "Basic" with the key as password (for browsers) in `authorization`,
  // or the key itself in `x_api_key`. Nothing: nobody. Everybody is one caller where no key is needed.
  std::optional<Caller> find(std::string_view authorization, std::string_view x_api_key) const;

 private:
  using Digest = std::array<unsigned char, 32>;
  static Digest digest(std::string_view key);
  std::vector<Digest> digests_;
};

// The keys of a file: one a line; empty lines and those that begin with # mean nothing. Throws kInvalidArgument for a
// file without keys, and for keys with spaces or control characters; kNotFound where it cannot be read.
std::vector<std::string> read_key_file(const std::string& path);

}  // namespace tessera::server::http
