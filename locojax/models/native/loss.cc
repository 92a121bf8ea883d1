// Log-probs of given tokens under a packed head with a low-rank part, and their gradient; logits are never stored.
//
// logits [M, V] = x [M, D] @ w [D, V] + inner [M, r] @ b [r, V], summed in fp32. A block of columns is made, used and
// forgotten, in the backward pass once more. Only the first `count` rows are worked on; what is returned of others is 0.
#include <vector>

#include "adapters.h"

namespace ffi = xla::ffi;

namespace locojax {
namespace {

constexpr int64_t kPieces = 8;
constexpr char kMisfit[] = "a loss's shapes don't fit: expected x [M, D], inner [M, r], w [V / 64, D / 2, 64, 2], b [r, V]";

// What both directions read. Even r.
struct Given {
  const bf16 *x, *inner, *w, *b;
  int64_t M, D, r, V, count;

  Given(Bf16& x, Bf16& inner, Bf16& w, Bf16& b, Ints& count)
      : x(static_cast<const bf16*>(x.untyped_data())), inner(static_cast<const bf16*>(inner.untyped_data())),
        w(static_cast<const bf16*>(w.untyped_data())), b(static_cast<const bf16*>(b.untyped_data())),
        M(x.dimensions()[0]), D(x.dimensions()[1]), r(inner.dimensions()[1]), V(b.dimensions()[1]),
        count(std::clamp<int64_t>(*static_cast<const int32_t*>(count.untyped_data()), 0, M)) {}

  static bool Fit(Bf16& x, Bf16& inner, Bf16& w, Bf16& b) {
    const auto of_x = x.dimensions(), of_inner = inner.dimensions(), of_w = w.dimensions(), of_b = b.dimensions();
    return of_x.size() == 2 && of_inner.size() == 2 && of_w.size() == 4 && of_b.size() == 2 && of_inner[0] == of_x[0] &&
           of_w[1] * 2 == of_x[1] && of_w[2] == kPanel && of_b[0] == of_inner[1] && of_b[0] % 2 == 0 &&
           of_b[1] == of_w[0] * kPanel;
  }

