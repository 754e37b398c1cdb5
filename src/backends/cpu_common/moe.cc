// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/moe.h"

#include <algorithm>
#include <cstring>

#include "backends/cpu_common/panel_layout.h"
#include "backends/cpu_common/share.h"
#include "base/integer_math.h"
#include "numeric/nvfp4.h"

namespace tessera::backends::cpu_common {

namespace {

using ops::InputMode;
using ops::MoeExperts;
using ops::WeightView;

// The workspace. A slot is (token, rank of the expert in its list); a place is a slot's position after grouping by
// expert, tokens ascending, so that an expert's inputs are consecutive rows.
struct Scratch {
  char* tokens;      // [tokens][hidden] prepared; unused where x is taken as it is
  float* x_factors;  // [tokens]
  char* x;           // [places][hidden] for the kernel; in tiles, each expert's rows begin with a block
  uint16_t* h;       // [places][inner] as rounded
  char* h_in;        // [places][inner] for the kernel, as x; h itself where it is taken as it is, then in tiles too
  float* h_factors;  // [places]
  int32_t* slots;    // [places]
  int32_t* begins;   // [num_local + 1]: each local expert's places
  int32_t* active;   // [num_local]: local experts that have places
  int64_t* pieces;   // [num_local + 1]: pieces before each active expert
};

bool is_direct(const PanelKernels& kernels, const MoeExperts::Desc& desc) {
  return desc.input == InputMode::kA16 && kernels.input == DType::kBF16;
}

// Of a row of x or h for the kernel.
int64_t row_bytes_of(const PanelKernels& kernels, int64_t width) {
  return width * (dtype_bits(kernels.input) / 8);
}

int64_t layout_scratch(const PanelKernels& kernels, const MoeExperts::Desc& desc, int64_t num_tokens, char* base,
                       Scratch& s) {
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* at = base + used;
    used += (bytes + 127) / 128 * 128;
    return at;
  };
  const int64_t places = num_tokens * desc.top_k;
  const bool direct = is_direct(kernels, desc);
  s.tokens = take(direct ? 0 : num_tokens * row_bytes_of(kernels, desc.hidden));
  s.x_factors = reinterpret_cast<float*>(take(num_tokens * 4));
  s.x = take(num_tokens == 1 ? 0 : places * row_bytes_of(kernels, desc.hidden));
  s.h = reinterpret_cast<uint16_t*>(take(places * desc.inner * 2));
  s.h_in = direct ? reinterpret_cast<char*>(s.h) : take(places * row_bytes_of(kernels, desc.inner));
  s.h_factors = reinterpret_cast<float*>(take(places * 4));
  s.slots = reinterpret_cast<int32_t*>(take(places * 4));
  s.begins = reinterpret_cast<int32_t*>(take((desc.num_local + 1) * 4));
  s.active = reinterpret_cast<int32_t*>(take(desc.num_local * 4));
  s.pieces = reinterpret_cast<int64_t*>(take((desc.num_local + 1) * 8));
  return used;
}

// Fills slots, begins and active; returns how many experts are active.
int64_t group_by_expert(const MoeExperts::Desc& desc, const MoeExperts::Args& args, const Scratch& s) {
  const int64_t num_slots = args.num_tokens * desc.top_k;
  const auto local = [&](int64_t slot) -> int64_t {
    const int64_t e = args.experts[slot] - desc.first_expert;
    return e >= 0 && e < desc.num_local ? e : -1;
  };
  std::fill_n(s.begins, desc.num_local + 1, 0);
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (local(slot) >= 0) ++s.begins[local(slot) + 1];
  }
  int64_t num_active = 0;
  for (int64_t e = 0; e < desc.num_local; ++e) {
    if (s.begins[e + 1] > 0) s.active[num_active++] = static_cast<int32_t>(e);
    s.begins[e + 1] += s.begins[e];
  }
  // begins[e] is the cursor of expert e, then moves back by one expert.
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (local(slot) >= 0) {
      s.slots[s.begins[local(slot)]++] = static_cast<int32_t>(slot);
    } else {
      uint16_t* out = args.out.as<uint16_t>() + slot * desc.hidden;
      std::fill_n(out, desc.hidden, uint16_t{0});
    }
  }
  for (int64_t e = desc.num_local; e > 0; --e) s.begins[e] = s.begins[e - 1];
  s.begins[0] = 0;
  return num_active;
}

