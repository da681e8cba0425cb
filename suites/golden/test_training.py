"""A short training run against its recorded fp64 losses and gradient norms."""

import pytest

from fixtures.cases import case
from fixtures.contract.golden import golden_training, reference_training
from fixtures.observe import Observer
from fixtures.recording import TRAINED, deviation, recorded_reference, training_run
from fixtures.verdict.plugin import Judge

over_trained = pytest.mark.parametrize(
    "stack",
    [pytest.param(name, marks=pytest.mark.full if i else []) for i, name in enumerate(TRAINED)],
)


@pytest.mark.rule("G1")
@over_trained
def test_reference_training(stack: str, observer: Observer, judge: Judge, record: bool) -> None:
    golden, each = recorded_reference(observer, stack, record), case(stack)
    judge(reference_training(each, training_run(observer, each)["exact"], golden))


@pytest.mark.rule("G3")
@over_trained
def test_training_follows(stack: str, observer: Observer, judge: Judge, record: bool) -> None:
    golden = recorded_reference(observer, stack, record)
    found = []
    for each in (case(stack), case(stack, fp32_residual=False)):
        seen = training_run(observer, each)["seen"]
        names = ("loss", "gradient_norm")
        deviations = {name: deviation(seen, golden.training, name) for name in names}
        found += golden_training(each, deviations, golden)
    judge(found)
