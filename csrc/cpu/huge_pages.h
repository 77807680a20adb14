// SPDX-License-Identifier: Apache-2.0
//
// New tensors in huge pages, where the system leaves that to the program (transparent_hugepage = madvise).
//
// Memory for a large tensor is fresh from the kernel each time (malloc does not keep pieces of 32 MB and more). It is
// mapped when it is first written, page by page, and on a virtual machine that takes several times as long as the
// writing: in pages of 4 kB an op that only moves rows spends most of its time there. All of these tensors is written,
// so huge pages cost no memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace fsmoe {

// As at::empty. All of it has to be written.
inline at::Tensor empty_in_huge_pages(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor tensor = at::empty(sizes, options);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = uintptr_t(2) << 20;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
  const uintptr_t first = (begin + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t last = (begin + tensor.nbytes()) & ~(kHugePage - 1);
  if (tensor.nbytes() >= 2 * kHugePage && first < last) {
    // It is advice: where the kernel does not take it, nothing is lost.
    (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
#endif
  return tensor;
}

}  // namespace fsmoe
