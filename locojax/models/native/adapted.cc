// x @ w + scale * (x @ a) @ b: a packed product with each row's own low-rank adapter added, rounded once.
//
// The columns of w may be those of several modules that read the same x, one after another, each with an a and b of its
// own. Adapters are stacked and packed, [L, n, A, K / 2, W, 2] and [L, n, F / 64, r / 2, 64, 2]; `layer` says which of L.
#include <vector>

#include "adapters.h"

namespace ffi = xla::ffi;

namespace locojax {
namespace {

constexpr int64_t kBlockRows = 192;
constexpr int64_t kPieces = 8;
constexpr char kMisfit[] = "an adapted product's shapes don't fit: expected x [M, K], w [N / 64, K / 2, 64, 2], and of each "
                           "module a [L, n, A, K / 2, W, 2] and b [L, n, F / 64, r / 2, 64, 2], A W just above r, "
                           "N the sum of F";

ffi::Error Adapted(ffi::ThreadPool pool, Bf16 x, Bf16 w, Ints which, ffi::Buffer<ffi::F32> scales, Ints of_layer,
                   ffi::RemainingArgs factors, ffi::ResultBuffer<ffi::BF16> out) {
  const auto of_x = x.dimensions(), of_w = w.dimensions(), of_out = out->dimensions();
  const int64_t M = of_x[0], K = of_x[1], N = of_out[1], n = int64_t(scales.element_count());
  const int64_t layer = *static_cast<const int32_t*>(of_layer.untyped_data());
  int64_t columns = 0;
  Inner inner{0, 0};
  std::vector<Module> modules;
  std::vector<int64_t> first;  // panel of each module
  for (size_t i = 0; i + 1 < factors.size(); i += 2) {
    auto a = factors.get<Bf16>(i), b = factors.get<Bf16>(i + 1);
    if (!a.has_value() || !b.has_value()) return ffi::Error::InvalidArgument(kMisfit);
    const auto of_a = a->dimensions(), of_b = b->dimensions();
    if (of_a.size() != 6 || of_b.size() != 6 || of_a[0] != of_b[0] || of_a[1] != n || of_b[1] != n || of_a[3] * 2 != K ||
        of_b[4] != kPanel || layer < 0 || layer >= of_b[0] || (i && of_b[3] * 2 != inner.r))
      return ffi::Error::InvalidArgument(kMisfit);
    inner = {of_b[3] * 2, of_a[4]};
    if (!inner.Fits(of_a[2])) return ffi::Error::InvalidArgument(kMisfit);
    const int64_t F = of_b[2] * kPanel;
    modules.push_back({static_cast<const bf16*>(a->untyped_data()) + layer * n * inner.size(K),
                       static_cast<const bf16*>(b->untyped_data()) + layer * n * inner.r * F, F});
    first.push_back(columns / kPanel);
    columns += F;
  }
  if (of_w.size() != 4 || of_w[1] * 2 != K || of_w[2] != kPanel || of_w[0] * kPanel != columns || columns != N ||
      of_out[0] != M || which.element_count() != size_t(M))
    return ffi::Error::InvalidArgument(kMisfit);
  ByAdapter rows(pool, static_cast<const bf16*>(x.untyped_data()), M, K,
                       static_cast<const int32_t*>(which.untyped_data()),
                       static_cast<const float*>(scales.untyped_data()), n, inner, std::move(modules));
  const auto* panels = static_cast<const bf16*>(w.untyped_data());
  auto* to = static_cast<bf16*>(out->untyped_data());
  std::vector<Group> blocks;  // few enough rows that they stay in the cache while panels come and go
  for (const Group& group : rows.groups)
    for (int64_t from = 0; from < group.count; from += kBlockRows)
      blocks.push_back({group.adapter, group.from + from, std::min(kBlockRows, group.count - from)});
  const bool in_order = rows.groups.size() == 1;
  const int64_t num_panels = N / kPanel, parts = std::min(num_panels, kPieces);
  rows.ForEach(parts * int64_t(blocks.size()), [&](int64_t piece) {
    const Group& block = blocks[piece / parts];
    const int64_t part = piece % parts;
    for (int64_t p = num_panels * part / parts; p < num_panels * (part + 1) / parts; ++p) {
      const int64_t module = std::upper_bound(first.begin(), first.end(), p) - first.begin() - 1;
      rows.Multiply(block, panels + p * K * kPanel, module, (p - first[module]) * kPanel,
                    [&](const auto& tile, int64_t row) {
                      if (in_order) return tile.Write(to + row * N + p * kPanel, N, kPanel);
                      tile.WriteEach([&](int r) { return to + rows.order[row + r] * N + p * kPanel; });
                    });
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace locojax

XLA_FFI_DEFINE_HANDLER_SYMBOL(locojax_adapted, locojax::Adapted,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<locojax::Bf16>().Arg<locojax::Bf16>()
                                  .Arg<locojax::Ints>().Arg<ffi::Buffer<ffi::F32>>().Arg<locojax::Ints>()
                                  .RemainingArgs().Ret<locojax::Bf16>());
