"""Contracts at a model's end and of what goes back from there: logits, losses, main gradients."""

import pytest

from fixtures.cases import Case, case
from fixtures.contract.neighbours import ADDENDS, logits, main_gradients
from fixtures.observe import Observer, watch
from fixtures.runtime import tasks
from fixtures.verdict.parametrize import over
from fixtures.verdict.plugin import Judge

_ENDS = [
    case("dense"),
    case("dense-fp16", fp32_residual=False),
    case("hybrid"),
    case("te-norm"),
    case("te-wide-logits"),
]


@pytest.mark.rule("N2")
@over(_ENDS)
def test_logits_and_losses(case: Case, observer: Observer, judge: Judge) -> None:
    (seen,) = watch(observer, case, tasks.watch_logits)
    judge(logits(case, seen))


@pytest.mark.rule("N3")
@pytest.mark.parametrize("wide", [True, False], ids=["main-grad-fp32", "main-grad-compute"])
def test_main_gradients(wide: bool, observer: Observer, judge: Judge) -> None:
    each = case("dense")
    ranks = observer.run(
        each.name, tasks.accumulate_gradients, len(ADDENDS), each, wide, observer.root
    )
    judge(main_gradients(each, wide, ranks))
