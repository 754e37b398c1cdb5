// SPDX-License-Identifier: Apache-2.0
// rms_norm, rope, mhc, hadamard, embedding, stream_add, swiglu and combine against double, and published vectors.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "numeric/bf16.h"
#include "ops/backend.h"
#include "ops/reference_rows.h"
#include "testing/op_harness.h"

namespace tessera {
namespace {

class ElementwiseTest : public testing::RandomTest {
 protected:
  device::Queue queue_{2};
  // Random rows as a tensor, and the values as stored.
  device::Tensor rows(std::vector<float>& x, DType dtype, int64_t count, int64_t width) {
    x = testing::adversarial(rng_, count, width);
    device::Tensor tensor = testing::as_tensor(x, dtype, {count, width});
    ops::load_floats(tensor, 0, count * width, x.data());
    return tensor;
  }
  static double bound(DType dtype) { return dtype == DType::kF32 ? 2e-6 : testing::kBf16Bound; }
};

TEST_F(ElementwiseTest, RmsNorm) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t width : {1, 7, 64, 257}) {
      std::vector<float> x, weight;
      const device::Tensor input = rows(x, dtype, 6, width), scale = rows(weight, DType::kBF16, 1, width);
      const ops::RmsNorm::Desc desc{.width = width, .eps = 1e-6f, .activation = dtype};
      for (const bool has_weight : {true, false}) {
        std::vector<float> expected;
        for (int64_t r = 0; r < 6; ++r) {
          double squares = 0;
          for (int64_t c = 0; c < width; ++c)
            squares += std::pow(static_cast<double>(x[static_cast<size_t>(r * width + c)]), 2);
          for (int64_t c = 0; c < width; ++c)
            expected.push_back(
                static_cast<float>(static_cast<double>(x[static_cast<size_t>(r * width + c)]) /
                                   std::sqrt(squares / static_cast<double>(width) + 1e-6) *
                                   (has_weight ? static_cast<double>(weight[static_cast<size_t>(c)]) : 1)));
        }
        testing::for_each_variant<ops::RmsNorm>(desc, [&](const ops::Variant<ops::RmsNorm>& variant, bool) {
          testing::PoisonedTensor out(dtype, {6, width});
          variant.run(
              desc, {.x = input, .weight = has_weight ? scale.view() : TensorView{}, .out = out.view(), .num_rows = 6},
              queue_);
          EXPECT_TRUE(testing::is_close(out.floats(), expected, bound(dtype)));
          EXPECT_TRUE(out.is_guard_intact());
        });
      }
    }
  }
}

