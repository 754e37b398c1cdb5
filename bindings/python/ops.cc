// SPDX-License-Identifier: Apache-2.0
// The kernels, through the C interface (bindings/c/tessera.h), on arrays of other libraries.
#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/strings.h"
#include "bindings/python/arrays.h"
#include "bindings/python/module.h"
#include "bindings/python/weight.h"
#include "numeric/nvfp4.h"

namespace tessera::python {

namespace {

template <class Value>
struct Named {
  const char* name;
  Value value;
};

constexpr Named<tessera_input_mode> kInputs[] = {
    {"f32", TESSERA_INPUT_F32}, {"a16", TESSERA_INPUT_A16}, {"a8", TESSERA_INPUT_A8}, {"a4", TESSERA_INPUT_A4}};
constexpr Named<tessera_nvfp4_rule> kRules[] = {{"rows", TESSERA_NVFP4_ROWS},
                                                {"tensor", TESSERA_NVFP4_TENSOR},
                                                {"four-over-six", TESSERA_NVFP4_TENSOR_FOUR_OVER_SIX}};
constexpr Named<tessera_cache_format> kCaches[] = {
    {"f32", TESSERA_CACHE_F32}, {"bf16", TESSERA_CACHE_BF16}, {"fp8", TESSERA_CACHE_FP8}};
constexpr Named<tessera_dtype> kDtypes[] = {{"float32", TESSERA_F32}, {"bfloat16", TESSERA_BF16}};

template <class Value, size_t kCount>
Value value_of(const Named<Value> (&table)[kCount], const std::string& name, const char* parameter) {
  std::string expected;
  for (const Named<Value>& entry : table) {
    if (name == entry.name) return entry.value;
    expected += fmt::format("{}\"{}\"", expected.empty() ? "" : ", ", entry.name);
  }
  fail(ErrorCode::kInvalidArgument,
       fmt::format("{}: expected one of {}, found \"{}\"", parameter, expected, printable(name)));
}

// That the `count` values from `values` lie in [least, most]. For the CPU: values in a GPU's memory are not read.
template <class Value>
void check_range(const std::string& what, const Value* values, int64_t count, int64_t least, int64_t most) {
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] < least || values[i] > most) {
      fail(ErrorCode::kInvalidArgument,
           fmt::format("{}[{}]: expected {} to {}, found {}", what, i, least, most, values[i]));
    }
  }
}

Element element_of(tessera_dtype dtype) {
  return dtype == TESSERA_F32 ? Element::kF32 : Element::kBf16;
}

tessera_dtype activation_of(tessera_input_mode input) {
  return input == TESSERA_INPUT_F32 ? TESSERA_F32 : TESSERA_BF16;
}

// What is created by the C interface: destroyed by it, before what it needs.
template <class Object, void (*kDestroy)(Object*)>
struct Destroyer {
  DevicePtr device;
  void operator()(Object* object) const {
    device->run([&](tessera_context*) {
      kDestroy(object);
      return TESSERA_OK;
    });
  }
};
template <class Object, void (*kDestroy)(Object*)>
using Handle = std::unique_ptr<Object, Destroyer<Object, kDestroy>>;

class Linear {
 public:
  Linear(WeightPtr weight, int64_t groups, const std::string& input, const std::optional<std::string>& output,
         int64_t max_tokens)
      : weight_(std::move(weight)), device_(weight_->device()), map_(nullptr, {device_}) {
    if (weight_->count() != 1) fail(ErrorCode::kInvalidArgument, "weight: expected one matrix, found a stack of them");
    if (groups < 1 || weight_->rows() % groups != 0) {
      fail(ErrorCode::kInvalidArgument,
           fmt::format("groups: expected a divisor of {} rows, found {}", weight_->rows(), groups));
    }
    desc_.in = weight_->cols(), desc_.out = weight_->rows() / groups, desc_.groups = groups;
    desc_.input = value_of(kInputs, input, "input");
    desc_.activation = activation_of(desc_.input);
    desc_.output = output ? value_of(kDtypes, *output, "output") : desc_.activation;
    const std::vector<tessera_weight> views = weight_->views();
    tessera_linear* made = nullptr;
    device_->run([&](tessera_context* context) {
      return tessera_linear_create(context, &desc_, views.data(), max_tokens, &made);
    });
    map_.reset(made);
  }

