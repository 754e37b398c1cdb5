// SPDX-License-Identifier: Apache-2.0
// A GPU whose calls fail under requests: the n-th call of CUDA's runtime, alone, with more behind it or for ever, on
// the emulated GPU (device/cuda/emulated/faults.h), with the whole server in front of it. Each request is answered with
// the bits that it gets without a fault, or ends with an error that says so; what a fault leaves behind answers as
// before.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backends/registry.h"
#include "device/cuda/emulated/faults.h"
#include "device/device_choice.h"
#include "engine/host_tier.h"
#include "engine/prefix_cache.h"
#include "model/load_model.h"
#include "model/sequence_caches.h"
#include "server/http/live_server.h"
#include "testing/generated_model.h"
#include "testing/seed.h"
#include "testing/temporary_folder.h"

namespace tessera::server::http {
namespace {

namespace emulated = device::emulated;

struct Asked {
  std::string name, request;
  bool is_stream = false;
};

std::vector<Asked> all_requests() {
  const auto completion = [](const std::string& more) {
    return post("/v1/completions", R"({"model":"tiny","prompt":[0,3,32,17,29,36,4,6,11,50,41,23],)" + more + "}",
                "Connection: close\r\n");
  };
  return {
      {"stream", completion(R"("max_tokens":3,"seed":5,"stream":true)"), true},
      {"choices", completion(R"("max_tokens":2,"seed":6,"n":2,"logprobs":2)")},
      // Draws apart from the step.
      {"penalised", completion(R"("max_tokens":2,"seed":7,"repetition_penalty":1.3,"logit_bias":{"7":1})")},
      {"chat", post("/v1/chat/completions",
                    R"({"model":"tiny","messages":[{"role":"user","content":"9*6="}],"max_tokens":2,"temperature":0})",
                    "Connection: close\r\n")},
  };
}

// Of the one whose client goes.
const std::string kLeft = post(
    "/v1/completions", R"({"model":"tiny","prompt":[0,3,32,17,8],"max_tokens":400,"ignore_eos":true,"stream":true})");

// The body without the sizes of the pieces that it came in; what is cut off stays away.
std::string body_of(const Answer& answer) {
  if (answer.head.find("chunked") == std::string::npos) return answer.body;
  std::string out;
  for (size_t at = 0; at < answer.body.size();) {
    const size_t line = answer.body.find("\r\n", at);
    if (line == std::string::npos) break;
    const size_t size = std::stoul(answer.body.substr(at, line - at), nullptr, 16);
    out += answer.body.substr(line + 2, size);
    at = line + 2 + size + 2;
  }
  return out;
}

// All that is said but for what differs from one time to the next.
std::string said(const Answer& answer) {
  std::string out = body_of(answer);
  constexpr std::string_view kPing = ": ping\n\n";  // of a stream that is slow to begin
  for (size_t at = out.find(kPing); at != std::string::npos; at = out.find(kPing)) out.erase(at, kPing.size());
  for (const std::string_view key : {"\"id\":", "\"created\":", "\"cached_tokens\":", "\"prompt_cache_hit_tokens\":",
                                     "\"prompt_cache_miss_tokens\":"}) {
    for (size_t at = out.find(key); at != std::string::npos; at = out.find(key, at)) {
      out.erase(at, out.find_first_of(",}", at) - at);
    }
  }
  return out;
}

// Texts of a stream's events, one after the other.
std::string text_of(const std::string& body) {
  constexpr std::string_view kKey = "\"text\":\"";
  std::string out;
  for (size_t at = body.find(kKey); at != std::string::npos; at = body.find(kKey, at)) {
    for (at += kKey.size(); body[at] != '"'; ++at) {
      if (body[at] == '\\') out += body[at++];
      out += body[at];
    }
  }
  return out;
}

// Why this is no end of a request that a fault may have met; empty: it is one.
std::string fault_of(const Asked& asked, const Answer& answer, const std::string& expected) {
  if (answer.is_silent) return "no answer and no end";
  if (said(answer) == expected) return "";
  const size_t error = answer.body.find("\"error\"");
  if (error == std::string::npos) return "neither the answer nor an error";
  if (answer.body.find("\"message\":\"\"", error) != std::string::npos) return "an error without words";
  if (answer.status == 503) return answer.head.find("Retry-After: ") == std::string::npos ? "no Retry-After" : "";
  if (answer.status == 500) return "";
  if (answer.status != 200 || !asked.is_stream) return "an error that does not blame the server";
  if (!answer.body.ends_with("0\r\n\r\n")) return "a stream without its end";
  if (!text_of(expected).starts_with(text_of(body_of(answer)))) return "text that is no beginning of the answer";
  return "";
}

// A model on the emulated GPU behind the whole server.
class ServedGpu {
 public:
  explicit ServedGpu(const std::string& folder)
      : tokenizer_(text::Tokenizer::load(TESSERA_SOURCE_DIR "/models/tiny-v4/tokenizer.json")),
        loaded_(load(folder)),
        prefixes_(*loaded_.runner, {.budget_bytes = 3 * loaded_.runner->cache_spec().snapshot_bytes +
                                                    3 * loaded_.runner->cache_spec().page_bytes,
                                    .interval_tokens = 8,
                                    .least_gain_tokens = 4,
                                    .host = &host_,
                                    .least_load_tokens = 4}) {
    LiveSetup setup;
    setup.engine.steps.prefixes = &prefixes_;
    served_ = std::make_unique<ServedRunner>(tokenizer_, *loaded_.runner, std::move(setup));
  }
  ~ServedGpu() {
    served_.reset();
    prefixes_.audit();
  }
  // Only for a GPU that works. To be called last: nothing is served after it.
  void expect_no_pages() {
    served_.reset();
    while (prefixes_.give_up()) {
    }
    const auto state = loaded_.runner->new_sequence(1);
    EXPECT_EQ(dynamic_cast<model::SequenceCaches&>(*state).pool().pages().num_used(), 0);
  }
  ServedRunner& served() { return *served_; }
  uint16_t port() const { return served_->port(); }
  bool becomes_idle() const {
    const auto is_empty = [this] { return served_->engine().status().last_step.cache_bytes == 0; };
    for (int i = 0; i < 10; ++i) {
      if (served_->becomes_idle(is_empty)) return true;
    }
    return false;
  }

