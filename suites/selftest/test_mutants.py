"""Each mutant is rejected by the quick tier, under the right rule, at the right file."""

from pathlib import Path

import pytest

from suites.selftest.drift_mutants import DRIFT_MUTANTS
from suites.selftest.gate import run_gate
from suites.selftest.mutants import ADD, MUTANTS, Edit, Mutant

pytestmark = pytest.mark.timeout(420)


def _of_its_kind(mutant: Mutant) -> tuple[str, ...]:
    """Give pytest's arguments for what a mutant's rule is looked for in; the rest costs time."""
    family = {"S": "residual", "P": "pipeline"}.get(mutant.rule[0], mutant.rule)
    chosen = mutant.rule if mutant.rule in ("P1", "P2", "S6", "S7") else family
    stack = ("-k", mutant.stack) if mutant.rule in ("D2", "D3") else ()
    return ("-m", f"{chosen} and not property", *stack)


@pytest.mark.parametrize("mutant", [*MUTANTS, *DRIFT_MUTANTS], ids=lambda mutant: mutant.name)
def test_mutant_is_rejected(mutant: Mutant, newest_release: Path, tmp_path: Path) -> None:
    target = mutant.make(newest_release, tmp_path / "target")
    run = run_gate(target, tmp_path / "out", *_of_its_kind(mutant))
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
