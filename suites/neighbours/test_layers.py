"""Contracts of single layers: what their graphs are captured with, what their norms take."""

import pytest

from fixtures.cases import Case, case, fused_norm_cases
from fixtures.contract.accumulation import stream_and_sums
from fixtures.contract.neighbours import static_inputs
from fixtures.contract.stream import every_stream_rule
from fixtures.observe import Observer, judge_stream
from fixtures.runtime import tasks
from fixtures.verdict.parametrize import in_tiers
from fixtures.verdict.plugin import Judge

_CAPTURED = [case("dense"), case("dense", fp32_residual=False), case("dense-fp16")]
_STOCK_NORMS = [case("stock-layernorm"), case("stock-rmsnorm")]


@pytest.mark.rule("N5")
@pytest.mark.parametrize("each", _CAPTURED, ids=lambda each: each.name)
def test_static_inputs(each: Case, observer: Observer, judge: Judge) -> None:
    (made,) = observer.run(each.name, tasks.make_static_inputs, 1, each, observer.root)
    judge(static_inputs(each, made))


@pytest.mark.rule("N6")
@pytest.mark.parametrize("case", in_tiers(fused_norm_cases))
def test_fused_norm(case: Case, observer: Observer, judge: Judge) -> None:
    judge(judge_stream(observer, case, stream_and_sums))


@pytest.mark.rule("N7")
@pytest.mark.parametrize("each", _STOCK_NORMS, ids=lambda each: each.name)
def test_stock_norm(each: Case, observer: Observer, judge: Judge) -> None:
    judge(judge_stream(observer, each, every_stream_rule))
