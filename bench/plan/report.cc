// SPDX-License-Identifier: Apache-2.0
#include "bench/plan/report.h"

#include <fmt/format.h>

namespace tessera::bench {

namespace {

PlanRow row_of(const PlanShape& shape, int64_t tokens, Form form, const std::string& note, std::vector<Kernel> kernels,
               const Target& target) {
  PlanRow row;
  row.shape = shape.name, row.tokens = tokens, row.form = form, row.note = note;
  row.weight_bytes = shape_weight_bytes(shape, tokens), row.flops = shape_flops(shape, tokens);
  row.pessimistic = estimate(kernels, target, true), row.optimistic = estimate(kernels, target, false);
  row.roofline_us = roofline_us(row.weight_bytes, row.flops, target);
  for (const Kernel& kernel : kernels) {
    row.kernel_roofline_us.push_back(roofline_us(kernel.memory_bytes, kernel.flops, target));
  }
  row.kernels = std::move(kernels);
  return row;
}

std::string range(double low, double high, const char* format) {
  const std::string from = fmt::format(fmt::runtime(format), low), to = fmt::format(fmt::runtime(format), high);
  return from == to ? from : from + " to " + to;
}

// A line of plan_table(): what is planned, when, how fast; bytes of memory, what passes before the first stage.
std::string table_line(std::string_view name, const std::string& tokens, std::string_view form, const std::string& us,
                       const std::string& rate, const std::string& waves, const std::string& megabytes,
                       const std::string& fill, const std::string& share, const std::string& limit) {
  return fmt::format("{:<42} {:>6} {:<14} {:>16} {:>16} {:>5} {:>8} {:>5} {:>11}  {}\n", name, tokens, form, us, rate,
                     waves, megabytes, fill, share, limit);
}

std::string limit_of(const Term& low, const Term& high) {
  return low.name == high.name ? low.name : low.name + " or " + high.name;
}

// A kernel of a shape. Its share of the roofline is of what it reads from memory and multiplies itself.
std::string kernel_line(const PlanRow& row, size_t i) {
  const Prediction &low = row.pessimistic.parts[i], &high = row.optimistic.parts[i];
  const double roofline = row.kernel_roofline_us[i] * 100;
  return table_line("  " + row.kernels[i].name, "", "", range(high.us(), low.us(), "{:.1f}"), "",
                    std::to_string(high.waves), fmt::format("{:.1f}", row.kernels[i].memory_bytes * 1e-6),
                    range(high.fill_us, low.fill_us, "{:.1f}"),
                    roofline > 0 ? range(roofline / low.us(), roofline / high.us(), "{:.0f}") + "%" : "-",
                    limit_of(low.limit(), high.limit()));
}

}  // namespace

std::vector<PlanRow> plan_rows(const std::vector<PlanShape>& shapes, const std::vector<int64_t>& tokens,
                               const Target& target) {
  std::vector<PlanRow> rows;
  for (const PlanShape& shape : shapes) {
    for (const int64_t n : tokens) {
      if (auto ours = our_kernels(shape, n, target); !ours.empty()) {
        // What others measure: without making the inputs NVFP4.
        if (shape.is_square && ours.size() > 1 && target.family != Family::kHopper) {
          rows.push_back(row_of(shape, n, Form::kOurs, "product", {ours.begin() + 1, ours.end()}, target));
        }
        rows.push_back(row_of(shape, n, Form::kOurs, "", std::move(ours), target));
      }
      std::vector<int64_t> product_columns = {64};
      if (target.name == "b300") product_columns.push_back(96);
      for (const int64_t columns : product_columns) {
        auto ideal = ideal_kernels(shape, n, target, {.product_columns = columns});
        if (ideal.empty()) continue;
        const std::string note = target.name == "b300" ? fmt::format("K = {}", columns) : "";
        rows.push_back(row_of(shape, n, Form::kIdeal, note, std::move(ideal), target));
      }
    }
  }
  return rows;
}

std::vector<PublishedRow> published_rows(const Target& target) {
  constexpr int64_t kSize = 8192;
  const PlanShape square = square_shape(kSize);
  std::vector<PublishedRow> rows;
  const auto add = [&](const char* what, const char* source, double petaflops, bool sets_a_figure,
                       std::vector<Kernel> kernels) {
    kernels.erase(kernels.begin());  // inputs were NVFP4 before
    rows.push_back(
        {what, source, petaflops, sets_a_figure, row_of(square, kSize, Form::kIdeal, "", std::move(kernels), target)});
  };
  if (target.name == "b200") {
    add("hand kernel, a plain pair", "cfregly/ai-performance-engineering#33", 6.2, true,
        ideal_kernels(square, kSize, target, {.pairs = 1}));
  } else if (target.name == "b300") {
    add("cuBLASLt, K = 96", "cfregly/ai-performance-engineering, docs/gb300-nvfp4-dual2sm.md", 8.6, false,
        ideal_kernels(square, kSize, target, {.product_columns = 96}));
  } else if (target.name == "rtx6000") {
    add("CUTLASS, 128 x 128 (our tiles)", "NVIDIA/cutlass#3272", 1.63, false, our_kernels(square, kSize, target));
  }
  return rows;
}

std::string plan_table(const std::vector<PlanRow>& rows) {
  std::string text = table_line("shape, its kernels", "tokens", "form", "us", "GB/s or TFLOP/s", "waves", "MB", "fill",
                                "of roofline", "limit");
  for (const PlanRow& row : rows) {
    const std::string form =
        (row.form == Form::kOurs ? std::string("ours") : "ideal") + (row.note.empty() ? "" : ", " + row.note);
    const Estimate &low = row.pessimistic, &high = row.optimistic;
    const bool shows_flops = row.tokens > 64;
    const auto rate = [&](const Estimate& e) { return shows_flops ? row.petaflops(e) * 1e3 : row.gigabytes(e); };
    text += table_line(row.shape, std::to_string(row.tokens), form, range(high.us, low.us, "{:.1f}"),
                       range(rate(low), rate(high), "{:.0f}") + (shows_flops ? " TF" : " GB"),
                       std::to_string(high.waves), fmt::format("{:.1f}", row.weight_bytes * 1e-6), "",
                       range(row.share(low) * 100, row.share(high) * 100, "{:.0f}") + "%",
                       fmt::format("{} ({})", limit_of(low.limit, high.limit), high.kernel));
    for (size_t i = 0; i < row.kernels.size(); ++i) text += kernel_line(row, i);
  }
  return text;
}

std::string kernels_table(const std::vector<PlanRow>& rows) {
  std::string text;
  for (const PlanRow& row : rows) {
    text += fmt::format("{}, {} tokens, {}{}\n", row.shape, row.tokens, row.form == Form::kOurs ? "ours" : "ideal",
                        row.note.empty() ? "" : ", " + row.note);
    for (size_t i = 0; i < row.kernels.size(); ++i) {
      const Kernel& k = row.kernels[i];
      const Prediction &low = row.pessimistic.parts[i], &high = row.optimistic.parts[i];
      text += fmt::format("  {}: {} tiles of {} stages, {} waves; {:.1f} MB of memory\n", k.name, k.tiles, k.stages,
                          low.waves, k.memory_bytes * 1e-6);
      if (k.product_cycles > 0) {
        text += fmt::format(
            "    a stage: {:.0f} cycles of products; {:.0f} bytes of operands, {:.0f} copied, {:.0f} of L2; {} stages "
            "are {:.0f} KiB\n",
            k.product_cycles, k.operand_bytes, k.copied_bytes, k.requested_bytes, k.ring_stages,
            static_cast<double>(k.ring_stages) * k.copied_bytes / 1024);
      }
      text += fmt::format("    us: fill {:.1f}, end {}", low.fill_us, range(high.end_us, low.end_us, "{:.1f}"));
      for (size_t t = 0; t < low.terms.size(); ++t) {
        if (low.terms[t].us < 0.05) continue;
        text += fmt::format(", {} {}", low.terms[t].name, range(high.terms[t].us, low.terms[t].us, "{:.1f}"));
      }
      text += "\n";
    }
  }
  return text;
}

std::string published_table(const Target& target) {
  std::string text;
  const std::vector<PublishedRow> rows = published_rows(target);
  if (rows.empty()) {
    return fmt::format("{}: nobody has published a row of NVFP4 that could be reproduced here\n", target.gpu);
  }
  for (const PublishedRow& row : rows) {
    const PlanRow& p = row.prediction;
    text +=
        fmt::format("8,192^3, {}: predicted {} PFLOP/s, published {} ({}){}; limit: {}\n", row.what,
                    range(p.petaflops(p.pessimistic), p.petaflops(p.optimistic), "{:.2f}"), row.petaflops, row.source,
                    row.sets_a_figure ? ", which sets the target's power" : "", p.optimistic.limit.name);
  }
  return text;
}

std::string figures_table(const Target& target) {
  std::string text = fmt::format("{}: {} multiprocessors\n", target.gpu, target.multiprocessors);
  for (const auto& [name, figure] : figures_of(target)) {
    const auto value = [](double v) { return v >= 1e6 ? std::string("no limit") : fmt::format("{:g}", v); };
    const std::string values =
        figure.low == figure.high ? value(figure.low) : value(figure.low) + " to " + value(figure.high);
    text += fmt::format("  {:<28} {:>18} {:<11} {}\n", name, values, figure.unit, figure.source);
  }
  return text;
}

}  // namespace tessera::bench
