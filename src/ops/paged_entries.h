// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the entries of a batch's sequences lie, by index: in pages of a power of two of them (decision 0021), or in one
// array per sequence. A page also holds entries of other caches; a cache's begin at the same byte of every page.
#include <cstdint>
#include <type_traits>

#include "base/host_device.h"
#include "ops/sequence_bases.h"

namespace tessera::ops {

// Of one sequence.
template <class T>
struct SequenceEntries {
  T* only = nullptr;          // the first of all, where `pages` is null
  T* const* pages = nullptr;  // those [n << shift, (n + 1) << shift) in page n
  int64_t offset = 0;         // bytes of a page before them
  int shift = 0;

  // One cache's entries are all as long.
  TESSERA_HOST_DEVICE T* at(int64_t index, int64_t entry_bytes) const {
    static_assert(sizeof(T) == 1);
    if (pages == nullptr) return only + index * entry_bytes;
    return pages[index >> shift] + offset + (index & ((int64_t{1} << shift) - 1)) * entry_bytes;
  }
  // How many entries lie one after the other from `index` on; `most` where that is known to be enough.
  int64_t in_a_row(int64_t index, int64_t most) const {
    const int64_t in_page = (int64_t{1} << shift) - (index & ((int64_t{1} << shift) - 1));
    return pages == nullptr || in_page > most ? most : in_page;
  }
  friend bool operator==(const SequenceEntries&, const SequenceEntries&) = default;
};

template <class T>
struct PagedEntries {
  SequenceBases<T> arrays;          // one for each sequence, where `pages` is null
  T* const* pages = nullptr;        // [places, stride] pages in the order of their entries
  int64_t stride = 0;               // most pages of a sequence
  const int32_t* places = nullptr;  // [rows] place of the row's sequence; null where `pages` is
  int64_t offset = 0;               // as in SequenceEntries
  int shift = 0;
  // Some pages are in another GPU's memory, which is read over a link. To ask for what will be read soon is a loss
  // there: prefetches of it go one after another, 20 ns each over NVLink.
  bool has_far = false;
  // A kernel makes the table of pages: nobody reads it before the kernel before has ended.
  bool is_made_by_kernel = false;

  PagedEntries() = default;
  PagedEntries(T* one) : arrays(one) {}                       // NOLINT: implicit, as with SequenceBases
  PagedEntries(const SequenceBases<T>& all) : arrays(all) {}  // NOLINT: implicit
  PagedEntries(T* const* table, int64_t table_stride, const int32_t* places_of_rows, int64_t first_byte,
               int log2_entries)
      : pages(table), stride(table_stride), places(places_of_rows), offset(first_byte), shift(log2_entries) {}

  // As addresses convert: what may be written may be read.
  template <class U>
  requires(std::is_same_v<const U, T>) PagedEntries(const PagedEntries<U>& other)  // NOLINT: implicit
      : arrays(other.arrays),
        pages(other.pages),
        stride(other.stride),
        places(other.places),
        offset(other.offset),
        shift(other.shift),
        has_far(other.has_far),
        is_made_by_kernel(other.is_made_by_kernel) {}
  template <class U>
  requires(std::is_same_v<const U, T>) PagedEntries(const SequenceBases<U>& other) : arrays(other) {}  // NOLINT

  // False: the layer has no such cache.
  TESSERA_HOST_DEVICE bool exists() const { return pages != nullptr || arrays.exists(); }
  TESSERA_HOST_DEVICE SequenceEntries<T> of_row(int64_t row) const {
    if (pages == nullptr) return {arrays.of_row(row), nullptr, 0, 0};
    return {nullptr, pages + places[row] * stride, offset, shift};
  }
};

// Calls visit(address, first, count) for the entries [begin, end) in turn, as many at once as lie one after the
// other.
template <class T, class Visit>
void for_each_run(const SequenceEntries<T>& entries, int64_t begin, int64_t end, int64_t entry_bytes,
                  const Visit& visit) {
  for (int64_t first = begin; first < end;) {
    const int64_t count = entries.in_a_row(first, end - first);
    visit(entries.at(first, entry_bytes), first, count);
    first += count;
  }
}

}  // namespace tessera::ops
