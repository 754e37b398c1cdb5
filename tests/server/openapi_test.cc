// SPDX-License-Identifier: Apache-2.0
// The OpenAPI document says exactly what parsing takes: what is made from it parses, what departs from it is refused.
// Rules between fields (a named tool must be there, a conversation must end in a question) have codes of their own.
#include "server/openapi.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "served.h"
#include "server/anthropic/messages_request.h"
#include "server/api_error.h"
#include "server/openai/chat_request.h"
#include "server/openai/completion_request.h"
#include "server/openai/responses_request.h"
#include "server/openai/tokenize.h"
#include "server/status_pages.h"
#include "testing/seed.h"

namespace tessera::server {
namespace {

using nlohmann::ordered_json;

class Generator {
 public:
  explicit Generator(uint32_t seed) : random_(seed) {}

  uint32_t below(size_t bound) { return static_cast<uint32_t>(random_() % bound); }

  // A value that the schema takes.
  ordered_json make(const ordered_json& schema, int depth = 0) {
    if (schema.contains("anyOf")) return make(schema["anyOf"][below(schema["anyOf"].size())], depth);
    if (schema.contains("enum")) return schema["enum"][below(schema["enum"].size())];
    if (!schema.contains("type")) return below(2) == 0 ? ordered_json("any") : ordered_json({{"k", 1.5}});
    std::string type;
    if (schema["type"].is_array()) {
      type = schema["type"][below(schema["type"].size())].get<std::string>();
    } else {
      type = schema["type"].get<std::string>();
    }
    if (type == "null") return nullptr;
    if (type == "boolean") return below(2) == 0;
    if (type == "integer") return make_integer(schema);
    if (type == "number") {
      const double least = schema["minimum"], most = schema["maximum"];
      return below(3) == 0 ? least : below(2) == 0 ? most : least + (most - least) * 0.25;
    }
    if (type == "string") return make_string(schema);
    if (type == "array") {
      ordered_json out = ordered_json::array();
      const size_t least = schema.value("minItems", 0), most = schema.value("maxItems", size_t{100});
      for (size_t i = std::min(most, least + below(depth > 3 ? 1 : 3)); i > 0; --i) {
        out.push_back(make(schema["items"], depth + 1));
      }
      return out;
    }
    return make_object(schema, depth);
  }

 private:
  ordered_json make_integer(const ordered_json& schema) {
    const int64_t least = schema["minimum"], most = schema["maximum"];
    if (below(4) == 0) return least;
    // Large ones are rarely ids of tokens.
    return most < 1000 && below(2) == 0 ? most : std::max<int64_t>(least, std::min<int64_t>(most, below(17)));
  }

  ordered_json make_string(const ordered_json& schema) {
    const size_t least = schema.value("minLength", 0), most = schema.value("maxLength", size_t{100});
    const size_t length = std::min(most, least + below(4));
    std::string out;
    for (size_t i = 0; i < length; ++i) {
      out += schema.contains("pattern") || below(2) == 0 ? "a" : "\u4e16";
    }
    return out;
  }

  ordered_json make_object(const ordered_json& schema, int depth) {
    ordered_json out = ordered_json::object();
    std::set<std::string> needed;
    if (schema.contains("required")) needed = schema["required"].get<std::set<std::string>>();
    if (schema.contains("properties")) {
      for (const auto& [name, property] : schema["properties"].items()) {
        if (needed.count(name) == 1 || below(depth == 0 ? 6 : 3) == 0) out[name] = make(property, depth + 1);
      }
    }
    if (schema.contains("additionalProperties")) {
      const bool is_ids = schema.contains("propertyNames");
      for (uint32_t i = below(3); i > 0; --i) {
        out[is_ids ? std::to_string(i) : std::string(i, 'k')] = make(schema["additionalProperties"], depth + 1);
      }
    }
    if (!schema.contains("additionalProperties") && below(3) == 0) out["x_unknown"] = {1, {{"a", nullptr}}};
    return out;
  }

