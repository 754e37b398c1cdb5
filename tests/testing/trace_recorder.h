// SPDX-License-Identifier: Apache-2.0
#pragma once
// Keeps every traced tensor by name; tensors traced several times under one name are appended row by row.
#include <map>
#include <string>
#include <vector>

#include "model/trace.h"

namespace tessera::testing {

class TraceRecorder final : public model::Tracer {
 public:
  // Records only names that end in one of `suffixes`; all where empty.
  explicit TraceRecorder(std::vector<std::string> suffixes = {}) : suffixes_(std::move(suffixes)) {}
  void tensor(std::string_view name, const TensorView& value) override;

  std::vector<float>& floats(const std::string& name) { return floats_[name]; }
  std::vector<int32_t>& ints(const std::string& name) { return ints_[name]; }
  std::vector<uint8_t>& bytes(const std::string& name) { return bytes_[name]; }
  bool has(const std::string& name) const;

 private:
  std::vector<std::string> suffixes_;
  std::map<std::string, std::vector<float>> floats_;
  std::map<std::string, std::vector<int32_t>> ints_;
  std::map<std::string, std::vector<uint8_t>> bytes_;
};

}  // namespace tessera::testing
