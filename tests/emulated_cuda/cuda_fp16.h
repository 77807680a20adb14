// SPDX-License-Identifier: Apache-2.0
#pragma once

using __half = _Float16;

inline float __half2float(__half value) { return static_cast<float>(value); }
inline __half __float2half_rn(float value) { return static_cast<__half>(value); }