  std::mt19937 random_;
};

// Values of types that a schema does not take at all.
std::set<std::string> types_of(const ordered_json& schema) {
  std::set<std::string> types;
  if (schema.contains("anyOf")) {
    for (const ordered_json& choice : schema["anyOf"]) types.merge(types_of(choice));
  } else if (schema.contains("type") && schema["type"].is_array()) {
    types = schema["type"].get<std::set<std::string>>();
  } else if (schema.contains("type")) {
    types.insert(schema["type"].get<std::string>());
  } else if (schema.contains("enum")) {
    for (const ordered_json& value : schema["enum"]) types.insert(value.is_null() ? "null" : "string");
  }
  return types;
}

struct Endpoint {
  std::string path;
  std::optional<ApiError> (*parse)(const std::string& body);
};

template <auto kParse>
std::optional<ApiError> error_of(const std::string& body) {
  const auto reply = kParse(body, served_model());
  return reply.ok() ? std::nullopt : std::optional(reply.error());
}

const Endpoint kEndpoints[] = {
    {"/v1/chat/completions", error_of<openai::parse_chat>},
    {"/v1/completions", error_of<openai::parse_completion>},
    {"/v1/responses", error_of<openai::parse_responses>},
    {"/v1/messages", error_of<anthropic::parse_messages>},
    {"/v1/messages/count_tokens", error_of<anthropic::parse_count_tokens>},
    {"/tokenize", error_of<openai::parse_tokenize>},
    {"/detokenize", error_of<openai::parse_detokenize>},
};

ordered_json schema_of(const std::string& path) {
  static const ordered_json kDocument = ordered_json::parse(render_openapi("1"));
  return kDocument["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"];
}

class OpenApi : public ::testing::TestWithParam<size_t> {};

TEST_P(OpenApi, WhatTheDocumentTakesParses) {
  const Endpoint& endpoint = kEndpoints[GetParam()];
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  Generator generator(seed);
  const ordered_json schema = schema_of(endpoint.path);
  int num_parsed = 0;
  std::map<std::string, int> refusals;
  for (int i = 0; i < 1500; ++i) {
    ordered_json body = generator.make(schema);
    if (body.contains("model")) body["model"] = "tiny";
    const std::optional<ApiError> error = endpoint.parse(body.dump());
    if (!error) {
      ++num_parsed;
      continue;
    }
    // Only rules between fields may refuse it; they are few.
    EXPECT_EQ(error->status, 400);
    const std::string what = error->code + " " + error->param;
    ++refusals[what];
    const bool is_between_fields = error->code == kConflict || error->param == "messages" || error->param == "input";
    EXPECT_TRUE(is_between_fields) << error->message << "\n" << body.dump();
  }
  EXPECT_GT(num_parsed, 100) << ordered_json(refusals).dump(1);
}

TEST_P(OpenApi, WhatItDoesNotTakeIsRefused) {
  const Endpoint& endpoint = kEndpoints[GetParam()];
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  Generator generator(seed);
  const ordered_json schema = schema_of(endpoint.path);
  const std::map<std::string, ordered_json> samples = {{"null", nullptr},      {"boolean", true},
                                                       {"integer", 1},         {"string", "q"},
                                                       {"object", {{"q", 1}}}, {"array", {{{"q", 1}}}}};
  const auto expect_refused = [&](const ordered_json& body, const std::string& name) {
    const std::optional<ApiError> error = endpoint.parse(body.dump());
    ASSERT_TRUE(error) << body.dump();
    EXPECT_EQ(error->status, 400) << body.dump();
    EXPECT_TRUE(error->param.starts_with(name)) << error->param << " " << error->message << "\n" << body.dump();
  };
  for (int round = 0; round < 20; ++round) {
    ordered_json base = ordered_json::object();
    for (const ordered_json& name : schema.value("required", ordered_json::array())) {
      base[name] = generator.make(schema["properties"][name.get<std::string>()]);
    }
    const std::set<std::string> needed = schema.value("required", std::set<std::string>());
    if (needed.count("model") == 1) base["model"] = "tiny";
    if (needed.empty()) base["prompt"] = "one of two that must be there";
    for (const auto& [name, property] : schema["properties"].items()) {
      SCOPED_TRACE(name);
      if (needed.count(name) == 1) {
        ordered_json body = base;
        body.erase(name);
        expect_refused(body, name);
      }
      const std::set<std::string> types = types_of(property);
      for (const auto& [type, value] : samples) {
        if (types.count(type) == 1 || (type == "integer" && types.count("number") == 1)) continue;
        ordered_json body = base;
        body[name] = value;
        expect_refused(body, name);
      }
      for (const auto& [key, step] : {std::pair{"minimum", -1.0}, std::pair{"maximum", 1.0}}) {
        if (!property.contains(key)) continue;
        ordered_json body = base;
        body[name] = property[key].get<double>() + step * std::max(1.0, std::abs(property[key].get<double>()) * 0.5);
        expect_refused(body, name);
      }
      if (property.contains("enum") && types.count("string") == 1) {
        ordered_json body = base;
        body[name] = "no such value";
        expect_refused(body, name);
      }
      if (property.value("maxLength", size_t{1} << 20) < (1 << 20)) {
        ordered_json body = base;
        body[name] = std::string(property["maxLength"].get<size_t>() + 1, 'a');
        expect_refused(body, name);
      }
    }
  }
}

// Everywhere in a body that parses: a value of a type that its schema does not take.
class Mutator {
 public:
  explicit Mutator(std::mt19937& random) : random_(random) {}

