// SPDX-License-Identifier: Apache-2.0
//
// The gated products of experts on the GPU, each way in one pass over the rows; the forms are in csrc/includes/gated.h.
// Steps and roundings are those of torch's operators one after another. Products are fused with sums where torch's
// kernels, which are compiled so, fuse them. Where a bit differs all the same, torch's operators are used instead of
// these: see ds_fsmoe/components/expert_compute/gated_forms.py.

#include "launch.cuh"
#include "launchers.h"
#include "values.cuh"

namespace fsmoe {
namespace {

// As torch writes them: products of its constants, rounded to float32.
constexpr float kSqrtHalf = 0.70710678118654752440;
constexpr float kDensity = 2.0 / 1.7724538509055160273 * 0.70710678118654752440 * 0.5;
constexpr float kBeta = 1.41421356237309504880 * 2.0 / 1.7724538509055160273 * 0.5;
constexpr float kKappa = 0.044715;

// A value as memory of type T holds it.
template <typename T>
__device__ __forceinline__ float rounded(float value) {
  return to_float(from_float<T>(value));
}

__device__ __forceinline__ float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

__device__ __forceinline__ float silu_gradient(float dy, float x) {
  const float s = sigmoid_of(x);
  return dy * s * fmaf(x, 1.0f - s, 1.0f);
}

__device__ __forceinline__ float gelu(float x) { return x * 0.5f * (1.0f + erff(x * kSqrtHalf)); }

__device__ __forceinline__ float gelu_gradient(float dy, float x) {
  const float cdf = 0.5f * (1.0f + erff(x * kSqrtHalf));
  const float pdf = expf(-0.5f * x * x) * kDensity;
  return dy * fmaf(x, pdf, cdf);
}

__device__ __forceinline__ float gelu_tanh(float x) {
  const float inner = kBeta * fmaf(kKappa, x * x * x, x);
  return 0.5f * x * (1.0f + tanhf(inner));
}

__device__ __forceinline__ float gelu_tanh_gradient(float dy, float x) {
  const float squared = x * x;
  const float tanh_inner = tanhf(kBeta * fmaf(kKappa, squared * x, x));
  const float left = 0.5f * x, right = 1.0f + tanh_inner;
  const float of_tanh = fmaf(-tanh_inner, tanh_inner, 1.0f);
  const float of_inner = kBeta * fmaf(3.0f * kKappa, squared, 1.0f);
  return dy * fmaf(left * of_tanh, of_inner, 0.5f * right);
}

// torch's clamps hand on what is no number.
__device__ __forceinline__ float at_most(float value, float limit) { return value > limit ? limit : value; }

__device__ __forceinline__ float within(float value, float limit) {
  return value < -limit ? -limit : at_most(value, limit);
}

// Where the gradient of torch's clamp goes through.
__device__ __forceinline__ bool is_below(float value, float limit) {
  return kClampPassesLimit ? value <= limit : value < limit;
}

__device__ __forceinline__ bool is_within(float value, float limit) {
  return is_below(-value, limit) && is_below(value, limit);
}

// What stands for gate and up in the product, and what their gradients are made of.
struct Factors {
  float clamped_gate, sigmoid, act, of_gate, of_up;
};

template <typename T, Form kForm>
__device__ __forceinline__ Factors factors(float gate, float up, float limit, float alpha) {
  Factors found{gate, 0.0f, 0.0f, 0.0f, up};
  if constexpr (kForm == Form::kSilu) {
    found.of_gate = rounded<T>(silu(gate));
  } else if constexpr (kForm == Form::kGelu) {
    found.of_gate = rounded<T>(gelu(gate));
  } else if constexpr (kForm == Form::kGeluTanh) {
    found.of_gate = rounded<T>(gelu_tanh(gate));
  } else if constexpr (kForm == Form::kSiluOfClamped) {
    found.clamped_gate = rounded<T>(at_most(gate, limit));
    found.of_gate = rounded<T>(silu(found.clamped_gate));
    found.of_up = rounded<T>(within(up, limit));
  } else if constexpr (kForm == Form::kClampedSilu) {
    found.act = rounded<T>(silu(gate));
    found.of_gate = rounded<T>(at_most(found.act, limit));
    found.of_up = rounded<T>(within(up, limit));
  } else {
    found.clamped_gate = rounded<T>(at_most(gate, limit));
    found.sigmoid = rounded<T>(sigmoid_of(rounded<T>(found.clamped_gate * alpha)));
    found.of_gate = rounded<T>(found.clamped_gate * found.sigmoid);
    found.of_up = rounded<T>(rounded<T>(within(up, limit)) + 1.0f);
  }
  return found;
}

template <typename T, Form kForm>
__device__ __forceinline__ float gate_gradient(const Factors& found, float gate, float dh, float limit, float alpha) {
  const float of_gate = rounded<T>(dh * found.of_up);
  if constexpr (kForm == Form::kSilu) {
    return silu_gradient(of_gate, gate);
  } else if constexpr (kForm == Form::kGelu) {
    return gelu_gradient(of_gate, gate);
  } else if constexpr (kForm == Form::kGeluTanh) {
    return gelu_tanh_gradient(of_gate, gate);
  } else if constexpr (kForm == Form::kSiluOfClamped) {
    return is_below(gate, limit) ? silu_gradient(of_gate, found.clamped_gate) : 0.0f;
  } else if constexpr (kForm == Form::kClampedSilu) {
    return silu_gradient(is_below(found.act, limit) ? of_gate : 0.0f, gate);
  } else {
    const float s = found.sigmoid, of_sigmoid = rounded<T>(of_gate * found.clamped_gate);
    // torch computes this one in the type of the rows.
    const float before = rounded<T>(rounded<T>(of_sigmoid * rounded<T>(1.0f - s)) * s);
    return is_below(gate, limit) ? rounded<T>(of_gate * s) + rounded<T>(before * alpha) : 0.0f;
  }
}

template <typename T, Form kForm>
__device__ __forceinline__ float up_gradient(const Factors& found, float up, float dh, float limit) {
  if constexpr (kForm == Form::kSilu || kForm == Form::kGelu || kForm == Form::kGeluTanh) {
    return dh * found.of_gate;
  }
  return is_within(up, limit) ? dh * found.of_gate : 0.0f;
}

// A row [2 * H] in packs: H / kSize of gate and of up, or as many pairs of packs where gate and up alternate.
template <typename T, int kSize, bool kInterleaved>
struct Row {
  T* data;
  int64_t num_packs;

