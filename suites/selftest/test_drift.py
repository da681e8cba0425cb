"""The rules of drift on data made by hand: what they accept, what they reject, what they say."""

import math
import random
from dataclasses import replace

import pytest
import torch

from fixtures.cases import case
from fixtures.contract.accumulation import accumulation
from fixtures.contract.drift import (
    CaseDrift,
    depth_scaling,
    forward_drift,
    gradient_drift,
    growths,
    measures,
)
from fixtures.contract.stream import NothingSeen, StageTrace
from fixtures.oracle import budgets
from fixtures.oracle.bounds import UNIT_ROUNDOFF, gamma
from fixtures.oracle.decide import DEPTH_FALSE_ALARM, FALSE_ALARM, exceeded
from fixtures.oracle.loss import loss_error
from fixtures.oracle.records import Drift, Measured, Routing, SeedDrift
from fixtures.oracle.routing import judge_routing
from fixtures.trace.lineage import Lineage
from fixtures.trace.records import Accumulation, Crossing, StreamTrace
from fixtures.trace.source import Locator

LONG, OFF = case("long-rope"), case("long-rope", fp32_residual=False)


def _drift(normwise: float) -> Drift:
    return Drift(normwise, 100.0, normwise**2 / 2, 50.0)


def _case_drift(each=LONG, factor=1.0, spread=0.01, seeds=16, **changes) -> CaseDrift:  # noqa: ANN001, ANN003
    """Make a case's drift: `factor` times the promised one, with some spread over the seeds."""
    numbers = random.Random(7)
    made = []
    for seed in range(seeds):
        measured = []
        for layer in range(each.stack.layers):
            for phase in ("forward", "backward"):
                depth = layer + 1 if phase == "forward" else each.stack.layers - layer
                promised = 0.8 * depth**0.3
                seen = promised * factor * math.exp(numbers.gauss(0, spread))
                measured.append(
                    Measured("stream", phase, "decoder", layer, _drift(seen), _drift(promised))
                )
        measured.append(Measured("losses", "forward", "", None, _drift(0.2), _drift(0.2)))
        fields = {"routings": (), "losses": 0.1, "accumulation": {}} | changes
        made.append(SeedDrift(seed, tuple(measured), **fields))
    return CaseDrift(each, made)


def test_the_test_has_its_stated_error_rate() -> None:
    numbers = random.Random(1)
    # Far more samples than the rate allows an alarm in, at the very edge of the budget.
    alarms = sum(
        exceeded([numbers.gauss(0, 1) for _ in range(16)], 0.0) is not None for _ in range(300)
    )
    assert FALSE_ALARM * 500 + DEPTH_FALSE_ALARM * 4 < 1e-3
    assert alarms == 0


def test_the_test_sees_a_shift_of_four_deviations() -> None:
    numbers = random.Random(2)
    assert all(
        exceeded([numbers.gauss(4, 1) for _ in range(16)], 0.0) is not None for _ in range(50)
    )


def test_equal_samples_are_judged_without_a_deviation() -> None:
    assert exceeded([0.5, 0.5], 0.5) is None
    assert exceeded([0.5, 0.5], 0.4) is not None
    assert exceeded([math.nan, 0.5], 0.4) is not None
    assert exceeded([math.inf, 0.5], 0.4) is not None
    assert exceeded([-math.inf, 0.5], 0.4) is None
    with pytest.raises(ValueError, match="two of them"):
        exceeded([0.5], 0.4)


def test_drift_as_promised_is_accepted() -> None:
    drifts = [_case_drift(), _case_drift(OFF, factor=1.0)]
    assert forward_drift(drifts) == []
    assert gradient_drift(drifts) == []


def test_more_drift_than_promised_names_the_first_layer() -> None:
    (violation,) = forward_drift([_case_drift(factor=1.1)])
    assert (violation.rule, violation.layer, violation.place) == ("D2", 0, "layer out")
    assert "times that" in violation.seen
    (violation,) = gradient_drift([_case_drift(factor=1.1)])
    assert (violation.rule, violation.place, violation.phase) == ("D3", "layer in", "backward")


def test_less_drift_than_promised_is_welcome() -> None:
    assert forward_drift([_case_drift(factor=0.5)]) == []


def test_drift_that_is_not_a_number_is_rejected() -> None:
    assert forward_drift([_case_drift(factor=math.nan)])


