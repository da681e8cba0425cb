"""Each mutant is rejected by the quick tier, under the right rule, at the right file."""

from pathlib import Path

import pytest

from suites.selftest.drift_mutants import DRIFT_MUTANTS
from suites.selftest.gate import run_gate
from suites.selftest.mutants import ADD, MUTANTS, Edit, Mutant
from suites.selftest.neighbour_mutants import FIXES, NEIGHBOUR_MUTANTS

pytestmark = pytest.mark.timeout(420)


def _in_search_of(mutant: Mutant) -> tuple[str, ...]:
    """Give pytest's arguments that look for a mutant until it is seen for the first time."""
    chosen = f"{mutant.looked_for or mutant.rule} and not property"
    stack = ("-k", mutant.stack) if mutant.rule in ("D2", "D3") else ()
    return ("-x", "-m", chosen, *stack)


@pytest.mark.parametrize(
    "mutant", [*MUTANTS, *DRIFT_MUTANTS, *NEIGHBOUR_MUTANTS], ids=lambda mutant: mutant.name
)
def test_mutant_is_rejected(mutant: Mutant, newest_release: Path, tmp_path: Path) -> None:
    target = mutant.make(newest_release, tmp_path / "target")
    run = run_gate(target, tmp_path / "out", *_in_search_of(mutant))
    if mutant.rule == "S7" and run.results["counts"]["not-recorded"]:
        pytest.skip("no bits are recorded for this machine's arithmetic: pytest suites --record")
    assert run.status == 1, run.output
    named = run.rules_and_files()
    assert (mutant.rule, mutant.file) in named, f"named: {named}\n{run.output}"


def test_a_fix_of_a_known_defect_is_told(newest_release: Path, tmp_path: Path) -> None:
    target = FIXES.make(newest_release, tmp_path / "target")
    run = run_gate(target, tmp_path / "out", "-m", "N1 or N5 or N6")
    assert run.status == 0, run.output
    wanted = {"bf16-static-inputs", "fused-norm-input", "narrow-token-counts"}
    assert wanted <= set(run.results["fixed_here"])


def test_an_edit_that_no_longer_applies_fails(newest_release: Path, tmp_path: Path) -> None:
    mutant = Mutant("gone", "S1", ADD, (Edit(ADD, "no such tokens", ""),))
    with pytest.raises(ValueError, match="no such tokens"):
        mutant.make(newest_release, tmp_path / "target")


def test_an_edit_leaves_the_release_alone(newest_release: Path, tmp_path: Path) -> None:
    before = (newest_release / ADD).read_text()
    MUTANTS[0].make(newest_release, tmp_path / "target")
    assert (newest_release / ADD).read_text() == before
    assert (tmp_path / "target" / ADD).read_text() != before
