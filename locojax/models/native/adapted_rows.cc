// Training's linear layers: x @ w + scale * (x @ a) @ b for rows of tokens that each have adapters of their own, and
// their gradient.
//
// x is [R, T, K], and w's N columns may be those of several modules that read the same x, one after another: of each, a
// [R, K, r] and b [R, r, F], F whole panels. A row reads nothing of another row, in both directions. Of each row only the
// first `lengths` tokens are worked on; what is returned of others is 0.
#include <vector>

#include "adapters.h"

namespace ffi = xla::ffi;

namespace locojax {
namespace {

constexpr int64_t kBlockRows = 192;  // tokens that a panel of w is read for before the next one
constexpr int64_t kFewRows = 96;     // tokens of a piece where all columns are few
constexpr int64_t kPieces = 8;
constexpr char kMisfit[] = "a product's shapes don't fit: expected x [R, T, K], w [N / 64, K / 2, 64, 2], scale and "
                           "lengths [R], and of each module a [R, K, r] and b [R, r, F], r even, F a multiple of 64 and N "
                           "their sum";

struct Tokens {
  int64_t row, from, count;  // from: in all rows' tokens
};

// What both directions read. Of module i: its factors, and the first of its F columns.
struct Layer {
  int64_t R, T, K, N, r = 0, wide = 0;  // wide: of all modules' inner activations
  const float* scale;
  std::vector<int64_t> lengths;
  std::vector<Module> modules;
  std::vector<int64_t> first;

  bool Read(const ffi::RemainingArgs& factors, Floats& scales, Ints& counts, int64_t rows, int64_t tokens, int64_t in,
            int64_t out) {
    R = rows, T = tokens, K = in, N = out;
    if (scales.element_count() != size_t(R) || counts.element_count() != size_t(R)) return false;
    scale = static_cast<const float*>(scales.untyped_data());
    for (int64_t row = 0; row < R; ++row)
      lengths.push_back(std::clamp<int64_t>(static_cast<const int32_t*>(counts.untyped_data())[row], 0, T));
    int64_t columns = 0;
    for (size_t i = 0; i + 1 < factors.size(); i += 2) {
      auto a = factors.get<Bf16>(i), b = factors.get<Bf16>(i + 1);
      if (!a.has_value() || !b.has_value()) return false;
      const auto of_a = a->dimensions(), of_b = b->dimensions();
      if (of_a.size() != 3 || of_b.size() != 3 || of_a[0] != R || of_b[0] != R || of_a[1] != K || of_a[2] != of_b[1] ||
          (r && of_b[1] != r) || of_b[1] % 2 || of_b[2] % kPanel)
        return false;
      r = of_b[1];
      modules.push_back({static_cast<const bf16*>(a->untyped_data()), static_cast<const bf16*>(b->untyped_data()), of_b[2]});
      first.push_back(columns);
      columns += of_b[2];
    }
    wide = int64_t(modules.size()) * r;
    return r > 0 && columns == N && K % 2 == 0;
  }

  // The tokens that count in blocks of at most `size`, none of two rows.
  std::vector<Tokens> Blocks(int64_t size) const {
    std::vector<Tokens> blocks;
    for (int64_t row = 0; row < R; ++row)
      for (int64_t from = 0; from < lengths[row]; from += size)
        blocks.push_back({row, row * T + from, std::min(size, lengths[row] - from)});
    return blocks;
  }

  // 0 for the other tokens of an array [R, T, width].
  void Clear(bf16* array, int64_t width) const {
    for (int64_t row = 0; row < R; ++row)
      std::fill_n(array + (row * T + lengths[row]) * width, (T - lengths[row]) * width, bf16(0));
  }

