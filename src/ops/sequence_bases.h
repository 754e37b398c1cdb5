// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the caches of a batch's sequences begin: an op that reads or writes caches serves rows of many sequences in one
// call, so that a recorded graph (decision 0014) holds however the batch is made up.
#include <cstdint>
#include <type_traits>

#include "base/host_device.h"

namespace tessera::ops {

template <class T>
struct SequenceBases {
  T* only = nullptr;                // of every row, where `all` is null
  T* const* all = nullptr;          // by the sequence's place in this table
  const int32_t* places = nullptr;  // [rows] place of the row's sequence; null where `all` is

  SequenceBases() = default;
  SequenceBases(T* one) : only(one) {}  // NOLINT: implicit by design, a batch of one sequence is a plain address
  SequenceBases(T* const* table, const int32_t* places_of_rows) : all(table), places(places_of_rows) {}

  // As addresses convert: what may be written may be read.
  template <class U>
  requires(std::is_same_v<const U, T>) SequenceBases(const SequenceBases<U>& other)  // NOLINT: implicit
      : only(other.only), all(other.all), places(other.places) {}

  // False: the layer has no such cache.
  TESSERA_HOST_DEVICE bool exists() const { return only != nullptr || all != nullptr; }
  TESSERA_HOST_DEVICE T* of_row(int64_t row) const { return all == nullptr ? only : all[places[row]]; }
  TESSERA_HOST_DEVICE T* of_place(int64_t place) const { return all == nullptr ? only : all[place]; }
  // The same for rows from `row` on.
  TESSERA_HOST_DEVICE SequenceBases from_row(int64_t row) const {
    SequenceBases later = *this;
    if (places != nullptr) later.places += row;
    return later;
  }
};

}  // namespace tessera::ops
