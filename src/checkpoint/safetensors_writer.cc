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
  // Text by hand: an ordered JSON object would look through all earlier names for each of many thousands.
  const auto quoted = [](const std::string& value) { return nlohmann::json(value).dump(); };
  std::string text = "{";
  if (!metadata.empty()) {
    nlohmann::ordered_json object = nlohmann::ordered_json::object();
    for (const auto& [key, value] : metadata) object[key] = value;
    text += "\"__metadata__\":" + object.dump() + ",";
  }
  for (const TensorSpec& tensor : tensors_) {
    if (places_.contains(tensor.name) || tensor.name == "__metadata__") {
      fail(ErrorCode::kInvalidArgument, fmt::format("{}: tensor {} given twice or reserved", path, tensor.name));
    }
    if (tensor.shape.num_elements() * dtype_bits(tensor.dtype) % 8 != 0) {
      fail(ErrorCode::kInvalidArgument, fmt::format("{}: tensor {} ends inside a byte", path, tensor.name));
    }
    std::string shape;
    for (int i = 0; i < tensor.shape.rank(); ++i) shape += fmt::format("{}{}", i == 0 ? "" : ",", tensor.shape[i]);
    const uint64_t begin = expected_bytes_;
    expected_bytes_ += bytes_of(tensor);
    places_[tensor.name] = {begin, bytes_of(tensor)};
    text += fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}},)", quoted(tensor.name),
                        dtype_name(tensor.dtype), shape, begin, expected_bytes_);
  }
  if (text.back() == ',') text.pop_back();
  text += "}";
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');
  unsigned char length[kLengthBytes];
  for (size_t i = 0; i < kLengthBytes; ++i) length[i] = static_cast<unsigned char>(text.size() >> (8 * i));
  for (auto& [name, place] : places_) place.file_offset += kLengthBytes + text.size();
  file_.write(length, sizeof(length));
  file_.write(text.data(), text.size());
}

void SafetensorsWriter::write(const void* data, size_t bytes) {
  file_.write(data, bytes);
  written_bytes_ += bytes;
}

void SafetensorsWriter::write_part(std::string_view tensor, uint64_t begin, const void* data, size_t bytes) {
  const auto place = places_.find(tensor);
  TESSERA_CHECK(place != places_.end(), std::string(tensor));
  TESSERA_CHECK(begin <= place->second.num_bytes && bytes <= place->second.num_bytes - begin, std::string(tensor));
  file_.write_at(place->second.file_offset + begin, data, bytes);
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
