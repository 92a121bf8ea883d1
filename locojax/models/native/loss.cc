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

  // Columns `column`.. of b as panels, which `Logits` reads.
  void PackB(int64_t column, int64_t columns, bf16* panels) const {
    for (int64_t c = 0; c < columns; c += kPanel) PackPanel(b + column + c, V, r, kPanel, panels + c * r);
  }

  // The same columns of b, transposed, as one panel [columns / 2, width, 2] of which the first r columns are written.
  void PackTransposed(int64_t column, int64_t columns, int64_t width, bf16* panel) const {
    for (int64_t j = 0; j < r; ++j)
      for (int64_t c = 0; c < columns; c += 2) std::copy_n(b + j * V + column + c, 2, panel + c * width + j * 2);
  }

  // logits[i][c] of rows from.. and columns `column`.., rows kLogitColumns apart.
  void Logits(int64_t from, int64_t rows, int64_t column, int64_t columns, const bf16* of_b, float* out) const {
    for (int64_t c = 0; c < columns; c += kPanel)
      EachTile(rows, [&](auto& tile, int64_t i) {
        tile.Multiply(x + (from + i) * D, D, w + (column + c) * D, D / 2);
        tile.Multiply(inner + (from + i) * r, r, of_b + c * r, r / 2);
        tile.Write(out + i * kLogitColumns + c, kLogitColumns, kPanel);
      });
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
    std::vector<bf16> of_b(given.r * kLogitColumns);
    std::vector<float> logits(kLogitRows * kLogitColumns), top(rows, -INFINITY), total(rows, 0.0f);
    for (int64_t column = 0; column < given.V; column += kLogitColumns) {
      const int64_t columns = std::min(kLogitColumns, given.V - column);
      given.PackB(column, columns, of_b.data());
      given.Logits(from, rows, column, columns, of_b.data(), logits.data());
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
// in order. w_t is w's transpose, packed.
class Backward {
 public:
  Backward(const Given& given, Bf16& w_t, Ints& targets, Floats& log_norm, Floats& g, FloatsOut& d_b)
      : given_(given), down_(static_cast<const bf16*>(w_t.untyped_data())), w_width_(w_t.dimensions()[2]),
        wide_(w_t.dimensions()[0] * w_width_), r_width_((given.r + kLanes - 1) / kLanes * kLanes),
        even_(given.count + given.count % 2), target_(static_cast<const int32_t*>(targets.untyped_data())),
        norm_(static_cast<const float*>(log_norm.untyped_data())), by_(static_cast<const float*>(g.untyped_data())),
        to_b_(static_cast<float*>(d_b->untyped_data())), inner_t_(given.r * even_) {
    for (int64_t i = 0; i < given.count; ++i)
      for (int64_t j = 0; j < given.r; ++j) inner_t_[j * even_ + i] = given.inner[i * given.r + j];
    const int64_t blocks = num_blocks(), pieces = std::min(blocks, kPieces);
    for (int64_t piece = 0; piece < pieces; ++piece)
      pieces_.push_back({blocks * piece / pieces, blocks * (piece + 1) / pieces, {}});
  }

  static bool Fit(const Given& given, Bf16& w_t) {
    const auto of_t = w_t.dimensions();
    return of_t.size() == 4 && of_t[1] * 2 == given.V && of_t[2] > 0 && of_t[2] <= kPanel && of_t[2] % kLanes == 0 &&
           of_t[0] == (given.D + of_t[2] - 1) / of_t[2] && given.r <= kPanel;
  }

  int64_t num_pieces() const { return int64_t(pieces_.size()); }

  // One part of the vocabulary: its share of what reaches x and inner, and all that reaches its columns of b.
  void Run(int64_t number) {
    Piece& piece = pieces_[number];
    piece.sums.resize(given_.count * (wide_ + r_width_));
    Memory memory(given_.r, r_width_);
    for (int64_t block = piece.first; block < piece.end; ++block) {
      const int64_t column = block * kLogitColumns, columns = std::min(kLogitColumns, given_.V - column);
      given_.PackB(column, columns, memory.of_b.data());
      given_.PackTransposed(column, columns, r_width_, memory.of_b_t.data());
      std::fill(memory.d_b.begin(), memory.d_b.end(), 0.0f);
      for (int64_t from = 0; from < given_.count; from += kLogitRows) {
        const int64_t rows = std::min(kLogitRows, given_.count - from);
        given_.Logits(from, rows, column, columns, memory.of_b.data(), memory.logits.data());
        Slopes(from, rows, column, columns, memory);
        ToXAndInner(piece, from, rows, column, columns, memory);
        ToB(from, rows, columns, memory);
      }
      for (int64_t j = 0; j < given_.r; ++j)
        std::copy_n(&memory.d_b[j * kLogitColumns], columns, to_b_ + j * given_.V + column);
    }
  }

  // Row i of what reaches x and inner, of all pieces.
  void Join(int64_t i, float* to_x, float* to_inner) const {
    for (const Piece& piece : pieces_) {
      const float *own_x = &piece.sums[i * wide_], *own_inner = &piece.sums[given_.count * wide_ + i * r_width_];
      for (int64_t c = 0; c < given_.D; ++c) to_x[c] += own_x[c];
      for (int64_t c = 0; c < given_.r; ++c) to_inner[c] += own_inner[c];
    }
  }

 private:
  // Blocks of the vocabulary from `first` on, and [count, wide] of x's sums, then [count, r_width] of inner's.
  struct Piece {
    int64_t first, end;
    std::vector<float> sums;
  };

  struct Memory {
    Memory(int64_t r, int64_t r_width)
        : logits(kLogitRows * kLogitColumns), d_b(r * kLogitColumns), d(kLogitRows * kLogitColumns),
          of_b(r * kLogitColumns), of_b_t(kLogitColumns * r_width), panel(kLogitRows * kPanel) {}

    std::vector<float> logits, d_b;
    std::vector<bf16> d, of_b, of_b_t, panel;
  };

  int64_t num_blocks() const { return (given_.V + kLogitColumns - 1) / kLogitColumns; }

  // Of logits, what the cotangent makes of them; a row more of zeros where there's an odd number.
  void Slopes(int64_t from, int64_t rows, int64_t column, int64_t columns, Memory& memory) const {
    auto& [logits, d_b, d, of_b, of_b_t, panel] = memory;
    for (int64_t i = 0; i < rows; ++i) {
      const F32 by = Fill(-by_[from + i]), most = Fill(norm_[from + i]);
      const float* own = &logits[i * kLogitColumns];
      for (int64_t c = 0; c < columns; c += kLanes)
        Store(&d[i * kLogitColumns + c], Mul(by, Exp(Sub(Load(own + c), most))), kLanes);
      const int64_t at = target_[from + i] - column;
      if (at >= 0 && at < columns) {
        // 1 - p before rounding: in bf16 a p near 1 is 1.
        const float exact[kLanes] = {-std::expm1(own[at] - norm_[from + i]) * by_[from + i]};
        Store(&d[i * kLogitColumns + at], Load(exact), 1);
      }
    }
    if (rows % 2) std::fill_n(&d[rows * kLogitColumns], kLogitColumns, bf16(0));
  }

  void ToXAndInner(Piece& piece, int64_t from, int64_t rows, int64_t column, int64_t columns, const Memory& memory) const {
    const bf16* d = memory.d.data();
    float *to_x = &piece.sums[from * wide_], *to_inner = &piece.sums[given_.count * wide_ + from * r_width_];
    WithVectors(w_width_, [&](auto vectors) {
      for (int64_t p = 0; p < wide_; p += w_width_)
        EachTile<vectors>(rows, [&](auto& tile, int64_t i) {
          tile.Multiply(d + i * kLogitColumns, kLogitColumns, down_ + p * given_.V + column * w_width_, columns / 2);
          tile.AddTo(to_x + i * wide_ + p, wide_);
        });
    });
    WithVectors(r_width_, [&](auto vectors) {
      EachTile<vectors>(rows, [&](auto& tile, int64_t i) {
        tile.Multiply(d + i * kLogitColumns, kLogitColumns, memory.of_b_t.data(), columns / 2);
        tile.AddTo(to_inner + i * r_width_, r_width_);
      });
    });
  }

  void ToB(int64_t from, int64_t rows, int64_t columns, Memory& memory) const {
    for (int64_t c = 0; c < columns; c += kPanel) {
      PackPanel(&memory.d[c], kLogitColumns, rows + rows % 2, kPanel, memory.panel.data());
      EachTile(given_.r, [&](auto& tile, int64_t j) {
        tile.Multiply(&inner_t_[j * even_ + from], even_, memory.panel.data(), (rows + 1) / 2);
        tile.AddTo(&memory.d_b[j * kLogitColumns + c], kLogitColumns);
      });
    }
  }

  const Given& given_;
  const bf16* down_;
  const int64_t w_width_, wide_, r_width_, even_;
  const int32_t* target_;
  const float *norm_, *by_;
  float* to_b_;
  std::vector<bf16> inner_t_;  // [r, M], for the sums over rows; M made even
  std::vector<Piece> pieces_;
};

ffi::Error LossBackward(ffi::ThreadPool pool, Bf16 x, Bf16 inner, Bf16 w, Bf16 b, Bf16 w_t, Ints targets,
                        Floats log_norm, Floats g, Ints count, FloatsOut d_x, FloatsOut d_inner, FloatsOut d_b) {
  if (!Given::Fit(x, inner, w, b)) return ffi::Error::InvalidArgument(kMisfit);
  const Given given(x, inner, w, b, count);
  if (!Backward::Fit(given, w_t)) return ffi::Error::InvalidArgument(kMisfit);
  Backward backward(given, w_t, targets, log_norm, g, d_b);
  ForEach(pool, backward.num_pieces(), [&](int64_t piece) { backward.Run(piece); });
  auto *to_x = static_cast<float*>(d_x->untyped_data()), *to_inner = static_cast<float*>(d_inner->untyped_data());
  std::fill_n(to_x, given.M * given.D, 0.0f);
  std::fill_n(to_inner, given.M * given.r, 0.0f);
  EachRow(pool, given.count, given.D, [&](int64_t i) { backward.Join(i, to_x + i * given.D, to_inner + i * given.r); });
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
                                  .Arg<locojax::Ints>().Arg<locojax::Floats>()
                                  .Arg<locojax::Floats>().Arg<locojax::Ints>().Ret<locojax::Floats>()
                                  .Ret<locojax::Floats>().Ret<locojax::Floats>());
