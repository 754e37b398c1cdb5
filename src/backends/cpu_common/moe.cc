// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu_common/moe.h"

#include <algorithm>
#include <cstring>

#include "backends/cpu_common/panel_layout.h"
#include "backends/cpu_common/share.h"
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
  char* x;           // [places][hidden] for the kernel, perhaps with padding
  uint16_t* h;       // [places][inner] as rounded, likewise
  char* h_in;        // [places][inner] for the kernel; h itself where it is taken as it is
  float* h_factors;  // [places]
  int32_t* slots;    // [places]
  int32_t* begins;   // [num_local + 1]: each local expert's places
  int32_t* active;   // [num_local]: local experts that have places
  int64_t* pieces;   // [num_local + 1]: pieces before each active expert
};

bool is_direct(const PanelKernels& kernels, const MoeExperts::Desc& desc) {
  return desc.input == InputMode::kA16 && kernels.input == DType::kBF16;
}

// Bytes of a row of x or h for the kernel, and from one to the next.
int64_t row_bytes_of(const PanelKernels& kernels, int64_t width) {
  return width * (dtype_bits(kernels.input) / 8);
}
int64_t row_stride_of(const PanelKernels& kernels, int64_t width) {
  return padded_row_bytes(kernels, row_bytes_of(kernels, width));
}

