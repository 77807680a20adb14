# SPDX-License-Identifier: Apache-2.0
"""Says how a model is trained, as far as memory depends on it."""

from __future__ import annotations

from dataclasses import dataclass

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""The bytes of a number of each type that parameters may have."""
OPTIMIZERS = ("adam", "torch_adam", "momentum", "sgd")
"""DeepSpeed's fused Adam or AdamW; torch's, tensor by tensor; SGD with and without momentum."""
ATTENTIONS = ("auto", "sdpa", "eager")
MASTER = 4
"""The bytes of a number of what an optimizer updates: DeepSpeed keeps fp32 at every stage of ZeRO."""


@dataclass(frozen=True)
class Training:
    """A training step of one micro-batch, in DeepSpeed's words.

    Raises:
        ValueError: a word that is none of the choices, or a number that is too small.
    """

    samples: int
    """The samples of a rank's micro-batch, B."""
    length: int
    """The positions of a sample, L."""
    zero: int = 0
    """The stage of ZeRO."""
    dtype: str = "bf16"
    """The type of parameters and activations."""
    accumulation: str | None = None
    """The type in which gradients are added up (``data_types.grad_accum_dtype``); ``None``: that of parameters."""
    optimizer: str = "adam"
    checkpointing: bool = False
    """Whether every block is checkpointed, as ``gradient_checkpointing_enable()`` of transformers does."""
    recompute: bool = False
    """Whether layers keep the rows alone and make the hidden layers of experts again (``fsmoe.recompute``)."""
    degree: int = 1
    """The chunks into which a layer's rows are cut; in halves, those of a half."""
    in_halves: bool = False
    """True if two halves of the micro-batch take turns."""
    attention: str = "auto"
    """``auto``: as transformers chooses, which is ``sdpa`` where a family has it."""
    device: str = "gpu"
    """``cpu`` differs in what torch's kernels and DeepSpeed copy there."""
    early_gradients: bool = True
    """Whether gradients travel in buffers of ours (any ``gradient_partition.mode`` but ``off``)."""
    load: float = 1.0
    """The rows that come to this rank, as a multiple of the mean; of the busiest rank it is above 1."""
    reduce_bucket: int = 500_000_000
    """``zero_optimization.reduce_bucket_size``, in elements."""
    max_live: int = 1_000_000_000
    """``zero_optimization.stage3_max_live_parameters``, in elements."""
    prefetch_bucket: int = 50_000_000
    """``zero_optimization.stage3_prefetch_bucket_size``, in elements."""
    persistence: int = 100_000
    """``zero_optimization.stage3_param_persistence_threshold``, in elements."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("zero", (0, 1, 2, 3)),
            ("dtype", tuple(BYTES)),
            ("accumulation", (None, self.dtype, "fp32")),
            ("optimizer", OPTIMIZERS),
            ("attention", ATTENTIONS),
            ("device", ("gpu", "cpu")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r}: the choices are {', '.join(str(each) for each in choices)}"
                )
        for name in ("samples", "length", "degree"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.accumulation == "fp32" != self.dtype and self.zero == 0:
            raise ValueError("accumulation = 'fp32': DeepSpeed has it at stages 1 to 3 only, and at stage 0 refuses it")

    @property
    def number_bytes(self) -> int:
        """Return the bytes of a number of parameters and activations."""
        return BYTES[self.dtype]

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of a number of what is added up."""
        return BYTES[self.accumulation or self.dtype]

    @property
    def tokens(self) -> int:
        """Return the tokens of a rank's micro-batch, S."""
        return self.samples * self.length

    @property
    def moments(self) -> int:
        """Return how many numbers an optimizer keeps for each of a parameter's."""
        return {"adam": 2, "torch_adam": 2, "momentum": 1, "sgd": 0}[self.optimizer]
