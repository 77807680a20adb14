# SPDX-License-Identifier: Apache-2.0
"""The cluster on one machine: what it refuses, what it leaves behind (nothing), and that its links are what they say.

Most of it needs network namespaces; where the machine has none, these tests are skipped and say why.
"""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import cluster
from benchmarks.bed import bed as beds
from benchmarks.bed import job
from benchmarks.bed.bed import Bed, BedError, check_machine, down, found_bed, namespaces, rate_mbit
from benchmarks.bed.job import run_job
from benchmarks.bed.self_test import contention
from tests.benchmarks.bed_messages import bucket, connected, passes
from tests.samples import sampled
from tests.waiting import LIMIT_S, until

ROOT = Path(__file__).resolve().parents[2]
NAME = f"t{os.getpid() % 1_000_000}"

try:
    check_machine()
    no_bed = ""
except BedError as error:
    no_bed = str(error)
needs_bed = pytest.mark.skipif(bool(no_bed), reason=no_bed or "there can be a bed here")


@pytest.fixture
def clean() -> Iterator[None]:
    """Whatever a test does, it leaves no namespace; other tests have beds of other names."""
    yield
    for name in (NAME, f"{NAME}b"):
        down(name)
    there = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert f"fsmoe-{NAME}" not in there
    assert not list(Path("/etc/netns").glob(f"fsmoe-{NAME}-*"))


def in_namespace(namespace: str, code: str) -> subprocess.CompletedProcess[str]:
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


def has_no_processes(bed: Bed) -> bool:
    return all(row[3] == 0 for row in bed.status())


# ---- what needs no namespaces


@pytest.mark.parametrize(
    "rate", ["0mbit", "100", "fast", "100 mbit", "-5mbit", "1tbit", "200gbit", "1kbit", "nanmbit", ""]
)
def test_a_rate_that_no_token_bucket_keeps_is_refused(rate: str) -> None:
    with pytest.raises(BedError, match="must be a number with kbit, mbit or gbit, from 100kbit to 100gbit"):
        Bed(inter=rate)


def test_rates_are_read_in_all_units() -> None:
    assert [rate_mbit(each) for each in ("100mbit", "1.5gbit", "800kbit")] == [100, 1500, 0.8]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"nodes": 0}, "0 nodes of 2 ranks: must be 1 to 16 of 1 to 16"),
        ({"ranks_per_node": 17}, "2 nodes of 17 ranks"),
        ({"mode": "wifi"}, "mode 'wifi': the choices are independent, shared"),
        ({"name": "my bed"}, "name 'my bed': must be 1 to 12 small letters and digits"),
    ],
)
def test_a_bed_that_cannot_be_is_refused(change: dict, sentence: str) -> None:
    with pytest.raises(BedError, match=re.escape(sentence)):
        Bed(**change)


