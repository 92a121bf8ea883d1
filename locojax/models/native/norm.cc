// RMSNorm of rows of bf16, statistics in fp32, rounded once.
#include "lanes.h"
#include "parallel.h"

namespace ffi = xla::ffi;

namespace locojax {
namespace {

constexpr char kMisfit[] = "a norm's shapes don't fit: expected x [M, D] and a weight [D], D a multiple of 16";

ffi::Error RmsNorm(ffi::ThreadPool pool, Bf16 x, Bf16 weight, float eps, ffi::ResultBuffer<ffi::BF16> out) {
  const auto of = x.dimensions();
  if (of.size() != 2 || of[1] % kLanes || weight.element_count() != size_t(of[1]) ||
      out->element_count() != x.element_count())
    return ffi::Error::InvalidArgument(kMisfit);
  const int64_t D = of[1];
  const auto *from = static_cast<const bf16*>(x.untyped_data()), *w = static_cast<const bf16*>(weight.untyped_data());
  auto* to = static_cast<bf16*>(out->untyped_data());
  EachRow(pool, of[0], D, [=](int64_t row) {
    F32 squares = Zero();
    for (int64_t i = 0; i < D; i += kLanes) {
      const F32 some = Load(from + row * D + i);
      squares = Fma(some, some, squares);
    }
    const F32 scale = Fill(1.0f / std::sqrt(Sum(squares) / float(D) + eps));
    for (int64_t i = 0; i < D; i += kLanes)
      Store(to + row * D + i, Mul(Mul(Load(from + row * D + i), scale), Load(w + i)), kLanes);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace locojax

XLA_FFI_DEFINE_HANDLER_SYMBOL(locojax_rms_norm, locojax::RmsNorm,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<locojax::Bf16>().Arg<locojax::Bf16>()
                                  .Attr<float>("eps").Ret<locojax::Bf16>());
