// x [M, K] @ w [K, N] in bf16, summed in fp32, with w packed beforehand.
//
// w lies in panels of kPanel columns; in a panel, the numbers of two rows alternate, as the processor multiplies them:
// w[p][k / 2][n][k % 2]. A result is the sum over k in one order, whatever M is: a row's bits don't depend on its
// neighbours.
#include "parallel.h"
#include "tile.h"

namespace ffi = xla::ffi;

namespace locojax {
namespace {

constexpr int64_t kBlockRows = 192;  // of x: what a panel is read for before the next one, and stays in the cache
constexpr int64_t kPieces = 8;       // for two threads to end at the same time, and not to meet too often
constexpr int64_t kAlone = 1 << 18;  // products that cost less than waking another thread

template <class Out>
void Matmul(ffi::ThreadPool& pool, const bf16* x, int64_t M, int64_t K, const bf16* w, Out* out, int64_t N) {
  const int64_t panels = (N + kPanel - 1) / kPanel, blocks = (M + kBlockRows - 1) / kBlockRows;
  const int64_t block = ((M + blocks - 1) / blocks + kTileRows - 1) / kTileRows * kTileRows;
  const int64_t parts = M * K * N < kAlone ? 1 : std::min(panels, kPieces);
  ForEach(pool, parts * blocks, [=](int64_t piece) {
    const int64_t from = piece / parts * block, rows = std::min(block, M - from), part = piece % parts;
    if (rows <= 0) return;
    for (int64_t p = panels * part / parts; p < panels * (part + 1) / parts; ++p)
      EachTile(rows, [&](auto& tile, int64_t row) {
        tile.Multiply(x + (from + row) * K, K, w + p * K * kPanel, K / 2);
        tile.Write(out + (from + row) * N + p * kPanel, N, int(std::min<int64_t>(kPanel, N - p * kPanel)));
      });
  });
}

template <ffi::DataType type, class Out>
ffi::Error Call(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> x, ffi::Buffer<ffi::BF16> w, ffi::ResultBuffer<type> out) {
  const auto of_x = x.dimensions(), of_w = w.dimensions(), of_out = out->dimensions();
  if (of_x.size() != 2 || of_w.size() != 4 || of_out.size() != 2 || of_w[1] * 2 != of_x[1] || of_w[2] != kPanel ||
      of_w[3] != 2 || of_out[0] != of_x[0] || (of_out[1] + kPanel - 1) / kPanel != of_w[0])
    return ffi::Error::InvalidArgument("a packed product's shapes don't fit: expected x [M, K], w [N / 64, K / 2, 64, 2]");
  Matmul(pool, static_cast<const bf16*>(x.untyped_data()), of_x[0], of_x[1],
         static_cast<const bf16*>(w.untyped_data()), static_cast<Out*>(out->untyped_data()), of_out[1]);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace locojax

extern "C" const int locojax_uses_avx512 = LOCOJAX_AVX512;

XLA_FFI_DEFINE_HANDLER_SYMBOL(locojax_matmul_bf16, (locojax::Call<ffi::BF16, locojax::bf16>),
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>().Ret<ffi::Buffer<ffi::BF16>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(locojax_matmul_f32, (locojax::Call<ffi::F32, float>),
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>().Ret<ffi::Buffer<ffi::F32>>());