// Where the inputs of places begin, and the bytes from one to the next, or of one in tiles.
struct Rows {
  const char* data;
  int64_t stride;
  bool is_tiled;
};

// A row of x or h as a place's row for the kernel, `rows`; returns the factor of its sums.
float prepare_place(const PanelKernels& kernels, InputMode mode, const MoeExperts::Desc& desc,
                    const MoeExperts::Args& args, const Scratch& s, int64_t place, const uint16_t* from, int64_t width,
                    float bound, char* rows) {
  const int64_t row_bytes = row_bytes_of(kernels, width);
  if (!uses_tiles(kernels, args.num_tokens)) {
    return prepare_row(mode, from, width, bound, kernels.input, rows + place * row_bytes);
  }
  const int64_t e = args.experts[s.slots[place]] - desc.first_expert, first = s.begins[e];
  return prepare_tiled_row(mode, from, width, bound, place - first, s.begins[e + 1] - first, rows + first * row_bytes);
}

// x of every place. One token needs no copies: all places read its row.
Rows prepare_x(const PanelKernels& kernels, const MoeExperts::Desc& desc, const MoeExperts::Args& args,
               const Scratch& s, int64_t num_places, device::Queue& queue) {
  const char* tokens = args.x.as<char>();
  const int64_t row_bytes = row_bytes_of(kernels, desc.hidden);
  const bool is_tiled = uses_tiles(kernels, args.num_tokens);
  std::fill_n(s.x_factors, args.num_tokens, 1.0f);
  if (!is_direct(kernels, desc)) {
    tokens = s.tokens;
    share(queue, args.num_tokens, args.num_tokens * desc.hidden * 16, [&](int64_t t) {
      s.x_factors[t] = prepare_row(desc.input, args.x.as<uint16_t>() + t * desc.hidden, desc.hidden, 0, kernels.input,
                                   s.tokens + t * row_bytes);
    });
  }
  if (args.num_tokens == 1) return {tokens, 0, false};
  share(queue, num_places, num_places * row_bytes, [&](int64_t place) {
    const char* from = tokens + s.slots[place] / desc.top_k * row_bytes;
    if (!is_tiled) {
      std::memcpy(s.x + place * row_bytes, from, static_cast<size_t>(row_bytes));
      return;
    }
    prepare_place(kernels, InputMode::kA16, desc, args, s, place, reinterpret_cast<const uint16_t*>(from), desc.hidden,
                  0, s.x);
  });
  return {s.x, row_bytes, is_tiled};
}

// Pieces of all active experts: panels_each panels of a weight with `rows` rows, rows_each places.
struct Cut {
  int64_t panels, panels_each, rows_each, panel_pieces, count;
};

// `weights`: panels of how many weights a job takes together.
Cut cut_pieces(const PanelKernels& kernels, const Scratch& s, int64_t num_active, int64_t rows, int64_t weights,
               bool is_many, int num_threads) {
  const int64_t panels = num_panels(rows), few = kFewPanels / weights;
  const auto row_pieces = [&](int64_t a, int64_t rows_each) {
    return ceil_div<int64_t>(s.begins[s.active[a] + 1] - s.begins[s.active[a]], rows_each);
  };
  JobShape shape{panels * num_active >= 4 * few * num_threads ? few : 2, kernels.job_rows};
  if (is_many) {
    shape = many_rows_shape(kernels, kernels.job_panels / weights, num_threads, [&](const JobShape& tried) {
      int64_t count = 0;
      for (int64_t a = 0; a < num_active; ++a) count += row_pieces(a, tried.rows) * ceil_div(panels, tried.panels);
      return count;
    });
  }
  Cut cut{panels, shape.panels, shape.rows, ceil_div(panels, shape.panels), 0};
  for (int64_t a = 0; a < num_active; ++a) {
    s.pieces[a] = cut.count;
    cut.count += row_pieces(a, cut.rows_each) * cut.panel_pieces;
  }
  s.pieces[num_active] = cut.count;
  return cut;
}

