// SPDX-License-Identifier: Apache-2.0
// The load generator's parts that need no server: reading answers cut anywhere, what is asked, what is said of it.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "base/error.h"
#include "base/json.h"
#include "bench/serve/load_report.h"
#include "bench/serve/response_reader.h"
#include "testing/temporary_folder.h"

namespace tessera::bench {
namespace {

struct Read {
  int status = 0;
  std::string body;
  bool is_complete = false, is_whole_at_end = false;
  bool operator==(const Read&) const = default;
};

Read read_answer(const std::vector<std::string>& pieces) {
  ResponseReader reader;
  Read out;
  for (const std::string& piece : pieces) {
    reader.feed(piece);
    out.body += reader.take_body();
  }
  out.status = reader.status();
  out.is_complete = reader.is_complete();
  out.is_whole_at_end = reader.finish();
  return out;
}

std::vector<std::string> read_events(const std::vector<std::string>& pieces) {
  EventReader reader;
  std::vector<std::string> out;
  for (const std::string& piece : pieces) {
    reader.feed(piece);
    for (std::string data; reader.next(data);) out.push_back(data);
  }
  return out;
}

std::vector<std::string> cut(const std::string& bytes, std::mt19937& random) {
  std::vector<std::string> out;
  for (size_t at = 0; at < bytes.size();) {
    const size_t size = 1 + random() % 7;
    out.push_back(bytes.substr(at, size));
    at += size;
  }
  return out;
}

TEST(ResponseReader, BodiesDoNotDependOnWhereTheBytesAreCut) {
  const std::string chunked =
      "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
      "5\r\nhello\r\n1;ext=1\r\n\n\r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n";
  const std::string counted =
      "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 429 Too Many Requests\r\nretry-after:  7 \r\nContent-Length: "
      "4\r\n\r\nbusy";
  const std::string to_end = "HTTP/1.0 200 OK\r\n\r\nall of it";
  std::mt19937 random(1);
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(read_answer(cut(chunked, random)), (Read{200, "hello\n0123456789", true, true}));
    EXPECT_EQ(read_answer(cut(counted, random)), (Read{429, "busy", true, true}));
    EXPECT_EQ(read_answer(cut(to_end, random)), (Read{200, "all of it", false, true}));
    const std::string part = chunked.substr(0, random() % chunked.size());
    EXPECT_FALSE(read_answer(cut(part, random)).is_whole_at_end) << part;
  }
  ResponseReader reader;
  reader.feed(counted);
  EXPECT_EQ(reader.field("retry-after"), "7");
  EXPECT_EQ(reader.field("server"), "");
}

TEST(ResponseReader, WhatIsNoAnswerIsRefused) {
  for (const char* bytes :
       {"SSH-2.0-OpenSSH\r\n\r\n", "HTTP/1.1 abc\r\n\r\n", "HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n"}) {
    EXPECT_THROW(read_answer({bytes}), Error) << bytes;
  }
  EXPECT_THROW(read_answer({std::string(ResponseReader::kMaxHeadBytes + 1, 'x')}), Error);
}

TEST(EventReader, EventsDoNotDependOnWhereTheBytesAreCut) {
  const std::string stream =
      "\xEF\xBB\xBF"
      "data: {\"a\":1}\n\n: ping\n\nevent: named\ndata:two\r\ndata: lines\r\n\r\nid: 7\n\ndata\n\ndata: \xC3\xA9\r\r"
      "data: [DONE]\n\ndata: never ended";
  const std::vector<std::string> expected = {"{\"a\":1}", "two\nlines", "", "\xC3\xA9", "[DONE]"};
  std::mt19937 random(2);
  EXPECT_EQ(read_events({stream}), expected);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(read_events(cut(stream, random)), expected);
  EventReader reader;
  EXPECT_THROW(reader.feed(std::string(EventReader::kMaxEventBytes + 1, 'x')), Error);
}

TEST(LengthDistribution, DrawsWhatItSays) {
  Rng rng(3);
  EXPECT_EQ(LengthDistribution::parse("128", "--x").draw(rng), 128);
  const LengthDistribution uniform = LengthDistribution::parse("uniform:4-6", "--x");
  std::set<int64_t> seen;
  for (int i = 0; i < 200; ++i) seen.insert(uniform.draw(rng));
  EXPECT_EQ(seen, (std::set<int64_t>{4, 5, 6}));
  const LengthDistribution normal = LengthDistribution::parse("lognormal:100,1", "--x");
  int num_below = 0;
  for (int i = 0; i < 2000; ++i) {
    const int64_t drawn = normal.draw(rng);
    ASSERT_GE(drawn, 1);
    ASSERT_LE(drawn, 1600);
    num_below += drawn < 100 ? 1 : 0;
  }
  EXPECT_NEAR(num_below, 1000, 150);
  for (const char* wrong : {"", "0", "-1", "x", "1.5", "uniform:5", "uniform:6-4", "lognormal:100", "lognormal:1,9",
                            "lognormal:100,x", "zipf:3,4", "2000000", "uniform:1-99999999999999999999"}) {
    try {
      LengthDistribution::parse(wrong, "--prompt-tokens");
      ADD_FAILURE() << wrong;
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()).rfind("--prompt-tokens: expected a number", 0), 0u) << error.what();
    }
  }
}

