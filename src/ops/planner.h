// SPDX-License-Identifier: Apache-2.0
#pragma once
// Chooses, once, when a model is built, which variant of which backend computes each op, and remembers why.
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "ops/backend.h"

namespace tessera::ops {

// Which variant of which backend computes something.
struct Chosen {
  const Backend* backend = nullptr;
  std::string_view variant;
  friend bool operator==(const Chosen&, const Chosen&) = default;
};

// An op bound to a variant: what a layer holds and runs.
template <class Op>
struct Bound {
  typename Op::Desc desc;
  const Variant<Op>* variant = nullptr;
  std::string where = "";  // as given to Planner::bind
  const Backend* backend = nullptr;

  // False only of a fused op that was not found.
  bool is_bound() const { return variant != nullptr; }
  Chosen chosen() const { return {backend, variant->name}; }

  void run(const typename Op::Args& args, device::Queue& queue) const {
    if constexpr (requires { args.workspace; }) {
      TESSERA_CHECK(args.workspace != nullptr || workspace_bytes(1) == 0, where + ": no workspace");
    }
    queue.begin_op({Op::kName, variant->name, where.c_str()});
    variant->run(desc, args, queue);
    queue.end_op();
  }
  int64_t workspace_bytes(int64_t max_tokens) const {
    return variant->workspace_bytes == nullptr ? 0 : variant->workspace_bytes(desc, max_tokens);
  }
  const PackedLayout* packed_layout() const {
    return variant->packed_layout == nullptr ? nullptr : variant->packed_layout(desc);
  }
};

struct PlanLine {
  std::string where;  // "layers.3.attn.wq_a"
  std::string op, desc;
  std::string chosen;                 // "backend.variant"
  std::vector<std::string> refusals;  // "backend.variant: reason", for every better one that declined
};

// "op=backend" or "op=backend.variant", comma-separated: only these may be bound for these ops. "op=none" of a fused
// op: its parts run one by one. Throws kInvalidArgument for malformed text and for an op named twice.
std::vector<std::pair<std::string, std::string>> parse_forced(const std::string& text);

// What TESSERA_BACKENDS (machine.backends) names in vain: a line for each backend that this program has and this
// machine can't run, with the reason. One for the other kind of device is no cause for a line where another named one
// runs. Throws kInvalidArgument for a name that is no backend's.
std::vector<std::string> unusable_names(std::span<const Backend* const> backends, const device::Machine& machine);

class Planner {
 public:
  // Backends are tried in the order given. `forced` as from parse_forced; a name that no op or variant has throws
  // kInvalidArgument here, so that a misspelt one can't be ignored.
  Planner(std::span<const Backend* const> backends, const device::Machine& machine,
          std::vector<std::pair<std::string, std::string>> forced = {});

  // The first variant that supports `desc`. Throws kUnsupported with every refusal where there is none.
  template <class Op>
  Bound<Op> bind(const std::string& where, const typename Op::Desc& desc) {
    PlanLine line{where, Op::kName, desc.to_string(), "", {}};
    for (const Backend* backend : usable_) {
      for (const Variant<Op>& variant : backend->template variants_of<Op>()) {
        if (takes(*backend, variant, desc, line)) return {desc, &variant, where, backend};
      }
    }
    fail_unbound(line);
  }
  // A fused op (decision 0023) whose parts are computed by `parts`: bound where the first part's backend, or the one
  // that it extends, computes all of them, to its variant of the first part's name, if that supports `desc`. Not bound:
  // the parts run one by one.
  template <class Op>
  Bound<Op> bind_fused(const std::string& where, const typename Op::Desc& desc, std::span<const Chosen> parts) {
    static_assert(is_fused<Op>());
    const Chosen& first = parts.front();
    for (const Chosen& part : parts) {
      if (part.backend != first.backend && part.backend != first.backend->extends) return {};
    }
    PlanLine line{where, Op::kName, desc.to_string(), "", {}};
    for (const Variant<Op>& variant : first.backend->template variants_of<Op>()) {
      if (variant.name == first.variant && takes(*first.backend, variant, desc, line)) {
        return {desc, &variant, where, first.backend};
      }
    }
    return {};
  }

  const std::deque<PlanLine>& lines() const { return lines_; }
  // Backends that this machine can't run, with the reason.
  const std::vector<std::string>& unavailable() const { return unavailable_; }

 private:
  // Whether that variant computes `desc`; if so, the line is kept.
  template <class Op>
  bool takes(const Backend& backend, const Variant<Op>& variant, const typename Op::Desc& desc, PlanLine& line) {
    const std::string name = std::string(backend.name) + "." + variant.name;
    std::string why_not;
    if (!is_allowed(Op::kName, backend.name, name, why_not) ||
        (variant.runs_on != nullptr && !variant.runs_on(machine_, why_not)) || !variant.supports(desc, why_not)) {
      line.refusals.push_back(name + ": " + why_not);
      return false;
    }
    line.chosen = name;
    lines_.push_back(std::move(line));
    return true;
  }
  bool is_allowed(const char* op, const char* backend, const std::string& name, std::string& why_not) const;
  [[noreturn]] void fail_unbound(const PlanLine& line) const;

  device::Machine machine_;
  std::vector<const Backend*> usable_;
  std::vector<std::string> unavailable_;
  std::vector<std::pair<std::string, std::string>> forced_;
  std::deque<PlanLine> lines_;
};

}  // namespace tessera::ops