struct Piece {
  int64_t expert, first_panel, num_panels, first_place, num_places;
};

Piece piece_at(const Scratch& s, const Cut& cut, int64_t num_active, int64_t index) {
  const int64_t a = std::upper_bound(s.pieces, s.pieces + num_active, index) - s.pieces - 1;
  const int64_t e = s.active[a], inside = index - s.pieces[a];
  Piece piece{};
  piece.expert = e;
  piece.first_panel = inside % cut.panel_pieces * cut.panels_each;
  piece.num_panels = std::min(cut.panels_each, cut.panels - piece.first_panel);
  piece.first_place = s.begins[e] + inside / cut.panel_pieces * cut.rows_each;
  piece.num_places = std::min<int64_t>(cut.rows_each, s.begins[e + 1] - piece.first_place);
  return piece;
}

// The panels of each weight follow those of the one before.
void run_kernel(PanelKernel kernel, const Piece& piece, std::initializer_list<const WeightView*> weights,
                const Rows& rows, float* sums) {
  PanelJob job{};
  for (const WeightView* weight : weights) {
    for (int64_t p = 0; p < piece.num_panels; ++p) {
      job.panels[job.num_panels++] = panel_of(*weight, piece.first_panel + p);
    }
    job.cols = weight->cols;
  }
  job.rows = rows.data + piece.first_place * rows.stride;
  job.row_stride = rows.stride;
  job.is_tiled = rows.is_tiled;
  job.num_rows = piece.num_places;
  job.sums = sums;
  kernel(job);
}

// Gate and up are one job, half of its panels each.
void gate_and_up(const PanelKernels& kernels, const MoeExperts::Desc& desc, const MoeExperts::Args& args,
                 const Scratch& s, const Rows& x, const Piece& piece) {
  alignas(64) float sums[kJobPanels * kSumRows * kPanelRows];
  const float *gates = sums, *ups = sums + piece.num_panels * kSumRows * kPanelRows;
  const WeightView &w1 = args.w1[piece.expert], &w3 = args.w3[piece.expert];
  run_kernel(kernels.of(desc.format), piece, {&w1, &w3}, x, sums);
  float gate_factors[kJobRows], up_factors[kJobRows], routing[kJobRows];
  for (int64_t i = 0; i < piece.num_places; ++i) {
    const int64_t slot = s.slots[piece.first_place + i];
    const float factor = s.x_factors[slot / desc.top_k] * format_factor(desc.format);
    gate_factors[i] = factor * w1.tensor_scale;
    up_factors[i] = factor * w3.tensor_scale;
    routing[i] = args.routing[slot];
  }
  const GateJob all{.gates = gates,
                    .ups = ups,
                    .num_panels = piece.num_panels,
                    .num_rows = piece.num_places,
                    .gate_factors = gate_factors,
                    .up_factors = up_factors,
                    .routing = routing,
                    .limit = desc.swiglu_limit,
                    .h = s.h + piece.first_place * desc.inner,
                    .row_elements = desc.inner,
                    .first_n = piece.first_panel * kPanelRows,
                    .end_n = desc.inner};
  if (!x.is_tiled || !is_direct(kernels, desc)) return kernels.gate(all);
  // In tiles: a block of rows and a pair of panels at a time.
  constexpr int64_t kPair = kTileSteps / kPanelRows;
  for (int64_t first = 0; first < all.num_rows; first += kTileBlock) {
    for (int64_t p = 0; p < all.num_panels; p += kPair) {
      const int64_t at = (p * kSumRows + first) * kPanelRows, n = all.first_n + p * kPanelRows;
      GateJob tile = all;
      tile.gates += at, tile.ups += at;
      tile.num_panels = std::min(kPair, all.num_panels - p);
      tile.num_rows = std::min(kTileBlock, all.num_rows - first);
      tile.gate_factors += first, tile.up_factors += first, tile.routing += first;
      tile.h += first * desc.inner + n * tile.num_rows;
      tile.row_elements = tile.end_n = kTileSteps;
      tile.first_n = 0;
      kernels.gate(tile);
    }
  }
}

