// Causal attention within packed rows in bf16, and its gradient: token j is visible to token i when j <= i < until[j].
//
// Blocks of queries meet blocks of keys, one head of one row at a time; blocks in which no pair is visible are left out,
// so a row of short sequences costs what they do. Softmax and its gradient as in Dao et al. 2022. Shapes: R rows, T
// tokens, H heads, K key heads, h head dim.
#include <vector>

#include "adapters.h"

namespace ffi = xla::ffi;

namespace locojax {
namespace {

constexpr int64_t kQueries = 96;  // of a block; keys of a block are a panel's columns
constexpr float kMasked = -1e30f;
constexpr char kMisfit[] = "attention within rows: shapes don't fit: expected q [R, T, H, h], k and v [R, T, K, h], until [R, T], "
                           "h even and at most 256";

struct Shape {
  int64_t R, T, H, K, h;
  int64_t blocks, wide;  // of keys; h up to whole panels

  Shape(Bf16& q, Bf16& k)
      : R(q.dimensions()[0]), T(q.dimensions()[1]), H(q.dimensions()[2]), K(k.dimensions()[2]), h(q.dimensions()[3]),
        blocks((T + kPanel - 1) / kPanel), wide((h + kPanel - 1) / kPanel * kPanel) {}

  static bool Fit(Bf16& q, Bf16& k, Bf16& v, Ints& until) {
    const auto a = q.dimensions(), b = k.dimensions(), c = v.dimensions(), d = until.dimensions();
    return a.size() == 4 && b.size() == 4 && c.size() == 4 && d.size() == 2 && a[0] == b[0] && a[1] == b[1] &&
           b[0] == c[0] && b[1] == c[1] && b[2] == c[2] && a[3] == b[3] && b[3] == c[3] && d[0] == a[0] && d[1] == a[1] &&
           a[3] % 2 == 0 && a[3] <= 256 && b[2] > 0 && a[2] % b[2] == 0;
  }
};

// Panels of one head's keys or values in one row.
class Panels {
 public:
  // Tokens as columns, pairs along h: what queries are multiplied by.
  void ByToken(const bf16* from, const Shape& s) {
    size_ = s.h * kPanel;
    memory_.assign(s.blocks * size_, 0);
    for (int64_t j = 0; j < s.T; ++j) {
      const bf16* token = from + j * s.K * s.h;
      bf16* to = &memory_[j / kPanel * size_ + j % kPanel * 2];
      for (int64_t i = 0; i < s.h; i += 2, to += 2 * kPanel) to[0] = token[i], to[1] = token[i + 1];
    }
  }

  // Tokens as rows, pairs along them: what weights are multiplied by. h may take several panels, one after another.
  void ByFeature(const bf16* from, const Shape& s) {
    size_ = s.wide * kPanel;
    memory_.assign(s.blocks * size_, 0);
    for (int64_t n = 0; n < s.blocks; ++n)
      for (int64_t c = 0; c < s.h; c += kPanel)
        PackPanel(from + n * kPanel * s.K * s.h + c, s.K * s.h, std::min<int64_t>(kPanel, s.T - n * kPanel),
                  std::min<int64_t>(kPanel, s.h - c), &memory_[n * size_ + c * kPanel]);
  }

  const bf16* operator[](int64_t block) const { return &memory_[block * size_]; }

 private:
  int64_t size_ = 0;
  std::vector<bf16> memory_;
};

// Who sees whom in one row.
class Visible {
 public:
  Visible(const int32_t* until, const Shape& s) : until_(s.blocks * kPanel, 0.0f), furthest_(s.blocks, 0.0f) {
    for (int64_t j = 0; j < s.T; ++j) {
      until_[j] = float(until[j]);  // exact below 2^24
      furthest_[j / kPanel] = std::max(furthest_[j / kPanel], until_[j]);
    }
    for (int i = 0; i < kLanes; ++i) steps_[i] = float(i);
  }

  // Whether any of the queries [from, end) sees any key of the block.
  bool Any(int64_t from, int64_t end, int64_t block) const {
    return block * kPanel < end && furthest_[block] > float(from);
  }

