// SPDX-License-Identifier: Apache-2.0
// The ops between the large products at the widths of Flash and Pro: every variant against the reference on adversarial
// rows, and each row's bits for any number of rows, at any place, with any thread count (docs/contracts/numerics.md,
// section 7).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "ops/backend.h"
#include "testing/op_harness.h"
#include "testing/sanitized.h"

namespace tessera {
namespace {

constexpr int64_t kMost = 70;
constexpr int64_t kCounts[] = {1, 2, 3, 4, 5, 7, 8, 9, 64, 65};

class RowsTest : public testing::RandomTest {
 protected:
  device::Tensor bf16(int64_t rows, int64_t width) {
    return testing::as_tensor(testing::adversarial(rng_, rows, width), DType::kBF16, {rows, width});
  }
  static TensorView rows_of(const device::Tensor& tensor, int64_t first, int64_t count) {
    const int64_t width = tensor.view().shape[1];
    return {
        tensor.as<char>() + first * width * dtype_bits(tensor.view().dtype) / 8, tensor.view().dtype, {count, width}};
  }
  std::vector<float> floats(int64_t count, float scale) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = rng_.normal() * scale;
    return values;
  }

  // `run` computes rows [first, first + count) into out, `width` values each. bound 0: the reference's bits; a GPU,
  // whose exp is not the host's, may be given more.
  template <class Op>
  void check(
      const typename Op::Desc& desc, int64_t width, double bound,
      const std::function<void(const ops::Variant<Op>&, int64_t, int64_t, const TensorView&, device::Queue&)>& run,
      double gpu_bound = 0) {
    const auto result = [&](const ops::Variant<Op>& variant, int64_t first, int64_t count, int threads) {
      device::Queue queue(threads);
      testing::PoisonedTensor out(DType::kBF16, {count, width});
      run(variant, first, count, out.view(), queue);
      EXPECT_TRUE(out.is_guard_intact());
      return out.floats();
    };
    std::vector<float> reference;
    testing::for_each_variant<Op>(desc, [&](const ops::Variant<Op>& variant, bool is_ref) {
      if (is_ref) reference = result(variant, 0, kMost, 1);
    });
    int compared = 0;
    testing::for_each_variant<Op>(desc, [&](const ops::Variant<Op>& variant, bool is_ref) {
      if (is_ref) return;
      ++compared;
      const std::vector<float> all = result(variant, 0, kMost, 2);
      const double mine = testing::is_on_gpu(variant) ? std::max(bound, gpu_bound) : bound;
      EXPECT_TRUE(mine == 0 ? testing::same_bits(all, reference) : testing::is_close(all, reference, mine));
      for (const int64_t count : kCounts) {
        const int64_t first = static_cast<int64_t>(rng_.below(static_cast<uint64_t>(kMost - count + 1)));
        const int threads = 1 + static_cast<int>(rng_.below(9));
        EXPECT_TRUE(testing::same_bits(
            result(variant, first, count, threads),
            std::span(all).subspan(static_cast<size_t>(first * width), static_cast<size_t>(count * width))))
            << count << " rows from " << first << ", " << threads << " threads";
      }
    });
    if (device::probe_machine().cpu.avx2) {
      EXPECT_GT(compared, 0);
    }
  }
};

TEST_F(RowsTest, RmsNorm) {
  for (const int64_t width : {512, 1536, 4096, 7168}) {
    const device::Tensor x = bf16(kMost, width), weight = bf16(1, width);
    for (const bool has_weight : {true, false}) {
      check<ops::RmsNorm>({.width = width}, width, 0,
                          [&](const auto& variant, int64_t first, int64_t count, const TensorView& out, auto& queue) {
                            variant.run({.width = width},
                                        {.x = rows_of(x, first, count),
                                         .weight = has_weight ? weight.view() : TensorView{},
                                         .out = out,
                                         .num_rows = count},
                                        queue);
                          });
    }
  }
}

TEST_F(RowsTest, Rope) {
  constexpr int64_t kVectors = 3, kWidth = 512;
  const device::Tensor x = bf16(kMost, kVectors * kWidth);
  const std::vector<float> frequencies = ops::rope_frequencies(64, 160000, nullptr);
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < kMost; ++t) positions.push_back(static_cast<int64_t>(rng_.below(1 << 20)));
  for (const bool is_inverse : {false, true}) {
    const ops::Rope::Desc desc{.vectors = kVectors, .width = kWidth, .rope_dim = 64, .is_inverse = is_inverse};
    check<ops::Rope>(
        desc, kVectors * kWidth, 0,
        [&](const auto& variant, int64_t first, int64_t count, const TensorView& out, auto& queue) {
          const TensorView from = rows_of(x, first, count);
          std::copy_n(from.as<uint16_t>(), from.shape.num_elements(), out.as<uint16_t>());
          variant.run(
              desc,
              {.x = out, .positions = positions.data() + first, .frequencies = frequencies.data(), .num_tokens = count},
              queue);
        });
  }
}

