// SPDX-License-Identifier: Apache-2.0
#include "ops/linear_group/linear_group.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/integer_math.h"

namespace tessera::ops {

namespace {

bool have_one_format(const std::vector<Linear::Desc>& maps) {
  return std::ranges::all_of(maps, [&](const Linear::Desc& map) { return map.format == maps.front().format; });
}

// Of a norm's result.
int64_t normed_bytes(const LinearGroup::Desc& desc, int64_t num_tokens) {
  if (!desc.norm) return 0;
  constexpr int64_t kAlignment = 256;
  return round_up(num_tokens * desc.norm->width * dtype_bits(desc.norm->activation) / 8, kAlignment);
}

}  // namespace

std::string LinearGroup::Desc::to_string() const {
  std::string text;
  for (const Linear::Desc& map : maps) text += (text.empty() ? "" : "; ") + map.to_string();
  if (norm) text = "norm " + norm->to_string() + "; " + text;
  return text + (swiglu ? "; swiglu " + swiglu->to_string() : "");
}

int64_t linear_group_reference_workspace(const LinearGroup::Desc& desc, int64_t max_tokens) {
  int64_t most = 0;
  for (const Linear::Desc& map : desc.maps) most = std::max(most, linear_reference_workspace(map, max_tokens));
  return normed_bytes(desc, max_tokens) + most;
}

bool linear_group_reference_supports(const LinearGroup::Desc& desc, std::string& why_not) {
  if (desc.maps.empty() || desc.maps.size() > LinearGroup::kMostMaps) {
    why_not = fmt::format("one to {} maps, not {}", LinearGroup::kMostMaps, desc.maps.size());
    return false;
  }
  const Linear::Desc& first = desc.maps.front();
  for (const Linear::Desc& map : desc.maps) {
    if (map.in != first.in || map.input != first.input || map.activation != first.activation || map.groups != 1) {
      why_not = "maps of one group and one input";
      return false;
    }
    if (!linear_reference_supports(map, why_not)) return false;
  }
  size_t in_parts = 0;
  for (const LinearGroup::Part& part : desc.parts) in_parts += part.members.size();
  const bool has_one_format = have_one_format(desc.maps);
  if (in_parts != (has_one_format ? 0 : desc.maps.size()) || (!has_one_format && (desc.swiglu || desc.norm))) {
    why_not = "several formats are of maps alone, and all in parts";
    return false;
  }
  if (desc.swiglu && (desc.maps.size() != 2 || first.out != desc.maps[1].out || first.out != desc.swiglu->inner ||
                      first.output != first.activation || desc.maps[1].output != first.activation)) {
    why_not = "swiglu follows two maps of its width";
    return false;
  }
  if (desc.norm && (desc.norm->width != first.in || desc.norm->activation != first.activation)) {
    why_not = "a norm is of the maps' input";
    return false;
  }
  return true;
}

RmsNorm::Args norm_of_group(const LinearGroup::Desc& desc, const LinearGroup::Args& args) {
  return {.x = args.x,
          .weight = args.norm_weight,
          .out = {args.workspace, desc.norm->activation, {args.num_tokens, desc.norm->width}},
          .num_rows = args.num_tokens};
}

LinearGroup::Args behind_norm(const LinearGroup::Desc& desc, const LinearGroup::Args& args) {
  LinearGroup::Args rest = args;
  rest.x = norm_of_group(desc, args).out;
  rest.workspace = static_cast<char*>(args.workspace) + normed_bytes(desc, args.num_tokens);
  return rest;
}

Linear::Args linear_of_group(const LinearGroup::Args& args, size_t i) {
  return {.x = args.x,
          .weight = args.weights[i],
          .y = args.y[i],
          .num_tokens = args.num_tokens,
          .workspace = args.workspace};
}

SwiGlu::Args swiglu_of_group(const LinearGroup::Args& args) {
  return {.gate = args.y[0], .up = args.y[1], .out = args.y[0], .num_tokens = args.num_tokens};
}

LinearGroup::Args LinearGroup::Part::args_of(const Args& group) const {
  Args args = group;
  for (size_t i = 0; i < members.size(); ++i) {
    args.weights[i] = group.weights[members[i]], args.y[i] = group.y[members[i]];
  }
  return args;
}

LinearGroup::Desc by_format(LinearGroup::Desc desc) {
  desc.parts.clear();
  if (have_one_format(desc.maps)) return desc;
  for (size_t i = 0; i < desc.maps.size(); ++i) {
    auto part = std::ranges::find_if(desc.parts, [&](const LinearGroup::Part& other) {
      return other.desc.maps.front().format == desc.maps[i].format;
    });
    if (part == desc.parts.end()) part = desc.parts.insert(part, LinearGroup::Part{});
    part->desc.maps.push_back(desc.maps[i]), part->members.push_back(i);
  }
  return desc;
}

void run_parts(const LinearGroup::Desc& desc, const LinearGroup::Args& args, device::Queue& queue,
               void (*linear)(const Linear::Desc&, const Linear::Args&, device::Queue&),
               void (*swiglu)(const SwiGlu::Desc&, const SwiGlu::Args&, device::Queue&)) {
  for (size_t i = 0; i < desc.maps.size(); ++i) linear(desc.maps[i], linear_of_group(args, i), queue);
  if (desc.swiglu) swiglu(*desc.swiglu, swiglu_of_group(args), queue);
}

void linear_group_reference(const LinearGroup::Desc& desc, const LinearGroup::Args& args, device::Queue& queue) {
  if (!desc.norm) return run_parts(desc, args, queue, linear_reference, swiglu_reference);
  rms_norm_reference(*desc.norm, norm_of_group(desc, args), queue);
  run_parts(desc, behind_norm(desc, args), queue, linear_reference, swiglu_reference);
}

}  // namespace tessera::ops