  nb::object run(nb::handle x, nb::handle out) const {
    const Array in = read_array(*device_, x, "x", {element_of(desc_.activation)}, {kAny, desc_.groups * desc_.in});
    const auto [made, y] = output(device_, out, x, element_of(desc_.output), {in.shape[0], desc_.groups * desc_.out});
    device_->run([&](tessera_context*) { return tessera_linear_run(map_.get(), in.data(), y.data(), in.shape[0]); });
    return made;
  }
  std::string kernel() const { return tessera_linear_kernel(map_.get()); }

 private:
  WeightPtr weight_;
  DevicePtr device_;
  tessera_linear_desc desc_{};
  Handle<tessera_linear, tessera_linear_destroy> map_;
};

class Moe {
 public:
  Moe(const WeightPtr& w1, const WeightPtr& w3, const WeightPtr& w2, int64_t top_k, std::optional<int64_t> num_experts,
      int64_t first_expert, const std::string& input, const std::string& shared_input, float swiglu_limit,
      float routing_scale, bool is_normalized, const WeightPtr& router, nb::handle router_bias, nb::handle hash_table,
      const WeightPtr& shared_w1, const WeightPtr& shared_w3, const WeightPtr& shared_w2, int64_t max_tokens)
      : kept_{w1, w3, w2, router, shared_w1, shared_w3, shared_w2}, device_(w1->device()), moe_(nullptr, {device_}) {
    constexpr const char* kNames[] = {"w1", "w3", "w2", "router", "shared_w1", "shared_w3", "shared_w2"};
    std::vector<tessera_weight> views[std::size(kNames)];
    for (size_t i = 0; i < kept_.size(); ++i) {
      check_device(device_, kept_[i], kNames[i]);
      if (kept_[i] != nullptr) views[i] = kept_[i]->views();
      const size_t expected = i < 3 ? views[0].size() : 1;
      if (kept_[i] != nullptr && views[i].size() != expected) {
        fail(ErrorCode::kInvalidArgument,
             fmt::format("{}: expected {} matrices, found {}", kNames[i], expected, views[i].size()));
      }
    }
    desc_.hidden = w1->cols(), desc_.inner = w1->rows();
    desc_.num_local = w1->count(), desc_.first_expert = first_expert;
    desc_.num_experts = num_experts.value_or(w1->count());
    desc_.top_k = top_k;
    desc_.input = value_of(kInputs, input, "input"),
    desc_.shared_input = value_of(kInputs, shared_input, "shared_input");
    desc_.activation = activation_of(desc_.input);
    desc_.swiglu_limit = swiglu_limit, desc_.routing_scale = routing_scale, desc_.is_normalized = is_normalized;
    const auto given = [&](size_t i) { return kept_[i] == nullptr ? nullptr : views[i].data(); };
    tessera_moe_weights weights{.w1 = given(0),
                                .w3 = given(1),
                                .w2 = given(2),
                                .router = given(3),
                                .router_bias = nullptr,
                                .hash_table = nullptr,
                                .shared_w1 = given(4),
                                .shared_w3 = given(5),
                                .shared_w2 = given(6)};
    if (!router_bias.is_none()) {
      bias_ = read_array(*device_, router_bias, "router_bias", {Element::kF32}, {desc_.num_experts});
      weights.router_bias = bias_.as<float>();
    }
    if (!hash_table.is_none()) {
      table_ = read_array(*device_, hash_table, "hash_table", {Element::kI32}, {kAny, top_k});
      if (!device_->is_gpu()) {
        check_range("hash_table", table_.as<int32_t>(), table_.shape[0] * top_k, 0, desc_.num_experts - 1);
      }
      weights.hash_table = table_.as<int32_t>();
    }
    tessera_moe* made = nullptr;
    device_->run(
        [&](tessera_context* context) { return tessera_moe_create(context, &desc_, &weights, max_tokens, &made); });
    moe_.reset(made);
  }

