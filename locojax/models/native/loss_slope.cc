// Log-probs of given tokens under a packed head, and how they change with x: what a cotangent is multiplied by, found in
// the same pass over the vocabulary.
//
// logits [M, V] = x [M, D] @ w [D, V]; the slope of a row's log-prob is w[target] - softmax @ w.T. Exponentials are taken
// from the largest logit so far, and what was summed before is scaled when there is a larger one (Dao et al. 2022). The
// target's own is left out of the sums: where its probability is all but 1, 1 - p is then the sum of the others', exact.
#include <utility>
#include <vector>

#include "parallel.h"
#include "tile.h"

namespace ffi = xla::ffi;

namespace locojax {
namespace {

constexpr int64_t kPieces = 8;  // parts of the vocabulary, each with sums of its own
constexpr char kMisfit[] = "a slope's shapes don't fit: expected x [M, D], w [V / 64, D / 2, 64, 2] and its transpose, "
                           "targets [M]";

// Of one row over a part of the vocabulary: the largest logit, the others' exponentials summed, the target's logit.
struct Row {
  float top = -INFINITY, others = 0.0f, picked = -INFINITY;
};

struct Part {
  std::vector<Row> rows;
  std::vector<float> sums;  // [count, wide]: of w's columns, by the exponentials; only where there is a slope
};

class Slopes {
 public:
  Slopes(Bf16& x, Bf16& w, Bf16& w_t, Ints& targets, Ints& counts)
      : x_(static_cast<const bf16*>(x.untyped_data())), w_(static_cast<const bf16*>(w.untyped_data())),
        down_(static_cast<const bf16*>(w_t.untyped_data())), target_(static_cast<const int32_t*>(targets.untyped_data())),
        M(x.dimensions()[0]), D(x.dimensions()[1]), V(w.dimensions()[0] * kPanel), width(w_t.dimensions()[2]),
        wide(w_t.dimensions()[0] * width),
        count(Clamped(counts, 1)), sloping(std::min(count, Clamped(counts, 0))) {}

  // The logits of `rows` rows from `from` on over one block of columns go into the part's sums.
  void Add(Part& part, int64_t from, int64_t rows, int64_t column, float* logits, bf16* weights) const {
    const int64_t columns = std::min(kLogitColumns, V - column), with_slope = std::clamp<int64_t>(sloping - from, 0, rows);
    for (int64_t c = 0; c < columns; c += kPanel)
      EachTile(rows, [&](auto& tile, int64_t i) {
        tile.Multiply(x_ + (from + i) * D, D, w_ + (column + c) * D, D / 2);
        tile.Write(logits + i * kLogitColumns + c, kLogitColumns, kPanel);
      });
    for (int64_t i = 0; i < rows; ++i)
      Exponentials(part, from + i, column, columns, logits + i * kLogitColumns, i < with_slope ? weights + i * kLogitColumns : nullptr);
    WithVectors(width, [&](auto vectors) {
      for (int64_t p = 0; p < wide; p += width)
        EachTile<vectors>(with_slope, [&](auto& tile, int64_t i) {
          tile.Multiply(weights + i * kLogitColumns, kLogitColumns, down_ + p * V + column * width, columns / 2);
          tile.AddTo(&part.sums[(from + i) * wide + p], wide);
        });
    });
  }

  // The parts, in their order, joined: one row's results.
  void Join(const std::vector<Part>& parts, int64_t i, float* picked, float* log_norm, float* slope) const {
    Row all;
    for (const Part& part : parts) {
      all.top = std::max(all.top, part.rows[i].top);
      all.picked = std::max(all.picked, part.rows[i].picked);
    }
    std::vector<float> by;
    for (const Part& part : parts) {
      by.push_back(std::exp(part.rows[i].top - all.top));
      all.others += part.rows[i].others * by.back();
    }
    const float total = all.others + std::exp(all.picked - all.top);
    picked[i] = all.picked;
    log_norm[i] = all.top + std::log(total);
    if (i >= sloping) return;
    for (int64_t d = 0; d < D; ++d) {
      float sum = 0.0f;
      for (size_t n = 0; n < parts.size(); ++n) sum += parts[n].sums[i * wide + d] * by[n];
      slope[i * D + d] = (all.others * OfTarget(i, d) - sum) / total;
    }
  }

  const bf16 *x_, *w_, *down_;
  const int32_t* target_;
  const int64_t M, D, V, width, wide, count, sloping;  // `width` columns of w's transpose are a panel, `wide` all

 private:
  int64_t Clamped(Ints& counts, int i) const {
    return std::clamp<int64_t>(static_cast<const int32_t*>(counts.untyped_data())[i], 0, M);
  }

