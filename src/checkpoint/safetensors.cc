// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/error.h"
#include "base/json.h"
#include "base/strings.h"

namespace tessera::checkpoint {

namespace {

constexpr const char* kMetadataKey = "__metadata__";
constexpr uint64_t kLengthBytes = 8;
// Offsets and dimensions: anything larger can't be a file's.
constexpr int64_t kMaxValue = int64_t{1} << 62;
// JSON values in one entry, or in the metadata.
constexpr size_t kMaxEntryValues = 65536;

std::string tensor_label(std::string_view name) {
  return fmt::format("tensor {}", printable(name, 160));
}

// Bits of a tensor with overflow checks; nothing where it overflows.
std::optional<uint64_t> checked_bits(const std::vector<int64_t>& dims, int element_bits) {
  uint64_t bits = static_cast<uint64_t>(element_bits);
  bool is_empty = false;
  for (const int64_t dim : dims) {
    is_empty = is_empty || dim == 0;
    if (!is_empty && __builtin_mul_overflow(bits, static_cast<uint64_t>(dim), &bits)) return std::nullopt;
  }
  return is_empty ? 0 : bits;
}

TensorEntry parse_entry(const Json::Member& member, uint64_t data_bytes, uint64_t data_offset,
                        const std::string& where) {
  const std::string label = tensor_label(member.first);
  const auto bad = [&](std::string_view what, std::string_view expected, std::string_view found) {
    fail_data(where, fmt::format("{}: {}", label, what), expected, found);
  };
  const Json& value = member.second;
  if (value.kind() != Json::Kind::kObject) bad("entry", "an object", describe(value));
  for (const Json::Member& field : value.object()) {
    if (field.first != "dtype" && field.first != "shape" && field.first != "data_offsets") {
      bad("entry", "only dtype, shape and data_offsets", fmt::format("field {}", printable(field.first, 60)));
    }
  }
  const JsonCursor cursor(value, where, label);
  TensorEntry entry;
  entry.name = member.first;
  entry.dtype_text = cursor.at("dtype").string();
  entry.dtype = dtype_from_name(entry.dtype_text);

  std::vector<int64_t> dims;
  for (const JsonCursor& dim : cursor.at("shape").elements()) dims.push_back(dim.exact_integer(0, kMaxValue));
  if (dims.size() > kMaxRank)
    bad("shape", fmt::format("at most {} dimensions", kMaxRank), fmt::format("{}", dims.size()));
  entry.shape = Shape(dims);

  const std::vector<JsonCursor> offsets = cursor.at("data_offsets").elements();
  if (offsets.size() != 2) bad("data_offsets", "two numbers", fmt::format("{}", offsets.size()));
  const uint64_t begin = static_cast<uint64_t>(offsets[0].exact_integer(0, kMaxValue));
  const uint64_t end = static_cast<uint64_t>(offsets[1].exact_integer(0, kMaxValue));
  if (begin > end || end > data_bytes) {
    bad("data_offsets", fmt::format("begin <= end <= {} bytes of data", data_bytes),
        fmt::format("[{}, {}]", begin, end));
  }
  entry.file_offset = data_offset + begin;
  entry.num_bytes = end - begin;
  if (entry.dtype) {
    const std::optional<uint64_t> bits = checked_bits(dims, dtype_bits(*entry.dtype));
    const std::string expected = fmt::format("{} {} in whole bytes", entry.dtype_text, entry.shape.to_string());
    if (!bits || *bits % 8 != 0) bad("size", expected, "a size that overflows or ends inside a byte");
    if (*bits / 8 != entry.num_bytes) {
      bad("size", fmt::format("{} bytes for {} {}", *bits / 8, entry.dtype_text, entry.shape.to_string()),
          fmt::format("{} bytes", entry.num_bytes));
    }
  }
  return entry;
}

// Sorted by offset, tensors must tile the data: no hole, no overlap, no byte after the last.
void check_tiling(std::vector<TensorEntry>& entries, uint64_t data_offset, uint64_t file_bytes,
                  const std::string& where) {
  std::sort(entries.begin(), entries.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return a.file_offset != b.file_offset ? a.file_offset < b.file_offset : a.num_bytes < b.num_bytes;
  });
  uint64_t expected = data_offset;
  for (const TensorEntry& entry : entries) {
    if (entry.file_offset != expected) {
      fail_data(where, tensor_label(entry.name),
                fmt::format("data beginning at offset {}, where the previous tensor ends", expected - data_offset),
                fmt::format("{} ({})", entry.file_offset - data_offset,
                            entry.file_offset > expected ? "a hole" : "an overlap"));
    }
    expected += entry.num_bytes;
  }
  if (expected != file_bytes) {
    fail_data(where, "file size", fmt::format("{} bytes, where the last tensor ends", expected),
              fmt::format("{} bytes", file_bytes));
  }
}

class HeaderReader final : public JsonMemberSink {
 public:
  HeaderReader(SafetensorsHeader& header, uint64_t data_bytes, uint64_t data_offset, const std::string& where)
      : header_(header), data_bytes_(data_bytes), data_offset_(data_offset), where_(where) {}

