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

// The first factors of one module's adapters, [n, K, r], and the second, packed, [n, F / 64, r / 2, 64, 2]; or, in
// training's kernels, [n, r, F].
struct Module {
  const bf16 *a, *b;
  int64_t F;
};

// Of columns from.. of activations that lie side by side, r of each module, calls with(module, first of its columns, how
// many, where after `from`).
template <class With>
void EachModule(int64_t r, int64_t from, int64_t width, With with) {
  for (int64_t at = 0; at < width;) {
    const int64_t column = from + at, some = std::min(r - column % r, width - at);
    with(column / r, column % r, some, at);
    at += some;
  }
}

// scale * a tile's sums, of its first `width` columns, to bf16 rows `stride` apart.
template <class Sums>
void WriteScaled(const Sums& tile, float scale, bf16* to, int64_t stride, int64_t width) {
  float sums[kTileRows * kPanel];
  tile.Write(sums, kPanel, kPanel);
  for (int64_t i = 0; i < tile.kCount; ++i)
    for (int64_t c = 0; c < width; c += kLanes)
      Store(to + i * stride + c, Mul(Load(sums + i * kPanel + c), Fill(scale)), int(std::min<int64_t>(kLanes, width - c)));
}

// The rows that one adapter, or none, is for: where they are in the order by adapter.
struct Group {
  int64_t adapter, from, count;  // adapter < 0: none
};

// x [M, K], its rows in the order of their adapters, and scale * x @ a of each module; even r.
class ByAdapter {
 public:
  ByAdapter(xla::ffi::ThreadPool& pool, const bf16* x, int64_t M, int64_t K, const int32_t* which, const float* scales,
            int64_t num_adapters, int64_t r, std::vector<Module> modules)
      : K(K), r(r), modules(std::move(modules)), order(M), x_(x) {
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
    const int64_t panels = (stride() + kPanel - 1) / kPanel;
    struct Piece {
      Group rows;
      int64_t panel;
    };
    std::vector<Piece> pieces;
    for (const Group& group : groups)
      for (int64_t from = 0; group.adapter >= 0 && from < group.count; from += kRowsAlone)
        for (int64_t panel = 0; panel < panels; ++panel)
          pieces.push_back({{group.adapter, group.from + from, std::min(kRowsAlone, group.count - from)}, panel});
    ForEach(pool, int64_t(pieces.size()), [&](int64_t i) {
      FillInner(pieces[i].rows, pieces[i].panel, scales[pieces[i].rows.adapter]);
    });
  }

  // Rows of a group times one panel of w, and what its adapter adds to these columns of a module: write(tile, row).
  template <class Write>
  void Multiply(const Group& group, const bf16* panel, int64_t module, int64_t column, Write write) const {
    const auto& [a, b, F] = modules[module];
    const bf16* of_b = b + group.adapter * r * F + column * r;  // read only where there is an adapter
    EachTile(group.count, [&](auto& tile, int64_t i) {
      const int64_t row = group.from + i;
      tile.Multiply(x_ + row * K, K, panel, K / 2);
      if (group.adapter >= 0) tile.Multiply(&inner_[row * stride() + module * r], stride(), of_b, r / 2);
      write(tile, row);
    });
  }

  const int64_t K, r;
  const std::vector<Module> modules;
  std::vector<int64_t> order;  // the row of x that is i-th
  std::vector<Group> groups;

 private:
  static constexpr int64_t kRowsAlone = 48;

  int64_t stride() const { return int64_t(modules.size()) * r; }

  // The inner columns of one panel: those of all modules lie side by side.
  void FillInner(const Group& group, int64_t panel, float scale) {
    Scratch<bf16> scratch;
    bf16* of_a = scratch.At(K * kPanel);  // its columns beyond the width are multiplied and thrown away
    const int64_t width = std::min<int64_t>(kPanel, stride() - panel * kPanel);
    EachModule(r, panel * kPanel, width, [&](int64_t module, int64_t column, int64_t some, int64_t at) {
      PackPanel(modules[module].a + group.adapter * K * r + column, r, K, some, of_a, at);
    });
    EachTile(group.count, [&](auto& tile, int64_t i) {
      tile.Multiply(x_ + (group.from + i) * K, K, of_a, K / 2);
      WriteScaled(tile, scale, &inner_[(group.from + i) * stride() + panel * kPanel], stride(), width);
    });
  }

  const bf16* x_;
  std::vector<bf16> own_, inner_;
};

}  // namespace locojax
