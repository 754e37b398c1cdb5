// SPDX-License-Identifier: Apache-2.0
#include "testing/stored_tensors.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "checkpoint/checkpoint.h"
#include "checkpoint/safetensors_writer.h"

namespace tessera::testing {

namespace {

struct OddEntry {
  std::string name, dtype, shape;
  const std::vector<uint8_t>* bytes;
};

template <class T>
void shuffle(std::vector<T>& items, Rng& rng) {
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[rng.below(i)]);
}

void write_odd_file(const std::string& path, std::vector<OddEntry> entries, Rng& rng) {
  shuffle(entries, rng);
  std::vector<std::string> members = {R"("__metadata__": {"format": "pt", "note": "\u00e4 \"quoted\""})"};
  size_t offset = 0;
  for (const OddEntry& entry : entries) {
    std::vector<std::string> fields = {
        "\"dtype\": \"" + entry.dtype + "\"", "\"shape\" : " + entry.shape,
        "\"data_offsets\":[" + std::to_string(offset) + ", " + std::to_string(offset + entry.bytes->size()) + "]"};
    shuffle(fields, rng);
    members.push_back("\"" + entry.name + "\":{" + fields[0] + "," + fields[1] + " , " + fields[2] + "}");
    offset += entry.bytes->size();
  }
  shuffle(members, rng);
  std::string header = "{";
  for (size_t i = 0; i < members.size(); ++i) header += (i == 0 ? "" : ",\n ") + members[i];
  header += "}" + std::string(rng.below(40), ' ');
  std::ofstream file(path, std::ios::binary);
  const uint64_t length = header.size();
  char bytes[8];
  std::memcpy(bytes, &length, 8);
  file.write(bytes, 8) << header;
  for (const OddEntry& entry : entries) {
    file.write(reinterpret_cast<const char*>(entry.bytes->data()), static_cast<std::streamsize>(entry.bytes->size()));
  }
}

}  // namespace

Tensors read_tensors(const std::string& folder) {
  const checkpoint::Checkpoint source = checkpoint::Checkpoint::open(folder);
  Tensors out;
  for (const checkpoint::LocatedTensor& tensor : source.tensors()) {
    Stored& stored = out[tensor.entry->name];
    stored = {*tensor.entry->dtype, tensor.entry->shape, std::vector<uint8_t>(tensor.entry->num_bytes)};
    tensor.read(stored.bytes.data());
  }
  return out;
}

void write_tensors(const std::string& folder, const Tensors& tensors) {
  std::vector<std::pair<std::string, TensorView>> views;
  for (const auto& [name, stored] : tensors) {
    views.emplace_back(name, TensorView{const_cast<uint8_t*>(stored.bytes.data()), stored.dtype, stored.shape});
  }
  checkpoint::write_safetensors(folder + "/model.safetensors", views);
}

void write_odd_tensors(const std::string& folder, const Tensors& tensors, Rng& rng) {
  const std::vector<uint8_t> none, one = {7}, four(4, 1);
  std::vector<std::vector<OddEntry>> shards(1 + rng.below(3));
  const auto pick = [&]() -> std::vector<OddEntry>& { return shards[rng.below(shards.size())]; };
  for (const auto& [name, stored] : tensors) {
    pick().push_back({name, std::string(dtype_name(stored.dtype)), stored.shape.to_string(), &stored.bytes});
  }
  pick().push_back({"odd.empty", "BF16", "[3, 0, 5]", &none});
  pick().push_back({"odd.scalar", "F32", "[]", &four});
  pick().push_back({"odd.byte", "U8", "[1]", &one});
  pick().push_back({"odd.future", "F8_NEW", "[2,2]", &four});
  std::filesystem::remove(folder + "/model.safetensors");
  std::string index;
  for (size_t s = 0; s < shards.size(); ++s) {
    const std::string name = "part-" + std::to_string(s) + ".safetensors";
    for (const OddEntry& entry : shards[s]) {
      index += (index.empty() ? "" : ",") + ("\"" + entry.name + "\":\"" + name + "\"");
    }
    write_odd_file(folder + "/" + name, std::move(shards[s]), rng);
  }
  std::ofstream(folder + "/model.safetensors.index.json")
      << R"({"metadata": {"total_size": 17}, "weight_map": {)" << index << "}}";
}

}  // namespace tessera::testing