  // Collects what the schema says of each place of the value, where it says one thing only.
  void collect(const ordered_json& value, const ordered_json& schema, const std::string& pointer) {
    if (schema.contains("anyOf")) {
      // Choices that are told apart by a tag, or by the type.
      for (const ordered_json& choice : schema["anyOf"]) {
        if (fits(value, choice)) return collect(value, choice, pointer);
      }
      return;
    }
    if (!pointer.empty()) places_.emplace_back(pointer, types_of(schema));
    if (value.is_array() && schema.contains("items")) {
      for (size_t i = 0; i < value.size(); ++i) collect(value[i], schema["items"], pointer + "/" + std::to_string(i));
    }
    if (!value.is_object() || !schema.contains("properties")) return;
    for (const auto& [name, property] : schema["properties"].items()) {
      if (value.contains(name)) collect(value[name], property, pointer + "/" + name);
    }
  }

  bool mutate(ordered_json& body) {
    if (places_.empty()) return false;
    const auto& [pointer, types] = places_[random_() % places_.size()];
    for (const auto& [type, value] :
         {std::pair{"object", ordered_json({{"q", 1}})}, std::pair{"boolean", ordered_json(true)},
          std::pair{"array", ordered_json::array({true})}, std::pair{"null", ordered_json()}}) {
      if (types.empty() || types.count(type) == 1) continue;
      body[ordered_json::json_pointer(pointer)] = value;
      return true;
    }
    return false;
  }

 private:
  static bool fits(const ordered_json& value, const ordered_json& choice) {
    if (types_of(choice).count(value.is_string()   ? "string"
                               : value.is_array()  ? "array"
                               : value.is_object() ? "object"
                                                   : "") == 0) {
      return false;
    }
    if (!value.is_object() || !choice.contains("properties")) return true;
    for (const char* tag : {"type", "role"}) {
      if (!choice["properties"].contains(tag) || !choice["properties"][tag].contains("enum")) continue;
      const ordered_json& names = choice["properties"][tag]["enum"];
      const ordered_json found = value.contains(tag) ? value[tag] : ordered_json();
      if (std::find(names.begin(), names.end(), found) == names.end()) return false;
    }
    return true;
  }

