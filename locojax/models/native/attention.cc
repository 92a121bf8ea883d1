// Decoding's attention: one query a row and head over the row's keys and values in bf16, summed in fp32.
//
// A row's tokens are cut into arrays, one after another: keys [B, K, c, h] each, then values likewise. Only tokens that
// count are read. Softmax as usual: all scores of a row first, then their largest, then the weighted values.
#include <vector>

#include "lanes.h"
#include "parallel.h"

namespace ffi = xla::ffi;

namespace locojax {
namespace {

constexpr int64_t kPieces = 16;

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

ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> q, ffi::Buffer<ffi::S32> num_tokens,
                  ffi::RemainingArgs arrays, ffi::ResultBuffer<ffi::BF16> out) {
  const auto of_q = q.dimensions();
  if (of_q.size() != 3 || arrays.size() % 2 || !arrays.size())
    return ffi::Error::InvalidArgument("attention over rows got no query [B, H, h], or unequal keys and values");
  const int64_t B = of_q[0], H = of_q[1], h = of_q[2], count = int64_t(arrays.size()) / 2;
  struct Array {
    const bf16 *keys, *values;
    int64_t tokens;
  };
  std::vector<Array> rows;
  int64_t K = 0, capacity = 0;
  for (int64_t i = 0; i < count; ++i) {
    auto keys = arrays.get<ffi::Buffer<ffi::BF16>>(i), values = arrays.get<ffi::Buffer<ffi::BF16>>(count + i);
    if (!keys.has_value() || !values.has_value() || keys->dimensions().size() != 4 || keys->dimensions()[3] != h ||
        keys->dimensions()[0] != B || keys->element_count() != values->element_count())
      return ffi::Error::InvalidArgument("attention over rows: keys and values aren't of shape [B, K, tokens, h]");
    K = keys->dimensions()[1];
    rows.push_back({static_cast<const bf16*>(keys->untyped_data()), static_cast<const bf16*>(values->untyped_data()),
                    keys->dimensions()[2]});
    capacity += keys->dimensions()[2];
  }
  const auto* tokens_of = static_cast<const int32_t*>(num_tokens.untyped_data());
  const auto* queries = static_cast<const bf16*>(q.untyped_data());
  auto* to = static_cast<bf16*>(out->untyped_data());
  const int64_t units = B * K, pieces = std::min(units, kPieces), G = H / K;
  ForEach(pool, pieces, [=, &rows](int64_t piece) {
    std::vector<float> scores;
    std::vector<Part> parts;
    for (int64_t unit = units * piece / pieces; unit < units * (piece + 1) / pieces; ++unit) {
      const int64_t row = unit / K, head = unit % K;
      const int64_t tokens = std::min<int64_t>(std::max(tokens_of[row], 1), capacity);
      scores.resize(4 * (tokens + 2 * kLanes));
      parts.clear();
      int64_t left = tokens;
      for (const Array& array : rows) {
        if (left <= 0) break;
        const bf16 *keys = array.keys + unit * array.tokens * h, *values = array.values + unit * array.tokens * h;
        parts.push_back({keys, values, std::min(left, array.tokens)});
        left -= array.tokens;
      }
      const int64_t at = (row * H + head * G) * h;
      switch (h) {
        case 32: Group<1>(queries + at, G, parts, tokens, scores.data(), to + at); break;
        case 64: Group<2>(queries + at, G, parts, tokens, scores.data(), to + at); break;
        case 96: Group<3>(queries + at, G, parts, tokens, scores.data(), to + at); break;
        case 128: Group<4>(queries + at, G, parts, tokens, scores.data(), to + at); break;
        case 256: Group<8>(queries + at, G, parts, tokens, scores.data(), to + at); break;
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace locojax

XLA_FFI_DEFINE_HANDLER_SYMBOL(locojax_attend_rows, locojax::Attend,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::S32>>().RemainingArgs().Ret<ffi::Buffer<ffi::BF16>>());
