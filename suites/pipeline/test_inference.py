"""What passes between pipeline stages under the target's inference wrapper."""

import pytest

from fixtures.cases import Case, case
from fixtures.contract.neighbours import inference_wire
from fixtures.observe import Observer, pipeline_trace, watch
from fixtures.runtime import tasks
from fixtures.verdict.parametrize import over
from fixtures.verdict.plugin import Judge

_CASES = [
    case("dense-deep", mode="inference", layout="pp2-inference"),
    case("dense-deep", mode="inference", layout="pp2-inference", fp32_residual=False),
]


@pytest.mark.rule("P6")
@over(_CASES)
def test_inference_wire(case: Case, observer: Observer, judge: Judge) -> None:
    judge(inference_wire(case, pipeline_trace(case, watch(observer, case, tasks.run_inference))))
