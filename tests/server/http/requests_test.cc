// SPDX-License-Identifier: Apache-2.0
// Requests that are answered at once: routes, keys, limits, and bytes that are no HTTP.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <new>
#include <random>
#include <stdexcept>

#include "server/http/live_server.h"
#include "server/routes.h"
#include "testing/seed.h"

namespace tessera::server::http {
namespace {

constexpr char kClose[] = "Connection: close\r\n";
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr double kMostSeconds = 1e9;  // they take many times as long
#else
constexpr double kMostSeconds = 0.05;
#endif

TEST(HttpRequests, EveryRouteAnswers) {
  LiveServer server;
  for (const char* path : {"/health", "/health/live", "/health/ready", "/health/deep", "/metrics", "/openapi.json",
                           "/v1/models", "/v1/models/tiny", "/"}) {
    const Answer answer = ask(server.port(), get(path));
    EXPECT_EQ(answer.status, 200) << path << answer.head;
    EXPECT_FALSE(answer.body.empty()) << path;
  }
  const std::pair<const char*, std::string> posts[] = {
      {"/v1/chat/completions", chat()},
      {"/v1/completions", R"({"model":"tiny","prompt":"a"})"},
      {"/v1/responses", R"({"model":"tiny","input":"Hello"})"},
      {"/v1/messages", chat(R"("max_tokens":50,)")},
      {"/v1/messages/count_tokens", chat()},
      {"/tokenize", R"({"model":"tiny","prompt":"Hello"})"},
      {"/detokenize", R"({"model":"tiny","tokens":[5,6]})"},
  };
  for (const auto& [path, body] : posts) {
    const Answer answer = ask(server.port(), post(path, body, kClose));
    EXPECT_EQ(answer.status, 200) << path << answer.body;
  }
  EXPECT_NE(ask(server.port(), post("/v1/chat/completions", chat(), kClose)).body.find("one two three"),
            std::string::npos);
  const Answer head = ask(server.port(), "HEAD /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.body, "");
}

TEST(HttpRequests, UnknownPathsAndMethodsAreErrorsInTheApisShapes) {
  LiveServer server;
  EXPECT_EQ(ask(server.port(), get("/../etc/passwd")).status, 404);
  EXPECT_EQ(ask(server.port(), get("/v1/models/other")).status, 404);
  const Answer method = ask(server.port(), get("/v1/chat/completions"));
  EXPECT_EQ(method.status, 405);
  EXPECT_NE(method.head.find("Allow: POST"), std::string::npos);
  EXPECT_NE(method.body.find("\"code\":\"method_not_allowed\""), std::string::npos);
  EXPECT_EQ(ask(server.port(), post("/metrics", "", kClose)).status, 405);
  const Answer anthropic = ask(server.port(), get("/v1/messages"));
  EXPECT_EQ(anthropic.status, 405);
  EXPECT_NE(anthropic.body.find("{\"type\":\"error\""), std::string::npos);
  const Answer bad = ask(server.port(), post("/v1/messages", "{}", kClose));
  EXPECT_EQ(bad.status, 400);
  EXPECT_NE(bad.body.find("{\"type\":\"error\""), std::string::npos);
}

TEST(HttpRequests, TargetsComeInEveryForm) {
  LiveServer::Setup setup;
  setup.names = {"org/my model"};
  LiveServer server(setup);
  for (const char* target :
       {"/v1/models/org%2Fmy%20model", "/v1/models/org/my%20model?x=1", "http://x/v1/models/org%2fmy%20model",
        "HTTP://other:8000/health/live", "http://x", "https://x?a=b"}) {
    const Answer answer = ask(server.port(), get(target));
    EXPECT_EQ(answer.status, 200) << target << answer.body;
    EXPECT_EQ(answer.head.substr(answer.head.find("\r\nDate: ") + 11, 2), ", ");  // Date: Mon, 23 ...
    EXPECT_NE(answer.head.find(" GMT\r\n"), std::string::npos);
  }
  for (const char* target : {"/v1/models/org%2my%20model", "/v1/models/%00%ff%", "*", "ftp://x/health/live"}) {
    EXPECT_EQ(ask(server.port(), get(target)).status, 404) << target;
  }
  // A page's own server, whichever way the host is named.
  EXPECT_EQ(ask(server.port(), get("http://y.localhost/v1/models", "Origin: http://y.localhost\r\n")).status, 200);
  EXPECT_EQ(ask(server.port(), get("http://y.localhost/v1/models", "Origin: http://x\r\n")).status, 403);
}

TEST(HttpRequests, EmptyLinesBeforeARequestArePassedOver) {
  LiveServer server;
  EXPECT_EQ(ask(server.port(), "\r\n\r\n" + get("/health/live")).status, 200);
  EXPECT_EQ(ask(server.port(), "\rx" + get("/health/live")).status, 400);
}

TEST(HttpRequests, EveryRouteButHealthWantsAKey) {
  LiveServer::Setup setup;
  setup.http.api_keys = {"first-key", "second-key"};
  LiveServer server(setup);
  for (const Route& route : routes()) {
    const std::string path = route.kind == RouteKind::kModel ? "/v1/models/tiny" : std::string(route.path);
    for (const char* key :
         {"", "Authorization: Bearer wrong\r\n", "x-api-key: first-ke\r\n", "Authorization: Bearer\r\n",
          "Authorization: Basic !!!!\r\n", "Authorization: first-key\r\n"}) {
      const std::string fields = std::string(key) + kClose;
      const Answer answer = ask(server.port(), route.is_post ? post(path, "{}", fields) : get(path, key));
      EXPECT_EQ(answer.status, route.needs_key ? 401 : 200) << path << ' ' << key;
      EXPECT_EQ(answer.body.find("wrong"), std::string::npos);
    }
    if (route.is_post) continue;
    for (const char* key : {"Authorization: Bearer first-key\r\n", "x-api-key: second-key\r\n",
                            "authorization: bearer second-key\r\n", "Authorization: Basic bWU6Zmlyc3Qta2V5\r\n"}) {
      EXPECT_EQ(ask(server.port(), get(path, key)).status, 200) << path << ' ' << key;
    }
  }
  EXPECT_EQ(ask(server.port(), get("/nothing")).status, 401);
}

TEST(HttpRequests, PagesOfOtherSitesAreRefusedUnlessAllowed) {
  LiveServer closed;
  EXPECT_EQ(ask(closed.port(), get("/v1/models", "Origin: https://evil.example\r\n")).status, 403);
  EXPECT_EQ(ask(closed.port(), get("/v1/models", "Origin: null\r\n")).status, 403);
  const auto own_page = [](const LiveServer& server, const std::string& host) {
    return ask(server.port(), fmt::format("GET /v1/models HTTP/1.1\r\nHost: {0}\r\nOrigin: http://{0}\r\nx-api-key: "
                                          "key\r\nConnection: close\r\n\r\n",
                                          host));
  };
  for (const char* host : {"localhost:8000", "127.0.0.1:8000", "127.8.9.1", "[::1]:8000", "me.localhost"}) {
    const Answer own = own_page(closed, host);
    EXPECT_EQ(own.status, 200) << host;
    EXPECT_EQ(own.head.find("Access-Control"), std::string::npos);
  }
  // Names that somebody made lead to this machine.
  for (const char* host : {"evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"}) {
    EXPECT_EQ(own_page(closed, host).status, 403) << host;
  }
  LiveServer::Setup setup;
  setup.http.cors_origin = "https://chat.example";
  setup.http.api_keys = {"key"};
  LiveServer open(setup);
  const Answer preflight =
      ask(open.port(),
          "OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\nOrigin: https://chat.example\r\nConnection: close\r\n\r\n");
  EXPECT_EQ(preflight.status, 204);
  EXPECT_NE(preflight.head.find("Access-Control-Allow-Origin: https://chat.example"), std::string::npos);
  EXPECT_NE(preflight.head.find("Access-Control-Allow-Headers: Authorization, "), std::string::npos);
  EXPECT_EQ(own_page(open, "chat.mine.example").status, 200);  // who has the key may come by any name
  // What client libraries send of their own.
  for (const auto& [wanted, allowed] :
       {std::pair{"authorization,x-stainless-os", "authorization,x-stainless-os"}, {"a: b", "Authorization, "}}) {
    const Answer asked = ask(open.port(), fmt::format("OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\nOrigin: "
                                                      "https://chat.example\r\nAccess-Control-Request-Headers: {}\r\n"
                                                      "Connection: close\r\n\r\n",
                                                      wanted));
    EXPECT_NE(asked.head.find(fmt::format("Access-Control-Allow-Headers: {}", allowed)), std::string::npos) << wanted;
  }
  EXPECT_EQ(ask(open.port(), get("/v1/models", "Origin: https://evil.example\r\nx-api-key: key\r\n")).status, 403);
  EXPECT_EQ(ask(open.port(), get("/v1/models", "Origin: https://chat.example\r\nx-api-key: key\r\n")).status, 200);
}

TEST(HttpRequests, IdsComeBackAndNothingElseIsReflected) {
  LiveServer server;
  EXPECT_NE(ask(server.port(), get("/health/live", "X-Request-Id: my-id.1\r\n")).head.find("X-Request-Id: my-id.1"),
            std::string::npos);
  // Anthropic's clients look for another name.
  EXPECT_NE(ask(server.port(), get("/v1/messages", "X-Request-Id: my-id.2\r\n")).head.find("\r\nrequest-id: my-id.2"),
            std::string::npos);
  const Answer odd = ask(server.port(), get("/health/live", "X-Request-Id: a b<c>\r\n"));
  EXPECT_EQ(odd.head.find("a b<c>"), std::string::npos);
  EXPECT_NE(odd.head.find("X-Request-Id: req_"), std::string::npos);
}

TEST(HttpRequests, WhatStandsBetweenChunksIsBounded) {
  LiveServer server;
  const std::string head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
  const std::string body = R"({"prompt": "a"})", chunk = fmt::format("{:x}\r\n{}\r\n", body.size(), body);
  for (const std::string& long_one : {head + "1;" + std::string(300 << 10, 'e') + "\r\n",
                                      head + chunk + "0\r\nTrailer: " + std::string(300 << 10, 't') + "\r\n\r\n"}) {
    const RawClient client(server.port());
    client.send(long_one);
    EXPECT_THAT(client.receive_all(), ::testing::StartsWith("HTTP/1.1 431 "));
  }
  EXPECT_EQ(ask(server.port(), head + chunk + "0\r\nConnection: close\r\n\r\n").status, 200);
}

TEST(HttpRequests, LargeBodiesAreRefusedBeforeTheyAreRead) {
  LiveServer::Setup setup;
  setup.http.max_body_bytes = 1000;
  LiveServer server(setup);
  // Only the head is sent.
  const Answer announced = ask(server.port(), "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n");
  EXPECT_EQ(announced.status, 413);
  EXPECT_NE(announced.body.find("1001"), std::string::npos);
  const RawClient client(server.port());
  client.send("POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n");
  for (int i = 0; i < 3; ++i) client.send("190\r\n" + std::string(400, 'a') + "\r\n");
  EXPECT_EQ(client.receive_until("}}").substr(0, 12), "HTTP/1.1 413");
  const std::string body = R"({"model":"tiny","prompt":")" + std::string(900, 'a') + "\"}";
  EXPECT_EQ(ask(server.port(), post("/tokenize", body, kClose)).status, 200);
}

// Pieces of 256 KiB are what the server keeps of a body.
TEST(HttpRequests, BodiesInChunksOfAnySizeArriveWhole) {
  std::mt19937 random(fresh_seed());
  const LiveServer server;
  for (const size_t most : {size_t{3}, size_t{100}, size_t{100'000}, size_t{1} << 20}) {
    std::string text(most < 100 ? 20'000 : 600'000, ' ');
    for (char& c : text) c = "abcdefgh "[random() % 9];
    const std::string body = R"({"model":"tiny","prompt":")" + text + "\"}";
    std::string chunks;
    for (size_t at = 0; at < body.size();) {
      const std::string part = body.substr(at, 1 + random() % most);
      chunks += fmt::format("{:x}\r\n{}\r\n", part.size(), part);
      at += part.size();
    }
    const std::string head =
        "POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";
    const Answer chunked = ask(server.port(), head + chunks + "0\r\n\r\n");
    const Answer whole = ask(server.port(), post("/tokenize", body, kClose));
    ASSERT_EQ(whole.status, 200) << whole.body.substr(0, 200);
    EXPECT_EQ(chunked.body, whole.body) << most;
  }
}

TEST(HttpRequests, BodiesOfAllRequestsTogetherAreBounded) {
  LiveServer::Setup setup;
  setup.http.max_body_bytes = 10000;
  setup.http.max_bodies_bytes = 20000;
  LiveServer server(setup);
  const std::string head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n\r\n";
  RawClient first(server.port()), second(server.port()), third(server.port());
  first.send(head + std::string(9000, ' '));
  second.send(head + std::string(9000, ' '));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  third.send(head + std::string(9000, ' '));
  const std::string refused = third.receive_until("}}");
  EXPECT_EQ(refused.substr(0, 12), "HTTP/1.1 429");
  EXPECT_NE(refused.find("Retry-After: 1\r\nretry-after-ms: 1000\r\n"), std::string::npos) << refused;
  first.close();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(ask(server.port(), post("/tokenize", std::string(9000, ' '), kClose)).status, 400);
}

TEST(HttpRequests, MalformedHttpIsRefusedAndClosed) {
  LiveServer server;
  const std::string body = "\r\n\r\n";
  for (const char* head : {"\x16\x03\x01\x02", "GET / HTTP/9.9\r\nHost: x", "GET /\r\nHost: x",
                           "GET  / HTTP/1.1\r\nHost: x", "GET / HTTP/1.1", "GET / HTTP/1.1\r\nHost: x\r\nHost: y",
                           "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1",
                           "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2",
                           "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked",
                           "POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip",
                           "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999",
                           "GET / HTTP/1.1\r\nHost: x\r\nbad name: y", "GET / HTTP/1.1\r\nHost: x\r\n folded: y\x01"}) {
    const Answer answer = ask(server.port(), head + body);
    EXPECT_EQ(answer.status, 400) << head;
    EXPECT_NE(answer.head.find("Connection: close"), std::string::npos) << head;
  }
  EXPECT_EQ(ask(server.port(), get("/", "a: " + std::string(17 << 10, 'b') + "\r\n")).status, 431);
  const Answer chunk =
      ask(server.port(), "POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n");
  EXPECT_EQ(chunk.status, 400);
  for (const char* codings : {"gzip, chunked", "gzip\r\nTransfer-Encoding: chunked"}) {
    const Answer coded =
        ask(server.port(),
            fmt::format("POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: {}\r\n\r\n0\r\n\r\n", codings));
    EXPECT_EQ(coded.status, 501) << codings;
    EXPECT_NE(coded.head.find("Connection: close"), std::string::npos);
  }
  EXPECT_EQ(ask(server.port(), post("/tokenize", "{}", "Content-Encoding: gzip\r\nConnection: close\r\n")).status, 415);
}

TEST(HttpRequests, MalformedJsonIsRefusedShortlyOnEveryRoute) {
  LiveServer server;
  std::string many = "{";
  for (int i = 0; i < 100000; ++i) many += "\"" + std::to_string(i) + "\":0,";
  const std::vector<std::string> bodies = {"",
                                           "{",
                                           "[]",
                                           "nul",
                                           "{\"model\":1e400}",
                                           "{\"a\":1,\"a\":2}",
                                           "{\"a\":1,}",
                                           "{\"a\":\"\xC0\x80\"}",
                                           "{\"a\":\"\\udc00\"}",
                                           std::string("{\"a\":\"\0\"}", 9),
                                           "{\"a\":" + std::string(10000, '['),
                                           many + "\"0\":0}",
                                           "{\"model\":\"tiny\"} {}",
                                           "{\"a\":-}",
                                           "{\"a\":.5}",
                                           "{\"a\":0x1}",
                                           "/**/{}",
                                           std::string(1 << 20, ' ')};
  for (const char* path : {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
                           "/v1/messages/count_tokens", "/tokenize", "/detokenize"}) {
    for (const std::string& body : bodies) {
      const std::string request = post(path, body, kClose);
      // On a busy machine the fastest of a few says what the server needs.
      double seconds = 1e9;
      for (int i = 0; i < 5 && seconds >= kMostSeconds; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        const Answer answer = ask(server.port(), request);
        seconds = std::min(seconds, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
        EXPECT_EQ(answer.status, 400) << path << " " << body.substr(0, 40);
        EXPECT_LT(answer.body.size(), 1024u);
      }
      EXPECT_LT(seconds, kMostSeconds) << seconds << " s: " << path << " " << body.substr(0, 40);
    }
  }
  EXPECT_EQ(server.engine().status().totals.num_requests, 0);
  EXPECT_EQ(ask(server.port(), get("/health/ready")).status, 200);
}

TEST(HttpRequests, RandomBytesNeverStopTheServer) {
  LiveServer server;
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const std::string good = post("/v1/chat/completions", chat(), kClose);
  for (int i = 0; i < 200; ++i) {
    std::string bytes = good;
    for (uint32_t k = 1 + random() % 6; k > 0; --k) bytes[random() % bytes.size()] = static_cast<char>(random());
    RawClient client(server.port());
    client.send(bytes.substr(0, random() % (bytes.size() + 1)));
    if (random() % 2 == 0) client.reset();
  }
  EXPECT_EQ(ask(server.port(), get("/health/live")).status, 200);
  EXPECT_TRUE(server.becomes_idle());
}

TEST(HttpRequests, OneConnectionCarriesManyRequests) {
  LiveServer server;
  const RawClient client(server.port());
  // All at once, then byte by byte.
  std::string three;
  for (int i = 0; i < 3; ++i) three += post("/v1/chat/completions", chat());
  client.send(three);
  std::string all;
  const auto num_answers = [&] {
    size_t count = 0;
    for (size_t at = 0; (at = all.find("prompt_cache_miss_tokens", at)) != std::string::npos; ++at) ++count;
    return count;
  };
  while (num_answers() < 3) {
    const std::string part = client.receive();
    ASSERT_FALSE(part.empty());
    all += part;
  }
  for (const char byte : get("/health/live")) client.send(std::string_view(&byte, 1));
  EXPECT_EQ(client.receive_all().substr(0, 15), "HTTP/1.1 200 OK");
}

TEST(HttpRequests, SlowHeadersAndIdleConnectionsAreClosed) {
  LiveServer::Setup setup;
  setup.http.header_seconds = 0.2;
  setup.http.idle_seconds = 0.2;
  LiveServer server(setup);
  const RawClient idle(server.port()), slow(server.port()), body(server.port());
  slow.send("GET / HT");
  body.send("POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{");
  EXPECT_EQ(idle.receive_all(), "");
  EXPECT_EQ(slow.receive_all(), "");
  EXPECT_EQ(body.receive_all(), "");
}

TEST(HttpRequests, OverloadIsRefusedWithATimeToComeAgain) {
  LiveServer::Setup setup;
  setup.engine.waiting.max_requests = 1;
  setup.engine.steps.max_running = 1;
  setup.step_microseconds = 20000;
  setup.answer = std::string(2000, 'a');
  LiveServer server(setup);
  const RawClient running(server.port()), waiting(server.port());
  running.send(post("/v1/chat/completions", chat("\"stream\":true,")));
  running.receive_until("delta");
  // A stream begins before its request does: until then it is the one that waits.
  for (int i = 0; i < 10000 && server.engine().status().totals.num_drawn == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  waiting.send(post("/v1/chat/completions", chat("\"stream\":true,")));
  waiting.receive_until("delta");
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const Answer refused = ask(server.port(), post("/v1/chat/completions", chat(), kClose));
  EXPECT_EQ(refused.status, 429);
  EXPECT_NE(refused.head.find("Retry-After: "), std::string::npos);
  EXPECT_NE(refused.body.find("rate_limit_error"), std::string::npos);
  EXPECT_EQ(ask(server.port(), post("/v1/messages", chat("\"max_tokens\":5,"), kClose)).status, 429);
}

TEST(HttpRequests, PromptsThatDoNotFitGetBothNumbers) {
  LiveServer server;
  const std::string body = R"({"model":"tiny","prompt":")" + std::string(1 << 16, '1') + R"(","max_tokens":5})";
  const Answer answer = ask(server.port(), post("/v1/completions", body, kClose));
  EXPECT_EQ(answer.status, 400);
  EXPECT_NE(answer.body.find("context_length_exceeded"), std::string::npos) << answer.body;
  EXPECT_NE(answer.body.find("32768"), std::string::npos);
  // A default is cut to what is left.
  const auto of_length = [](size_t length) {
    std::string ids;
    for (size_t i = 0; i < length; ++i) ids += i == 0 ? "5" : ",5";
    return post("/v1/completions", R"({"model":"tiny","prompt":[)" + ids + "]}", kClose);
  };
  const Answer last = ask(server.port(), of_length(32765));
  EXPECT_EQ(last.status, 200) << last.body;
  EXPECT_EQ(ask(server.port(), of_length(32768)).status, 400);
}

// What /metrics asks for figures, on the transport's thread: it throws what a test wants.
class ThrowingTier final : public engine::PrefixTier {
 public:
  int64_t longest(const engine::PrefixText&, int64_t) override { return 0; }
  std::optional<engine::SnapshotBytes> load(const engine::PrefixKey&) override { return std::nullopt; }
  bool has_state(const engine::PrefixKey&) override { return false; }
  bool has_segment(const engine::PrefixDigest&) override { return false; }
  bool has_room(int64_t) override { return false; }
  void put(const engine::PrefixKey&, engine::SnapshotBytes) override {}
  void touch(const engine::PrefixKey&) override {}
  void forget(const engine::PrefixText&) override {}
  engine::TierStats stats() const override {
    if (throws) throws();
    return {};
  }
  std::function<void()> throws;
};

class KeptLines final : public LogSink {
 public:
  void write(LogLevel level, std::string_view message) override {
    (level == LogLevel::kWarning ? warnings : requests).emplace_back(message);
  }
  std::vector<std::string> warnings, requests;  // to be read when no request is under way
};

// Whoever reports an id gets it found, of a request that was refused at sight too.
TEST(HttpRequests, TheLogHasTheIdsThatClientsGet) {
  KeptLines log;
  std::vector<std::string> ids;
  {
    LiveServer::Setup setup;
    setup.log = &log;
    LiveServer server(setup);
    for (const std::string& request : {get("/health/live"), get("/nowhere"), std::string("no HTTP\r\n\r\n")}) {
      const std::string head = ask(server.port(), request).head;
      const size_t at = head.find("X-Request-Id: ");
      ASSERT_NE(at, std::string::npos) << head;
      ids.push_back(head.substr(at + 14, head.find('\r', at) - at - 14));
    }
  }
  ASSERT_EQ(log.requests.size(), ids.size());
  for (size_t i = 0; i < ids.size(); ++i) EXPECT_TRUE(log.requests[i].ends_with(ids[i])) << log.requests[i];
}

// What goes wrong within the server is its own fault, 500, but want of memory, which passes, 503. Both are counted.
TEST(HttpRequests, ExceptionsOfTheTransportAreToldCountedAndLogged) {
  ThrowingTier tier;
  KeptLines log;
  LiveServer::Setup setup;
  setup.tiers = {&tier};
  setup.log = &log;
  LiveServer server(setup);
  const auto count_of = [&](int status) {
    const std::string text = ask(server.port(), get("/metrics")).body;
    const std::string name = "route=\"/metrics\",status=\"" + std::to_string(status) + "\"} ";
    const size_t at = text.find(name);
    return at == std::string::npos ? 0 : std::atoi(text.c_str() + at + name.size());
  };
  tier.throws = [] { throw std::runtime_error("planted"); };
  const Answer broken = ask(server.port(), get("/metrics"));
  // After a body that was waited for it is the answer too: what asks for the body is none.
  const Answer late = ask(server.port(),
                          "GET /metrics HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
                          "Content-Length: 1\r\nConnection: close\r\n\r\nx");
  tier.throws = [] { fail(ErrorCode::kResourceExhausted, "planted want"); };
  const Answer exhausted = ask(server.port(), get("/metrics"));
  tier.throws = [] { throw std::bad_alloc(); };
  const Answer short_of = ask(server.port(), get("/metrics"));
  tier.throws = nullptr;
  EXPECT_EQ(broken.status, 500);
  EXPECT_NE(broken.body.find("\"code\":\"internal_error\""), std::string::npos) << broken.body;
  EXPECT_EQ(broken.body.find("planted"), std::string::npos);
  EXPECT_EQ(late.status, 100);
  EXPECT_NE(late.body.find("HTTP/1.1 500 "), std::string::npos) << late.head << late.body;
  for (const Answer& answer : {exhausted, short_of}) {
    EXPECT_EQ(answer.status, 503);
    EXPECT_NE(answer.head.find("Retry-After: 1"), std::string::npos);
    EXPECT_NE(answer.body.find("\"code\":\"resource_exhausted\""), std::string::npos);
  }
  EXPECT_EQ(count_of(500), 2);
  EXPECT_EQ(count_of(503), 2);
  ASSERT_EQ(log.warnings.size(), 4u);
  EXPECT_EQ(log.warnings[0], "/metrics: planted");
  EXPECT_EQ(log.warnings[2], "/metrics: planted want");
}

// Each request of the engine's is counted once, whether its client hears of its end or not.
TEST(HttpRequests, OutcomesThatNobodyHearsOfAreCounted) {
  LiveServer::Setup setup;
  setup.step_microseconds = 200;
  setup.answer = std::string(400, 'a');
  LiveServer server(setup);
  constexpr int kPairs = 20;
  for (int i = 0; i < kPairs; ++i) {
    RawClient leaver(server.port());
    leaver.send(post("/v1/chat/completions", chat("\"stream\":true,")));
    leaver.receive_until("\"content\":\"a");
    leaver.close();
    EXPECT_EQ(ask(server.port(), post("/v1/chat/completions", chat("\"max_tokens\":3,"), kClose)).status, 200);
  }
  ASSERT_TRUE(server.becomes_idle());
  const std::string text = ask(server.port(), get("/metrics")).body;
  const std::string name = "tessera_request_seconds_count{";
  const size_t at = text.find("} ", text.find(name));
  ASSERT_NE(text.find(name), std::string::npos);
  EXPECT_EQ(std::atoi(text.c_str() + at + 2), 2 * kPairs);
}

}  // namespace
}  // namespace tessera::server::http