def test_the_flag_may_not_make_drift_larger() -> None:
    worse = [_case_drift(factor=1.0), _case_drift(OFF, factor=0.9)]
    (violation,) = forward_drift(worse)
    assert violation.expected == "no more drift than with the flag off"
    assert violation.subject == LONG.name


def test_a_router_is_judged_by_margin_and_bound() -> None:
    wrong = _case_drift(routings=(Routing(1, 0.5, 0.1), Routing(0, -1.0, 7.0)))
    choice, probabilities = forward_drift([wrong])
    assert (choice.place, choice.layer) == ("choice of the router", 1)
    assert (probabilities.place, probabilities.layer) == ("probabilities of the router", 0)


def test_losses_are_judged_by_their_own_logits() -> None:
    (violation,) = forward_drift([_case_drift(losses=3.0)])
    assert (violation.place, violation.layer) == ("losses", None)
    with pytest.raises(NothingSeen, match="logits"):
        forward_drift([_case_drift(losses=None)])


def test_nothing_measured_is_no_verdict() -> None:
    with pytest.raises(NothingSeen, match="saw no layer"):
        CaseDrift(LONG, [SeedDrift(0, (), (), 0.0, {})])


def test_growth_is_fitted_and_held_against_the_promise() -> None:
    deep = case("depth-16")
    forward, backward = growths(_case_drift(deep, spread=0.0, seeds=6))
    assert forward.seen == pytest.approx([0.3] * 6)
    assert backward.promised == pytest.approx([0.3] * 6)
    assert depth_scaling(_case_drift(deep, seeds=6)) == []
    steeper = _case_drift(deep, seeds=6)
    grown = [
        replace(
            seed,
            measured=tuple(
                replace(m, seen=_drift(m.seen.normwise * (m.layer + 1) ** 0.2))
                if m.place == "stream" and m.phase == "forward" else m
                for m in seed.measured
            ),
        )
        for seed in steeper.seeds
    ]  # fmt: skip
    (violation,) = depth_scaling(CaseDrift(deep, grown))
    assert (violation.rule, violation.phase) == ("D4", "forward")


def test_summation_must_stay_flat() -> None:
    flat = {("forward", "decoder", 3): 1e-8}
    steep = {("forward", "decoder", 3): 1e-3}
    deep = case("depth-16")
    assert depth_scaling(_case_drift(deep, seeds=6, accumulation=flat)) == []
    (violation,) = depth_scaling(_case_drift(deep, seeds=6, accumulation=steep))
    assert "summation alone" in violation.seen
    assert violation.layer == 3


def test_measures_are_ready_for_json() -> None:
    rows = measures([_case_drift()], "forward")
    assert {row["place"] for row in rows} == {"stream", "losses"}
    assert rows[0]["unit"] == "u of bfloat16"
    assert rows[0]["seeds"] == 16


def test_every_budget_says_where_it_comes_from_and_what_it_catches() -> None:
    for budget in budgets.budgets():
        assert len(budget.origin) > 20, budget
        assert len(budget.catches) > 10, budget
    with pytest.raises(LookupError, match="no budget of D9"):
        budgets.limit("D9", "stream", "dense")


def test_gamma_is_highams() -> None:
    assert gamma(3, 2.0**-24) == 3 * 2.0**-24 / (1 - 3 * 2.0**-24)
    assert gamma(0, 2.0**-8) == 0
    with pytest.raises(ValueError, match="n u < 1"):
        gamma(256, 2.0**-8)
    for name, u in UNIT_ROUNDOFF.items():
        assert torch.finfo(getattr(torch, name)).eps / 2 == u


def _traced(sum_: Accumulation | None, path: str = "intact") -> list[StageTrace]:
    def crossing(place: str, layer: int, **fields) -> Crossing:  # noqa: ANN003
        base = {
            "place": place, "layer": layer, "phase": "forward", "microbatch": 0, "chunk": 0,
            "dtype": "float32", "shape": (1,), "path": "intact", "changes": (), "poor_rows": 0,
            "rows": 1, "digest": None, "source": None, "sum": Accumulation(2, 0.0, 0.0),
        }  # fmt: skip
        return Crossing(**(base | fields))

    crossings = [
        crossing("layer in", 0, path="start", sum=None),
        crossing("layer out", 0, sum=sum_, path=path),
        crossing("layer out", 1),
    ]
    return [StageTrace(0, 0, StreamTrace(crossings=crossings))]