// From one row of h, as rounded, to the next.
int64_t h_elements(const PanelKernels& kernels, const MoeExperts::Desc& desc) {
  return is_direct(kernels, desc) ? row_stride_of(kernels, desc.inner) / 2 : desc.inner;
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
  s.x = take(num_tokens == 1 ? 0 : places * row_stride_of(kernels, desc.hidden));
  s.h = reinterpret_cast<uint16_t*>(take(places * h_elements(kernels, desc) * 2));
  s.h_in = direct ? reinterpret_cast<char*>(s.h) : take(places * row_stride_of(kernels, desc.inner));
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

// Where the inputs of places begin, and the bytes from one to the next.
struct Rows {
  const char* data;
  int64_t stride;
};

// x of every place. One token needs no copies: all places read its row.
Rows prepare_x(const PanelKernels& kernels, const MoeExperts::Desc& desc, const MoeExperts::Args& args,
               const Scratch& s, int64_t num_places, device::Queue& queue) {
  const char* tokens = args.x.as<char>();
  const int64_t row_bytes = row_bytes_of(kernels, desc.hidden), stride = row_stride_of(kernels, desc.hidden);
  std::fill_n(s.x_factors, args.num_tokens, 1.0f);
  if (!is_direct(kernels, desc)) {
    tokens = s.tokens;
    share(queue, args.num_tokens, args.num_tokens * desc.hidden * 16, [&](int64_t t) {
      s.x_factors[t] = prepare_row(desc.input, args.x.as<uint16_t>() + t * desc.hidden, desc.hidden, 0, kernels.input,
                                   s.tokens + t * row_bytes);
    });
  }
  if (args.num_tokens == 1) return {tokens, 0};
  share(queue, num_places, num_places * row_bytes, [&](int64_t place) {
    std::memcpy(s.x + place * stride, tokens + s.slots[place] / desc.top_k * row_bytes, static_cast<size_t>(row_bytes));
  });
  return {s.x, stride};
}

// Pieces of all active experts: panels_each panels of a weight with `rows` rows, rows_each places.
struct Cut {
  int64_t panels, panels_each, rows_each, panel_pieces, count;
};

Cut cut_pieces(const PanelKernels& kernels, const Scratch& s, int64_t num_active, int64_t rows, int64_t max_panels,
               int num_threads) {
  Cut cut{};
  cut.rows_each = kernels.job_rows;
  cut.panels = num_panels(rows);
  cut.panels_each = cut.panels * num_active >= 4 * max_panels * num_threads ? max_panels : 2;
  cut.panel_pieces = (cut.panels + cut.panels_each - 1) / cut.panels_each;
  for (int64_t a = 0; a < num_active; ++a) {
    const int64_t places = s.begins[s.active[a] + 1] - s.begins[s.active[a]];
    s.pieces[a] = cut.count;
    cut.count += (places + cut.rows_each - 1) / cut.rows_each * cut.panel_pieces;
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

void run_kernel(PanelKernel kernel, const Piece& piece, const WeightView& weight, const Rows& rows, float* sums) {
  PanelJob job{};
  job.num_panels = piece.num_panels;
  for (int64_t p = 0; p < piece.num_panels; ++p) job.panels[p] = panel_of(weight, piece.first_panel + p);
  job.cols = weight.cols;
  job.rows = rows.data + piece.first_place * rows.stride;
  job.row_stride = rows.stride;
  job.num_rows = piece.num_places;
  job.sums = sums;
  kernel(job);
}

// Gate and up are two jobs of a piece, of one pair of panels each.
constexpr int64_t kGatePanels = kJobPanels / 2;

void gate_and_up(const PanelKernels& kernels, const MoeExperts::Desc& desc, const MoeExperts::Args& args,
                 const Scratch& s, const Rows& x, const Piece& piece) {
  alignas(64) float gates[kGatePanels * kSumRows * kPanelRows];
  alignas(64) float ups[kGatePanels * kSumRows * kPanelRows];
  const WeightView &w1 = args.w1[piece.expert], &w3 = args.w3[piece.expert];
  run_kernel(kernels.of(desc.format), piece, w1, x, gates);
  run_kernel(kernels.of(desc.format), piece, w3, x, ups);
  float gate_factors[kJobRows], up_factors[kJobRows], routing[kJobRows];
  for (int64_t i = 0; i < piece.num_places; ++i) {
    const int64_t slot = s.slots[piece.first_place + i];
    const float factor = s.x_factors[slot / desc.top_k] * format_factor(desc.format);
    gate_factors[i] = factor * w1.tensor_scale;
    up_factors[i] = factor * w3.tensor_scale;
    routing[i] = args.routing[slot];
  }
  kernels.gate({.gates = gates,
                .ups = ups,
                .num_panels = piece.num_panels,
                .num_rows = piece.num_places,
                .gate_factors = gate_factors,
                .up_factors = up_factors,
                .routing = routing,
                .limit = desc.swiglu_limit,
                .h = s.h + piece.first_place * h_elements(kernels, desc),
                .row_elements = h_elements(kernels, desc),
                .first_n = piece.first_panel * kPanelRows,
                .end_n = desc.inner});
}

void down(const PanelKernels& kernels, const MoeExperts::Desc& desc, const MoeExperts::Args& args, const Scratch& s,
          const Rows& h, const Piece& piece) {
  alignas(64) float sums[kJobPanels * kSumRows * kPanelRows];
  const WeightView& w2 = args.w2[piece.expert];
  run_kernel(kernels.of(desc.format), piece, w2, h, sums);
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

  Cut cut = cut_pieces(kernels, s, num_active, desc.inner, kGatePanels, queue.num_threads());
  share(queue, cut.count, 2 * cost,
        [&](int64_t index) { gate_and_up(kernels, desc, args, s, x, piece_at(s, cut, num_active, index)); });

  const int64_t h_stride = row_stride_of(kernels, desc.inner);
  std::fill_n(s.h_factors, num_places, 1.0f);
  if (!is_direct(kernels, desc)) {
    share(queue, num_places, num_places * desc.inner * 16, [&](int64_t place) {
      const float bound = desc.swiglu_limit > 0
                              ? numeric::nvfp4_bounded_activation_scale(args.routing[s.slots[place]], desc.swiglu_limit)
                              : 0;
      s.h_factors[place] = prepare_row(desc.input, s.h + place * desc.inner, desc.inner, bound, kernels.input,
                                       s.h_in + place * h_stride);
    });
  }

  cut = cut_pieces(kernels, s, num_active, desc.hidden, kJobPanels, queue.num_threads());
  const Rows h{s.h_in, h_stride};
  share(queue, cut.count, cost,
        [&](int64_t index) { down(kernels, desc, args, s, h, piece_at(s, cut, num_active, index)); });
}

}  // namespace tessera::backends::cpu_common