  // w[d][target of row i], out of the packed transpose.
  float OfTarget(int64_t i, int64_t d) const {
    const int64_t v = std::clamp<int64_t>(target_[i], 0, V - 1);
    const uint32_t bits = uint32_t(down_[(d / width * V + v / 2 * 2) * width + d % width * 2 + v % 2]) << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
  }

  void Exponentials(Part& part, int64_t row, int64_t column, int64_t columns, float* own, bf16* weights) const {
    Row& found = part.rows[row];
    F32 most = Fill(found.top), wrong = Zero();
    for (int64_t c = 0; c < columns; c += kLanes) {
      most = Max(most, Load(own + c));
      wrong = Fma(Load(own + c), Zero(), wrong);  // what isn't finite must not get lost in a maximum
    }
    const float top = Largest(most);
    const int64_t at = target_[row] - column;
    if (at >= 0 && at < columns) found.picked = std::exchange(own[at], -INFINITY);
    if (top > found.top) {
      const float by = std::exp(found.top - top);
      found.others *= by;
      for (int64_t d = 0; weights && d < wide; d += kLanes)
        Store(&part.sums[row * wide + d], Mul(Load(&part.sums[row * wide + d]), Fill(by)));
      found.top = top;
    }
    F32 sum = wrong;
    for (int64_t c = 0; c < columns; c += kLanes) {
      const F32 share = Exp(Sub(Load(own + c), Fill(top)));
      if (weights) Store(weights + c, share, kLanes);
      sum = locojax::Add(sum, share);
    }
    found.others += Sum(sum);
  }
};

// counts: rows whose slope is wanted, and rows at all; both from the first one on.
ffi::Error LossSlope(ffi::ThreadPool pool, Bf16 x, Bf16 w, Bf16 w_t, Ints targets, Ints counts, FloatsOut picked,
                     FloatsOut log_norm, FloatsOut slope) {
  const auto of_x = x.dimensions(), of_w = w.dimensions(), of_t = w_t.dimensions();
  if (of_x.size() != 2 || of_w.size() != 4 || of_t.size() != 4 || of_w[1] * 2 != of_x[1] || of_w[2] != kPanel ||
      of_t[1] * 2 != of_w[0] * kPanel || of_t[2] <= 0 || of_t[2] > kPanel || of_t[2] % kLanes != 0 ||
      of_t[0] != (of_x[1] + of_t[2] - 1) / of_t[2] || counts.element_count() != 2 ||
      targets.element_count() != size_t(of_x[0]))
    return ffi::Error::InvalidArgument(kMisfit);
  const Slopes slopes(x, w, w_t, targets, counts);
  const int64_t blocks = (slopes.V + kLogitColumns - 1) / kLogitColumns, pieces = std::min(blocks, kPieces);
  std::vector<Part> parts(pieces);
  ForEach(pool, pieces, [&](int64_t piece) {
    Part& part = parts[piece];
    part.rows.resize(slopes.count);
    part.sums.resize(slopes.sloping * slopes.wide);
    std::vector<float> logits(kLogitRows * kLogitColumns);
    std::vector<bf16> weights(kLogitRows * kLogitColumns);
    for (int64_t block = blocks * piece / pieces; block < blocks * (piece + 1) / pieces; ++block)
      for (int64_t from = 0; from < slopes.count; from += kLogitRows)
        slopes.Add(part, from, std::min(kLogitRows, slopes.count - from), block * kLogitColumns, logits.data(), weights.data());
  });
  auto *to_picked = static_cast<float*>(picked->untyped_data()), *to_norm = static_cast<float*>(log_norm->untyped_data()),
       *to_slope = static_cast<float*>(slope->untyped_data());
  std::fill_n(to_picked + slopes.count, slopes.M - slopes.count, 0.0f);
  std::fill_n(to_norm + slopes.count, slopes.M - slopes.count, 0.0f);
  std::fill_n(to_slope + slopes.sloping * slopes.D, (slopes.M - slopes.sloping) * slopes.D, 0.0f);
  ForEach(pool, kPieces, [&](int64_t piece) {
    for (int64_t i = slopes.count * piece / kPieces; i < slopes.count * (piece + 1) / kPieces; ++i)
      slopes.Join(parts, i, to_picked, to_norm, to_slope);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace locojax

XLA_FFI_DEFINE_HANDLER_SYMBOL(locojax_loss_slope, locojax::LossSlope,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<locojax::Bf16>().Arg<locojax::Bf16>()
                                  .Arg<locojax::Bf16>().Arg<locojax::Ints>().Arg<locojax::Ints>()
                                  .Ret<locojax::Floats>().Ret<locojax::Floats>().Ret<locojax::Floats>());
