#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv with everything that the Makefile's commands need, on a machine that has nothing but Python.
#   tools/setup_venv.sh planning                       .venv-planning instead: what planning needs, and no torch
#   tools/setup_venv.sh docs                           .venv-docs: what make docs needs, neither torch nor this package
#   tools/setup_venv.sh llamafactory                   .venv-llamafactory: what make try-llamafactory needs, for CPUs
#   tools/setup_venv.sh newest | oldest                .venv-newest, .venv-oldest: the newest and the oldest Python and torch
#                                                      that are supported; newest-planning, oldest-planning: without torch
#   PYTHON=/path/to/python3.11 tools/setup_venv.sh     to choose the interpreter
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv${1:+-$1}
cpu_torch="torch==2.13.0+cpu"
pair_torch="" pythons="python3.11 python3.12 python3.13 python3"
case "${1:-}" in
newest*) pair_torch="torch==2.15.*" pythons=python3.13 ;;
oldest*) pair_torch="torch==2.11.*" pythons=python3.11 ;;
esac
kind=${1:-} kind=${kind#newest} kind=${kind#oldest} kind=${kind#-}
cpu_index="https://download.pytorch.org/whl/cpu"

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
case "$kind" in "" | planning | docs | llamafactory) ;;
*) fail "unknown argument $1: the choices are planning, docs, llamafactory, newest, oldest, newest-planning, oldest-planning, or nothing" ;; esac
fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; }

python=""
for name in "${PYTHON:-}" $pythons; do
    [ -n "$name" ] || continue
    while read -r candidate; do
        # That of the environment itself, if it is active, is about to be removed.
        case "$candidate" in "$PWD/$venv"/*) continue ;; esac
        # A shim can be on the PATH and still not run, so each candidate is tried.
        if fits "$candidate"; then python=$candidate; break 2; fi
    done < <(type -aP "$name")
done
[ -n "$python" ] || fail "no Python found that fits (looked for \$PYTHON, $pythons): PYTHON=/path/to/python names one"
say "using $("$python" -c 'import platform, sys; print("Python", platform.python_version(), sys.executable)')"

# On a terminal pip shows what it downloads; in a log its lines would hide ours.
quiet=--quiet
[ -t 1 ] && quiet=--progress-bar=on
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
no_venv="cannot make a virtual environment: is Python's venv module installed?"
if [ "$kind" = docs ]; then
    say "making $venv"
    rm -rf "$venv"
    "$python" -m venv "$venv" || fail "$no_venv"
    pip install $quiet --no-deps -r tools/docs_requirements.txt
    touch "$venv/.ready"
    say "done"
    exit
fi
if [ "$kind" = planning ]; then
    say "making $venv, without torch"
    rm -rf "$venv"
    "$python" -m venv "$venv" || fail "$no_venv"
    pip install $quiet -e '.[plot,dev-planning]'
    touch "$venv/.ready"
    say "done"
    exit
fi

install_cpu_torch() {
    say "installing $cpu_torch (200 MB)"
    # A configured wheel folder or mirror may have it; PyTorch's own index of CPU builds does.
    pip install $quiet "$cpu_torch" 2>/dev/null || pip install $quiet "$cpu_torch" --index-url "$cpu_index" ||
        fail "no CPU build of torch 2.13.0 for this Python, neither from the configured indexes nor from $cpu_index"
}
if [ "$kind" = llamafactory ]; then
    say "making $venv"
    rm -rf "$venv"
    "$python" -m venv "$venv" || fail "$no_venv"
    install_cpu_torch
    # Its interface for browsers and its readers of pictures, films and sound are left out: they take gigabytes.
    pip install $quiet "transformers==5.6.0" "trl==0.24.0" "accelerate==1.11.0" "peft==0.18.1" "datasets==4.0.0" \
        "tyro<0.9" omegaconf einops fire sentencepiece tiktoken pandas protobuf pyyaml scipy
    pip install $quiet --no-deps "llamafactory==0.9.5"
    pip install $quiet ".[train,hf]"
    # It imports torchaudio whatever it trains, and there is no build of that for CPUs beside this torch.
    : >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchaudio.py"
    touch "$venv/.ready"
    say "done"
    exit
fi

# Read to its end: with pipefail, a grep that stops at the first of many GPUs would make the listing a failure.
has_gpu() { command -v nvidia-smi >/dev/null && [[ $(nvidia-smi -L 2>/dev/null) == *"GPU "* ]]; }
# "train" needs a torch in this range; an image that brings one keeps it.
torch_range=${pair_torch:-$("$python" -c 'import runpy; print("torch" + runpy.run_path("ds_fsmoe/versions.py")["SUPPORTED"]["torch"])')}
brings_torch() {
    "$python" - <<'CHECK' 2>/dev/null
import runpy
from importlib.metadata import version
found = tuple(int(part) for part in version("torch").split("+")[0].split(".")[:2])
supported = runpy.run_path("ds_fsmoe/versions.py")["SUPPORTED"]["torch"]
low, high = (tuple(int(n) for n in bound.lstrip("<>=").split(".")[:2]) for bound in supported.split(","))
raise SystemExit(not low <= found < high)
CHECK
}

shared=""
if [ -z "$pair_torch" ] && has_gpu && brings_torch; then
    shared=--system-site-packages
    say "this machine has a GPU and a torch in range ($torch_range): keeping it"
fi
say "making $venv"
rm -rf "$venv"
"$python" -m venv $shared "$venv" || fail "$no_venv"

if [ -n "$pair_torch" ]; then
    say "installing $pair_torch with its CUDA libraries (3 GB to download, 6 GB on disk)"
    pip install $quiet "$pair_torch"
elif [ -z "$shared" ] && has_gpu; then
    say "installing $torch_range (GPU build; several GB)"
    pip install $quiet "$torch_range"
elif [ -z "$shared" ]; then
    install_cpu_torch
fi
say "installing ds_fsmoe with DeepSpeed and the tools of the tests (some minutes)"
pip install $quiet -e '.[train,dev]'
"$venv/bin/python" -m ds_fsmoe env --brief
touch "$venv/.ready"
say "done"
