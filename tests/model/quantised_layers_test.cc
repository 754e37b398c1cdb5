// SPDX-License-Identifier: Apache-2.0
// T0 with quantised caches, layer by layer with teacher-forced inputs: every cache code and scale against those of an
// independent implementation; then the whole model. A value within FP32 noise of a rounding boundary may take the other
// code: such flips are listed, must be one step wide, and are few.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "model/model_helpers.h"
#include "testing/compare.h"
#include "testing/generated_model.h"
#include "testing/goldens.h"
#include "testing/temporary_folder.h"
#include "testing/test_machine.h"
#include "testing/trace_recorder.h"

namespace tessera {
namespace {

constexpr int64_t kHidden = 64, kNope = 64, kRope = 64, kIndex = 128;

// Counts differing bytes; each must be one code step (of E4M3, or of one E2M1 nibble) from the golden one.
int count_flips(const std::string& what, const std::vector<uint8_t>& found, const std::vector<uint8_t>& golden,
                bool is_fp4) {
  EXPECT_EQ(found.size(), golden.size()) << what;
  int flips = 0;
  for (size_t i = 0; i < std::min(found.size(), golden.size()); ++i) {
    if (found[i] == golden[i]) continue;
    ++flips;
    int step = std::abs(static_cast<int>(found[i] & 0x7F) - static_cast<int>(golden[i] & 0x7F));
    if (is_fp4) {
      const int low = std::abs((found[i] & 7) - (golden[i] & 7)),
                high = std::abs((found[i] >> 4 & 7) - (golden[i] >> 4 & 7));
      step = std::max(low, high);
    }
    std::printf("%s: byte %zu is 0x%02x, golden 0x%02x\n", what.c_str(), i, found[i], golden[i]);
    EXPECT_LE(step, 1) << what << " byte " << i;
  }
  return flips;
}

// Cuts entries of `stride` bytes into the part [begin, begin + count).
std::vector<uint8_t> column(const std::vector<uint8_t>& entries, int64_t stride, int64_t begin, int64_t count) {
  std::vector<uint8_t> out;
  for (size_t at = 0; at < entries.size(); at += static_cast<size_t>(stride)) {
    out.insert(out.end(), entries.begin() + static_cast<int64_t>(at) + begin,
               entries.begin() + static_cast<int64_t>(at) + begin + count);
  }
  return out;
}

std::vector<float> as_floats(const std::vector<uint8_t>& bytes) {
  std::vector<float> out(bytes.size() / 4);
  if (!bytes.empty()) std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

class QuantisedLayers : public ::testing::Test {
 protected:
  QuantisedLayers() : goldens_(testing::golden_path("generated-quantised.safetensors")) {
    testing::write_generated_model(testing::Generated::kT0, folder_.path());
    loaded_ = testing::load(folder_.path(), ops::InputMode::kF32, ops::CacheMode::kFp8);
  }

  struct Outputs {
    std::vector<float> logits, drafts;
  };
  Outputs run_whole(const std::vector<int32_t>& ids, int64_t tokens);
  void check_run(const std::string& run, int64_t tokens);
  void check_layer(const std::string& run, int layer, int64_t tokens, testing::TraceRecorder& trace);
  void check_caches(const std::string& run, int layer, testing::TraceRecorder& trace);
  void check_entries(const std::string& name, const std::string& golden, testing::TraceRecorder& trace);

  testing::TemporaryFolder folder_;
  testing::Goldens goldens_;
  model::LoadedModel loaded_;
  int flips_ = 0;
  int64_t codes_ = 0;
};

// kKvFp8F32 entries: codes | rotary FP32 | one scale.
void QuantisedLayers::check_entries(const std::string& name, const std::string& golden, testing::TraceRecorder& trace) {
  const int64_t stride = ops::EntryLayout{ops::EntryFormat::kKvFp8F32, kNope + kRope, kRope}.entry_bytes();
  const std::vector<uint8_t>& entries = trace.bytes(name);
  if (!goldens_.has(golden + "_codes")) {
    EXPECT_TRUE(entries.empty()) << name;
    return;
  }
  flips_ += count_flips(name + " codes", column(entries, stride, 0, kNope), goldens_.bytes(golden + "_codes"), false);
  flips_ += count_flips(name + " scales", column(entries, stride, kNope + 4 * kRope, 1),
                        goldens_.bytes(golden + "_scales"), false);
  codes_ += static_cast<int64_t>(entries.size());
  EXPECT_TRUE(
      testing::is_close(as_floats(column(entries, stride, kNope, 4 * kRope)), goldens_.floats(golden + "_rope"), 1e-5))
      << name;
}

void QuantisedLayers::check_caches(const std::string& run, int layer, testing::TraceRecorder& trace) {
  const std::string ours = "layers." + std::to_string(layer) + ".", theirs = run + ours;
  check_entries(ours + "attn.window_entry_bytes", theirs + "window", trace);
  check_entries(ours + "attn.compressor.entry_bytes", theirs + "entries", trace);
  if (goldens_.has(theirs + "index_keys_codes")) {
    const int64_t stride = kIndex / 2 + kIndex / 32;
    const std::vector<uint8_t>& keys = trace.bytes(ours + "attn.indexer.compressor.entry_bytes");
    flips_ += count_flips(ours + "key codes", column(keys, stride, 0, kIndex / 2),
                          goldens_.bytes(theirs + "index_keys_codes"), true);
    flips_ += count_flips(ours + "key scales", column(keys, stride, kIndex / 2, kIndex / 32),
                          goldens_.bytes(theirs + "index_keys_scales"), false);
  }
}

void QuantisedLayers::check_layer(const std::string& run, int layer, int64_t tokens, testing::TraceRecorder& trace) {
  const std::string ours = "layers." + std::to_string(layer) + ".", theirs = run + ours;
  check_caches(run, layer, trace);
  if (goldens_.has(theirs + "index_keys_codes")) {
    EXPECT_EQ(trace.ints(ours + "attn.indexer.selection"), goldens_.ints(theirs + "selection")) << theirs;
  }
  EXPECT_EQ(trace.ints(ours + "ffn.expert_ids"), goldens_.ints(theirs + "experts")) << theirs;
  EXPECT_TRUE(
      testing::is_close(trace.floats(ours + "ffn.expert_weights"), goldens_.floats(theirs + "expert_weights"), 1e-5))
      << theirs;
  // Sublayer outputs, of all rows or of listed ones.
  std::vector<int32_t> rows;
  if (goldens_.shape(theirs + "mid")[0] == tokens) {
    for (int32_t t = 0; t < tokens; ++t) rows.push_back(t);
  } else {
    rows = goldens_.ints("positions");
  }
  for (const auto& [name, width] :
       {std::pair<std::string, int64_t>{"attn_out", kHidden}, {"mid", 4 * kHidden}, {"ffn_out", kHidden}}) {
    const std::vector<float>& all = trace.floats(ours + name);
    std::vector<float> picked;
    for (const int32_t row : rows)
      picked.insert(picked.end(), all.begin() + row * width, all.begin() + (row + 1) * width);
    // A flipped code moves its neighbourhood by an E4M3 step, hence not 1e-5.
    EXPECT_TRUE(testing::is_close(picked, goldens_.floats(theirs + name), 1e-4)) << theirs << name;
  }
}

void QuantisedLayers::check_run(const std::string& run, int64_t tokens) {
  const std::vector<int32_t> ids = goldens_.ints(run + "input_ids");
  model::Model& model = dynamic_cast<model::Model&>(*loaded_.runner);
  for (int layer = 0; layer < 5; ++layer) {
    testing::TraceRecorder trace(
        {"entry_bytes", "selection", "expert_ids", "expert_weights", "attn_out", "mid", "ffn_out", ".out"});
    model.set_tracer(&trace);
    const auto state = model.new_sequence(tokens);
    std::vector<float> streams = goldens_.floats(run + "streams." + std::to_string(layer));
    for (int64_t begin = 0; begin < tokens; begin += model.max_step_tokens()) {
      const int64_t count = std::min(model.max_step_tokens(), tokens - begin);
      const model::SequenceSlice slice{state.get(),
                                       std::span(ids).subspan(static_cast<size_t>(begin), static_cast<size_t>(count)),
                                       model::LogitRows::kNone};
      model.run_layer(static_cast<size_t>(layer), {&slice, 1},
                      {streams.data() + begin * 4 * kHidden, DType::kF32, {count, 4, kHidden}});
      dynamic_cast<model::SequenceCaches&>(*state).advance(count);
    }
    model.set_tracer(nullptr);
    check_layer(run, layer, tokens, trace);
    EXPECT_TRUE(testing::is_close(streams, goldens_.floats(run + "streams." + std::to_string(layer + 1)), 1e-4))
        << run << layer;
  }
}

TEST_F(QuantisedLayers, CodesOfEveryLayer) {
  check_run("run64.", 64);
  check_run("run300.", 300);
  std::printf("%d flips in %lld cache bytes\n", flips_, static_cast<long long>(codes_));
  EXPECT_LE(flips_, codes_ / 1000);
}

// Logits and drafts of a whole run, by chunks of 60 tokens.
QuantisedLayers::Outputs QuantisedLayers::run_whole(const std::vector<int32_t>& ids, int64_t tokens) {
  const auto state = loaded_.runner->new_sequence(tokens);
  Outputs out;
  for (int64_t begin = 0; begin < tokens; begin += 60) {
    const size_t count = static_cast<size_t>(std::min<int64_t>(60, tokens - begin));
    const model::SequenceSlice slice{state.get(), std::span(ids).subspan(static_cast<size_t>(begin), count),
                                     model::LogitRows::kAll};
    const TensorView rows = loaded_.runner->step({&slice, 1});
    out.logits.insert(out.logits.end(), rows.as<float>(), rows.as<float>() + rows.shape.num_elements());
    const model::SequenceSlice next{state.get(), std::span(ids).subspan(static_cast<size_t>(begin) + 1, count),
                                    model::LogitRows::kAll};
    const TensorView draft = loaded_.runner->draft({&next, 1});
    out.drafts.insert(out.drafts.end(), draft.as<float>(), draft.as<float>() + draft.shape.num_elements());
  }
  return out;
}

// A GPU sums in another order than the golden data's maker, so a cached code may flip on the way: what a run then gives
// lies further off (docs/contracts/numerics.md, 5), but only there, and flips are counted as those of single layers.
TEST_F(QuantisedLayers, WholeModel) {
  model::Model& model = dynamic_cast<model::Model&>(*loaded_.runner);
  for (const auto& [run, tokens] : {std::pair<std::string, int64_t>{"run64.", 64}, {"run300.", 300}}) {
    const std::vector<int32_t> ids = goldens_.ints(run + "input_ids");
    const Outputs out = run_whole(ids, tokens);
    testing::TraceRecorder trace({"entry_bytes"});
    model.set_tracer(&trace);
    const Outputs traced = run_whole(ids, tokens);
    model.set_tracer(nullptr);
    EXPECT_TRUE(testing::same_bits(traced.logits, out.logits)) << run;
    EXPECT_TRUE(testing::same_bits(traced.drafts, out.drafts)) << run;
    flips_ = 0, codes_ = 0;
    for (int layer = 0; layer < 5; ++layer) check_caches(run, layer, trace);
    EXPECT_LE(flips_, codes_ / 1000);
    const double bound = testing::test_machine().gpu.has_value() && flips_ > 0 ? 1e-3 : 1e-4;
    EXPECT_TRUE(testing::is_close(out.logits, goldens_.floats(run + "logits"), bound)) << run << flips_ << " flips";
    EXPECT_TRUE(testing::is_close(out.drafts, goldens_.floats(run + "mtp_logits"), bound)) << run << flips_ << " flips";
  }
}

}  // namespace
}  // namespace tessera
