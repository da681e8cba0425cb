"""Observation never changes what is observed, on a real Megatron."""

import copy
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.cases import Case, case
from fixtures.contract.stream import NothingSeen, every_stream_rule
from fixtures.observe import Observer, judge_stream, observe_case, stage_traces
from fixtures.runtime import ROOT_VARIABLE
from suites.selftest.plain import computed

CASES = [
    case("dense"),
    case("dense", fp32_residual=False),
    case("dense", mode="dropout"),
    case("hybrid", mode="recompute-full"),
    case("moe-alltoall-shared"),
    case("dense-deep", layout="pp2-interleaved"),
]


@pytest.fixture(scope="module")
def observer(newest_release: Path) -> Iterator[Observer]:
    """Give an observer of the newest release; the fork server finds it by the environment."""
    before = os.environ.get(ROOT_VARIABLE)
    os.environ[ROOT_VARIABLE] = str(newest_release)
    yield Observer(newest_release, deadline=60.0, memory={})
    if before is None:
        del os.environ[ROOT_VARIABLE]
    else:
        os.environ[ROOT_VARIABLE] = before


@pytest.mark.parametrize("each", CASES, ids=lambda each: each.name)
def test_tracing_gives_the_same_bits(each: Case, observer: Observer) -> None:
    plain, traced = (
        observer.run(each.name, computed, each.world_size, each, observer.root, on)
        for on in (False, True)
    )
    assert plain == traced
    assert any(len(rank) > 1 for rank in plain)


def test_a_trace_that_saw_no_layer_is_no_verdict(observer: Observer) -> None:
    each = case("dense")
    traces = copy.deepcopy(stage_traces(each, observe_case(observer, each)))
    assert every_stream_rule(each, traces) == []
    for trace in traces:
        trace.trace.crossings[:] = [c for c in trace.trace.crossings if c.place != "layer out"]
    with pytest.raises(NothingSeen, match="layers"):
        every_stream_rule(each, traces)


def test_a_run_is_shared(observer: Observer) -> None:
    each = case("dense")
    assert observe_case(observer, each) is observe_case(observer, each)
    assert judge_stream(observer, each, every_stream_rule) == []
