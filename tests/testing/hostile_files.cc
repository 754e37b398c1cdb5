// SPDX-License-Identifier: Apache-2.0
#include "testing/hostile_files.h"

#include <cstring>
#include <fstream>
#include <sstream>

#include "base/strings.h"
#include "testing/generated_model.h"
#include "testing/stored_tensors.h"
#include "testing/temporary_folder.h"
#include "text/tokenizer/byte_alphabet.h"

namespace tessera::testing {

namespace {

constexpr const char* kConfig = "config.json";
constexpr const char* kTokenizer = "tokenizer.json";
constexpr const char* kWeights = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr int kCopies = 5;  // of T0's 64 tokens, for the tokenizer's 257

std::string read_all(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream out;
  out << file.rdbuf();
  return out.str();
}

bool replace_first(std::string& text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  if (at == std::string::npos) return false;
  text.replace(at, from.size(), to);
  return true;
}

std::string small_tokenizer() {
  std::string vocab;
  for (int byte = 0; byte < 256; ++byte) {
    std::string symbol;
    append_utf8(symbol, text::byte_to_code_point(static_cast<uint8_t>(byte)));
    vocab +=
        "\"" + std::string(symbol == "\"" || symbol == "\\" ? "\\" : "") + symbol + "\":" + std::to_string(byte) + ",";
  }
  return R"({"version":"1.0","normalizer":null,"added_tokens":[{"id":300,"content":"<x>","special":true,"lstrip":false}],)"
         R"("pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"\\s+"},)"
         R"("behavior":"Isolated","invert":false},{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]},)"
         R"("model":{"type":"BPE","dropout":null,"vocab":{)" +
         vocab + R"("ab":256},"merges":["a b"]}})";
}

// One replacement in a text file.
Damage edit(const char* file, const std::string& from, const std::string& to) {
  return {std::string(file) + ": " + from + " -> " + to.substr(0, 60), file,
          [file, from, to](Files& files) { return files.contains(file) && replace_first(files[file], from, to); }};
}

// One replacement in the header of the weights; its length is mended.
Damage edit_header(const std::string& from, const std::string& to) {
  return {"header: " + from + " -> " + to.substr(0, 60), kWeights, [from, to](Files& files) {
            std::string& file = files[kWeights];
            uint64_t length = 0;
            if (file.size() < 8) return false;
            std::memcpy(&length, file.data(), 8);
            if (length > file.size() - 8) return false;
            std::string header = file.substr(8, length);
            if (!replace_first(header, from, to)) return false;
            const uint64_t now = header.size();
            std::string whole(8, '\0');
            std::memcpy(whole.data(), &now, 8);
            file = whole + header + file.substr(8 + length);
            return true;
          }};
}

Damage replace(const char* file, const std::string& what, const std::string& content) {
  return {std::string(file) + " is " + what, file, [file, content](Files& files) {
            if (!files.contains(file)) return false;
            files[file] = content;
            return true;
          }};
}

Damage cut(const char* file, double share) {
  return {std::string(file) + " cut at " + std::to_string(share), file, [file, share](Files& files) {
            if (!files.contains(file) || files[file].size() < 2) return false;
            files[file].resize(static_cast<size_t>(share * static_cast<double>(files[file].size() - 1)));
            return true;
          }};
}

Damage add_index(const std::string& what, const std::string& text) {
  return {"index: " + what, "model.safetensors", [text](Files& files) {
            files[kIndex] = text;
            return true;
          }};
}

// Names, dtypes and shapes of the weights, as text of the header that the program's own writer makes.
void add_tensor_damages(std::vector<Damage>& out) {
  for (const char* name :
       {"embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.0.attn.wq_a.weight",
        "layers.0.attn.attn_sink", "layers.0.attn_norm.weight", "layers.0.ffn.gate.tid2eid",
        "layers.1.attn.compressor.ape", "layers.1.attn.indexer.wq_b.weight", "layers.2.ffn.gate.bias",
        "layers.2.ffn.experts.3.w2.weight", "layers.3.ffn.shared_experts.w1.weight", "layers.4.hc_ffn_base"}) {
    const std::string key = "\"" + std::string(name) + "\":{\"dtype\":\"";
    out.push_back(edit_header("\"" + std::string(name) + "\"", "\"" + std::string(name) + "x\""));
    out.back().file = "tensor " + std::string(name);
    const bool is_table = std::string(name).ends_with("tid2eid");
    out.push_back(edit_header(key + (is_table ? "I64" : "F32"), key + (is_table ? "F64" : "I32")));
    out.push_back(edit_header(key + (is_table ? "I64" : "F32") + "\",\"shape\":[",
                              key + (is_table ? "I64" : "F32") + "\",\"shape\":[1,"));
  }
}

}  // namespace