TEST_F(ElementwiseTest, RopeRotatesPairsAndBack) {
  const ops::Yarn yarn{16, 32, 1, 65536};
  const std::vector<float> plain = ops::rope_frequencies(64, 10000, nullptr),
                           compressed = ops::rope_frequencies(64, 160000, &yarn);
  const std::pair<int, std::pair<float, float>> known[] = {{1, {0.749894209f, 0.687656022f}},
                                                           {15, {0.0133352143f, 0.00363553858f}},
                                                           {16, {0.01f, 0.002265625f}},
                                                           {20, {0.00316227766f, 0.000296977778f}},
                                                           {25, {0.000749894209f, 5.37231267e-06f}},
                                                           {31, {0.000133352143f, 5.68052904e-07f}}};
  for (const auto& [i, value] : known) {
    EXPECT_NEAR(plain[static_cast<size_t>(i)], value.first, 1e-6f * value.first);
    EXPECT_NEAR(compressed[static_cast<size_t>(i)], value.second, 1e-6f * value.second);
  }
  const ops::Rope::Desc desc{.vectors = 3, .width = 80, .rope_dim = 64, .activation = DType::kF32};
  ops::Rope::Desc inverse = desc;
  inverse.is_inverse = true;
  const int64_t positions[4] = {0, 1, 999, 1048575};
  std::vector<float> x, expected;
  const device::Tensor input = rows(x, DType::kF32, 12, 80);
  expected = x;
  for (int64_t v = 0; v < 12; ++v) {
    for (size_t i = 0; i < 32; ++i) {
      const double angle = static_cast<double>(static_cast<float>(positions[v / 3]) * compressed[i]);
      float* pair = expected.data() + v * 80 + 16 + 2 * static_cast<int64_t>(i);
      const double a = static_cast<double>(pair[0]), b = static_cast<double>(pair[1]);
      pair[0] = static_cast<float>(a * std::cos(angle) - b * std::sin(angle));
      pair[1] = static_cast<float>(a * std::sin(angle) + b * std::cos(angle));
    }
  }
  testing::for_each_variant<ops::Rope>(desc, [&](const ops::Variant<ops::Rope>& variant, bool) {
    device::Tensor work = testing::as_tensor(x, DType::kF32, {12, 80});
    variant.run(desc, {.x = work, .positions = positions, .frequencies = compressed.data(), .num_tokens = 4}, queue_);
    EXPECT_TRUE(testing::is_close({work.as<float>(), x.size()}, expected, 1e-6));
    for (int64_t v = 0; v < 12; ++v)
      EXPECT_TRUE(
          testing::same_bits({work.as<float>() + v * 80, 16}, std::span(x).subspan(static_cast<size_t>(v * 80), 16)))
          << "not rotated";
    variant.run(inverse, {.x = work, .positions = positions, .frequencies = compressed.data(), .num_tokens = 4},
                queue_);
    EXPECT_TRUE(testing::is_close({work.as<float>(), x.size()}, x, 1e-6));
  });
}

TEST(Sinkhorn, PublishedExample) {
  float c[16] = {0.5f, -1, 2, 0, 1, 0.25f, -0.5f, -2, -1.5f, 3, 0.75f, 0.1f, 0, 0, 1, -1};
  ops::sinkhorn_reference(c, 20, 1e-6f);
  const float expected[16] = {0.1580378f, 0.0211667f, 0.4606723f, 0.3601223f, 0.6189204f, 0.1754846f,
                              0.0898229f, 0.1157711f, 0.0125308f, 0.6769914f, 0.0773200f, 0.2331568f,
                              0.2105100f, 0.1263564f, 0.3721838f, 0.2909488f};
  for (int i = 0; i < 16; ++i) EXPECT_NEAR(c[i], expected[i], 2e-7) << i;
  // The first index is summed over: C transposed.
  const float streams[4] = {1, 2, 3, 4}, mixed[4] = {2.2755111f, 2.9085354f, 2.3610133f, 2.4549302f}, zero[4] = {};
  device::Tensor x(DType::kF32, {1, 4, 1}), o(DType::kF32, {1, 1});
  std::copy_n(streams, 4, x.as<float>());
  const ops::MhcDesc desc{.hidden = 1, .activation = DType::kF32};
  testing::for_each_variant<ops::MhcPost>(desc, [&](const ops::Variant<ops::MhcPost>& variant, bool) {
    testing::PoisonedTensor out(DType::kF32, {1, 4, 1});
    device::Queue queue(1);
    variant.run(desc, {.x = x, .o = o, .post = zero, .comb = c, .out = out.view(), .num_tokens = 1}, queue);
    for (size_t k = 0; k < 4; ++k) EXPECT_NEAR(out.floats()[k], mixed[k], 1e-6);
  });
}

