// SPDX-License-Identifier: Apache-2.0
//
// The CUDA operators as torch sees them: checks, allocations, the current stream. What is computed is written at the
// top of csrc/cpu/arrange.cpp and csrc/cpu/slots.cpp; the kernels are in the .cu files beside this one.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "launchers.h"

namespace {

// Of one launch: blocks are counted in 31 bits, and choices in 32.
constexpr int64_t kMaxBlocks = 0x7fffffff;
// Choices of a token that a block puts in order: as many as its shared memory holds.
constexpr int64_t kMaxOrdered = 8192;

bool has_kernel(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf; }

fsmoe::Dtype dtype_of(at::ScalarType dtype) {
  return dtype == at::kFloat ? fsmoe::Dtype::kFloat32
                             : (dtype == at::kBFloat16 ? fsmoe::Dtype::kBFloat16 : fsmoe::Dtype::kFloat16);
}

void check_rows(const char* op, const char* name, const at::Tensor& rows) {
  TORCH_CHECK(rows.dim() == 2, op, ": ", name, " must be 2-dimensional, got shape ", rows.sizes());
  TORCH_CHECK(has_kernel(rows.scalar_type()), op, ": ", name, " must be float32, bfloat16 or float16, got ",
              rows.scalar_type());
  TORCH_CHECK(rows.size(0) <= kMaxBlocks, op, ": ", name, " has ", rows.size(0), " rows; ", kMaxBlocks, " can be");
}

void check_dtype(const char* op, at::ScalarType dtype) {
  TORCH_CHECK(has_kernel(dtype), op, ": dtype must be float32, bfloat16 or float16, got ", dtype);
}

void check_choices(const char* op, const char* name, const at::Tensor& choices, const at::Tensor& other) {
  TORCH_CHECK(choices.dim() == 2, op, ": ", name, " must be [K, S], got shape ", choices.sizes());
  TORCH_CHECK(choices.scalar_type() == at::kLong, op, ": ", name, " must be int64, got ", choices.scalar_type());
  TORCH_CHECK(choices.device() == other.device(), op, ": ", name, " is on ", choices.device(), ", not on ",
              other.device());
}

void check_weights(const char* op, const at::Tensor& weights, const at::Tensor& slots) {
  TORCH_CHECK(weights.sizes() == slots.sizes(), op, ": weights must have the shape of slots ", slots.sizes(), ", got ",
              weights.sizes());
  TORCH_CHECK(weights.scalar_type() == at::kFloat, op, ": weights must be float32, got ", weights.scalar_type());
  TORCH_CHECK(weights.device() == slots.device(), op, ": weights are on ", weights.device(), ", not on ",
              slots.device());
}

// Read where they lie.
fsmoe::Weights weights_of(const at::Tensor& weights) {
  return {weights.const_data_ptr<float>(), weights.stride(0), weights.stride(1)};
}

at::Tensor workspace(int64_t size, at::ScalarType dtype, const at::Tensor& like) {
  return at::empty({size}, like.options().dtype(dtype));
}

at::Tensor arrange(const at::Tensor& x, const at::Tensor& slots, int64_t num_slots,
                   std::optional<at::ScalarType> dtype) {
  const char* op = "fsmoe::arrange";
  check_rows(op, "x", x);
  check_choices(op, "slots", slots, x);
  TORCH_CHECK(x.size(0) == slots.size(1), op, ": x has ", x.size(0), " rows but slots is for ", slots.size(1),
              " tokens");
  TORCH_CHECK(0 <= num_slots && num_slots <= kMaxBlocks, op, ": num_slots must not be negative, nor above ", kMaxBlocks,
              ", got ", num_slots);
  const auto asked = dtype.value_or(x.scalar_type());
  check_dtype(op, asked);
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor out = at::empty({num_slots, x.size(1)}, x.options().dtype(asked));
  const at::Tensor x_dense = x.contiguous(), slots_dense = slots.contiguous();
  const at::Tensor taken = workspace(num_slots, at::kByte, x);
  C10_CUDA_CHECK(fsmoe::launch_arrange(x_dense.const_data_ptr(), dtype_of(x.scalar_type()),
                                       slots_dense.const_data_ptr<int64_t>(), out.mutable_data_ptr(), dtype_of(asked),
                                       taken.mutable_data_ptr<uint8_t>(), x.size(0), slots.size(0), num_slots,
                                       x.size(1), c10::cuda::getCurrentCUDAStream()));
  return out;
}

at::Tensor restore(const at::Tensor& y, const at::Tensor& slots, const std::optional<at::Tensor>& weights,
                   std::optional<at::ScalarType> dtype, bool by_slot) {
  const char* op = "fsmoe::restore";
  check_rows(op, "y", y);
  check_choices(op, "slots", slots, y);
  TORCH_CHECK(slots.size(1) <= kMaxBlocks, op, ": slots is for ", slots.size(1), " tokens; ", kMaxBlocks, " can be");
  TORCH_CHECK(!by_slot || slots.size(0) <= kMaxOrdered, op, ": by_slot takes at most ", kMaxOrdered,
              " choices of a token, got ", slots.size(0));
  if (weights.has_value()) {
    check_weights(op, *weights, slots);
  }
  const auto asked = dtype.value_or(y.scalar_type());
  check_dtype(op, asked);
  const c10::cuda::CUDAGuard guard(y.device());
  at::Tensor out = at::empty({slots.size(1), y.size(1)}, y.options().dtype(asked));
  const at::Tensor y_dense = y.contiguous(), slots_dense = slots.contiguous();
  C10_CUDA_CHECK(fsmoe::launch_restore(
      y_dense.const_data_ptr(), dtype_of(y.scalar_type()), slots_dense.const_data_ptr<int64_t>(),
      weights.has_value() ? weights_of(*weights) : fsmoe::Weights{nullptr, 0, 0}, by_slot, out.mutable_data_ptr(),
      dtype_of(asked), slots.size(1), slots.size(0), y.size(0), y.size(1), c10::cuda::getCurrentCUDAStream()));
  return out;
}

std::tuple<at::Tensor, at::Tensor> restore_backward(const at::Tensor& d_out, const at::Tensor& y,
                                                    const at::Tensor& slots, const at::Tensor& weights) {
  const char* op = "fsmoe::restore_backward";
  check_rows(op, "d_out", d_out);
  check_rows(op, "y", y);
  TORCH_CHECK(d_out.device() == y.device(), op, ": d_out is on ", d_out.device(), ", not on ", y.device());
  check_choices(op, "slots", slots, y);
  check_weights(op, weights, slots);
  TORCH_CHECK(d_out.size(0) == slots.size(1) && d_out.size(1) == y.size(1), op, ": d_out must be [", slots.size(1),
              ", ", y.size(1), "], got shape ", d_out.sizes());
  if (y.size(1) == 0 || slots.numel() == 0) {
    return {at::zeros(y.sizes(), y.options()), at::zeros_like(weights)};
  }
  const c10::cuda::CUDAGuard guard(y.device());
  at::Tensor dy = at::empty(y.sizes(), y.options());
  // Gradients lie as the weights do, but each in a place of its own.
  const at::Tensor weights_dense = weights.is_non_overlapping_and_dense() ? weights : weights.clone();
  at::Tensor d_weights = at::empty_like(weights_dense);
  const at::Tensor d_out_dense = d_out.contiguous(), y_dense = y.contiguous(), slots_dense = slots.contiguous();
  const at::Tensor taken = workspace(y.size(0), at::kByte, y);
  C10_CUDA_CHECK(fsmoe::launch_restore_backward(
      d_out_dense.const_data_ptr(), dtype_of(d_out.scalar_type()), y_dense.const_data_ptr(), dtype_of(y.scalar_type()),
      slots_dense.const_data_ptr<int64_t>(), weights_of(weights_dense), dy.mutable_data_ptr(),
      d_weights.mutable_data_ptr<float>(), taken.mutable_data_ptr<uint8_t>(), slots.size(1), slots.size(0), y.size(0),
      y.size(1), c10::cuda::getCurrentCUDAStream()));
  return {dy, d_weights};
}

// ---- gated

std::tuple<at::Tensor, at::Tensor> run_gated(const char* op, const at::Tensor& x, const at::Tensor& dh,
                                             c10::string_view form, bool interleaved, double limit, double alpha) {
  check_rows(op, "x", x);
  TORCH_CHECK(x.size(1) % 2 == 0, op, ": x must be [R, 2 * H], got shape ", x.sizes());
  fsmoe::Form found{};
  TORCH_CHECK(fsmoe::find_form(form.data(), form.size(), &found), op, ": no form is named '", form, "'");
  const int64_t width = x.size(1) / 2;
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor x_dense = x.contiguous();
  at::Tensor h = at::empty({x.size(0), width}, x.options()), dh_dense, dx;
  if (dh.defined()) {
    TORCH_CHECK(dh.dim() == 2 && dh.size(0) == x.size(0) && dh.size(1) == width, op, ": dh must be [", x.size(0), ", ",
                width, "], got shape ", dh.sizes());
    TORCH_CHECK(dh.scalar_type() == x.scalar_type() && dh.device() == x.device(), op, ": dh must be ", x.scalar_type(),
                " on ", x.device(), ", got ", dh.scalar_type(), " on ", dh.device());
    dh_dense = dh.contiguous();
    dx = at::empty(x.sizes(), x.options());
  }
  C10_CUDA_CHECK(fsmoe::launch_gated(x_dense.const_data_ptr(), dh.defined() ? dh_dense.const_data_ptr() : nullptr,
                                     dtype_of(x.scalar_type()), found, interleaved, static_cast<float>(limit),
                                     static_cast<float>(alpha), dh.defined() ? dx.mutable_data_ptr() : nullptr,
                                     h.mutable_data_ptr(), x.size(0), width, c10::cuda::getCurrentCUDAStream()));
  return {dx, h};
}

at::Tensor gated(const at::Tensor& x, c10::string_view form, bool interleaved, double limit, double alpha) {
  return std::get<1>(run_gated("fsmoe::gated", x, at::Tensor(), form, interleaved, limit, alpha));
}

std::tuple<at::Tensor, at::Tensor> gated_backward(const at::Tensor& x, const at::Tensor& dh, c10::string_view form,
                                                  bool interleaved, double limit, double alpha) {
  return run_gated("fsmoe::gated_backward", x, dh, form, interleaved, limit, alpha);
}

// ---- slots

fsmoe::Priority priority_of(const char* op, c10::string_view name) {
  if (name == "choice") return fsmoe::Priority::kChoice;
  if (name == "token") return fsmoe::Priority::kToken;
  if (name == "score") return fsmoe::Priority::kScore;
  TORCH_CHECK(false, op, ": priority = '", name, "': must be one of 'choice', 'token', 'score'");
}

void check_common(const char* op, int64_t capacity, int64_t num_choices, int64_t num_tokens,
                  const std::optional<at::Tensor>& used, const at::Tensor& other) {
  TORCH_CHECK(capacity >= 0, op, ": capacity must not be negative, got ", capacity);
  TORCH_CHECK(num_choices * num_tokens <= kMaxBlocks, op, ": ", num_choices, " choices of ", num_tokens,
              " tokens are more than ", kMaxBlocks);
  if (used.has_value()) {
    TORCH_CHECK(used->scalar_type() == at::kBool && used->dim() == 1 && used->size(0) == num_tokens, op,
                ": used must be bool and [", num_tokens, "], got ", used->scalar_type(), " of shape ", used->sizes());
    TORCH_CHECK(used->device() == other.device(), op, ": used is on ", used->device(), ", not on ", other.device());
  }
}

std::tuple<at::Tensor, at::Tensor> take_slots_from(const at::Tensor& experts, int64_t num_experts, int64_t capacity,
                                                   const std::optional<at::Tensor>& used, fsmoe::Priority priority,
                                                   const at::Tensor& scores, fsmoe::ScoreStrides strides) {
  const int64_t num_choices = experts.size(0), num_tokens = experts.size(1);
  at::Tensor slots = at::empty(experts.sizes(), experts.options());
  at::Tensor counts = at::empty({num_experts}, experts.options());
  const at::Tensor used_dense = used.has_value() ? used->contiguous() : at::Tensor();
  const at::Tensor space =
      workspace(fsmoe::take_slots_workspace(num_tokens, num_choices, num_experts, priority), at::kInt, experts);
  C10_CUDA_CHECK(fsmoe::launch_take_slots(
      experts.const_data_ptr<int64_t>(), used_dense.defined() ? used_dense.const_data_ptr<bool>() : nullptr, priority,
      scores.defined() ? scores.const_data_ptr<float>() : nullptr, strides, num_tokens, num_choices, num_experts,
      capacity, slots.mutable_data_ptr<int64_t>(), counts.mutable_data_ptr<int64_t>(),
      reinterpret_cast<uint32_t*>(space.mutable_data_ptr<int32_t>()), c10::cuda::getCurrentCUDAStream()));
  return {slots, counts};
}

void check_scores(const char* op, const at::Tensor& scores) {
  TORCH_CHECK(scores.scalar_type() == at::kFloat, op, ": scores must be float32, got ", scores.scalar_type());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> top_k_slots(const at::Tensor& scores, int64_t k, int64_t capacity,
                                                           const std::optional<at::Tensor>& used,
                                                           c10::string_view priority) {
  const char* op = "fsmoe::top_k_slots";
  TORCH_CHECK(scores.dim() == 2, op, ": scores must be [S, E], got shape ", scores.sizes());
  check_scores(op, scores);
  const int64_t num_tokens = scores.size(0), num_experts = scores.size(1);
  TORCH_CHECK(1 <= k && k <= num_experts, op, ": k = ", k, ": must be between 1 and the number of experts (",
              num_experts, ")");
  check_common(op, capacity, k, num_tokens, used, scores);
  const auto order = priority_of(op, priority);
  const c10::cuda::CUDAGuard guard(scores.device());
  const at::Tensor scores_dense = scores.contiguous();
  at::Tensor experts = at::empty({k, num_tokens}, scores.options().dtype(at::kLong));
  C10_CUDA_CHECK(fsmoe::launch_choose(scores_dense.const_data_ptr<float>(), num_tokens, num_experts, k,
                                      experts.mutable_data_ptr<int64_t>(), c10::cuda::getCurrentCUDAStream()));
  auto [slots, counts] = take_slots_from(experts, num_experts, capacity, used, order, scores_dense,
                                         fsmoe::ScoreStrides{0, num_experts, 1});
  return {experts, slots, counts};
}

std::tuple<at::Tensor, at::Tensor> take_slots(const at::Tensor& experts, int64_t num_experts, int64_t capacity,
                                              const std::optional<at::Tensor>& used, c10::string_view priority,
                                              const std::optional<at::Tensor>& scores) {
  const char* op = "fsmoe::take_slots";
  check_choices(op, "experts", experts, experts);
  TORCH_CHECK(num_experts >= 1, op, ": num_experts must be at least 1, got ", num_experts);
  check_common(op, capacity, experts.size(0), experts.size(1), used, experts);
  const auto order = priority_of(op, priority);
  at::Tensor scores_dense;
  if (order == fsmoe::Priority::kScore) {
    TORCH_CHECK(scores.has_value(), op, ": priority 'score' needs scores [K, S]");
    check_scores(op, *scores);
    TORCH_CHECK(scores->sizes() == experts.sizes(), op, ": scores must have the shape of experts ", experts.sizes(),
                ", got ", scores->sizes());
    TORCH_CHECK(scores->device() == experts.device(), op, ": scores are on ", scores->device(), ", not on ",
                experts.device());
    scores_dense = scores->contiguous();
  }
  const c10::cuda::CUDAGuard guard(experts.device());
  return take_slots_from(experts.contiguous(), num_experts, capacity, used, order, scores_dense,
                         fsmoe::ScoreStrides{experts.size(1), 1, 0});
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> number_rows(const at::Tensor& choices, int64_t num_experts,
                                                                       int64_t capacity,
                                                                       const std::optional<at::Tensor>& segments,
                                                                       const std::optional<at::Tensor>& limits) {
  const char* op = "fsmoe::number_rows";
  check_choices(op, "choices", choices, choices);
  TORCH_CHECK(num_experts >= 1, op, ": num_experts must be at least 1, got ", num_experts);
  TORCH_CHECK(capacity >= 0, op, ": capacity must not be negative, got ", capacity);
  TORCH_CHECK(choices.numel() <= kMaxBlocks, op, ": ", choices.numel(), " choices are more than ", kMaxBlocks);
  if (segments.has_value()) {
    TORCH_CHECK(segments->dim() == 2 && segments->size(0) == 3 && segments->size(1) >= 1 &&
                    segments->scalar_type() == at::kLong,
                op, ": segments must be int64 and [3, T], got ", segments->scalar_type(), " of shape ",
                segments->sizes());
    TORCH_CHECK(segments->device() == choices.device(), op, ": segments are on ", segments->device(), ", not on ",
                choices.device());
  }
  if (limits.has_value()) {
    TORCH_CHECK(limits->dim() == 1 && limits->size(0) == num_experts && limits->scalar_type() == at::kLong, op,
                ": limits must be int64 and [", num_experts, "], got ", limits->scalar_type(), " of shape ",
                limits->sizes());
    TORCH_CHECK(limits->device() == choices.device(), op, ": limits are on ", limits->device(), ", not on ",
                choices.device());
  }
  const c10::cuda::CUDAGuard guard(choices.device());
  const at::Tensor segments_dense = segments.has_value() ? segments->contiguous() : at::Tensor();
  const at::Tensor limits_dense = limits.has_value() ? limits->contiguous() : at::Tensor();
  const fsmoe::Choices decision{choices.const_data_ptr<int64_t>(),
                                choices.stride(0),
                                choices.stride(1),
                                choices.size(1),
                                choices.size(0),
                                num_experts,
                                capacity,
                                segments.has_value() ? segments_dense.const_data_ptr<int64_t>() : nullptr,
                                segments.has_value() ? segments->size(1) : 1};
  const int64_t num_queues = num_experts * decision.num_segments;
  at::Tensor rows = at::empty({choices.size(0), choices.size(1)}, choices.options());
  at::Tensor counts = at::empty({num_queues}, choices.options());
  at::Tensor ends = at::empty({num_queues}, choices.options().dtype(at::kInt));
  at::Tensor fault = at::empty({}, choices.options());
  const at::Tensor space = workspace(fsmoe::number_rows_workspace(decision), at::kInt, choices);
  C10_CUDA_CHECK(fsmoe::launch_number_rows(
      decision, limits.has_value() ? limits_dense.const_data_ptr<int64_t>() : nullptr, rows.mutable_data_ptr<int64_t>(),
      counts.mutable_data_ptr<int64_t>(), ends.mutable_data_ptr<int32_t>(), fault.mutable_data_ptr<int64_t>(),
      reinterpret_cast<uint32_t*>(space.mutable_data_ptr<int32_t>()), c10::cuda::getCurrentCUDAStream()));
  return {rows, counts, ends, fault};
}

}  // namespace

// The schemas are in ds_fsmoe/ops/compiled.py: libraries of several device types share them.
TORCH_LIBRARY_IMPL(fsmoe, CUDA, library) {
  library.impl("arrange", TORCH_FN(arrange));
  library.impl("restore", TORCH_FN(restore));
  library.impl("restore_backward", TORCH_FN(restore_backward));
  library.impl("gated", TORCH_FN(gated));
  library.impl("gated_backward", TORCH_FN(gated_backward));
  library.impl("top_k_slots", TORCH_FN(top_k_slots));
  library.impl("take_slots", TORCH_FN(take_slots));
  library.impl("number_rows", TORCH_FN(number_rows));
}
