// SPDX-License-Identifier: Apache-2.0
// Times ggml's matrix products on its CPU backend; compare.py compiles it against the user's ggml, by public headers.
//
//   time_ggml THREADS SECONDS TOKENS,TOKENS,... NAME:OUT:IN[:EXPERTS:CHOSEN] ...
//
// With experts: x into gate and up of the chosen experts, silu(gate) * up, and down: OUT is the inner width. One JSON
// line per shape, type and number of tokens. Weights lie where llama.cpp puts them: in the first of the backend's extra
// buffer types (repacked, AMX) that takes the product. Each run reads other weights: a pool several times the
// last-level cache for linear maps, other experts else.
#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int64_t kPoolBytes = int64_t{512} << 20;
constexpr int kChoices = 16;

std::mt19937 g_rng(7);

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "time_ggml: %s\n", why.c_str());
  std::exit(1);
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

struct Shape {
  std::string name;
  int64_t out = 0, in = 0, experts = 0, chosen = 0;
};

// Tensors of one context in one buffer.
class Group {
 public:
  explicit Group(size_t num_tensors)
      : context_(ggml_init({.mem_size = ggml_tensor_overhead() * num_tensors + 64 * ggml_graph_overhead() + (1 << 20),
                            .mem_buffer = nullptr,
                            .no_alloc = true})) {}
  ~Group() {
    ggml_backend_buffer_free(buffer_);
    ggml_free(context_);
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ggml_context* context() { return context_; }
  void allocate(ggml_backend_buffer_type_t type) {
    buffer_ = ggml_backend_alloc_ctx_tensors_from_buft(context_, type);
    if (buffer_ == nullptr) fail("ggml has no memory for the tensors");
  }

 private:
  ggml_context* context_;
  ggml_backend_buffer_t buffer_ = nullptr;
};

std::vector<float> random_floats(size_t count, float scale) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(count);
  for (float& value : values) value = normal(g_rng);
  return values;
}

// Bytes of a whole weight: some quantised rows again and again.
std::vector<uint8_t> weight_bytes(const ggml_tensor* weight) {
  constexpr int64_t kRows = 64;
  const int64_t in = weight->ne[0];
  const std::vector<float> values = random_floats(static_cast<size_t>(kRows * in), 0.05f);
  std::vector<uint8_t> some(static_cast<size_t>(kRows) * ggml_row_size(weight->type, in)), all(ggml_nbytes(weight));
  ggml_quantize_chunk(weight->type, values.data(), some.data(), 0, kRows, in, nullptr);
  for (size_t at = 0; at < all.size(); at += some.size()) {
    std::copy_n(some.data(), std::min(some.size(), all.size() - at), all.data() + at);
  }
  return all;
}

// Whether the device multiplies `weight` when it lies in a buffer of this type.
bool takes(ggml_backend_dev_t device, ggml_backend_buffer_type_t type, ggml_tensor* weight, ggml_tensor* product) {
  ggml_backend_buffer_t probe = ggml_backend_buft_alloc_buffer(type, 0);
  if (probe == nullptr) return false;
  weight->buffer = probe;
  const bool is_taken = ggml_backend_dev_supports_op(device, product);
  weight->buffer = nullptr;
  ggml_backend_buffer_free(probe);
  return is_taken;
}

class Bench {
 public:
  Bench(int num_threads, double seconds) : num_threads_(num_threads), seconds_(seconds), cpu_(ggml_backend_cpu_init()) {
    if (cpu_ == nullptr) fail("ggml has no CPU backend");
    ggml_backend_cpu_set_n_threads(cpu_, num_threads);
  }

  void run(const Shape& shape, ggml_type type, const std::vector<int64_t>& token_counts) {
    const bool has_experts = shape.experts > 0;
    const int64_t bytes = static_cast<int64_t>(ggml_row_size(type, shape.in)) * shape.out;
    const int copies = has_experts ? 1 : static_cast<int>(std::max<int64_t>(1, kPoolBytes / bytes));
    Group weights(3 * static_cast<size_t>(copies));
    std::vector<ggml_tensor*> first, second, third;
    const int64_t planes = has_experts ? shape.experts : 1;
    for (int i = 0; i < copies; ++i) {
      first.push_back(ggml_new_tensor_3d(weights.context(), type, shape.in, shape.out, planes));
      if (!has_experts) continue;
      second.push_back(ggml_new_tensor_3d(weights.context(), type, shape.in, shape.out, planes));
      third.push_back(ggml_new_tensor_3d(weights.context(), type, shape.out, shape.in, planes));
    }
    const ggml_backend_buffer_type_t place = place_for(shape, first[0]);
    weights.allocate(place);
    for (const auto* list : {&first, &second, &third}) {
      for (ggml_tensor* weight : *list) {
        const std::vector<uint8_t> all = weight_bytes(weight);
        ggml_backend_tensor_set(weight, all.data(), 0, all.size());
      }
    }
    for (const int64_t tokens : token_counts) {
      time(shape, type, ggml_backend_buft_name(place), tokens, first, second, third);
    }
  }

 private:
  static ggml_tensor* multiply(ggml_context* context, const Shape& shape, ggml_tensor* weight, ggml_tensor* x,
                               ggml_tensor* ids) {
    return shape.experts > 0 ? ggml_mul_mat_id(context, weight, x, ids) : ggml_mul_mat(context, weight, x);
  }