TEST_F(RowsTest, HyperConnections) {
  for (const int64_t hidden : {528, 4096, 7168}) {  // the first: of the last slice half is there
    if (testing::kIsSanitized && hidden == 7168) continue;
    const ops::MhcDesc desc{.hidden = hidden};
    const device::Tensor x = bf16(kMost, 4 * hidden), o = bf16(kMost, hidden);
    const std::vector<float> fn = floats(24 * 4 * hidden, 0.05f), base = floats(24, 1), scale = floats(3, 0.5f);
    std::vector<float> post(kMost * 4), comb(kMost * 16);
    check<ops::MhcPre>(
        desc, hidden, 0,
        [&](const auto& variant, int64_t first, int64_t count, const TensorView& out, auto& queue) {
          variant.run(desc,
                      {.x = rows_of(x, first, count),
                       .fn = fn.data(),
                       .base = base.data(),
                       .scale = scale.data(),
                       .y = out,
                       .post = post.data() + first * 4,
                       .comb = comb.data() + first * 16,
                       .num_tokens = count},
                      queue);
        },
        testing::kBf16Bound);
    check<ops::MhcPost>(desc, 4 * hidden, 0,
                        [&](const auto& variant, int64_t first, int64_t count, const TensorView& out, auto& queue) {
                          // In place.
                          const TensorView from = rows_of(x, first, count);
                          std::copy_n(from.as<uint16_t>(), from.shape.num_elements(), out.as<uint16_t>());
                          variant.run(desc,
                                      {.x = out,
                                       .o = rows_of(o, first, count),
                                       .post = post.data() + first * 4,
                                       .comb = comb.data() + first * 16,
                                       .out = out,
                                       .num_tokens = count},
                                      queue);
                        });
    check<ops::MhcHead>(
        desc, hidden, 0,
        [&](const auto& variant, int64_t first, int64_t count, const TensorView& out, auto& queue) {
          std::vector<int32_t> rows(static_cast<size_t>(count));
          std::iota(rows.begin(), rows.end(), static_cast<int32_t>(first));
          variant.run(desc,
                      {.x = x,
                       .rows = rows.data(),
                       .fn = fn.data(),
                       .base = base.data(),
                       .scale = scale.data(),
                       .h = out,
                       .num_rows = count},
                      queue);
        },
        testing::kBf16Bound);
  }
}

TEST_F(RowsTest, Activations) {
  const int64_t inner = 2048, hidden = 4096, top_k = 6;
  const device::Tensor gate = bf16(kMost, inner), up = bf16(kMost, inner);
  for (const float limit : {0.0f, 10.0f}) {
    const ops::SwiGlu::Desc desc{.inner = inner, .limit = limit};
    check<ops::SwiGlu>(
        desc, inner, testing::kBf16Bound,
        [&](const auto& variant, int64_t first, int64_t count, const TensorView& out, auto& queue) {
          variant.run(
              desc,
              {.gate = rows_of(gate, first, count), .up = rows_of(up, first, count), .out = out, .num_tokens = count},
              queue);
        });
  }
  const device::Tensor routed = bf16(kMost, top_k * hidden), shared = bf16(kMost, hidden), z = bf16(kMost, 4 * hidden);
  const ops::MoeCombine::Desc combine{.hidden = hidden, .top_k = top_k};
  for (const bool has_shared : {true, false}) {
    check<ops::MoeCombine>(combine, hidden, 0,
                           [&](const auto& variant, int64_t first, int64_t count, const TensorView& out, auto& queue) {
                             variant.run(combine,
                                         {.routed = rows_of(routed, first, count),
                                          .shared = has_shared ? rows_of(shared, first, count) : TensorView{},
                                          .out = out,
                                          .num_tokens = count},
                                         queue);
                           });
  }
  const ops::StreamAdd::Desc add{.hidden = hidden};
  check<ops::StreamAdd>(
      add, 4 * hidden, 0, [&](const auto& variant, int64_t first, int64_t count, const TensorView& out, auto& queue) {
        variant.run(
            add, {.z = rows_of(z, first, count), .e = rows_of(shared, first, count), .out = out, .num_tokens = count},
            queue);
      });
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < kMost; ++t) ids.push_back(static_cast<int32_t>(rng_.below(kMost + 1)) - 1);
  const ops::Embedding::Desc embedding{.vocab = kMost, .hidden = hidden};
  check<ops::Embedding>(
      embedding, 4 * hidden, 0,
      [&](const auto& variant, int64_t first, int64_t count, const TensorView& out, auto& queue) {
        variant.run(embedding, {.weight = shared, .ids = ids.data() + first, .num_tokens = count, .out = out}, queue);
      });
}

