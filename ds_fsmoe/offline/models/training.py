# SPDX-License-Identifier: Apache-2.0
"""Holds the training settings that memory depends on. ``memory.py`` and its neighbours read it."""

from __future__ import annotations

from dataclasses import dataclass

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""The bytes of a number of each type that parameters may have."""
GB = 1e9
STAGES = (0, 1, 2, 3)
"""The stages of ZeRO."""
OPTIMIZERS = ("adam", "torch_adam", "adam8bit", "momentum", "sgd")
"""DeepSpeed's fused Adam or AdamW; torch's, tensor by tensor; bitsandbytes' with states of 8 bits; SGD with and without
momentum."""
LORA_TARGETS = ("attention", "all")
"""What has adapters: the projections of attention, or the experts' products as well."""
_STATE_BYTES = {"adam": 8.0, "torch_adam": 8.0, "adam8bit": 2 * (1 + 4 / 256), "momentum": 4.0, "sgd": 0.0}
"""The bytes of an optimizer's states for each number: moments in fp32, or in a byte each with a scale in fp32 for every
block of 256."""
ATTENTIONS = ("auto", "sdpa", "eager")
MASTER = 4
"""The bytes of a number of what an optimizer updates: DeepSpeed keeps fp32 at every stage of ZeRO."""


@dataclass(frozen=True)
class Training:
    """Describes a training step of one micro-batch, in DeepSpeed's words.

    Raises:
        ValueError: a word is not one of the choices, or a number is too small.
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
    is_two_batch: bool = False
    """True if two sub-batches of the micro-batch alternate."""
    attention: str = "auto"
    """``auto``: as transformers chooses, which is ``sdpa`` where a family has it."""
    device: str = "gpu"
    """``cpu`` differs in what torch's kernels and DeepSpeed copy there."""
    early_gradients: bool = True
    """Whether gradients travel in buffers of ours (any ``gradient_partition.mode`` but ``off``)."""
    load: float = 1.0
    """The rows that come to this rank, as a multiple of the mean; of the busiest rank it is above 1."""
    lora: int = 0
    """The rank of adapters, beside which all else is frozen; 0: everything is trained."""
    lora_targets: str = "attention"
    """What has adapters."""
    offload: bool = False
    """Whether the optimizer's states are on the host (``offload_optimizer``, ``"device": "cpu"``)."""
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
            ("zero", STAGES),
            ("dtype", tuple(BYTES)),
            ("accumulation", (None, self.dtype, "fp32")),
            ("optimizer", OPTIMIZERS),
            ("attention", ATTENTIONS),
            ("device", ("gpu", "cpu")),
            ("lora_targets", LORA_TARGETS),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r}: the choices are {', '.join(str(each) for each in choices)}"
                )
        for name in ("samples", "length", "degree"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.lora < 0:
            raise ValueError(f"lora = {self.lora}: must be at least 0, the rank of adapters")
        if self.offload and self.zero not in (1, 2):
            raise ValueError(f"offload = True: optimizer states can be on the host at ZeRO 1 and 2, not {self.zero}")
        if self.offload and self.optimizer == "adam8bit":
            raise ValueError(
                "optimizer = 'adam8bit': not available on the host, where DeepSpeed's CPU Adam updates in fp32"
            )
        if self.accumulation == "fp32" != self.dtype and self.zero == 0:
            raise ValueError("accumulation = 'fp32': DeepSpeed supports it at stages 1 to 3 only")

    @property
    def number_bytes(self) -> int:
        """Return the bytes of an element of parameters and activations."""
        return BYTES[self.dtype]

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of an element of accumulated gradients."""
        return BYTES[self.accumulation or self.dtype]

    @property
    def tokens(self) -> int:
        """Return the tokens of a rank's micro-batch, S."""
        return self.samples * self.length

    @property
    def state_bytes(self) -> float:
        """Return the bytes of optimizer state per element of a parameter."""
        return _STATE_BYTES[self.optimizer]