 private:
  static model::LoadedModel load(const std::string& folder) {
    model::LoadOptions options;
    options.precision.cache = ops::CacheMode::kExact;
    options.num_threads = 1, options.max_step_tokens = 16, options.with_draft = false;
    return model::load_model(folder, options, backends::all_backends(), device::machine_of("cuda:0"), nullptr, nullptr);
  }

  const text::Tokenizer tokenizer_;
  model::LoadedModel loaded_;
  engine::HostTier host_{int64_t{1} << 26};
  engine::PrefixCache prefixes_;
  std::unique_ptr<ServedRunner> served_;
};

// Of the GPU, in use.
size_t used_memory() {
  size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  return total - free;
}

class HttpDeviceFaults : public ::testing::Test {
 protected:
  HttpDeviceFaults() {
    testing::write_generated_model(testing::smallest_config(), folder_.path());
    emulated::disarm();
    ServedGpu gpu(folder_.path());
    for (const Asked& asked : requests_) {
      const Answer answer = ask_gpu(gpu, asked.request);
      EXPECT_EQ(answer.status, 200) << asked.name << answer.body;
      expected_.push_back(said(answer));
    }
  }
  ~HttpDeviceFaults() override { emulated::disarm(); }

  // Of a client, in seconds: a step takes the emulated GPU one, on a busy machine several.
  static constexpr int kPatience = 120;

  // Answers by their requests' places in the list.
  using Answers = std::map<size_t, Answer>;

