// SPDX-License-Identifier: Apache-2.0
//
// The gated products of experts on the CPU.
//
//   gated:          x [R, 2H] -> h [R, H]; the forms are in csrc/includes/gated.h.
//   gated_backward: x [R, 2H], dh [R, H] -> dx [R, 2H] and h, which the second product's gradient needs.
//
// Gate and up are the halves of a row, or its even and odd columns. A row is as transformers' modules compute it, one
// rounding after each step; the steps are torch's own, so that every bit is theirs, whatever vectors they use.

#include "gated.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sigmoid_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <torch/library.h>

#include <string_view>
#include <tuple>

namespace {

using fsmoe::Form;

struct Gate {
  Form form;
  bool is_interleaved;
  double limit, alpha;
};

Gate gate_of(const char* op, const at::Tensor& x, std::string_view form, bool interleaved, double limit, double alpha) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) % 2 == 0, op, ": x must be [R, 2 * H], got shape ", x.sizes());
  TORCH_CHECK(at::isFloatingType(x.scalar_type()), op, ": x must be floating point, got ", x.scalar_type());
  Form found{};
  TORCH_CHECK(fsmoe::find_form(form.data(), form.size(), &found), op, ": no form is named '", form, "'");
  return {found, interleaved, limit, alpha};
}

at::Tensor gate_part(const at::Tensor& x, const Gate& gate) {
  return gate.is_interleaved ? x.slice(1, 0, std::nullopt, 2) : x.narrow(1, 0, x.size(1) / 2);
}

at::Tensor up_part(const at::Tensor& x, const Gate& gate) {
  return gate.is_interleaved ? x.slice(1, 1, std::nullopt, 2) : x.narrow(1, x.size(1) / 2, x.size(1) / 2);
}

bool is_clamped(Form form) {
  return form == Form::kSiluOfClamped || form == Form::kClampedSilu || form == Form::kSwishOfClamped;
}

// What stands for the gate and for up in the product, and what their gradients are made of.
struct Factors {
  at::Tensor clamped_gate;  // kSiluOfClamped and kSwishOfClamped
  at::Tensor sigmoid;       // kSwishOfClamped
  at::Tensor act;           // kClampedSilu: before it is clamped
  at::Tensor of_gate, of_up;
};

Factors factors(const at::Tensor& x, const Gate& gate) {
  const at::Tensor g = gate_part(x, gate), up = up_part(x, gate);
  Factors found;
  found.of_up = is_clamped(gate.form) ? at::clamp(up, -gate.limit, gate.limit) : up;
  switch (gate.form) {
    case Form::kSilu:
      found.of_gate = at::silu(g);
      break;
    case Form::kGelu:
      found.of_gate = at::gelu(g);
      break;
    case Form::kGeluTanh:
      found.of_gate = at::gelu(g, "tanh");
      break;
    case Form::kSiluOfClamped:
      found.clamped_gate = at::clamp_max(g, gate.limit);
      found.of_gate = at::silu(found.clamped_gate);
      break;
    case Form::kClampedSilu:
      found.act = at::silu(g);
      found.of_gate = at::clamp_max(found.act, gate.limit);
      break;
    case Form::kSwishOfClamped:
      found.clamped_gate = at::clamp_max(g, gate.limit);
      found.sigmoid = at::sigmoid(at::mul(found.clamped_gate, gate.alpha));
      found.of_gate = at::mul(found.clamped_gate, found.sigmoid);
      found.of_up = at::add(found.of_up, 1.0);
      break;
  }
  return found;
}

at::Tensor product(const Factors& found) { return at::mul(found.of_gate, found.of_up); }

// Where the gradient of torch's clamp goes through.
at::Tensor is_below(const at::Tensor& value, double limit) {
  return fsmoe::kClampPassesLimit ? value.le(limit) : value.lt(limit);
}

at::Tensor gated(const at::Tensor& x, std::string_view form, bool interleaved, double limit, double alpha) {
  const Gate gate = gate_of("fsmoe::gated", x, form, interleaved, limit, alpha);
  return product(factors(x, gate));
}

std::tuple<at::Tensor, at::Tensor> gated_backward(const at::Tensor& x, const at::Tensor& dh, std::string_view form,
                                                  bool interleaved, double limit, double alpha) {
  const char* op = "fsmoe::gated_backward";
  const Gate gate = gate_of(op, x, form, interleaved, limit, alpha);
  TORCH_CHECK(dh.dim() == 2 && dh.size(0) == x.size(0) && 2 * dh.size(1) == x.size(1), op, ": dh must be [", x.size(0),
              ", ", x.size(1) / 2, "], got shape ", dh.sizes());
  TORCH_CHECK(dh.scalar_type() == x.scalar_type(), op, ": dh must be ", x.scalar_type(), ", got ", dh.scalar_type());
  const Factors found = factors(x, gate);
  const at::Tensor g = gate_part(x, gate), up = up_part(x, gate);
  at::Tensor of_gate = at::mul(dh, found.of_up), of_up = at::mul(dh, found.of_gate), dg;
  switch (gate.form) {
    case Form::kSilu:
      dg = at::silu_backward(of_gate, g);
      break;
    case Form::kGelu:
      dg = at::gelu_backward(of_gate, g, "none");
      break;
    case Form::kGeluTanh:
      dg = at::gelu_backward(of_gate, g, "tanh");
      break;
    case Form::kSiluOfClamped:
      dg = at::silu_backward(of_gate, found.clamped_gate);
      break;
    case Form::kClampedSilu:
      of_gate.masked_fill_(is_below(found.act, gate.limit).logical_not_(), 0);
      dg = at::silu_backward(of_gate, g);
      break;
    case Form::kSwishOfClamped: {
      const at::Tensor of_sigmoid = at::sigmoid_backward(at::mul(of_gate, found.clamped_gate), found.sigmoid);
      dg = at::add(at::mul(of_gate, found.sigmoid), at::mul(of_sigmoid, gate.alpha));
      break;
    }
  }
  if (gate.form == Form::kSiluOfClamped || gate.form == Form::kSwishOfClamped) {
    dg.masked_fill_(is_below(g, gate.limit).logical_not_(), 0);
  }
  if (is_clamped(gate.form)) {
    of_up.masked_fill_(is_below(-up, gate.limit).logical_and_(is_below(up, gate.limit)).logical_not_(), 0);
  }
  // Not computed in place: where vectors end is part of the last bit.
  at::Tensor dx = at::empty_like(x, at::MemoryFormat::Contiguous);
  gate_part(dx, gate).copy_(dg);
  up_part(dx, gate).copy_(of_up);
  if (gate.is_interleaved) {
    dx.add_(0.0);  // as autograd, which adds the gradients of two slices: there is no -0
  }
  return {dx, product(found)};
}

}  // namespace

// The schemas are in ds_fsmoe/ops/compiled.py: libraries of several device types share them.
TORCH_LIBRARY_IMPL(fsmoe, CPU, library) {
  library.impl("gated", TORCH_FN(gated));
  library.impl("gated_backward", TORCH_FN(gated_backward));
}
