// SPDX-License-Identifier: Apache-2.0
//
// Row gather on the CPU: x [R, M], index [N] -> out [N, M], and its gradient.
//
// An index outside 0..R-1 means "this slot is empty" and reads as a row of zeros. (By convention empty slots carry R.)
// So index values are never an error and need no check pass before the copy.

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

// A thread gets at least this much to move; below it, waking a second thread costs more than the copy.
constexpr int64_t kBytesPerThread = 64 * 1024;
// Columns are dealt out in cache lines, so that two threads never write the same one.
constexpr int64_t kCacheLineBytes = 64;

bool in_range(int64_t row, int64_t num_rows) {
  // One comparison covers negative values too: they wrap around to huge unsigned ones.
  return static_cast<uint64_t>(row) < static_cast<uint64_t>(num_rows);
}

void check_arguments(const char* op, const char* name, const at::Tensor& rows, const at::Tensor& index) {
  TORCH_CHECK(rows.dim() == 2, op, ": ", name, " must be 2-dimensional, got shape ", rows.sizes());
  TORCH_CHECK(index.dim() == 1, op, ": index must be 1-dimensional, got shape ", index.sizes());
  TORCH_CHECK(index.scalar_type() == at::kLong, op, ": index must be int64, got ", index.scalar_type());
  const auto dtype = rows.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf, op, ": ",
              name, " must be float32, float64, bfloat16 or float16, got ", dtype);
}

at::Tensor gather_rows(const at::Tensor& x, const at::Tensor& index) {
  check_arguments("fsmoe::gather_rows", "x", x, index);
  const int64_t num_rows = x.size(0), width = x.size(1), num_slots = index.size(0);
  at::Tensor out = at::empty({num_slots, width}, x.options());
  if (out.numel() == 0) {
    return out;  // also keeps null data pointers away from memcpy
  }
  const at::Tensor x_dense = x.contiguous(), index_dense = index.contiguous();
  const int64_t row_bytes = width * x.element_size();
  const auto* source = static_cast<const char*>(x_dense.const_data_ptr());
  const auto* slots = index_dense.const_data_ptr<int64_t>();
  auto* target = static_cast<char*>(out.mutable_data_ptr());

  at::parallel_for(0, num_slots, std::max<int64_t>(1, kBytesPerThread / row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      if (in_range(slots[n], num_rows)) {
        std::memcpy(target + n * row_bytes, source + slots[n] * row_bytes, row_bytes);
      } else {
        std::memset(target + n * row_bytes, 0, row_bytes);
      }
    }
  });
  return out;
}

// Several slots may have read the same row, so their gradients add up. Threads share out the columns, not the slots:
// each element is then summed by one thread in ascending n, which needs no atomics and gives the same bits whatever
// the number of threads is. 16-bit gradients are summed in float32 and rounded once. This is what torch's index_add
// does on the CPU, so the two agree bit for bit.
at::Tensor gather_rows_backward(const at::Tensor& dy, const at::Tensor& index, int64_t num_rows) {
  check_arguments("fsmoe::gather_rows_backward", "dy", dy, index);
  TORCH_CHECK(dy.size(0) == index.size(0), "fsmoe::gather_rows_backward: dy has ", dy.size(0), " rows but index has ",
              index.size(0), " entries");
  TORCH_CHECK(num_rows >= 0, "fsmoe::gather_rows_backward: num_rows must not be negative, got ", num_rows);
  const int64_t width = dy.size(1), num_slots = index.size(0);
  if (num_rows * width == 0 || num_slots == 0) {
    return at::zeros({num_rows, width}, dy.options());
  }
  const at::Tensor dy_dense = dy.contiguous(), index_dense = index.contiguous();
  const auto* slots = index_dense.const_data_ptr<int64_t>();
  at::Tensor sum = at::zeros({num_rows, width}, dy.options().dtype(at::toOpMathType(dy.scalar_type())));
  const int64_t columns_per_line = kCacheLineBytes / sum.element_size();
  const int64_t num_lines = (width + columns_per_line - 1) / columns_per_line;
  const int64_t lines_per_thread = std::max<int64_t>(1, kBytesPerThread / (kCacheLineBytes * num_slots));

  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, dy.scalar_type(), "fsmoe_gather_rows_backward", [&] {
    const auto* source = dy_dense.const_data_ptr<scalar_t>();
    auto* target = sum.mutable_data_ptr<at::opmath_type<scalar_t>>();
    at::parallel_for(0, num_lines, lines_per_thread, [&](int64_t first_line, int64_t last_line) {
      const int64_t begin = first_line * columns_per_line;
      const int64_t end = std::min(last_line * columns_per_line, width);
      for (int64_t n = 0; n < num_slots; ++n) {
        if (!in_range(slots[n], num_rows)) {
          continue;
        }
        const auto* dy_row = source + n * width;
        auto* sum_row = target + slots[n] * width;
        for (int64_t m = begin; m < end; ++m) {
          sum_row[m] += dy_row[m];
        }
      }
    });
  });
  return sum.to(dy.scalar_type());
}

}  // namespace

// The schemas are in ds_fsmoe/ops/compiled.py: libraries of several device types share them.
TORCH_LIBRARY_IMPL(fsmoe, CPU, library) {
  library.impl("gather_rows", TORCH_FN(gather_rows));
  library.impl("gather_rows_backward", TORCH_FN(gather_rows_backward));
}
