# SPDX-License-Identifier: Apache-2.0
"""The signatures of the compiled operators, as torch is told them.

They are here and not in the libraries because a process may load those of two device types, and torch wants every
signature once.
"""

from __future__ import annotations

import functools

import torch

NAMESPACE = "fsmoe"
SCHEMAS = (
    "gather_rows(Tensor x, Tensor index) -> Tensor",
    "gather_rows_backward(Tensor dy, Tensor index, SymInt num_rows) -> Tensor",
    "arrange(Tensor x, Tensor slots, SymInt num_slots, ScalarType? dtype=None) -> Tensor",
    "restore(Tensor y, Tensor slots, Tensor? weights=None, ScalarType? dtype=None, bool by_slot=False) -> Tensor",
    "restore_backward(Tensor d_out, Tensor y, Tensor slots, Tensor weights) -> (Tensor, Tensor)",
    "gated(Tensor x, str form, bool interleaved=False, float limit=0.0, float alpha=0.0) -> Tensor",
    "gated_backward(Tensor x, Tensor dh, str form, bool interleaved=False, float limit=0.0, float alpha=0.0)"
    " -> (Tensor, Tensor)",
    "top_k_slots(Tensor scores, SymInt k, SymInt capacity, Tensor? used=None, str priority='choice')"
    " -> (Tensor, Tensor, Tensor)",
    "take_slots(Tensor experts, SymInt num_experts, SymInt capacity, Tensor? used=None, str priority='choice',"
    " Tensor? scores=None) -> (Tensor, Tensor)",
    "number_rows(Tensor choices, SymInt num_experts, SymInt capacity, Tensor? segments=None, Tensor? limits=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)


@functools.cache
def define() -> torch.library.Library:
    """Tells torch, once per process. The signatures live as long as what this returns, which is kept here."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    return library