TEST_F(RowsTest, Hadamard) {
  for (const int64_t width : {32, 128, 512}) {
    const device::Tensor x = bf16(kMost, width);
    for (const bool is_fp4 : {false, true}) {
      const ops::Hadamard::Desc desc{.width = width, .is_fp4 = is_fp4};
      check<ops::Hadamard>(desc, width, 0,
                           [&](const auto& variant, int64_t first, int64_t count, const TensorView& out, auto& queue) {
                             const TensorView from = rows_of(x, first, count);
                             std::copy_n(from.as<uint16_t>(), from.shape.num_elements(), out.as<uint16_t>());
                             variant.run(desc, {.x = out, .num_rows = count}, queue);
                           });
    }
  }
}

TEST_F(RowsTest, CacheWriteIsTheReferencesBytes) {
  for (const ops::EntryFormat format : {ops::EntryFormat::kKvFp8Bf16, ops::EntryFormat::kBf16}) {
    const ops::CacheWrite::Desc desc{.layout = {format, 512, 64}};
    device::Tensor rows = bf16(kMost, 512);
    rows.as<uint16_t>()[3 * 512 + 100] = 0x7FC0;  // a NaN and an infinity stay in their groups
    rows.as<uint16_t>()[5 * 512 + 200] = 0xFF80;
    for (int64_t i = 0; i < 512; ++i) rows.as<uint16_t>()[7 * 512 + i] = static_cast<uint16_t>(rng_.below(0x7F80));
    std::vector<int64_t> slots(kMost);
    std::iota(slots.rbegin(), slots.rend(), 0);
    std::vector<uint8_t> expected(static_cast<size_t>(kMost * desc.layout.entry_bytes()));
    device::Queue one(1);
    const ops::CacheWrite::Args args{.rows = rows, .slots = slots.data(), .cache = expected.data(), .num_rows = kMost};
    ops::cache_write_reference(desc, args, one);
    testing::for_each_variant<ops::CacheWrite>(desc, [&](const ops::Variant<ops::CacheWrite>& variant, bool) {
      std::vector<uint8_t> cache(expected.size(), 0xA5);
      device::Queue queue(3);
      ops::CacheWrite::Args mine = args;
      mine.cache = cache.data();
      variant.run(desc, mine, queue);
      // Which NaN of BF16 it is is nobody's business.
      const auto nan_at = static_cast<size_t>(2 * (slots[3] * 512 + 100));
      if (format == ops::EntryFormat::kBf16 && cache[nan_at + 1] == 0x7F && cache[nan_at] >= 0x81) {
        cache[nan_at] = expected[nan_at];
      }
      EXPECT_EQ(cache, expected);
    });
  }
}

