// SPDX-License-Identifier: Apache-2.0
#include "engine/tier_file.h"

#include <fmt/format.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <array>
#include <cstring>
#include <utility>

#include "base/atomic_file.h"
#include "base/error.h"

namespace tessera::engine {

namespace {

using Checksum = std::array<uint8_t, 16>;  // XXH3-128, big-endian

struct Header {
  char magic[8] = {'T', 'S', 'P', 'R', 'E', 'F', 'X', '1'};
  uint32_t kind = 0;  // 1: a state, 2: a segment
  uint32_t num_tail_ids = 0;
  PrefixDigest identity{}, digest{};
  uint64_t first_bytes = 0, second_bytes = 0;
  Checksum payload{};  // of all after the header
  Checksum header{};   // of the header up to here
};
static_assert(sizeof(Header) == 128, "written as raw bytes");

constexpr uint32_t kState = 1, kSegment = 2;

Checksum canonical(XXH128_hash_t hash) {
  XXH128_canonical_t bytes;
  XXH128_canonicalFromHash(&bytes, hash);
  Checksum out;
  std::memcpy(out.data(), bytes.digest, out.size());
  return out;
}

Checksum checksum_of_header(const Header& header) {
  return canonical(XXH3_128bits(&header, offsetof(Header, header)));
}

Checksum checksum_of_parts(std::span<const std::span<const uint8_t>> parts) {
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  for (const std::span<const uint8_t> part : parts) XXH3_128bits_update(&state, part.data(), part.size());
  return canonical(XXH3_128bits_digest(&state));
}

std::span<const uint8_t> bytes_of(std::span<const int32_t> ids) {
  return {reinterpret_cast<const uint8_t*>(ids.data()), ids.size_bytes()};
}

SharedBytes shared(std::span<const uint8_t> bytes) {
  return std::make_shared<const std::vector<uint8_t>>(bytes.begin(), bytes.end());
}

}  // namespace

int64_t tier_file_bytes(size_t tail_size, size_t first_bytes, size_t second_bytes) {
  return static_cast<int64_t>(sizeof(Header) + tail_size * sizeof(int32_t) + first_bytes + second_bytes);
}

void write_tier_file(const std::string& path, const TierFile& file) {
  const std::span<const uint8_t> second = file.second == nullptr ? std::span<const uint8_t>() : *file.second;
  const std::span<const uint8_t> parts[] = {bytes_of(file.tail), *file.first, second};
  Header header;
  header.kind = file.is_segment ? kSegment : kState;
  header.num_tail_ids = static_cast<uint32_t>(file.tail.size());
  header.identity = file.identity, header.digest = file.digest;
  header.first_bytes = parts[1].size(), header.second_bytes = parts[2].size();
  header.payload = checksum_of_parts(parts);
  header.header = checksum_of_header(header);
  AtomicFile out(path, FileAccess::kPrivate);
  out.write(&header, sizeof(header));
  for (const std::span<const uint8_t> part : parts) out.write(part.data(), part.size());
  out.commit();
}

TierFile parse_tier_file(std::span<const uint8_t> bytes, std::string_view path) {
  Header header;
  const Header expected;
  if (bytes.size() < sizeof(header)) {
    fail_data(path, "size", fmt::format("at least {} bytes", sizeof(header)), fmt::format("{}", bytes.size()));
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (std::memcmp(header.magic, expected.magic, sizeof(header.magic)) != 0) {
    fail_data(path, "magic", "TSPREFX1", "something else");
  }
  if (header.header != checksum_of_header(header)) fail_data(path, "header", "its checksum", "another one");
  // A checksum is no signature: lengths must fit whatever it says.
  const bool is_segment = header.kind == kSegment;
  const uint64_t tail_bytes = uint64_t{header.num_tail_ids} * sizeof(int32_t), room = bytes.size() - sizeof(header);
  const bool fits = (is_segment || header.kind == kState) &&
                    header.num_tail_ids < (is_segment ? 1 : static_cast<uint32_t>(kDigestTokens)) &&
                    tail_bytes <= room && header.first_bytes <= room - tail_bytes &&
                    header.second_bytes == room - tail_bytes - header.first_bytes &&
                    (!is_segment || header.second_bytes == 0);
  if (!fits) {
    fail_data(path, "lengths", fmt::format("kind 1 or 2 and {} bytes", room),
              fmt::format("kind {}: {} ids, {} and {} bytes", header.kind, header.num_tail_ids, header.first_bytes,
                          header.second_bytes));
  }
  const std::span<const uint8_t> payload = bytes.subspan(sizeof(header));
  if (header.payload != checksum_of_parts({&payload, 1})) fail_data(path, "payload", "its checksum", "another one");
  TierFile file{header.identity, header.digest, is_segment, std::vector<int32_t>(header.num_tail_ids), {}, {}};
  if (tail_bytes > 0) std::memcpy(file.tail.data(), payload.data(), tail_bytes);
  file.first = shared(payload.subspan(tail_bytes, header.first_bytes));
  file.second = shared(payload.subspan(tail_bytes + header.first_bytes));
  return file;
}

TierFile read_tier_file(const std::string& path, int64_t num_bytes) {
  const File file = File::open_read(path);
  if (const uint64_t size = file.size(); size != static_cast<uint64_t>(num_bytes)) {
    fail_data(path, "size", fmt::format("{} bytes", num_bytes), fmt::format("{}", size));
  }
  std::vector<uint8_t> bytes(static_cast<size_t>(num_bytes));
  file.read_at(0, bytes.data(), bytes.size());
  return parse_tier_file(bytes, path);
}

}  // namespace tessera::engine
