"""Every kind of stack against the fp64 reference, with the flag on and off, over many seeds."""

import pytest

from fixtures.cases import DRIFT_STACKS, case
from fixtures.contract.against_base import drift_changes, no_worse_than_base
from fixtures.contract.drift import CaseDrift, forward_drift, gradient_drift, measures
from fixtures.observe import Observer, drift_of
from fixtures.oracle.decide import SEEDS
from fixtures.verdict.base import Base
from fixtures.verdict.plugin import Judge

over_stacks = pytest.mark.parametrize(
    "stack",
    [
        pytest.param(name, marks=[] if name in DRIFT_STACKS["quick"] else [pytest.mark.full])
        for name in DRIFT_STACKS["full"]
    ],
)


def _drifts(observer: Observer, stack: str) -> list[CaseDrift]:
    # A stock norm refuses an fp32 stream; that is rule N7's business.
    flags = (False,) if "stock" in stack else (True, False)
    return [drift_of(observer, case(stack, fp32_residual=flag), SEEDS) for flag in flags]


@pytest.mark.rule("D2")
@over_stacks
def test_forward_drift(stack: str, observer: Observer, judge: Judge) -> None:
    drifts = _drifts(observer, stack)
    judge.note("drift", measures(drifts, "forward", "D2"))
    judge(forward_drift(drifts))


@pytest.mark.rule("D3")
@over_stacks
def test_gradient_drift(stack: str, observer: Observer, judge: Judge) -> None:
    drifts = _drifts(observer, stack)
    judge.note("drift", measures(drifts, "backward", "D3"))
    judge(gradient_drift(drifts))


@pytest.mark.against_base
@pytest.mark.rule("D5")
@over_stacks
def test_no_more_drift_than_base(stack: str, observer: Observer, judge: Judge, base: Base) -> None:
    changes = drift_changes(_drifts(observer, stack), base.evidence("drift"))
    judge.note("drift-change", [change.to_data() for change in changes])
    judge(no_worse_than_base(changes))
