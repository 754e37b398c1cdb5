// SPDX-License-Identifier: Apache-2.0
#pragma once
// Predictions of every map and the experts of a model's layer on a target, and how they do where others have measured.
#include <string>
#include <vector>

#include "bench/plan/forms.h"

namespace tessera::bench {

struct PlanRow {
  std::string shape;
  int64_t tokens = 0;
  Form form = Form::kOurs;
  std::string note;  // of a form: "K = 96"
  std::vector<Kernel> kernels;
  std::vector<double> kernel_roofline_us;  // of what each reads from memory and multiplies
  double weight_bytes = 0, flops = 0;
  double roofline_us = 0;
  Estimate pessimistic, optimistic;  // with the low and the high ends of what nobody has measured

  double petaflops(const Estimate& estimate) const { return flops / estimate.us * 1e-9; }
  double gigabytes(const Estimate& estimate) const { return weight_bytes / estimate.us * 1e-3; }  // GB/s
  double share(const Estimate& estimate) const { return roofline_us / estimate.us; }
};

// Ours and, where one is described, the ideal form, of each shape and number of tokens.
std::vector<PlanRow> plan_rows(const std::vector<PlanShape>& shapes, const std::vector<int64_t>& tokens,
                               const Target& target);

// What others measured on a target, and the prediction for the form that they ran.
struct PublishedRow {
  std::string what, source;
  double petaflops = 0;
  bool sets_a_figure = false;  // of the target, so that it proves nothing
  PlanRow prediction;
};
std::vector<PublishedRow> published_rows(const Target& target);

// For people: a table, of each shape and of its kernels; the figures with their sources.
std::string plan_table(const std::vector<PlanRow>& rows);
// What each kernel does in a stage, and what each resource alone would take.
std::string kernels_table(const std::vector<PlanRow>& rows);
// A line that says so where nobody has published one.
std::string published_table(const Target& target);
std::string figures_table(const Target& target);

}  // namespace tessera::bench