std::vector<int64_t> prompt_of(const BenchRequest& request) {
  const Json body = Json::parse(request.body, "body");
  std::vector<int64_t> out;
  for (const Json& id : body.find("prompt")->array()) out.push_back(id.integer());
  return out;
}

TEST(Workload, RequestsAreAFunctionOfSeedAndNumber) {
  WorkloadOptions options;
  options.model = "a \"name\"";
  options.prompt_tokens = LengthDistribution::parse("uniform:40-80", "");
  options.shared_prefix = 0.5;
  options.max_token_id = 50;
  const Workload workload(options), same(options);
  options.seed = 1;
  const Workload other(options);
  EXPECT_EQ(workload.request(5).body, same.request(5).body);
  EXPECT_NE(workload.request(5).body, workload.request(6).body);
  EXPECT_NE(workload.request(5).body, other.request(5).body);
  const std::vector<int64_t> first = prompt_of(workload.request(0)), second = prompt_of(workload.request(1));
  for (const std::vector<int64_t>& ids : {first, second}) {
    EXPECT_GE(ids.size(), 40u);
    EXPECT_LE(ids.size(), 80u);
    for (const int64_t id : ids) EXPECT_TRUE(id >= 3 && id <= 50) << id;
  }
  EXPECT_TRUE(std::equal(first.begin(), first.begin() + 20, second.begin()));
  EXPECT_FALSE(std::equal(first.begin(), first.begin() + 40, second.begin()));
  const Json body = Json::parse(workload.request(0).body, "body");
  EXPECT_EQ(body.find("model")->string(), "a \"name\"");
  EXPECT_EQ(body.find("max_tokens")->integer(), 64);
  EXPECT_TRUE(body.find("stream")->boolean());
}

TEST(Workload, PromptsComeFromAFile) {
  const testing::TemporaryFolder folder;
  folder.write(
      "ok",
      "{\"prompt\": \"a\\u00e9\"}\n\n{\"messages\": [{\"role\": \"user\", \"content\": \"b\"}], \"max_tokens\": 7}\n");
  WorkloadOptions options;
  options.prompts_file = folder.file("ok");
  const Workload workload(options);
  EXPECT_EQ(workload.request(0).path, "/v1/completions");
  EXPECT_EQ(workload.request(1).path, "/v1/chat/completions");
  EXPECT_EQ(workload.request(2).path, "/v1/completions");
  EXPECT_EQ(Json::parse(workload.request(0).body, "").find("prompt")->string(), "a\u00e9");
  EXPECT_EQ(Json::parse(workload.request(1).body, "").find("max_tokens")->integer(), 7);
  for (const char* wrong :
       {"", "x\n", "{}\n", "{\"prompt\": \"a\", \"messages\": []}", "{\"prompt\": \"a\", \"max_tokens\": 0}"}) {
    folder.write("wrong", wrong);
    options.prompts_file = folder.file("wrong");
    EXPECT_THROW(Workload{options}, Error) << wrong;
  }
}

