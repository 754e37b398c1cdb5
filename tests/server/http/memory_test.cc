// SPDX-License-Identifier: Apache-2.0
// Memory that ends: each allocation of a request fails, alone or with up to 20 behind it, in whatever thread makes it.
// The request fails with it or is answered rightly; the server lives, gives everything back, and answers the next
// request as if nothing had been.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <regex>
#include <string>
#include <vector>

#include "base/test_seams.h"
#include "server/http/live_server.h"
#include "testing/failing_new.h"
#include "testing/seed.h"

namespace tessera::server::http {
namespace {

#ifdef TESSERA_TEST_SEAMS

// Per request, unless TESSERA_EVERY_ALLOCATION asks for all.
constexpr int64_t kSampled = 24;
constexpr char kAnswer[] = "one two three four five six seven";
// In a request another word of four characters each time that it is made: what it is part of is new to the server.
constexpr std::string_view kNew = "@@@@";

struct Asked {
  std::string name, request;
  std::string said;  // in every whole answer
  int status = 200;
  bool is_stream() const { return name.ends_with("stream"); }
  Asked made() const {
    static int num_made = 0;
    const std::string word = fmt::format("n{:03}", ++num_made % 1000);
    Asked out = *this;
    for (std::string* text : {&out.request, &out.said}) {
      for (size_t at = text->find(kNew); at != std::string::npos; at = text->find(kNew)) {
        text->replace(at, kNew.size(), word);
      }
    }
    return out;
  }
};

std::vector<Asked> all_requests() {
  const std::string close = "Connection: close\r\n", answer = kAnswer;
  const auto ask_for = [&](const std::string& path, const std::string& body) { return post(path, body, close); };
  const std::string tools =
      R"("tools":[{"type":"function","function":{"name":"add","parameters":{"type":"object"}}}],)";
  const auto answer_in = [&](const std::string& format) {
    return ask_for("/v1/chat/completions", chat(R"("response_format":)" + format + ","));
  };
  return {
      {"chat", ask_for("/v1/chat/completions", chat()), answer},
      {"schema",
       answer_in(R"({"type":"json_schema","json_schema":{"name":"a","schema":{"type":"object","properties":{"@@@@":)"
                 R"({"enum":["x","y"]}},"required":["@@@@"],"additionalProperties":false}}})"),
       R"({\"@@@@\": \")"},
      {"pattern", answer_in(R"({"type":"regex","pattern":"@@@@(yes|no)!"})"), "@@@@"},
      {"strict_tool",
       ask_for(
           "/v1/chat/completions",
           chat(R"("tools":[{"type":"function","function":{"name":"@@@@","strict":true,"parameters":{"type":"object",)"
                R"("properties":{"a":{"enum":["b"]}},"required":["a"],"additionalProperties":false}}}],)"
                R"("tool_choice":"required","parallel_tool_calls":false,"max_tokens":300,)")),
       R"("name":"@@@@")"},
      {"no_schema", answer_in(R"({"type":"json_schema","json_schema":{"name":"a","schema":{"$ref":"#/$defs/@@@@"}}})"),
       "invalid_value", 400},
      {"chat_stream", ask_for("/v1/chat/completions", chat(R"("stream":true,)")), "[DONE]"},
      {"chat_choices", ask_for("/v1/chat/completions", chat(R"("n":2,"logprobs":true,)" + tools)), answer},
      {"completions", ask_for("/v1/completions", R"({"model":"tiny","prompt":["a","b","c"],"max_tokens":3})"), ""},
      {"responses", ask_for("/v1/responses", R"({"model":"tiny","input":"Hello"})"), answer},
      {"responses_stream", ask_for("/v1/responses", R"({"model":"tiny","input":"Hello","stream":true})"),
       "response.completed"},
      {"messages", ask_for("/v1/messages", chat(R"("max_tokens":50,)")), answer},
      {"messages_stream", ask_for("/v1/messages", chat(R"("max_tokens":50,"stream":true,)")), "message_stop"},
      {"count_tokens", ask_for("/v1/messages/count_tokens", chat()), "input_tokens"},
      {"tokenize", ask_for("/tokenize", R"({"prompt":"Hello","return_token_strs":true})"), "token_strs"},
      {"detokenize", ask_for("/detokenize", R"({"tokens":[300,301,302]})"), "prompt"},
      {"models", get("/v1/models"), "tiny"},
      {"model", get("/v1/models/tiny"), "tiny"},
      {"live", get("/health/live"), "\"live\""},
      {"ready", get("/health/ready"), "ready"},
      {"deep", get("/health/deep"), "check_seconds"},
      {"metrics", get("/metrics"), "tessera_"},
      {"openapi", get("/openapi.json"), "openapi"},
      {"page", get("/"), "<!doctype html>"},
      {"no_json", ask_for("/v1/chat/completions", "{"), "malformed_json", 400},
      {"bad_field", ask_for("/v1/messages", chat(R"("max_tokens":-1,)")), "max_tokens", 400},
      {"other_model", get("/v1/models/other"), "model_not_found", 404},
      {"no_route", get("/v1/nothing"), "not_found", 404},
      {"too_long", ask_for("/v1/completions", R"({"model":"tiny","prompt":"a","max_tokens":99999})"), "context", 400},
  };
}

// What the answer's JSON says, in events or as a whole.
std::string text_of(const std::string& body) {
  // Responses come as deltas and once more as a whole.
  static const std::regex kText(R"re("(?:content|text)":"([^"]*)")re");
  static const std::regex kDelta(R"re("type":"response\.output_text\.delta"[^\n]*"delta":"([^"]*)")re");
  std::string out;
  for (auto it = std::sregex_iterator(body.begin(), body.end(), kDelta); it != std::sregex_iterator(); ++it) {
    out += (*it)[1];
  }
  if (body.find("response.created") != std::string::npos) return out;
  for (auto it = std::sregex_iterator(body.begin(), body.end(), kText); it != std::sregex_iterator(); ++it) {
    out += (*it)[1];
  }
  return out;
}

bool is_whole(const Asked& asked, const Answer& answer) {
  if (answer.status != asked.status || answer.body.find(asked.said) == std::string::npos) return false;
  return !asked.is_stream() || text_of(answer.body) == kAnswer;
}

// Fewer bytes than the head says.
bool is_cut(const Answer& answer) {
  static const std::regex kLength(R"(Content-Length: (\d+))");
  std::smatch found;
  return std::regex_search(answer.head, found, kLength) && answer.body.size() < std::stoul(found[1]);
}

// A server error; a stream that says so in its last event, or breaks off, after a beginning of the answer. Nothing, or
// a part, where the transport had no memory for more.
std::string fault_of(const Asked& asked, const Answer& answer) {
  if (answer.is_silent) return "no answer and no end";
  if (answer.status == 500) return "an error that blames the server";
  if (answer.status == 503) {
    return answer.head.find("Retry-After: ") == std::string::npos ? "503 without Retry-After" : "";
  }
  if (answer.status == 0 || is_cut(answer)) return "";
  if (answer.status != 200 || !asked.is_stream()) return "neither an answer nor an error";
  const bool is_told = answer.body.find("\"error\"") != std::string::npos;
  const bool has_end = answer.body.ends_with("0\r\n\r\n");
  if (has_end && !is_told) return "a stream that ends as if it were whole";
  if (!std::string(kAnswer).starts_with(text_of(answer.body.substr(0, answer.body.find("\"error\""))))) {
    return "text that is no beginning of the answer";
  }
  return "";
}

class HttpMemory : public ::testing::TestWithParam<Asked> {};

// Beside a stream that is under way: it may be the one that fails, by the same rules.
TEST_P(HttpMemory, AnyFailingAllocationFailsItsRequestAlone) {
  if (!seams::can_new_fail()) GTEST_SKIP() << "operator new is a sanitizer's";
  const Asked beside{"beside_stream", post("/v1/chat/completions", chat(R"("stream":true,)"), "Connection: close\r\n"),
                     "[DONE]"};
  std::mt19937_64 random(fresh_seed());
  const bool is_every = std::getenv("TESSERA_EVERY_ALLOCATION") != nullptr;
  seams::spare_this_thread(true);
  LiveServer::Setup setup;
  setup.answer = kAnswer;
  setup.step_microseconds = 200;
  LiveServer server(setup);
  struct Both {
    Answer asked, beside;
  };
  Asked asked;
  const auto ask_both = [&](int64_t nth, int64_t num_failing) {
    asked = GetParam().made();
    const RawClient other(server.port());
    other.send(beside.request);
    seams::fail_allocation(nth, num_failing);
    Both out;
    out.asked = ask(server.port(), asked.request);
    out.beside = read_answer(other);
    return out;
  };
  for (int i = 0; i < 2; ++i) {
    const Both usual = ask_both(0, 0);
    ASSERT_TRUE(is_whole(asked, usual.asked)) << usual.asked.head << usual.asked.body;
    ASSERT_TRUE(is_whole(beside, usual.beside)) << usual.beside.head << usual.beside.body;
  }
  const int64_t total = seams::num_allocations();
  const int64_t step = is_every ? 1 : std::max<int64_t>(1, total / kSampled);
  int64_t num_failed = 0, num_5xx = 0, num_both = 0;
  const int64_t first = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(step));
  for (int64_t nth = first, num_failing = 1; nth <= total; nth += num_failing == 1 ? step : 0) {
    const Both got = ask_both(nth, num_failing);
    const bool is_idle = server.becomes_idle();
    seams::fail_allocation(0);
    const std::string where =
        std::to_string(num_failing) + " allocations from " + std::to_string(nth) + " of " + std::to_string(total);
    num_failing = num_failing == 1 ? 2 + static_cast<int64_t>(random() % 19) : 1;
    const bool is_fine = is_whole(asked, got.asked), is_beside_fine = is_whole(beside, got.beside);
    ASSERT_EQ(is_fine ? "" : fault_of(asked, got.asked), "") << where << "\n" << got.asked.head << got.asked.body;
    ASSERT_EQ(is_beside_fine ? "" : fault_of(beside, got.beside), "") << where << "\n" << got.beside.body;
    ASSERT_TRUE(is_idle) << where;
    num_failed += is_fine ? 0 : 1;
    num_both += is_fine || is_beside_fine ? 0 : 1;
    num_5xx += got.asked.status >= 500 ? 1 : 0;
    // The same once more, so that a grammar which was not compiled is not taken for one that can't be.
    const Answer next = ask(server.port(), asked.request);
    ASSERT_TRUE(is_whole(asked, next)) << where << "\n" << next.head << next.body;
  }
  if (is_every) {
    std::printf(
        "%ld allocations, each alone and with more: %ld requests failed, %ld with 5xx, %ld with the one beside them\n",
        static_cast<long>(total), static_cast<long>(num_failed), static_cast<long>(num_5xx),
        static_cast<long>(num_both));
  }
  // Most are told; only what the transport's thread lacked for saying so is not. How many of a sample, chance decides;
  // and of what that thread answers alone, all but the POSTs, it lacks about half.
  if (asked.request.starts_with("POST") && !asked.is_stream() && num_failed >= 8) {
    EXPECT_GT(num_5xx, is_every ? num_failed / 2 : 0) << num_5xx << " of " << num_failed;
  }
  EXPECT_EQ(ask(server.port(), get("/health/ready")).status, 200);
  EXPECT_TRUE(server.becomes_idle());
  seams::spare_this_thread(false);
}

INSTANTIATE_TEST_SUITE_P(Requests, HttpMemory, ::testing::ValuesIn(all_requests()),
                         [](const auto& one) { return one.param.name; });

// A drain that is asked for while nothing can be had is made up for once there is memory.
TEST(HttpMemoryEnd, ADrainWithoutMemoryIsMadeUpFor) {
  if (!seams::can_new_fail()) GTEST_SKIP() << "operator new is a sanitizer's";
  seams::spare_this_thread(true);
  for (const int64_t num_failing : {1, 2, 3, 5, 20}) {
    LiveServer server;
    ASSERT_EQ(ask(server.port(), get("/health/live")).status, 200);
    seams::fail_allocation(1, num_failing);
    server.http().drain();
    for (int i = 0; i < 1000 && !server.has_ended(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    seams::fail_allocation(0);
    EXPECT_TRUE(server.has_ended()) << num_failing;
  }
  seams::spare_this_thread(false);
}

#endif

}  // namespace
}  // namespace tessera::server::http