TEST_F(RowsTest, CompressorPool) {
  for (const int64_t ratio : {4, 128}) {
    constexpr int64_t kTokens = 300;
    const ops::CompressorPool::Desc desc{.ratio = ratio, .width = 512};
    const std::vector<float> values = floats(kTokens * desc.row_width(), 1),
                             gates = floats(kTokens * desc.row_width(), 4), ape = floats(ratio * desc.row_width(), 1);
    // All tokens in pieces of `step`: entries, then the state.
    const auto pool = [&](const ops::Variant<ops::CompressorPool>& variant, int64_t step, int threads) {
      device::Queue queue(threads);
      std::vector<float> state(static_cast<size_t>(desc.state_floats()));
      ops::compressor_reset(desc, state.data());
      testing::PoisonedTensor entries(DType::kBF16, {kTokens / ratio, desc.width});
      for (int64_t first = 0; first < kTokens; first += step) {
        const int64_t count = std::min(step, kTokens - first), made = ops::entries_completed(ratio, first, count);
        testing::PoisonedTensor part(DType::kBF16, {ops::most_completed(ratio, count), desc.width});
        const ops::CompressorSlice slice{.num_rows = static_cast<int32_t>(count), .first_position = first};
        variant.run(desc,
                    {.values = values.data() + first * desc.row_width(),
                     .gates = gates.data() + first * desc.row_width(),
                     .ape = ape.data(),
                     .state = state.data(),
                     .slices = &slice,
                     .num_slices = 1,
                     .entries = part.view()},
                    queue);
        EXPECT_TRUE(part.is_guard_intact());
        std::copy_n(part.view().as<uint16_t>(), made * desc.width,
                    entries.view().as<uint16_t>() + first / ratio * desc.width);
      }
      EXPECT_TRUE(entries.is_guard_intact());
      return std::pair{entries.floats(), state};
    };
    const ops::Variant<ops::CompressorPool> scalar{"scalar", nullptr, nullptr, nullptr, ops::compressor_pool_reference};
    const auto reference = pool(scalar, kTokens, 1);
    testing::for_each_variant<ops::CompressorPool>(desc, [&](const ops::Variant<ops::CompressorPool>& variant, bool) {
      const auto all = pool(variant, kTokens, 2);
      EXPECT_TRUE(testing::is_close(all.first, reference.first, testing::kBf16Bound));
      if (ratio != 4) {
        EXPECT_TRUE(testing::is_close(all.second, reference.second, testing::kF32Bound));
      }
      for (const int64_t step : {1, 3, 64}) {
        const auto pieces = pool(variant, step, static_cast<int>(step % 3) + 1);
        EXPECT_TRUE(testing::same_bits(pieces.first, all.first)) << step;
        EXPECT_TRUE(testing::same_bits(pieces.second, all.second)) << step;
      }
    });
  }
}