  static Answer ask_gpu(const ServedGpu& gpu, const std::string& request) {
    RawClient client(gpu.port());
    client.set_patience(kPatience);
    client.send(request);
    return read_answer(client);
  }

  // The stream and another one at once, beside one whose client goes.
  Answers ask_two(const ServedGpu& gpu) {
    RawClient left(gpu.port());
    left.send(kLeft);
    std::map<size_t, RawClient> clients;
    for (const size_t i : {size_t{0}, 1 + random_() % (requests_.size() - 1)}) {
      RawClient& client = clients.try_emplace(i, gpu.port()).first->second;
      client.set_patience(kPatience);
      client.send(requests_[i].request);
    }
    if (random_() % 2 == 0) left.receive();
    random_() % 2 == 0 ? left.reset() : left.close();
    Answers out;
    for (const auto& [i, client] : clients) out[i] = read_answer(client);
    return out;
  }

  // How many calls two requests take, of those that `only` names.
  std::vector<int64_t> count_calls(const std::vector<std::string_view>& only) {
    ServedGpu gpu(folder_.path());
    emulated::disarm();
    for (const auto& [i, answer] : ask_two(gpu)) EXPECT_EQ(said(answer), expected_[i]);
    EXPECT_TRUE(gpu.becomes_idle());
    std::vector<int64_t> out;
    for (const std::string_view name : only) out.push_back(emulated::num_calls(name));
    return out;
  }

  // Of the answers, those that are errors.
  int check(const Answers& answers) const {
    int num_errors = 0;
    for (const auto& [i, answer] : answers) {
      EXPECT_EQ(fault_of(requests_[i], answer, expected_[i]), "") << requests_[i].name << "\n"
                                                                  << answer.head << "\n"
                                                                  << answer.body << "\nexpected: " << expected_[i];
      num_errors += said(answer) == expected_[i] ? 0 : 1;
    }
    return num_errors;
  }

  // The fault goes by: the same server answers as before, and has lost nothing.
  void expect_it_passes(const emulated::Fault& fault) {
    const size_t before = used_memory();
    {
      ServedGpu gpu(folder_.path());
      emulated::arm(fault);
      const Answers answers = ask_two(gpu);
      const bool is_idle = gpu.becomes_idle();
      const std::string failed = emulated::failed_call();
      emulated::disarm();
      SCOPED_TRACE(::testing::Message() << "calls that failed begin with " << failed);
      num_errors_ += check(answers);
      num_hit_ += failed.empty() ? 0 : 1;
      EXPECT_TRUE(is_idle);
      const size_t next = random_() % requests_.size();
      EXPECT_EQ(said(ask_gpu(gpu, requests_[next].request)), expected_[next]) << requests_[next].name;
      const Answer ready = ask(gpu.port(), get("/health/ready"));
      EXPECT_EQ(ready.status, 200) << ready.body;
      gpu.expect_no_pages();
    }
    EXPECT_EQ(used_memory(), before);
  }

  // The GPU is lost: so says the server, with the third request at the latest, and goes on to answer.
  void expect_it_is_told(int64_t nth) {
    const size_t before = used_memory();
    {
      ServedGpu gpu(folder_.path());
      emulated::arm({.nth = nth, .count = emulated::kForEver});
      check(ask_two(gpu));
      EXPECT_TRUE(gpu.becomes_idle());
      // It took fewer calls than were counted.
      for (int i = 0; i < 10 && emulated::failed_call().empty(); ++i) ask_gpu(gpu, requests_[1].request);
      constexpr int kMostDeviceFailures = 3;  // docs/contracts/engine_loop.md
      for (int i = 0; i < kMostDeviceFailures; ++i) {
        const Answer answer = ask_gpu(gpu, requests_[1].request);
        EXPECT_EQ(answer.status, 500) << answer.body;
        EXPECT_NE(answer.body.find("cudaErrorLaunchFailure"), std::string::npos) << answer.body;
      }
      EXPECT_TRUE(gpu.becomes_idle());
      const Answer ready = ask(gpu.port(), get("/health/ready"));
      EXPECT_EQ(ready.status, 503);
      EXPECT_NE(ready.body.find("the device fails request after request"), std::string::npos) << ready.body;
      EXPECT_EQ(ask(gpu.port(), get("/health/live")).status, 200);
    }
    emulated::disarm();
    EXPECT_EQ(used_memory(), before);
  }

