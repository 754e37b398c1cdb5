// SPDX-License-Identifier: Apache-2.0
#include "server/ids.h"

#include <fmt/format.h>
#include <sys/random.h>

#include <array>

#include "base/error.h"

namespace tessera::server {

std::string RandomIds::next(std::string_view prefix) {
  std::array<unsigned char, 16> bytes{};
  // Requests of up to 256 bytes are filled whole or not at all.
  const ssize_t filled = getrandom(bytes.data(), bytes.size(), 0);
  TESSERA_CHECK(filled == static_cast<ssize_t>(bytes.size()), fmt::format("getrandom gave {}", filled));
  std::string id(prefix);
  for (const unsigned char byte : bytes) id += fmt::format("{:02x}", byte);
  return id;
}

}  // namespace tessera::server
