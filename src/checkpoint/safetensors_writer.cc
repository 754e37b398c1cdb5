// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/safetensors_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace tessera::checkpoint {

namespace {

constexpr size_t kLengthBytes = 8;

uint64_t bytes_of(const TensorSpec& tensor) {
  return static_cast<uint64_t>(TensorView{nullptr, tensor.dtype, tensor.shape}.num_bytes());
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<TensorSpec> tensors, const Metadata& metadata)
    : tensors_(std::move(tensors)), file_(path) {
  std::sort(tensors_.begin(), tensors_.end(), [](const TensorSpec& a, const TensorSpec& b) {
    const int x = dtype_bits(a.dtype), y = dtype_bits(b.dtype);
    return x != y ? x > y : a.name < b.name;
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) {
    for (const auto& [key, value] : metadata) header["__metadata__"][key] = value;
  }
  for (const TensorSpec& tensor : tensors_) {
    if (header.contains(tensor.name) || tensor.name == "__metadata__") {
      fail(ErrorCode::kInvalidArgument, fmt::format("{}: tensor {} given twice or reserved", path, tensor.name));
    }
    if (tensor.shape.num_elements() * dtype_bits(tensor.dtype) % 8 != 0) {
      fail(ErrorCode::kInvalidArgument, fmt::format("{}: tensor {} ends inside a byte", path, tensor.name));
    }
    auto shape = nlohmann::ordered_json::array();
    for (int i = 0; i < tensor.shape.rank(); ++i) shape.push_back(tensor.shape[i]);
    const uint64_t begin = expected_bytes_;
    expected_bytes_ += bytes_of(tensor);
    header[tensor.name] = {
        {"dtype", std::string(dtype_name(tensor.dtype))}, {"shape", shape}, {"data_offsets", {begin, expected_bytes_}}};
  }
  std::string text = header.dump();
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');
  unsigned char length[kLengthBytes];
  for (size_t i = 0; i < kLengthBytes; ++i) length[i] = static_cast<unsigned char>(text.size() >> (8 * i));
  file_.write(length, sizeof(length));
  file_.write(text.data(), text.size());
}

void SafetensorsWriter::write(const void* data, size_t bytes) {
  file_.write(data, bytes);
  written_bytes_ += bytes;
}

void SafetensorsWriter::finish() {
  TESSERA_CHECK(written_bytes_ == expected_bytes_, fmt::format("{} of {} bytes", written_bytes_, expected_bytes_));
  file_.commit();
}

void write_safetensors(const std::string& path, const std::vector<std::pair<std::string, TensorView>>& tensors,
                       const SafetensorsWriter::Metadata& metadata) {
  std::vector<TensorSpec> specs;
  std::map<std::string, TensorView> by_name;
  for (const auto& [name, view] : tensors) {
    specs.push_back({name, view.dtype, view.shape});
    by_name.emplace(name, view);
  }
  SafetensorsWriter writer(path, std::move(specs), metadata);
  for (const TensorSpec& spec : writer.order()) {
    const TensorView& view = by_name.at(spec.name);
    writer.write(view.data, static_cast<size_t>(view.num_bytes()));
  }
  writer.finish();
}

}  // namespace tessera::checkpoint
