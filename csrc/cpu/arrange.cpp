// SPDX-License-Identifier: Apache-2.0
//
// Token rows to slots and back on the CPU.
//
//   arrange:          x [S, M], slots [K, S] -> [N, M]; row slots[k][s] is row s of x; zero where nothing names it.
//   restore:          y [N, M], slots [K, S], weights [K, S] -> [S, M]; the weighted sum of a token's rows.
//   restore_backward: the gradients of y and of the weights, in one pass over the rows in memory.
//
// A slot outside 0..N-1 means "no slot" (by convention it is N), so slot values are never an error. All loops go by
// token: a token's row is read once, however many slots it has, and every other row is touched once. No [K, S, M]
// exists. Tokens are shared out among threads; a slot belongs to one token, so that no row is written by two.

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "huge_pages.h"
#include "wide_loops.h"

namespace {

// A thread gets at least this much to move; below it, waking a second thread costs more than the copy.
constexpr int64_t kBytesPerThread = 64 * 1024;
// Columns are summed in pieces that stay in the first-level cache, sums and one row of each kind together.
constexpr int64_t kColumns = 1024;
// Products that are added up at a time: they stay in the second-level cache, and torch does not share out so few among
// threads, which would change the order of a sum.
constexpr int64_t kProducts = 32 * 1024 - 1;

bool in_range(int64_t slot, int64_t num_slots) {
  // One comparison covers negative values too: they wrap around to huge unsigned ones.
  return static_cast<uint64_t>(slot) < static_cast<uint64_t>(num_slots);
}

int64_t tokens_per_thread(int64_t row_bytes, int64_t num_choices) {
  return std::max<int64_t>(1, kBytesPerThread / std::max<int64_t>(1, row_bytes * num_choices));
}

bool is_float(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
}

void check_rows(const char* op, const char* name, const at::Tensor& rows) {
  TORCH_CHECK(rows.dim() == 2, op, ": ", name, " must be 2-dimensional, got shape ", rows.sizes());
  TORCH_CHECK(is_float(rows.scalar_type()), op, ": ", name, " must be float32, float64, bfloat16 or float16, got ",
              rows.scalar_type());
}

void check_slots(const char* op, const at::Tensor& slots) {
  TORCH_CHECK(slots.dim() == 2, op, ": slots must be [K, S], got shape ", slots.sizes());
  TORCH_CHECK(slots.scalar_type() == at::kLong, op, ": slots must be int64, got ", slots.scalar_type());
}

void check_weights(const char* op, const at::Tensor& weights, const at::Tensor& slots) {
  TORCH_CHECK(weights.sizes() == slots.sizes(), op, ": weights must have the shape of slots ", slots.sizes(), ", got ",
              weights.sizes());
  TORCH_CHECK(weights.scalar_type() == at::kFloat || weights.scalar_type() == at::kDouble, op,
              ": weights must be float32 or float64, got ", weights.scalar_type());
}

void check_dtype(const char* op, at::ScalarType dtype) {
  TORCH_CHECK(is_float(dtype), op, ": dtype must be float32, float64, bfloat16 or float16, got ", dtype);
}

// ---- arrange

template <typename In, typename Out>
struct ConvertRow {
  static FSMOE_INLINE void run(const In* source, Out* target, int64_t width) {
    for (int64_t m = 0; m < width; ++m) {
      target[m] = static_cast<Out>(static_cast<float>(source[m]));
    }
  }
};

template <typename Copy>
void arrange_rows(const Copy& copy, const int64_t* slots, int64_t num_choices, int64_t num_tokens, int64_t num_slots,
                  char* target, int64_t row_bytes) {
  std::vector<uint8_t> taken(num_slots, 0);
  int64_t num_taken = 0;
  for (int64_t i = 0; i < num_choices * num_tokens; ++i) {
    if (in_range(slots[i], num_slots)) {
      TORCH_CHECK(!taken[slots[i]], "fsmoe::arrange: slot ", slots[i], " is given to two tokens, the second of them ",
                  i % num_tokens);
      taken[slots[i]] = 1;
      ++num_taken;
    }
  }
  at::parallel_for(0, num_tokens, tokens_per_thread(row_bytes, num_choices), [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      for (int64_t k = 0; k < num_choices; ++k) {
        const int64_t slot = slots[k * num_tokens + s];
        if (in_range(slot, num_slots)) {
          copy(s, slot);
        }
      }
    }
  });
  if (num_taken == num_slots) {
    return;
  }
  at::parallel_for(0, num_slots, tokens_per_thread(row_bytes, 1), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      if (!taken[n]) {
        std::memset(target + n * row_bytes, 0, row_bytes);
      }
    }
  });
}

