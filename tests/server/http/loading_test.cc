// SPDX-License-Identifier: Apache-2.0
// The server before there is a service, and the moment at which there is one.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "server/http/live_server.h"
#include "server/routes.h"

namespace tessera::server::http {
namespace {

LiveSetup loading() {
  LiveSetup setup;
  setup.loads = true;
  return setup;
}

// An answer on a connection that stays open.
Answer next_answer(const RawClient& client, std::string_view last_bytes) {
  Answer out;
  const std::string all = client.receive_until(last_bytes);
  if (all.size() > 12) out.status = std::atoi(all.c_str() + 9);
  out.body = all;
  return out;
}

TEST(HttpLoading, RoutesSayThatTheModelLoads) {
  LiveServer server(loading());
  const auto find = [](const Answer& answer, std::string_view text) {
    return answer.body.find(text) != std::string::npos;
  };
  for (const Route& route : routes()) {
    SCOPED_TRACE(route.path);
    const std::string path(route.path.ends_with("*") ? "/v1/models/tiny" : route.path);
    const Answer answer = ask(server.port(), route.is_post ? post(path, chat(), "Connection: close\r\n") : get(path));
    if (path == "/health/live") {
      EXPECT_EQ(answer.status, 200);
      EXPECT_TRUE(find(answer, "\"live\"")) << answer.body;
      continue;
    }
    EXPECT_EQ(answer.status, 503);
    EXPECT_NE(answer.head.find("\r\nRetry-After: 5\r\n"), std::string::npos) << answer.head;
    if (path.starts_with("/health")) {
      EXPECT_TRUE(find(answer, "{\"status\":\"loading\"")) << answer.body;
    } else if (route.errors == ErrorStyle::kAnthropic) {
      EXPECT_TRUE(find(answer, "{\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",")) << answer.body;
    } else {
      EXPECT_TRUE(find(answer, "\"code\":\"model_loading\"")) << answer.body;
    }
  }
  server.attach();
  for (const char* path : {"/health", "/health/live", "/health/ready", "/health/deep", "/v1/models", "/openapi.json"}) {
    EXPECT_EQ(ask(server.port(), get(path)).status, 200) << path;
  }
  // What was refused is counted.
  EXPECT_TRUE(find(ask(server.port(), get("/metrics")),
                   "{model_name=\"tiny\",route=\"/v1/chat/completions\",status=\"503\"} 1"));
}

TEST(HttpLoading, WhatIsRefusedAnywayIsRefusedAsEver) {
  LiveSetup setup = loading();
  setup.http.api_keys = {"a key of some length"};
  setup.http.max_body_bytes = 1000;
  LiveServer server(setup);
  constexpr char kKey[] = "x-api-key: a key of some length\r\nConnection: close\r\n";
  const std::string large(2000, ' ');
  EXPECT_EQ(ask(server.port(), get("/v1/models")).status, 401);
  EXPECT_EQ(ask(server.port(), get("/metrics", "x-api-key: another\r\n")).status, 401);
  EXPECT_EQ(ask(server.port(), get("/v1/models", kKey)).status, 503);
  EXPECT_EQ(ask(server.port(), get("/health/live")).status, 200);
  EXPECT_EQ(ask(server.port(), get("/health/ready")).status, 503);
  EXPECT_EQ(ask(server.port(), get("/none", kKey)).status, 404);
  EXPECT_EQ(ask(server.port(), get("/v1/completions", kKey)).status, 405);
  EXPECT_EQ(ask(server.port(), post("/v1/completions", large, kKey)).status, 413);
  EXPECT_EQ(ask(server.port(), post("/v1/completions", chat(), kKey)).status, 503);
}

TEST(HttpLoading, AConnectionOutlivesTheSwitch) {
  LiveServer server(loading());
  const RawClient client(server.port());
  // A body that has come is no part of the next request.
  client.send(post("/v1/chat/completions", chat()));
  EXPECT_EQ(next_answer(client, "model_loading\"}}").status, 503);
  // A request that has begun before the switch is answered by who is there when all of it has come.
  const std::string request = post("/v1/chat/completions", chat());
  client.send(std::string_view(request).substr(0, request.size() - 5));
  server.attach();
  client.send(std::string_view(request).substr(request.size() - 5));
  const Answer answer = next_answer(client, "}}");
  EXPECT_EQ(answer.status, 200) << answer.body;
  EXPECT_NE(answer.body.find("one two three"), std::string::npos) << answer.body;
}

TEST(HttpLoading, NobodyIsTurnedAwayAtTheSwitch) {
  LiveServer server(loading());
  std::atomic<int> num_refused{0}, num_answered{0}, num_others{0};
  std::vector<std::thread> clients;
  clients.reserve(4);
  for (int i = 0; i < 4; ++i) {
    clients.emplace_back([&, i] {
      // Every second one keeps its connection.
      const RawClient kept(server.port());
      for (int num_good = 0; num_good < 5;) {
        const Answer answer = i % 2 == 0
                                  ? ask(server.port(), post("/v1/chat/completions", chat(), "Connection: close\r\n"))
                                  : (kept.send(post("/v1/chat/completions", chat())), next_answer(kept, "}}"));
        ++(answer.status == 503 ? num_refused : answer.status == 200 ? num_answered : num_others);
        if (answer.status == 200) ++num_good;
        if (num_others > 0) return;
      }
    });
  }
  while (num_refused < 20 && num_others == 0) std::this_thread::yield();
  server.attach();
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(num_others, 0);
  EXPECT_EQ(num_answered, 20);
}

TEST(HttpLoading, ItEndsWithoutAService) {
  LiveServer server(loading());
  const RawClient idle(server.port());
  EXPECT_EQ(ask(server.port(), get("/health/live")).status, 200);
  server.http().drain();
  for (int i = 0; i < 5000 && !server.has_ended(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(server.has_ended());
  EXPECT_EQ(idle.receive_all(), "");
  EXPECT_FALSE(idle.is_silent());
}

}  // namespace
}  // namespace tessera::server::http
