// SPDX-License-Identifier: Apache-2.0
//
// The gated products of experts, as both devices know them. Nothing of torch in here.
#pragma once

#include <cstring>

namespace fsmoe {

// What is made of gate and up, L being a limit:
//   kSilu, kGelu, kGeluTanh: act(gate) * up
//   kSiluOfClamped:          silu(min(gate, L)) * clamp(up, -L, L)
//   kClampedSilu:            min(silu(gate), L) * clamp(up, -L, L)
//   kSwishOfClamped:         g * sigmoid(alpha * g) * (clamp(up, -L, L) + 1), g being min(gate, L)
enum class Form { kSilu, kGelu, kGeluTanh, kSiluOfClamped, kClampedSilu, kSwishOfClamped };

constexpr const char* kForms[] = {"silu", "gelu", "gelu_tanh", "silu_of_clamped", "clamped_silu", "swish_of_clamped"};

// Whether the gradient of torch's clamp goes through where a value is the limit itself. It did up to torch 2.14; the
// build asks the torch that it is for.
#ifndef FSMOE_CLAMP_PASSES_LIMIT
#define FSMOE_CLAMP_PASSES_LIMIT 1
#endif
constexpr bool kClampPassesLimit = FSMOE_CLAMP_PASSES_LIMIT;

// Returns whether there is a form of this name.
inline bool find_form(const char* name, size_t length, Form* found) {
  for (int i = 0; i < 6; ++i) {
    if (std::strlen(kForms[i]) == length && std::memcmp(kForms[i], name, length) == 0) {
      *found = static_cast<Form>(i);
      return true;
    }
  }
  return false;
}

}  // namespace fsmoe
