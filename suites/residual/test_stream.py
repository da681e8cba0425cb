"""The stream of every stack, rule by rule, in training without extras."""

import pytest

from fixtures.cases import ONE_STAGE, TRAIN, Case
from fixtures.contract.seen import boundaries_seen
from fixtures.contract.stream import STREAM_RULES
from fixtures.observe import Observer, judge_stream, observe_case, stage_traces
from fixtures.verdict.parametrize import over_cases
from fixtures.verdict.plugin import Judge


def _is_plain(case: Case) -> bool:
    return case.mode is TRAIN and case.layout is ONE_STAGE


over_stacks = over_cases(_is_plain)
over_fp32_stacks = over_cases(lambda case: _is_plain(case) and case.fp32_residual)


@pytest.mark.rule("S1")
@over_stacks
def test_stream_has_its_dtype(case: Case, observer: Observer, judge: Judge) -> None:
    traces = stage_traces(case, observe_case(observer, case))
    judge.note("boundaries", boundaries_seen(case, traces))
    judge(judge_stream(observer, case, STREAM_RULES["S1"]))


@pytest.mark.rule("S2")
@over_fp32_stacks
def test_identity_path_is_never_narrowed(case: Case, observer: Observer, judge: Judge) -> None:
    judge(judge_stream(observer, case, STREAM_RULES["S2"]))


@pytest.mark.rule("S3")
@over_fp32_stacks
def test_stream_uses_its_significand(case: Case, observer: Observer, judge: Judge) -> None:
    judge(judge_stream(observer, case, STREAM_RULES["S3"]))


@pytest.mark.rule("S4")
@over_fp32_stacks
def test_branches_compute_in_compute_dtype(case: Case, observer: Observer, judge: Judge) -> None:
    judge(judge_stream(observer, case, STREAM_RULES["S4"]))


@pytest.mark.rule("S5")
@over_fp32_stacks
def test_gradient_is_never_narrowed(case: Case, observer: Observer, judge: Judge) -> None:
    judge(judge_stream(observer, case, STREAM_RULES["S5"]))
