// SPDX-License-Identifier: Apache-2.0
#include "engine/prefix_digest.h"

#include <openssl/sha.h>

#include <cstring>

namespace tessera::engine {

namespace {

// Before the salt, so that no digest of ours is one of somebody else's scheme.
constexpr std::string_view kScheme = "tessera prefix 1\n";

PrefixDigest sha256(std::span<const uint8_t> bytes) {
  PrefixDigest digest;
  static_assert(digest.size() == SHA256_DIGEST_LENGTH);
  SHA256(bytes.data(), bytes.size(), digest.data());
  return digest;
}

}  // namespace

std::vector<PrefixDigest> prefix_digests(std::string_view salt, std::span<const int32_t> ids) {
  std::vector<uint8_t> bytes(kScheme.begin(), kScheme.end());
  bytes.insert(bytes.end(), salt.begin(), salt.end());
  std::vector<PrefixDigest> digests = {sha256(bytes)};
  constexpr size_t kBlock = static_cast<size_t>(kDigestTokens);
  bytes.resize(sizeof(PrefixDigest) + kBlock * sizeof(int32_t));
  for (size_t first = 0; first + kBlock <= ids.size(); first += kBlock) {
    std::memcpy(bytes.data(), digests.back().data(), sizeof(PrefixDigest));
    std::memcpy(bytes.data() + sizeof(PrefixDigest), ids.data() + first, kBlock * sizeof(int32_t));
    digests.push_back(sha256(bytes));
  }
  return digests;
}

size_t PrefixDigestHash::operator()(const PrefixDigest& digest) const {
  size_t value = 0;
  std::memcpy(&value, digest.data(), sizeof(value));
  return value;
}

}  // namespace tessera::engine
