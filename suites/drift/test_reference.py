"""Every kind of stack against the fp64 reference, with the flag on and off, over many seeds."""

import pytest

from fixtures.cases import case
from fixtures.contract.drift import CaseDrift, forward_drift, gradient_drift, measures
from fixtures.observe import Observer, drift_of
from fixtures.oracle.decide import SEEDS
from fixtures.verdict.plugin import Judge

_QUICK = ("long-rope", "long-moe", "long-hybrid", "long-stock-rmsnorm")
_FULL = ("long-dense", "long-fp16", "long-cross", "long-moe-softmax-first")

over_stacks = pytest.mark.parametrize(
    "stack", [*_QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in _FULL)]
)


def _drifts(observer: Observer, stack: str) -> list[CaseDrift]:
    # A stock norm refuses an fp32 stream; that is rule N7's business.
    flags = (False,) if "stock" in stack else (True, False)
    return [drift_of(observer, case(stack, fp32_residual=flag), SEEDS) for flag in flags]


@pytest.mark.rule("D2")
@over_stacks
def test_forward_drift(stack: str, observer: Observer, judge: Judge) -> None:
    drifts = _drifts(observer, stack)
    judge.note(measures(drifts, "forward"))
    judge(forward_drift(drifts))


@pytest.mark.rule("D3")
@over_stacks
def test_gradient_drift(stack: str, observer: Observer, judge: Judge) -> None:
    drifts = _drifts(observer, stack)
    judge.note(measures(drifts, "backward"))
    judge(gradient_drift(drifts))