  void member(std::string&& name, Json&& value) override {
    if (name == kMetadataKey) {
      for (const auto& [key, text] : JsonCursor(value, where_, kMetadataKey).members()) {
        header_.metadata.emplace_back(key, text.string());
      }
      return;
    }
    if (header_.entries.size() == kMaxTensors) {
      fail_data(where_, "header", fmt::format("at most {} tensors", kMaxTensors), "more");
    }
    header_.entries.push_back(parse_entry({std::move(name), std::move(value)}, data_bytes_, data_offset_, where_));
  }

 private:
  SafetensorsHeader& header_;
  uint64_t data_bytes_, data_offset_;
  const std::string& where_;
};

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view json, uint64_t file_bytes, const std::string& where) {
  if (json.empty() || json.front() != '{') fail_data(where, "header", "JSON that begins with {", "something else");
  // JSON allows other white space after the value; the format allows spaces only.
  const size_t last = json.find_last_not_of(' ');
  if (json[last] != '}') fail_data(where, "header", "JSON that ends with } and spaces", "something else");
  const uint64_t data_offset = kLengthBytes + json.size();
  SafetensorsHeader header;
  HeaderReader reader(header, file_bytes - data_offset, data_offset, where);
  Json::parse_members(json.substr(0, last + 1), where, kMaxEntryValues, reader);
  check_tiling(header.entries, data_offset, file_bytes, where);
  std::sort(header.entries.begin(), header.entries.end(),
            [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
  return header;
}

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  File file = File::open_read(path);
  const uint64_t file_bytes = file.size();
  if (file_bytes < kLengthBytes) {
    fail_data(path, "file size", fmt::format("at least {} bytes", kLengthBytes), fmt::format("{} bytes", file_bytes));
  }
  std::array<unsigned char, kLengthBytes> length{};
  file.read_at(0, length.data(), length.size());
  uint64_t header_bytes = 0;
  for (size_t i = length.size(); i-- > 0;) header_bytes = header_bytes << 8 | length[i];
  const uint64_t limit = std::min(kMaxHeaderBytes, file_bytes - kLengthBytes);
  if (header_bytes > limit) {
    fail_data(path, "header length", fmt::format("at most {} bytes", limit), fmt::format("{}", header_bytes));
  }
  std::string json(header_bytes, '\0');
  file.read_at(kLengthBytes, json.data(), json.size());
  SafetensorsHeader header = parse_safetensors_header(json, file_bytes, path);
  return SafetensorsFile(std::move(file), std::move(header));
}

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto at = std::lower_bound(header_.entries.begin(), header_.entries.end(), name,
                                   [](const TensorEntry& entry, std::string_view key) { return entry.name < key; });
  return at != header_.entries.end() && at->name == name ? &*at : nullptr;
}

void SafetensorsFile::read_part(const TensorEntry& entry, uint64_t begin, uint64_t num_bytes, void* out) const {
  TESSERA_CHECK(begin <= entry.num_bytes && num_bytes <= entry.num_bytes - begin, entry.name);
  if (num_bytes > 0) file_.read_at(entry.file_offset + begin, out, num_bytes);
}

}  // namespace tessera::checkpoint
