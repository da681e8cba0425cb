"""Each mutant is rejected by the quick tier, under the right rule, at the right file."""

from pathlib import Path

import pytest

from suites.selftest.drift_mutants import DRIFT_MUTANTS
from suites.selftest.gate import run_gate
from suites.selftest.mutants import ADD, MUTANTS, Edit, Mutant

# Every mutant is judged by the half of the suite that looks for its kind.
_JUDGED = [
    *(pytest.param(mutant, "not (drift or golden)", id=mutant.name) for mutant in MUTANTS),
    *(pytest.param(mutant, "drift or golden or S6", id=mutant.name) for mutant in DRIFT_MUTANTS),
]


@pytest.mark.parametrize(("mutant", "half"), _JUDGED)
def test_mutant_is_rejected(
    mutant: Mutant, half: str, newest_release: Path, tmp_path: Path
) -> None:
    target = mutant.make(newest_release, tmp_path / "target")
    run = run_gate(target, tmp_path / "out", "-m", half)
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
