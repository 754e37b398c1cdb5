// SPDX-License-Identifier: Apache-2.0
// Answers that take their time: streams, clients that go away or read slowly, the server's end.
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <thread>

#include "server/http/live_server.h"
#include "testing/seed.h"

namespace tessera::server::http {
namespace {

constexpr char kClose[] = "Connection: close\r\n";

std::string long_text(size_t num_words) {
  std::string out;
  for (size_t i = 0; i < num_words; ++i) out += "word" + std::to_string(i) + " ";
  return out;
}

// What the content deltas of a chat stream add up to.
std::string streamed_text(const std::string& stream) {
  std::string out;
  const std::string_view key = "\"delta\":{\"content\":\"";
  for (size_t at = stream.find(key); at != std::string::npos; at = stream.find(key, at)) {
    at += key.size();
    out += stream.substr(at, stream.find('"', at) - at);
  }
  return out;
}

// Calls' markup is kept out of answers to requests without tools, at no cost: a token that is drawn apart from its step
// takes a row of logits to the host.
TEST(HttpStreams, TokensOfPlainChatsAreDrawnInTheirSteps) {
  LiveServer::Setup setup;
  setup.answer = "one " + std::string(text::kDsmlToken) + " two";
  LiveServer server(setup);
  const Answer answer = ask(server.port(), post("/v1/chat/completions", chat(), kClose));
  EXPECT_EQ(answer.status, 200);
  EXPECT_NE(answer.body.find(" two"), std::string::npos) << answer.body;
  EXPECT_EQ(answer.body.find("DSML"), std::string::npos) << answer.body;
  EXPECT_EQ(server.runner().num_sampled, 0);
}

TEST(HttpStreams, AStreamAddsUpToTheWholeAnswer) {
  LiveServer::Setup setup;
  setup.answer = long_text(40);
  LiveServer server(setup);
  const Answer whole = ask(server.port(), post("/v1/chat/completions", chat(), kClose));
  const Answer stream = ask(server.port(), post("/v1/chat/completions", chat("\"stream\":true,"), kClose));
  EXPECT_EQ(streamed_text(stream.body), setup.answer);
  EXPECT_NE(whole.body.find("\"content\":\"" + setup.answer + "\""), std::string::npos);
  EXPECT_NE(stream.body.find("data: [DONE]\n\n\r\n0\r\n\r\n"), std::string::npos);
}

TEST(HttpStreams, StopStringsChoicesAndLengthsEndAnswers) {
  LiveServer::Setup setup;
  setup.answer = "alpha beta gamma delta";
  LiveServer server(setup);
  const Answer stopped = ask(server.port(), post("/v1/chat/completions", chat(R"("stop":["gam"],"n":3,)"), kClose));
  size_t count = 0;
  for (size_t at = 0; (at = stopped.body.find("\"content\":\"alpha beta \"", at)) != std::string::npos; ++at) ++count;
  EXPECT_EQ(count, 3u) << stopped.body;
  const Answer cut = ask(server.port(), post("/v1/chat/completions", chat(R"("max_tokens":3,)"), kClose));
  EXPECT_NE(cut.body.find("\"finish_reason\":\"length\""), std::string::npos);
  EXPECT_NE(cut.body.find("\"completion_tokens\":3"), std::string::npos);
  // Past its end the scripted model says nothing but end tokens, which are counted and not shown.
  const Answer on =
      ask(server.port(), post("/v1/chat/completions", chat(R"("ignore_eos":true,"max_tokens":200,)"), kClose));
  EXPECT_NE(on.body.find("\"content\":\"alpha beta gamma delta\""), std::string::npos) << on.body;
  EXPECT_NE(on.body.find("\"completion_tokens\":200"), std::string::npos);
  EXPECT_TRUE(server.becomes_idle());
}

TEST(HttpStreams, AThinkingBudgetEndsTheReasoning) {
  LiveServer::Setup setup;
  setup.answer = long_text(30);
  LiveServer server(setup);
  const std::string body = chat(R"("thinking":{"type":"enabled","budget_tokens":1024},"max_tokens":2000,)");
  EXPECT_EQ(ask(server.port(), post("/v1/messages", body, kClose)).status, 200);
  const Answer answer =
      ask(server.port(),
          post("/v1/chat/completions", chat(R"("thinking":{"type":"enabled"},"thinking_token_budget":4,)"), kClose));
  ASSERT_EQ(answer.status, 200) << answer.body;
  EXPECT_NE(answer.body.find("\"reasoning_content\":\"word0"), std::string::npos) << answer.body;
  EXPECT_NE(answer.body.find("\"reasoning_tokens\":5"), std::string::npos) << answer.body;
  EXPECT_NE(answer.body.find("\"finish_reason\":\"stop\""), std::string::npos) << answer.body;
  EXPECT_EQ(answer.body.find("\"content\":\"\""), std::string::npos) << answer.body;
  const Answer none =
      ask(server.port(),
          post("/v1/chat/completions", chat(R"("thinking":{"type":"enabled"},"thinking_token_budget":0,)"), kClose));
  EXPECT_NE(none.body.find("\"content\":\"word0"), std::string::npos) << none.body;
  EXPECT_NE(none.body.find("\"reasoning_tokens\":0"), std::string::npos) << none.body;
}

// Whoever was let in stays so: what follows the reasoning is neither one request too many nor one that a drain refuses.
TEST(HttpStreams, AThinkingBudgetEndsInTheMiddleOfADrainAndOfAQueue) {
  constexpr char kThinks[] = R"("stream":true,"thinking":{"type":"enabled"},"thinking_token_budget":20,)";
  for (const bool drains : {true, false}) {
    LiveServer::Setup setup;
    setup.answer = long_text(60);
    setup.step_microseconds = 5000;
    setup.engine.waiting.max_requests = 1;
    setup.engine.steps.max_running = 1;
    LiveServer server(setup);
    const RawClient stream(server.port()), waiting(server.port());
    stream.send(post("/v1/chat/completions", chat(kThinks), kClose));
    std::string all = stream.receive_until("\"delta\":{\"reasoning_content\":");
    if (drains) {
      server.http().drain();
    } else {
      waiting.send(post("/v1/chat/completions", chat(R"("max_tokens":1,)"), kClose));
    }
    all += stream.receive_all();
    EXPECT_EQ(all.find("\"error\""), std::string::npos) << all;
    EXPECT_NE(streamed_text(all), "") << all;
    EXPECT_NE(all.find("data: [DONE]"), std::string::npos) << all;
    if (!drains) EXPECT_EQ(read_answer(waiting).status, 200);
  }
}

// A call, its result and the call as it was sampled: spaces that no renderer would write come back to the model.
TEST(HttpStreams, CallsAreMadeAndReplayedAsTheyWereSampled) {
  LiveServer::Setup setup;
  const std::string header(text::kInvokeTag), parameter(text::kParameterTag);
  setup.answer = "\n\n" + std::string(text::kToolCallsTag) + ">\n" + header + " name=\"add\">\n" + parameter +
                 " name=\"numbers\" string=\"false\">[1,   2]" + std::string(text::kEndParameterTag) + ">\n" +
                 std::string(text::kEndInvokeTag) + ">\n" + std::string(text::kEndToolCallsTag);
  LiveServer server(setup);
  const std::string tools =
      R"("tools":[{"type":"function","function":{"name":"add","parameters":{"type":"object"}}}],)";
  const Answer whole = ask(server.port(), post("/v1/chat/completions", chat(tools), kClose));
  EXPECT_NE(whole.body.find("\"finish_reason\":\"tool_calls\""), std::string::npos) << whole.body;
  const Answer stream = ask(server.port(), post("/v1/chat/completions", chat("\"stream\":true," + tools), kClose));
  EXPECT_NE(stream.body.find("\"finish_reason\":\"tool_calls\""), std::string::npos) << stream.body;
  const size_t id = whole.body.find("\"call_");
  ASSERT_NE(id, std::string::npos);
  const std::string name = whole.body.substr(id + 1, whole.body.find('"', id + 1) - id - 1);
  const auto conversation = [&](const std::string& call_id) {
    return R"({"model":"tiny",)" + tools +
           R"("messages":[{"role":"user","content":"Hello"},{"role":"assistant","tool_calls":[)" + R"({"id":")" +
           call_id + R"(","type":"function","function":{"name":"add","arguments":"{\"numbers\": [1, 2]}"}}]},)" +
           R"({"role":"tool","tool_call_id":")" + call_id + R"(","content":"3"}],"max_tokens":5})";
  };
  const auto prompt_tokens = [&](const std::string& call_id) {
    const std::string body = ask(server.port(), post("/v1/chat/completions", conversation(call_id), kClose)).body;
    const size_t at = body.find("\"prompt_tokens\":");
    return at == std::string::npos ? -1 : std::atoi(body.c_str() + at + 16);
  };
  const int replayed = prompt_tokens(name), written = prompt_tokens("call_" + std::string(name.size() - 5, '0'));
  EXPECT_GT(written, 0);
  EXPECT_EQ(replayed, written + 2);  // the two spaces more
  EXPECT_NE(ask(server.port(), get("/metrics")).body.find("tessera_replay_hits_total{model_name=\"tiny\"} 1"),
            std::string::npos);
}

