// SPDX-License-Identifier: Apache-2.0
#include "bindings/c/bound_linear.h"

using namespace tessera;
using namespace tessera::bindings;

struct tessera_linear {
  tessera_context* context;
  int64_t max_tokens;
  BoundLinear map;
};

extern "C" {

tessera_status tessera_linear_create(tessera_context* context, const tessera_linear_desc* desc,
                                     const tessera_weight* weight, int64_t max_tokens, tessera_linear** linear) {
  return guarded([&] {
    check_not_null(context, "context");
    check_not_null(desc, "desc");
    check_not_null(linear, "linear");
    check_size(desc->in, 1, ops::kMaxLinearIn, "desc.in");
    check_size(desc->out, 1, kMaxSize, "desc.out");
    check_size(desc->groups, 1, 1024, "desc.groups");
    check_size(max_tokens, 1, kMaxTokens, "max_tokens");
    const ops::WeightView view = weight_of(weight, desc->groups * desc->out, desc->in, "weight");
    const ops::InputMode input = input_mode_of(desc->input, "desc.input");
    const DType activation = activation_of(desc->activation, input), output = dtype_of(desc->output, "desc.output");
    check_flag(output == activation || output == DType::kF32, "desc.output", "desc.activation or TESSERA_F32",
               desc->output);
    context->executor->make_current();
    *linear = new tessera_linear{context, max_tokens,
                                 BoundLinear(*context,
                                             {.in = desc->in,
                                              .out = desc->out,
                                              .groups = desc->groups,
                                              .format = view.format,
                                              .input = input,
                                              .activation = activation,
                                              .output = output},
                                             view, max_tokens)};
  });
}

tessera_status tessera_linear_run(tessera_linear* linear, const void* x, void* y, int64_t num_tokens) {
  return guarded([&] {
    check_not_null(linear, "linear");
    check_tokens(num_tokens, linear->max_tokens);
    if (num_tokens == 0) return;
    check_pointer(x, kDataAlignment, "x");
    check_pointer(y, kDataAlignment, "y");
    linear->context->executor->make_current();
    linear->map.run(*linear->context, const_cast<void*>(x), y, num_tokens);
  });
}

const char* tessera_linear_kernel(const tessera_linear* linear) {
  return linear == nullptr ? nullptr : linear->map.kernel().c_str();
}

void tessera_linear_destroy(tessera_linear* linear) {
  delete linear;
}
}