// A batch of many slices, of any lengths and anywhere in their windows, gives each the bits that its tokens give one by
// one: entries, what remains open in the state, and zeros where an entry is not complete. What is not a number stays
// where it belongs.
TEST_F(RowsTest, CompressorPoolOfManySlices) {
  constexpr int64_t kWidth = 70;
  for (const int64_t ratio : {4, 7, 128}) {
    const ops::CompressorPool::Desc desc{.ratio = ratio, .width = kWidth};
    const int64_t width = desc.row_width(), num_slices = ratio == 128 ? 6 : 41;
    std::vector<ops::CompressorSlice> slices;
    int32_t num_rows = 0, num_entries = 1;  // the first is nobody's
    const auto below = [&](int64_t count) { return static_cast<int64_t>(rng_.below(static_cast<uint64_t>(count))); };
    for (int64_t s = 0; s < num_slices; ++s) {
      const int64_t lengths[] = {0, 1, 2, ratio - 1, ratio, ratio + 1, 2 * ratio - 1, 2 * ratio + below(2 * ratio)};
      const int64_t rows = lengths[s == 0 ? 7 : below(8)], first = below(3) == 0 ? ratio * below(3) : below(4 * ratio);
      slices.push_back({.place = static_cast<int32_t>(rows == 0 ? num_slices : s),  // nobody has no state
                        .first_row = num_rows,
                        .num_rows = static_cast<int32_t>(rows),
                        .first_entry = num_entries,
                        .first_position = first});
      num_rows += static_cast<int32_t>(rows);
      num_entries += static_cast<int32_t>(ops::most_completed(ratio, rows));
    }
    std::shuffle(slices.begin(), slices.end(), std::minstd_rand(static_cast<unsigned>(rng_.next_u64())));
    const std::vector<float> values = testing::adversarial(rng_, num_rows, width), ape = floats(ratio * width, 1);
    std::vector<float> gates = floats(num_rows * width, 4);
    const float inf = std::numeric_limits<float>::infinity();
    for (float& gate : gates) {
      const int64_t kind = below(2000);
      if (kind < 3) gate = kind == 0 ? inf : kind == 1 ? -inf : std::nanf("");
    }
    // Somewhere in the middle of a text, or at its beginning.
    std::vector<std::vector<float>> begin;
    for (int64_t s = 0; s < num_slices; ++s) {
      begin.push_back(floats(desc.state_floats(), 1));
      for (int64_t c = kWidth; ratio != 4 && c < 2 * kWidth; ++c)
        begin.back()[static_cast<size_t>(c)] = 1 + rng_.uniform();
    }
    for (const ops::CompressorSlice& slice : slices) {
      if (slice.first_position == 0 && slice.num_rows > 0)
        ops::compressor_reset(desc, begin[static_cast<size_t>(slice.place)].data());
    }
    struct Pooled {
      std::vector<std::vector<float>> states;
      std::vector<float> entries;
    };
    const auto table_of = [](Pooled& pooled) {
      std::vector<float*> table;
      for (std::vector<float>& state : pooled.states) table.push_back(state.data());
      table.push_back(nullptr);
      return table;
    };
    const auto pool = [&](const ops::Variant<ops::CompressorPool>& variant, const std::vector<ops::CompressorSlice>& of,
                          Pooled& pooled, int64_t rows) {
      const std::vector<float*> table = table_of(pooled);
      testing::PoisonedTensor out(DType::kF32, {rows, kWidth});
      ops::CompressorPool::Desc f32 = desc;
      f32.activation = DType::kF32;
      device::Queue queue(2);
      variant.run(f32,
                  {.values = values.data(),
                   .gates = gates.data(),
                   .ape = ape.data(),
                   .state = {table.data(), nullptr},
                   .slices = of.data(),
                   .num_slices = static_cast<int64_t>(of.size()),
                   .entries = out.view()},
                  queue);
      EXPECT_TRUE(out.is_guard_intact());
      return out.floats();
    };
    // NaN has many bits.
    const auto plain = [](std::vector<float> all) {
      for (float& value : all) value = std::isnan(value) ? std::nanf("") : value;
      return all;
    };
    const auto finite = [](std::vector<float> all, const std::vector<float>& where) {
      for (size_t i = 0; i < all.size(); ++i) all[i] = std::isfinite(where[i]) ? all[i] : 0;
      return all;
    };
    const ops::Variant<ops::CompressorPool> scalar{"scalar", nullptr, nullptr, nullptr, ops::compressor_pool_reference};
    Pooled expected{begin, {}};
    expected.entries = plain(pool(scalar, slices, expected, num_entries));
    testing::for_each_variant<ops::CompressorPool>(desc, [&](const ops::Variant<ops::CompressorPool>& variant, bool) {
      Pooled all{begin, {}}, alone{begin, {}};
      all.entries = plain(pool(variant, slices, all, num_entries));
      alone.entries = all.entries;
      for (const ops::CompressorSlice& slice : slices) {
        int64_t entry = slice.first_entry;
        for (int32_t i = 0; i < slice.num_rows; ++i) {
          ops::CompressorSlice one = slice;
          one.first_row += i, one.num_rows = 1, one.first_entry = 0, one.first_position += i;
          const std::vector<float> made = plain(pool(variant, {one}, alone, 1));
          if (ops::entries_completed(ratio, one.first_position, 1) == 0) continue;
          std::copy(made.begin(), made.end(), alone.entries.begin() + entry++ * kWidth);
        }
        const auto rest = static_cast<int64_t>(slice.first_entry) + ops::most_completed(ratio, slice.num_rows);
        std::fill(alone.entries.begin() + entry * kWidth, alone.entries.begin() + rest * kWidth, 0.0f);
      }
      EXPECT_TRUE(testing::same_bits(all.entries, alone.entries)) << "token by token";
      EXPECT_TRUE(testing::is_close(finite(all.entries, expected.entries), finite(expected.entries, expected.entries),
                                    testing::kF32Bound));
      for (size_t i = 0; i < all.entries.size(); ++i)
        EXPECT_EQ(std::isnan(all.entries[i]), std::isnan(expected.entries[i])) << "entry " << i / kWidth;
      for (size_t s = 0; s < begin.size(); ++s) {
        EXPECT_TRUE(testing::same_bits(plain(all.states[s]), plain(alone.states[s]))) << "state " << s;
        EXPECT_TRUE(testing::is_close(finite(all.states[s], expected.states[s]),
                                      finite(expected.states[s], expected.states[s]), testing::kF32Bound))
            << "state " << s;
      }
    });
  }
}

