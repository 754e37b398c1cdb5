// SPDX-License-Identifier: Apache-2.0
// Loading holds the weights and, while it packs one, a second copy of the largest matrix; nothing else of any size.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "backends/registry.h"
#include "base/json.h"
#include "checkpoint/safetensors_writer.h"
#include "model/load_model.h"
#include "model/weight_spec.h"
#include "testing/generated_model.h"
#include "testing/temporary_folder.h"

namespace tessera::model {
namespace {

void replace(std::string& text, const std::string& old_part, const std::string& new_part) {
  const size_t at = text.find(old_part);
  ASSERT_NE(at, std::string::npos) << old_part;
  text.replace(at, old_part.size(), new_part);
}

struct Written {
  Config config;
  uint64_t largest_bytes = 0;  // of a matrix
};

// T1 with more and wider experts and more tokens, about 150 MB, all matrices zeros in BF16.
Written write_checkpoint(const std::string& folder) {
  std::string text = testing::generated_config(testing::Generated::kT1);
  replace(text, "\"n_routed_experts\": 8", "\"n_routed_experts\": 32");
  replace(text, "\"moe_intermediate_size\": 128", "\"moe_intermediate_size\": 512");
  replace(text, "\"vocab_size\": 512", "\"vocab_size\": 16384");
  std::ofstream(folder + "/config.json") << text;
  Written written{parse_config(Json::parse(text, "config"), "config"), 0};
  std::vector<checkpoint::TensorSpec> specs;
  for (const WeightRow& row : make_weight_spec(written.config, 0)) {
    const bool is_map = row.kind == WeightKind::kLinear || row.kind == WeightKind::kPlain;
    const DType dtype = is_map ? DType::kBF16 : row.kind == WeightKind::kTable ? DType::kI64 : DType::kF32;
    specs.push_back({row.name + (is_map ? ".weight" : ""), dtype, row.shape});
    if (is_map) {
      written.largest_bytes = std::max(written.largest_bytes, static_cast<uint64_t>(row.shape.num_elements()) * 2);
    }
  }
  checkpoint::SafetensorsWriter writer(folder + "/model.safetensors", specs);
  const std::vector<char> zeros(size_t{1} << 20);
  for (const checkpoint::TensorSpec& spec : writer.order()) {
    if (spec.dtype == DType::kI64) {  // experts 0, 1, ... for every token
      std::vector<int64_t> ids(static_cast<size_t>(spec.shape.num_elements()));
      for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i) % spec.shape[1];
      writer.write(ids.data(), ids.size() * 8);
      continue;
    }
    for (size_t left = static_cast<size_t>(spec.shape.num_elements() * dtype_bits(spec.dtype) / 8); left > 0;) {
      const size_t part = std::min(left, zeros.size());
      writer.write(zeros.data(), part);
      left -= part;
    }
  }
  writer.finish();
  return written;
}

uint64_t held_bytes() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("VmRSS:")) return std::stoull(line.substr(6)) * 1024;
  }
  return 0;
}

TEST(LoadingPeak, IsTheWeightsAndOneMatrix) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's own memory counts too";
#endif
  const testing::TemporaryFolder folder;
  const Written written = write_checkpoint(folder.path());
  if (::testing::Test::HasFatalFailure()) return;
  // Forgets the peak of tests that ran before in this process (proc(5), clear_refs).
  std::ofstream("/proc/self/clear_refs") << "5" << std::flush;
  const uint64_t before = held_bytes();
  if (before == 0 || device::peak_memory_bytes() > before + (1 << 20)) GTEST_SKIP() << "the system keeps no such count";
  LoadOptions options;
  options.max_step_tokens = 1;
  options.num_threads = 2;
  options.with_draft = false;
  const LoadedModel loaded =
      load_model(folder.path(), options, backends::all_backends(), device::probe_machine(), nullptr, nullptr);
  const uint64_t weights = static_cast<uint64_t>(loaded.runner->facts().weight_bytes);
  const uint64_t peak = device::peak_memory_bytes() - before;
  constexpr uint64_t kRest = uint64_t{24} << 20;  // a step of one token, threads' stacks, what malloc can't give back
  RecordProperty("weights", std::to_string(weights));
  RecordProperty("peak", std::to_string(peak));
  EXPECT_GT(weights, uint64_t{100} << 20);
  // Memory that tests before gave back may be used again without growing the peak.
  EXPECT_GE(peak, weights / 2) << "the count works";
  EXPECT_LE(peak, weights + written.largest_bytes + kRest);
}

}  // namespace
}  // namespace tessera::model
