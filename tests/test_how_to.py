# SPDX-License-Identifier: Apache-2.0
"""What the page of launchers shows: commands that programs take, a Dockerfile and a manifest that fit the package."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import subprocess
import sys
from typing import Any

import pytest
import yaml

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.versions import RUN, SUPPORTED
from tests.scripts import ROOT

pytestmark = pytest.mark.long

PAGE = (ROOT / "docs" / "launchers.md").read_text()
SECTIONS = dict(re.findall(r"(?ms)^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE))
OF_LAUNCHERS = {name: text for name, text in SECTIONS.items() if name not in ("Environment variables", "NCCL settings")}
LAUNCHERS = ROOT / "examples" / "launchers"
OF_THE_READER = ["train.py", "--deepspeed", "ds_config.json"]
DOCKERFILE = (LAUNCHERS / "Dockerfile").read_text()


def commands(program: str) -> list[list[str]]:
    """The words of every command of a program that the page shows, behind its name."""
    blocks = re.findall(r"(?ms)^```bash\n(.*?)^```$", PAGE)
    words = [shlex.split(line) for block in blocks for line in block.splitlines()]
    return [each[each.index(program) + 1 :] for each in words if program in each]


def test_each_launcher_has_a_section_that_says_what_to_set_how_to_see_that_it_is_on_and_what_was_tried() -> None:
    assert list(OF_LAUNCHERS) == ["Slurm", "torchrun", "deepspeed", "MPI", "Docker", "Kubernetes"]
    for text in OF_LAUNCHERS.values():
        for head in ("To set", "Is it on?", "Tried"):
            assert text.count(f"\n- **{head}**") == 1
        assert "\n```bash\n" in text
        assert re.search(r"\.\./examples/launchers/\w+|torchrun", text)
    assert "ds_fsmoe ... is on for N MoE layer(s)" in PAGE.split("\n## ")[0]
    logged = 'f"ds_fsmoe {VERSION} is on for {state.num_layers} MoE layer(s)"'
    assert logged in (ROOT / "ds_fsmoe" / "engine" / "state.py").read_text()


def test_launchers_take_their_commands_and_files_that_commands_name_are_there() -> None:
    from deepspeed.launcher.runner import parse_args
    from torch.distributed.run import get_args_parser

    for words in commands("torchrun"):
        parsed = get_args_parser().parse_args(words)
        assert (parsed.module, parsed.training_script) == (True, "ds_fsmoe.run")
        assert parsed.training_script_args == OF_THE_READER
    for words in commands("deepspeed"):
        parsed = parse_args(words)
        assert (parsed.module, parsed.user_script, parsed.user_args) == (True, "ds_fsmoe.run", OF_THE_READER)
        assert "--hostfile" not in words or (ROOT / parsed.hostfile).is_file()
    for program in ("torchrun", "deepspeed", "mpirun", "sbatch", "docker", "kubectl"):
        assert commands(program), program
        for name in (each for words in commands(program) for each in words):
            assert not name.startswith(("examples/", "ds_configs/")) or (ROOT / name).is_file(), name


# ---- the Dockerfile


def instructions(name: str) -> list[str]:
    joined = re.sub(r"\\\n\s*", " ", DOCKERFILE)
    return [line.split(" ", 1)[1] for line in joined.splitlines() if line.startswith(f"{name} ")]


def arguments() -> dict[str, str]:
    return {name: value.strip('"') for name, _, value in (each.partition("=") for each in instructions("ARG"))}


def test_the_image_copies_what_is_there_and_all_that_the_build_of_the_package_reads() -> None:
    ignored = (LAUNCHERS / "Dockerfile.dockerignore").read_text().splitlines()
    copied = {name for each in instructions("COPY") for name in each.split()[:-1]}
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "ds_fsmoe", "op_builder", "csrc"} <= copied
    assert {each[1:] for each in ignored if each.startswith("!")} == copied
    assert "*" in ignored


def test_its_versions_are_those_that_are_supported_and_tested_and_the_page_lists_them() -> None:
    chosen = arguments()
    assert chosen["TORCH"] in {torch for _, torch in RUN}
    assert f"=={chosen['DEEPSPEED']}" == SUPPORTED["deepspeed"]
    assert re.search(r"setuptools>=\d+", (ROOT / "pyproject.toml").read_text())[0] in DOCKERFILE
    extras = re.search(r'"\.\[([\w,]+)\]"', DOCKERFILE)[1].split(",")
    setup = ast.parse((ROOT / "setup.py").read_text())
    words = (each for each in ast.walk(setup) if isinstance(each, ast.keyword))
    (known,) = (each.value for each in words if each.arg == "extras_require")
    assert set(extras) <= {ast.literal_eval(key) for key in known.keys}
    # Ubuntu 24.04 has Python 3.12, between those that were run.
    assert chosen["BASE"].endswith("-devel-ubuntu24.04")
    rows = dict(re.findall(r"(?m)^\| `([A-Z_]+)` \| ([^|]*?) \|", OF_LAUNCHERS["Docker"]))
    assert set(rows) == set(chosen)
    for name in ("TORCH", "DEEPSPEED", "BUILD_OPS"):
        assert rows[name] == chosen[name]


def test_what_it_runs_is_shell() -> None:
    for line in instructions("RUN"):
        done = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


# ---- the manifest


def manifest() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all((LAUNCHERS / "kubernetes.yaml").read_text())}


def started() -> list[str]:
    """The words of the container's command, as bash would have them in the pod of index 1."""
    (container,) = manifest()["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    (line,) = container["args"]
    assert line.startswith("exec ")
    return [each.replace("$JOB_COMPLETION_INDEX", "1") for each in shlex.split(line)][1:]


def test_pods_find_each_other_by_the_name_of_the_service() -> None:
    service, job = manifest()["Service"], manifest()["Job"]
    name, job_name = service["metadata"]["name"], job["metadata"]["name"]
    assert (service["apiVersion"], job["apiVersion"]) == ("v1", "batch/v1")
    assert (service["spec"]["clusterIP"], job["spec"]["completionMode"]) == ("None", "Indexed")
    assert job["spec"]["template"]["spec"]["subdomain"] == name
    assert service["spec"]["selector"] == {"job-name": job_name}
    words = started()
    assert words[words.index("--master-addr") + 1] == f"{job_name}-0.{name}"
    assert int(words[words.index("--master-port") + 1]) == service["spec"]["ports"][0]["port"]
    # The number of ranks of a node is the field that the page shows.
    assert '"topology": {"ranks_per_node": 8}' in OF_LAUNCHERS["Kubernetes"]
    assert FSMoEBlock.model_validate({"topology": {"ranks_per_node": 8}}).topology.ranks_per_node == 8


def test_its_command_is_one_for_torchrun_with_as_many_nodes_and_ranks_as_there_are(monkeypatch) -> None:
    from torch.distributed.run import get_args_parser

    job = manifest()["Job"]["spec"]
    program, *words = started()
    assert program == "torchrun"
    parsed = get_args_parser().parse_args(words)
    (container,) = job["template"]["spec"]["containers"]
    assert int(parsed.nnodes) == job["completions"] == job["parallelism"]
    assert int(parsed.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert parsed.node_rank == 1
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    assert {each["name"] for each in job["template"]["spec"]["volumes"]} == set(mounts.values())
    assert "/dev/shm" in mounts
    saves_in = parsed.training_script_args[parsed.training_script_args.index("--save-dir") + 1]
    assert saves_in.startswith("/runs/")
    assert all(isinstance(each["value"], str) for each in container["env"]), "Kubernetes takes nothing but strings"

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WORLD_SIZE", "16")  # two pods of eight
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    found = runpy.run_path(str(ROOT / parsed.training_script), run_name="train")
    args = found["parse_arguments"](parsed.training_script_args)
    assert args.moe == "fsmoe"
    assert os.path.isfile(args.deepspeed_config)