TEST_F(RowsTest, IndexScores) {
  constexpr int64_t kKeys = 200, kTokens = testing::kIsSanitized ? 6 : 21;
  for (const int64_t heads : {8, 64}) {
    for (const ops::EntryFormat format : {ops::EntryFormat::kIndexFp4, ops::EntryFormat::kBf16}) {
      const ops::IndexScores::Desc desc{.heads = heads, .width = 128, .keys = {format, 128, 0}};
      std::vector<uint8_t> keys(static_cast<size_t>(kKeys * desc.keys.entry_bytes()));
      const std::vector<float> values = testing::adversarial(rng_, kKeys, 128);
      for (int64_t j = 0; j < kKeys; ++j)
        ops::encode_entry(desc.keys, values.data() + j * 128, keys.data() + j * desc.keys.entry_bytes());
      const device::Tensor queries = bf16(kTokens, heads * 128), weights = bf16(kTokens, heads);
      std::vector<int32_t> counts;
      for (int64_t t = 0; t < kTokens; ++t) counts.push_back(static_cast<int32_t>(t * kKeys / (kTokens - 1)));
      const auto scores = [&](const ops::Variant<ops::IndexScores>& variant, int64_t first, int64_t count,
                              int threads) {
        device::Queue queue(threads);
        testing::PoisonedTensor out(DType::kF32, {count, kKeys});
        variant.run(desc,
                    {.queries = rows_of(queries, first, count),
                     .weights = rows_of(weights, first, count),
                     .keys = keys.data(),
                     .counts = counts.data() + first,
                     .stride = kKeys,
                     .scores = out.view().as<float>(),
                     .num_tokens = count},
                    queue);
        EXPECT_TRUE(out.is_guard_intact());
        // What lies behind a token's count is not written.
        std::vector<float> all = out.floats(), seen;
        for (int64_t i = 0; i < count * kKeys; ++i) {
          if (i % kKeys < counts[static_cast<size_t>(first + i / kKeys)]) {
            seen.push_back(all[static_cast<size_t>(i)]);
          } else {
            EXPECT_TRUE(std::isnan(all[static_cast<size_t>(i)]));
          }
        }
        return seen;
      };
      const ops::Variant<ops::IndexScores> scalar{"scalar", nullptr, nullptr, nullptr, ops::index_scores_reference};
      const std::vector<float> reference = scores(scalar, 0, kTokens, 1);
      testing::for_each_variant<ops::IndexScores>(desc, [&](const ops::Variant<ops::IndexScores>& variant, bool) {
        const std::vector<float> all = scores(variant, 0, kTokens, 2);
        EXPECT_TRUE(testing::is_close(all, reference, testing::kF32Bound));
        size_t at = 0;
        for (int64_t t = 0; t < kTokens; ++t) {
          const size_t count = static_cast<size_t>(counts[static_cast<size_t>(t)]);
          EXPECT_TRUE(
              testing::same_bits(scores(variant, t, 1, 1 + static_cast<int>(t % 3)), std::span(all).subspan(at, count)))
              << "token " << t << " alone";
          at += count;
        }
      });
    }
  }
}

// Every variant chooses the reference's k of each row of `stride` scores, of which counts[t] are seen.
void expect_chosen(const std::vector<float>& scores, int64_t stride, const std::vector<int32_t>& counts, int64_t k) {
  const auto tokens = static_cast<int64_t>(counts.size());
  std::vector<int32_t> expected(static_cast<size_t>(tokens * k));
  ops::TopK::Args args{.scores = scores.data(),
                       .stride = stride,
                       .counts = counts.data(),
                       .selected = expected.data(),
                       .num_tokens = tokens};
  device::Queue one(1);
  ops::top_k_reference({.k = k}, args, one);
  testing::for_each_variant<ops::TopK>({.k = k}, [&](const ops::Variant<ops::TopK>& variant, bool) {
    std::vector<int32_t> selected(expected.size(), 77);
    args.selected = selected.data();
    const device::Buffer workspace = testing::workspace_for(variant, {.k = k}, tokens);
    args.workspace = workspace.data();
    device::Queue queue(3);
    variant.run({.k = k}, args, queue);
    EXPECT_EQ(selected, expected) << k << " of " << stride;
  });
}

