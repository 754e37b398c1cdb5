/* SPDX-License-Identifier: Apache-2.0 */
/* How to use tessera.h: quantises a weight to NVFP4, multiplies by it, and attends a sequence of five tokens; both are
 * compared with plain loops. Exits with 0 where they agree.
 *
 *   cc -std=c11 example.c -ltessera -lm && ./a.out [cpu|cuda:0]        or by CMake, beside this file
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tessera.h"

enum { TOKENS = 5, IN = 256, OUT = 96, HEADS = 4, WIDTH = 128, ROPE = 64, WINDOW = 3, SLOTS = 16 };

/* Stops with Tessera's own words. */
static void check(tessera_status status, const char* call) {
  if (status == TESSERA_OK) return;
  fprintf(stderr, "%s: %s: %s\n", call, tessera_status_name(status), tessera_error_message());
  exit(1);
}
#define CHECK(call) check((call), #call)

static float next_random(void) {
  return (float)rand() / (float)RAND_MAX * 2 - 1;
}

static uint16_t bf16_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static float float_of(uint16_t bf16) {
  const uint32_t bits = (uint32_t)bf16 << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static float e2m1(uint8_t code) {
  static const float kValues[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return code & 8 ? -kValues[code & 7] : kValues[code & 7];
}

static float e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float size = exponent == 0 ? ldexpf((float)mantissa, -9) : ldexpf(1 + (float)mantissa / 8, exponent - 7);
  return code & 0x80 ? -size : size;
}

/* A copy of host data in the context's memory. */
static void* on_device(tessera_context* context, const void* host, size_t bytes) {
  void* data = NULL;
  CHECK(tessera_allocate(context, bytes, &data));
  CHECK(tessera_upload(context, data, host, bytes));
  return data;
}

/* ||found - expected|| / ||expected||, found being BF16. */
static double relative_error(const uint16_t* found, const double* expected, size_t count) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < count; ++i) {
    difference += pow((double)float_of(found[i]) - expected[i], 2);
    norm += expected[i] * expected[i];
  }
  return sqrt(difference / norm);
}

static double try_linear(tessera_context* context) {
  static float w[OUT * IN];
  static uint16_t x[TOKENS * IN], y[TOKENS * OUT];
  static uint8_t codes[OUT * IN / 2], scales[OUT * IN / 16];
  static double expected[TOKENS * OUT];
  float global = 0;
  for (int i = 0; i < OUT * IN; ++i) w[i] = next_random();
  for (int i = 0; i < TOKENS * IN; ++i) x[i] = bf16_of(next_random());
  void *w_there = on_device(context, w, sizeof w), *codes_there = on_device(context, codes, sizeof codes),
       *scales_there = on_device(context, scales, sizeof scales), *global_there = on_device(context, &global, 4);
  CHECK(tessera_quantize_nvfp4(context, TESSERA_NVFP4_TENSOR, TESSERA_F32, w_there, OUT, IN, codes_there, scales_there,
                               global_there));
  CHECK(tessera_download(context, codes, codes_there, sizeof codes));
  CHECK(tessera_download(context, scales, scales_there, sizeof scales));
  CHECK(tessera_download(context, &global, global_there, 4));

  const tessera_linear_desc desc = {.in = IN,
                                    .out = OUT,
                                    .groups = 1,
                                    .input = TESSERA_INPUT_A16,
                                    .activation = TESSERA_BF16,
                                    .output = TESSERA_BF16};
  const tessera_weight weight = {.format = TESSERA_WEIGHT_NVFP4,
                                 .rows = OUT,
                                 .cols = IN,
                                 .data = codes_there,
                                 .block_scales = scales_there,
                                 .tensor_scale = global};
  tessera_linear* linear = NULL;
  CHECK(tessera_linear_create(context, &desc, &weight, TOKENS, &linear));
  void *x_there = on_device(context, x, sizeof x), *y_there = on_device(context, y, sizeof y);
  CHECK(tessera_linear_run(linear, x_there, y_there, TOKENS));
  CHECK(tessera_download(context, y, y_there, sizeof y));
  printf("linear by %s\n", tessera_linear_kernel(linear));
  tessera_linear_destroy(linear);

  for (int t = 0; t < TOKENS; ++t) {
    for (int n = 0; n < OUT; ++n) {
      double sum = 0;
      for (int k = 0; k < IN; ++k) {
        const int i = n * IN + k;
        const uint8_t code = i % 2 == 0 ? codes[i / 2] & 15 : codes[i / 2] >> 4;
        sum += (double)float_of(x[t * IN + k]) * (double)e2m1(code) * (double)e4m3(scales[i / 16]) * (double)global;
      }
      expected[t * OUT + n] = sum;
    }
  }
  return relative_error(y, expected, TOKENS * OUT);
}

