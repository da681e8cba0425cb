"""A pull request as a fork has it: a small git repository, a base, a change for the worse, one not.

The whole way through git, the cache and two sessions, on a few checks of each kind.
"""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from fixtures.target import resolve
from fixtures.verdict.kept import tier_for
from suites.selftest.drift_mutants import DRIFT_MUTANTS
from suites.selftest.gate import GateRun, run_gate
from suites.selftest.mutants import ADD, LAYER, MUTANTS, Edit
from suites.selftest.runner import carried_out

_ONE_MUTANT = MUTANTS[0]
_HARMLESS = (
    # Other lines, another order of two operands: the same bits.
    Edit(ADD, "            x = x + bias", "            # A comment.\n            x = bias + x"),
)
_CHECKS = ("-k", "dense.fp32.train or long-rope", "-n", "2")


@dataclass(frozen=True)
class Fork:
    """A git repository with a branch `main` that holds a release."""

    root: Path
    cache: Path

    def branch(self, name: str, *edits: Edit, start: str = "main") -> str:
        """Commit edits on a new branch; the target that it is."""
        self.git("switch", "-q", "-c", name, start)
        for edit in edits:
            edit.apply(self.root)
        self.git("commit", "-q", "-a", "-m", name)
        return f"{self.root}@{name}"

    def git(self, *arguments: str) -> None:
        """Run git in the repository."""
        identity = ("-c", "user.name=fork", "-c", "user.email=fork@example.org")
        subprocess.run(["git", "-C", str(self.root), *identity, *arguments], check=True)

    def judge(self, head: str, base: str, out: Path, *arguments: str) -> GateRun:
        """Judge a branch against another, in a job on GitHub whose page is beside `out`."""
        variables = {
            "PRECISION_GATE_CACHE": str(self.cache),
            "GITHUB_ACTIONS": "true",
            "GITHUB_STEP_SUMMARY": str(out.with_suffix(".md")),
        }
        return run_gate(head, out, f"--base={base}", *_CHECKS, *arguments, **variables)


@pytest.fixture(scope="module")
def fork(newest_release: Path, tmp_path_factory: pytest.TempPathFactory) -> Fork:
    folder = tmp_path_factory.mktemp("fork")
    fork = Fork(folder / "repository", folder / "cache")
    core = Path("megatron", "core")
    skipped = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(newest_release / core, fork.root / core, copy_function=os.link, ignore=skipped)
    fork.git("init", "-q", "-b", "main")
    fork.git("add", ".")
    fork.git("commit", "-q", "-m", "a release")
    return fork


def test_a_change_for_the_worse_is_introduced_and_a_harmless_one_is_not(
    fork: Fork, tmp_path: Path
) -> None:
    main = f"{fork.root}@main"
    worse = fork.judge(fork.branch("worse", *_ONE_MUTANT.edits), main, tmp_path / "worse")
    assert worse.status == 1, worse.output
    assert "judged before" not in worse.output
    introduced = [fault for fault in worse.results["faults"] if fault["status"] == "introduced"]
    assert len(introduced) == len(worse.results["faults"]) == 1
    assert introduced[0]["source"]["path"] == ADD
    (annotation,) = carried_out(worse.output.splitlines())
    assert annotation.name == "error"
    line = str(introduced[0]["source"]["line"])
    assert (annotation.properties["file"], annotation.properties["line"]) == (ADD, line)
    page = (tmp_path / "worse.md").read_text()
    assert page.count("## Precision gate") == 1, "the base's session has no page of its own"

    harmless = fork.judge(fork.branch("harmless", *_HARMLESS), main, tmp_path / "harmless")
    assert harmless.status == 0, harmless.output
    assert "judged before" in harmless.output
    assert harmless.results["faults"] == []
    assert "drift against base: 2 of 2 cases as before" in harmless.output
    assert harmless.last_line.startswith("verdict: ACCEPT: no fault introduced; ")


def test_a_broken_base_rejects_only_what_is_added_to_it(fork: Fork, tmp_path: Path) -> None:
    only_s2 = ("-m", "S2")
    broken = fork.branch("broken", *_ONE_MUTANT.edits)
    moved = fork.branch("moved", *_HARMLESS, start="broken")
    again = fork.judge(moved, broken, tmp_path / "moved", *only_s2)
    assert again.status == 0, again.output
    assert {fault["status"] for fault in again.results["faults"]} == {"in base"}
    assert carried_out(again.output.splitlines()) == []

    strict = fork.judge(moved, broken, tmp_path / "strict", *only_s2, "--base-strict")
    assert strict.status == 1, strict.output
    assert "already in base: S2" in strict.output

    added = Edit(LAYER, "residual = residual.float()", "residual = residual.bfloat16().float()")
    twice = fork.judge(
        fork.branch("twice", added, start="broken"), broken, tmp_path / "twice", *only_s2
    )
    assert twice.status == 1, twice.output
    statuses = {fault["source"]["path"]: fault["status"] for fault in twice.results["faults"]}
    assert statuses[LAYER] == "introduced"

    fixed = fork.judge(f"{fork.root}@main", broken, tmp_path / "fixed", *only_s2)
    assert fixed.status == 0, fixed.output
    assert "fixed by this change: S2 identity-path" in fixed.output


def test_other_bits_than_the_bases_with_the_flag_off_are_introduced(
    fork: Fork, tmp_path: Path
) -> None:
    swapped = next(each for each in DRIFT_MUTANTS if each.rule == "S7")
    target, main = fork.branch("swapped", *swapped.edits), f"{fork.root}@main"
    # The last of -k counts: with stacks that have a bias.
    run = fork.judge(target, main, tmp_path, "-k", "test_flag_off and dense", "-m", "S7")
    assert run.status == 1, run.output
    violations = [v for check in run.results["checks"] for v in check["violations"]]
    assert {v["expected"] for v in violations} >= {"the base's bits"}


def test_the_tier_follows_what_differs(fork: Fork) -> None:
    main = resolve(f"{fork.root}@main", fork.cache)
    other = resolve(fork.branch("other", *_HARMLESS), fork.cache)
    assert tier_for(main, main) == ("quick", "no file of megatron/core differs from the base")
    assert tier_for(other, main) == ("full", f"{ADD} differs from the base")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tier=auto"], "--tier auto looks at what differs from a base: add --base"),
        (["--base-strict"], "--base-strict without a base: add --base"),
        (["--base=0.0.1"], "there is no megatron-core 0.0.1"),
        (["--base=/nowhere"], "no such folder: /nowhere"),
        (["--base-results=/nowhere"], "--base-results /nowhere cannot be read"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, newest_release: Path, tmp_path: Path
) -> None:
    run = run_gate(newest_release, tmp_path, *arguments, PRECISION_GATE_CACHE=str(tmp_path))
    assert run.status == 2
    assert f"verdict: CANNOT JUDGE: {said}" in run.output


def test_results_are_kept_by_what_decides_them(fork: Fork) -> None:
    kept = list((fork.cache / "judged").glob("*/results.json"))
    assert kept, "no session kept its base"
    assert all(json.loads(path.read_text())["base"] is None for path in kept)
