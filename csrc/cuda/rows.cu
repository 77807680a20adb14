// SPDX-License-Identifier: Apache-2.0
//
// Token rows to slots and back on the GPU. One block of threads per token: its row is read once and written to all of
// its slots, or its slots' rows are read once each and summed. Rows go in vectors of 16 bytes where width and addresses
// allow it. Nothing is added to memory that another block adds to, so results do not depend on timing: the sums are in
// float32, in the order of the choices, and rounded once.

#include "launch.cuh"
#include "launchers.h"
#include "values.cuh"

namespace fsmoe {
namespace {

// 16 bytes of the narrower of two types.
template <typename A, typename B>
constexpr int pack_size() {
  return 16 / static_cast<int>(sizeof(A) < sizeof(B) ? sizeof(A) : sizeof(B));
}

__device__ __forceinline__ bool in_range(int64_t slot, int64_t num_slots) {
  return static_cast<uint64_t>(slot) < static_cast<uint64_t>(num_slots);
}

// ---- arrange

template <typename In, typename Out, int kSize>
__global__ void arrange_kernel(const In* __restrict__ x, const int64_t* __restrict__ slots, Out* __restrict__ out,
                               uint8_t* __restrict__ taken, int64_t num_tokens, int64_t num_choices, int64_t num_slots,
                               int64_t width) {
  const int64_t token = blockIdx.x, num_packs = width / kSize;
  const auto* row = reinterpret_cast<const Pack<In, kSize>*>(x + token * width);
  for (int64_t p = threadIdx.x; p < num_packs; p += blockDim.x) {
    const Pack<In, kSize> source = row[p];
    Pack<Out, kSize> target;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      target.values[i] = from_float<Out>(to_float(source.values[i]));
    }
    for (int64_t k = 0; k < num_choices; ++k) {
      const int64_t slot = slots[k * num_tokens + token];
      if (in_range(slot, num_slots)) {
        reinterpret_cast<Pack<Out, kSize>*>(out + slot * width)[p] = target;
      }
    }
  }
  for (int64_t k = threadIdx.x; k < num_choices; k += blockDim.x) {
    const int64_t slot = slots[k * num_tokens + token];
    if (in_range(slot, num_slots)) {
      taken[slot] = 1;
    }
  }
}

// Rows that no token wrote become zero. One block per slot; most find theirs taken and end.
template <typename Out, int kSize>
__global__ void zero_kernel(Out* __restrict__ out, const uint8_t* __restrict__ taken, int64_t width) {
  const int64_t slot = blockIdx.x, num_packs = width / kSize;
  if (taken[slot]) {
    return;
  }
  Pack<Out, kSize> zero;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    zero.values[i] = from_float<Out>(0.0f);
  }
  auto* row = reinterpret_cast<Pack<Out, kSize>*>(out + slot * width);
  for (int64_t p = threadIdx.x; p < num_packs; p += blockDim.x) {
    row[p] = zero;
  }
}

// ---- restore

// The choices of a token that have a slot, in the order of these, and -1 behind them: written by all threads of a
// block, which wait before they read.
__device__ __forceinline__ void order_by_slot(const int64_t* slots, int64_t token, int64_t num_tokens,
                                              int64_t num_choices, int64_t num_slots, int32_t* order) {
  for (int64_t k = threadIdx.x; k < num_choices; k += blockDim.x) {
    order[k] = -1;
  }
  __syncthreads();
  for (int64_t k = threadIdx.x; k < num_choices; k += blockDim.x) {
    const int64_t slot = slots[k * num_tokens + token];
    if (!in_range(slot, num_slots)) {
      continue;
    }
    int rank = 0;
    for (int64_t other = 0; other < num_choices; ++other) {
      const int64_t its = slots[other * num_tokens + token];
      rank += in_range(its, num_slots) && (its < slot || (its == slot && other < k));
    }
    order[rank] = static_cast<int32_t>(k);
  }
}