static double try_attention(tessera_context* context) {
  static uint16_t q[TOKENS * HEADS * WIDTH], kv[TOKENS * WIDTH], out[TOKENS * HEADS * WIDTH];
  static double expected[TOKENS * HEADS * WIDTH];
  int64_t positions[TOKENS];
  float sink[HEADS];
  for (int i = 0; i < TOKENS * HEADS * WIDTH; ++i) q[i] = bf16_of(next_random());
  for (int i = 0; i < TOKENS * WIDTH; ++i) kv[i] = bf16_of(next_random());
  for (int t = 0; t < TOKENS; ++t) positions[t] = t;
  for (int h = 0; h < HEADS; ++h) sink[h] = next_random();

  const tessera_attention_desc desc = {.heads = HEADS,
                                       .head_dim = WIDTH,
                                       .rope_dim = ROPE,
                                       .window = WINDOW,
                                       .scale = 1 / sqrtf(WIDTH),
                                       .cache = TESSERA_CACHE_BF16,
                                       .activation = TESSERA_BF16};
  tessera_attention* attention = NULL;
  CHECK(tessera_attention_create(context, &desc, TOKENS, &attention));
  void* cache = NULL;
  CHECK(tessera_allocate(context, (size_t)(SLOTS * tessera_attention_entry_bytes(attention)), &cache));
  void* positions_there = on_device(context, positions, sizeof positions);
  /* Position p lies in slot p mod SLOTS; here the two are the same. */
  CHECK(tessera_attention_store(attention, on_device(context, kv, sizeof kv), positions_there, TOKENS, cache));
  const tessera_attention_step step = {.q = on_device(context, q, sizeof q),
                                       .positions = positions_there,
                                       .window_cache = cache,
                                       .window_slots = SLOTS,
                                       .sink = on_device(context, sink, sizeof sink),
                                       .out = on_device(context, out, sizeof out),
                                       .num_tokens = TOKENS};
  CHECK(tessera_attention_run(attention, &step));
  CHECK(tessera_download(context, out, step.out, sizeof out));
  printf("attention by %s\n", tessera_attention_kernel(attention));
  tessera_attention_destroy(attention);

  for (int t = 0; t < TOKENS; ++t) {
    for (int h = 0; h < HEADS; ++h) {
      double* o = expected + (t * HEADS + h) * WIDTH;
      double sum = exp((double)sink[h]);
      for (int p = t < WINDOW ? 0 : t - WINDOW + 1; p <= t; ++p) {
        double z = 0;
        for (int c = 0; c < WIDTH; ++c) {
          z += (double)float_of(q[(t * HEADS + h) * WIDTH + c]) * (double)float_of(kv[p * WIDTH + c]);
        }
        const double weight = exp(z / sqrt(WIDTH));
        sum += weight;
        for (int c = 0; c < WIDTH; ++c) o[c] += weight * (double)float_of(kv[p * WIDTH + c]);
      }
      for (int c = 0; c < WIDTH; ++c) o[c] /= sum;
    }
  }
  return relative_error(out, expected, TOKENS * HEADS * WIDTH);
}

int main(int argc, char** argv) {
  const char* device = argc > 1 ? argv[1] : "cpu";
  tessera_context* context = NULL;
  CHECK(tessera_context_open(device, NULL, 0, &context));
  const double linear = try_linear(context), attention = try_attention(context);
  printf("tessera %s on %s: relative errors: linear %.1e, attention %.1e\n", tessera_version(), device, linear,
         attention);
  tessera_context_close(context); /* and with it what it allocated */
  return linear < 4e-3 && attention < 4e-3 ? 0 : 1;
}
