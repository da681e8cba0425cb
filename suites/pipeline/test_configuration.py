"""What the configuration makes of pipeline_dtype, and what it says about it."""

from dataclasses import replace

import pytest

from fixtures.cases import Case, case
from fixtures.contract.pipeline import Configured, override_notice, pipeline_dtype
from fixtures.observe import Observer
from fixtures.runtime import tasks
from fixtures.verdict.plugin import Judge

_SET = case("dense", layout="pp2")
_UNSET = case("dense")


def _name(each: Case) -> str:
    return f"config.{'fp32' if each.fp32_residual else 'off'}.{each.asked_dtype or 'unset'}"


_CASES = [
    replace(each, fp32_residual=flag)
    for each in (_SET, replace(_SET, pipeline_dtype="float32"), _UNSET)
    for flag in (True, False)
]
over_configurations = pytest.mark.parametrize("each", _CASES, ids=_name)


def _configure(observer: Observer, each: Case) -> list[Configured]:
    """Give what became of one configuration on each rank; one run makes them all."""
    ranks = observer.once(
        "config", lambda: observer.run("config", tasks.configure, 2, _CASES, observer.root)
    )
    return [configured[_CASES.index(each)] for configured in ranks]


@pytest.mark.rule("P1")
@over_configurations
def test_pipeline_dtype(each: Case, observer: Observer, judge: Judge) -> None:
    judge(pipeline_dtype(_name(each), _configure(observer, each)))


@pytest.mark.rule("P2")
@over_configurations
def test_override_notice(each: Case, observer: Observer, judge: Judge) -> None:
    judge(override_notice(_name(each), _configure(observer, each)))