  int64_t ModuleOf(int64_t column) const {
    return std::upper_bound(first.begin(), first.end(), column) - first.begin() - 1;
  }
};

// Numbers [columns, 2 pairs], rows `stride` apart -> columns `at`.. of a panel: their transpose's.
void PackTransposed(const bf16* from, int64_t stride, int64_t columns, int64_t pairs, bf16* panel, int64_t at) {
  for (int64_t k = 0; k < pairs; ++k)
    for (int64_t c = 0; c < columns; ++c)
      std::memcpy(panel + (k * kPanel + at + c) * 2, from + c * stride + 2 * k, 2 * sizeof(bf16));
}

// Numbers [rows, columns], rows `stride` apart -> [columns, rows], columns `even` apart, a last row's twin 0.
void Transpose(const bf16* from, int64_t stride, int64_t rows, int64_t columns, bf16* to, int64_t even) {
  constexpr int64_t kSquare = 32;
  for (int64_t row = 0; row < rows; row += kSquare)
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t i = row; i < std::min(row + kSquare, rows); ++i) to[c * even + i] = from[i * stride + c];
  for (int64_t c = 0; rows % 2 && c < columns; ++c) to[c * even + rows] = 0;
}

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

ffi::Error AdaptedRows(ffi::ThreadPool pool, Bf16 x, Bf16 w, Floats scale, Ints lengths, ffi::RemainingArgs factors,
                       ffi::ResultBuffer<ffi::BF16> out, ffi::ResultBuffer<ffi::BF16> inner) {
  const auto of_x = x.dimensions(), of_w = w.dimensions();
  Layer layer;
  if (of_x.size() != 3 || of_w.size() != 4 || of_w[1] * 2 != of_x[2] || of_w[2] != kPanel ||
      !layer.Read(factors, scale, lengths, of_x[0], of_x[1], of_x[2], of_w[0] * kPanel) ||
      out->element_count() != size_t(layer.R * layer.T * layer.N) ||
      inner->element_count() != size_t(layer.R * layer.T * layer.wide))
    return ffi::Error::InvalidArgument(kMisfit);
  const int64_t K = layer.K, N = layer.N, wide = layer.wide, r = layer.r;
  const auto *from = static_cast<const bf16*>(x.untyped_data()), *panels = static_cast<const bf16*>(w.untyped_data());
  auto *to = static_cast<bf16*>(out->untyped_data()), *to_inner = static_cast<bf16*>(inner->untyped_data());
  layer.Clear(to, N);
  layer.Clear(to_inner, wide);

  const auto few = layer.Blocks(kFewRows);
  const int64_t inner_panels = (wide + kPanel - 1) / kPanel;
  ForEach(pool, int64_t(few.size()) * inner_panels, [&](int64_t piece) {
    const Tokens& block = few[piece / inner_panels];
    const int64_t panel = piece % inner_panels;
    Scratch<bf16> memory;
    bf16* of_a = memory.At(K * kPanel);
    const int64_t width = std::min<int64_t>(kPanel, wide - panel * kPanel);
    EachModule(r, panel * kPanel, width, [&](int64_t module, int64_t column, int64_t some, int64_t at) {
      PackPanel(layer.modules[module].a + block.row * K * r + column, r, K, some, of_a, at);
    });
    EachTile(block.count, [&](auto& tile, int64_t i) {
      tile.Multiply(from + (block.from + i) * K, K, of_a, K / 2);
      WriteScaled(tile, layer.scale[block.row], to_inner + (block.from + i) * wide + panel * kPanel, wide, width);
    });
  });

  const auto blocks = layer.Blocks(kBlockRows);
  const int64_t num_panels = N / kPanel, parts = std::min(num_panels, kPieces);
  ForEach(pool, int64_t(blocks.size()) * parts, [&](int64_t piece) {
    const Tokens& block = blocks[piece / parts];
    const int64_t part = piece % parts;
    Scratch<bf16> memory;
    bf16* of_b = memory.At(r * kPanel);
    for (int64_t p = num_panels * part / parts; p < num_panels * (part + 1) / parts; ++p) {
      const int64_t i = layer.ModuleOf(p * kPanel);
      const Module& module = layer.modules[i];
      PackPanel(module.b + block.row * r * module.F + p * kPanel - layer.first[i], module.F, r, kPanel, of_b);
      EachTile(block.count, [&](auto& tile, int64_t row) {
        tile.Multiply(from + (block.from + row) * K, K, panels + p * K * kPanel, K / 2);
        tile.Multiply(to_inner + (block.from + row) * wide + i * r, wide, of_b, r / 2);
        tile.Write(to + (block.from + row) * N + p * kPanel, N, kPanel);
      });
    }
  });
  return ffi::Error::Success();
}

// Of a cotangent g [R, T, N] of the product: what reaches x, and each module's a and b. w_t: w transposed, packed.
class Backward {
 public:
  Backward(const Layer& layer, const bf16* g, const bf16* x, const bf16* inner, const bf16* w_t)
      : layer_(layer), g_(g), x_(x), inner_(inner), w_t_(w_t), even_(layer.T + layer.T % 2),
        d_inner_(layer.R * layer.T * layer.wide), inner_t_(layer.R * layer.wide * even_), d_inner_t_(inner_t_.size()) {}