  ggml_backend_buffer_type_t place_for(const Shape& shape, ggml_tensor* weight) {
    const ggml_backend_dev_t device = ggml_backend_get_device(cpu_);
    Group sample(8);
    ggml_tensor* x = ggml_new_tensor_3d(sample.context(), GGML_TYPE_F32, shape.in, 1, 4);
    ggml_tensor* ids = ggml_new_tensor_2d(sample.context(), GGML_TYPE_I32, std::max<int64_t>(1, shape.chosen), 4);
    if (shape.experts == 0) x = ggml_new_tensor_2d(sample.context(), GGML_TYPE_F32, shape.in, 4);
    ggml_tensor* product = multiply(sample.context(), shape, weight, x, ids);
    const auto extra = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
    if (extra != nullptr) {
      for (ggml_backend_buffer_type_t* type = extra(device); type != nullptr && *type != nullptr; ++type) {
        if (takes(device, *type, weight, product)) return *type;
      }
    }
    return ggml_backend_cpu_buffer_type();
  }

  void time(const Shape& shape, ggml_type type, const char* place, int64_t tokens,
            const std::vector<ggml_tensor*>& first, const std::vector<ggml_tensor*>& second,
            const std::vector<ggml_tensor*>& third) {
    const bool has_experts = shape.experts > 0;
    const size_t num_graphs = has_experts ? kChoices : first.size();
    Group operands(16 * num_graphs + 16);
    ggml_context* context = operands.context();
    ggml_tensor* x = has_experts ? ggml_new_tensor_3d(context, GGML_TYPE_F32, shape.in, 1, tokens)
                                 : ggml_new_tensor_2d(context, GGML_TYPE_F32, shape.in, tokens);
    std::vector<ggml_tensor*> ids, results;
    for (size_t i = 0; i < num_graphs; ++i) {
      if (!has_experts) {
        results.push_back(ggml_mul_mat(context, first[i], x));
        continue;
      }
      ids.push_back(ggml_new_tensor_2d(context, GGML_TYPE_I32, shape.chosen, tokens));
      ggml_tensor* gate = ggml_mul_mat_id(context, first[0], x, ids[i]);
      ggml_tensor* up = ggml_mul_mat_id(context, second[0], x, ids[i]);
      ggml_tensor* inner = ggml_mul(context, ggml_silu(context, gate), up);
      results.push_back(ggml_mul_mat_id(context, third[0], inner, ids[i]));
    }
    Group graphs(64 * num_graphs);
    std::vector<ggml_cgraph*> plans;
    for (ggml_tensor* result : results) {
      plans.push_back(ggml_new_graph_custom(graphs.context(), 16, false));
      ggml_build_forward_expand(plans.back(), result);
    }
    operands.allocate(ggml_backend_cpu_buffer_type());
    const std::vector<float> values = random_floats(static_cast<size_t>(shape.in * tokens), 1);
    ggml_backend_tensor_set(x, values.data(), 0, values.size() * sizeof(float));
    for (ggml_tensor* list : ids) {
      std::vector<int32_t> all(static_cast<size_t>(shape.experts)), chosen;
      for (size_t e = 0; e < all.size(); ++e) all[e] = static_cast<int32_t>(e);
      for (int64_t t = 0; t < tokens; ++t) {
        std::shuffle(all.begin(), all.end(), g_rng);
        chosen.insert(chosen.end(), all.begin(), all.begin() + shape.chosen);
      }
      ggml_backend_tensor_set(list, chosen.data(), 0, chosen.size() * sizeof(int32_t));
    }
    const auto now = [] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    };
    const auto compute = [&](size_t run) {
      if (ggml_backend_graph_compute(cpu_, plans[run % num_graphs]) != GGML_STATUS_SUCCESS) fail("a graph failed");
    };
    compute(0);
    std::vector<double> samples;
    const double begin = now();
    while (samples.size() < 1000 && (samples.size() < 20 || now() - begin < seconds_)) {
      const double start = now();
      compute(samples.size() + 1);
      samples.push_back(now() - start);
    }
    std::sort(samples.begin(), samples.end());
    std::printf(
        "{\"name\": \"%s\", \"type\": \"%s\", \"buffer\": \"%s\", \"tokens\": %ld, \"threads\": %d, \"median_us\": "
        "%.2f, "
        "\"p10_us\": %.2f}\n",
        shape.name.c_str(), ggml_type_name(type), place, static_cast<long>(tokens), num_threads_,
        samples[samples.size() / 2] * 1e6, samples[samples.size() / 10] * 1e6);
    std::fflush(stdout);
  }

  int num_threads_;
  double seconds_;
  ggml_backend_t cpu_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) fail("expected THREADS SECONDS TOKENS SHAPE...");
  std::vector<int64_t> tokens;
  for (const std::string& count : split(argv[3], ',')) tokens.push_back(std::stoll(count));
  Bench bench(std::atoi(argv[1]), std::atof(argv[2]));
  for (int i = 4; i < argc; ++i) {
    const std::vector<std::string> parts = split(argv[i], ':');
    if (parts.size() != 3 && parts.size() != 5)
      fail(std::string("expected NAME:OUT:IN[:EXPERTS:CHOSEN], found ") + argv[i]);
    Shape shape{parts[0], std::stoll(parts[1]), std::stoll(parts[2])};
    if (parts.size() == 5) shape.experts = std::stoll(parts[3]), shape.chosen = std::stoll(parts[4]);
    for (const ggml_type type : {GGML_TYPE_NVFP4, GGML_TYPE_MXFP4}) bench.run(shape, type, tokens);
  }
  return 0;
}