  void run(int num_passing, int num_lasting) {
    std::vector<std::string_view> kinds = {
        "",          "cudaLaunchKernelEx", "cudaMalloc", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaStreamSynchronize",
        "cudaGraph", "cudaStream",         "cudaFree",   "cudaGraphLaunch", "cudaEvent"};
    std::vector<int64_t> totals = count_calls(kinds);
    // Whose steps are queued ahead is waited for by events, others by the stream: two requests may leave one of them
    // out.
    const auto is_wait = [](std::string_view kind) { return kind == "cudaStreamSynchronize" || kind == "cudaEvent"; };
    for (size_t kind = kinds.size(); kind-- > 0;) {
      if (totals[kind] == 0 && is_wait(kinds[kind])) {
        kinds.erase(kinds.begin() + static_cast<std::ptrdiff_t>(kind));
        totals.erase(totals.begin() + static_cast<std::ptrdiff_t>(kind));
        continue;
      }
      ASSERT_GT(totals[kind], 0) << "calls of " << kinds[kind];
    }
    ASSERT_TRUE(std::any_of(kinds.begin(), kinds.end(), is_wait));
    const auto below = [&](uint64_t bound) { return static_cast<int64_t>(random_() % bound); };
    for (int i = 0; i < num_passing && !HasFailure(); ++i) {
      const size_t kind = static_cast<size_t>(i) % kinds.size();
      const bool is_alone = below(2) == 0, is_want = kinds[kind] == "cudaMalloc" || below(4) == 0;
      const emulated::Fault fault{.nth = 1 + below(static_cast<uint64_t>(totals[kind])),
                                  .count = is_alone ? 1 : 2 + below(19),
                                  .code = is_want ? cudaErrorMemoryAllocation : cudaErrorLaunchFailure,
                                  .only = kinds[kind]};
      SCOPED_TRACE(::testing::Message() << fault.count << " from " << fault.nth << " of " << totals[kind] << " calls "
                                        << fault.only << "..., " << cudaGetErrorName(fault.code));
      expect_it_passes(fault);
    }
    for (int i = 0; i < num_lasting && !HasFailure(); ++i) {
      const int64_t nth = 1 + below(static_cast<uint64_t>(totals[0]));
      SCOPED_TRACE(::testing::Message() << "all from " << nth << " of " << totals[0] << " calls");
      expect_it_is_told(nth);
    }
    std::printf("%d of %d faults met a request, %d requests ended with an error\n", num_hit_, num_passing, num_errors_);
    EXPECT_GE(2 * num_hit_, num_passing);
  }

  const testing::TemporaryFolder folder_;
  const std::vector<Asked> requests_ = all_requests();
  std::vector<std::string> expected_;  // of each
  std::mt19937_64 random_{fresh_seed()};
  int num_hit_ = 0, num_errors_ = 0;
};

TEST_F(HttpDeviceFaults, EndTheirRequestsAndNoOthers) {
  run(6, 2);
}

using SlowHttpDeviceFaults = HttpDeviceFaults;

// Minutes: ./test --quick leaves it out.
TEST_F(SlowHttpDeviceFaults, EndTheirRequestsAndNoOthers) {
  const char* const asked = std::getenv("TESSERA_DEVICE_FAULTS");
  run(asked == nullptr ? 60 : std::atoi(asked), 10);
}

}  // namespace
}  // namespace tessera::server::http
