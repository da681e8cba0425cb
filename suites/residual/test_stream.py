"""The stream at every boundary, rule by rule, in training without extras."""

import pytest

from fixtures.cases import Case, case
from fixtures.contract.stream import STREAM_RULES
from fixtures.observe import Observer, judge_stream
from fixtures.verdict.plugin import Judge

CASES = [case("dense"), case("dense-rms-swiglu-gqa-rope"), case("dense-fp16")]
OFF = [case("dense", fp32_residual=False)]


def over(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda each: each.name)


@pytest.mark.rule("S1")
@over(CASES + OFF)
def test_stream_has_its_dtype(case: Case, observer: Observer, judge: Judge) -> None:
    judge(judge_stream(observer, case, STREAM_RULES["S1"]))


@pytest.mark.rule("S2")
@over(CASES)
def test_identity_path_is_never_narrowed(case: Case, observer: Observer, judge: Judge) -> None:
    judge(judge_stream(observer, case, STREAM_RULES["S2"]))


@pytest.mark.rule("S5")
@over(CASES)
def test_gradient_of_the_stream_is_fp32(case: Case, observer: Observer, judge: Judge) -> None:
    judge(judge_stream(observer, case, STREAM_RULES["S5"]))