TEST_F(ElementwiseTest, HyperConnectionReadAndHead) {
  constexpr int64_t kTokens = 5, kHidden = 33, kWide = 4 * kHidden;
  std::vector<float> x, fn;
  const device::Tensor input = rows(x, DType::kF32, kTokens, kWide);
  fn.resize(24 * kWide);
  for (float& value : fn) value = rng_.normal() * 0.1f;
  std::vector<float> base(24), scale = {0.7f, 0.5f, 0.3f};
  for (float& value : base) value = rng_.normal();
  const ops::MhcDesc desc{.hidden = kHidden, .activation = DType::kF32};
  std::vector<float> y, post, head;
  for (int64_t t = 0; t < kTokens; ++t) {
    const float* v = x.data() + t * kWide;
    double squares = 0, m[24];
    for (int64_t i = 0; i < kWide; ++i) squares += static_cast<double>(v[i]) * static_cast<double>(v[i]);
    for (int c = 0; c < 24; ++c) {
      m[c] = 0;
      for (int64_t i = 0; i < kWide; ++i)
        m[c] += static_cast<double>(fn[static_cast<size_t>(c * kWide + i)]) * static_cast<double>(v[i]);
      m[c] /= std::sqrt(squares / kWide + 1e-6);
    }
    const auto sigmoid = [](double z) { return 1 / (1 + std::exp(-z)); };
    for (int64_t i = 0; i < kHidden; ++i) {
      double sum = 0;
      for (int j = 0; j < 4; ++j)
        sum +=
            (sigmoid(m[j] * static_cast<double>(scale[0]) + static_cast<double>(base[static_cast<size_t>(j)])) + 1e-6) *
            static_cast<double>(v[j * kHidden + i]);
      y.push_back(static_cast<float>(sum));
    }
    for (int j = 0; j < 4; ++j)
      post.push_back(static_cast<float>(2 * sigmoid(m[4 + j] * static_cast<double>(scale[1]) +
                                                    static_cast<double>(base[static_cast<size_t>(4 + j)]))));
  }
  testing::for_each_variant<ops::MhcPre>(desc, [&](const ops::Variant<ops::MhcPre>& variant, bool) {
    testing::PoisonedTensor out(DType::kF32, {kTokens, kHidden}), posts(DType::kF32, {kTokens, 4}),
        combs(DType::kF32, {kTokens, 16});
    variant.run(desc,
                {.x = input,
                 .fn = fn.data(),
                 .base = base.data(),
                 .scale = scale.data(),
                 .y = out.view(),
                 .post = posts.view().as<float>(),
                 .comb = combs.view().as<float>(),
                 .num_tokens = kTokens},
                queue_);
    EXPECT_TRUE(testing::is_close(out.floats(), y, 1e-5));
    EXPECT_TRUE(testing::is_close(posts.floats(), post, 1e-5));
    const std::vector<float> c = combs.floats();
    for (size_t i = 0; i < c.size(); i += 4) {
      EXPECT_TRUE(std::isfinite(c[i]));
      if (i % 16 == 0) {
        EXPECT_NEAR(c[i] + c[i + 4] + c[i + 8] + c[i + 12], 1, 1e-4) << "a column";
      }
    }
  });
  // The head reads with the same formula: rows picked out of order.
  const int32_t picked[2] = {3, 0};
  testing::for_each_variant<ops::MhcHead>(desc, [&](const ops::Variant<ops::MhcHead>& variant, bool) {
    testing::PoisonedTensor out(DType::kF32, {2, kHidden});
    variant.run(desc,
                {.x = input,
                 .rows = picked,
                 .fn = fn.data(),
                 .base = base.data(),
                 .scale = scale.data(),
                 .h = out.view(),
                 .num_rows = 2},
                queue_);
    std::vector<float> expected(y.begin() + 3 * kHidden, y.begin() + 4 * kHidden);
    expected.insert(expected.end(), y.begin(), y.begin() + kHidden);
    EXPECT_TRUE(testing::is_close(out.floats(), expected, 1e-5));
  });
}