template <typename In, typename Out>
void arrange_converting(const at::Tensor& x, const at::Tensor& slots, const at::Tensor& out) {
  const int64_t width = x.size(1);
  const auto* source = x.const_data_ptr<In>();
  auto* target = out.mutable_data_ptr<Out>();
  const auto copy = [&](int64_t token, int64_t slot) {
    fsmoe::run_wide<ConvertRow<In, Out>>(source + token * width, target + slot * width, width);
  };
  arrange_rows(copy, slots.const_data_ptr<int64_t>(), slots.size(0), slots.size(1), out.size(0),
               reinterpret_cast<char*>(target), width * static_cast<int64_t>(sizeof(Out)));
}

at::Tensor arrange(const at::Tensor& x, const at::Tensor& slots, int64_t num_slots,
                   std::optional<at::ScalarType> dtype) {
  check_rows("fsmoe::arrange", "x", x);
  check_slots("fsmoe::arrange", slots);
  TORCH_CHECK(x.size(0) == slots.size(1), "fsmoe::arrange: x has ", x.size(0), " rows but slots is for ", slots.size(1),
              " tokens");
  TORCH_CHECK(num_slots >= 0, "fsmoe::arrange: num_slots must not be negative, got ", num_slots);
  const auto in = x.scalar_type(), asked = dtype.value_or(in);
  check_dtype("fsmoe::arrange", asked);
  at::Tensor out = fsmoe::empty_in_huge_pages({num_slots, x.size(1)}, x.options().dtype(asked));
  if (out.numel() == 0) {
    return out;
  }
  const at::Tensor slots_dense = slots.contiguous();
  if (in == at::kFloat && asked == at::kBFloat16) {
    arrange_converting<float, at::BFloat16>(x.contiguous(), slots_dense, out);
  } else if (in == at::kFloat && asked == at::kHalf) {
    arrange_converting<float, at::Half>(x.contiguous(), slots_dense, out);
  } else if (in == at::kBFloat16 && asked == at::kFloat) {
    arrange_converting<at::BFloat16, float>(x.contiguous(), slots_dense, out);
  } else if (in == at::kHalf && asked == at::kFloat) {
    arrange_converting<at::Half, float>(x.contiguous(), slots_dense, out);
  } else {
    const at::Tensor x_dense = x.to(asked).contiguous();
    const int64_t row_bytes = x.size(1) * out.element_size();
    const auto* source = static_cast<const char*>(x_dense.const_data_ptr());
    auto* target = static_cast<char*>(out.mutable_data_ptr());
    const auto copy = [&](int64_t token, int64_t slot) {
      std::memcpy(target + slot * row_bytes, source + token * row_bytes, row_bytes);
    };
    arrange_rows(copy, slots_dense.const_data_ptr<int64_t>(), slots.size(0), slots.size(1), num_slots, target,
                 row_bytes);
  }
  return out;
}

// ---- restore

template <typename In, typename Out>
struct RestoreTokens {
  using Sum = at::opmath_type<In>;

  // A token's rows are added in the order of its choices, or in that of their slots, starting from zero.
  static FSMOE_INLINE void run(const In* y, const int64_t* slots, const Sum* weights, bool by_slot, Out* out,
                               int64_t num_choices, int64_t num_tokens, int64_t num_slots, int64_t width, int64_t begin,
                               int64_t end) {
    Sum sums[kColumns];
    std::vector<int64_t> order(num_choices);
    std::iota(order.begin(), order.end(), 0);
    for (int64_t s = begin; s < end; ++s) {
      if (by_slot) {
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int64_t a, int64_t b) { return slots[a * num_tokens + s] < slots[b * num_tokens + s]; });
      }
      for (int64_t first = 0; first < width; first += kColumns) {
        const int64_t columns = std::min(kColumns, width - first);
        for (int64_t m = 0; m < columns; ++m) {
          sums[m] = 0;
        }
        for (const int64_t k : order) {
          const int64_t slot = slots[k * num_tokens + s];
          if (!in_range(slot, num_slots)) {
            continue;
          }
          const In* row = y + slot * width + first;
          const Sum weight = weights == nullptr ? Sum(1) : weights[k * num_tokens + s];
          for (int64_t m = 0; m < columns; ++m) {
            sums[m] += static_cast<Sum>(row[m]) * weight;
          }
        }
        Out* target = out + s * width + first;
        for (int64_t m = 0; m < columns; ++m) {
          target[m] = static_cast<Out>(sums[m]);
        }
      }
    }
  }
};

