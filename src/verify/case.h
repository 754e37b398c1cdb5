// SPDX-License-Identifier: Apache-2.0
#pragma once
// One call of an op, with its arrays in host memory: made from a spec and random numbers, run by every variant.
#include <cstdint>
#include <cstring>
#include <deque>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/rng.h"
#include "device/buffer.h"
#include "ops/cache_entry.h"
#include "ops/paged_entries.h"
#include "ops/variant.h"
#include "ops/weight_view.h"
#include "verify/compare.h"

namespace tessera::verify {

enum class Fill : uint8_t {
  kNormal,
  kMixed,     // heavy tails, zero rows, equal values, one value per block, denormals (verify/fills.h)
  kZero,      // of both signs
  kDenormal,  // subnormal in FP32 and in BF16
};

// What a call is to reach beyond its shape.
enum class Form : uint8_t {
  kUsual,
  // linear and experts: one value a row of each weight, so that an output is one input as it was rounded, its scale
  // with it, and is exact: a scale or a code in another's place shows. Of experts also every h, by gates so far from
  // zero that silu(gate) is the gate or next to nothing, whatever exp is.
  kPicking,
  kOneExpert,   // experts and groups: all tokens go to the same ones, others have none
  kNoneOfSome,  // experts and groups: half of them have no token
  kBadSizes,    // groups: some sizes are negative, too large or descend
};

// What to make a call of.
template <class Op>
struct Spec {
  typename Op::Desc desc;
  int64_t num_tokens = 1;
  Fill fill = Fill::kNormal;
  int64_t context = 0;  // tokens before these, or entries in a cache: what the op reads
  const char* label = "small";
  Form form = Form::kUsual;
};

// An array that an op writes.
struct Output {
  std::string name;
  TensorView view;  // host memory
  Rule rule;
  double bound;                        // of the relative error; 0 with kBits
  bool is_compared = true;             // false: scratch that the contract says nothing about
  std::vector<unsigned char> initial;  // poison, or what the op updates

  void restore() const {
    if (!initial.empty()) std::memcpy(view.data, initial.data(), initial.size());
  }
};

// Owns the arrays of a call, in host memory, at addresses that stay.
class Arrays {
 public:
  template <class T>
  T* array(const std::vector<T>& values) {
    return static_cast<T*>(bytes(values.data(), values.size() * sizeof(T)));
  }
  // The values rounded to `dtype`.
  TensorView tensor(const std::vector<float>& values, DType dtype, const Shape& shape);
  ops::WeightView weight(Rng& rng, ops::WeightFormat format, int64_t rows, int64_t cols);
  // NVFP4 that is zero but for one value a row, in column row % cols; block scales as E4M3 bits from `least` on.
  ops::WeightView picking_weight(Rng& rng, int64_t rows, int64_t cols, uint8_t least = 1, uint8_t most = 0x7E);
  // A cache of `count` encoded random vectors.
  uint8_t* entries(Rng& rng, Fill fill, const ops::EntryLayout& layout, int64_t count);
  // The same for one sequence of `num_rows` rows, scattered: 1 << `shift` to a page, pages in any order, and before and
  // behind the entries of a page bytes of no meaning. `pages` receives each page, if not null.
  ops::PagedEntries<uint8_t> paged_entries(Rng& rng, Fill fill, const ops::EntryLayout& layout, int64_t count,
                                           int64_t num_rows, int shift, std::vector<TensorView>* pages = nullptr);

  // Poisoned memory that the op writes; `bound` 0 takes the contract's for the dtype.
  TensorView output(const char* name, DType dtype, const Shape& shape, Rule rule, double bound = 0);
  template <class T>
  T* output(const char* name, DType dtype, const Shape& shape, Rule rule, double bound = 0) {
    return output(name, dtype, shape, rule, bound).template as<T>();
  }
  // What `view` holds is read and replaced.
  void updates(const char* name, const TensorView& view, Rule rule, double bound = 0);
  // The same for what is not compared.
  void clobbers(const char* name, const TensorView& view);

  std::span<const Output> outputs() const { return outputs_; }

 private:
  void* bytes(const void* values, size_t count);

  std::deque<device::Buffer> buffers_;
  std::vector<Output> outputs_;
};

template <class Op>
struct Case {
  typename Op::Args args;
  Arrays arrays;
};

// [rows, cols] values of that kind.
std::vector<float> filled(Rng& rng, Fill fill, int64_t rows, int64_t cols);

}  // namespace tessera::verify
