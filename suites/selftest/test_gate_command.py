"""The gate command around pytest: options, set-up, exit status and the verdict line.

A copy of ci/ runs with an environment whose Python is a script that writes down how it was
called, and whose tox is another: no network, no Megatron, and (but for one test) no pytest.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# Stands for `python -m pytest`: writes down what it was given, and ends as it is told.
PYTHON = f"""#!{sys.executable}
import json, os, pathlib, sys

out = pathlib.Path(next(a for a in sys.argv if a.startswith("--out=")).removeprefix("--out="))
print("in the middle of a line", end="", flush=True)
exec(os.environ.get("STUB_ENDING", ""))
print()
out.mkdir(exist_ok=True)
seen = dict(arguments=sys.argv[1:], folder=os.getcwd(), environment=dict(os.environ))
(out / "results.json").write_text(json.dumps(seen))
print("verdict: from pytest")
sys.exit(int(os.environ.get("STUB_STATUS", 0)))
"""

# Stands for the real conftest.py where pytest itself is run.
CONFTEST = """
import json, pathlib

def pytest_addoption(parser):
    for name in ("device", "tier", "out"):
        parser.addoption("--" + name, dest="gate_" + name)

def pytest_sessionfinish(session):
    out = pathlib.Path(session.config.option.gate_out)
    if not hasattr(session.config, "workerinput"):
        (out / "results.json").write_text(json.dumps({"tests": session.testscollected}))
"""

TOX = """#!/bin/sh
echo "$@" >> "$0.calls"
mkdir -p .tox/suite/bin
cp .tox/python .tox/suite/bin/python
"""


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@dataclass(frozen=True)
class Seen:
    """What the environment's Python was called with."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]

    def value(self, option: str) -> list[str]:
        """The values of one of the gate's own options, in order."""
        return [a.removeprefix(option + "=") for a in self.arguments if a.startswith(option + "=")]


