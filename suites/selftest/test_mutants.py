"""Each mutant is rejected by the quick tier, under the right rule, at the right file."""

from pathlib import Path

import pytest

from suites.selftest.drift_mutants import DRIFT_MUTANTS, DriftMutant
from suites.selftest.gate import run_gate
from suites.selftest.mutants import ADD, MUTANTS, Edit, Mutant

pytestmark = pytest.mark.timeout(420)

# Mutants of the stream are judged by all that the quick tier has but drift and golden values.
_STREAM = ("-m", "not (drift or golden or property)")


def _of_its_kind(mutant: DriftMutant) -> tuple[str, ...]:
    """Give pytest's arguments for what can see a mutant of arithmetic: its rule, on its stack."""
    if mutant.rule in ("D2", "D3"):
        return ("-m", mutant.rule, "-k", mutant.stack)
    return ("-m", f"{mutant.rule} and not property")


_JUDGED = [
    *(pytest.param(mutant, _STREAM, id=mutant.name) for mutant in MUTANTS),
    *(pytest.param(mutant, _of_its_kind(mutant), id=mutant.name) for mutant in DRIFT_MUTANTS),
]


@pytest.mark.parametrize(("mutant", "judged_by"), _JUDGED)
def test_mutant_is_rejected(
    mutant: Mutant, judged_by: tuple[str, ...], newest_release: Path, tmp_path: Path
) -> None:
    run = run_gate(mutant.make(newest_release, tmp_path / "target"), tmp_path / "out", *judged_by)
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
