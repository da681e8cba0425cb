"""Contracts of single layers: what they compute beside the stream, and what their norms take."""

import pytest

from fixtures.cases import Case, case, fused_norm_cases
from fixtures.contract.accumulation import stream_and_sums
from fixtures.contract.neighbours import captured, router, static_inputs, statistics
from fixtures.contract.stream import every_stream_rule
from fixtures.observe import Observer, judge_stream, watch
from fixtures.runtime import tasks
from fixtures.verdict.parametrize import in_tiers, over
from fixtures.verdict.plugin import Judge

_ROUTERS = [
    case("router-fp32", layout="3-microbatches"),
    case("router-fp64", layout="3-microbatches"),
    case("router-bias", layout="3-microbatches"),
    case("moe-alltoall-shared", layout="3-microbatches"),
]
_STATISTICS = [
    case("stock-layernorm", fp32_residual=False),
    case("stock-rmsnorm", fp32_residual=False),
    case("dense-rms-swiglu-gqa-rope"),
    case("qk-norm"),
    case("te-norm"),
    case("te-norm-rms"),
]
_CAPTURED = [case("dense"), case("dense", fp32_residual=False), case("dense-fp16")]
_STOCK_NORMS = [case("stock-layernorm"), case("stock-rmsnorm")]


@pytest.mark.rule("N1")
@over(_ROUTERS)
def test_router(case: Case, observer: Observer, judge: Judge) -> None:
    (seen,) = watch(observer, case, tasks.watch_routers)
    judge(router(case, seen))


@pytest.mark.rule("N4")
@over(_STATISTICS)
def test_statistics(case: Case, observer: Observer, judge: Judge) -> None:
    (seen,) = watch(observer, case, tasks.watch_statistics)
    judge(statistics(case, seen))


@pytest.mark.rule("N5")
@over(_CAPTURED)
def test_static_inputs(case: Case, observer: Observer, judge: Judge) -> None:
    (made,) = watch(observer, case, tasks.make_static_inputs)
    judge(static_inputs(case, made))


@pytest.mark.cuda
@pytest.mark.rule("N5")
@over(_CAPTURED)
def test_captured_layer(case: Case, observer: Observer, judge: Judge) -> None:
    (seen,) = watch(observer, case, tasks.capture_layer)
    judge(captured(case, seen))


@pytest.mark.rule("N6")
@pytest.mark.parametrize("case", in_tiers(fused_norm_cases))
def test_fused_norm(case: Case, observer: Observer, judge: Judge) -> None:
    judge(judge_stream(observer, case, stream_and_sums))


@pytest.mark.rule("N7")
@over(_STOCK_NORMS)
def test_stock_norm(case: Case, observer: Observer, judge: Judge) -> None:
    judge(judge_stream(observer, case, every_stream_rule))
