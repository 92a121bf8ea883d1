// What sampling asks about logits that are never stored: hidden states times the packed head, block by block of the
// vocabulary, each row's own adapter added.
//
// A block's logits stay in the processor's cache while its largest and its mass are found. The block that a row then
// draws from is computed again, by the same sums in the same order. Shapes: B rows, D hidden, V vocabulary, n adapters
// of rank r, N blocks of S columns; V and S are whole panels.
#include <vector>

#include "adapters.h"

namespace ffi = xla::ffi;

namespace locojax {
namespace {

constexpr int64_t kPieces = 16;
constexpr char kMisfit[] = "a packed head's shapes don't fit its inputs: expected hidden [B, D], head [V / 64, D / 2, 64, "
                           "2], adapters [n, A, D / 2, W, 2] and [n, V / 64, r / 2, 64, 2], A W just above r";

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

int64_t Columns(Bf16& b) { return b.dimensions()[1] * kPanel; }

Inner InnerOf(Bf16& a, Bf16& b) { return {b.dimensions()[2] * 2, a.dimensions()[3]}; }

ByAdapter RowsOf(ffi::ThreadPool& pool, Bf16& hidden, Ints& which, Floats& scales, Bf16& a, Bf16& b) {
  const Module module{static_cast<const bf16*>(a.untyped_data()), static_cast<const bf16*>(b.untyped_data()),
                      Columns(b)};
  return ByAdapter(pool, static_cast<const bf16*>(hidden.untyped_data()), hidden.dimensions()[0],
                   hidden.dimensions()[1], static_cast<const int32_t*>(which.untyped_data()),
                   static_cast<const float*>(scales.untyped_data()), a.dimensions()[0], InnerOf(a, b), {module});
}

bool Fit(Bf16& hidden, Bf16& head, Ints& which, Floats& scales, Bf16& a, Bf16& b) {
  const auto x = hidden.dimensions(), w = head.dimensions(), of_a = a.dimensions(), of_b = b.dimensions();
  return x.size() == 2 && w.size() == 4 && w[1] * 2 == x[1] && w[2] == kPanel && which.element_count() == size_t(x[0]) &&
         of_a.size() == 5 && of_b.size() == 5 && of_a[0] == of_b[0] && of_a[2] * 2 == x[1] &&
         InnerOf(a, b).Fits(of_a[1]) && of_b[3] == kPanel && scales.element_count() == size_t(of_a[0]) && of_b[1] == w[0];
}

ffi::Error HeadMasses(ffi::ThreadPool pool, Bf16 hidden, Bf16 head, Ints which, Floats scales, Bf16 a, Bf16 b,
                      Floats temper, FloatsOut largest, FloatsOut mass, FloatsOut own) {
  const int64_t B = hidden.dimensions()[0], N = largest->dimensions()[1], V = head.dimensions()[0] * kPanel, S = V / N;
  if (!Fit(hidden, head, which, scales, a, b) || S % kPanel || S * N != V)
    return ffi::Error::InvalidArgument(kMisfit);
  ByAdapter rows = RowsOf(pool, hidden, which, scales, a, b);
  const auto* panels = static_cast<const bf16*>(head.untyped_data());
  const auto* scale = static_cast<const float*>(temper.untyped_data());
  auto *to_largest = static_cast<float*>(largest->untyped_data()), *to_mass = static_cast<float*>(mass->untyped_data()),
       *to_own = static_cast<float*>(own->untyped_data());
  const int64_t pieces = std::min(N, kPieces);
  rows.ForEach(pieces, [&](int64_t piece) {
    std::vector<float> logits(B * S);
    for (int64_t n = N * piece / pieces; n < N * (piece + 1) / pieces; ++n) {
      for (int64_t c = 0; c < S; c += kPanel)
        for (const Group& group : rows.groups)
          rows.Multiply(group, panels + (n * S + c) * rows.K, 0, n * S + c, [&](const auto& tile, int64_t i) {
            tile.Write(&logits[i * S + c], S, kPanel);
          });
      for (int64_t i = 0; i < B; ++i) {
        const int64_t row = rows.order[i], at = row * N + n;
        Masses(&logits[i * S], S, scale[row], to_largest + at, to_mass + at, to_own + at);
      }
    }
  });
  return ffi::Error::Success();
}

ffi::Error HeadBlock(ffi::ThreadPool pool, Bf16 hidden, Bf16 head, Ints which, Floats scales, Bf16 a, Bf16 b,
                     Ints block, FloatsOut out) {
  const int64_t B = hidden.dimensions()[0], S = out->dimensions()[1], V = head.dimensions()[0] * kPanel;
  if (!Fit(hidden, head, which, scales, a, b) || S % kPanel || V % S)
    return ffi::Error::InvalidArgument(kMisfit);
  ByAdapter rows = RowsOf(pool, hidden, which, scales, a, b);
  const auto* panels = static_cast<const bf16*>(head.untyped_data());
  const auto* blocks = static_cast<const int32_t*>(block.untyped_data());
  auto* to = static_cast<float*>(out->untyped_data());
  rows.ForEach(std::min(B, kPieces), [&](int64_t piece) {
    const int64_t pieces = std::min(B, kPieces);
    for (const Group& group : rows.groups)
      for (int64_t i = group.from; i < group.from + group.count; ++i) {
        if (i < B * piece / pieces || i >= B * (piece + 1) / pieces) continue;
        const int64_t row = rows.order[i], n = std::clamp<int64_t>(blocks[row], 0, V / S - 1);
        for (int64_t c = 0; c < S; c += kPanel) {
          rows.Multiply({group.adapter, i, 1}, panels + (n * S + c) * rows.K, 0, n * S + c,
                        [&](const auto& tile, int64_t) { tile.Write(to + row * S + c, S, kPanel); });
        }
      }
  });
  return ffi::Error::Success();
}

ffi::Error HeadValues(ffi::ThreadPool pool, Bf16 hidden, Bf16 head, Ints which, Floats scales, Bf16 a, Bf16 b,
                      FloatsOut out) {
  if (!Fit(hidden, head, which, scales, a, b)) return ffi::Error::InvalidArgument(kMisfit);
  ByAdapter rows = RowsOf(pool, hidden, which, scales, a, b);
  const int64_t B = hidden.dimensions()[0], V = Columns(b), panels = V / kPanel;
  const auto* packed = static_cast<const bf16*>(head.untyped_data());
  auto* to = static_cast<float*>(out->untyped_data());
  const int64_t pieces = std::min(panels, kPieces);
  rows.ForEach(pieces, [&](int64_t piece) {
    std::vector<float> logits(B * kPanel);
    for (int64_t p = panels * piece / pieces; p < panels * (piece + 1) / pieces; ++p) {
      for (const Group& group : rows.groups)
        rows.Multiply(group, packed + p * kPanel * rows.K, 0, p * kPanel, [&](const auto& tile, int64_t i) {
          tile.Write(&logits[i * kPanel], kPanel, kPanel);
        });
      for (int64_t i = 0; i < B; ++i)
        std::copy_n(&logits[i * kPanel], kPanel, to + rows.order[i] * V + p * kPanel);
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
