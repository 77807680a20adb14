# SPDX-License-Identifier: Apache-2.0
"""Lists torch's functions by what they do to the experts of a weight; names are without the underscores around them."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


METADATA = _names(
    "size dim stride numel nelement is_contiguous element_size storage_offset is_floating_point is_complex "
    "get_device is_signed is_same_size untyped_storage data_ptr record_stream requires_grad retain_grad hash repr len "
    "backward is_pinned is_shared is_inference has_names format new_zeros new_ones new_empty new_full new_tensor "
    "result_type can_cast is_conj is_neg is_set_to has_compatible_shallow_copy_type"
)
"""Functions that tell what a tensor is, and not what is in it; without the underscores around their names."""
ELEMENTWISE = _names(
    "add iadd radd sub isub rsub subtract mul imul rmul multiply div idiv rdiv truediv itruediv rtruediv true_divide "
    "divide floordiv ifloordiv floor_divide pow ipow rpow neg negative pos abs absolute sqrt rsqrt square exp log "
    "log1p log2 sign sgn reciprocal clamp clamp_min clamp_max clip maximum minimum lerp addcmul addcdiv where "
    "masked_fill eq ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not nan_to_num round floor ceil "
    "trunc tanh sigmoid relu detach clone to type float half bfloat16 double cpu cuda contiguous type_as pin_memory "
    "alias isclose copy fill zero zeros_like ones_like empty_like full_like invert and or xor"
)
"""Functions that handle each element by itself."""
SUMS = frozenset(("sum", "mean", "norm", "linalg_vector_norm", "mse_loss"))
TRUTHS = _names("any all count_nonzero allclose equal argmax argmin")
"""Functions without a gradient."""
STATISTICS = SUMS | TRUTHS | _names("max min amax amin std var prod median histc")
"""Functions whose results are told apart from those of all experts by a warning, where no gradient is wanted."""
DIMS = {
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), (1, 2)),
    **dict.fromkeys(("chunk", "split"), (2,)),
    **dict.fromkeys(("narrow", "select", "softmax", "cumsum"), (1,)),
}
"""Function -> which of its arguments name the dimensions that it handles; all others it leaves alone."""
