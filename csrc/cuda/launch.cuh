// SPDX-License-Identifier: Apache-2.0
//
// How a kernel is started. A macro, so that the kernels can also be compiled for the host and checked without a GPU:
// a C++ compiler does not know <<< >>>, and a test defines its own.
#pragma once

#include <cuda_runtime.h>

#ifndef FSMOE_LAUNCH
#define FSMOE_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...) \
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared_bytes, stream>>>(__VA_ARGS__)
#endif

// Shared memory of a kernel's block. A type is written whole: FSMOE_SHARED(float[8], sums).
#ifndef FSMOE_SHARED
#define FSMOE_SHARED(type, name) __shared__ fsmoe::Itself<type> name
#endif

// Shared memory of a size that is known when the kernel is started.
#ifndef FSMOE_DYNAMIC_SHARED
#define FSMOE_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

namespace fsmoe {

template <typename T>
using Itself = T;

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__host__ __device__ inline int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace fsmoe