void down(const PanelKernels& kernels, const MoeExperts::Desc& desc, const MoeExperts::Args& args, const Scratch& s,
          const Rows& h, const Piece& piece) {
  alignas(64) float sums[kJobPanels * kSumRows * kPanelRows];
  const WeightView& w2 = args.w2[piece.expert];
  run_kernel(kernels.of(desc.format), piece, {&w2}, h, sums);
  float factors[kJobRows];
  for (int64_t i = 0; i < piece.num_places; ++i) {
    factors[i] = s.h_factors[piece.first_place + i] * format_factor(desc.format) * w2.tensor_scale;
  }
  kernels.store({.sums = sums,
                 .num_panels = piece.num_panels,
                 .num_rows = piece.num_places,
                 .factors = factors,
                 .out = args.out.data,
                 .is_f32 = false,
                 .row_elements = desc.hidden,
                 .row_ids = s.slots + piece.first_place,
                 .first_n = piece.first_panel * kPanelRows,
                 .end_n = desc.hidden});
}

}  // namespace

bool moe_supports(const PanelKernels& kernels, const MoeExperts::Desc& desc, std::string& why_not) {
  return supports_panels(kernels, desc.format, desc.input, desc.activation, desc.hidden, why_not) &&
         supports_panels(kernels, desc.format, desc.input, desc.activation, desc.inner, why_not);
}

int64_t moe_workspace(const PanelKernels& kernels, const MoeExperts::Desc& desc, int64_t max_tokens) {
  Scratch s{};
  return layout_scratch(kernels, desc, std::max<int64_t>(2, max_tokens), nullptr, s);
}

void moe_run(const PanelKernels& kernels, const MoeExperts::Desc& desc, const MoeExperts::Args& args,
             device::Queue& queue) {
  if (args.num_tokens == 0) return;
  Scratch s{};
  layout_scratch(kernels, desc, args.num_tokens, static_cast<char*>(args.workspace), s);
  const int64_t num_active = group_by_expert(desc, args, s);
  const int64_t num_places = s.begins[desc.num_local];
  if (num_places == 0) return;
  const Rows x = prepare_x(kernels, desc, args, s, num_places, queue);
  const int64_t bytes = num_active * args.w1[s.active[0]].data_bytes();
  const int64_t cost = std::max(bytes, num_places * desc.hidden * desc.inner / 16);

  const bool is_many = uses_tiles(kernels, args.num_tokens);
  Cut cut = cut_pieces(kernels, s, num_active, desc.inner, 2, is_many, queue.num_threads());
  share(queue, cut.count, 2 * cost,
        [&](int64_t index) { gate_and_up(kernels, desc, args, s, x, piece_at(s, cut, num_active, index)); });

  std::fill_n(s.h_factors, num_places, 1.0f);
  if (!is_direct(kernels, desc)) {
    share(queue, num_places, num_places * desc.inner * 16, [&](int64_t place) {
      const float bound = desc.swiglu_limit > 0
                              ? numeric::nvfp4_bounded_activation_scale(args.routing[s.slots[place]], desc.swiglu_limit)
                              : 0;
      s.h_factors[place] =
          prepare_place(kernels, desc.input, desc, args, s, place, s.h + place * desc.inner, desc.inner, bound, s.h_in);
    });
  }

  cut = cut_pieces(kernels, s, num_active, desc.hidden, 1, is_many, queue.num_threads());
  const Rows h{s.h_in, row_bytes_of(kernels, desc.inner), is_many};
  share(queue, cut.count, cost,
        [&](int64_t index) { down(kernels, desc, args, s, h, piece_at(s, cut, num_active, index)); });
}

}  // namespace tessera::backends::cpu_common
