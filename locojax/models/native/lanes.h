// Sixteen fp32 lanes and products of bf16 pairs: AVX-512 BF16 where the compiler targets it, else the same for any
// processor, which is slower and there so that the kernels can be tested on all.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__AVX512BW__)
#include <immintrin.h>
#define LOCOJAX_AVX512 1
#else
#define LOCOJAX_AVX512 0
#endif

namespace locojax {

using bf16 = uint16_t;
constexpr int kLanes = 16;

#if LOCOJAX_AVX512

using F32 = __m512;
using Pairs = __m512bh;  // lane i: the bf16 numbers 2i and 2i + 1

inline F32 Zero() { return _mm512_setzero_ps(); }
inline F32 Fill(float x) { return _mm512_set1_ps(x); }
inline F32 Load(const float* from) { return _mm512_loadu_ps(from); }
inline F32 Load(const bf16* from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
}
inline void Store(float* to, F32 x) { _mm512_storeu_ps(to, x); }
inline void Store(float* to, F32 x, int count) { _mm512_mask_storeu_ps(to, (1u << count) - 1, x); }
inline void Store(bf16* to, F32 x, int count) {
  _mm256_mask_storeu_epi16(to, (1u << count) - 1, (__m256i)_mm512_cvtneps_pbh(x));
}
inline Pairs LoadPairs(const bf16* from) { return (Pairs)_mm512_loadu_si512(from); }
inline Pairs FillPair(const bf16* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return (Pairs)_mm512_set1_epi32(pair);
}
// sum + a[2i] * b[2i] + a[2i + 1] * b[2i + 1] in lane i.
inline F32 Dot(F32 sum, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sum, a, b); }
inline F32 Evens(Pairs x) { return _mm512_castsi512_ps(_mm512_slli_epi32((__m512i)x, 16)); }
inline F32 Odds(Pairs x) {
  return _mm512_castsi512_ps(_mm512_and_si512((__m512i)x, _mm512_set1_epi32(int32_t(0xffff0000u))));
}
// What Evens and Odds take apart, in bf16.
inline void StoreBoth(bf16* to, F32 evens, F32 odds) {
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(evens));
  const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odds));
  _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
// Sixteen numbers of one row and sixteen of the next, in turns.
inline void StoreInTurns(bf16* to, const bf16* row, const bf16* next) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)row));
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)next));
  _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
inline F32 Add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
inline F32 Sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
inline F32 Mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
inline F32 Div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
inline F32 Fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
inline F32 Max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
// yes where a > b, else no.
inline F32 Select(F32 a, F32 b, F32 yes, F32 no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), no, yes);
}
inline float Sum(F32 x) { return _mm512_reduce_add_ps(x); }
inline float Largest(F32 x) { return _mm512_reduce_max_ps(x); }

// exp(x) for x <= 0, to 2e-7 of itself above -1 and 5e-7 above -20; exp(0) is 1, and below -104 it is 0. 2^n times a
// polynomial of the rest, which has the least largest error, 9e-8, of its degree.
inline F32 Exp(F32 x) {
  x = Max(x, Fill(-104.0f));
  const F32 log2_e = Fill(1.44269504089f);
  const F32 n = _mm512_roundscale_ps(Mul(x, log2_e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const F32 r = _mm512_fmsub_ps(x, log2_e, n);
  F32 p = Fill(1.326472731e-3f);
  for (float c : {9.671512991e-3f, 5.550733581e-2f, 2.402224243e-1f, 6.931470037e-1f, 1.0f}) p = Fma(p, r, Fill(c));
  return _mm512_scalef_ps(p, n);
}

// Lane i of the result: the sum of x[i]'s lanes.
inline F32 SumEach(const F32* x) {
  F32 two[8], four[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    two[i] = Add(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(two[2 * i]), b = _mm512_castps_pd(two[2 * i + 1]);
    four[i] = Add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const F32 low = Add(_mm512_shuffle_f32x4(four[0], four[1], 0x88), _mm512_shuffle_f32x4(four[0], four[1], 0xdd));
  const F32 high = Add(_mm512_shuffle_f32x4(four[2], four[3], 0x88), _mm512_shuffle_f32x4(four[2], four[3], 0xdd));
  return Add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

#else  // what GCC and Clang make of vectors on any processor

typedef float F32 __attribute__((vector_size(64)));
typedef uint32_t Pairs __attribute__((vector_size(64)));

inline F32 Zero() { return F32{}; }
inline F32 Fill(float x) { return F32{} + x; }
template <class T>
inline T Copy(const void* from) {
  T out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
inline F32 Load(const float* from) { return Copy<F32>(from); }
inline F32 Load(const bf16* from) {
  Pairs out;
  for (int i = 0; i < kLanes; ++i) out[i] = uint32_t(from[i]) << 16;
  return (F32)out;
}
inline void Store(float* to, F32 x, int count = kLanes) { std::memcpy(to, &x, count * sizeof(float)); }
inline Pairs Narrow(F32 x) {  // to the nearest, ties to even; what isn't a number stays none
  const Pairs bits = (Pairs)x;
  return x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : (bits >> 16) | 0x40;
}
inline void Store(bf16* to, F32 x, int count) {
  const Pairs narrow = Narrow(x);
  for (int i = 0; i < count; ++i) to[i] = bf16(narrow[i]);
}
inline Pairs LoadPairs(const bf16* from) { return Copy<Pairs>(from); }
inline Pairs FillPair(const bf16* from) { return Pairs{} + Copy<uint32_t>(from); }
inline F32 Evens(Pairs x) { return (F32)(x << 16); }
inline F32 Odds(Pairs x) { return (F32)(x & 0xffff0000u); }
inline void StoreBoth(bf16* to, F32 evens, F32 odds) {
  const Pairs both = Narrow(evens) | Narrow(odds) << 16;
  std::memcpy(to, &both, sizeof both);
}
inline void StoreInTurns(bf16* to, const bf16* row, const bf16* next) {
  for (int i = 0; i < kLanes; ++i) to[2 * i] = row[i], to[2 * i + 1] = next[i];
}
inline F32 Add(F32 a, F32 b) { return a + b; }
inline F32 Sub(F32 a, F32 b) { return a - b; }
inline F32 Mul(F32 a, F32 b) { return a * b; }
inline F32 Div(F32 a, F32 b) { return a / b; }
inline F32 Fma(F32 a, F32 b, F32 c) { return a * b + c; }
inline F32 Max(F32 a, F32 b) { return a > b ? a : b; }
inline F32 Select(F32 a, F32 b, F32 yes, F32 no) { return a > b ? yes : no; }
inline F32 Dot(F32 sum, Pairs a, Pairs b) { return sum + (Evens(a) * Evens(b) + Odds(a) * Odds(b)); }
inline float Sum(F32 x) {
  float out = 0.0f;
  for (int i = 0; i < kLanes; ++i) out += x[i];
  return out;
}
inline float Largest(F32 x) {
  float out = x[0];
  for (int i = 1; i < kLanes; ++i) out = x[i] > out ? x[i] : out;
  return out;
}
inline F32 Exp(F32 x) {
  for (int i = 0; i < kLanes; ++i) x[i] = std::exp(x[i]);
  return x;
}
inline F32 SumEach(const F32* x) {
  F32 out;
  for (int i = 0; i < kLanes; ++i) out[i] = Sum(x[i]);
  return out;
}

#endif

}  // namespace locojax
