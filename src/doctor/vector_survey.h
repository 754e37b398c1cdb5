// SPDX-License-Identifier: Apache-2.0
#pragma once
// The small tensors (norms, sinks, biases, hyper-connections) against the same tensor of other layers: erased, of
// another sign, size or level. They are few, so what is out of line is a suspicion that the sample must confirm, but
// for a tensor of zeros among trained ones.
#include <string>
#include <vector>

#include "doctor/suspect.h"

namespace tessera::doctor {

class VectorSurvey {
 public:
  // Vectors in the order of the table. `name` is official.
  void add(const std::string& name, const float* values, int64_t count);
  // Suspects among everything added.
  std::vector<Suspect> suspects() const;

 private:
  struct Facts {
    std::string name;
    double mean = 0, rms = 0, deviation = 0;  // deviation: around the mean
    bool is_positive = false, is_negative = false, is_zero = false;
  };
  void compare(const std::vector<Facts>& family, std::vector<Suspect>& out) const;
  void test_level(const Facts& facts, const std::vector<Facts>& others, std::vector<Suspect>& out) const;
  void test_size(const Facts& facts, const std::vector<Facts>& others, std::vector<Suspect>& out) const;
  void test_biases(std::vector<Suspect>& out) const;

  std::vector<Facts> vectors_;
};

}  // namespace tessera::doctor