  nb::object run_experts(nb::handle x, nb::handle experts, nb::handle routing, nb::handle out) const {
    const Array in = read_x(x);
    const int64_t num_tokens = in.shape[0];
    const Array ids = read_array(*device_, experts, "experts", {Element::kI32}, {num_tokens, desc_.top_k});
    const Array weights = read_array(*device_, routing, "routing", {Element::kF32}, {num_tokens, desc_.top_k});
    const auto [made, y] =
        output(device_, out, x, element_of(desc_.activation), {num_tokens, desc_.top_k, desc_.hidden});
    device_->run([&](tessera_context*) {
      return tessera_moe_experts_run(moe_.get(), in.data(), ids.as<int32_t>(), weights.as<float>(), y.data(),
                                     num_tokens);
    });
    return made;
  }

  nb::object combine(nb::handle routed, nb::handle out) const {
    const Array in =
        read_array(*device_, routed, "routed", {element_of(desc_.activation)}, {kAny, desc_.top_k, desc_.hidden});
    const int64_t num_tokens = in.shape[0];
    const auto [made, y] = output(device_, out, routed, element_of(desc_.activation), {num_tokens, desc_.hidden});
    device_->run(
        [&](tessera_context*) { return tessera_moe_combine_run(moe_.get(), in.data(), y.data(), num_tokens); });
    return made;
  }

  nb::object run(nb::handle x, nb::handle token_ids, nb::handle out) const {
    const Array in = read_x(x);
    const int64_t num_tokens = in.shape[0];
    Array ids;
    if (!token_ids.is_none()) {
      ids = read_array(*device_, token_ids, "token_ids", {Element::kI32}, {num_tokens});
      if (!device_->is_gpu() && !table_.shape.empty()) {
        check_range("token_ids", ids.as<int32_t>(), num_tokens, 0, table_.shape[0] - 1);
      }
    }
    const auto [made, y] = output(device_, out, x, element_of(desc_.activation), {num_tokens, desc_.hidden});
    device_->run([&](tessera_context*) {
      return tessera_moe_run(moe_.get(), in.data(), token_ids.is_none() ? nullptr : ids.as<int32_t>(), y.data(),
                             nullptr, nullptr, num_tokens);
    });
    return made;
  }
  std::string kernel() const { return tessera_moe_kernel(moe_.get()); }

 private:
  Array read_x(nb::handle x) const {
    return read_array(*device_, x, "x", {element_of(desc_.activation)}, {kAny, desc_.hidden});
  }

  std::vector<WeightPtr> kept_;
  DevicePtr device_;
  Array bias_, table_;
  tessera_moe_desc desc_{};
  Handle<tessera_moe, tessera_moe_destroy> moe_;
};

class Attention {
 public:
  Attention(DevicePtr device, int64_t heads, int64_t head_dim, int64_t window, int64_t rope_dim,
            std::optional<float> scale, const std::string& cache, int64_t max_tokens)
      : device_(std::move(device)), attention_(nullptr, {device_}) {
    desc_.heads = heads, desc_.head_dim = head_dim, desc_.window = window, desc_.rope_dim = rope_dim;
    desc_.scale = scale.value_or(1 / std::sqrt(static_cast<float>(head_dim)));
    desc_.cache = value_of(kCaches, cache, "cache");
    desc_.activation = desc_.cache == TESSERA_CACHE_F32 ? TESSERA_F32 : TESSERA_BF16;
    tessera_attention* made = nullptr;
    device_->run(
        [&](tessera_context* context) { return tessera_attention_create(context, &desc_, max_tokens, &made); });
    attention_.reset(made);
  }

