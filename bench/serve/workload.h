// SPDX-License-Identifier: Apache-2.0
#pragma once
// What is asked: bodies of requests, each a function of the seed and its number alone, so that two runs ask the same.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/rng.h"

namespace tessera::bench {

// Numbers of tokens, at least 1.
class LengthDistribution {
 public:
  // "128"; "uniform:64-256", both included; "lognormal:512,0.6": median and sigma, cut at 16 times the median. `flag`
  // opens the message of kInvalidArgument.
  static LengthDistribution parse(std::string_view text, std::string_view flag);
  int64_t draw(Rng& rng) const;

 private:
  enum class Kind { kFixed, kUniform, kLogNormal };
  Kind kind_ = Kind::kFixed;
  int64_t low_ = 1, high_ = 1;  // kLogNormal: low_ is the median
  double sigma_ = 0;
};

struct WorkloadOptions {
  std::string model;  // as the server calls it
  LengthDistribution prompt_tokens = LengthDistribution::parse("128", "");
  LengthDistribution output_tokens = LengthDistribution::parse("64", "");
  double shared_prefix = 0;     // of every prompt, the share with which all begin alike
  int64_t max_token_id = 1000;  // random prompts are of the ids 3 to this
  uint64_t seed = 0;
  // A file of prompts, asked in turn instead of random ones; empty: none. A JSON object a line: "prompt" (a text, or
  // token ids) or "messages", and perhaps "max_tokens".
  std::string prompts_file;
};

struct BenchRequest {
  std::string path, body;
};

class Workload {
 public:
  // Throws kNotFound or kDataLoss for a file of prompts that is not one.
  explicit Workload(WorkloadOptions options);
  // The request numbered `index`, from 0. All are streamed, with usage, and without an end before max_tokens where the
  // prompt is random.
  BenchRequest request(int64_t index) const;

 private:
  struct Asked {
    std::string path, member;  // "prompt": ..., or "messages": ..., as JSON
    int64_t max_tokens = 0;    // 0: drawn
  };
  void read_prompts();

  WorkloadOptions options_;
  std::vector<Asked> asked_;
};

}  // namespace tessera::bench
