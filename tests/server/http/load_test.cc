// SPDX-License-Identifier: Apache-2.0
// The server under load, from the load generator of `tessera bench serve`, which is held against a server that is
// known.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <iostream>
#include <vector>

#include "bench/ops/timing.h"
#include "bench/serve/load_report.h"
#include "server/http/live_server.h"
#include "testing/temporary_folder.h"

namespace tessera::server::http {
namespace {

class Watcher final : public bench::LoadObserver {
 public:
  void ended(const bench::RequestRecord&) override { ++num_ended; }
  bool stops() override { return num_ended >= stops_after; }
  std::atomic<int64_t> num_ended{0}, stops_after{int64_t{1} << 40};
};

class Loaded {
 public:
  explicit Loaded(LiveSetup setup) : server(setup), address_(bench::Address::parse(url(), "url")) {
    folder_.write("prompts", "{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}");
    options_.model = "tiny";
    options_.prompts_file = folder_.file("prompts");
    options_.output_tokens = bench::LengthDistribution::parse("20000", "");
  }
  bench::LoadResult run(bench::LoadPoint point, bench::LoadLimits limits) {
    return bench::run_load(address_, bench::Workload(options_), "", point, limits, 1, watcher);
  }

  LiveServer server;
  Watcher watcher;

 private:
  std::string url() const { return "http://127.0.0.1:" + std::to_string(server.port()); }