  int64_t entry_bytes() const { return tessera_attention_entry_bytes(attention_.get()); }

  void store(nb::handle rows, nb::handle slots, nb::handle cache) const {
    const Array in = read_array(*device_, rows, "rows", {element_of(desc_.activation)}, {kAny, desc_.head_dim});
    const Array places = read_array(*device_, slots, "slots", {Element::kI64}, {in.shape[0]});
    const Array into = read_array(*device_, cache, "cache", {Element::kByte}, {kAny, entry_bytes()}, Access::kWrite);
    if (!device_->is_gpu()) check_range("slots", places.as<int64_t>(), in.shape[0], -1, into.shape[0] - 1);
    device_->run([&](tessera_context*) {
      return tessera_attention_store(attention_.get(), in.data(), places.as<int64_t>(), in.shape[0],
                                     into.as<uint8_t>());
    });
  }

  nb::object run(nb::handle q, nb::handle positions, nb::handle window_cache, nb::handle sink, nb::handle entry_cache,
                 nb::handle num_entries, nb::handle selected, nb::handle out) const {
    const Element element = element_of(desc_.activation);
    const Array in = read_array(*device_, q, "q", {element}, {kAny, desc_.heads, desc_.head_dim});
    const int64_t num_tokens = in.shape[0];
    const Array places = read_array(*device_, positions, "positions", {Element::kI64}, {num_tokens});
    const Array window = read_array(*device_, window_cache, "window_cache", {Element::kByte}, {kAny, entry_bytes()});
    const Array sinks = read_array(*device_, sink, "sink", {Element::kF32}, {desc_.heads});
    const auto [made, y] = output(device_, out, q, element, {num_tokens, desc_.heads, desc_.head_dim});
    Array entries, counts, lists;
    tessera_attention_step step{.q = in.data(),
                                .positions = places.as<int64_t>(),
                                .window_cache = window.as<uint8_t>(),
                                .window_slots = window.shape[0],
                                .entry_cache = nullptr,
                                .num_entries = nullptr,
                                .selected = nullptr,
                                .selected_stride = 0,
                                .sink = sinks.as<float>(),
                                .out = y.data(),
                                .num_tokens = num_tokens};
    if (entry_cache.is_none() && !(num_entries.is_none() && selected.is_none())) {
      fail(ErrorCode::kInvalidArgument, "entry_cache: expected an array beside num_entries and selected, found None");
    }
    if (!entry_cache.is_none()) {
      entries = read_array(*device_, entry_cache, "entry_cache", {Element::kByte}, {kAny, entry_bytes()});
      counts = read_array(*device_, num_entries, "num_entries", {Element::kI32}, {num_tokens});
      step.entry_cache = entries.as<uint8_t>(), step.num_entries = counts.as<int32_t>();
    }
    if (!selected.is_none()) {
      lists = read_array(*device_, selected, "selected", {Element::kI32}, {num_tokens, kAny});
      step.selected = lists.as<int32_t>(), step.selected_stride = lists.shape[1];
    }
    if (!device_->is_gpu()) check_indices(step, entries.shape.empty() ? 0 : entries.shape[0]);
    device_->run([&](tessera_context*) { return tessera_attention_run(attention_.get(), &step); });
    return made;
  }
  std::string kernel() const { return tessera_attention_kernel(attention_.get()); }

 private:
  // What the step's tokens index, before it is read: places in the ring, entries or a list of them. Of a list what lies
  // past its length may be anything.
  static void check_indices(const tessera_attention_step& step, int64_t num_slots) {
    check_range("positions", step.positions, step.num_tokens, 0, std::numeric_limits<int64_t>::max() - 1);
    if (step.entry_cache == nullptr) return;
    check_range("num_entries", step.num_entries, step.num_tokens, 0,
                step.selected == nullptr ? num_slots : step.selected_stride);
    for (int64_t t = 0; step.selected != nullptr && t < step.num_tokens; ++t) {
      check_range(fmt::format("selected[{}]", t), step.selected + t * step.selected_stride, step.num_entries[t], 0,
                  num_slots - 1);
    }
  }

