// SPDX-License-Identifier: Apache-2.0
#pragma once
// Golden files (safetensors) written by independent implementations; tests/goldens/README.md says which.
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"

namespace tessera::testing {

class Goldens {
 public:
  explicit Goldens(const std::string& path) : file_(checkpoint::SafetensorsFile::open(path)) {}
  bool has(const std::string& name) const { return file_.find(name) != nullptr; }
  Shape shape(const std::string& name) const;
  // F32 or BF16, widened.
  std::vector<float> floats(const std::string& name) const;
  // I32 or I64, narrowed.
  std::vector<int32_t> ints(const std::string& name) const;
  std::vector<uint8_t> bytes(const std::string& name) const;

 private:
  const checkpoint::TensorEntry& entry(const std::string& name) const;
  checkpoint::SafetensorsFile file_;
};

// A file of tests/goldens.
std::string golden_path(const std::string& name);
// The bundled model.
std::string tiny_model();

}  // namespace tessera::testing
