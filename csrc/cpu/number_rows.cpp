// SPDX-License-Identifier: Apache-2.0
//
// Numbers, counts and checks the rows of a decision on the CPU, in one pass each.
//
//   number_rows: choices [K, S] -> rows [K, S], counts [V], ends [V], fault []
//
// A choice is expert * capacity + place; E * capacity stands for none, and so does what is outside 0..E * capacity,
// which is a fault. A row's queue is that of its expert, or, where tokens are cut into T segments, that of its expert
// in its token's segment: V is E or E * T. Rows are numbered queue by queue, and within a queue by token, then by
// choice; K * S is the number of no row. The fault has bit 0 for a choice that is out of range, and bit 1 for an expert
// with more rows than its limit.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace {

constexpr int64_t kOutOfRange = 1, kAboveLimit = 2;

// The tokens of a segment end at `end`; its queue of expert e is first + e * step.
struct Segment {
  int64_t end, first, step;
};

std::vector<Segment> segments_of(const std::optional<at::Tensor>& segments, int64_t num_tokens) {
  if (!segments.has_value()) {
    return {{num_tokens, 0, 1}};
  }
  const at::Tensor dense = segments->contiguous();
  const auto* data = dense.const_data_ptr<int64_t>();
  const int64_t count = dense.size(1);
  std::vector<Segment> found;
  for (int64_t t = 0; t < count; ++t) {
    found.push_back({data[t], data[count + t], data[2 * count + t]});
  }
  return found;
}

void check(const at::Tensor& choices, int64_t num_experts, int64_t capacity, const std::optional<at::Tensor>& segments,
           const std::optional<at::Tensor>& limits) {
  const char* op = "fsmoe::number_rows";
  TORCH_CHECK(choices.dim() == 2, op, ": choices must be [K, S], got shape ", choices.sizes());
  TORCH_CHECK(choices.scalar_type() == at::kLong, op, ": choices must be int64, got ", choices.scalar_type());
  TORCH_CHECK(num_experts >= 1, op, ": num_experts must be at least 1, got ", num_experts);
  TORCH_CHECK(capacity >= 0, op, ": capacity must not be negative, got ", capacity);
  if (segments.has_value()) {
    TORCH_CHECK(segments->dim() == 2 && segments->size(0) == 3 && segments->size(1) >= 1 &&
                    segments->scalar_type() == at::kLong,
                op, ": segments must be int64 and [3, T], got ", segments->scalar_type(), " of shape ",
                segments->sizes());
  }
  if (limits.has_value()) {
    TORCH_CHECK(limits->dim() == 1 && limits->size(0) == num_experts && limits->scalar_type() == at::kLong, op,
                ": limits must be int64 and [", num_experts, "], got ", limits->scalar_type(), " of shape ",
                limits->sizes());
  }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> number_rows(const at::Tensor& choices, int64_t num_experts,
                                                                       int64_t capacity,
                                                                       const std::optional<at::Tensor>& segments,
                                                                       const std::optional<at::Tensor>& limits) {
  check(choices, num_experts, capacity, segments, limits);
  const int64_t num_choices = choices.size(0), num_tokens = choices.size(1);
  const int64_t by_choice = choices.stride(0), by_token = choices.stride(1), none = num_choices * num_tokens;
  const std::vector<Segment> cut = segments_of(segments, num_tokens);
  const int64_t num_queues = num_experts * static_cast<int64_t>(cut.size());
  const auto options = choices.options();
  at::Tensor rows = at::empty({num_choices, num_tokens}, options), counts = at::zeros({num_queues}, options);
  at::Tensor ends = at::empty({num_queues}, options.dtype(at::kInt)), fault = at::zeros({}, options);
  const auto* choice = choices.const_data_ptr<int64_t>();
  auto* row = rows.mutable_data_ptr<int64_t>();
  auto* count = counts.mutable_data_ptr<int64_t>();
  std::vector<int64_t> of_experts(num_experts, 0);
  int64_t found = 0;

  // Calls visit(place in rows, queue) for each choice in the order of the numbers within a queue; -1 is no queue.
  const auto each = [&](const auto& visit) {
    int64_t token = 0;
    for (const Segment& segment : cut) {
      for (; token < segment.end; ++token) {
        for (int64_t k = 0; k < num_choices; ++k) {
          const int64_t value = choice[k * by_choice + token * by_token];
          const bool is_row = 0 <= value && value < num_experts * capacity;
          const int64_t expert = is_row ? value / capacity : -1;
          visit(k * num_tokens + token, value, expert, is_row ? segment.first + expert * segment.step : -1);
        }
      }
    }
  };
  each([&](int64_t, int64_t value, int64_t expert, int64_t queue) {
    if (queue >= 0) {
      ++count[queue];
      ++of_experts[expert];
    } else if (value != num_experts * capacity) {
      found |= kOutOfRange;
    }
  });
  std::vector<int64_t> next(num_queues);
  int64_t sum = 0;
  auto* end = ends.mutable_data_ptr<int32_t>();
  for (int64_t queue = 0; queue < num_queues; ++queue) {
    next[queue] = sum;
    sum += count[queue];
    end[queue] = static_cast<int32_t>(sum);
  }
  each([&](int64_t at, int64_t, int64_t, int64_t queue) { row[at] = queue < 0 ? none : next[queue]++; });
  if (limits.has_value()) {
    const at::Tensor dense = limits->contiguous();
    const auto* limit = dense.const_data_ptr<int64_t>();
    for (int64_t expert = 0; expert < num_experts; ++expert) {
      found |= limit[expert] < of_experts[expert] ? kAboveLimit : 0;
    }
  }
  *fault.mutable_data_ptr<int64_t>() = found;
  return {rows, counts, ends, fault};
}

}  // namespace

// The schema is in ds_fsmoe/ops/compiled.py: libraries of several device types share it.
TORCH_LIBRARY_IMPL(fsmoe, CPU, library) { library.impl("number_rows", TORCH_FN(number_rows)); }