@pytest.mark.parametrize(
    ("sum_", "words"),
    [
        (Accumulation(2, 1.9 * 2.0**-24, 0.0), None),
        (Accumulation(2, 2.1 * 2.0**-24, 0.0), "times the bound (n = 2)"),
        (Accumulation(0, 0.0, 0.0), None),
        (Accumulation(0, 1e-9, 0.0), "nothing was added"),
        (Accumulation(2, math.nan, 0.0), "times the bound"),
        (Accumulation(None, 0.0, 0.0), "no sum of terms"),
        (None, "no sum of terms"),
    ],
)
def test_accumulation_is_held_to_its_bound(sum_: Accumulation | None, words: str | None) -> None:
    found = accumulation(case("dense"), _traced(sum_))
    assert [v.layer for v in found] == ([] if words is None else [0])
    assert all(words in v.seen for v in found)


def test_terms_of_a_sum_are_kept_whatever_way_they_are_added(tmp_path) -> None:  # noqa: ANN001
    start = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    branch, bias = torch.full((2, 2), 0.25), torch.tensor([0.5, -0.5])
    lineage = Lineage(Locator(tmp_path))
    lineage.forward.follow(start)
    with lineage:
        stream = start + branch
        stream = bias + stream
        other = branch.clone()
        other.add_(stream)
        other += 1.0
        other = torch.add(other, branch, alpha=-2)
    summed = lineage.forward.path_to(other).summed
    assert summed.count == 5
    assert summed.complete
    exact = start.double() + summed.added
    assert torch.equal(exact, other.double())
    assert torch.equal(summed.magnitude, (4 * branch + bias.abs() + 1.0).double())


def test_what_is_scaled_into_a_sum_is_not_followed(tmp_path) -> None:  # noqa: ANN001
    start = torch.ones(2, 2)
    lineage = Lineage(Locator(tmp_path))
    lineage.forward.follow(start)
    with lineage:
        other = torch.add(torch.ones(2, 2), start, alpha=0.5)
    assert lineage.forward.path_to(other) is None


def test_a_sum_with_a_missing_piece_says_so(tmp_path) -> None:  # noqa: ANN001
    start = torch.ones(4, 2)
    lineage = Lineage(Locator(tmp_path))
    lineage.forward.follow(start)
    with lineage:
        top, bottom = start.chunk(2)
        joined = torch.cat([top + 1.0, bottom + 2.0])
    path = lineage.forward.path_to(joined)
    assert path is None or not path.summed.complete


def test_a_router_that_rounds_is_told_from_one_that_ties() -> None:
    torch.manual_seed(3)
    x = torch.randn(64, 32).bfloat16()
    weight = torch.randn(4, 32).bfloat16() / 6
    logits = x.float() @ weight.float().T
    chosen = torch.zeros(64, 4, dtype=torch.bool).scatter(-1, logits.topk(2).indices, True)
    probabilities = torch.softmax(logits.masked_fill(~chosen, -math.inf), -1)
    sound = judge_routing(0, x, weight, chosen, probabilities, torch.float32, False)
    assert sound.choice <= 0
    assert sound.probabilities <= 1
    rounded = probabilities.bfloat16().float()
    assert judge_routing(0, x, weight, chosen, rounded, torch.float32, False).probabilities > 10
    swapped = chosen.roll(1, -1)
    assert judge_routing(0, x, weight, swapped, probabilities, torch.float32, False).choice > 0
    # A tie may be broken either way.
    tied = torch.cat([weight[:1], weight[:1], weight[2:]])
    for first in (0, 1):
        only = torch.zeros(64, 4, dtype=torch.bool)
        only[:, first] = True
        seen = judge_routing(0, x, tied, only, only.float(), torch.float32, False)
        best = (x.double() @ tied.double().T).argmax(-1)
        if bool((best < 2).all()):
            assert seen.choice <= 0


def test_losses_in_bf16_miss_their_bound() -> None:
    torch.manual_seed(4)
    logits, labels = torch.randn(8, 2, 96) * 3, torch.randint(96, (2, 8))
    losses = torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")
    assert loss_error(logits, labels, losses) <= 1
    assert loss_error(logits, labels, losses.bfloat16()) > 10
