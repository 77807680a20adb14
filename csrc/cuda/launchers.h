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

#include "gated.h"

namespace fsmoe {

enum class Dtype { kFloat32, kBFloat16, kFloat16 };

#ifdef __CUDACC__
#define FSMOE_HERE __device__
#else
#define FSMOE_HERE
#endif

// ---- rows.cu

// The weight of choice k of token s is data[k * by_choice + s * by_token]; without data it is 1.
struct Weights {
  const float* data;
  int64_t by_choice, by_token;
  FSMOE_HERE int64_t place(int64_t k, int64_t s) const { return k * by_choice + s * by_token; }
};

// out [N, M] = rows of x [S, M], each at the slots [K, S] of its token; zero where no token is.
// taken [N]: workspace. Nothing is launched for the slots of nobody if none exist.
cudaError_t launch_arrange(const void* x, Dtype in, const int64_t* slots, void* out, Dtype out_dtype, uint8_t* taken,
                           int64_t num_tokens, int64_t num_choices, int64_t num_slots, int64_t width,
                           cudaStream_t stream);

// out [S, M] = sum over choices of weights times rows of y [N, M]. A sum goes in the order of the choices, or in that
// of their slots.
cudaError_t launch_restore(const void* y, Dtype in, const int64_t* slots, Weights weights, bool by_slot, void* out,
                           Dtype out_dtype, int64_t num_tokens, int64_t num_choices, int64_t num_slots, int64_t width,
                           cudaStream_t stream);

// dy [N, M] and d_weights from d_out [S, M], in one pass; d_weights lie as the weights do. taken [N]: workspace.
cudaError_t launch_restore_backward(const void* d_out, Dtype grad, const void* y, Dtype in, const int64_t* slots,
                                    Weights weights, void* dy, float* d_weights, uint8_t* taken, int64_t num_tokens,
                                    int64_t num_choices, int64_t num_slots, int64_t width, cudaStream_t stream);

// ---- gated.cu

// h [R, H] = the gated product of x [R, 2H], and with dh [R, H], which may be null, dx [R, 2H] as well.
cudaError_t launch_gated(const void* x, const void* dh, Dtype dtype, Form form, bool interleaved, float limit,
                         float alpha, void* dx, void* h, int64_t num_rows, int64_t width, cudaStream_t stream);

// ---- slots.cu

constexpr int64_t kTokensPerTile = 256;
constexpr uint32_t kOutOfRange = 1, kAboveLimit = 2;  // the bits of a fault

enum class Priority { kChoice, kToken, kScore };

// Where the score of choice k of token s for expert e lies: scores[k * strides.k + s * strides.s + e * strides.e].
struct ScoreStrides {
  int64_t k, s, e;
};

// A decision: choice k of token s is data[k * by_choice + s * by_token] = expert * capacity + place; E * capacity, and
// what is out of range, stand for none.
struct Choices {
  const int64_t* data;
  int64_t by_choice, by_token, num_tokens, num_choices, num_experts, capacity;
  // [3, T], or null for one segment of all tokens: the token at which a segment ends, its queue of expert 0, and the
  // step from one expert's queue to the next.
  const int64_t* segments;
  int64_t num_segments;

  FSMOE_HERE int64_t at(int64_t k, int64_t s) const { return data[k * by_choice + s * by_token]; }
  FSMOE_HERE bool is_one(int64_t value) const { return 0 <= value && value < num_experts * capacity; }
  FSMOE_HERE bool is_out(int64_t value) const { return value < 0 || value > num_experts * capacity; }
  FSMOE_HERE int64_t first_queue(int64_t t) const { return segments == nullptr ? 0 : segments[num_segments + t]; }
  FSMOE_HERE int64_t step(int64_t t) const { return segments == nullptr ? 1 : segments[2 * num_segments + t]; }
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

// How many numbers of 32 bits launch_number_rows wants to write to.
int64_t number_rows_workspace(Choices choices);

// rows [K, S], counts [E * T], ends [E * T] and fault [1] from a decision. limits [E] may be null.
cudaError_t launch_number_rows(Choices choices, const int64_t* limits, int64_t* rows, int64_t* counts, int32_t* ends,
                               int64_t* fault, uint32_t* workspace, cudaStream_t stream);

#undef FSMOE_HERE

}  // namespace fsmoe
