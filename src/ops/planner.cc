// SPDX-License-Identifier: Apache-2.0
#include "ops/planner.h"

#include <fmt/format.h>

#include "base/error.h"
#include "base/strings.h"

namespace tessera::ops {

namespace {

constexpr const char *kReference = "ref", *kNone = "none";

// Throws where TESSERA_BACKENDS names a backend that this program lacks.
void check_names(std::span<const Backend* const> backends, const std::string& names) {
  if (names.empty()) return;
  for (const std::string_view name : split(names, ',')) {
    bool is_known = false;
    for (const Backend* backend : backends) is_known = is_known || name == backend->name;
    if (!is_known)
      fail(ErrorCode::kInvalidArgument, fmt::format("TESSERA_BACKENDS: no backend \"{}\"", printable(name, 60)));
  }
}

// Calls visit(op name, backend name, variant name) for every variant of a backend, and for what else may be forced.
template <class Visit, class... Ops>
void for_each_variant(const char* backend, const VariantLists<Ops...>& lists, const Visit& visit) {
  const auto one_op = [&](const char* op, const auto& variants) {
    for (const auto& variant : variants) visit(op, std::string(backend), std::string(backend) + "." + variant.name);
  };
  (one_op(Ops::kName, std::get<std::span<const Variant<Ops>>>(lists.lists)), ...);
  ((is_fused<Ops>() ? visit(Ops::kName, kNone, kNone) : void()), ...);
}

}  // namespace

std::string_view to_string(Verification verification) {
  switch (verification) {
    case Verification::kRunOnHardware:
      return "run on hardware";
    case Verification::kEmulated:
      return "run under emulation";
    case Verification::kCompiledOnly:
      return "compiled only";
  }
  return "?";
}

bool is_named(const Backend& backend, const device::Machine& machine) {
  return ("," + machine.backends + ",").find(std::string(",") + backend.name + ",") != std::string::npos;
}

bool is_usable(const Backend& backend, const device::Machine& machine, std::string& why_not) {
  if (!machine.backends.empty() && backend.name != std::string_view(kReference) && !is_named(backend, machine)) {
    why_not = "TESSERA_BACKENDS is " + machine.backends;
    return false;
  }
  if (backend.is_on_gpu != machine.gpu.has_value()) {
    why_not = backend.is_on_gpu ? "works on a GPU, and the CPU was chosen" : "works on the CPU, and a GPU was chosen";
    return false;
  }
  return backend.available(machine, why_not);
}

std::vector<std::string> unusable_names(std::span<const Backend* const> backends, const device::Machine& machine) {
  check_names(backends, machine.backends);
  std::vector<std::string> lines, of_other_device;
  bool has_usable = false;
  for (const Backend* backend : backends) {
    std::string why_not;
    if (!is_named(*backend, machine)) continue;
    if (is_usable(*backend, machine, why_not)) {
      has_usable = true;
      continue;
    }
    auto& list = backend->is_on_gpu == machine.gpu.has_value() ? lines : of_other_device;
    list.push_back(fmt::format("TESSERA_BACKENDS names {}, which is not used: {}", backend->name, why_not));
  }
  if (!has_usable) lines.insert(lines.end(), of_other_device.begin(), of_other_device.end());
  return lines;
}

std::vector<std::pair<std::string, std::string>> parse_forced(const std::string& text) {
  std::vector<std::pair<std::string, std::string>> forced;
  if (text.empty()) return forced;
  for (const std::string_view item : split(text, ',')) {
    const size_t equals = item.find('=');
    if (equals == std::string::npos || equals == 0 || equals + 1 == item.size()) {
      fail(ErrorCode::kInvalidArgument,
           fmt::format("TESSERA_FORCE: expected OP=VARIANT, found \"{}\"", printable(item, 60)));
    }
    const std::string op(item.substr(0, equals)), variant(item.substr(equals + 1));
    for (const auto& [other, first] : forced) {
      if (other == op) {
        fail(ErrorCode::kInvalidArgument, fmt::format("TESSERA_FORCE: expected one variant of {}, found {} and {}",
                                                      printable(op, 40), printable(first, 40), printable(variant, 40)));
      }
    }
    forced.emplace_back(op, variant);
  }
  return forced;
}

Planner::Planner(std::span<const Backend* const> backends, const device::Machine& machine,
                 std::vector<std::pair<std::string, std::string>> forced)
    : machine_(machine), forced_(std::move(forced)) {
  check_names(backends, machine.backends);
  for (const Backend* backend : backends) {
    std::string why_not;
    if (is_usable(*backend, machine, why_not)) {
      usable_.push_back(backend);
    } else {
      unavailable_.push_back(fmt::format("{}: {}", backend->name, why_not));
    }
  }
  for (const auto& [op, wanted] : forced_) {
    bool is_known = false;
    for (const Backend* backend : usable_) {
      for_each_variant(backend->name, backend->variants,
                       [&](const char* name, const std::string& of, const std::string& variant) {
                         is_known = is_known || (op == name && (wanted == of || wanted == variant));
                       });
    }
    if (!is_known) {
      fail(ErrorCode::kInvalidArgument,
           fmt::format("TESSERA_FORCE: no variant \"{}\" of an op \"{}\" can run on this machine", wanted, op));
    }
  }
}

bool Planner::is_allowed(const char* op, const char* backend, const std::string& name, std::string& why_not) const {
  for (const auto& [forced_op, wanted] : forced_) {
    if (forced_op == op && wanted != backend && wanted != name) {
      why_not = fmt::format("TESSERA_FORCE asks for {}", wanted);
      return false;
    }
  }
  return true;
}

void Planner::fail_unbound(const PlanLine& line) const {
  std::string message = fmt::format("{}: no backend can compute {} {}", line.where, line.op, line.desc);
  for (const std::string& refusal : line.refusals) message += "; " + refusal;
  for (const std::string& reason : unavailable_) message += "; " + reason;
  fail(ErrorCode::kUnsupported, message);
}

}  // namespace tessera::ops
