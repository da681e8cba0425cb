"""The stream of every case against the exact sum of the terms that the run itself added."""

import pytest

from fixtures.cases import Case
from fixtures.contract.accumulation import accumulation
from fixtures.observe import Observer, judge_stream
from fixtures.verdict.parametrize import over_cases
from fixtures.verdict.plugin import Judge


@pytest.mark.rule("D1")
@over_cases(lambda case: True)
def test_stream_is_the_sum_of_its_terms(case: Case, observer: Observer, judge: Judge) -> None:
    judge(judge_stream(observer, case, accumulation))