  std::mt19937& random_;
  std::vector<std::pair<std::string, std::set<std::string>>> places_;
};

TEST_P(OpenApi, WrongTypesAnywhereAreRefused) {
  const Endpoint& endpoint = kEndpoints[GetParam()];
  const uint32_t seed = fresh_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  Generator generator(seed);
  const ordered_json schema = schema_of(endpoint.path);
  int num_mutated = 0;
  for (int i = 0; i < 1500; ++i) {
    ordered_json body = generator.make(schema);
    if (body.contains("model")) body["model"] = "tiny";
    if (endpoint.parse(body.dump())) continue;
    Mutator mutator(random);
    mutator.collect(body, schema, "");
    const std::string before = body.dump();
    if (!mutator.mutate(body)) continue;
    const std::optional<ApiError> error = endpoint.parse(body.dump());
    ASSERT_TRUE(error) << before << "\n" << body.dump();
    EXPECT_EQ(error->status, 400);
    EXPECT_NE(error->param, "") << body.dump();
    ++num_mutated;
  }
  EXPECT_GT(num_mutated, 50);
}

INSTANTIATE_TEST_SUITE_P(Endpoints, OpenApi, ::testing::Range(size_t{0}, std::size(kEndpoints)));

TEST(OpenApiDocument, NamesEveryRoute) {
  const ordered_json document = ordered_json::parse(render_openapi("0.1.0"));
  EXPECT_EQ(document["openapi"], "3.1.0");
  EXPECT_EQ(document["info"]["version"], "0.1.0");
  for (const char* path : {"/v1/models", "/v1/models/{model}", "/health", "/health/live", "/health/ready",
                           "/health/deep", "/metrics", "/openapi.json"}) {
    EXPECT_TRUE(document["paths"][path].contains("get")) << path;
  }
  for (const char* path : {"/health", "/health/live", "/health/ready"}) {
    EXPECT_TRUE(document["paths"][path]["get"]["security"].empty()) << path;
  }
  // Clients hold a schema of a stream against its events, each of which is its own object.
  const ordered_json& answer = document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"];
  EXPECT_EQ(answer.at("text/event-stream"), ordered_json::object());
}

TEST(StatusPages, HealthAndModels) {
  Health health;
  EXPECT_EQ(health_status(health), 503);
  health.readiness = Readiness::kReady;
  health.deep_seconds = 0.5;
  EXPECT_EQ(health_status(health), 200);
  EXPECT_EQ(render_health(health), "{\"status\":\"ready\",\"uptime_seconds\":0.0,\"check_seconds\":0.5}");
  const ordered_json models = ordered_json::parse(render_models(served_model(), 1700000000));
  EXPECT_EQ(models["data"][0]["id"], "tiny");
  EXPECT_EQ(models["data"][0]["max_model_len"], 4096);
  EXPECT_EQ(models["data"][0]["created_at"], "2023-11-14T22:13:20Z");
  EXPECT_TRUE(render_model(served_model(), "tiny", 1).ok());
  EXPECT_EQ(render_model(served_model(), "other", 1).error().status, 404);
  EXPECT_EQ(render_model(served_model(), "other", 1).error().message, "model: expected tiny, found \"other\"");
}

// Every line is a comment or NAME{LABELS} VALUE; histograms rise to their count.
TEST(StatusPages, MetricsAreWellFormed) {
  ServerStats stats;
  stats.model = "ti\"ny\n";
  stats.num_running = 3;
  stats.finished = {{"stop", 5}, {"length", 1}};
  stats.answered = {{"/v1/models", 200, 7}};
  for (const double seconds : {0.0001, 0.001, 0.3, 1000.0}) stats.first_token.add(seconds);
  const std::string text = render_metrics(stats);
  EXPECT_NE(text.find("tessera_requests_running{model_name=\"ti\\\"ny \"} 3\n"), std::string::npos) << text;
  EXPECT_NE(text.find("vllm:num_requests_running{model_name=\"ti\\\"ny \"} 3\n"), std::string::npos);
  EXPECT_NE(text.find("tessera_requests_finished_total{model_name=\"ti\\\"ny \",reason=\"stop\"} 5\n"),
            std::string::npos);
  EXPECT_NE(text.find("route=\"/v1/models\",status=\"200\"} 7\n"), std::string::npos);
  EXPECT_NE(text.find("tessera_time_to_first_token_seconds_bucket{model_name=\"ti\\\"ny \",le=\"0.001\"} 2\n"),
            std::string::npos);
  EXPECT_NE(text.find("le=\"160\"} 3\n"), std::string::npos);
  EXPECT_NE(text.find("tessera_time_to_first_token_seconds_count{model_name=\"ti\\\"ny \"} 4\n"), std::string::npos);
  std::set<std::string> families;
  for (size_t begin = 0; begin < text.size();) {
    const std::string line = text.substr(begin, text.find('\n', begin) - begin);
    begin += line.size() + 1;
    if (line.starts_with("# TYPE ")) {
      EXPECT_TRUE(families.insert(line.substr(7, line.rfind(' ') - 7)).second) << line;
    }
    if (line.starts_with("#")) continue;
    EXPECT_NE(line.find("{model_name=\""), std::string::npos) << line;
    EXPECT_NO_THROW(std::stod(line.substr(line.rfind(' ') + 1))) << line;
  }
  EXPECT_GT(families.size(), 30u);
}

}  // namespace
}  // namespace tessera::server
