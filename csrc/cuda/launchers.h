// SPDX-License-Identifier: Apache-2.0
//
// What the bindings know of the kernels, and all that the kernels know of their callers: plain pointers and sizes.
// Nothing of torch in here, so that every .cu compiles with nvcc alone.
//
// Letters: S tokens, K choices of a token, E experts, C slots of an expert, N = E * C slots, M width. All pointers are
// to memory of the device. A slot outside 0..N-1 means "no slot".
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fsmoe {

enum class Dtype { kFloat32, kBFloat16, kFloat16 };

// ---- rows.cu

// out [N, M] = rows of x [S, M], each at the slots [K, S] of its token; zero where no token is.
// taken [N]: workspace. Nothing is launched for the slots of nobody if none exist.
cudaError_t launch_arrange(const void* x, Dtype in, const int64_t* slots, void* out, Dtype out_dtype, uint8_t* taken,
                           int64_t num_tokens, int64_t num_choices, int64_t num_slots, int64_t width,
                           cudaStream_t stream);

// out [S, M] = sum over choices of weights [K, S] times rows of y [N, M]; weights may be null, for 1.
cudaError_t launch_restore(const void* y, Dtype in, const int64_t* slots, const float* weights, void* out,
                           Dtype out_dtype, int64_t num_tokens, int64_t num_choices, int64_t num_slots, int64_t width,
                           cudaStream_t stream);

// dy [N, M] and d_weights [K, S] from d_out [S, M], in one pass. taken [N]: workspace.
cudaError_t launch_restore_backward(const void* d_out, Dtype grad, const void* y, Dtype in, const int64_t* slots,
                                    const float* weights, void* dy, float* d_weights, uint8_t* taken,
                                    int64_t num_tokens, int64_t num_choices, int64_t num_slots, int64_t width,
                                    cudaStream_t stream);

// ---- slots.cu

constexpr int64_t kMaxExperts = 1024;  // as many as have their share of shared memory
constexpr int64_t kTokensPerTile = 256;

enum class Priority { kChoice, kToken, kScore };

// Where the score of choice k of token s for expert e lies: scores[k * strides.k + s * strides.s + e * strides.e].
struct ScoreStrides {
  int64_t k, s, e;
};

// experts [K, S] = the K best experts of every token by scores [S, E].
cudaError_t launch_choose(const float* scores, int64_t num_tokens, int64_t num_experts, int64_t num_choices,
                          int64_t* experts, cudaStream_t stream);

// How many numbers of 32 bits launch_take_slots wants to write to.
int64_t take_slots_workspace(int64_t num_tokens, int64_t num_choices, int64_t num_experts, Priority priority);

// slots [K, S] and counts [E] from experts [K, S]. used [S] may be null; scores are read for Priority::kScore only.
cudaError_t launch_take_slots(const int64_t* experts, const bool* used, Priority priority, const float* scores,
                              ScoreStrides strides, int64_t num_tokens, int64_t num_choices, int64_t num_experts,
                              int64_t capacity, int64_t* slots, int64_t* counts, uint32_t* workspace,
                              cudaStream_t stream);

}  // namespace fsmoe