template <typename In, typename Out, int kSize, bool kBySlot>
__global__ void restore_kernel(const In* __restrict__ y, const int64_t* __restrict__ slots, Weights weights,
                               Out* __restrict__ out, int64_t num_tokens, int64_t num_choices, int64_t num_slots,
                               int64_t width) {
  FSMOE_DYNAMIC_SHARED(int32_t, order);
  const int64_t token = blockIdx.x, num_packs = width / kSize;
  if constexpr (kBySlot) {
    order_by_slot(slots, token, num_tokens, num_choices, num_slots, order);
    __syncthreads();
  }
  auto* target = reinterpret_cast<Pack<Out, kSize>*>(out + token * width);
  for (int64_t p = threadIdx.x; p < num_packs; p += blockDim.x) {
    float sums[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      sums[i] = 0.0f;
    }
    for (int64_t n = 0; n < num_choices; ++n) {
      int64_t k = n;
      if constexpr (kBySlot) {
        k = order[n];
        if (k < 0) {
          break;
        }
      }
      const int64_t slot = slots[k * num_tokens + token];
      if (in_range(slot, num_slots)) {
        const float weight = weights.data == nullptr ? 1.0f : weights.data[weights.place(k, token)];
        const auto source = reinterpret_cast<const Pack<In, kSize>*>(y + slot * width)[p];
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          sums[i] += to_float(source.values[i]) * weight;
        }
      }
    }
    Pack<Out, kSize> rounded;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      rounded.values[i] = from_float<Out>(sums[i]);
    }
    target[p] = rounded;
  }
}

// ---- restore_backward

template <typename Grad, typename In, int kSize>
__global__ void restore_backward_kernel(const Grad* __restrict__ d_out, const In* __restrict__ y,
                                        const int64_t* __restrict__ slots, Weights weights, In* __restrict__ dy,
                                        float* __restrict__ d_weights, uint8_t* __restrict__ taken, int64_t num_tokens,
                                        int64_t num_choices, int64_t num_slots, int64_t width) {
  FSMOE_SHARED(float[kMaxWarps], warp_sums);
  const int64_t token = blockIdx.x, num_packs = width / kSize;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
  const auto* gradient = reinterpret_cast<const Pack<Grad, kSize>*>(d_out + token * width);
  for (int64_t k = 0; k < num_choices; ++k) {
    const int64_t choice = weights.place(k, token), slot = slots[k * num_tokens + token];
    if (!in_range(slot, num_slots)) {  // for all threads of the block alike
      if (threadIdx.x == 0) {
        d_weights[choice] = 0.0f;
      }
      continue;
    }
    const float weight = weights.data[choice];
    const auto* row = reinterpret_cast<const Pack<In, kSize>*>(y + slot * width);
    auto* target = reinterpret_cast<Pack<In, kSize>*>(dy + slot * width);
    float sum = 0.0f;
    for (int64_t p = threadIdx.x; p < num_packs; p += blockDim.x) {
      const Pack<Grad, kSize> g = gradient[p];
      const Pack<In, kSize> source = row[p];
      Pack<In, kSize> scaled;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float value = to_float(g.values[i]);
        sum += value * to_float(source.values[i]);
        scaled.values[i] = from_float<In>(value * weight);
      }
      target[p] = scaled;
    }
    // A tree of a fixed shape: the same bits every time.
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, offset);
    }
    if (lane == 0) {
      warp_sums[warp] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      float total = 0.0f;
      for (int w = 0; w < num_warps; ++w) {
        total += warp_sums[w];
      }
      d_weights[choice] = total;
      taken[slot] = 1;
    }
    __syncthreads();  // warp_sums is used again
  }
}

// ---- which kernel

template <typename In, typename Out, int kSize>
cudaError_t arrange_with(const void* x, const int64_t* slots, void* out, uint8_t* taken, int64_t num_tokens,
                         int64_t num_choices, int64_t num_slots, int64_t width, cudaStream_t stream) {
  const cudaError_t cleared = cudaMemsetAsync(taken, 0, static_cast<size_t>(num_slots), stream);
  if (cleared != cudaSuccess) {
    return cleared;
  }
  const int threads = threads_for(width / kSize);
  if (num_tokens > 0) {
    FSMOE_LAUNCH((arrange_kernel<In, Out, kSize>), num_tokens, threads, 0, stream, static_cast<const In*>(x), slots,
                 static_cast<Out*>(out), taken, num_tokens, num_choices, num_slots, width);
  }
  FSMOE_LAUNCH((zero_kernel<Out, kSize>), num_slots, threads, 0, stream, static_cast<Out*>(out),
               static_cast<const uint8_t*>(taken), width);
  return cudaGetLastError();
}

