// What sampling asks about logits that are never stored: hidden states times the packed head, block by block of the
// vocabulary, each row's own adapter added.
//
// A block's logits stay in the processor's cache while its largest and its mass are found. The block that a row then
// draws from is computed again, by the same sums in the same order. Shapes: B rows, D hidden, V vocabulary, n adapters
// of rank r, N blocks of S columns; S is whole panels.
#include <vector>

#include "parallel.h"
#include "tile.h"

namespace ffi = xla::ffi;

namespace locojax {
namespace {

constexpr int64_t kPieces = 16;
constexpr char kMisfit[] = "a packed head's shapes don't fit its inputs: expected hidden [B, D], head [V / 64, D / 2, 64, "
                           "2], adapters [n, D, r] and [n, r, V]";

// The rows that one adapter, or none, is for: where they are in the order by adapter.
struct Group {
  int64_t adapter, from, count;  // adapter < 0: none
};

// Numbers [rows, columns], rows `stride` apart -> a panel; columns beyond, and a last row without a twin, are zero.
void PackPanel(const bf16* from, int64_t stride, int64_t rows, int64_t columns, bf16* panel) {
  if (columns == kPanel && rows % 2 == 0) {
    for (int64_t k = 0; k < rows; k += 2)
      for (int64_t c = 0; c < kPanel; c += kLanes)
        StoreInTurns(panel + (k / 2 * kPanel + c) * 2, from + k * stride + c, from + (k + 1) * stride + c);
    return;
  }
  for (int64_t k = 0; k < rows; ++k)
    for (int64_t c = 0; c < kPanel; ++c)
      panel[(k / 2 * kPanel + c) * 2 + k % 2] = c < columns ? from[k * stride + c] : 0;
  if (rows % 2)
    for (int64_t c = 0; c < kPanel; ++c) panel[(rows / 2 * kPanel + c) * 2 + 1] = 0;
}

// Rows by adapter, their hidden states side by side, and scale * hidden @ a of each.
class Inputs {
 public:
  Inputs(const bf16* hidden, int64_t B, int64_t D, const int32_t* which, const float* scales, const bf16* a,
         const bf16* b, int64_t num_adapters, int64_t r, int64_t V)
      : D(D), r_pairs((r + 1) / 2), r(r), V(V), b(b), order(B), x(B * D), inner(B * 2 * r_pairs) {
    int64_t at = 0;
    for (int64_t n = -1; n < num_adapters; ++n) {
      const int64_t from = at;
      for (int64_t row = 0; row < B; ++row)
        if (std::clamp<int64_t>(which[row], -1, num_adapters - 1) == n) order[at++] = row;
      if (at == from) continue;
      groups.push_back({n, from, at - from});
      for (int64_t i = from; i < at; ++i) std::copy_n(hidden + order[i] * D, D, &x[i * D]);
      if (n >= 0) FillInner(groups.back(), scales[n], a + n * D * r);
    }
  }

  // Logits of one panel's columns, rows by adapter: to `out`, rows `stride` apart.
  void Logits(const Group& group, const bf16* panel, int64_t column, float* out, int64_t stride,
              std::vector<bf16>& of_b) const {
    if (group.adapter >= 0) {
      of_b.resize(r_pairs * 2 * kPanel);
      PackPanel(b + group.adapter * r * V + column, V, r, std::min<int64_t>(kPanel, V - column), of_b.data());
    }
    EachTile(group.count, [&](auto& tile, int64_t row) {
      tile.Multiply(&x[(group.from + row) * D], D, panel, D / 2);
      if (group.adapter >= 0) tile.Multiply(&inner[(group.from + row) * 2 * r_pairs], 2 * r_pairs, of_b.data(), r_pairs);
      tile.Write(out + (group.from + row) * stride, stride, kPanel);
    });
  }

  const int64_t D, r_pairs, r, V;
  const bf16* const b;
  std::vector<int64_t> order;
  std::vector<Group> groups;

