// Rows of x by the adapter that each uses, and what an adapter's first factor makes of them.
#pragma once

#include <cstdint>
#include <vector>

#include "parallel.h"
#include "tile.h"

namespace locojax {

// Numbers [rows, columns], rows `stride` apart -> columns `at`.. of a panel. A last row without a twin gets a zero one.
inline void PackPanel(const bf16* from, int64_t stride, int64_t rows, int64_t columns, bf16* panel, int64_t at = 0) {
  if (columns % kLanes == 0 && rows % 2 == 0) {
    for (int64_t k = 0; k < rows; k += 2)
      for (int64_t c = 0; c < columns; c += kLanes)
        StoreInTurns(panel + (k / 2 * kPanel + at + c) * 2, from + k * stride + c, from + (k + 1) * stride + c);
    return;
  }
  for (int64_t k = 0; k < rows + rows % 2; ++k)
    for (int64_t c = 0; c < columns; ++c)
      panel[(k / 2 * kPanel + at + c) * 2 + k % 2] = k < rows ? from[k * stride + c] : 0;
}

// The factors of one module's adapters, packed: [n, A, K / 2, W, 2], A panels of W columns, and [n, F / 64, r / 2, 64,
// 2]; or, in training's kernels, as they are: [n, K, r] and [n, r, F].
struct Module {
  const bf16 *a, *b;
  int64_t F;
};

// scale * a tile's sums, of its first `width` columns, to bf16 rows `stride` apart.
template <class Sums>
void WriteScaled(const Sums& tile, float scale, bf16* to, int64_t stride, int64_t width) {
  float sums[kTileRows * kPanel];
  tile.Write(sums, tile.kWidth, tile.kWidth);
  for (int64_t i = 0; i < tile.kCount; ++i)
    for (int64_t c = 0; c < width; c += kLanes)
      Store(to + i * stride + c, Mul(Load(sums + i * tile.kWidth + c), Fill(scale)),
            int(std::min<int64_t>(kLanes, width - c)));
}

// The rows that one adapter, or none, is for: where they are in the order by adapter.
struct Group {
  int64_t adapter, from, count;  // adapter < 0: none
};

// How an adapter's first factors are packed: r columns, r even, in panels of `width`.
struct Inner {
  int64_t r, width;

  // Whether [panels, K / 2, width, 2] is so packed.
  bool Fits(int64_t panels) const {
    return width > 0 && width <= kPanel && width % kLanes == 0 && r % 2 == 0 && panels == num_panels();
  }
  int64_t num_panels() const { return (r + width - 1) / width; }
  int64_t size(int64_t K) const { return num_panels() * K * width; }
};

// x [M, K], its rows in the order of their adapters, and scale * x @ a of each module.
class ByAdapter {
 public:
  ByAdapter(xla::ffi::ThreadPool& pool, const bf16* x, int64_t M, int64_t K, const int32_t* which, const float* scales,
            int64_t num_adapters, Inner inner, std::vector<Module> modules)
      : K(K), inner(inner), modules(std::move(modules)), order(M), pool_(pool), scales_(scales), x_(x) {
    const auto of = [=](int64_t row) { return std::clamp<int64_t>(which[row], -1, num_adapters - 1); };
    int64_t at = 0;
    for (int64_t n = -1; n < num_adapters; ++n) {
      const int64_t from = at;
      for (int64_t row = 0; row < M; ++row)
        if (of(row) == n) order[at++] = row;
      if (at > from) groups.push_back({n, from, at - from});
    }
    if (groups.size() > 1) {
      own_.resize(M * K);
      for (int64_t i = 0; i < M; ++i) std::copy_n(x + order[i] * K, K, &own_[i * K]);
      x_ = own_.data();
    }
    inner_.resize(M * stride());
    for (const Group& group : groups)
      for (int64_t from = 0; group.adapter >= 0 && from < group.count; from += kRowsAlone)
        for (int64_t module = 0; module < int64_t(this->modules.size()); ++module)
          inner_pieces_.push_back(
              {{group.adapter, group.from + from, std::min(kRowsAlone, group.count - from)}, module});
  }

  // Calls piece(0) .. piece(count - 1), which may call Multiply. What adapters make of x is found beside them: a piece
  // doesn't wait for it before it has done its first product with w. To be called once.
  template <class Piece>
  void ForEach(int64_t count, Piece piece) {
    const int64_t before = int64_t(inner_pieces_.size());
    locojax::ForEach(pool_, before + count, [&](int64_t i) {
      if (i >= before) return piece(i - before);
      const auto& [rows, module] = inner_pieces_[i];
      WithVectors(inner.width, [&, &rows = rows, module = module](auto vectors) { FillInner<vectors>(rows, module); });
      inner_done_.fetch_add(1, std::memory_order_release);
    });
  }

  // Rows of a group times one panel of w, and what its adapter adds to these columns of a module: write(tile, row).
  template <class Write>
  void Multiply(const Group& group, const bf16* panel, int64_t module, int64_t column, Write write) const {
    // A wait between a tile's two products would cost all tiles their registers: many rows wait before the first.
    if (group.adapter >= 0 && group.count <= kTileRows && !InnerIsDone()) {
      MultiplyOnce<true>(group, panel, module, column, write);
    } else {
      if (group.adapter >= 0) AwaitInner();
      MultiplyOnce<false>(group, panel, module, column, write);
    }
  }

  const int64_t K;
  const Inner inner;
  const std::vector<Module> modules;
  std::vector<int64_t> order;  // the row of x that is i-th
  std::vector<Group> groups;

 private:
  static constexpr int64_t kRowsAlone = 48;

  struct InnerPiece {
    Group rows;
    int64_t module;
  };

  int64_t stride() const { return int64_t(modules.size()) * inner.r; }

  template <bool kWaits, class Write>
  void MultiplyOnce(const Group& group, const bf16* panel, int64_t module, int64_t column, Write write) const {
    const auto& [a, b, F] = modules[module];
    const int64_t r = inner.r;
    const bf16* of_b = b + group.adapter * r * F + column * r;  // read only where there is an adapter
    EachTile(group.count, [&](auto& tile, int64_t i) {
      const int64_t row = group.from + i;
      tile.Multiply(x_ + row * K, K, panel, K / 2);
      if (kWaits) AwaitInner();
      if (group.adapter >= 0) tile.Multiply(&inner_[row * stride() + module * r], stride(), of_b, r / 2);
      write(tile, row);
    });
  }

  bool InnerIsDone() const { return inner_done_.load(std::memory_order_acquire) == int64_t(inner_pieces_.size()); }

  // Pieces are begun in their order, so some thread is at work on whatever isn't done.
  void AwaitInner() const {
    SpinUntil([this] { return InnerIsDone(); });
  }

  template <int kVectors>
  void FillInner(const Group& group, int64_t module) {
    const bf16* of_a = modules[module].a + group.adapter * inner.size(K);
    for (int64_t from = 0; from < inner.r; from += inner.width, of_a += K * inner.width)
      EachTile<kVectors>(group.count, [&](auto& tile, int64_t i) {
        tile.Multiply(x_ + (group.from + i) * K, K, of_a, K / 2);
        WriteScaled(tile, scales_[group.adapter], &inner_[(group.from + i) * stride() + module * inner.r + from], stride(),
                    std::min(inner.width, inner.r - from));
      });
  }

  xla::ffi::ThreadPool& pool_;
  const float* scales_;
  const bf16* x_;
  std::vector<bf16> own_, inner_;
  std::vector<InnerPiece> inner_pieces_;
  std::atomic<int64_t> inner_done_{0};
};

}  // namespace locojax
