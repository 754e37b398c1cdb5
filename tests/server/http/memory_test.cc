// SPDX-License-Identifier: Apache-2.0
// Memory that ends: each allocation of a request fails once, in whatever thread makes it. The request fails with it or
// is answered rightly; the server lives, gives everything back, and answers the next request as if nothing had been.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "base/test_seams.h"
#include "server/http/live_server.h"
#include "testing/seed.h"

namespace tessera::server::http {
namespace {

#ifdef TESSERA_TEST_SEAMS

// Per request, unless TESSERA_EVERY_ALLOCATION asks for all.
constexpr int64_t kSampled = 24;

struct Asked {
  std::string name, request;
  std::string said;  // in every whole answer
  // The transport's thread renders JSON. It is spared then: the JSON library allocates in a destructor, and an
  // exception there ends the program. Preparation and engine are not.
  bool is_rendered = true;
};

std::vector<Asked> all_requests() {
  const std::string close = "Connection: close\r\n", answer = "one two three";
  const auto ask_for = [&](const std::string& path, const std::string& body) { return post(path, body, close); };
  const std::string tools =
      R"("tools":[{"type":"function","function":{"name":"add","parameters":{"type":"object"}}}],)";
  return {
      {"chat", ask_for("/v1/chat/completions", chat()), answer},
      {"chat_stream", ask_for("/v1/chat/completions", chat(R"("stream":true,)")), "[DONE]"},
      {"chat_choices", ask_for("/v1/chat/completions", chat(R"("n":2,"logprobs":true,)" + tools)), answer},
      {"responses", ask_for("/v1/responses", R"({"model":"tiny","input":"Hello"})"), answer},
      {"messages", ask_for("/v1/messages", chat(R"("max_tokens":50,)")), answer},
      {"messages_stream", ask_for("/v1/messages", chat(R"("max_tokens":50,"stream":true,)")), "message_stop"},
      {"metrics", get("/metrics"), "tessera_", false},
      {"page", get("/"), "<!doctype html>", false},
  };
}

bool is_whole(const Asked& asked, const Answer& answer) {
  return answer.status == 200 && answer.body.find(asked.said) != std::string::npos;
}

// An answer of class 5, none at all, or a stream that breaks off or ends with an error.
bool has_failed(const Asked& asked, const Answer& answer) {
  const bool is_stream = asked.name.ends_with("stream");
  return answer.status == 0 || answer.status >= 500 || (is_stream && answer.status == 200);
}

class HttpMemory : public ::testing::TestWithParam<Asked> {};

TEST_P(HttpMemory, AnyFailingAllocationFailsItsRequestAlone) {
  const Asked& asked = GetParam();
  std::mt19937_64 random(fresh_seed());
  const bool is_every = std::getenv("TESSERA_EVERY_ALLOCATION") != nullptr;
  seams::spare_this_thread(true);
  LiveServer::Setup setup;
  setup.spares_transport = asked.is_rendered;
  LiveServer server(setup);
  ASSERT_TRUE(is_whole(asked, ask(server.port(), asked.request)));
  seams::fail_allocation(0);
  const Answer usual = ask(server.port(), asked.request);
  const int64_t total = seams::num_allocations();
  ASSERT_TRUE(is_whole(asked, usual)) << usual.body;
  const int64_t step = is_every ? 1 : std::max<int64_t>(1, total / kSampled);
  int64_t num_failed = 0, num_5xx = 0;
  for (int64_t nth = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(step)); nth <= total; nth += step) {
    seams::fail_allocation(nth);
    const Answer answer = ask(server.port(), asked.request);
    const bool is_idle = server.becomes_idle();
    seams::fail_allocation(0);
    const std::string where = "allocation " + std::to_string(nth) + " of " + std::to_string(total);
    ASSERT_FALSE(answer.is_silent) << where;
    ASSERT_TRUE(is_whole(asked, answer) || has_failed(asked, answer)) << where << "\n" << answer.head << answer.body;
    ASSERT_TRUE(is_idle) << where;
    num_failed += is_whole(asked, answer) ? 0 : 1;
    num_5xx += answer.status >= 500 ? 1 : 0;
    const Answer next = ask(server.port(), asked.request);
    ASSERT_TRUE(is_whole(asked, next)) << where << "\n" << next.head << next.body;
  }
  if (is_every) {
    std::printf("%ld allocations: %ld requests failed, %ld with 5xx\n", static_cast<long>(total),
                static_cast<long>(num_failed), static_cast<long>(num_5xx));
  }
  EXPECT_EQ(ask(server.port(), get("/health/ready")).status, 200);
  EXPECT_TRUE(server.becomes_idle());
  seams::spare_this_thread(false);
}

INSTANTIATE_TEST_SUITE_P(Requests, HttpMemory, ::testing::ValuesIn(all_requests()),
                         [](const auto& info) { return info.param.name; });

#endif

}  // namespace
}  // namespace tessera::server::http