template <typename In, typename Out>
at::Tensor restore_as(const at::Tensor& y, const at::Tensor& slots, const at::Tensor& weights, bool by_slot) {
  using Sum = at::opmath_type<In>;
  const int64_t num_choices = slots.size(0), num_tokens = slots.size(1), num_slots = y.size(0), width = y.size(1);
  at::Tensor out =
      fsmoe::empty_in_huge_pages({num_tokens, width}, y.options().dtype(c10::CppTypeToScalarType<Out>::value));
  const auto* source = y.const_data_ptr<In>();
  const auto* slot = slots.const_data_ptr<int64_t>();
  const auto* weight = weights.defined() ? weights.const_data_ptr<Sum>() : nullptr;
  auto* target = out.mutable_data_ptr<Out>();
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(In));
  at::parallel_for(0, num_tokens, tokens_per_thread(row_bytes, num_choices), [&](int64_t begin, int64_t end) {
    fsmoe::run_wide<RestoreTokens<In, Out>>(source, slot, weight, by_slot, target, num_choices, num_tokens, num_slots,
                                            width, begin, end);
  });
  return out;
}

at::Tensor restore(const at::Tensor& y, const at::Tensor& slots, const std::optional<at::Tensor>& weights,
                   std::optional<at::ScalarType> dtype, bool by_slot) {
  check_rows("fsmoe::restore", "y", y);
  check_slots("fsmoe::restore", slots);
  if (weights.has_value()) {
    check_weights("fsmoe::restore", *weights, slots);
  }
  const auto asked = dtype.value_or(y.scalar_type());
  check_dtype("fsmoe::restore", asked);
  if (slots.size(1) * y.size(1) == 0) {
    return at::zeros({slots.size(1), y.size(1)}, y.options().dtype(asked));
  }
  // Sums are float32, or float64 if anything that goes in or comes out is.
  const bool is_double = y.scalar_type() == at::kDouble || asked == at::kDouble ||
                         (weights.has_value() && weights->scalar_type() == at::kDouble);
  const at::Tensor slots_dense = slots.contiguous();
  const at::Tensor y_dense = (is_double ? y.to(at::kDouble) : y).contiguous();
  at::Tensor weights_dense;
  if (weights.has_value()) {
    weights_dense = weights->to(is_double ? at::kDouble : at::kFloat).contiguous();
  }
  const auto in = y_dense.scalar_type();
  at::Tensor out;
  if (in == at::kDouble) {
    out = restore_as<double, double>(y_dense, slots_dense, weights_dense, by_slot);
  } else if (in == at::kBFloat16 && asked == at::kBFloat16) {
    out = restore_as<at::BFloat16, at::BFloat16>(y_dense, slots_dense, weights_dense, by_slot);
  } else if (in == at::kBFloat16) {
    out = restore_as<at::BFloat16, float>(y_dense, slots_dense, weights_dense, by_slot);
  } else if (in == at::kHalf && asked == at::kHalf) {
    out = restore_as<at::Half, at::Half>(y_dense, slots_dense, weights_dense, by_slot);
  } else if (in == at::kHalf) {
    out = restore_as<at::Half, float>(y_dense, slots_dense, weights_dense, by_slot);
  } else {
    out = restore_as<float, float>(y_dense, slots_dense, weights_dense, by_slot);
  }
  return out.to(asked);
}

// ---- restore_backward

// One choice of some tokens: the rows' gradients, and the products whose sum is the weight's.
template <typename Grad, typename In>
struct RestoreBackwardTokens {
  using Sum = at::opmath_type<In>;

  static FSMOE_INLINE void run(const Grad* d_out, const In* y, const int64_t* slots, const Sum* weights, In* dy,
                               Sum* products, int64_t num_slots, int64_t width, int64_t num_tokens) {
    for (int64_t s = 0; s < num_tokens; ++s) {
      Sum* product = products + s * width;
      if (!in_range(slots[s], num_slots)) {
        std::memset(product, 0, width * sizeof(Sum));
        continue;
      }
      const Grad* gradient = d_out + s * width;
      const In* row = y + slots[s] * width;
      In* target = dy + slots[s] * width;
      const Sum weight = weights[s];
      for (int64_t m = 0; m < width; ++m) {
        const Sum g = static_cast<Sum>(gradient[m]);
        product[m] = g * static_cast<Sum>(row[m]);
        target[m] = static_cast<In>(g * weight);
      }
    }
  }
};