  DevicePtr device_;
  tessera_attention_desc desc_{};
  Handle<tessera_attention, tessera_attention_destroy> attention_;
};

nb::object quantize_nvfp4(const DevicePtr& device, nb::handle x, const std::string& rule,
                          const std::optional<nb::tuple>& out) {
  const tessera_nvfp4_rule chosen = value_of(kRules, rule, "rule");
  const Array in = read_array(*device, x, "x", {Element::kF32, Element::kBf16}, {kAny, kAny});
  const int64_t rows = in.shape[0], cols = in.shape[1];
  if (cols < 16 || cols % 16 != 0) {
    fail(ErrorCode::kInvalidArgument, fmt::format("x: expected columns in multiples of 16, found {}", cols));
  }
  const int64_t num_globals = chosen == TESSERA_NVFP4_ROWS ? rows : 1;
  if (out && out->size() != 3) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format("out: expected 3 arrays (codes, scales, globals), found {}", out->size()));
  }
  const nb::tuple made = out ? *out
                             : nb::make_tuple(make_array(device, x, Element::kByte, {rows, cols / 2}),
                                              make_array(device, x, Element::kByte, {rows, cols / 16}),
                                              make_array(device, x, Element::kF32, {num_globals}));
  const Array c = read_array(*device, made[0], "codes", {Element::kByte}, {rows, cols / 2}, Access::kWrite);
  const Array s = read_array(*device, made[1], "scales", {Element::kByte}, {rows, cols / 16}, Access::kWrite);
  const Array g = read_array(*device, made[2], "globals", {Element::kF32}, {num_globals}, Access::kWrite);
  device->run([&](tessera_context* context) {
    return tessera_quantize_nvfp4(context, chosen, in.element == Element::kF32 ? TESSERA_F32 : TESSERA_BF16, in.data(),
                                  rows, cols, c.as<uint8_t>(), s.as<uint8_t>(), g.as<float>());
  });
  return made;
}

nb::object dequantize_nvfp4(const DevicePtr& device, nb::handle codes, nb::handle scales, nb::handle globals) {
  if (device->is_gpu()) fail(ErrorCode::kUnsupported, "dequantize_nvfp4: is for looking at values, on the CPU alone");
  const Array c = read_array(*device, codes, "codes", {Element::kByte}, {kAny, kAny});
  const int64_t rows = c.shape[0], cols = 2 * c.shape[1];
  const Array s = read_array(*device, scales, "scales", {Element::kByte, Element::kE4m3}, {rows, cols / 16});
  const Array g = read_array(*device, globals, "globals", {Element::kF32}, {kAny});
  if (cols % 16 != 0 || (g.shape[0] != 1 && g.shape[0] != rows)) {
    fail(ErrorCode::kInvalidArgument,
         fmt::format(
             "expected codes [rows, 8 n], scales [rows, n] and globals [1] or [rows], found codes {}, globals {}",
             shape_text(c.shape), shape_text(g.shape)));
  }
  const nb::object made = make_array(device, codes, Element::kF32, {rows, cols});
  const Array out = read_array(*device, made, "out", {Element::kF32}, {rows, cols}, Access::kWrite);
  const nb::gil_scoped_release release;
  for (int64_t r = 0; r < rows; ++r) {
    float* const row = out.as<float>() + r * cols;
    numeric::nvfp4_dequantize_row(c.as<uint8_t>() + r * cols / 2, s.as<uint8_t>() + r * cols / 16, cols, row);
    const float scale = g.as<float>()[g.shape[0] == 1 ? 0 : r];
    for (int64_t i = 0; i < cols; ++i) row[i] *= scale;
  }
  return made;
}

}  // namespace

