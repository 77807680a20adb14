# SPDX-License-Identifier: Apache-2.0
"""The kernels of csrc/cuda on emulated CUDA, as programs of the host: built once where `make test` keeps
compiled ops, run call by call.

``CHECKED`` runs threads as fibers under AddressSanitizer and UndefinedBehaviorSanitizer, ``RACING`` as
threads of the host under ThreadSanitizer. See tests/emulated_cuda for what is emulated and how.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_fsmoe.ops.loading import import_op_builder

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / "csrc" / "cuda"
EMULATION = REPOSITORY / "tests" / "emulated_cuda"
PROGRAM = EMULATION / "program.cpp"
INCLUDED = (EMULATION, FOLDER, REPOSITORY / "csrc" / "includes")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]  # in the order of the enum in launchers.h
FORMS = ("silu", "gelu", "gelu_tanh", "silu_of_clamped", "clamped_silu", "swish_of_clamped")  # likewise
PRIORITIES = ("choice", "token", "score")  # likewise

CHECKED, RACING = "checked", "racing"
FLAGS = {
    CHECKED: ["-O1", "-g1", "-fsanitize=address,undefined,alignment", "-fno-sanitize-recover=all"],
    RACING: ["-O1", "-g1", "-fsanitize=thread", "-DFSMOE_EMULATED_THREADS"],
}
# The first report ends the program, with a status that nothing else has.
SANITIZED_STATUS = 66
_ENVIRONMENT = {
    "ASAN_OPTIONS": f"exitcode={SANITIZED_STATUS}:detect_leaks=0",
    "UBSAN_OPTIONS": f"exitcode={SANITIZED_STATUS}:print_stacktrace=1",
    "TSAN_OPTIONS": f"exitcode={SANITIZED_STATUS}:halt_on_error=1:report_thread_leaks=0",
}


@dataclasses.dataclass(frozen=True)
class Behind:
    """A tensor that is to begin so many bytes behind a multiple of 16."""

    tensor: Tensor
    offset_bytes: int


@dataclasses.dataclass(frozen=True)
class Address:
    """A pointer to nothing, for launches that are only listed."""

    value: int


Given = Tensor | Behind
Argument = Given | Address | torch.dtype | int | float | None


def nonsense(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor to be written to, as memory is found."""
    return torch.full((dtype.itemsize * torch.Size(shape).numel(),), 0xA5, dtype=torch.uint8).view(dtype).view(shape)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a program has ended that made one call."""

    status: int
    stdout: bytes
    stderr: str


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The launchers of one file of kernels."""

    program: Path

    def end(self, name: str, *arguments: Argument, seed: int = 1, **options: int) -> Ended:
        """Run one call in a process of its own. Options: ``leave_out`` a line's barrier or atomic; ``only_list``."""
        told = [str(word) for pair in (("seed", seed), *options.items()) for word in pair]
        done = subprocess.run(
            [str(self.program), *told],
            input=f"call {name}\n".encode() + b"".join(map(_written, arguments)) + b"end\n",
            capture_output=True,
            timeout=600,
            env=os.environ | _ENVIRONMENT,
        )
        return Ended(done.returncode, done.stdout, done.stderr.decode(errors="replace"))

    def call(self, name: str, *arguments: Argument, **options: int) -> list[Tensor]:
        """Return what became of the tensors among the arguments; of those that nothing is written to, nothing may."""
        ended = self.end(name, *arguments, **options)
        assert ended.status == 0, ended.stderr
        assert struct.unpack_from("<q", ended.stdout) == (0,)
        found, at = [], struct.calcsize("<q")
        for tensor in map(_tensor, arguments):
            if isinstance(tensor, Tensor):
                size = tensor.numel() * tensor.itemsize
                raw = torch.frombuffer(bytearray(ended.stdout[at : at + size] + b"\0"), dtype=torch.uint8)[:size]
                found.append(raw.clone().view(tensor.dtype).view(tensor.shape))
                at += size
        return found

    def number(self, name: str, *arguments: Argument) -> int:
        """Return what a call returns."""
        (result,) = struct.unpack_from("<q", self.end(name, *arguments).stdout)
        return result

    def arrange(self, x_SM: Given, slots_KS: Tensor, num_slots: int, dtype: torch.dtype, **how) -> Tensor:
        x, out = _tensor(x_SM), _to_write((num_slots, _tensor(x_SM).shape[1]), dtype, how)
        sizes = (len(x), len(slots_KS), num_slots, x.shape[1])
        taken = nonsense((num_slots,), torch.uint8)
        return self.call("launch_arrange", x_SM, x.dtype, slots_KS, out, dtype, taken, *sizes, **how)[2]

    def restore(
        self, y_NM: Given, slots_KS: Tensor, weights: Tensor | None, dtype: torch.dtype, by_slot: bool = False, **how
    ) -> Tensor:
        y, (num_choices, num_tokens) = _tensor(y_NM), slots_KS.shape
        out, sizes = _to_write((num_tokens, y.shape[1]), dtype, how), (num_tokens, num_choices, *y.shape)
        inputs = (y_NM, y.dtype, slots_KS, *_weights(weights), int(by_slot))
        return self.call("launch_restore", *inputs, out, dtype, *sizes, **how)[-1]

    def restore_backward(
        self, d_out_SM: Given, y_NM: Given, slots_KS: Tensor, weights_KS: Tensor, **how
    ) -> tuple[Tensor, Tensor]:
        d_out, y = _tensor(d_out_SM), _tensor(y_NM)
        dy = _to_write(y.shape, y.dtype, how)
        results = (dy, nonsense((weights_KS.numel(),), torch.float32), nonsense((len(y),), torch.uint8))
        sizes = (slots_KS.shape[1], slots_KS.shape[0], *y.shape)
        inputs = (d_out_SM, d_out.dtype, y_NM, y.dtype, slots_KS, *_weights(weights_KS))
        *_, dy_NM, d_weights, _ = self.call("launch_restore_backward", *inputs, *results, *sizes, **how)
        return dy_NM, d_weights.as_strided(weights_KS.shape, weights_KS.stride())

    def gated(
        self, x_RF: Given, dh_RH: Given | None, form: str, interleaved: bool, limit: float, alpha: float, **how
    ) -> tuple[Tensor | None, Tensor]:
        x, offset = _tensor(x_RF), how.pop("out_offset_bytes", 0)
        num_rows, width = len(x), x.shape[1] // 2
        dx = None if dh_RH is None else Behind(nonsense(x.shape, x.dtype), offset)
        h = Behind(nonsense((num_rows, width), x.dtype), offset)
        of_form = (x.dtype, FORMS.index(form), int(interleaved), float(limit), float(alpha))
        found = self.call("launch_gated", x_RF, dh_RH, *of_form, dx, h, num_rows, width, **how)
        return None if dh_RH is None else found[-2], found[-1]

    def number_rows(
        self, choices_KS: Tensor, num_experts: int, capacity: int, segments_3T: Tensor | None, limits_E=None, **how
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        num_choices, num_tokens = choices_KS.shape
        num_segments = 1 if segments_3T is None else segments_3T.shape[1]
        sizes = (num_tokens, num_choices, num_experts, capacity)
        decision = (_memory(choices_KS), *choices_KS.stride(), *sizes, segments_3T, num_segments)
        space = nonsense((self.number("number_rows_workspace", *decision),), torch.int32)
        rows, counts = nonsense(choices_KS.shape, torch.int64), nonsense((num_experts * num_segments,), torch.int64)
        results = rows, counts, nonsense(counts.shape, torch.int32), nonsense((1,), torch.int64)
        *_, rows_KS, counts_V, ends_V, fault, _ = self.call(
            "launch_number_rows", *decision, limits_E, *results, space, **how
        )
        return rows_KS, counts_V, ends_V, fault.view(())

    def choose(self, scores_SE: Tensor, k: int, **how) -> Tensor:
        experts = nonsense((k, len(scores_SE)), torch.int64)
        return self.call("launch_choose", scores_SE, *scores_SE.shape, k, experts, **how)[-1]

    def take_slots(
        self,
        experts_KS: Tensor,
        num_experts: int,
        capacity: int,
        used_S: Tensor | None,
        priority: str,
        scores: Tensor | None,
        strides: tuple[int, int, int],
        **how,
    ) -> tuple[Tensor, Tensor]:
        num_choices, num_tokens = experts_KS.shape
        number = PRIORITIES.index(priority)
        sizes = (num_tokens, num_choices, num_experts)
        space = nonsense((self.number("take_slots_workspace", *sizes, number),), torch.int32)
        slots, counts = nonsense((num_choices, num_tokens), torch.int64), nonsense((num_experts,), torch.int64)
        inputs = (experts_KS, used_S, number, scores, *strides, *sizes, capacity)
        *_, slots_KS, counts_E, _ = self.call("launch_take_slots", *inputs, slots, counts, space, **how)
        return slots_KS, counts_E


def _tensor(given: Any) -> Any:
    return given.tensor if isinstance(given, Behind) else given


def _to_write(shape: tuple[int, ...], dtype: torch.dtype, how: dict[str, int]) -> Behind:
    """A tensor for results, where the options want it."""
    return Behind(nonsense(shape, dtype), how.pop("out_offset_bytes", 0))


def _memory(tensor: Tensor) -> Tensor:
    """All that a tensor is a view of, as it lies there."""
    return tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


def _weights(weights_KS: Tensor | None) -> tuple[Argument, int, int]:
    return (None, 0, 0) if weights_KS is None else (_memory(weights_KS), *weights_KS.stride())


def _written(argument: Argument) -> bytes:
    if argument is None:
        return b"null\n"
    if isinstance(argument, Address):
        return f"address {argument.value}\n".encode()
    if isinstance(argument, torch.dtype):
        argument = DTYPES.index(argument)
    if isinstance(argument, float):
        (argument,) = struct.unpack("<q", struct.pack("<d", argument))
    if isinstance(argument, int):
        return f"number {argument}\n".encode()
    offset_bytes = argument.offset_bytes if isinstance(argument, Behind) else 0
    tensor = _tensor(argument).detach()
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return f"bytes {len(raw)} {offset_bytes}\n".encode() + raw + b"\n"


@functools.cache
def build(file: str, how: str, *edits: tuple[str, str]) -> Kernels:
    """Compile the kernels of csrc/cuda/FILE, after edits of its text (each of which has to change it in one place).

    Skips the test where there is no compiler, or one without what the build needs.
    """
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler: {compiler} is not on the PATH")
    text = (FOLDER / file).read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"{old!r} is in {file} {text.count(old)} times"
        text = text.replace(old, new)
    stem = Path(file).stem
    import_op_builder().builders("cpu")
    macros = sys.modules["ds_fsmoe.ops.op_builder.builder"].macros
    named = [f'-DFSMOE_KERNELS="{file}"', f"-DFSMOE_OF_{stem.upper()}", *macros()]
    strict = ["-std=c++20", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-ffp-contract=off", "-pthread"]
    begun = [compiler, *strict, *FLAGS[how], *named]
    folder = _folder() / f"{stem}_{how}_{_digest(text, *begun)}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other workers wait for the one that builds
        if not (folder / stem).exists():
            if reason := _lacks(compiler, how):
                pytest.skip(reason)
            (folder / file).write_text(text)
            output = folder / "unfinished"
            # The edited file comes before the one of its name in csrc.
            command = [*begun, *(f"-I{each}" for each in (folder, *INCLUDED)), str(PROGRAM), "-o", str(output)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, done.stderr
            output.rename(folder / stem)
    return Kernels(folder / stem)


def _digest(*words: str) -> str:
    """Of what a build is made from, all files that it may include among it."""
    sources = [each for folder in INCLUDED for each in sorted(folder.rglob("*")) if each.suffix != ".cu"]
    texts = [each.read_text() for each in sources if each.is_file()]
    return hashlib.sha256("\0".join([*words, *texts]).encode()).hexdigest()[:16]


@functools.cache
def _folder() -> Path:
    """Beside the compiled ops, where `make test` names a folder for them; else one of this run."""
    if named := os.environ.get("TORCH_EXTENSIONS_DIR"):
        folder = Path(named, "emulated")
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    holder = tempfile.TemporaryDirectory(prefix="emulated_kernels_")
    _folder.holder = holder  # type: ignore[attr-defined]  # deleted when the run ends
    return Path(holder.name)


@functools.cache
def _lacks(compiler: str, how: str) -> str | None:
    """What stands in the way of such a build here: tried on a program of two lines."""
    source, output = (_folder() / f"tried_{how}_{os.getpid()}{end}" for end in (".cpp", ""))
    source.write_text("#include <barrier>\n_Float16 half; int main() { std::barrier<> all(1); return half != half; }\n")
    command = [compiler, "-std=c++20", *FLAGS[how], str(source), "-o", str(output), "-pthread"]
    if subprocess.run(command, capture_output=True, timeout=600).returncode:
        return f"{compiler} cannot build this: {' '.join(FLAGS[how])}, with C++20's std::barrier and with _Float16"
    if subprocess.run([str(output)], capture_output=True, timeout=60).returncode:
        return f"a program built with {' '.join(FLAGS[how])} does not start here"
    source.unlink(), output.unlink()
    return None
