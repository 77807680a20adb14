# SPDX-License-Identifier: Apache-2.0
"""The same script under every launcher: each rank finds its place, and all of them one node."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from ds_fsmoe.checks.preflight import accelerate_warnings, launcher_warnings
from tests.scripts import BIN, ROOT, free_port, start

SCRIPT = str(ROOT / "tests" / "launched.py")
EXAMPLES = ROOT / "examples" / "launchers"


def together(folder: Path, *commands: list[str], **variables: str) -> None:
    """Start one command for each node, all at once, and look at what their ranks found."""
    threads = [threading.Thread(target=start, args=(folder, *each), kwargs=variables) for each in commands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = sorted(each.read_text() for each in folder.glob("rank*.txt"))
    assert found == [f"{rank} of 2, nodes [0, 0]" for rank in range(2)]


DAILY = pytest.mark.daily("launchers", 2)
MPI = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: apt-get install openmpi-bin")
ONE_RANK = "torchrun --nnodes 2 --nproc-per-node 1"
FOR_MPI = "-mca btl_tcp_if_include lo --oversubscribe -x PATH -x DS_ACCELERATOR -x OMP_NUM_THREADS"
AT = "--master_addr 127.0.0.1 --master_port PORT"
# One command, or that of each node, by its NODE or none.
COMMANDS = [
    pytest.param("torchrun --standalone --nproc-per-node 2", 1, marks=pytest.mark.long),
    pytest.param(f"{ONE_RANK} --node-rank NODE --master-addr 127.0.0.1 --master-port PORT", 2, marks=DAILY),
    pytest.param(f"{ONE_RANK} --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:PORT --rdzv-id 7", 2, marks=DAILY),
    pytest.param("deepspeed --num_accelerators 2 --master_port PORT", 1, marks=DAILY),
    pytest.param(f"deepspeed --hostfile two --no_ssh {AT} --node_rank NODE", 2, marks=DAILY),
    pytest.param("mpirun -n 2 --oversubscribe PYTHON", 1, marks=[DAILY, MPI]),
    pytest.param(
        f"deepspeed --launcher openmpi --no_ssh_check --hostfile one --launcher_args '{FOR_MPI}' {AT}",
        1,
        marks=[DAILY, MPI],
    ),
]


@pytest.mark.parametrize(("command", "nodes"), COMMANDS)
def test_ranks_of_every_launcher_find_their_places(command: str, nodes: int, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("localhost slots=2\n")
    (tmp_path / "two").write_text("one slots=1\ntwo slots=1\n")
    line = command.replace("PORT", port := str(free_port())).replace("PYTHON", sys.executable)
    words = [*shlex.split(line), SCRIPT, str(tmp_path)]
    commands = [[str(node) if word == "NODE" else word for word in words] for node in range(nodes)]
    # MPI itself tells its ranks nothing of where they meet.
    at = {"MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"} if words[0] == "mpirun" else {}
    together(tmp_path, *commands, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", **at)


@DAILY
def test_the_example_for_kubernetes(tmp_path: Path) -> None:
    job = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))[1]["spec"]["template"]["spec"]
    (container,) = job["containers"]
    # On one machine: without the name of a pod, with a GPU of none, and with our script.
    line = container["args"][0].replace("fsmoe-0.fsmoe", "127.0.0.1").replace("29500", str(free_port()))
    line = line.replace("--nproc-per-node 8", "--nproc-per-node 1")
    line = line[: line.index("examples/train.py")] + f"{SCRIPT} {tmp_path}"
    together(tmp_path, *(["env", f"JOB_COMPLETION_INDEX={pod}", *container["command"], line] for pod in range(2)))


FAKE_SRUN = """#!/usr/bin/env bash
# What of srun and scontrol the example uses: as many processes as there are tasks, told apart by their variables.
[ "$(basename "$0")" = scontrol ] && { echo 127.0.0.1; exit; }
shift
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=2 "$@" & done
wait -n && wait -n
"""


@DAILY
def test_the_example_for_slurm(tmp_path: Path) -> None:
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(FAKE_SRUN)
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "one", "SLURM_CPUS_PER_TASK": "1", "MASTER_PORT": str(free_port())}
    path = f"{tmp_path}:{BIN}:{os.environ['PATH']}"
    together(tmp_path, ["bash", str(EXAMPLES / "fsmoe.sbatch"), SCRIPT, str(tmp_path)], PATH=path, **variables)


@pytest.mark.parametrize(
    ("restarts", "store", "disabled", "warns"),
    [
        *(("", "", "", False), ("0", "True", "", False), ("3", "False", "", False), ("3", "True", "1", False)),
        ("3", "True", "", True),
    ],
)
def test_a_restart_that_would_wait_for_ever_is_warned_of(restarts: str, store: str, disabled: str, warns: bool) -> None:
    names = "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    values = dict(zip(names, (restarts, store, disabled), strict=True))
    found = launcher_warnings({name: value for name, value in values.items() if value})
    assert bool(found) == warns
    assert all("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in each for each in found)


def test_the_example_of_a_hostfile_is_one_that_deepspeed_reads() -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    assert fetch_hostfile(str(EXAMPLES / "hostfile")) == {"node0": 8, "node1": 8}
    for line in (EXAMPLES / "deepspeed_env").read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z_]\w*=.+", line)


def test_a_job_that_accelerate_takes_for_several_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"num_processes": 1}
    state = SimpleNamespace(PartialState=SimpleNamespace(_shared_state=shared))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    assert accelerate_warnings(1) == []
    assert "Accelerate counts 1 process(es) in a job of 2 ranks" in accelerate_warnings(2)[0]
    shared["num_processes"] = 2
    assert accelerate_warnings(2) == []
    monkeypatch.delitem(sys.modules, "accelerate.state")
    assert accelerate_warnings(2) == []
