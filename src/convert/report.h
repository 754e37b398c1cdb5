// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a conversion did to the weights, for people (text, SVG) and programs (JSON).
#include <string>

#include "convert/convert.h"

namespace tessera::convert {

constexpr const char* kReportJsonName = "conversion_report.json";
constexpr const char* kReportSvgName = "conversion_report.svg";

// A table of families, then a histogram of block scales for each: lines of at most 100 characters.
std::string report_text(const FamilyStatistics& families);
// {"families": {"experts": {...counts and sums, "relative_error": ..., ...}, ...}}
std::string report_json(const FamilyStatistics& families);
// A picture for browsers: error with E4M3 and with UE8M0 scales, and the scales' histogram, per family.
std::string report_svg(const FamilyStatistics& families);

}  // namespace tessera::convert