  // logits[i][c] of rows from.. and columns `column`.., rows kLogitColumns apart.
  void Logits(int64_t from, int64_t rows, int64_t column, int64_t columns, Scratch<bf16>& scratch, float* out) const {
    bf16* of_b = scratch.At(r * kPanel);
    for (int64_t c = 0; c < columns; c += kPanel) {
      PackPanel(b + column + c, V, r, kPanel, of_b);
      EachTile(rows, [&](auto& tile, int64_t i) {
        tile.Multiply(x + (from + i) * D, D, w + (column + c) * D, D / 2);
        tile.Multiply(inner + (from + i) * r, r, of_b, r / 2);
        tile.Write(out + i * kLogitColumns + c, kLogitColumns, kPanel);
      });
    }
  }
};

// The target's logit and the logits' log-sum of exponentials, of each row.
ffi::Error LossForward(ffi::ThreadPool pool, Bf16 x, Bf16 inner, Bf16 w, Bf16 b, Ints targets, Ints count,
                       FloatsOut picked, FloatsOut log_norm) {
  if (!Given::Fit(x, inner, w, b) || targets.element_count() != size_t(x.dimensions()[0]))
    return ffi::Error::InvalidArgument(kMisfit);
  const Given given(x, inner, w, b, count);
  const auto* target = static_cast<const int32_t*>(targets.untyped_data());
  auto *to_picked = static_cast<float*>(picked->untyped_data()), *to_norm = static_cast<float*>(log_norm->untyped_data());
  std::fill_n(to_picked, given.M, 0.0f);
  std::fill_n(to_norm, given.M, 0.0f);
  // An even number of pieces, all but equal: of three, two threads would do one each, and one of them the last.
  const int64_t pieces = (given.count + 2 * kLogitRows - 1) / (2 * kLogitRows) * 2;
  const int64_t most = pieces ? (given.count + pieces * kTileRows - 1) / (pieces * kTileRows) * kTileRows : 0;
  ForEach(pool, pieces, [&](int64_t piece) {
    const int64_t from = std::min(piece * most, given.count), rows = std::min(most, given.count - from);
    Scratch<bf16> of_b;
    std::vector<float> logits(kLogitRows * kLogitColumns), top(rows, -INFINITY), total(rows, 0.0f);
    for (int64_t column = 0; column < given.V; column += kLogitColumns) {
      const int64_t columns = std::min(kLogitColumns, given.V - column);
      given.Logits(from, rows, column, columns, of_b, logits.data());
      for (int64_t i = 0; i < rows; ++i) {
        const float* own = &logits[i * kLogitColumns];
        F32 most = Fill(top[i]), wrong = Zero();
        for (int64_t c = 0; c < columns; c += kLanes) {
          most = Max(most, Load(own + c));
          wrong = Fma(Load(own + c), Zero(), wrong);  // what isn't finite must not get lost in a maximum
        }
        const float largest = Largest(most);
        F32 sum = wrong;
        for (int64_t c = 0; c < columns; c += kLanes) sum = Add(sum, Exp(Sub(Load(own + c), Fill(largest))));
        total[i] = total[i] * std::exp(top[i] - largest) + Sum(sum);
        top[i] = largest;
        const int64_t at = target[from + i] - column;
        if (at >= 0 && at < columns) to_picked[from + i] = own[at];
      }
    }
    for (int64_t i = 0; i < rows; ++i) to_norm[from + i] = top[i] + std::log(total[i]);
  });
  return ffi::Error::Success();
}

// What reaches x, inner and b of a cotangent g [M] of the log-probs.
//
// Pieces have a part of the vocabulary each, and sums over it of their own for x and inner; those are added at the end,
// in order. w_t and b_t are the transposes: w_t packed, b_t [V, r].
ffi::Error LossBackward(ffi::ThreadPool pool, Bf16 x, Bf16 inner, Bf16 w, Bf16 b, Bf16 w_t, Bf16 b_t, Ints targets,
                        Floats log_norm, Floats g, Ints count, FloatsOut d_x, FloatsOut d_inner, FloatsOut d_b) {
  const auto of_t = w_t.dimensions(), of_b_t = b_t.dimensions();
  if (!Given::Fit(x, inner, w, b) || of_t.size() != 4 || of_b_t.size() != 2 || of_t[1] * 2 != b.dimensions()[1] ||
      (x.dimensions()[1] + kPanel - 1) / kPanel != of_t[0] || of_b_t[0] != b.dimensions()[1] || of_b_t[1] > kPanel)
    return ffi::Error::InvalidArgument(kMisfit);
  const Given given(x, inner, w, b, count);
  const int64_t M = given.M, D = given.D, r = given.r, V = given.V, wide = of_t[0] * kPanel;
  const auto* target = static_cast<const int32_t*>(targets.untyped_data());
  const auto* norm = static_cast<const float*>(log_norm.untyped_data());
  const auto* cotangent = static_cast<const float*>(g.untyped_data());
  const auto* down = static_cast<const bf16*>(w_t.untyped_data());
  const auto* b_down = static_cast<const bf16*>(b_t.untyped_data());
  auto *to_x = static_cast<float*>(d_x->untyped_data()), *to_inner = static_cast<float*>(d_inner->untyped_data()),
       *to_b = static_cast<float*>(d_b->untyped_data());
  std::vector<bf16> inner_t(r * (M + 1));  // [r, M], for the sums over rows; M may be odd
  const int64_t even = given.count + given.count % 2;
  for (int64_t i = 0; i < given.count; ++i)
    for (int64_t j = 0; j < r; ++j) inner_t[j * even + i] = given.inner[i * r + j];

  const int64_t blocks = (V + kLogitColumns - 1) / kLogitColumns, pieces = std::min(blocks, kPieces);
  const int64_t own_size = given.count * (wide + kPanel);
  std::vector<float> sums(pieces * own_size, 0.0f);
  ForEach(pool, pieces, [&](int64_t piece) {
    float *own_x = &sums[piece * own_size], *own_inner = own_x + given.count * wide;
    Scratch<bf16> of_b;
    std::vector<float> logits(kLogitRows * kLogitColumns), of_d_b(r * kLogitColumns);
    std::vector<bf16> d(kLogitRows * kLogitColumns), panel(kLogitColumns * kPanel);
    for (int64_t block = blocks * piece / pieces; block < blocks * (piece + 1) / pieces; ++block) {
      const int64_t column = block * kLogitColumns, columns = std::min(kLogitColumns, V - column);
      std::fill(of_d_b.begin(), of_d_b.end(), 0.0f);
      for (int64_t from = 0; from < given.count; from += kLogitRows) {
        const int64_t rows = std::min(kLogitRows, given.count - from);
        given.Logits(from, rows, column, columns, of_b, logits.data());
        for (int64_t i = 0; i < rows; ++i) {
          const F32 by = Fill(-cotangent[from + i]), most = Fill(norm[from + i]);
          float* own = &logits[i * kLogitColumns];
          const int64_t at = target[from + i] - column;
          // 1 - p before rounding: in bf16 a p near 1 is 1.
          const float of_target = at >= 0 && at < columns ? -std::expm1(own[at] - norm[from + i]) : 0.0f;
          for (int64_t c = 0; c < columns; c += kLanes)
            Store(&d[i * kLogitColumns + c], Mul(by, Exp(Sub(Load(own + c), most))), kLanes);
          if (at >= 0 && at < columns) {
            float exact[kLanes] = {of_target * cotangent[from + i]};
            Store(&d[i * kLogitColumns + at], Load(exact), 1);
          }
        }
        if (rows % 2) std::fill_n(&d[rows * kLogitColumns], kLogitColumns, bf16(0));
        for (int64_t p = 0; p < of_t[0]; ++p)
          EachTile(rows, [&](auto& tile, int64_t i) {
            tile.Multiply(&d[i * kLogitColumns], kLogitColumns, down + (p * V + column) * kPanel, columns / 2);
            tile.AddTo(own_x + (from + i) * wide + p * kPanel, wide);
          });
        std::fill(panel.begin(), panel.end(), bf16(0));
        PackPanel(b_down + column * r, r, columns, r, panel.data());
        EachTile(rows, [&](auto& tile, int64_t i) {
          tile.Multiply(&d[i * kLogitColumns], kLogitColumns, panel.data(), columns / 2);
          tile.AddTo(own_inner + (from + i) * kPanel, kPanel);
        });
        for (int64_t c = 0; c < columns; c += kPanel) {
          PackPanel(&d[c], kLogitColumns, rows + rows % 2, kPanel, panel.data());
          EachTile(r, [&](auto& tile, int64_t j) {
            tile.Multiply(&inner_t[j * even + from], even, panel.data(), (rows + 1) / 2);
            tile.AddTo(&of_d_b[j * kLogitColumns + c], kLogitColumns);
          });
        }
      }
      for (int64_t j = 0; j < r; ++j) std::copy_n(&of_d_b[j * kLogitColumns], columns, to_b + j * V + column);
    }
  });
  std::fill_n(to_x, M * D, 0.0f);
  std::fill_n(to_inner, M * r, 0.0f);
  ForEach(pool, std::min(given.count, kPieces), [&](int64_t piece) {
    const int64_t parts = std::min(given.count, kPieces);
    for (int64_t i = given.count * piece / parts; i < given.count * (piece + 1) / parts; ++i)
      for (int64_t from = 0; from < pieces; ++from) {
        const float *own_x = &sums[from * own_size], *own_inner = own_x + given.count * wide;
        for (int64_t c = 0; c < D; ++c) to_x[i * D + c] += own_x[i * wide + c];
        for (int64_t c = 0; c < r; ++c) to_inner[i * r + c] += own_inner[i * kPanel + c];
      }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace locojax

XLA_FFI_DEFINE_HANDLER_SYMBOL(locojax_loss_forward, locojax::LossForward,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<locojax::Bf16>().Arg<locojax::Bf16>()
                                  .Arg<locojax::Bf16>().Arg<locojax::Bf16>().Arg<locojax::Ints>()
                                  .Arg<locojax::Ints>().Ret<locojax::Floats>().Ret<locojax::Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(locojax_loss_backward, locojax::LossBackward,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<locojax::Bf16>().Arg<locojax::Bf16>()
                                  .Arg<locojax::Bf16>().Arg<locojax::Bf16>().Arg<locojax::Bf16>()
                                  .Arg<locojax::Bf16>().Arg<locojax::Ints>().Arg<locojax::Floats>()
                                  .Arg<locojax::Floats>().Arg<locojax::Ints>().Ret<locojax::Floats>()
                                  .Ret<locojax::Floats>().Ret<locojax::Floats>());