Files sound_model() {
  const TemporaryFolder folder;
  write_generated_model(Generated::kT0, folder.path());
  Tensors tensors = read_tensors(folder.path());
  for (auto& [name, stored] : tensors) {
    if (name != "embed.weight" && name != "head.weight" && !name.ends_with("tid2eid")) continue;
    const std::vector<uint8_t> once = stored.bytes;
    for (int copy = 1; copy < kCopies; ++copy) stored.bytes.insert(stored.bytes.end(), once.begin(), once.end());
    stored.shape = Shape{stored.shape[0] * kCopies, stored.shape[1]};
  }
  write_tensors(folder.path(), tensors);
  Files files;
  files[kConfig] = generated_config(Generated::kT0);
  replace_first(files[kConfig], "\"vocab_size\": 64", "\"vocab_size\": 320");
  files[kTokenizer] = small_tokenizer();
  files[kWeights] = read_all(folder.file(kWeights));
  return files;
}

std::vector<Damage> hostile_damages() {
  std::vector<Damage> out;
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"\"hidden_size\": 64", "\"hidden_size\": -1"},
           {"\"hidden_size\": 64", "\"hidden_size\": 9223372036854775807"},
           {"\"hidden_size\": 64", "\"hidden_size\": 64.5"},
           {"\"hidden_size\": 64", "\"hidden_size\": 64, \"hidden_size\": 64"},
           {"\"vocab_size\": 320", "\"vocab_size\": \"320\""},
           {"\"num_hidden_layers\": 5", "\"num_hidden_layers\": 4"},
           {"\"num_hidden_layers\": 5", "\"num_hidden_layers\": 1e9"},
           {"[0, 4, 128, 4, 128, 0]", "[0, 4, 128, 4, 3, 0]"},
           {"[0, 4, 128, 4, 128, 0]", "[0, 4, 128, 4]"},
           {"\"o_groups\": 2", "\"o_groups\": 3"},
           {"\"o_groups\": 2", "\"o_groups\": 0"},
           {"\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 9"},
           {"\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": NaN"},
           {"\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 1e999"},
           {"\"rope_theta\": 10000", "\"rope_theta\": null"},
           {"\"sliding_window\": 16", "\"sliding_window\": 0"},
           {"\"head_dim\": 128", "\"head_dim\": 100000"},
           {"\"qk_rope_head_dim\": 64", "\"qk_rope_head_dim\": 256"},
           {"\"model_type\": \"deepseek_v4\"", "\"model_type\": \"\\ud800\""},
           {"\"model_type\": \"deepseek_v4\"", "\"model_type\": \"deepseek_v3\""},
           {"\"eos_token_id\": 1", "\"eos_token_id\": 320"},
           {"{\"architectures\"", "{\"\xff\": 1, \"architectures\""},
           {"{\"architectures\"", "{" + std::string(2000, '[') + "\"architectures\""},
           {"\"swiglu_limit\": 1.5", "\"swiglu_limit\": -1.5"}}) {
    out.push_back(edit(kConfig, from, to));
  }
  // Sound by themselves; the weights say otherwise.
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"\"num_hidden_layers\": 5", "\"num_hidden_layers\": 6"},
           {"[0, 4, 128, 4, 128, 0]", "[0, 4, 128, 4, 4, 0]"},
           {"\"n_routed_experts\": 8", "\"n_routed_experts\": 9"},
           {"\"num_hash_layers\": 2", "\"num_hash_layers\": 3"},
           {"\"head_dim\": 128", "\"head_dim\": 192"},
           {"\"vocab_size\": 320", "\"vocab_size\": 321"},
           {"\"moe_intermediate_size\": 32", "\"moe_intermediate_size\": 64"},
           {"\"q_lora_rank\": 32", "\"q_lora_rank\": 64"},
           {"\"index_n_heads\": 16", "\"index_n_heads\": 32"}}) {
    out.push_back(edit(kConfig, from, to));
    out.back().file = "tensor";
  }
  for (const auto& [from, to] :
       std::vector<std::pair<std::string, std::string>>{{"\"id\":300", "\"id\":320"},
                                                        {"\"id\":300", "\"id\":-1"},
                                                        {"\"id\":300", "\"id\":255"},
                                                        {"\"content\":\"<x>\"", "\"content\":\"\""},
                                                        {"\"content\":\"<x>\"", "\"content\":\"\xc0\x80\""},
                                                        {"\"normalizer\":null", "\"normalizer\":{\"type\":\"NFKC\"}"},
                                                        {"\"type\":\"BPE\"", "\"type\":\"WordPiece\""},
                                                        {"\"type\":\"Split\"", "\"type\":\"Punctuation\""},
                                                        {"\"Isolated\"", "\"MergedWithNext\""},
                                                        {"\\\\s+", "(?"},
                                                        {"\\\\s+", "(a+)+$|[\\\\w"},
                                                        {"\"ab\":256", "\"ab\":320"},
                                                        {"\"ab\":256", "\"ab\":97"},
                                                        {"\"ab\":256", "\"ab\":[]"},
                                                        {"\"a b\"", "\"a q b\""},
                                                        {"\"a b\"", "\"zz b\""},
                                                        {"\"A\":65,", ""},
                                                        {"\"merges\"", "\"merged\""},
                                                        {"\"model\"", "\"modal\""},
                                                        {"\"dropout\":null", "\"dropout\":0.5"}}) {
    out.push_back(edit(kTokenizer, from, to));
  }
  for (const char* file : {kConfig, kTokenizer, kWeights}) {
    out.push_back(replace(file, "empty", ""));
    out.push_back(replace(file, "zeros", std::string(4096, '\0')));
    out.push_back(replace(file, "an array", "[]"));
    out.push_back(replace(file, "null", "null"));
    out.push_back(replace(file, "UTF-16", std::string("\xff\xfe{\0}\0", 6)));
    out.push_back(replace(file, "a pointer to large-file storage",
                          "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"));
    for (const double share : {0.001, 0.1, 0.5, 0.9, 1.0}) out.push_back(cut(file, share));
    out.push_back({std::string(file) + " is missing", file == kWeights ? "" : file,
                   [file](Files& files) { return files.erase(file) > 0; }});
  }
  out.push_back(edit_header("{\"", "[\""));
  out.push_back(edit_header("{\"", " {\""));
  out.push_back(edit_header("\"data_offsets\":[0,", "\"data_offsets\":[1,"));
  out.push_back(edit_header("\"data_offsets\":[0,", "\"data_offsets\":[-1,"));
  out.push_back(edit_header("\"data_offsets\":[", "\"data_offset\":["));
  out.push_back(edit_header("\"data_offsets\":[", "\"extra\":1,\"data_offsets\":["));
  out.push_back(edit_header("\"shape\":[", "\"shape\":[18446744073709551616,"));
  out.push_back(edit_header("\"shape\":[", "\"shape\":[4294967296,4294967296,"));
  out.push_back(edit_header("\"dtype\":\"F32\"", "\"dtype\":\"F7\""));
  out.push_back(edit_header("\"dtype\":\"F32\"", "\"dtype\":32"));
  out.push_back({"a byte behind the last tensor", kWeights, [](Files& files) {
                   files[kWeights] += 'x';
                   return true;
                 }});
  for (const uint64_t length : {uint64_t{0}, uint64_t{1}, uint64_t{99'999'999}, uint64_t{1} << 63, ~uint64_t{0}}) {
    out.push_back({"header length " + std::to_string(length), kWeights, [length](Files& files) {
                     if (files[kWeights].size() < 8) return false;
                     std::memcpy(files[kWeights].data(), &length, 8);
                     return true;
                   }});
  }
  add_tensor_damages(out);
  out.push_back(add_index("not JSON", "weights"));
  out.push_back(add_index("no map", "{}"));
  out.push_back(add_index("an empty map", R"({"weight_map":{}})"));
  out.push_back(add_index("a missing shard", R"({"weight_map":{"embed.weight":"model-1.safetensors"}})"));
  out.back().file = "model-1.safetensors";
  out.push_back(add_index("a path outside", R"({"weight_map":{"embed.weight":"../model.safetensors"}})"));
  out.push_back(add_index("an absolute path", R"({"weight_map":{"embed.weight":"/dev/zero"}})"));
  out.push_back(add_index("one tensor of many", R"({"weight_map":{"embed.weight":"model.safetensors"}})"));
  out.push_back(add_index("a tensor that is not there", R"({"weight_map":{"nothing":"model.safetensors"}})"));
  return out;
}

void write_files(const Files& files, const std::string& folder) {
  for (const auto& [name, content] : files) std::ofstream(folder + "/" + name, std::ios::binary) << content;
}

}  // namespace tessera::testing