RequestRecord answered(double due, std::vector<double> texts, double end, int64_t tokens) {
  RequestRecord out;
  out.due = due;
  out.texts = std::move(texts);
  out.end = end;
  out.status = 200;
  out.prompt_tokens = 10;
  out.cached_tokens = 4;
  out.output_tokens = tokens;
  return out;
}

TEST(LoadReport, CountsWhatCameAndHowLongItTook) {
  LoadResult result;
  result.point.requests_per_second = 2.5;
  result.seconds = 4;
  result.records = {answered(1, {1.5, 1.7, 2.0}, 2.1, 6), answered(2, {2.25}, 2.5, 1)};
  RequestRecord refused;
  refused.status = 429, refused.due = 3, refused.end = 3.01, refused.error = "status 429";
  RequestRecord lost;
  lost.error = "connection: reset", lost.due = 3, lost.end = 4;
  lost.texts = {3.5};
  result.records.insert(result.records.end(), {refused, lost, lost});
  const LoadSummary summary = summary_of(result);
  EXPECT_EQ(summary.num_requests, 5);
  EXPECT_EQ(summary.num_answered, 2);
  EXPECT_EQ(summary.num_refused, 1);
  EXPECT_EQ(summary.errors, (std::map<std::string, int64_t>{{"connection: reset", 2}}));
  EXPECT_EQ(summary.prompt_tokens, 20);
  EXPECT_EQ(summary.cached_tokens, 8);
  EXPECT_DOUBLE_EQ(summary.tokens_per_second(), 7.0 / 4);
  EXPECT_DOUBLE_EQ(summary.requests_per_second(), 0.5);
  ASSERT_EQ(summary.first_token.seconds.size(), 2u);
  EXPECT_NEAR(summary.first_token.seconds[0], 0.5, 1e-12);
  EXPECT_NEAR(summary.first_token.seconds[1], 0.25, 1e-12);
  ASSERT_EQ(summary.between_texts.seconds.size(), 2u);
  EXPECT_NEAR(summary.between_texts.quantile(1), 0.3, 1e-12);
  ASSERT_EQ(summary.per_token.seconds.size(), 1u);
  EXPECT_NEAR(summary.per_token.seconds[0], 0.1, 1e-12);
  EXPECT_NEAR(summary.whole.quantile(1), 1.1, 1e-12);
  EXPECT_NEAR(summary.refusal.quantile(0.5), 0.01, 1e-12);
  const std::string row = load_table_row(summary);
  EXPECT_EQ(row.rfind("2.5 requests/s", 0), 0u) << row;
  EXPECT_NE(row.find("300.0"), std::string::npos) << row;
  EXPECT_EQ(load_notes(summary), (std::vector<std::string>{"2.5 requests/s: 2 times: connection: reset"}));
}

TEST(LoadReport, ThePictureHasEveryPoint) {
  LoadResult closed, none;
  closed.point.concurrency = 8;
  closed.seconds = 1;
  closed.records = {answered(0, {0.5, 0.6}, 0.7, 2)};
  none.point.requests_per_second = 3;
  const std::string picture = load_svg({summary_of(closed), summary_of(none)}, "what <it> is", "a machine");
  EXPECT_EQ(picture.rfind("<svg ", 0), 0u);
  for (const char* part : {"8 at a time", "3 requests/s", "what &lt;it&gt; is", "2.0 tokens/s", "nothing answered"}) {
    EXPECT_NE(picture.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(picture.find("nan"), std::string::npos);
  EXPECT_EQ(picture.find("inf"), std::string::npos);
}

TEST(Address, TakesPlainHttpAlone) {
  EXPECT_EQ(Address::parse("http://127.0.0.1:80/", "--url").host(), "127.0.0.1:80");
  EXPECT_EQ(Address::parse("http://[::1]:8000", "--url").url(), "http://[::1]:8000");
  for (const char* wrong : {"", "127.0.0.1:80", "https://127.0.0.1", "http://", "http://a b", "http://127.0.0.1/path",
                            "http://127.0.0.1:port", "http://127.0.0.1\r\n"}) {
    EXPECT_THROW(Address::parse(wrong, "--url"), Error) << wrong;
  }
}

}  // namespace
}  // namespace tessera::bench