 private:
  void FillInner(const Group& group, float scale, const bf16* a) {
    std::vector<bf16> panel(D * kPanel);
    std::vector<float> found(group.count * kPanel);
    for (int64_t column = 0; column < r; column += kPanel) {
      const int columns = int(std::min<int64_t>(kPanel, r - column));
      PackPanel(a + column, r, D, columns, panel.data());
      EachTile(group.count, [&](auto& tile, int64_t row) {
        tile.Multiply(&x[(group.from + row) * D], D, panel.data(), D / 2);
        tile.Write(&found[row * kPanel], kPanel, kPanel);
      });
      for (int64_t row = 0; row < group.count; ++row)
        for (int from = 0; from < columns; from += kLanes)
          Store(&inner[(group.from + row) * 2 * r_pairs + column + from],
                Mul(Load(&found[row * kPanel + from]), Fill(scale)), std::min(kLanes, columns - from));
    }
  }

  std::vector<bf16> x, inner;
};

// Of one row's block: its largest logit, and the sums of exp(logit - largest) and exp(scale (logit - largest)).
void Masses(const float* logits, int64_t S, float scale, float* largest, float* mass, float* own) {
  F32 top = Fill(-3.4028234664e38f), wrong = Zero();
  for (int64_t i = 0; i < S; i += kLanes) {
    const F32 some = Load(logits + i);
    top = Max(top, some);
    wrong = Fma(some, Zero(), wrong);  // what isn't finite must not get lost in a maximum
  }
  *largest = Largest(top);
  const F32 most = Fill(*largest), by = Fill(scale);
  F32 sum = wrong, scaled = wrong;
  for (int64_t i = 0; i < S; i += kLanes) {
    const F32 below = Sub(Load(logits + i), most);
    sum = Add(sum, Exp(below));
    if (scale != 1.0f) scaled = Add(scaled, Exp(Mul(below, by)));
  }
  *mass = Sum(sum);
  *own = scale == 1.0f ? *mass : Sum(scaled);
}

using Bf16 = ffi::Buffer<ffi::BF16>;
using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;
using FloatsOut = ffi::ResultBuffer<ffi::F32>;

Inputs InputsOf(Bf16& hidden, Ints& which, Floats& scales, Bf16& a, Bf16& b) {
  return Inputs(static_cast<const bf16*>(hidden.untyped_data()), hidden.dimensions()[0], hidden.dimensions()[1],
                static_cast<const int32_t*>(which.untyped_data()), static_cast<const float*>(scales.untyped_data()),
                static_cast<const bf16*>(a.untyped_data()), static_cast<const bf16*>(b.untyped_data()),
                a.dimensions()[0], a.dimensions()[2], b.dimensions()[2]);
}

bool Fit(Bf16& hidden, Bf16& head, Ints& which, Floats& scales, Bf16& a, Bf16& b) {
  const auto x = hidden.dimensions(), w = head.dimensions(), of_a = a.dimensions(), of_b = b.dimensions();
  return x.size() == 2 && w.size() == 4 && w[1] * 2 == x[1] && w[2] == kPanel && which.element_count() == size_t(x[0]) &&
         of_a.size() == 3 && of_b.size() == 3 && of_a[0] == of_b[0] && of_a[2] == of_b[1] && of_a[1] == x[1] &&
         scales.element_count() == size_t(of_a[0]) && (of_b[2] + kPanel - 1) / kPanel == w[0];
}

ffi::Error HeadMasses(ffi::ThreadPool pool, Bf16 hidden, Bf16 head, Ints which, Floats scales, Bf16 a, Bf16 b,
                      Floats temper, FloatsOut largest, FloatsOut mass, FloatsOut own) {
  const int64_t B = hidden.dimensions()[0], N = largest->dimensions()[1], V = b.dimensions()[2], S = V / N;
  if (!Fit(hidden, head, which, scales, a, b) || S % kPanel || S * N != V)
    return ffi::Error::InvalidArgument(kMisfit);
  const Inputs inputs = InputsOf(hidden, which, scales, a, b);
  const auto* panels = static_cast<const bf16*>(head.untyped_data());
  const auto* scale = static_cast<const float*>(temper.untyped_data());
  auto *to_largest = static_cast<float*>(largest->untyped_data()), *to_mass = static_cast<float*>(mass->untyped_data()),
       *to_own = static_cast<float*>(own->untyped_data());
  const int64_t pieces = std::min(N, kPieces);
  ForEach(pool, pieces, [&](int64_t piece) {
    std::vector<float> logits(B * S);
    std::vector<bf16> of_b;
    for (int64_t n = N * piece / pieces; n < N * (piece + 1) / pieces; ++n) {
      for (int64_t c = 0; c < S; c += kPanel)
        for (const Group& group : inputs.groups)
          inputs.Logits(group, panels + (n * S + c) * inputs.D, n * S + c, logits.data() + c, S, of_b);
      for (int64_t i = 0; i < B; ++i) {
        const int64_t row = inputs.order[i], at = row * N + n;
        Masses(&logits[i * S], S, scale[row], to_largest + at, to_mass + at, to_own + at);
      }
    }
  });
  return ffi::Error::Success();
}

ffi::Error HeadBlock(ffi::ThreadPool pool, Bf16 hidden, Bf16 head, Ints which, Floats scales, Bf16 a, Bf16 b,
                     Ints block, FloatsOut out) {
  const int64_t B = hidden.dimensions()[0], S = out->dimensions()[1], V = b.dimensions()[2];
  if (!Fit(hidden, head, which, scales, a, b) || S % kPanel || V % S)
    return ffi::Error::InvalidArgument(kMisfit);
  const Inputs inputs = InputsOf(hidden, which, scales, a, b);
  const auto* panels = static_cast<const bf16*>(head.untyped_data());
  const auto* blocks = static_cast<const int32_t*>(block.untyped_data());
  auto* to = static_cast<float*>(out->untyped_data());
  ForEach(pool, std::min(B, kPieces), [&](int64_t piece) {
    std::vector<bf16> of_b;
    std::vector<float> logits(B * kPanel);
    const int64_t pieces = std::min(B, kPieces);
    for (const Group& group : inputs.groups)
      for (int64_t i = group.from; i < group.from + group.count; ++i) {
        if (i < B * piece / pieces || i >= B * (piece + 1) / pieces) continue;
        const int64_t row = inputs.order[i], n = std::clamp<int64_t>(blocks[row], 0, V / S - 1);
        for (int64_t c = 0; c < S; c += kPanel) {
          inputs.Logits({group.adapter, i, 1}, panels + (n * S + c) * inputs.D, n * S + c, logits.data(), kPanel, of_b);
          std::copy_n(&logits[i * kPanel], kPanel, to + row * S + c);
        }
      }
  });
  return ffi::Error::Success();
}

ffi::Error HeadValues(ffi::ThreadPool pool, Bf16 hidden, Bf16 head, Ints which, Floats scales, Bf16 a, Bf16 b,
                      FloatsOut out) {
  if (!Fit(hidden, head, which, scales, a, b)) return ffi::Error::InvalidArgument(kMisfit);
  const Inputs inputs = InputsOf(hidden, which, scales, a, b);
  const int64_t B = hidden.dimensions()[0], V = b.dimensions()[2], panels = (V + kPanel - 1) / kPanel;
  const auto* packed = static_cast<const bf16*>(head.untyped_data());
  auto* to = static_cast<float*>(out->untyped_data());
  const int64_t pieces = std::min(panels, kPieces);
  ForEach(pool, pieces, [&](int64_t piece) {
    std::vector<float> logits(B * kPanel);
    std::vector<bf16> of_b;
    for (int64_t p = panels * piece / pieces; p < panels * (piece + 1) / pieces; ++p) {
      for (const Group& group : inputs.groups)
        inputs.Logits(group, packed + p * kPanel * inputs.D, p * kPanel, logits.data(), kPanel, of_b);
      for (int64_t i = 0; i < B; ++i)
        std::copy_n(&logits[i * kPanel], std::min<int64_t>(kPanel, V - p * kPanel),
                    to + inputs.order[i] * V + p * kPanel);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace locojax

#define LOCOJAX_HEAD_INPUTS                                                                            \
  Ctx<ffi::ThreadPool>().Arg<locojax::Bf16>().Arg<locojax::Bf16>().Arg<locojax::Ints>()                 \
      .Arg<locojax::Floats>().Arg<locojax::Bf16>().Arg<locojax::Bf16>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(locojax_head_masses, locojax::HeadMasses,
                              ffi::Ffi::Bind().LOCOJAX_HEAD_INPUTS.Arg<locojax::Floats>()
                                  .Ret<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(locojax_head_values, locojax::HeadValues,
                              ffi::Ffi::Bind().LOCOJAX_HEAD_INPUTS.Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(locojax_head_block, locojax::HeadBlock,
                              ffi::Ffi::Bind().LOCOJAX_HEAD_INPUTS.Arg<locojax::Ints>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
