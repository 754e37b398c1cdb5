// SPDX-License-Identifier: Apache-2.0
#include "testing/goldens.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "numeric/bf16.h"

namespace tessera::testing {

const checkpoint::TensorEntry& Goldens::entry(const std::string& name) const {
  const checkpoint::TensorEntry* found = file_.find(name);
  if (found == nullptr) throw std::runtime_error("no golden tensor " + name);
  return *found;
}

Shape Goldens::shape(const std::string& name) const {
  return entry(name).shape;
}

std::vector<uint8_t> Goldens::bytes(const std::string& name) const {
  std::vector<uint8_t> out(entry(name).num_bytes);
  file_.read(entry(name), out.data());
  return out;
}

std::vector<float> Goldens::floats(const std::string& name) const {
  const std::vector<uint8_t> raw = bytes(name);
  std::vector<float> out(static_cast<size_t>(shape(name).num_elements()));
  if (entry(name).dtype == DType::kF32) {
    std::copy_n(raw.data(), raw.size(), reinterpret_cast<uint8_t*>(out.data()));
  } else if (entry(name).dtype == DType::kBF16) {
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = numeric::bf16_to_float(static_cast<uint16_t>(raw[2 * i] | raw[2 * i + 1] << 8));
    }
  } else {
    throw std::runtime_error("not floating point: " + name);
  }
  return out;
}

std::vector<int32_t> Goldens::ints(const std::string& name) const {
  const std::vector<uint8_t> raw = bytes(name);
  std::vector<int32_t> out(static_cast<size_t>(shape(name).num_elements()));
  if (entry(name).dtype == DType::kI32) {
    std::memcpy(out.data(), raw.data(), raw.size());
  } else if (entry(name).dtype == DType::kI64) {
    for (size_t i = 0; i < out.size(); ++i) {
      int64_t value = 0;
      std::memcpy(&value, raw.data() + 8 * i, 8);
      out[i] = static_cast<int32_t>(value);
    }
  } else {
    throw std::runtime_error("not integers: " + name);
  }
  return out;
}

std::string golden_path(const std::string& name) {
  return std::string(TESSERA_SOURCE_DIR) + "/tests/goldens/" + name;
}
std::string tiny_model() {
  return std::string(TESSERA_SOURCE_DIR) + "/models/tiny-v4";
}

}  // namespace tessera::testing