  __device__ __forceinline__ void read(int64_t p, T (&gate)[kSize], T (&up)[kSize]) const {
    const auto* packs = reinterpret_cast<const Pack<T, kSize>*>(data);
    const Pack<T, kSize> one = packs[kInterleaved ? 2 * p : p], other = packs[kInterleaved ? 2 * p + 1 : num_packs + p];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if constexpr (kInterleaved) {
        gate[i] = 2 * i < kSize ? one.values[2 * i] : other.values[2 * i - kSize];
        up[i] = 2 * i + 1 < kSize ? one.values[2 * i + 1] : other.values[2 * i + 1 - kSize];
      } else {
        gate[i] = one.values[i];
        up[i] = other.values[i];
      }
    }
  }

  __device__ __forceinline__ void write(int64_t p, const T (&gate)[kSize], const T (&up)[kSize]) const {
    auto* packs = reinterpret_cast<Pack<T, kSize>*>(data);
    Pack<T, kSize> one, other;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if constexpr (kInterleaved) {
        (2 * i < kSize ? one.values[2 * i] : other.values[2 * i - kSize]) = gate[i];
        (2 * i + 1 < kSize ? one.values[2 * i + 1] : other.values[2 * i + 1 - kSize]) = up[i];
      } else {
        one.values[i] = gate[i];
        other.values[i] = up[i];
      }
    }
    packs[kInterleaved ? 2 * p : p] = one;
    packs[kInterleaved ? 2 * p + 1 : num_packs + p] = other;
  }
};

template <typename T, int kSize, Form kForm, bool kInterleaved>
__global__ void gated_kernel(const T* __restrict__ x, T* __restrict__ h, int64_t width, float limit, float alpha) {
  const int64_t row = blockIdx.x, num_packs = width / kSize;
  const Row<T, kSize, kInterleaved> from{const_cast<T*>(x) + row * 2 * width, num_packs};
  auto* to = reinterpret_cast<Pack<T, kSize>*>(h + row * width);
  for (int64_t p = threadIdx.x; p < num_packs; p += blockDim.x) {
    T gate[kSize], up[kSize];
    from.read(p, gate, up);
    Pack<T, kSize> made;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const Factors found = factors<T, kForm>(to_float(gate[i]), to_float(up[i]), limit, alpha);
      made.values[i] = from_float<T>(found.of_gate * found.of_up);
    }
    to[p] = made;
  }
}