template <typename Grad, typename In>
std::tuple<at::Tensor, at::Tensor> restore_backward_as(const at::Tensor& d_out, const at::Tensor& y,
                                                       const at::Tensor& slots, const at::Tensor& weights) {
  using Sum = at::opmath_type<In>;
  const int64_t num_choices = slots.size(0), num_tokens = slots.size(1), num_slots = y.size(0), width = y.size(1);
  at::Tensor dy = fsmoe::empty_in_huge_pages({num_slots, width}, y.options());
  at::Tensor d_weights = at::empty({num_choices, num_tokens}, weights.options());
  const auto* gradient = d_out.const_data_ptr<Grad>();
  const auto* source = y.const_data_ptr<In>();
  const auto* slot = slots.const_data_ptr<int64_t>();
  const auto* weight = weights.const_data_ptr<Sum>();
  auto* target = dy.mutable_data_ptr<In>();
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(In));

  std::vector<uint8_t> taken(num_slots, 0);
  for (int64_t i = 0; i < num_choices * num_tokens; ++i) {
    if (in_range(slot[i], num_slots)) {
      taken[slot[i]] = 1;
    }
  }
  const int64_t piece = std::max<int64_t>(1, kProducts / width);
  at::parallel_for(0, num_tokens, tokens_per_thread(row_bytes, num_choices), [&](int64_t begin, int64_t end) {
    const at::Tensor products = at::empty({std::min(piece, end - begin), width}, weights.options());
    for (int64_t first = begin; first < end; first += piece) {
      const int64_t num = std::min(piece, end - first);
      const at::Tensor of_piece = products.narrow(0, 0, num);
      for (int64_t k = 0; k < num_choices; ++k) {
        const int64_t i = k * num_tokens + first;
        fsmoe::run_wide<RestoreBackwardTokens<Grad, In>>(gradient + first * width, source, slot + i, weight + i, target,
                                                         products.mutable_data_ptr<Sum>(), num_slots, width, num);
        // Added up by torch, in its order: so a weight's gradient has the bits that it has without these ops.
        at::Tensor sums = d_weights.select(0, k).narrow(0, first, num);
        at::sum_out(sums, of_piece, at::IntArrayRef{1});
      }
    }
  });
  at::parallel_for(0, num_slots, tokens_per_thread(row_bytes, 1), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      if (!taken[n]) {
        std::memset(target + n * width, 0, row_bytes);
      }
    }
  });
  return {dy, d_weights};
}

std::tuple<at::Tensor, at::Tensor> restore_backward(const at::Tensor& d_out, const at::Tensor& y,
                                                    const at::Tensor& slots, const at::Tensor& weights) {
  check_rows("fsmoe::restore_backward", "d_out", d_out);
  check_rows("fsmoe::restore_backward", "y", y);
  check_slots("fsmoe::restore_backward", slots);
  check_weights("fsmoe::restore_backward", weights, slots);
  TORCH_CHECK(d_out.size(0) == slots.size(1) && d_out.size(1) == y.size(1), "fsmoe::restore_backward: d_out must be [",
              slots.size(1), ", ", y.size(1), "], got shape ", d_out.sizes());
  if (y.size(1) == 0 || slots.numel() == 0) {
    return {at::zeros(y.sizes(), y.options()), at::zeros(weights.sizes(), weights.options())};
  }
  const auto in = y.scalar_type();
  const bool is_double =
      in == at::kDouble || d_out.scalar_type() == at::kDouble || weights.scalar_type() == at::kDouble;
  const auto sum = is_double ? at::kDouble : at::kFloat;
  const at::Tensor slots_dense = slots.contiguous(), weights_dense = weights.to(sum).contiguous();
  const at::Tensor y_dense = (is_double ? y.to(at::kDouble) : y).contiguous();
  // A gradient of the other 16-bit type than y's, or of one where y is float32, goes by way of float32: exact, and
  // rare.
  const bool is_same = d_out.scalar_type() == y_dense.scalar_type();
  const at::Tensor d_out_dense = (is_same ? d_out : d_out.to(sum)).contiguous();

  std::tuple<at::Tensor, at::Tensor> found;
  if (is_double) {
    found = restore_backward_as<double, double>(d_out_dense, y_dense, slots_dense, weights_dense);
  } else if (in == at::kFloat) {
    found = restore_backward_as<float, float>(d_out_dense, y_dense, slots_dense, weights_dense);
  } else if (in == at::kBFloat16 && is_same) {
    found = restore_backward_as<at::BFloat16, at::BFloat16>(d_out_dense, y_dense, slots_dense, weights_dense);
  } else if (in == at::kBFloat16) {
    found = restore_backward_as<float, at::BFloat16>(d_out_dense, y_dense, slots_dense, weights_dense);
  } else if (is_same) {
    found = restore_backward_as<at::Half, at::Half>(d_out_dense, y_dense, slots_dense, weights_dense);
  } else {
    found = restore_backward_as<float, at::Half>(d_out_dense, y_dense, slots_dense, weights_dense);
  }
  return {std::get<0>(found).to(in), std::get<1>(found).to(weights.scalar_type())};
}

}  // namespace

// The schemas are in ds_fsmoe/ops/compiled.py: libraries of several device types share them.
TORCH_LIBRARY_IMPL(fsmoe, CPU, library) {
  library.impl("arrange", TORCH_FN(arrange));
  library.impl("restore", TORCH_FN(restore));
  library.impl("restore_backward", TORCH_FN(restore_backward));
}
