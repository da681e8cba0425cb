"""What passes between pipeline stages, on real ranks under the target's own schedules."""

import pytest

from fixtures.cases import Case, without_pipeline
from fixtures.contract.pipeline import schedule_equivalence, wire_dtype, wire_values
from fixtures.contract.seen import messages_seen
from fixtures.observe import Observer, observe_case, pipeline_trace, stage_traces
from fixtures.verdict.parametrize import over_cases
from fixtures.verdict.plugin import Judge

over_pipelines = over_cases(lambda case: case.layout.stages > 1)


@pytest.mark.rule("P3")
@over_pipelines
def test_wire_has_the_streams_dtype(case: Case, observer: Observer, judge: Judge) -> None:
    run = pipeline_trace(case, observe_case(observer, case))
    judge.note("messages", messages_seen(case, run))
    judge(wire_dtype(case, run))


@pytest.mark.rule("P4")
@over_pipelines
def test_bits_arrive_as_they_left(case: Case, observer: Observer, judge: Judge) -> None:
    judge(wire_values(case, pipeline_trace(case, observe_case(observer, case))))


# Stages draw their dropout masks apart from each other, so no two layouts drop the same elements.
@pytest.mark.rule("P5")
@over_cases(lambda case: case.layout.stages > 1 and case.mode.dropout == 0)
def test_schedule_does_not_change_the_stream(case: Case, observer: Observer, judge: Judge) -> None:
    alone = without_pipeline(case)
    judge(
        schedule_equivalence(
            case,
            stage_traces(case, observe_case(observer, case)),
            stage_traces(alone, observe_case(observer, alone, like=case)),
        )
    )


@pytest.mark.rule("P7")
@over_pipelines
def test_run_neither_hangs_nor_aborts(case: Case, observer: Observer, judge: Judge) -> None:
    observe_case(observer, case)
    judge([])