TEST(HttpStreams, ASilentStreamSaysThatItLives) {
  LiveServer::Setup setup;
  setup.http.keep_alive_seconds = 0.05;
  setup.step_microseconds = 300000;
  setup.answer = "a";
  LiveServer server(setup);
  EXPECT_NE(ask(server.port(), post("/v1/chat/completions", chat("\"stream\":true,"), kClose)).body.find(": ping\n\n"),
            std::string::npos);
  EXPECT_NE(ask(server.port(), post("/v1/messages", chat("\"max_tokens\":5,\"stream\":true,"), kClose))
                .body.find("event: ping"),
            std::string::npos);
}

TEST(HttpStreams, ErrorsOfTheEngineReachTheClient) {
  LiveServer::Setup setup;
  setup.answer = long_text(1000);
  setup.step_microseconds = 2000;
  LiveServer server(setup);
  const RawClient stream(server.port());
  stream.send(post("/v1/chat/completions", chat("\"stream\":true,"), kClose));
  stream.receive_until("\"delta\":{\"content\":");
  server.runner().throws = true;
  const std::string rest = stream.receive_all();
  EXPECT_NE(rest.find("data: {\"error\":"), std::string::npos) << rest;
  EXPECT_EQ(rest.find("[DONE]"), std::string::npos);
  EXPECT_EQ(ask(server.port(), post("/v1/chat/completions", chat(), kClose)).status, 500);
  EXPECT_EQ(ask(server.port(), get("/health/ready")).status, 200);
  // The third in a row is the device's doing.
  EXPECT_EQ(ask(server.port(), post("/v1/chat/completions", chat(), kClose)).status, 500);
  // The engine says so behind the step, whose answer has been given by then.
  for (int i = 0; i < 1000 && ask(server.port(), get("/health/ready")).status != 503; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  for (const char* path : {"/health/ready", "/health/deep"}) {
    const Answer lost = ask(server.port(), get(path));
    EXPECT_EQ(lost.status, 503) << path;
    EXPECT_NE(lost.body.find("the device fails"), std::string::npos) << lost.body;
  }
  EXPECT_EQ(ask(server.port(), get("/health/live")).status, 200);
  server.runner().throws = false;
  EXPECT_EQ(ask(server.port(), post("/v1/chat/completions", chat("\"max_tokens\":3,"), kClose)).status, 200);
  EXPECT_EQ(ask(server.port(), get("/health/ready")).status, 200);
}

TEST(HttpStreams, AnAnswerHasATimeLimit) {
  LiveServer::Setup setup;
  setup.answer = long_text(2000);
  setup.step_microseconds = 5000;
  setup.http.request_seconds = 0.2;
  LiveServer server(setup);
  EXPECT_EQ(ask(server.port(), post("/v1/chat/completions", chat(), kClose)).status, 504);
  const Answer stream = ask(server.port(), post("/v1/chat/completions", chat("\"stream\":true,"), kClose));
  EXPECT_EQ(stream.status, 200);
  EXPECT_NE(stream.body.find("\"code\":\"timeout\""), std::string::npos);
  EXPECT_TRUE(server.becomes_idle());
}

// Wherever a client goes away, the engine gives its request up: within one step, by its own contract.
TEST(HttpStreams, ClientsMayGoAwayAtAnyPoint) {
  LiveServer::Setup setup;
  setup.answer = long_text(3000);
  setup.step_microseconds = 200;
  setup.engine.steps.max_running = 8;
  LiveServer server(setup);
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const std::string requests[] = {post("/v1/chat/completions", chat("\"stream\":true,\"n\":2,")),
                                  post("/v1/chat/completions", chat()),
                                  post("/v1/messages", chat("\"max_tokens\":9000,\"stream\":true,")),
                                  post("/v1/completions", R"({"model":"tiny","prompt":["a","b"],"max_tokens":9000})")};
  for (int i = 0; i < 1000; ++i) {
    RawClient client(server.port());
    const std::string& request = requests[random() % std::size(requests)];
    client.send(random() % 8 == 0 ? request.substr(0, random() % request.size()) : request);
    const uint32_t where = random() % 8;
    if (where < 5) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    } else if (request.find("stream") != std::string::npos) {
      pollfd none{};
      poll(&none, 0, 1);
    }
    if (random() % 2 == 0) client.reset();
  }
  EXPECT_TRUE(server.becomes_idle());
  EXPECT_EQ(server.engine().status().last_step.cache_bytes, 0);
  EXPECT_EQ(ask(server.port(), get("/health/ready")).status, 200);
}

