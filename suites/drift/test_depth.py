"""How drift grows with depth, from the fourth layer to the last of a deep stack."""

import pytest

from fixtures.cases import Case, case
from fixtures.contract.drift import depth_scaling, measures
from fixtures.observe import Observer, drift_of
from fixtures.oracle.decide import DEPTH_SEEDS
from fixtures.verdict.plugin import Judge

_CASES = [case("depth-128"), case("depth-128", fp32_residual=False)]


@pytest.mark.full
@pytest.mark.rule("D4")
@pytest.mark.parametrize("each", _CASES, ids=lambda each: each.name)
def test_growth_with_depth(each: Case, observer: Observer, judge: Judge) -> None:
    drift = drift_of(observer, each, DEPTH_SEEDS)
    for phase in ("forward", "backward"):
        judge.note("drift", measures([drift], phase))
    judge(depth_scaling(drift))
