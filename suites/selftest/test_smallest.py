"""The smallest stack in which each mutant of arithmetic shows, in a table at the session's end."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.cases import MODES, STACKS, Case
from fixtures.runtime.ranks import run_ranks
from suites.selftest.drift_mutants import DRIFT_MUTANTS, DriftMutant
from suites.selftest.smallest import first_broken

# Layers and tokens a sequence, the cheapest first.
SIZES = ((1, 4), (1, 16), (1, 64), (2, 64), (8, 16))

# Rules that look elsewhere than at stacks of any size: at the add itself, at recorded values.
_OF_ONE_SIZE = ("S6", "S7", "G2", "G3")


@pytest.mark.parametrize("mutant", DRIFT_MUTANTS, ids=lambda mutant: mutant.name)
def test_smallest_size(
    mutant: DriftMutant,
    newest_release: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    cases = [
        case
        for layers, sequence in SIZES
        for flag in (True, False)
        if _can_run(case := _case(mutant, layers, sequence, flag))
    ]
    root = mutant.make(newest_release, tmp_path)
    (result,) = run_ranks(first_broken, 1, cases, root, deadline=150)
    assert result.outcome == "returned", result.error
    if result.value is None:
        assert mutant.rule in _OF_ONE_SIZE
        record_property("smallest", (mutant.name, "", f"by {mutant.rule} alone", mutant.rule))
        return
    case, rules = result.value
    size = f"{case.stack.layers} x {case.stack.sequence}"
    flag = "on" if case.fp32_residual else "off"
    record_property("smallest", (mutant.name, flag, size, " ".join(rules)))


def _can_run(case: Case) -> bool:
    """Say whether a case can run: a stock norm refuses an fp32 stream."""
    return not (case.fp32_residual and case.stack.stock_norm)


def _case(mutant: DriftMutant, layers: int, sequence: int, flag: bool) -> Case:
    stack = STACKS[mutant.stack]
    experts = (1,) * layers if stack.moe_layers else ()
    sized = replace(stack, layers=layers, sequence=sequence, moe_layers=experts)
    mode = replace(MODES["train"], dropout=mutant.dropout)
    return Case(sized, fp32_residual=flag, mode=mode)