template <typename In, typename Out, int kSize>
cudaError_t restore_with(const void* y, const int64_t* slots, Weights weights, bool by_slot, void* out,
                         int64_t num_tokens, int64_t num_choices, int64_t num_slots, int64_t width,
                         cudaStream_t stream) {
  const int threads = threads_for(width / kSize);
  const auto* rows = static_cast<const In*>(y);
  auto* sums = static_cast<Out*>(out);
  if (by_slot) {
    const size_t shared_bytes = sizeof(int32_t) * static_cast<size_t>(num_choices);
    FSMOE_LAUNCH((restore_kernel<In, Out, kSize, true>), num_tokens, threads, shared_bytes, stream, rows, slots,
                 weights, sums, num_tokens, num_choices, num_slots, width);
  } else {
    FSMOE_LAUNCH((restore_kernel<In, Out, kSize, false>), num_tokens, threads, 0, stream, rows, slots, weights, sums,
                 num_tokens, num_choices, num_slots, width);
  }
  return cudaGetLastError();
}

template <typename Grad, typename In, int kSize>
cudaError_t restore_backward_with(const void* d_out, const void* y, const int64_t* slots, Weights weights, void* dy,
                                  float* d_weights, uint8_t* taken, int64_t num_tokens, int64_t num_choices,
                                  int64_t num_slots, int64_t width, cudaStream_t stream) {
  const cudaError_t cleared =
      num_slots > 0 ? cudaMemsetAsync(taken, 0, static_cast<size_t>(num_slots), stream) : cudaSuccess;
  if (cleared != cudaSuccess) {
    return cleared;
  }
  const int threads = threads_for(width / kSize);
  FSMOE_LAUNCH((restore_backward_kernel<Grad, In, kSize>), num_tokens, threads, 0, stream,
               static_cast<const Grad*>(d_out), static_cast<const In*>(y), slots, weights, static_cast<In*>(dy),
               d_weights, taken, num_tokens, num_choices, num_slots, width);
  if (num_slots > 0) {
    FSMOE_LAUNCH((zero_kernel<In, kSize>), num_slots, threads, 0, stream, static_cast<In*>(dy),
                 static_cast<const uint8_t*>(taken), width);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_arrange(const void* x, Dtype in, const int64_t* slots, void* out, Dtype out_dtype, uint8_t* taken,
                           int64_t num_tokens, int64_t num_choices, int64_t num_slots, int64_t width,
                           cudaStream_t stream) {
  if (num_slots == 0 || width == 0) {
    return cudaSuccess;
  }
  return with_types(in, out_dtype, [&](auto a, auto b) {
    using In = typename decltype(a)::type;
    using Out = typename decltype(b)::type;
    constexpr int kSize = pack_size<In, Out>();
    const auto run = width % kSize == 0 && is_aligned(x) && is_aligned(out) ? arrange_with<In, Out, kSize>
                                                                            : arrange_with<In, Out, 1>;
    return run(x, slots, out, taken, num_tokens, num_choices, num_slots, width, stream);
  });
}

cudaError_t launch_restore(const void* y, Dtype in, const int64_t* slots, Weights weights, bool by_slot, void* out,
                           Dtype out_dtype, int64_t num_tokens, int64_t num_choices, int64_t num_slots, int64_t width,
                           cudaStream_t stream) {
  if (num_tokens == 0 || width == 0) {
    return cudaSuccess;
  }
  return with_types(in, out_dtype, [&](auto a, auto b) {
    using In = typename decltype(a)::type;
    using Out = typename decltype(b)::type;
    constexpr int kSize = pack_size<In, Out>();
    const auto run = width % kSize == 0 && is_aligned(y) && is_aligned(out) ? restore_with<In, Out, kSize>
                                                                            : restore_with<In, Out, 1>;
    return run(y, slots, weights, by_slot, out, num_tokens, num_choices, num_slots, width, stream);
  });
}

cudaError_t launch_restore_backward(const void* d_out, Dtype grad, const void* y, Dtype in, const int64_t* slots,
                                    Weights weights, void* dy, float* d_weights, uint8_t* taken, int64_t num_tokens,
                                    int64_t num_choices, int64_t num_slots, int64_t width, cudaStream_t stream) {
  if (num_tokens == 0 || num_choices == 0 || width == 0) {
    return cudaErrorInvalidValue;  // the caller has zeros to return and no kernel to start
  }
  return with_types(grad, in, [&](auto a, auto b) {
    using Grad = typename decltype(a)::type;
    using In = typename decltype(b)::type;
    constexpr int kSize = pack_size<Grad, In>();
    const bool is_even = width % kSize == 0 && is_aligned(d_out) && is_aligned(y) && is_aligned(dy);
    const auto run = is_even ? restore_backward_with<Grad, In, kSize> : restore_backward_with<Grad, In, 1>;
    return run(d_out, y, slots, weights, dy, d_weights, taken, num_tokens, num_choices, num_slots, width, stream);
  });
}

}  // namespace fsmoe
