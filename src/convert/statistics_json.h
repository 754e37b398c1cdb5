// SPDX-License-Identifier: Apache-2.0
#pragma once
// Statistics as JSON, in records of finished shards and in the report. Numbers come back with the same bits.
#include <nlohmann/json_fwd.hpp>

#include "base/json.h"
#include "convert/statistics.h"

namespace tessera::convert {

nlohmann::ordered_json to_json(const Statistics& statistics);
// Throws kDataLoss naming the field.
Statistics statistics_from_json(const JsonCursor& json);

}  // namespace tessera::convert