  void ToInner(ffi::ThreadPool& pool) {
    const int64_t r = layer_.r, N = layer_.N, wide = layer_.wide, panels = (r + kPanel - 1) / kPanel;
    std::vector<bf16> of_b(layer_.R * N * panels * kPanel);  // b transposed: of each row, module and panel of r
    const int64_t modules = int64_t(layer_.modules.size());
    ForEach(pool, layer_.R * modules, [&](int64_t piece) {
      const int64_t row = piece / modules, i = piece % modules;
      const Module& module = layer_.modules[i];
      for (int64_t panel = 0; panel < panels; ++panel)
        PackTransposed(module.b + (row * r + panel * kPanel) * module.F, module.F, std::min<int64_t>(kPanel, r - panel * kPanel),
                       module.F / 2, &of_b[((row * panels + panel) * N + layer_.first[i]) * kPanel], 0);
    });
    const auto few = layer_.Blocks(kFewRows);
    ForEach(pool, int64_t(few.size()) * modules, [&](int64_t piece) {
      const Tokens& block = few[piece / modules];
      const int64_t i = piece % modules;
      for (int64_t panel = 0; panel < panels; ++panel)
        EachTile(block.count, [&](auto& tile, int64_t t) {
          tile.Multiply(g_ + (block.from + t) * N + layer_.first[i], N,
                        &of_b[((block.row * panels + panel) * N + layer_.first[i]) * kPanel], layer_.modules[i].F / 2);
          WriteScaled(tile, layer_.scale[block.row], &d_inner_[(block.from + t) * wide + i * r + panel * kPanel], wide,
                      std::min<int64_t>(kPanel, r - panel * kPanel));
        });
    });
    ForEach(pool, layer_.R * 2, [&](int64_t piece) {
      const int64_t row = piece / 2;
      const bf16* from = piece % 2 ? d_inner_.data() : inner_;
      Transpose(from + row * layer_.T * wide, wide, layer_.lengths[row], wide,
                (piece % 2 ? d_inner_t_ : inner_t_).data() + row * wide * even_, even_);
    });
  }

  // The rest, which only reads what ToInner has made: pieces that may run at once.
  void ToAll(ffi::ThreadPool& pool, bf16* d_x, const std::vector<float*>& d_a, const std::vector<float*>& d_b) {
    layer_.Clear(d_x, layer_.K);
    const auto blocks = layer_.Blocks(kBlockRows);
    const int64_t panels = (layer_.K + kPanel - 1) / kPanel, parts = std::min(panels, kPieces);
    const int64_t of_x = int64_t(blocks.size()) * parts, of_b = layer_.R * layer_.N / kPanel, of_a = layer_.R * panels;
    ForEach(pool, of_x + of_b + of_a, [&](int64_t piece) {
      if (piece < of_x) {
        for (int64_t p = panels * (piece % parts) / parts; p < panels * (piece % parts + 1) / parts; ++p)
          ToX(blocks[piece / parts], p, d_x);
      } else if (piece < of_x + of_b) {
        ToB((piece - of_x) * kPanel / layer_.N, (piece - of_x) * kPanel % layer_.N, d_b);
      } else {
        ToA((piece - of_x - of_b) / panels, (piece - of_x - of_b) % panels, d_a);
      }
    });
  }

 private:
  void ToX(const Tokens& block, int64_t p, bf16* d_x) const {
    const int64_t K = layer_.K, r = layer_.r, wide = layer_.wide, width = std::min<int64_t>(kPanel, K - p * kPanel);
    Scratch<bf16> memory;
    bf16* of_a = memory.At(wide * kPanel);
    for (size_t i = 0; i < layer_.modules.size(); ++i)
      PackTransposed(layer_.modules[i].a + (block.row * K + p * kPanel) * r, r, width, r / 2, of_a + i * r * kPanel, 0);
    EachTile(block.count, [&](auto& tile, int64_t t) {
      tile.Multiply(g_ + (block.from + t) * layer_.N, layer_.N, w_t_ + p * layer_.N * kPanel, layer_.N / 2);
      tile.Multiply(&d_inner_[(block.from + t) * wide], wide, of_a, wide / 2);
      tile.Write(d_x + (block.from + t) * K + p * kPanel, K, int(width));
    });
  }

  void ToB(int64_t row, int64_t column, const std::vector<float*>& d_b) const {
    const int64_t i = layer_.ModuleOf(column), r = layer_.r, F = layer_.modules[i].F;
    Scratch<bf16> memory;
    bf16* panel = memory.At(even_ * kPanel);
    PackPanel(g_ + row * layer_.T * layer_.N + column, layer_.N, layer_.lengths[row], kPanel, panel);
    EachTile(r, [&](auto& tile, int64_t j) {
      tile.Multiply(&inner_t_[(row * layer_.wide + i * r + j) * even_], even_, panel, (layer_.lengths[row] + 1) / 2);
      tile.Write(d_b[i] + (row * r + j) * F + column - layer_.first[i], F, kPanel);
    });
  }

