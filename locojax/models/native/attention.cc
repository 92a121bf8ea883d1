// Decoding's attention: a row's new token is stored among its keys and values in bf16, and one query a head attends to
// them, summed in fp32.
//
// A row's tokens are cut into arrays, one after another: keys [B, K, c, h] each, then values likewise, written in place.
// Only tokens that count are read. Softmax as usual: all scores of a row first, then their largest, then the weighted
// values.
#include <vector>

#include "lanes.h"
#include "parallel.h"

namespace ffi = xla::ffi;

namespace locojax {
namespace {

constexpr int64_t kPieces = 16;
constexpr int64_t kMostHead = 256;

struct Part {
  const bf16 *keys, *values;  // of one row and head: [c, h]
  int64_t count;              // tokens of it that count
};

// scores[g][token] = q[g] . key / sqrt(h) for kQueries queries, and their largest. Padded to lanes with -inf.
template <int kWords, int kQueries>
void Scores(const bf16* q, const std::vector<Part>& parts, float* scores, int64_t stride, float* largest) {
  constexpr int h = kWords * 2 * kLanes;
  const F32 scale = Fill(1.0f / std::sqrt(float(h)));
  F32 top[kQueries];
  for (int g = 0; g < kQueries; ++g) top[g] = Fill(-INFINITY);
  int64_t at = 0;
  for (const Part& part : parts) {
    for (int64_t t = 0; t < part.count; t += kLanes) {
      const int last = int(std::min<int64_t>(kLanes, part.count - t)) - 1;
      const bf16* key[kLanes];  // the last one is repeated up to a whole vector: the largest score is the same
      for (int j = 0; j < kLanes; ++j) key[j] = part.keys + (t + std::min(j, last)) * h;
      for (int g = 0; g < kQueries; ++g) {
        Pairs of_q[kWords];
#pragma GCC unroll 8
        for (int i = 0; i < kWords; ++i) of_q[i] = LoadPairs(q + g * h + i * 2 * kLanes);
        F32 sums[kLanes];
#pragma GCC unroll 16
        for (int j = 0; j < kLanes; ++j) {
          sums[j] = Zero();
#pragma GCC unroll 8
          for (int i = 0; i < kWords; ++i) sums[j] = Dot(sums[j], of_q[i], LoadPairs(key[j] + i * 2 * kLanes));
        }
        const F32 found = Mul(SumEach(sums), scale);
        Store(scores + g * stride + at + t, found);
        top[g] = Max(top[g], found);
      }
    }
    at += part.count;
  }
  for (int g = 0; g < kQueries; ++g) {
    largest[g] = Largest(top[g]);
    for (int64_t i = at; i < (at + kLanes - 1) / kLanes * kLanes; ++i) scores[g * stride + i] = -INFINITY;
  }
}

// out[g] = sum of weights[g][token] * value, over the sum of the weights. Every loop over sums is unrolled, or the
// compiler would keep them in memory.
template <int kWords, int kQueries>
void Values(const float* weights, int64_t stride, const float* totals, const std::vector<Part>& parts, bf16* out) {
  constexpr int h = kWords * 2 * kLanes;
  F32 evens[kQueries][kWords], odds[kQueries][kWords];
#pragma GCC unroll 8
  for (int g = 0; g < kQueries; ++g)
#pragma GCC unroll 8
    for (int i = 0; i < kWords; ++i) evens[g][i] = odds[g][i] = Zero();
  for (const Part& part : parts) {
    const bf16* value = part.values;
    for (int64_t t = 0; t < part.count; ++t, ++weights, value += h) {
#pragma GCC unroll 8
      for (int i = 0; i < kWords; ++i) {
        const Pairs both = LoadPairs(value + i * 2 * kLanes);
        const F32 even = Evens(both), odd = Odds(both);
#pragma GCC unroll 8
        for (int g = 0; g < kQueries; ++g) {
          const F32 weight = Fill(weights[g * stride]);
          evens[g][i] = Fma(weight, even, evens[g][i]);
          odds[g][i] = Fma(weight, odd, odds[g][i]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < kQueries; ++g) {
    const F32 share = Fill(1.0f / totals[g]);
#pragma GCC unroll 8
    for (int i = 0; i < kWords; ++i)
      StoreBoth(out + g * h + i * 2 * kLanes, Mul(evens[g][i], share), Mul(odds[g][i], share));
  }
}

template <int kWords, int kQueries>
void Queries(const bf16* q, const std::vector<Part>& parts, int64_t tokens, float* scores, bf16* out) {
  const int64_t stride = (tokens + kLanes - 1) / kLanes * kLanes + kLanes;  // a part's last vector may reach beyond
  float largest[kQueries], totals[kQueries];
  Scores<kWords, kQueries>(q, parts, scores, stride, largest);
  for (int g = 0; g < kQueries; ++g) {
    F32 total = Zero();
    for (int64_t i = 0; i < tokens; i += kLanes) {
      const F32 weight = Exp(Sub(Load(scores + g * stride + i), Fill(largest[g])));
      Store(scores + g * stride + i, weight);
      total = Add(total, weight);
    }
    totals[g] = Sum(total);
  }
  Values<kWords, kQueries>(scores, stride, totals, parts, out);
}

// The queries of one key head, as many at a time as registers hold the sums of.
template <int kWords>
void Group(const bf16* q, int64_t queries, const std::vector<Part>& parts, int64_t tokens, float* scores, bf16* out) {
  constexpr int h = kWords * 2 * kLanes;
  constexpr int kMost = kWords <= 2 ? 4 : kWords <= 4 ? 2 : 1;
  while (queries > 0) {
    const int some = int(std::min<int64_t>(queries, kMost));
    if (some == 4) {
      if constexpr (kMost >= 4) Queries<kWords, 4>(q, parts, tokens, scores, out);
    } else if (some == 3) {
      if constexpr (kMost >= 3) Queries<kWords, 3>(q, parts, tokens, scores, out);
    } else if (some == 2) {
      if constexpr (kMost >= 2) Queries<kWords, 2>(q, parts, tokens, scores, out);
    } else {
      Queries<kWords, 1>(q, parts, tokens, scores, out);
    }
    queries -= some, q += some * h, out += some * h;
  }
}

// Each half of a head's h numbers turned by cos and sin, and rounded.
void Rotate(const bf16* x, const float* cos, const float* sin, int64_t h, bf16* to) {
  for (int64_t i = 0; i < h / 2; i += kLanes) {
    const F32 low = Load(x + i), high = Load(x + h / 2 + i);
    Store(to + i, Sub(Mul(low, Load(cos + i)), Mul(high, Load(sin + i))), kLanes);
    Store(to + h / 2 + i, Fma(high, Load(cos + h / 2 + i), Mul(low, Load(sin + h / 2 + i))), kLanes);
  }
}

// What a row's next owner inherits must not poison its masked scores.
void StoreFinite(const bf16* x, int64_t h, bf16* to) {
  constexpr bf16 kExponent = 0x7f80;
  for (int64_t i = 0; i < h; ++i) to[i] = (x[i] & kExponent) == kExponent ? 0 : x[i];
}

struct Array {
  bf16 *keys, *values;
  int64_t tokens;

  bf16* Of(bf16* all, int64_t unit, int64_t token, int64_t h) const { return all + (unit * tokens + token) * h; }
};

// One row's heads that share keys: counted through rows and key heads. Of the row: q, k and v side by side.
struct Unit {
  const bf16 *q, *k, *v;
  const float *cos, *sin;
  int64_t index, position;
};

// Stores the new token, finds the arrays' tokens up to it, and returns how many those are.
int64_t Append(const Unit& own, const std::vector<Array>& arrays, int64_t h, std::vector<Part>* parts) {
  bf16 rotated[kMostHead];
  parts->clear();
  int64_t begin = 0;
  for (const Array& array : arrays) {
    const int64_t at = own.position - begin;
    if (at < 0) break;
    if (at < array.tokens) {
      Rotate(own.k, own.cos, own.sin, h, rotated);
      StoreFinite(rotated, h, array.Of(array.keys, own.index, at, h));
      StoreFinite(own.v, h, array.Of(array.values, own.index, at, h));
    }
    parts->push_back({array.Of(array.keys, own.index, 0, h), array.Of(array.values, own.index, 0, h),
                      std::min(at + 1, array.tokens)});
    begin += array.tokens;
  }
  return std::min(own.position + 1, begin);
}

// `queries` [G, h], one after another, which are of one key head.
void AttendTo(const bf16* queries, int64_t G, int64_t h, const std::vector<Part>& parts, int64_t tokens, float* scores,
              bf16* out) {
  switch (h) {
    case 32: return Group<1>(queries, G, parts, tokens, scores, out);
    case 64: return Group<2>(queries, G, parts, tokens, scores, out);
    case 96: return Group<3>(queries, G, parts, tokens, scores, out);
    case 128: return Group<4>(queries, G, parts, tokens, scores, out);
    case 256: return Group<8>(queries, G, parts, tokens, scores, out);
  }
}

constexpr char kMisfit[] = "attention over rows: expected q, k and v side by side [B, (H + 2 K) h], cos and sin [B, h], "
                           "positions [B], and keys, then values, [B, K, tokens, h], each its own result too";

// The arrays in `results`, each of which is the argument of its number; empty if they don't fit.
std::vector<Array> InPlace(ffi::RemainingArgs& arrays, ffi::RemainingRets& results, int64_t B, int64_t h, int64_t* K) {
  const size_t count = arrays.size() / 2;
  if (!count || arrays.size() % 2 || results.size() != arrays.size()) return {};
  std::vector<bf16*> all;
  std::vector<int64_t> tokens;
  for (size_t i = 0; i < arrays.size(); ++i) {
    auto before = arrays.get<Bf16>(i);
    auto after = results.get<Bf16>(i);
    if (!before.has_value() || !after.has_value() || before->untyped_data() != (*after)->untyped_data()) return {};
    const auto shape = before->dimensions();
    if (shape.size() != 4 || shape[0] != B || shape[3] != h || (i && shape[1] != *K) ||
        (i >= count && shape[2] != tokens[i - count]))
      return {};
    *K = shape[1];
    tokens.push_back(shape[2]);
    all.push_back(static_cast<bf16*>((*after)->untyped_data()));
  }
  std::vector<Array> rows;
  for (size_t i = 0; i < count; ++i) rows.push_back({all[i], all[count + i], tokens[i]});
  return rows;
}

ffi::Error Attend(ffi::ThreadPool pool, Bf16 qkv, Floats cos, Floats sin, Ints position, ffi::RemainingArgs arrays,
                  ffi::ResultBuffer<ffi::BF16> out, ffi::RemainingRets results) {
  const auto of_out = out->dimensions();
  if (of_out.size() != 3) return ffi::Error::InvalidArgument(kMisfit);
  const int64_t B = of_out[0], H = of_out[1], h = of_out[2];
  int64_t K = 0;
  const auto rows = InPlace(arrays, results, B, h, &K);
  if (rows.empty() || !K || H % K || h > kMostHead || qkv.element_count() != size_t(B * (H + 2 * K) * h) ||
      cos.element_count() != size_t(B * h) || sin.element_count() != size_t(B * h) || position.element_count() != size_t(B))
    return ffi::Error::InvalidArgument(kMisfit);
  const auto* at = static_cast<const int32_t*>(position.untyped_data());
  const auto* from = static_cast<const bf16*>(qkv.untyped_data());
  const auto *cosines = static_cast<const float*>(cos.untyped_data()), *sines = static_cast<const float*>(sin.untyped_data());
  auto* to = static_cast<bf16*>(out->untyped_data());
  const int64_t units = B * K, pieces = std::min(units, kPieces), G = H / K;
  ForEach(pool, pieces, [=, &rows](int64_t piece) {
    std::vector<float> scores;
    std::vector<bf16> queries(G * h);
    std::vector<Part> parts;
    for (int64_t unit = units * piece / pieces; unit < units * (piece + 1) / pieces; ++unit) {
      const int64_t row = unit / K, head = unit % K;
      const bf16* own = from + row * (H + 2 * K) * h;
      const Unit one{own + head * G * h, own + (H + head) * h, own + (H + K + head) * h,
                     cosines + row * h,  sines + row * h,      unit,
                     std::max(at[row], 0)};
      const int64_t tokens = Append(one, rows, h, &parts);
      scores.resize(4 * (tokens + 2 * kLanes));
      for (int64_t g = 0; g < G; ++g) Rotate(one.q + g * h, one.cos, one.sin, h, &queries[g * h]);
      AttendTo(queries.data(), G, h, parts, tokens, scores.data(), to + (row * H + head * G) * h);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace locojax

XLA_FFI_DEFINE_HANDLER_SYMBOL(locojax_attend_rows, locojax::Attend,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<locojax::Bf16>().Arg<locojax::Floats>()
                                  .Arg<locojax::Floats>().Arg<locojax::Ints>().RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::BF16>>().RemainingRets());
