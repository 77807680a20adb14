// SPDX-License-Identifier: Apache-2.0
//
// The kernels and their launchers on emulated CUDA, by plain C names.

#include "cuda_runtime_api.h"

#include "rows.cu"
#include "slots.cu"

using fsmoe::Dtype;
using fsmoe::Priority;

extern "C" {

int arrange(const void* x, int in, const int64_t* slots, void* out, int out_dtype, uint8_t* taken, int64_t num_tokens,
            int64_t num_choices, int64_t num_slots, int64_t width) {
  return fsmoe::launch_arrange(x, Dtype(in), slots, out, Dtype(out_dtype), taken, num_tokens, num_choices, num_slots,
                               width, nullptr);
}

int restore(const void* y, int in, const int64_t* slots, const float* weights, void* out, int out_dtype,
            int64_t num_tokens, int64_t num_choices, int64_t num_slots, int64_t width) {
  return fsmoe::launch_restore(y, Dtype(in), slots, weights, out, Dtype(out_dtype), num_tokens, num_choices, num_slots,
                               width, nullptr);
}

int restore_backward(const void* d_out, int grad, const void* y, int in, const int64_t* slots, const float* weights,
                     void* dy, float* d_weights, uint8_t* taken, int64_t num_tokens, int64_t num_choices,
                     int64_t num_slots, int64_t width) {
  return fsmoe::launch_restore_backward(d_out, Dtype(grad), y, Dtype(in), slots, weights, dy, d_weights, taken,
                                        num_tokens, num_choices, num_slots, width, nullptr);
}

int choose(const float* scores, int64_t num_tokens, int64_t num_experts, int64_t num_choices, int64_t* experts) {
  return fsmoe::launch_choose(scores, num_tokens, num_experts, num_choices, experts, nullptr);
}

int64_t take_slots_workspace(int64_t num_tokens, int64_t num_choices, int64_t num_experts, int priority) {
  return fsmoe::take_slots_workspace(num_tokens, num_choices, num_experts, Priority(priority));
}

int take_slots(const int64_t* experts, const bool* used, int priority, const float* scores, int64_t stride_k,
               int64_t stride_s, int64_t stride_e, int64_t num_tokens, int64_t num_choices, int64_t num_experts,
               int64_t capacity, int64_t* slots, int64_t* counts, uint32_t* workspace) {
  return fsmoe::launch_take_slots(experts, used, Priority(priority), scores, {stride_k, stride_s, stride_e},
                                  num_tokens, num_choices, num_experts, capacity, slots, counts, workspace, nullptr);
}

}  // extern "C"