TEST(HttpStreams, ASlowReaderPausesItselfAlone) {
  LiveServer::Setup setup;
  setup.answer = long_text(4000);
  LiveServer server(setup);
  const RawClient slow(server.port(), 2048);
  slow.send(post("/v1/chat/completions", chat("\"stream\":true,"), kClose));
  slow.receive(100);
  const Answer other = ask(server.port(), post("/v1/chat/completions", chat("\"stream\":true,"), kClose));
  EXPECT_EQ(streamed_text(other.body), setup.answer);
  // The other one is through, and this one is neither lost nor run ahead.
  EXPECT_EQ(server.engine().status().totals.num_completed, 1);
  slow.hold(1 << 16);  // through its small window the rest may take minutes, a probe of TCP's at a time
  const std::string rest = slow.receive_all();
  EXPECT_NE(rest.find("data: [DONE]"), std::string::npos);
  EXPECT_TRUE(server.becomes_idle());
}

TEST(HttpStreams, ADrainLetsRunningAnswersFinish) {
  LiveServer::Setup setup;
  setup.answer = long_text(60);
  setup.step_microseconds = 2000;
  LiveServer server(setup);
  const RawClient stream(server.port()), idle(server.port());
  stream.send(post("/v1/chat/completions", chat("\"stream\":true,")));
  std::string all = stream.receive_until("\"delta\":{\"content\":");
  server.http().drain();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(ask(server.port(), post("/v1/chat/completions", chat(), kClose)).status, 503);
  EXPECT_EQ(ask(server.port(), get("/health/ready")).status, 503);
  for (const char* path : {"/health", "/health/live"}) {
    const Answer lives = ask(server.port(), get(path));
    EXPECT_EQ(lives.status, 200) << path;
    EXPECT_EQ(lives.body.rfind("{\"status\":\"live\",", 0), 0u) << lives.body;
  }
  all += stream.receive_all();
  EXPECT_EQ(streamed_text(all), setup.answer);
  EXPECT_EQ(idle.receive_all(), "");
}