void add_ops(nb::module_& m) {
  using nb::arg;
  nb::class_<Device>(m, "Context")
      .def(nb::init<const std::string&, uintptr_t, int>(), arg("device") = "cpu", arg("stream") = 0,
           arg("num_threads") = 0)
      .def("synchronize",
           [](const Device& device) {
             device.run([](tessera_context* context) { return tessera_context_synchronize(context); });
           })
      .def_prop_ro("device", &Device::name)
      .def("quantize_nvfp4", &quantize_nvfp4, arg("x"), arg("rule") = "rows", arg("out") = nb::none())
      .def("dequantize_nvfp4", &dequantize_nvfp4, arg("codes"), arg("scales"), arg("globals"));
  nb::class_<Weight>(m, "Weight")
      .def(nb::init<DevicePtr, nb::handle, nb::handle, const std::vector<float>&>(), arg("context"), arg("data"),
           arg("block_scales") = nb::none(), arg("tensor_scales") = std::vector<float>())
      .def_prop_ro("format", &Weight::format)
      .def_prop_ro("shape",
                   [](const Weight& weight) { return nb::make_tuple(weight.count(), weight.rows(), weight.cols()); });
  nb::class_<Linear>(m, "Linear")
      .def(nb::init<WeightPtr, int64_t, const std::string&, const std::optional<std::string>&, int64_t>(),
           arg("weight"), nb::kw_only(), arg("groups") = 1, arg("input") = "a16", arg("output") = nb::none(),
           arg("max_tokens") = 256)
      .def("__call__", &Linear::run, arg("x"), arg("out") = nb::none())
      .def_prop_ro("kernel", &Linear::kernel);
  nb::class_<Moe>(m, "Moe")
      .def(nb::init<const WeightPtr&, const WeightPtr&, const WeightPtr&, int64_t, std::optional<int64_t>, int64_t,
                    const std::string&, const std::string&, float, float, bool, const WeightPtr&, nb::handle,
                    nb::handle, const WeightPtr&, const WeightPtr&, const WeightPtr&, int64_t>(),
           arg("w1"), arg("w3"), arg("w2"), nb::kw_only(), arg("top_k"), arg("num_experts") = nb::none(),
           arg("first_expert") = 0, arg("input") = "a16", arg("shared_input") = "a16", arg("swiglu_limit") = 0.0f,
           arg("routing_scale") = 1.0f, arg("normalized") = true, arg("router").none() = nb::none(),
           arg("router_bias") = nb::none(), arg("hash_table") = nb::none(), arg("shared_w1").none() = nb::none(),
           arg("shared_w3").none() = nb::none(), arg("shared_w2").none() = nb::none(), arg("max_tokens") = 256)
      .def("experts", &Moe::run_experts, arg("x"), arg("experts"), arg("routing"), arg("out") = nb::none())
      .def("combine", &Moe::combine, arg("routed"), arg("out") = nb::none())
      .def("__call__", &Moe::run, arg("x"), arg("token_ids") = nb::none(), arg("out") = nb::none())
      .def_prop_ro("kernel", &Moe::kernel);
  nb::class_<Attention>(m, "Attention")
      .def(nb::init<DevicePtr, int64_t, int64_t, int64_t, int64_t, std::optional<float>, const std::string&, int64_t>(),
           arg("context"), nb::kw_only(), arg("heads"), arg("head_dim"), arg("window"), arg("rope_dim") = 0,
           arg("scale") = nb::none(), arg("cache") = "bf16", arg("max_tokens") = 256)
      .def_prop_ro("entry_bytes", &Attention::entry_bytes)
      .def("store", &Attention::store, arg("rows"), arg("slots"), arg("cache"))
      .def("__call__", &Attention::run, arg("q"), arg("positions"), arg("window_cache"), arg("sink"),
           arg("entry_cache") = nb::none(), arg("num_entries") = nb::none(), arg("selected") = nb::none(),
           arg("out") = nb::none())
      .def_prop_ro("kernel", &Attention::kernel);
}

}  // namespace tessera::python
