// Shares a kernel's pieces out between the calling thread and XLA's own.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace locojax {

using Bf16 = xla::ffi::Buffer<xla::ffi::BF16>;
using Ints = xla::ffi::Buffer<xla::ffi::S32>;
using Floats = xla::ffi::Buffer<xla::ffi::F32>;
using FloatsOut = xla::ffi::ResultBuffer<xla::ffi::F32>;

// Returns when done() holds, which another thread is about to make true.
template <class Done>
void SpinUntil(Done done) {
  for (int spins = 0; !done(); ++spins) {
    if (spins > 10000) std::this_thread::yield();
  }
}

// Calls piece(0) .. piece(count - 1), begun in that order, and returns when all have returned. The caller takes whatever no other thread has
// taken: it never waits for a thread that is busy elsewhere, so kernels that run at once can't block one another.
inline void ForEach(xla::ffi::ThreadPool& pool, int64_t count, std::function<void(int64_t)> piece) {
  struct Work {
    std::atomic<int64_t> next{0}, done{0};
    int64_t count;
    std::function<void(int64_t)> piece;

    void Take() {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        piece(i);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  const int64_t helpers = std::min<int64_t>(count, pool.num_threads()) - 1;
  if (helpers < 1) {
    for (int64_t i = 0; i < count; ++i) piece(i);
    return;
  }
  auto work = std::make_shared<Work>();  // a helper may begin after this call has returned
  work->count = count;
  work->piece = std::move(piece);
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work->Take(); });
  work->Take();
  SpinUntil([&] { return work->done.load(std::memory_order_acquire) == count; });
}

// Calls work(row) for M rows of F numbers each, which are cheap: few of them cost less than waking another thread.
template <class Work>
void EachRow(xla::ffi::ThreadPool& pool, int64_t M, int64_t F, Work work) {
  constexpr int64_t kAlone = 1 << 14, kMostPieces = 8;
  const int64_t pieces = M * F < kAlone ? 1 : std::min(M, kMostPieces);
  ForEach(pool, pieces, [=](int64_t piece) {
    for (int64_t i = M * piece / pieces; i < M * (piece + 1) / pieces; ++i) work(i);
  });
}

}  // namespace locojax
