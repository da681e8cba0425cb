"""All rules of the stream at once, in every mode and on every pipeline stage."""

import pytest

from fixtures.cases import ONE_STAGE, TRAIN, Case
from fixtures.contract.seen import boundaries_seen
from fixtures.contract.stream import every_stream_rule
from fixtures.observe import Observer, judge_stream, observe_case, stage_traces
from fixtures.verdict.parametrize import over_cases
from fixtures.verdict.plugin import Judge


@pytest.mark.rule("S8")
@over_cases(lambda case: case.mode is not TRAIN or case.layout is not ONE_STAGE)
def test_stream_in_every_mode(case: Case, observer: Observer, judge: Judge) -> None:
    traces = stage_traces(case, observe_case(observer, case))
    judge.note("boundaries", boundaries_seen(case, traces))
    judge(judge_stream(observer, case, every_stream_rule))