// Rows that a block has at once, and parts of rows.
TEST_F(RowsTest, TopKWithTiesAndNan) {
  constexpr int64_t kTokens = 15;
  for (const int64_t stride : {9000, 17000}) {
    std::vector<float> scores = floats(kTokens * stride, 1);
    for (float& score : scores) {
      const uint64_t kind = rng_.below(40);
      if (kind == 0) score = std::numeric_limits<float>::quiet_NaN();
      if (kind == 1) score = -0.0f;
      if (kind == 2) score = 0;
      if (kind < 20 && kind > 2) score = std::round(score * 2);  // many ties
      if (kind == 20) score = -std::numeric_limits<float>::infinity();
    }
    std::fill_n(scores.begin(), stride, std::numeric_limits<float>::quiet_NaN());
    std::fill_n(scores.begin() + stride, stride, 1.5f);
    // Thousands that differ in the last bits only, or hardly more.
    for (const uint64_t values : {uint64_t{3}, uint64_t{5000}, uint64_t{1} << 18}) {
      const int64_t row = values == 3 ? 12 : values == 5000 ? 13 : 14;
      for (int64_t j = 0; j < stride; ++j)
        scores[static_cast<size_t>(row * stride + j)] = -1 - static_cast<float>(rng_.below(values)) * 0x1p-23f;
    }
    const auto all = static_cast<int32_t>(stride);
    const std::vector<int32_t> counts = {all, all, 0, 1, 15, 16, 17, 512, 513, 2047, 2100, all, all, all, all - 1};
    for (const int64_t k : {1, 16, 400, 512, 5000}) expect_chosen(scores, stride, counts, k);
  }
}

// Rows that are taken in parts, or by turns of a thread block; with a largest score far above the others, most of them
// zeros, few that differ, and all of one sign.
TEST_F(RowsTest, TopKOfLongRows) {
  enum Kind { kNormal, kPositive, kNegative, kOutlier, kMostlyZero, kClose, kNan, kKinds };
  struct Rows {
    int64_t stride, tokens;
    std::vector<int64_t> k;
  };
  std::vector<Rows> all = {{30001, 7, {512, 1024, 1025}},  // parts
                           {16896, 3, {512}},              // the most that a block has at once, and one more
                           {16897, 3, {512}},
                           {17000, 2, {8000}},   // two parts, of which more than three of a thread's
                           {40000, 2, {30000}},  // two parts that a block does not hold: one takes turns
                           {140000, 3, {5000}},  // six parts that take two turns
                           {5000, 140, {512, 1025}}};
  if (!testing::kIsSanitized) {
    all.push_back({140000, 100, {1024}});
    all.push_back({17000, 520, {512}});  // so many that each has a block, which takes turns
  }
  for (const auto& [stride, tokens, ks] : all) {
    std::vector<float> scores = floats(tokens * stride, 1);
    std::vector<int32_t> counts;
    for (int64_t t = 0; t < tokens; ++t) {
      const auto kind = static_cast<Kind>(t % kKinds);
      counts.push_back(static_cast<int32_t>(stride - (t % 3 == 1 ? rng_.below(1000) : 0)));
      for (int64_t j = 0; j < stride; ++j) {
        float& score = scores[static_cast<size_t>(t * stride + j)];
        if (kind == kPositive || kind == kOutlier) score = std::abs(score);
        if (kind == kOutlier && j == 77) score = 1e30f;
        if (kind == kNegative) score = -std::abs(score);
        if (kind == kMostlyZero && rng_.below(200) != 0) score = 0;
        if (kind == kClose) score = 1 + static_cast<float>(rng_.below(3000)) * 0x1p-23f;
        if (kind == kNan && rng_.below(2) == 0) score = std::numeric_limits<float>::quiet_NaN();
      }
    }
    for (const int64_t k : ks) expect_chosen(scores, stride, counts, k);
  }
}

// A cache that has no entries yet.
TEST_F(RowsTest, TopKOfNoScores) {
  const int32_t counts[3] = {0, 0, 0};
  testing::for_each_variant<ops::TopK>({.k = 5}, [&](const ops::Variant<ops::TopK>& variant, bool) {
    std::vector<int32_t> selected(15, 77);
    const device::Buffer workspace = testing::workspace_for(variant, {.k = 5}, 3);
    device::Queue queue(1);
    variant.run({.k = 5},
                {.scores = nullptr,
                 .stride = 0,
                 .counts = counts,
                 .selected = selected.data(),
                 .num_tokens = 3,
                 .workspace = workspace.data()},
                queue);
    EXPECT_EQ(selected, std::vector<int32_t>(15, -1));
  });
}

}  // namespace
}  // namespace tessera