@dataclass(frozen=True)
class Copy:
    """A copy of the command, and the folder where its user stands."""

    root: Path
    here: Path

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Call ci/gate as a user does whose folder is `here`."""
        return subprocess.run(
            [sys.executable, str(self.root / "ci" / "gate"), *arguments],
            cwd=self.here,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def seen(self, *arguments: str, **environment: str) -> Seen:
        """How `run` calls Python."""
        done = self.run(*arguments, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return Seen(**json.loads((self.root / "results" / "results.json").read_text()))

    @property
    def tox_calls(self) -> list[str]:
        """One line for each time tox was called."""
        log = self.root / ".tox/bootstrap/bin/tox.calls"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def gate(tmp_path: Path) -> Copy:
    copy = Copy(tmp_path / "gate", tmp_path / "here")
    copy.here.mkdir()
    for name in (
        *("ci/gate", "ci/environment.py", "ci/requirements.txt"),
        *("fixtures/__init__.py", "fixtures/foreign.py", "tox.ini"),
        *(path.relative_to(REPOSITORY) for path in REPOSITORY.glob("fixtures/target/*.py")),
    ):
        (copy.root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, copy.root / name)
    work = copy.root / ".tox"
    write_script(work / "python", PYTHON)
    write_script(work / "bootstrap/bin/tox", TOX)
    (work / "bootstrap/bin/python").touch()
    pinned = next(
        node.value.value
        for node in ast.parse((REPOSITORY / "ci/environment.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_TOX"
    )
    (work / "bootstrap/.ready").write_text(pinned)
    return copy


def test_the_environment_is_built_once(gate: Copy) -> None:
    first = gate.run()
    assert first.returncode == 0, first.stdout + first.stderr
    assert "minutes the first time" in first.stderr
    assert gate.tox_calls == ["run --notest -e suite --workdir .tox"]

    second = gate.run()
    assert second.returncode == 0
    assert second.stderr == ""
    assert len(gate.tox_calls) == 1


def test_the_environment_follows_the_requirements(gate: Copy) -> None:
    gate.run()
    with (gate.root / "ci/requirements.txt").open("a") as requirements:
        requirements.write("another==1.0\n")
    assert gate.run("--tier", "none").returncode == 2
    assert len(gate.tox_calls) == 1, "bad input is told before any set-up"
    gate.run()
    assert len(gate.tox_calls) == 2


def test_an_environment_without_its_python_is_made_anew(gate: Copy) -> None:
    gate.run()
    python = gate.root / ".tox/suite/bin/python"
    python.unlink()
    python.symlink_to("/gone/with/an/upgrade")
    gate.run()
    assert gate.tox_calls[1:] == ["run --notest -e suite --workdir .tox --recreate"]


def test_a_failed_set_up_gives_the_reason_of_pip(gate: Copy) -> None:
    failing = "#!/bin/sh\necho ERROR: No space left\necho suite: FAIL\nexit 1\n"
    write_script(gate.root / ".tox/bootstrap/bin/tox", failing)
    done = gate.run()
    log = gate.root / ".tox/setup.log"
    assert done.returncode == 2
    assert done.stdout == (
        f"verdict: CANNOT JUDGE: the set-up failed: ERROR: No space left (all of it: {log})\n"
    )


@pytest.mark.parametrize("status", [0, 1, 2])
def test_the_status_and_last_line_are_those_of_pytest(gate: Copy, status: int) -> None:
    done = gate.run(STUB_STATUS=str(status))
    assert done.returncode == status
    assert done.stdout.splitlines()[-1] == "verdict: from pytest"


def test_what_pytest_cannot_judge_it_tells_itself(gate: Copy) -> None:
    done = gate.run(STUB_ENDING="print(); print('verdict: CANNOT JUDGE: told'); sys.exit(2)")
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == "verdict: CANNOT JUDGE: told"


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        # 1 would read as REJECT: what Python itself gives when it cannot even start pytest.
        ("os._exit(1)", "pytest ended (status 1) before there was a verdict"),
        ("os._exit(0)", "pytest ended (status 0) before there was a verdict"),
        ("os.kill(os.getpid(), 9)", "pytest ended (SIGKILL) before there was a verdict"),
    ],
)
def test_no_results_means_no_verdict(gate: Copy, ending: str, said: str) -> None:
    results = gate.root / "results"
    results.mkdir()
    (results / "results.json").write_text("an earlier run's")
    done = gate.run(STUB_ENDING=ending)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1].startswith(f"verdict: CANNOT JUDGE: {said}")
    assert not (results / "results.json").exists()


def test_being_told_to_stop_is_passed_on_and_told(gate: Copy) -> None:
    gate.run()
    command = [sys.executable, str(gate.root / "ci/gate")]
    ending = "import signal; signal.pause()"
    environment = os.environ | {"STUB_ENDING": ending}
    with subprocess.Popen(
        command, cwd=gate.here, env=environment, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.read(len("in the middle")) == "in the middle"
        child.terminate()
        last = child.stdout.read().splitlines()[-1]
    assert child.returncode == 2
    assert "CANNOT JUDGE: pytest ended (SIGTERM)" in last


def test_options_reach_pytest_with_the_meaning_they_have_here(gate: Copy) -> None:
    here = gate.here
    for name in ("fork", "a"):
        (here / name).mkdir()
    for name in ("wheel.whl", "own.toml"):
        (here / name).touch()
    seen = gate.seen(
        *("--megatron", "fork@team/main", "--device", "cpu", "--tier", "full"),
        *("--base", "fork@main", "--strict"),
        *("--out", "../gate/results", "--defects", "own.toml"),
        *("--with", "einops", "--with", "./wheel.whl"),
    )
    assert seen.folder == str(gate.root)
    assert seen.value("--megatron") == [f"{here}/fork@team/main"]
    assert seen.value("--base") == [f"{here}/fork@main"]
    assert "--base-strict" in seen.arguments
    assert seen.value("--device") == ["cpu"]
    assert seen.value("--tier") == ["full"]
    assert seen.value("--out") == [f"{gate.root}/results"]
    assert seen.value("--defects") == [f"{here}/own.toml"]
    assert seen.value("--with") == ["einops", f"{here}/wheel.whl"]


def test_defaults(gate: Copy) -> None:
    seen = gate.seen()
    assert seen.value("--megatron") == []
    assert seen.value("--base") == []
    assert "--base-strict" not in seen.arguments
    assert seen.value("--device") == ["auto"]
    assert seen.value("--tier") == ["quick"]
    assert seen.value("--out") == [f"{gate.root}/results"]


def test_a_release_is_no_path_even_where_a_folder_has_its_name(gate: Copy) -> None:
    (gate.here / "0.16.1").mkdir()
    assert gate.seen("--megatron", "0.16.1").value("--megatron") == ["0.16.1"]
    assert gate.seen("--megatron", "./0.16.1").value("--megatron") == [f"{gate.here}/0.16.1"]


@pytest.mark.parametrize(
    ("arguments", "whole"),
    [
        (["-k", "two"], True),
        (["suites/residual"], False),
        (["suites/residual/test_one.py::test_it"], False),
    ],
)
def test_tests_named_for_pytest_replace_the_suite(
    gate: Copy, arguments: list[str], whole: bool
) -> None:
    (gate.root / "suites/residual").mkdir(parents=True)
    (gate.root / "suites/residual/test_one.py").touch()
    seen = gate.seen("--", *arguments)
    assert seen.arguments[-len(arguments) :] == arguments
    assert ("suites" in seen.arguments) == whole


def test_workers_are_as_many_as_processors_unless_told(gate: Copy) -> None:
    processors = min(len(os.sched_getaffinity(0)), 8)
    default = gate.seen().arguments
    if processors < 2:
        assert "-n" not in default
    else:
        assert default[default.index("-n") + 1] == str(processors)
    for told in (["-n", "1"], ["-n0"], ["--numprocesses=3"], ["--pdb"]):
        arguments = gate.seen("--", *told).arguments
        assert [a for a in arguments if a.startswith("-n")] == [a for a in told if a[:2] == "-n"]


def test_the_callers_shell_does_not_change_what_is_judged(gate: Copy) -> None:
    foreign = {"PYTHONPATH": "/foreign", "PYTEST_ADDOPTS": "--nonsense", "TOX_ENV": "other"}
    environment = gate.seen(**foreign, CUDA_X="kept").environment
    assert environment["CUDA_X"] == "kept"
    assert not environment.keys() & foreign.keys()


def test_pytest_itself_runs_all_suites_but_the_own_tests(gate: Copy) -> None:
    gate.run()
    write_script(gate.root / ".tox/suite/bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (gate.root / "conftest.py").write_text(CONFTEST)
    for name in ("residual/test_one.py", "pipeline/test_one.py", "selftest/test_own.py"):
        (gate.root / "suites" / name).parent.mkdir(parents=True)
        (gate.root / "suites" / name).write_text("def test_it(): pass\n")
    for named, tests in (([], 2), (["suites/selftest"], 1)):
        done = gate.run("--out", "new" + str(tests), "--", "-n0", *named)
        assert done.returncode == 0, done.stdout + done.stderr
        results = gate.here / f"new{tests}" / "results.json"
        assert json.loads(results.read_text()) == {"tests": tests}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--megatron", "gone/away"], "no such folder: {here}/gone/away (from 'gone/away')"),
        (["--megatron", "fork"], "'fork' is neither a folder here nor a version"),
        (["--megatron", ""], "the target's name is empty"),
        (["--megatron"], "argument --megatron: expected one argument"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--tier", "slow"], "argument --tier: invalid choice: 'slow'"),
        (["--out", "file"], "--out file cannot be used: File exists"),
        (["--out", "file/below"], "--out file/below cannot be used: Not a directory"),
        (["--defects", "none.toml"], "--defects none.toml: there is no such file"),
        (["--with", ""], "--with '' is not a requirement"),
        (["--with=--pre"], "--with '--pre' is not a requirement"),
        (["--meg", "0.16.1"], "unrecognized arguments: --meg 0.16.1"),
        (["0.16.1"], "unrecognized arguments: 0.16.1"),
    ],
)
def test_bad_input_is_one_line(gate: Copy, arguments: list[str], said: str) -> None:
    (gate.here / "file").touch()
    done = gate.run(*arguments)
    assert done.returncode == 2
    assert done.stdout.startswith("verdict: CANNOT JUDGE: " + said.format(here=gate.here))
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_help_tells_each_option_and_status(gate: Copy) -> None:
    done = gate.run("--help")
    assert done.returncode == 0
    for word in ("--megatron", "--device", "--tier", "--out", "--defects", "--with", "REJECT"):
        assert word in done.stdout


@pytest.mark.parametrize("command", ["gate", "selftest"])
def test_an_older_python_gets_a_sentence(command: str) -> None:
    path = REPOSITORY / "ci" / command
    ast.parse(path.read_text(), feature_version=(3, 8))
    code = (
        "import runpy, sys; sys.version_info = (3, 8, 18, 'final', 0)\n"
        f"runpy.run_path({str(path)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    told = done.stdout + done.stderr
    assert "is Python 3.8; 3.12 or newer is needed" in told
    assert told.count("\n") == 1
