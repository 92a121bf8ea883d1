// silu(gate) * up of rows [M, 2 F] that hold both, side by side, and its gradient; in fp32, rounded once.
#include "lanes.h"
#include "parallel.h"

namespace ffi = xla::ffi;

namespace locojax {
namespace {

constexpr char kMisfit[] = "a gated activation's shapes don't fit: expected [M, 2 F] and [M, F], F a multiple of 16";

// 1 / (1 + exp(-x)). What isn't a number need not stay one: it is multiplied by x in all that follows.
inline F32 Sigmoid(F32 x) {
  const F32 small = Exp(Sub(Zero(), Max(x, Sub(Zero(), x)))), part = Div(Fill(1.0f), Add(Fill(1.0f), small));
  return Select(Zero(), x, Mul(small, part), part);
}

ffi::Error Gated(ffi::ThreadPool pool, Bf16 both, ffi::ResultBuffer<ffi::BF16> out) {
  const auto of = both.dimensions(), of_out = out->dimensions();
  if (of.size() != 2 || of_out.size() != 2 || of[0] != of_out[0] || of[1] != 2 * of_out[1] || of_out[1] % kLanes)
    return ffi::Error::InvalidArgument(kMisfit);
  const int64_t F = of_out[1];
  const auto* from = static_cast<const bf16*>(both.untyped_data());
  auto* to = static_cast<bf16*>(out->untyped_data());
  EachRow(pool, of[0], F, [=](int64_t i) {
    for (int64_t c = 0; c < F; c += kLanes) {
      const F32 gate = Load(from + i * 2 * F + c), up = Load(from + i * 2 * F + F + c);
      Store(to + i * F + c, Mul(Mul(gate, Sigmoid(gate)), up), kLanes);
    }
  });
  return ffi::Error::Success();
}

ffi::Error GatedBackward(ffi::ThreadPool pool, Bf16 both, Bf16 g, ffi::ResultBuffer<ffi::BF16> out) {
  const auto of = both.dimensions(), of_g = g.dimensions();
  if (of.size() != 2 || of_g.size() != 2 || of[0] != of_g[0] || of[1] != 2 * of_g[1] || of_g[1] % kLanes ||
      out->element_count() != both.element_count())
    return ffi::Error::InvalidArgument(kMisfit);
  const int64_t F = of_g[1];
  const auto *from = static_cast<const bf16*>(both.untyped_data()), *of_out = static_cast<const bf16*>(g.untyped_data());
  auto* to = static_cast<bf16*>(out->untyped_data());
  EachRow(pool, of[0], F, [=](int64_t i) {
    for (int64_t c = 0; c < F; c += kLanes) {
      const F32 gate = Load(from + i * 2 * F + c), up = Load(from + i * 2 * F + F + c), d = Load(of_out + i * F + c);
      const F32 open = Sigmoid(gate), silu = Mul(gate, open);
      const F32 slope = Fma(silu, Sub(Fill(1.0f), open), open);
      Store(to + i * 2 * F + c, Mul(Mul(d, up), slope), kLanes);
      Store(to + i * 2 * F + F + c, Mul(d, silu), kLanes);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace locojax

XLA_FFI_DEFINE_HANDLER_SYMBOL(locojax_gated, locojax::Gated,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<locojax::Bf16>().Ret<locojax::Bf16>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(locojax_gated_backward, locojax::GatedBackward,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<locojax::Bf16>().Arg<locojax::Bf16>()
                                  .Ret<locojax::Bf16>());
