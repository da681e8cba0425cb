"""The matrix of targets by rules: its rows, its shards, and going on where it stopped."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fixtures.target import CannotJudge
from fixtures.verdict.matrix import Row, shard, table, unjudged
from suites.selftest.gate import REPOSITORY


def check(rule: str, outcome: str, *broken: str) -> dict[str, Any]:
    return {"rule": rule, "outcome": outcome, "violations": [{"rule": each} for each in broken]}


def row(*checks: dict[str, Any], verdict: str = "REJECT") -> Row:
    target = {"label": "fork"}
    return Row.of({"target": target, "verdict": verdict, "reason": "", "checks": checks})


def test_a_rule_shows_its_worst_outcome() -> None:
    seen = row(check("S1", "pass"), check("S1", "not-checked"), check("S2", "known-defect"))
    assert seen.marks == {"S1": "?", "S2": "k"}
    assert row(check("S1", "violation", "S1"), check("S1", "pass")).marks == {"S1": "F"}


def test_a_check_of_many_rules_marks_those_that_are_broken() -> None:
    assert row(check("S8", "violation", "S2", "S5")).marks == {"S2": "F", "S5": "F"}


def test_every_outcome_has_a_mark() -> None:
    for outcome in ("pass", "violation", "known-defect", "not-applicable", "not-recorded"):
        assert len(row(check("S1", outcome)).marks["S1"]) == 1


def test_the_table_has_the_rules_that_were_looked_at() -> None:
    head, _, *body = table([row(check("P1", "pass")), row(check("S1", "pass"))]).splitlines()
    assert head.split() == ["|", "target", "|", "verdict", "|", "S1", "|", "P1", "|"]
    assert [line.count(".") for line in body] == [1, 1]


def test_what_cannot_be_judged_is_told_below() -> None:
    rows = [Row("9.9.9", "CANNOT JUDGE", "there is no such release", {}), row()]
    assert unjudged(rows) == ["9.9.9: there is no such release"]


def test_shards_are_a_partition() -> None:
    targets = list("abcdefg")
    parts = [shard(targets, f"{number}/3") for number in (1, 2, 3)]
    assert sorted(itertools.chain(*parts)) == targets
    assert shard(targets, None) == targets


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "1/", "a/b", "1/0", "-1/3"])
def test_there_is_no_such_shard(part: str) -> None:
    with pytest.raises(CannotJudge, match="--shard"):
        shard(["a"], part)


def test_what_was_judged_is_not_judged_again(newest_release: Path, tmp_path: Path) -> None:
    def run(*targets: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fixtures.verdict.matrix", *targets, "-n", "0"]
        return subprocess.run(
            [*command, f"--out={tmp_path}", "--", "-k", "dense.fp32.train", "-m", "S1"],
            cwd=REPOSITORY,
            env=os.environ | {"PRECISION_GATE_CACHE": str(cache)},
            capture_output=True,
            text=True,
            check=False,
        )

    cache = tmp_path / "cache"
    (cache / "releases").mkdir(parents=True)
    (cache / "releases" / newest_release.name).symlink_to(newest_release)
    first = run(newest_release.name)
    assert first.returncode == 0, first.stderr
    again = run(newest_release.name, "/nowhere/@main")
    assert again.returncode == 2, again.stderr
    assert f"megatron-core {newest_release.name}: ACCEPT (judged before)" in again.stderr
    assert "no such folder: /nowhere" in again.stderr