TEST(HttpStreams, ADrainEndsAtItsDeadlineOrAtOnce) {
  for (const bool at_once : {false, true}) {
    LiveServer::Setup setup;
    setup.answer = long_text(9000);
    setup.step_microseconds = 2000;
    setup.http.drain_seconds = at_once ? 600 : 0.2;
    LiveServer server(setup);
    const RawClient stream(server.port());
    stream.send(post("/v1/chat/completions", chat("\"stream\":true,")));
    stream.receive_until("\"delta\":{\"content\":");
    server.http().drain();
    if (at_once) server.http().drain();
    const std::string rest = stream.receive_all();
    EXPECT_NE(rest.find("data: {\"error\":"), std::string::npos) << rest;
  }
}

// As where a rank is lost in the middle of a collective.
TEST(HttpStreams, AnEngineThatStandsStillHoldsUpNoErrorOfAServerThatBreaksOff) {
  LiveServer::Setup setup;
  setup.step_microseconds = 4000000;
  LiveServer server(setup);
  const RawClient stream(server.port()), whole(server.port()), idle(server.port());
  stream.send(post("/v1/chat/completions", chat("\"stream\":true,")));
  stream.receive_until("\"role\":\"assistant\"");
  whole.send(post("/v1/chat/completions", chat("\"max_tokens\":3,")));
  while (server.engine().status().num_waiting_tokens == 0) std::this_thread::yield();  // the step is the other's
  const auto begin = std::chrono::steady_clock::now();
  server.http().break_off("ending: rank 1 was lost");
  const std::string streamed = stream.receive_all();
  const Answer answer = read_answer(whole);
  EXPECT_EQ(idle.receive_all(), "");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2));
  const std::string error = R"({"error":{"message":"server: expected ready, found ending: rank 1 was lost",)";
  EXPECT_NE(streamed.find("data: " + error), std::string::npos) << streamed;
  EXPECT_TRUE(streamed.ends_with("\r\n0\r\n\r\n")) << streamed;
  EXPECT_EQ(answer.status, 503);
  EXPECT_EQ(answer.body.find(error), 0) << answer.body;
}

TEST(HttpStreams, ManyStreamsShareTheServer) {
  LiveServer::Setup setup;
  setup.answer = long_text(30);
  setup.step_microseconds = 500;
  setup.engine.steps.max_running = 64;
  LiveServer server(setup);
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 100; ++i) {
    clients.push_back(std::make_unique<RawClient>(server.port()));
    clients.back()->send(post("/v1/chat/completions", chat("\"stream\":true,"), kClose));
  }
  for (const auto& client : clients) EXPECT_EQ(streamed_text(client->receive_all()), setup.answer);
}

}  // namespace
}  // namespace tessera::server::http
