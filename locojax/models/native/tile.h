// The inner loop of a product: a few rows of x times a panel of packed columns.
#pragma once

#include <algorithm>
#include <memory>
#include <type_traits>

#include "lanes.h"

namespace locojax {

constexpr int kPanel = 64, kVectors = kPanel / kLanes;  // columns of a panel
constexpr int kTileRows = 6;  // 6 x 4 sums, 4 of w and one of x: 29 of 32 registers

// A block of logits that stays in the processor's cache until it has been used: 96 KiB.
constexpr int64_t kLogitRows = 96, kLogitColumns = 4 * kPanel;

// Memory that isn't cleared first, and grows to what is asked for.
template <class T>
class Scratch {
 public:
  T* At(int64_t size) {
    if (size > size_) memory_.reset(new T[size_ = size]);
    return memory_.get();
  }

 private:
  std::unique_ptr<T[]> memory_;
  int64_t size_ = 0;
};

// The sums of kRows rows over a panel's columns, in registers. A panel may be narrower than most: kVectors of lanes.
template <int kRows, int kVectors = locojax::kVectors>
struct Tile {
  static constexpr int kCount = kRows, kWidth = kVectors * kLanes;
  F32 sums[kRows][kVectors];

  Tile() {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Zero();
  }

  // Adds x [kRows, 2 pairs] @ w, a panel [pairs, kWidth, 2]. Rows of x are `stride` numbers apart.
  // Always inlined, or the sums would go through memory between one product and the next.
  __attribute__((always_inline)) void Multiply(const bf16* x, int64_t stride, const bf16* w, int64_t pairs) {
    for (int64_t k = 0; k < pairs; ++k, w += 2 * kWidth) {
      Pairs of_w[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) of_w[v] = LoadPairs(w + v * 2 * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Pairs of_x = FillPair(x + r * stride + 2 * k);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[r][v] = Dot(sums[r][v], of_x, of_w[v]);
      }
    }
  }

  // The first `columns` of each row. Rows of `out` are `stride` numbers apart.
  template <class Out>
  void Write(Out* out, int64_t stride, int columns) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        if (v * kLanes < columns)
          Store(out + r * stride + v * kLanes, sums[r][v], std::min(kLanes, columns - v * kLanes));
  }

  // Adds all columns to fp32 sums, rows `stride` numbers apart.
  void AddTo(float* sums_before, int64_t stride) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        float* at = sums_before + r * stride + v * kLanes;
        Store(at, Add(Load(at), sums[r][v]), kLanes);
      }
  }

  // All columns of row r, to where(r).
  template <class Where>
  void WriteEach(Where where) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      auto* out = where(r);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) Store(out + v * kLanes, sums[r][v], kLanes);
    }
  }
};

// Calls work(tile, first row) for all of `rows`, in tiles. A row's result doesn't depend on the tile that it is in.
template <int kVectors = locojax::kVectors, class Work>
void EachTile(int64_t rows, Work work) {
  int64_t row = 0;
  for (; row + kTileRows <= rows; row += kTileRows) {
    Tile<kTileRows, kVectors> tile;
    work(tile, row);
  }
  const auto rest = [&](auto tile) { work(tile, row); };
  switch (rows - row) {
    case 1: return rest(Tile<1, kVectors>());
    case 2: return rest(Tile<2, kVectors>());
    case 3: return rest(Tile<3, kVectors>());
    case 4: return rest(Tile<4, kVectors>());
    case 5: return rest(Tile<5, kVectors>());
  }
}

// Calls work(constant) with the number of lanes' vectors that a panel of `width` columns has, to be used as EachTile's.
template <class Work>
void WithVectors(int64_t width, Work work) {
  switch (width / kLanes) {
    case 1: return work(std::integral_constant<int, 1>());
    case 2: return work(std::integral_constant<int, 2>());
    case 3: return work(std::integral_constant<int, 3>());
    case 4: return work(std::integral_constant<int, 4>());
  }
}

}  // namespace locojax