  // `scores` of query i with sixteen keys from j, or `other` where it doesn't see them.
  F32 Where(int64_t i, int64_t j, F32 scores, float other) const {
    scores = Select(Load(&until_[j]), Fill(float(i)), scores, Fill(other));
    return j + kLanes <= i + 1 ? scores : Select(Fill(float(i - j) + 0.5f), Load(steps_), scores, Fill(other));
  }

 private:
  std::vector<float> until_, furthest_;
  float steps_[kLanes];
};

ffi::Error Forward(ffi::ThreadPool pool, Bf16 q, Bf16 k, Bf16 v, Ints until, ffi::ResultBuffer<ffi::BF16> out,
                   ffi::ResultBuffer<ffi::F32> log_norm) {
  if (!Shape::Fit(q, k, v, until)) return ffi::Error::InvalidArgument(kMisfit);
  const Shape s(q, k);
  const auto *queries = static_cast<const bf16*>(q.untyped_data()), *keys = static_cast<const bf16*>(k.untyped_data()),
             *values = static_cast<const bf16*>(v.untyped_data());
  const auto* limits = static_cast<const int32_t*>(until.untyped_data());
  auto* to = static_cast<bf16*>(out->untyped_data());
  auto* norms = static_cast<float*>(log_norm->untyped_data());
  const float scale = 1.0f / std::sqrt(float(s.h));
  ForEach(pool, s.R * s.H, [&](int64_t unit) {
    const int64_t row = unit / s.H, head = unit % s.H, stride = s.H * s.h;
    const int64_t own = (row * s.T * s.K + head / (s.H / s.K)) * s.h, first = (row * s.T * s.H + head) * s.h;
    const Visible visible(limits + row * s.T, s);
    Panels of_keys, of_values;
    of_keys.ByToken(keys + own, s);
    of_values.ByFeature(values + own, s);
    std::vector<float> scores(kQueries * kPanel), sums(kQueries * s.wide), top(kQueries), total(kQueries);
    std::vector<bf16> weights(kQueries * kPanel);
    for (int64_t from = 0; from < s.T; from += kQueries) {
      const int64_t rows = std::min(kQueries, s.T - from);
      std::fill(sums.begin(), sums.end(), 0.0f);
      std::fill(top.begin(), top.end(), kMasked);
      std::fill(total.begin(), total.end(), 0.0f);
      for (int64_t block = 0; block < s.blocks; ++block) {
        if (!visible.Any(from, from + rows, block)) continue;
        EachTile(rows, [&](auto& tile, int64_t i) {
          tile.Multiply(queries + first + (from + i) * stride, stride, of_keys[block], s.h / 2);
          tile.Write(&scores[i * kPanel], kPanel, kPanel);
        });
        for (int64_t i = 0; i < rows; ++i) {
          F32 found[kVectors], most = Fill(top[i]);
#pragma GCC unroll 4
          for (int c = 0; c < kVectors; ++c) {
            found[c] = visible.Where(from + i, block * kPanel + c * kLanes,
                                     Mul(Load(&scores[i * kPanel + c * kLanes]), Fill(scale)), kMasked);
            most = Max(most, found[c]);
          }
          const float largest = Largest(most), before = std::exp(top[i] - largest);
          F32 sum = Zero();
#pragma GCC unroll 4
          for (int c = 0; c < kVectors; ++c) {
            // A score that is no number gives weights that are none, though a maximum may have passed it over.
            const F32 weight = Fma(found[c], Zero(), Exp(Sub(found[c], Fill(largest))));
            Store(&weights[i * kPanel + c * kLanes], weight, kLanes);
            sum = Add(sum, weight);
          }
          total[i] = total[i] * before + Sum(sum);
          if (largest != top[i])
            for (int64_t c = 0; c < s.wide; c += kLanes)
              Store(&sums[i * s.wide + c], Mul(Load(&sums[i * s.wide + c]), Fill(before)));
          top[i] = largest;
        }
        for (int64_t c = 0; c < s.wide; c += kPanel)
          EachTile(rows, [&](auto& tile, int64_t i) {
            tile.Multiply(&weights[i * kPanel], kPanel, of_values[block] + c * kPanel, kPanel / 2);
            tile.AddTo(&sums[i * s.wide + c], s.wide);
          });
      }
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t c = 0; c < s.h; c += kLanes)
          Store(to + first + (from + i) * stride + c, Mul(Load(&sums[i * s.wide + c]), Fill(1.0f / total[i])),
                int(std::min<int64_t>(kLanes, s.h - c)));
        norms[(row * s.H + head) * s.T + from + i] = top[i] + std::log(total[i]);
      }
    }
  });
  return ffi::Error::Success();
}