  void ToA(int64_t row, int64_t p, const std::vector<float*>& d_a) const {
    const int64_t K = layer_.K, r = layer_.r, width = std::min<int64_t>(kPanel, K - p * kPanel);
    Scratch<bf16> memory;
    bf16* panel = memory.At(even_ * kPanel);
    PackPanel(x_ + row * layer_.T * K + p * kPanel, K, layer_.lengths[row], width, panel);
    float found[kTileRows * kPanel];
    EachTile(layer_.wide, [&](auto& tile, int64_t j) {
      tile.Multiply(&d_inner_t_[(row * layer_.wide + j) * even_], even_, panel, (layer_.lengths[row] + 1) / 2);
      tile.Write(found, kPanel, kPanel);
      for (int64_t c = 0; c < width; ++c)
        for (int64_t n = j; n < j + tile.kCount; ++n)
          d_a[n / r][(row * K + p * kPanel + c) * r + n % r] = found[(n - j) * kPanel + c];
    });
  }

  const Layer& layer_;
  const bf16 *g_, *x_, *inner_, *w_t_;
  const int64_t even_;  // room for a row's tokens, which go in pairs
  std::vector<bf16> d_inner_, inner_t_, d_inner_t_;
};

ffi::Error AdaptedRowsBackward(ffi::ThreadPool pool, Bf16 g, Bf16 x, Bf16 inner, Bf16 w_t, Floats scale,
                               Ints lengths, ffi::RemainingArgs factors, ffi::RemainingRets results) {
  const auto of_x = x.dimensions(), of_g = g.dimensions(), of_t = w_t.dimensions();
  Layer layer;
  if (of_x.size() != 3 || of_g.size() != 3 || of_t.size() != 4 || of_t[1] * 2 != of_g[2] || of_t[2] != kPanel ||
      of_t[0] != (of_x[2] + kPanel - 1) / kPanel || of_g[0] != of_x[0] || of_g[1] != of_x[1] ||
      !layer.Read(factors, scale, lengths, of_x[0], of_x[1], of_x[2], of_g[2]) ||
      inner.element_count() != size_t(layer.R * layer.T * layer.wide) || results.size() != 1 + 2 * layer.modules.size())
    return ffi::Error::InvalidArgument(kMisfit);
  auto d_x = results.get<ffi::Buffer<ffi::BF16>>(0);
  std::vector<float*> d_a, d_b;
  for (size_t i = 0; i < layer.modules.size(); ++i) {
    auto of_a = results.get<ffi::Buffer<ffi::F32>>(1 + 2 * i), of_b = results.get<ffi::Buffer<ffi::F32>>(2 + 2 * i);
    if (!d_x.has_value() || !of_a.has_value() || !of_b.has_value() ||
        (*of_a)->element_count() != size_t(layer.R * layer.K * layer.r) ||
        (*of_b)->element_count() != size_t(layer.R * layer.r * layer.modules[i].F))
      return ffi::Error::InvalidArgument(kMisfit);
    d_a.push_back(static_cast<float*>((*of_a)->untyped_data()));
    d_b.push_back(static_cast<float*>((*of_b)->untyped_data()));
  }
  Backward backward(layer, static_cast<const bf16*>(g.untyped_data()), static_cast<const bf16*>(x.untyped_data()),
                    static_cast<const bf16*>(inner.untyped_data()), static_cast<const bf16*>(w_t.untyped_data()));
  backward.ToInner(pool);
  backward.ToAll(pool, static_cast<bf16*>((*d_x)->untyped_data()), d_a, d_b);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace locojax

XLA_FFI_DEFINE_HANDLER_SYMBOL(locojax_adapted_rows, locojax::AdaptedRows,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<locojax::Bf16>().Arg<locojax::Bf16>()
                                  .Arg<locojax::Floats>().Arg<locojax::Ints>().RemainingArgs()
                                  .Ret<locojax::Bf16>().Ret<locojax::Bf16>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(locojax_adapted_rows_backward, locojax::AdaptedRowsBackward,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<locojax::Bf16>().Arg<locojax::Bf16>()
                                  .Arg<locojax::Bf16>().Arg<locojax::Bf16>().Arg<locojax::Floats>()
                                  .Arg<locojax::Ints>().RemainingArgs().RemainingRets());