@pytest.mark.parametrize("name", ["../x", "..", "/etc/x", "a b", "", "x" * 13, "A", "x\n"])
@pytest.mark.parametrize(
    "command", [["up"], ["run", "--", "x.py"], ["link", "0", "down"], ["self-test"], ["status"], ["down"], ["watch"]]
)
def test_a_name_that_could_lie_elsewhere_is_refused_by_every_command(
    command: list[str], name: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(beds, "STATE", tmp_path / "state")
    monkeypatch.setattr(beds, "_run", None)  # nothing is run
    (tmp_path / "x.json").write_text("mine")
    assert cluster.main(["--name", name, *command]) == 2
    assert "must be 1 to 12 small letters and digits" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which beds are files alone."""
    monkeypatch.setattr(beds, "STATE", tmp_path)
    monkeypatch.setattr(beds, "check_machine", lambda: None)
    monkeypatch.setattr(beds, "_run", lambda *_: subprocess.CompletedProcess([], 0, "", ""))
    monkeypatch.setattr(Bed, "_build", lambda self: None)
    return tmp_path


def test_of_two_that_build_one_bed_at_once_the_second_changes_nothing(pretended: Path, monkeypatch) -> None:
    said = []

    def build(self: Bed) -> None:
        with pytest.raises(BedError) as caught:
            Bed("one", nodes=5).up()
        said.append(str(caught.value))
        Bed("other", nodes=4).up() if self.name == "one" else None

    monkeypatch.setattr(Bed, "_build", lambda self: build(self) if self.name == "one" else None)
    Bed("one", nodes=3).up()
    assert said == ["bed 'one' is being built by another process"]
    assert (found_bed("one").nodes, found_bed("other").nodes) == (3, 4)
    with pytest.raises(BedError, match=r"bed 'one' is already up \(3 nodes"):
        Bed("one").up()
    assert (down("one"), down("other")) == (0, 0)
    Bed("one", nodes=2).up()
    assert found_bed("one").nodes == 2


def test_a_build_that_fails_is_cleared_and_can_be_tried_again(pretended: Path, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Bed, "_build", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Bed("one").up()
    assert not (pretended / "one.json").exists()
    Bed("one").up()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[1]",
        "[" * 100_000,
        '{"name": "one"}',
        '{"name": "one", "nodes": "2", "ranks_per_node": 2, "inter": "1mbit", "intra": "1mbit", "mode": "shared"}',
        '{"name": "one", "nodes": 99, "ranks_per_node": 2, "inter": "1mbit", "intra": "1mbit", "mode": "shared"}',
        '{"name": "one", "nodes": 2, "ranks_per_node": 2, "inter": "x", "intra": "1mbit", "mode": "shared", "a": 1}',
        "\udcff",
        None,
    ],
)
def test_a_damaged_file_of_a_bed_is_named_and_down_removes_it(text: str | None, pretended: Path, capsys) -> None:
    file = pretended / "one.json"
    if text is None:
        file.symlink_to("/dev/zero")
    else:
        file.write_text(text, errors="surrogateescape")
    for command in (["status"], ["up"], ["link", "0", "down"], ["run", "--", "x.py"], ["self-test"]):
        assert cluster.main(["--name", "one", *command]) == 2
        said = capsys.readouterr().err
        assert f"{file} is damaged" in said
        assert "--name one down` removes it" in said
    assert cluster.main(["--name", "one", "down"]) == 0
    assert not os.path.lexists(file)


def test_without_root_or_tools_it_refuses_politely(monkeypatch, capsys) -> None:
    monkeypatch.setattr(beds.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(beds.shutil, "which", lambda tool: f"/sbin/{tool}")
    assert cluster.main(["up"]) == 2
    assert "network namespaces need root: run it with sudo" in capsys.readouterr().err
    monkeypatch.setattr(beds.shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    assert cluster.main(["up"]) == 2
    assert "not installed: tc. On Debian and Ubuntu: apt install iproute2" in capsys.readouterr().err


def test_kappa_is_read_off_the_task_that_ends_first() -> None:
    times = {"first_ms": 10.0, "second_ms": 4.0, "first_beside_ms": 12.0, "second_beside_ms": 6.0}
    assert contention(times) == pytest.approx(0.5)
    assert contention(times | {"second_beside_ms": 3.9}) == 0.0


# ---- what does


def links_of(bed: Bed) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(namespace, port) of all links between nodes, and of all inside them."""
    places = bed.places()
    if bed.mode == "independent":
        return [(each.namespace, "eth0") for each in places], [(each.namespace, "lo") for each in places]
    uplinks = [(bed.node_switch(node), "uplink") for node in range(bed.nodes)]
    uplinks += [(bed.switch, f"n{node}") for node in range(bed.nodes)]
    ports = [(each.namespace, "eth0") for each in places]
    return uplinks, ports + [(bed.node_switch(each.node), f"r{index}") for index, each in enumerate(places)]


@needs_bed
@pytest.mark.parametrize("mode", ["independent", "shared"])
def test_a_bed_has_its_links_and_leaves_nothing(mode: str, clean: None) -> None:
    bed = Bed(NAME, nodes=3, ranks_per_node=2, inter="50mbit", intra="200mbit", mode=mode)
    bed.up()
    assert found_bed(NAME) == bed
    rows = bed.status()
    assert len(rows) == (3 if mode == "independent" else 6)
    assert all("200Mbit" in row[2] for row in rows)
    with pytest.raises(BedError, match=f"bed '{NAME}' is already up .*3 nodes x 2 ranks.*down` first"):
        Bed(NAME).up()
    last = len(bed.places()) - 1
    between, inside = links_of(bed)
    for ports, mbit, kind in ((between, 50, "inter"), (inside, 200, "intra")):
        for each in ports:
            found = bucket(*each)
            assert found.rate_mbit == mbit
            # After a pause a bucket is full, and no more than a packet is free then.
            assert bed.mtu(kind) <= found.burst_bytes < 1.1 * bed.mtu(kind)
    # Of the first place: its node's link to other nodes, and its link inside the node.
    ports, size_bytes = [between[0], inside[0]], 256 * 1024
    if mode == "independent":
        assert passes(bed, 0, last, size_bytes, ports) == [True, False]
        assert passes(bed, 0, 0, size_bytes, ports) == [False, True]
    else:  # what leaves the node goes through the rank's own port too
        assert passes(bed, 0, last, size_bytes, ports) == [True, True]
        assert passes(bed, 0, 1, size_bytes, ports) == [False, True]
    hosts = in_namespace(bed.places()[0].namespace, "import socket; print(socket.gethostbyname('node2'))")
    assert hosts.stdout.strip() == next(place.address for place in bed.places() if place.node == 2)
    assert down(NAME) == (4 if mode == "independent" else 10)
    assert down(NAME) == 0


@needs_bed
def test_links_are_cut_restored_and_rerated_while_up(clean: None) -> None:
    bed = Bed(NAME, inter="50mbit")
    bed.up()
    (mine, other), _ = links_of(bed)
    with connected(bed, 0, 1) as connection:
        connection.send(1000)
        assert connection.receive() == 1000
        assert cluster.main(["--name", NAME, "link", "1", "down"]) == 0
        before = bucket(*mine)
        connection.send(1000)
        # It has left its place, and comes nowhere until the link is there again.
        until(lambda: bucket(*mine).passed_bytes >= before.passed_bytes + 1000)
        assert connection.arrived() == 1000
        assert cluster.main(["--name", NAME, "link", "1", "up"]) == 0
        assert connection.receive() == 2000
    assert cluster.main(["--name", NAME, "link", "0", "rate", "10mbit"]) == 0
    assert [bucket(*each).rate_mbit for each in (mine, other)] == [10, 50]
    assert passes(bed, 0, 1, 128 * 1024, [mine]) == [True]
    for arguments in (["7", "down"], ["0", "sideways"], ["0", "rate"], ["0", "rate", "0mbit"]):
        assert cluster.main(["--name", NAME, "link", *arguments]) == 2


@needs_bed
def test_two_beds_do_not_disturb_each_other(clean: None) -> None:
    one, two = Bed(NAME, inter="50mbit"), Bed(f"{NAME}b", inter="50mbit")
    one.up()
    two.up()
    # The same addresses in both, and a message arrives in its own.
    assert one.places()[1].address == two.places()[1].address
    ports = [(bed.places()[0].namespace, "eth0") for bed in (one, two)]
    assert passes(one, 0, 1, 65536, ports) == [True, False]
    down(two.name)
    assert passes(one, 0, 1, 65536, ports[:1]) == [True]
    assert len(namespaces(NAME)) == 3


@needs_bed
@sampled("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], kept=[0])
def test_nothing_is_left_of_a_build_that_was_killed(number: int, clean: None) -> None:
    arguments = ["--name", NAME, "up", "--nodes", "12", "--ranks-per-node", "4", "--mode", "shared"]
    building = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "cluster.py"), *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(lambda: len(namespaces(NAME)) >= 4)
    building.send_signal(number)
    assert building.wait(timeout=LIMIT_S) != 0, "it was built before it was killed"
    until(lambda: not namespaces(NAME) and not (beds.STATE / f"{NAME}.json").exists())


JOB = """
import datetime, os, signal, socket, sys, torch, torch.distributed as dist
dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=600))
x = torch.full((3,), float(dist.get_rank())); dist.all_reduce(x)
print(socket.gethostname(), x.tolist(), sys.argv[-1], torch.get_num_threads(), flush=True)
dist.barrier()
"""


def said_by_ranks(lines: list[str]) -> list[str]:
    return sorted(line for line in lines if "live" in line and "rank" in line.split("]")[0])


@needs_bed
@pytest.mark.daily("benchmarks", 4)
def test_a_job_runs_on_every_rank_with_its_nodes_name_until_one_of_them_dies(
    clean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "job.py"
    script.write_text(f"{JOB}if dist.get_rank() == 1: os._exit(7)\nsignal.pause()\n")
    monkeypatch.setattr(job, "GRACE_S", 1.0)
    bed = Bed(NAME, ranks_per_node=1)
    bed.up()
    lines: list[str] = []
    assert run_job(bed, [str(script), "live"], LIMIT_S, lines.append) == 7
    assert said_by_ranks(lines) == [f"[node{rank} rank{rank}] node{rank} [1.0, 1.0, 1.0] live 1" for rank in range(2)]
    assert any(re.search(r"\[bed\] node\d failed with status \d+; ending the others", line) for line in lines)
    assert any("rank 1 ended with status 7" in line for line in lines)
    until(lambda: has_no_processes(bed))


@needs_bed
@pytest.mark.daily("benchmarks", 4)
def test_a_job_runs_on_several_ranks_of_each_node(clean: None, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    bed = Bed(NAME)
    bed.up()
    lines: list[str] = []
    assert run_job(bed, [str(script), "live"], LIMIT_S, lines.append) == 0
    wanted = [f"[node{rank // 2} rank{rank}] node{rank // 2} [6.0, 6.0, 6.0] live 1" for rank in range(4)]
    assert said_by_ranks(lines) == wanted


@needs_bed
@pytest.mark.daily("benchmarks", 4)
def test_a_dead_rank_beside_others_of_its_node_ends_its_job(
    clean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The others do not notice by themselves.
    script = tmp_path / "job.py"
    script.write_text("import os, signal\nif os.environ['RANK'] == '1': os._exit(7)\nsignal.pause()\n")
    monkeypatch.setattr(job, "GRACE_S", 1.0)
    bed = Bed(NAME)
    bed.up()
    lines: list[str] = []
    assert run_job(bed, [str(script)], LIMIT_S, lines.append) == 7
    assert any(re.search(r"\[bed\] node0 failed with status \d+; ending the others", line) for line in lines)
    assert any("rank 1 ended with status 7" in line for line in lines)
    until(lambda: has_no_processes(bed))


def test_ranks_that_their_launcher_ended_do_not_hide_the_one_that_failed(tmp_path: Path) -> None:
    for rank, status in enumerate((143, 7, 0, 143)):
        (tmp_path / str(rank)).write_text(str(status))
    assert job._failed(tmp_path) == {"1": 7}
    (tmp_path / "1").write_text("0")
    assert job._failed(tmp_path) == {"0": 143, "3": 143}


@needs_bed
def test_a_killed_run_takes_its_ranks_along(clean: None, tmp_path: Path) -> None:
    started = tmp_path / "started"
    script = tmp_path / "sleep.py"
    script.write_text(f"import pathlib, signal; pathlib.Path({str(started)!r}).touch(); signal.pause()")
    bed = Bed(NAME, nodes=1, ranks_per_node=1)
    bed.up()
    command = [sys.executable, str(ROOT / "benchmarks" / "cluster.py"), "--name", NAME, "run", "--", str(script)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        until(started.exists)
        running.kill()
    until(lambda: has_no_processes(bed))


@needs_bed
def test_a_run_over_its_time_ends(clean: None, tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import signal; signal.pause()")
    bed = Bed(NAME, nodes=1, ranks_per_node=1)
    bed.up()
    assert run_job(bed, [str(script)], 1, lambda _line: None) == 124
    until(lambda: has_no_processes(bed))


@needs_bed
def test_what_cannot_be_run_is_named(clean: None, capsys) -> None:
    assert cluster.main(["--name", NAME, "run", "--", "train.py"]) == 2
    assert f"no bed is up under the name '{NAME}': " in capsys.readouterr().err
    Bed(NAME, nodes=1).up()
    assert cluster.main(["--name", NAME, "run", "--", "absent.py"]) == 2
    assert "script absent.py: no such file" in capsys.readouterr().err
    assert cluster.main(["--name", NAME, "run"]) == 2
    assert "run what? cluster.py run -- SCRIPT ARGUMENTS" in capsys.readouterr().err


@needs_bed
@pytest.mark.daily("benchmarks", 4)
def test_a_benchmark_measures_on_the_bed(clean: None, tmp_path: Path) -> None:
    Bed(NAME, inter="50mbit", intra="200mbit").up()
    script = str(ROOT / "benchmarks" / "cases" / "bench_bed.py")
    lines: list[str] = []
    status = run_job(found_bed(NAME), [script, "--blocks", "2", "--results", str(tmp_path)], LIMIT_S, lines.append)
    assert status == 0, "\n".join(lines[-30:])
    with (tmp_path / "bed.csv").open(newline="") as file:
        rows = {(row["case"], row["variant"]): row for row in csv.DictReader(file)}
    assert len(rows) == 9
    assert all(row["ranks"] == "4" and float(row["cpu_share"]) > 0 for row in rows.values())


@needs_bed
def test_the_links_inside_a_node_and_between_nodes_work_at_once(clean: None) -> None:
    bed = Bed(NAME, inter="50mbit", intra="200mbit")
    bed.up()
    with connected(bed, 0, 1) as between:
        bed.link(1, "down")
        between.send(1000)
        # A message is under way between the nodes all the time that another one takes inside one of them.
        with connected(bed, 0, 0) as inside:
            inside.send(256 * 1024)
            assert inside.receive() == 256 * 1024
        assert between.arrived() == 0
        bed.link(1, "up")
        assert between.receive() == 1000


@needs_bed
@pytest.mark.daily("benchmarks", 4)
@pytest.mark.parametrize("mode", ["independent", "shared"])
def test_the_self_test_reports_links_collectives_overlap_and_kappa(mode: str, clean: None, tmp_path, capsys) -> None:
    Bed(NAME, inter="50mbit", intra="200mbit", mode=mode).up()
    result = tmp_path / "found.json"
    cluster.main(["--name", NAME, "self-test", "--json", str(result)])
    found = json.loads(result.read_text())
    assert set(found["links"]) == {"inter", "intra"}
    assert set(found["overlap"]) == {"inter + intra", "inter + compute", "intra + compute"}
    text = capsys.readouterr().out
    assert "reduce_scatter_gloo" in text
    assert "kappa" in text
    assert "CPU share" in text
