// SPDX-License-Identifier: Apache-2.0
//
// Values of the three types that kernels take, one by one and in packs of 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "launch.cuh"
#include "launchers.h"

namespace fsmoe {

constexpr int kMaxThreads = 256;
constexpr int kMaxWarps = kMaxThreads / kWarp;

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }

template <typename Out>
__device__ __forceinline__ Out from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}

// As many values as one thread moves at a time. Of 16 bytes or a multiple of that (or of one value), so that it is
// loaded and stored as vectors of 16 bytes.
template <typename T, int kSize>
struct alignas(sizeof(T) * kSize < 16 ? sizeof(T) * kSize : 16) Pack {
  T values[kSize];
};

// Whole warps, and no more of them than have something to move.
inline int threads_for(int64_t num_packs) {
  const int64_t warps = ceil_divide(num_packs, kWarp);
  return kWarp * static_cast<int>(warps < 1 ? 1 : (warps > kMaxWarps ? kMaxWarps : warps));
}

inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <typename T>
struct Type {
  using type = T;
};

// Calls with the types that two dtypes stand for.
template <typename Call>
cudaError_t with_type(Dtype dtype, const Call& call) {
  switch (dtype) {
    case Dtype::kFloat32:
      return call(Type<float>());
    case Dtype::kBFloat16:
      return call(Type<__nv_bfloat16>());
    default:
      return call(Type<__half>());
  }
}

template <typename Call>
cudaError_t with_types(Dtype one, Dtype other, const Call& call) {
  return with_type(one, [&](auto a) { return with_type(other, [&](auto b) { return call(a, b); }); });
}

}  // namespace fsmoe
