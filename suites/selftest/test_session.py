"""A whole gate session on a real release: own defects, bad input, targets that die."""

import re
from pathlib import Path

import pytest

from suites.selftest.gate import run_gate
from suites.selftest.mutants import ADD, LAYER, MUTANTS, Edit, Mutant

ENTRY = """[[defect]]
id = "ours"
title = "we narrow on purpose"
rules = ["{rule}"]
subjects = ["{subject}"]
versions = ""
seen = "narrowed"
source = "https://example.org/1"
"""
ONLY_S2 = ("-k", "dense.fp32.train", "-m", "S2")


def test_a_forks_own_defect_does_not_reject(newest_release: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(ENTRY.format(rule="S2", subject="dense*"))
    target = MUTANTS[0].make(newest_release, tmp_path / "target")
    run = run_gate(target, tmp_path / "out", f"--defects={own}", *ONLY_S2)
    assert run.status == 0, run.output
    assert "known defect: ours: we narrow on purpose (1 check; https://example.org/1)" in run.output
    assert (tmp_path / "out" / "junit.xml").is_file()


def test_a_defect_that_does_not_show_is_told_as_fixed(newest_release: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(ENTRY.format(rule="S2", subject="dense.fp32.train"))
    run = run_gate(newest_release, tmp_path / "out", f"--defects={own}", *ONLY_S2)
    assert run.status == 0, run.output
    assert "fixed here: ours" in run.output
    assert run.results["fixed_here"] == ["ours"]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_defect_that_fits_no_check_is_refused(
    workers: str, newest_release: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.toml"
    own.write_text(ENTRY.format(rule="S2", subject="dance*"))
    run = run_gate(newest_release, tmp_path / "out", f"--defects={own}", "-n", workers)
    assert run.status == 2, run.output
    assert run.last_line == (
        f"verdict: CANNOT JUDGE: {own}: defect 'ours' fits no check: "
        "no subject of the rules S2 is like dance*"
    )


def test_checks_of_one_subject_share_a_worker(newest_release: Path, tmp_path: Path) -> None:
    rules = ("-m", "S1 or S2 or S3", "-k", "dense and train")
    run = run_gate(newest_release, tmp_path / "out", "-n", "2", "-vv", *rules)
    workers_of: dict[str, set[str]] = {}
    for worker, subject in re.findall(r"\[(gw\d)\].*PASSED.*\[(\S+)\]", run.output):
        workers_of.setdefault(subject, set()).add(worker)
    assert all(len(workers) == 1 for workers in workers_of.values()), workers_of
    assert set.union(*workers_of.values()) == {"gw0", "gw1"}
    assert run.results["counts"]["pass"] >= 2 * len(workers_of)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--megatron=no/such/folder", "no/such/folder"),
        ("--device=cuda", "--device cpu"),
        ("--defects=no/such.toml", "no/such.toml"),
    ],
)
def test_bad_input_is_one_line(
    option: str, said: str, newest_release: Path, tmp_path: Path
) -> None:
    run = run_gate(newest_release, tmp_path / "out", option)
    assert run.status == 2
    verdicts = [line for line in run.output.splitlines() if line.startswith("verdict:")]
    assert len(verdicts) == 1
    assert said in verdicts[0]
    assert "Traceback" not in run.output


def test_nothing_checked_is_no_verdict(newest_release: Path, tmp_path: Path) -> None:
    run = run_gate(newest_release, tmp_path / "out", "-k", "no_such_test")
    assert (run.status, run.last_line) == (
        2, "verdict: CANNOT JUDGE: nothing could be checked; checks: none",
    )  # fmt: skip


def test_a_target_that_cannot_be_imported(newest_release: Path, tmp_path: Path) -> None:
    edit = Edit(LAYER, "logger =", "import no_such_package\nlogger =")
    target = Mutant("broken", "S1", LAYER, (edit,)).make(newest_release, tmp_path / "target")
    run = run_gate(target, tmp_path / "out", *ONLY_S2)
    assert run.status == 2, run.output
    assert "'no_such_package', which is not installed: add --with" in run.last_line


def test_a_target_that_dies_is_told_with_its_line(newest_release: Path, tmp_path: Path) -> None:
    edit = Edit(
        ADD, "    x, bias = x_with_bias", "    import os; os.abort()\n    x, bias = x_with_bias"
    )
    target = Mutant("dies", "S2", ADD, (edit,)).make(newest_release, tmp_path / "target")
    run = run_gate(target, tmp_path / "out", *ONLY_S2)
    assert run.status == 1, run.output
    assert "rank 0 died (SIGABRT)" in run.output
    assert f"{ADD}:" in run.output
    assert ("S2", ADD) in run.rules_and_files()


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_check_that_breaks_down_is_not_passed_over(
    workers: str, newest_release: Path, tmp_path: Path
) -> None:
    plugin = tmp_path / "breakdown.py"
    plugin.write_text("import os\ndef pytest_runtest_call(item):\n    os._exit(3)\n")
    run = run_gate(
        newest_release, tmp_path / "out", *ONLY_S2, "-n", workers, "-p", "breakdown",
        PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert run.status not in (0, 1), run.output
    if workers == "2":
        assert run.status == 2
        assert "verdict: CANNOT JUDGE" in run.last_line