// What cotangents g [R, T, H, h] bring to q, and to k and v by each of the heads: fp32, [R, T, H, h].
ffi::Error Backward(ffi::ThreadPool pool, Bf16 q, Bf16 k, Bf16 v, Ints until, Bf16 out, Floats log_norm, Bf16 g,
                    ffi::ResultBuffer<ffi::F32> d_q, ffi::ResultBuffer<ffi::F32> d_k,
                    ffi::ResultBuffer<ffi::F32> d_v) {
  if (!Shape::Fit(q, k, v, until)) return ffi::Error::InvalidArgument(kMisfit);
  const Shape s(q, k);
  const auto *queries = static_cast<const bf16*>(q.untyped_data()), *keys = static_cast<const bf16*>(k.untyped_data()),
             *values = static_cast<const bf16*>(v.untyped_data()), *outs = static_cast<const bf16*>(out.untyped_data()),
             *cotangents = static_cast<const bf16*>(g.untyped_data());
  const auto* limits = static_cast<const int32_t*>(until.untyped_data());
  const auto* norms = static_cast<const float*>(log_norm.untyped_data());
  auto *to_q = static_cast<float*>(d_q->untyped_data()), *to_k = static_cast<float*>(d_k->untyped_data()),
       *to_v = static_cast<float*>(d_v->untyped_data());
  const float scale = 1.0f / std::sqrt(float(s.h));
  ForEach(pool, s.R * s.H, [&](int64_t unit) {
    const int64_t row = unit / s.H, head = unit % s.H, stride = s.H * s.h;
    const int64_t own = (row * s.T * s.K + head / (s.H / s.K)) * s.h, first = (row * s.T * s.H + head) * s.h;
    const Visible visible(limits + row * s.T, s);
    const float* norm = norms + (row * s.H + head) * s.T;
    Panels of_keys, of_values, keys_down;
    of_keys.ByToken(keys + own, s);
    of_values.ByToken(values + own, s);
    keys_down.ByFeature(keys + own, s);
    // [h, tokens]: with them sums over queries are products of rows too. Beyond T: 0.
    const int64_t padded = (s.T + kQueries - 1) / kQueries * kQueries;
    std::vector<bf16> q_t(s.h * padded, 0), g_t(s.h * padded, 0);
    std::vector<float> mean(s.T), sums_q(s.T * s.wide, 0.0f), sums_k(s.h * kPanel), sums_v(s.h * kPanel);
    const auto wide_of = [](bf16 x) {
      const uint32_t bits = uint32_t(x) << 16;
      float number;
      std::memcpy(&number, &bits, sizeof number);
      return number;
    };
    for (int64_t i = 0; i < s.T; ++i) {
      const int64_t at = first + i * stride;
      float sum = 0.0f;
      for (int64_t c = 0; c < s.h; ++c) {
        q_t[c * padded + i] = queries[at + c];
        g_t[c * padded + i] = cotangents[at + c];
        sum += wide_of(cotangents[at + c]) * wide_of(outs[at + c]);
      }
      mean[i] = sum;
    }
    std::vector<float> scores(kQueries * kPanel), d_weights(kQueries * kPanel);
    std::vector<bf16> weights(kQueries * kPanel), d_scores(kQueries * kPanel), panel(kQueries * kPanel);
    for (int64_t block = 0; block < s.blocks; ++block) {
      std::fill(sums_k.begin(), sums_k.end(), 0.0f);
      std::fill(sums_v.begin(), sums_v.end(), 0.0f);
      for (int64_t from = block * kPanel / kQueries * kQueries; from < s.T; from += kQueries) {
        const int64_t rows = std::min(kQueries, s.T - from), even = rows + rows % 2;
        if (!visible.Any(from, from + rows, block)) continue;
        EachTile(rows, [&](auto& tile, int64_t i) {
          tile.Multiply(queries + first + (from + i) * stride, stride, of_keys[block], s.h / 2);
          tile.Write(&scores[i * kPanel], kPanel, kPanel);
        });
        EachTile(rows, [&](auto& tile, int64_t i) {
          tile.Multiply(cotangents + first + (from + i) * stride, stride, of_values[block], s.h / 2);
          tile.Write(&d_weights[i * kPanel], kPanel, kPanel);
        });
        for (int64_t i = 0; i < rows; ++i)
#pragma GCC unroll 4
          for (int c = 0; c < kVectors; ++c) {
            const int64_t at = i * kPanel + c * kLanes;
            const F32 score = Sub(Mul(Load(&scores[at]), Fill(scale)), Fill(norm[from + i]));
            const F32 exped = Fma(score, Zero(), Exp(score));
            const F32 weight = visible.Where(from + i, block * kPanel + c * kLanes, exped, 0.0f);
            Store(&weights[at], weight, kLanes);
            const F32 d = Mul(Mul(weight, Sub(Load(&d_weights[at]), Fill(mean[from + i]))), Fill(scale));
            Store(&d_scores[at], visible.Where(from + i, block * kPanel + c * kLanes, d, 0.0f), kLanes);
          }
        if (even > rows) {
          std::fill_n(&weights[rows * kPanel], kPanel, bf16(0));
          std::fill_n(&d_scores[rows * kPanel], kPanel, bf16(0));
        }
        for (int64_t c = 0; c < s.wide; c += kPanel)
          EachTile(rows, [&](auto& tile, int64_t i) {
            tile.Multiply(&d_scores[i * kPanel], kPanel, keys_down[block] + c * kPanel, kPanel / 2);
            tile.AddTo(&sums_q[(from + i) * s.wide + c], s.wide);
          });
        PackPanel(weights.data(), kPanel, even, kPanel, panel.data());
        EachTile(s.h, [&](auto& tile, int64_t c) {
          tile.Multiply(&g_t[c * padded + from], padded, panel.data(), even / 2);
          tile.AddTo(&sums_v[c * kPanel], kPanel);
        });
        PackPanel(d_scores.data(), kPanel, even, kPanel, panel.data());
        EachTile(s.h, [&](auto& tile, int64_t c) {
          tile.Multiply(&q_t[c * padded + from], padded, panel.data(), even / 2);
          tile.AddTo(&sums_k[c * kPanel], kPanel);
        });
      }
      for (int64_t j = 0; j < std::min<int64_t>(kPanel, s.T - block * kPanel); ++j)
        for (int64_t c = 0; c < s.h; ++c) {
          to_k[first + (block * kPanel + j) * stride + c] = sums_k[c * kPanel + j];
          to_v[first + (block * kPanel + j) * stride + c] = sums_v[c * kPanel + j];
        }
    }
    for (int64_t i = 0; i < s.T; ++i) std::copy_n(&sums_q[i * s.wide], s.h, to_q + first + i * stride);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace locojax

#define LOCOJAX_ATTENTION_INPUTS \
  Ctx<ffi::ThreadPool>().Arg<locojax::Bf16>().Arg<locojax::Bf16>().Arg<locojax::Bf16>().Arg<locojax::Ints>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(locojax_attention_forward, locojax::Forward,
                              ffi::Ffi::Bind().LOCOJAX_ATTENTION_INPUTS.Ret<locojax::Bf16>().Ret<locojax::Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(locojax_attention_backward, locojax::Backward,
                              ffi::Ffi::Bind().LOCOJAX_ATTENTION_INPUTS.Arg<locojax::Bf16>().Arg<locojax::Floats>()
                                  .Arg<locojax::Bf16>().Ret<locojax::Floats>().Ret<locojax::Floats>()
                                  .Ret<locojax::Floats>());
