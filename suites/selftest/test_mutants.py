"""Each mutant is rejected by the quick tier, under the right rule, at the right file."""

from pathlib import Path

import pytest

from suites.selftest.gate import run_gate
from suites.selftest.mutants import ADD, MUTANTS, Edit, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_rejected(mutant: Mutant, newest_release: Path, tmp_path: Path) -> None:
    run = run_gate(mutant.make(newest_release, tmp_path / "target"), tmp_path / "out")
    assert run.status == 1, run.output
    named = run.rules_and_files()
    assert (mutant.rule, mutant.file) in named, f"named: {named}\n{run.output}"


def test_an_edit_that_no_longer_applies_fails(newest_release: Path, tmp_path: Path) -> None:
    mutant = Mutant("gone", "S1", ADD, (Edit(ADD, "no such tokens", ""),))
    with pytest.raises(ValueError, match="no such tokens"):
        mutant.make(newest_release, tmp_path / "target")


def test_an_edit_leaves_the_release_alone(newest_release: Path, tmp_path: Path) -> None:
    before = (newest_release / ADD).read_text()
    MUTANTS[0].make(newest_release, tmp_path / "target")
    assert (newest_release / ADD).read_text() == before
    assert (tmp_path / "target" / ADD).read_text() != before