template <typename T, int kSize, Form kForm, bool kInterleaved>
__global__ void gated_backward_kernel(const T* __restrict__ x, const T* __restrict__ dh, T* __restrict__ dx,
                                      T* __restrict__ h, int64_t width, float limit, float alpha) {
  const int64_t row = blockIdx.x, num_packs = width / kSize;
  const Row<T, kSize, kInterleaved> from{const_cast<T*>(x) + row * 2 * width, num_packs};
  const Row<T, kSize, kInterleaved> to{dx + row * 2 * width, num_packs};
  const auto* gradient = reinterpret_cast<const Pack<T, kSize>*>(dh + row * width);
  auto* again = reinterpret_cast<Pack<T, kSize>*>(h + row * width);
  for (int64_t p = threadIdx.x; p < num_packs; p += blockDim.x) {
    T gate[kSize], up[kSize];
    from.read(p, gate, up);
    const Pack<T, kSize> given = gradient[p];
    Pack<T, kSize> made;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const float g = to_float(gate[i]), u = to_float(up[i]), d = to_float(given.values[i]);
      const Factors found = factors<T, kForm>(g, u, limit, alpha);
      made.values[i] = from_float<T>(found.of_gate * found.of_up);
      float dg = gate_gradient<T, kForm>(found, g, d, limit, alpha), du = up_gradient<T, kForm>(found, u, d, limit);
      if constexpr (kInterleaved) {  // as autograd, which adds the gradients of two slices: there is no -0
        dg += 0.0f;
        du += 0.0f;
      }
      gate[i] = from_float<T>(dg);
      up[i] = from_float<T>(du);
    }
    again[p] = made;
    to.write(p, gate, up);
  }
}

// ---- which kernel

template <Form kForm>
struct Of {
  static constexpr Form kIs = kForm;
};

template <typename Call>
cudaError_t with_form(Form form, const Call& call) {
  switch (form) {
    case Form::kSilu:
      return call(Of<Form::kSilu>());
    case Form::kGelu:
      return call(Of<Form::kGelu>());
    case Form::kGeluTanh:
      return call(Of<Form::kGeluTanh>());
    case Form::kSiluOfClamped:
      return call(Of<Form::kSiluOfClamped>());
    case Form::kClampedSilu:
      return call(Of<Form::kClampedSilu>());
    default:
      return call(Of<Form::kSwishOfClamped>());
  }
}

template <typename T, int kSize, Form kForm, bool kInterleaved>
cudaError_t run(const T* x, const T* dh, T* dx, T* h, int64_t num_rows, int64_t width, float limit, float alpha,
                cudaStream_t stream) {
  const int threads = threads_for(width / kSize);
  if (dh == nullptr) {
    FSMOE_LAUNCH((gated_kernel<T, kSize, kForm, kInterleaved>), num_rows, threads, 0, stream, x, h, width, limit,
                 alpha);
  } else {
    FSMOE_LAUNCH((gated_backward_kernel<T, kSize, kForm, kInterleaved>), num_rows, threads, 0, stream, x, dh, dx, h,
                 width, limit, alpha);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_gated(const void* x, const void* dh, Dtype dtype, Form form, bool interleaved, float limit,
                         float alpha, void* dx, void* h, int64_t num_rows, int64_t width, cudaStream_t stream) {
  if (num_rows == 0 || width == 0) {
    return cudaSuccess;
  }
  return with_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kSize = 16 / static_cast<int>(sizeof(T));
    const bool is_even =
        width % kSize == 0 && is_aligned(x) && is_aligned(h) && (dh == nullptr || (is_aligned(dh) && is_aligned(dx)));
    return with_form(form, [&](auto of) {
      constexpr Form kForm = decltype(of)::kIs;
      const auto way = interleaved ? (is_even ? run<T, kSize, kForm, true> : run<T, 1, kForm, true>)
                                   : (is_even ? run<T, kSize, kForm, false> : run<T, 1, kForm, false>);
      return way(static_cast<const T*>(x), static_cast<const T*>(dh), static_cast<T*>(dx), static_cast<T*>(h), num_rows,
                 width, limit, alpha, stream);
    });
  });
}

}  // namespace fsmoe