  const testing::TemporaryFolder folder_;
  bench::WorkloadOptions options_;
  const bench::Address address_;
};

// What to say where not all were answered.
std::string problems(const bench::LoadSummary& summary) {
  std::string out = std::to_string(summary.num_refused) + " refused";
  for (const std::string& note : bench::load_notes(summary)) out += "; " + note;
  return out;
}

std::string words(int64_t count) {
  std::string out;
  for (int64_t i = 0; i < count; ++i) out += "a ";
  return out;
}

TEST(HttpLoad, AClosedLoadIsAnsweredWhole) {
  LiveSetup setup;
  setup.answer = words(20);
  Loaded loaded(setup);
  const bench::LoadSummary summary =
      bench::summary_of(loaded.run({.concurrency = 8}, {.num_requests = 50, .seconds = 60}));
  EXPECT_EQ(summary.num_requests, 50);
  EXPECT_EQ(summary.num_answered, 50) << problems(summary);
  EXPECT_EQ(loaded.watcher.num_ended, 50);
  EXPECT_EQ(loaded.server.engine().status().totals.num_completed, 50);
  // The end token counts for the engine.
  EXPECT_GE(summary.output_tokens, 50 * 20);
  EXPECT_EQ(loaded.server.engine().status().totals.num_drawn, summary.output_tokens);
  EXPECT_EQ(summary.first_token.seconds.size(), 50u);
}

TEST(HttpLoad, AnOpenLoadDoesNotWaitAndCountsRefusals) {
  LiveSetup setup;
  setup.engine.waiting.max_requests = 2;
  setup.engine.steps.max_running = 1;
  setup.step_microseconds = 3000;
  setup.answer = words(20);
  Loaded loaded(setup);
  const bench::LoadSummary summary =
      bench::summary_of(loaded.run({.requests_per_second = 2000}, {.num_requests = 60, .seconds = 60}));
  EXPECT_EQ(summary.num_requests, 60);
  EXPECT_GT(summary.num_refused, 0);
  EXPECT_GT(summary.num_answered, 0);
  EXPECT_TRUE(summary.errors.empty()) << problems(summary);
  EXPECT_EQ(summary.refusal.seconds.size(), static_cast<size_t>(summary.num_refused));
  // Nothing of a refused request reached the engine.
  EXPECT_LE(loaded.server.engine().status().totals.num_requests, summary.num_requests - summary.num_refused);
}

TEST(HttpLoad, FailuresAreCountedAndLimitsHold) {
  LiveSetup setup;
  setup.answer = words(3000);
  setup.step_microseconds = 1000;
  Loaded loaded(setup);
  loaded.server.runner().throws = true;
  const bench::LoadSummary broken =
      bench::summary_of(loaded.run({.concurrency = 2}, {.num_requests = 6, .seconds = 60}));
  EXPECT_EQ(broken.num_answered, 0);
  ASSERT_EQ(broken.errors.size(), 1u);
  EXPECT_EQ(broken.errors.begin()->second, 6);
  loaded.server.runner().throws = false;
  const bench::LoadSummary late =
      bench::summary_of(loaded.run({.concurrency = 2}, {.num_requests = 2, .seconds = 60, .answer_seconds = 0.2}));
  ASSERT_EQ(late.errors.size(), 1u);
  EXPECT_NE(late.errors.begin()->first.find("not answered within 0.2 s"), std::string::npos);
  const bench::LoadSummary many = bench::summary_of(loaded.run(
      {.requests_per_second = 1e5}, {.num_requests = 20, .seconds = 60, .answer_seconds = 3, .max_connections = 5}));
  EXPECT_EQ(many.num_requests, 20);
  EXPECT_EQ(many.errors.at("not sent: 5 were under way"), 15);
  loaded.watcher.stops_after = 0;
  const bench::LoadResult stopped = loaded.run({.concurrency = 2}, {.num_requests = 2, .seconds = 60});
  EXPECT_TRUE(stopped.was_stopped);
  EXPECT_TRUE(stopped.records.empty());
  EXPECT_TRUE(loaded.server.becomes_idle());
}

TEST(HttpLoad, AServerThatIsGoneIsNoMoreThanAnError) {
  const testing::TemporaryFolder folder;
  folder.write("prompts", "{\"prompt\": \"x\"}");
  bench::WorkloadOptions options;
  options.prompts_file = folder.file("prompts");
  // Bound and never listened to.
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  socklen_t size = sizeof(address);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  const std::string url = "http://127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  Watcher watcher;
  const bench::LoadSummary summary =
      bench::summary_of(bench::run_load(bench::Address::parse(url, "url"), bench::Workload(options), "",
                                        {.concurrency = 2}, {.num_requests = 4, .seconds = 60}, 1, watcher));
  close(fd);
  EXPECT_EQ(summary.num_answered, 0);
  ASSERT_EQ(summary.errors.size(), 1u);
  EXPECT_NE(summary.errors.begin()->first.find("refused"), std::string::npos) << summary.errors.begin()->first;
}

// A thousand live streams of 20 tokens a second on one thread for input and output. From the end of the step that made
// each token to its arrival at the client, whatever else came with it: printed, since this machine may be busy;
// docs/testing.md has a figure.
TEST(SlowHttpLoad, AThousandStreamsAreServedByOneThread) {
  constexpr int64_t kStreams = 1000, kTokens = 100;
  LiveSetup setup;
  setup.answer = words(kTokens);
  // A step takes 256 of them, so that each gets a token every 50 ms.
  setup.step_microseconds = 12500;
  setup.engine.steps.max_running = kStreams;
  setup.engine.waiting.max_requests = 2 * kStreams;
  setup.max_preparing = 2 * kStreams;
  Loaded loaded(setup);
  loaded.server.runner().keeps_times = true;
  const bench::LoadResult result = loaded.run({.concurrency = kStreams}, {.num_requests = kStreams, .seconds = 60});
  const bench::LoadSummary summary = bench::summary_of(result);
  EXPECT_EQ(summary.num_answered, kStreams) << problems(summary);
  EXPECT_GE(summary.output_tokens, kStreams * kTokens);
  ASSERT_TRUE(loaded.server.becomes_idle());
  const text::Tokenizer tokenizer = text::Tokenizer::load(TESSERA_SOURCE_DIR "/models/tiny-v4/tokenizer.json");
  std::vector<int64_t> ends;  // of the tokens in the answer's text
  for (const int32_t id : tokenizer.encode(setup.answer)) {
    ends.push_back((ends.empty() ? 0 : ends.back()) + static_cast<int64_t>(tokenizer.token_bytes(id).size()));
  }
  bench::Samples latency;
  for (size_t i = 0; i < result.records.size(); ++i) {
    const bench::RequestRecord& record = result.records[i];
    const std::vector<double>& made = loaded.server.runner().made(i);  // its seed is its number
    ASSERT_EQ(made.size(), ends.size() + 1) << "with the end token";
    ASSERT_FALSE(record.text_bytes.empty());
    ASSERT_EQ(record.text_bytes.back(), ends.back());
    for (size_t k = 0, event = 0; k < ends.size(); ++k) {
      while (record.text_bytes[event] < ends[k]) ++event;
      latency.seconds.push_back(record.texts[event] - made[k]);
    }
  }
  std::cout << summary.num_answered << " streams, " << latency.seconds.size() << " tokens; from step to client p50 "
            << latency.quantile(0.5) * 1e3 << " ms, p99 " << latency.quantile(0.99) * 1e3 << " ms, most "
            << latency.quantile(1) * 1e3 << " ms\n";
  EXPECT_GE(*std::min_element(latency.seconds.begin(), latency.seconds.end()), 0) << "no token comes before it is made";
}

// What a token costs the host beside the model, in the processor's time: of the engine's thread between steps, and of
// all the server's threads. Printed; docs/performance/serving.md has figures.
TEST(SlowHttpLoad, HostCostOfAToken) {
  constexpr int64_t kTokens = 200;
  for (const int64_t num_streams : {1, 16, 64, 256}) {
    LiveSetup setup;
    setup.answer = words(kTokens);
    setup.step_microseconds = 1000 + 20 * num_streams;  // the other threads wait for most of it, as beside a GPU
    setup.engine.steps.max_running = num_streams;
    setup.engine.waiting.max_requests = 2 * num_streams;
    setup.max_preparing = static_cast<size_t>(2 * num_streams);
    Loaded loaded(setup);
    const auto seconds_of = [](clockid_t clock) {
      timespec time{};
      clock_gettime(clock, &time);
      return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
    };
    const auto others = [&] { return seconds_of(CLOCK_PROCESS_CPUTIME_ID) - seconds_of(CLOCK_THREAD_CPUTIME_ID); };
    const double before = others();
    const bench::LoadSummary summary =
        bench::summary_of(loaded.run({.concurrency = num_streams}, {.num_requests = 4 * num_streams, .seconds = 60}));
    ASSERT_EQ(summary.num_answered, 4 * num_streams) << problems(summary);
    ASSERT_TRUE(loaded.server.becomes_idle());
    const engine::Totals totals = loaded.server.engine().status().totals;
    const double per_token = 1e6 / static_cast<double>(totals.num_drawn);
    std::cout << num_streams << " streams, " << totals.num_drawn << " tokens in " << totals.num_steps
              << " steps: engine " << loaded.server.runner().outside_seconds() * per_token
              << " us a token, all threads " << (others() - before) * per_token << " us\n";
  }
}

}  // namespace
}  // namespace tessera::server::http