TEST_F(ElementwiseTest, Hadamard) {
  for (const int64_t width : {2, 64, 128}) {
    const ops::Hadamard::Desc desc{.width = width, .activation = DType::kF32};
    std::vector<float> x, expected;
    rows(x, DType::kF32, 5, width);
    for (int64_t r = 0; r < 5; ++r) {
      for (int64_t a = 0; a < width; ++a) {
        double sum = 0;
        for (int64_t b = 0; b < width; ++b)
          sum += (std::popcount(static_cast<uint64_t>(a & b)) % 2 == 0 ? 1 : -1) *
                 static_cast<double>(x[static_cast<size_t>(r * width + b)]);
        expected.push_back(static_cast<float>(sum / std::sqrt(static_cast<double>(width))));
      }
    }
    testing::for_each_variant<ops::Hadamard>(desc, [&](const ops::Variant<ops::Hadamard>& variant, bool) {
      device::Tensor work = testing::as_tensor(x, DType::kF32, {5, width});
      variant.run(desc, {.x = work, .num_rows = 5}, queue_);
      EXPECT_TRUE(testing::is_close({work.as<float>(), x.size()}, expected, 1e-6));
      variant.run(desc, {.x = work, .num_rows = 5}, queue_);
      EXPECT_TRUE(testing::is_close({work.as<float>(), x.size()}, x, 1e-6)) << "its own inverse";
    });
  }
  std::string why_not;
  EXPECT_FALSE(ops::hadamard_reference_supports({.width = 96}, why_not));
}

TEST_F(ElementwiseTest, EmbeddingAndStreamAdd) {
  std::vector<float> table, z, e;
  const device::Tensor weight = rows(table, DType::kBF16, 7, 300);
  const int32_t ids[3] = {6, -1, 5}, rows_of_ids[3] = {6, 0, 5};
  const ops::Embedding::Desc desc{.vocab = 7, .hidden = 300, .weight = DType::kBF16, .activation = DType::kF32};
  testing::for_each_variant<ops::Embedding>(desc, [&](const ops::Variant<ops::Embedding>& variant, bool) {
    testing::PoisonedTensor out(DType::kF32, {3, 4, 300});
    variant.run(desc, {.weight = weight, .ids = ids, .num_tokens = 3, .out = out.view()}, queue_);
    const std::vector<float> found = out.floats();
    for (size_t i = 0; i < 12; ++i)
      EXPECT_TRUE(testing::same_bits(std::span(found).subspan(i * 300, 300),
                                     std::span(table).subspan(static_cast<size_t>(rows_of_ids[i / 4]) * 300, 300)));
  });
  const device::Tensor streams = rows(z, DType::kBF16, 8, 300), next = rows(e, DType::kBF16, 2, 300);
  const ops::StreamAdd::Desc add{.hidden = 300, .activation = DType::kBF16};
  testing::for_each_variant<ops::StreamAdd>(add, [&](const ops::Variant<ops::StreamAdd>& variant, bool) {
    testing::PoisonedTensor out(DType::kBF16, {2, 4, 300});
    variant.run(add, {.z = streams, .e = next, .out = out.view(), .num_tokens = 2}, queue_);
    const std::vector<float> found = out.floats();
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_EQ(found[i], numeric::bf16_round(z[i] + e[i / 1200 * 300 + i % 300]));
  });
}

TEST_F(ElementwiseTest, CombineAddsSlotsThenTheSharedExpert) {
  std::vector<float> r, s;
  const device::Tensor routed = rows(r, DType::kBF16, 6, 300), shared = rows(s, DType::kBF16, 2, 300);
  const ops::MoeCombine::Desc desc{.hidden = 300, .top_k = 3, .activation = DType::kF32};
  testing::for_each_variant<ops::MoeCombine>(desc, [&](const ops::Variant<ops::MoeCombine>& variant, bool) {
    testing::PoisonedTensor out(DType::kF32, {2, 300});
    variant.run(desc, {.routed = routed, .shared = shared, .out = out.view(), .num_tokens = 2}, queue_);
    const std::vector<float> found = out.floats();
    for (size_t i = 0; i < 600; ++i) {
      const size_t t = i / 300, c = i % 300;
      EXPECT_EQ(found[i], ((r[t * 900 + c] + r[t * 900 + 300 + c]) + r[t * 900 + 600 + c]) + s[i]) << i;
    }
  });
}

}  // namespace
}  // namespace tessera
