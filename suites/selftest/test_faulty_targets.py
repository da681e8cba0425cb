"""A gate session survives what a target does: the right verdict, soon, and nothing left behind."""

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from fixtures.runtime.processes import await_end
from fixtures.verdict.results import SCHEMA
from suites.selftest.faulty_targets import FAULTS, Fault
from suites.selftest.gate import GateRun, run_gate
from suites.selftest.mutants import MUTANTS

pytestmark = pytest.mark.timeout(120)

MARK = "PRECISION_GATE_SELFTEST"
"""The environment variable by which all processes of a session are known, whoever started them."""

_LEAVE_TIME = 3.0
"""Seconds for what ends by itself when the gate has ended: what Python counts resources with."""


@pytest.fixture
def mark() -> Iterator[dict[str, str]]:
    """Give a variable for a session's environment; what has it and still runs then, fails."""
    value = uuid.uuid4().hex
    yield {MARK: value}
    left = [each for each in _marked(f"{MARK}={value}") if not await_end(each, _LEAVE_TIME)]
    assert left == []


def _marked(entry: str) -> list[int]:
    """Give the processes that were started with an entry in their environment."""
    return [
        int(process.name)
        for process in Path("/proc").iterdir()
        if process.name.isdecimal() and entry.encode() in _environment(process)
    ]


def _environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faulty_target(
    fault: Fault, newest_release: Path, tmp_path: Path, mark: dict[str, str]
) -> None:
    target = fault.make(newest_release, tmp_path / "target")
    run = run_gate(target, tmp_path / "out", *fault.arguments, **mark)
    assert run.last_line.startswith(f"verdict: {fault.word}: "), run.output
    assert run.status == {"ACCEPT": 0, "REJECT": 1, "CANNOT JUDGE": 2}[fault.word]
    assert re.search(fault.told, run.output, re.MULTILINE), run.output
    _require_plain(run)
    _require_results(run)
    assert sum(run.results["counts"].values()) == 1


def _require_plain(run: GateRun) -> None:
    """Require that a session told one verdict, and nothing that moves a cursor."""
    lines = run.output.splitlines()
    assert [line for line in lines if line.startswith("verdict:")] == [run.last_line]
    assert [line for line in run.output.split("\n") if not line.isprintable()] == []


def _require_results(run: GateRun) -> None:
    """Require that results.json has what was told."""
    jsonschema.validate(run.results, json.loads(SCHEMA.read_text()))
    assert run.last_line == f"verdict: {run.results['verdict']}: {run.results['reason']}"


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_session_that_is_told_to_stop_keeps_what_it_knows(
    workers: str, newest_release: Path, tmp_path: Path, mark: dict[str, str]
) -> None:
    (tmp_path / "stop.py").write_text(
        "import os, signal, pytest\n"
        "class Stop:\n"
        "    @pytest.hookimpl(trylast=True)\n"
        "    def pytest_runtest_logreport(self, report):\n"
        "        if report.when == 'call':\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "def pytest_configure(config):\n"
        "    if not hasattr(config, 'workerinput'):\n"
        "        config.pluginmanager.register(Stop())\n"
    )
    run = run_gate(
        newest_release, tmp_path / "out", "-k", "dense.fp32.train]", "-m", "S1 or S2 or S3",
        "-n", workers, "-p", "stop", PYTHONPATH=str(tmp_path), **mark,
    )  # fmt: skip
    assert run.status == 2
    assert run.last_line.endswith("the session was broken off before every check was done")
    assert run.results["counts"]["pass"] == 1
    _require_results(run)


def test_a_worker_that_is_killed_takes_no_result_with_it(
    newest_release: Path, tmp_path: Path, mark: dict[str, str]
) -> None:
    (tmp_path / "kill.py").write_text(
        "import os, signal\n"
        "def pytest_runtest_setup(item):\n"
        "    if 'narrowed' in item.name:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = run_gate(
        newest_release, tmp_path / "out", "-k", "dense.fp32.train]", "-m", "S1 or S2",
        "-n", "1", "-p", "kill", PYTHONPATH=str(tmp_path), **mark,
    )  # fmt: skip
    assert run.status == 2
    assert run.results["counts"]["pass"] == 1
    _require_results(run)


@pytest.mark.parametrize(
    ("full", "word"), [("results.json.part", "CANNOT JUDGE"), ("junit.xml", "REJECT")]
)
def test_a_full_disk_costs_what_cannot_be_written_and_no_finding(
    full: str, word: str, newest_release: Path, tmp_path: Path
) -> None:
    target = MUTANTS[0].make(newest_release, tmp_path / "target")
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.json").write_text("an earlier session's")
    (out / full).symlink_to("/dev/full")
    run = run_gate(target, out, "-k", "dense.fp32.train]", "-m", "S2")
    assert run.last_line.startswith(f"verdict: {word}: "), run.output
    assert "No space left on device" in run.output
    assert "REJECT: 1 fault" in run.last_line
    assert f"  {MUTANTS[0].file}:" in run.output
    assert (out / "results.json").exists() == (full != "results.json.part")
    assert not (out / "results.json.part").exists(follow_symlinks=False)
