// SPDX-License-Identifier: Apache-2.0
#include "server/http/api_keys.h"

#include <fmt/format.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/sha.h>
#include <strings.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/file.h"
#include "base/strings.h"

namespace tessera::server::http {

namespace {

// What follows the scheme's name; nothing where it is another scheme.
std::optional<std::string_view> after_scheme(std::string_view text, std::string_view scheme) {
  if (text.size() <= scheme.size() || text[scheme.size()] != ' ') return std::nullopt;
  if (strncasecmp(text.data(), scheme.data(), scheme.size()) != 0) return std::nullopt;
  text.remove_prefix(scheme.size());
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  return text;
}

// The password of "user:password" in base64; nothing for what is not that.
std::optional<std::string> basic_password(std::string_view base64) {
  if (base64.empty() || base64.size() % 4 != 0 || base64.size() > 1024) return std::nullopt;
  std::string bytes(base64.size() / 4 * 3, '\0');
  const int size =
      EVP_DecodeBlock(reinterpret_cast<unsigned char*>(bytes.data()),
                      reinterpret_cast<const unsigned char*>(base64.data()), static_cast<int>(base64.size()));
  if (size < 0) return std::nullopt;
  bytes.resize(static_cast<size_t>(size) - static_cast<size_t>(std::count(base64.end() - 2, base64.end(), '=')));
  const size_t colon = bytes.find(':');
  if (colon == std::string::npos) return std::nullopt;
  return bytes.substr(colon + 1);
}

}  // namespace

ApiKeys::Digest ApiKeys::digest(std::string_view key) {
  Digest out;
  SHA256(reinterpret_cast<const unsigned char*>(key.data()), key.size(), out.data());
  return out;
}

ApiKeys::ApiKeys(const std::vector<std::string>& keys) {
  for (const std::string& key : keys) digests_.push_back(digest(key));
}

std::optional<Caller> ApiKeys::find(std::string_view authorization, std::string_view x_api_key) const {
  if (is_open()) return Caller{};
  std::string presented(x_api_key);
  if (const auto bearer = after_scheme(authorization, "Bearer")) {
    presented = *bearer;
  } else if (const auto basic = after_scheme(authorization, "Basic")) {
    presented = basic_password(*basic).value_or("");
  }
  const Digest found = digest(presented);
  bool is_known = false;
  for (const Digest& known : digests_) is_known |= CRYPTO_memcmp(found.data(), known.data(), known.size()) == 0;
  if (!is_known) return std::nullopt;
  Caller caller;
  for (size_t i = 0; i < 16; ++i) caller.owner += fmt::format("{:02x}", found[i]);
  std::memcpy(&caller.client, found.data(), sizeof(caller.client));
  return caller;
}

std::vector<std::string> read_key_file(const std::string& path) {
  const std::string text = read_file(path, size_t{1} << 20);
  std::vector<std::string> keys;
  for (std::string_view line : split(text, '\n')) {
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty() || line.front() == '#') continue;
    const bool is_plain = std::all_of(line.begin(), line.end(), [](char c) { return c > ' ' && c <= '~'; });
    if (!is_plain) {
      fail(ErrorCode::kInvalidArgument,
           fmt::format("{}: key {}: expected printable ASCII without spaces, found something else", printable(path),
                       keys.size() + 1));
    }
    keys.emplace_back(line);
  }
  if (keys.empty()) {
    fail(ErrorCode::kInvalidArgument, fmt::format("{}: expected one key a line, found none", printable(path)));
  }
  return keys;
}

}  // namespace tessera::server::http
