// SPDX-License-Identifier: Apache-2.0
#pragma once
// A strict reader of safetensors files: every rule of the format is enforced, and nothing is taken on trust.
//   u64 little-endian N | N bytes of JSON header, may end in spaces | data, tiled by the tensors without gap or overlap
// Source: huggingface/safetensors, README.md (format) and the checks of its reference reader;
// docs/formats/safetensors.md.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/file.h"
#include "tensor/dtype.h"
#include "tensor/tensor_view.h"

namespace tessera::checkpoint {

constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr size_t kMaxTensors = 4'000'000;

struct TensorEntry {
  std::string name;
  std::optional<DType> dtype;  // nothing: a dtype that this program does not know, an error only where it is needed
  std::string dtype_text;      // as the file has it
  Shape shape;
  uint64_t file_offset = 0;  // from the start of the file; any alignment
  uint64_t num_bytes = 0;
};

struct SafetensorsHeader {
  std::vector<TensorEntry> entries;  // by name
  std::vector<std::pair<std::string, std::string>> metadata;
};

// Parses the JSON text of a header (without the length) of a file of `file_bytes` bytes. `where` names the file.
// Throws kDataLoss naming file and tensor for every broken rule.
SafetensorsHeader parse_safetensors_header(std::string_view json, uint64_t file_bytes, const std::string& where);

class SafetensorsFile {
 public:
  // Reads and checks the header. Throws kNotFound, kDataLoss.
  static SafetensorsFile open(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const std::vector<TensorEntry>& entries() const { return header_.entries; }
  const std::vector<std::pair<std::string, std::string>>& metadata() const { return header_.metadata; }
  const TensorEntry* find(std::string_view name) const;  // nullptr where absent

  // Copies bytes [begin, begin + num_bytes) of a tensor of this file. Throws kDataLoss where the file has shrunk.
  // Threads may call it at once.
  void read_part(const TensorEntry& entry, uint64_t begin, uint64_t num_bytes, void* out) const;
  void read(const TensorEntry& entry, void* out) const { read_part(entry, 0, entry.num_bytes, out); }
  // File::will_read()
  void will_read(uint64_t offset, uint64_t num_bytes) const noexcept { file_.will_read(offset, num_bytes); }

 private:
  SafetensorsFile(File file, SafetensorsHeader header) : file_(std::move(file)), header_(std::move(header)) {}
  File file_;
  SafetensorsHeader header_;
};

}  // namespace tessera::checkpoint
