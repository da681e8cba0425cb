"""What a change broke: violations and drift of a head against those of its base."""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from _pytest._io import TerminalWriter

from fixtures.cases import case
from fixtures.contract.against_base import DriftChange, drift_changes, no_worse_than_base
from fixtures.contract.drift import CaseDrift, measures
from fixtures.contract.violation import Violation
from fixtures.oracle.decide import visible
from fixtures.oracle.golden import NotRecorded
from fixtures.oracle.records import Drift, Measured, SeedDrift
from fixtures.target import CannotJudge, Target
from fixtures.trace.records import Source
from fixtures.verdict.base import Base, read_base
from fixtures.verdict.comparison import compare
from fixtures.verdict.plugin import Judge
from fixtures.verdict.records import Check
from fixtures.verdict.render import render
from fixtures.verdict.results import SCHEMA, results_data, write_results
from fixtures.verdict.session import Session
from fixtures.verdict.words import drift_against_base

LINE = Source("megatron/core/add.py", 34, "residual = residual.to(x.dtype)")
ONE = Violation(
    "S2", "dense.fp32.train", "layer out", "never narrowed", "float32 -> bfloat16",
    layer=0, phase="forward", source=LINE,
)  # fmt: skip
MOVED = replace(ONE, source=replace(LINE, line=40))
EDITED = replace(ONE, source=replace(LINE, text="residual = residual.to(y.dtype)"))
ELSEWHERE = replace(ONE, source=replace(LINE, path="megatron/core/other.py"))
TWICE = replace(ONE, seen="float32 -> bfloat16 -> float32 -> bfloat16")
TARGET = Target("0.16.1", Path("/releases/0.16.1"), "release", "0.16.1", None, False)


@pytest.mark.parametrize("same", [ONE, MOVED, EDITED, replace(ONE, again="run it")])
def test_what_the_base_has_too_is_known_again(same: Violation) -> None:
    assert compare([same], [ONE]).in_base == (same,)


@pytest.mark.parametrize(
    "new",
    [
        ELSEWHERE,
        TWICE,
        replace(ONE, layer=1),
        replace(ONE, rule="S1"),
        replace(ONE, phase="backward"),
        replace(ONE, stage=1),
        replace(ONE, source=None),
    ],
)
def test_what_the_base_has_not_is_introduced(new: Violation) -> None:
    comparison = compare([new], [ONE])
    assert (comparison.introduced, comparison.fixed) == ((new,), (ONE,))


def test_numbers_may_differ() -> None:
    worse = replace(ONE, seen="1.5 times that (3e-05 u)")
    assert compare([worse], [replace(ONE, seen="1.25 times that (2 u)")]).in_base == (worse,)


def test_one_of_the_base_excuses_one_of_the_head() -> None:
    comparison = compare([ONE, MOVED], [ONE])
    assert (len(comparison.in_base), len(comparison.introduced)) == (1, 1)


def test_an_edited_line_does_not_excuse_beside_the_bases_own() -> None:
    assert compare([ONE, EDITED], [ONE]).introduced == (EDITED,)


def base_of(*checks: Check, **fields: Any) -> Base:
    target = results_data(session(None))["target"]
    return Base(target, "REJECT", "1 fault", {each.test: each for each in checks}, **fields)


def judged(violations: Sequence[Violation], base: Base | None) -> Check:
    check = Check("S2", "dense.fp32.train", "suites/x.py::test")
    try:
        Judge(check, [], base)(violations)
    except (pytest.fail.Exception, pytest.xfail.Exception):
        assert check.outcome != "pass"
    return check


def session(base: Base | None, *checks: Check) -> Session:
    return Session(TARGET, base, "cpu", "quick", checks, [], None, 1.0)


BROKEN_BASE = base_of(judged([ONE], None))


@pytest.mark.parametrize(
    ("violations", "base", "word"),
    [
        ([ONE], BROKEN_BASE, "ACCEPT"),
        ([ONE, ELSEWHERE], BROKEN_BASE, "REJECT"),
        ([], BROKEN_BASE, "ACCEPT"),
        ([ONE], replace(BROKEN_BASE, strict=True), "REJECT"),
        ([ONE], base_of(), "REJECT"),
    ],
)
def test_only_what_is_introduced_rejects(
    violations: Sequence[Violation], base: Base, word: str
) -> None:
    assert session(base, judged(violations, base)).verdict.word == word


def test_people_are_told_what_became_of_the_bases_faults() -> None:
    base = base_of(judged([ONE, TWICE], None))
    finished = session(base, judged([ONE, ELSEWHERE], base))
    paper = io.StringIO()
    render(TerminalWriter(paper), finished)
    told = paper.getvalue()
    for words in (
        "introduced: S2 identity-path\n  megatron/core/other.py:34",
        "already in base: S2 identity-path at megatron/core/add.py:34 (1 place)",
        "fixed by this change: S2 identity-path at megatron/core/add.py:34 (1 place)",
        "base: megatron-core 0.16.1 (REJECT: 1 fault)",
        "verdict: REJECT: 1 fault introduced; checks: 1 rejected",
    ):
        assert words in told


def test_what_is_no_longer_looked_at_is_told() -> None:
    base = base_of(Check("S2", "dense.fp32.train", "suites/x.py::test"))
    gone = Check("S2", "dense.fp32.train", "suites/x.py::test", "not-applicable", "no experts")
    assert session(base, gone).no_longer_seen == [gone]


def test_a_session_is_read_back_as_a_base(tmp_path: Path) -> None:
    finished = session(BROKEN_BASE, judged([ONE, ELSEWHERE], BROKEN_BASE))
    path = write_results(tmp_path, results_data(finished))
    jsonschema.validate(json.loads(path.read_text()), json.loads(SCHEMA.read_text()))
    assert list(read_base(path, strict=False).checks.values()) == list(finished.checks)


@pytest.mark.parametrize("text", ["", "[]", '{"schema_version": 2}'])
def test_what_is_no_base_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(CannotJudge, match="--base-results"):
        read_base(path, strict=False)


def drifted(*sizes: float) -> CaseDrift:
    """A case whose stream drifts by a size for each seed."""
    each = case("dense")
    exact = Drift(1.0, 1.0, 1.0, 1.0)
    seen = [Drift(size, size, size, size) for size in sizes]
    places = [(Measured("stream", "forward", "decoder", 0, one, exact),) for one in seen]
    return CaseDrift(each, [SeedDrift(number, at, (), 0.0, {}) for number, at in enumerate(places)])


NOISE = [1 + 0.001 * math.sin(number) for number in range(16)]


def at_the_layer(head: Sequence[float], base: Sequence[float]) -> list[DriftChange]:
    return drift_changes([drifted(*head)], measures([drifted(*base)], "forward"))[:1]


@pytest.mark.parametrize(
    ("growth", "worse"), [(1.0, False), (0.9, False), (1.0001, False), (1.01, True)]
)
def test_more_drift_than_the_base_is_a_violation(growth: float, worse: bool) -> None:
    head = [growth * noise for noise in NOISE]
    found = no_worse_than_base(at_the_layer(head, [1.0] * 16))
    assert bool(found) is worse
    if worse:
        assert found[0].rule == "D5"
        assert "1.01" in found[0].seen


def test_the_same_bits_are_no_change() -> None:
    (change,) = at_the_layer(NOISE, NOISE)
    assert (change.ratio, change.visible, change.excess) == (1.0, 0.0, None)


def test_a_growth_of_the_visible_size_is_seen() -> None:
    (same,) = at_the_layer(NOISE, [1.0] * 16)
    growth = 1 + 1.05 * same.visible
    assert no_worse_than_base(at_the_layer([growth * noise for noise in NOISE], [1.0] * 16))


def test_visible_is_what_is_seen_with_its_probability() -> None:
    from numpy.random import default_rng

    from fixtures.oracle.decide import POWER, exceeded

    draws = default_rng(1).normal(size=(2000, 16))
    mean = visible([-1.0, 1.0] * 8) / math.sqrt(16 / 15)  # that of a spread of 1
    seen = sum(exceeded(list(row + mean), 0.0) is not None for row in draws) / len(draws)
    assert abs(seen - POWER) < 4 * math.sqrt(POWER * (1 - POWER) / len(draws))


def test_a_base_without_drift_is_nothing_to_compare_with() -> None:
    with pytest.raises(NotRecorded):
        drift_changes([drifted(*NOISE)], [])
    with pytest.raises(NotRecorded):
        at_the_layer(NOISE, NOISE[:3])


def test_growth_that_no_place_shows_shows_in_all_together() -> None:
    each = case("dense")
    exact = Drift(1.0, 1.0, 1.0, 1.0)

    def run(growth: float, noise: float) -> CaseDrift:
        seeds = []
        for number in range(16):
            sizes = [growth + noise * math.sin(7 * number + 100 * layer) for layer in range(30)]
            places = tuple(
                Measured("stream", "forward", "decoder", layer, Drift(size, 0, 0, 0), exact)
                for layer, size in enumerate(sizes)
            )
            seeds.append(SeedDrift(number, places, (), 0.0, {}))
        return CaseDrift(each, seeds)

    base = measures([run(1.0, 0.0)], "forward")
    (found,) = no_worse_than_base(drift_changes([run(1.02, 0.02)], base))
    assert found.place == "all layers together"
    assert no_worse_than_base(drift_changes([run(1.0, 0.02)], base)) == []


def test_people_are_told_what_could_be_seen() -> None:
    rows = [{"ratio": 1, "visible": 0.0}, {"ratio": 1.004, "visible": 0.0271}]
    assert drift_against_base(rows) == (
        "drift against base: 1 of 2 cases as before, the others 1.004 to 1.004 times it; growth of "
        "a case by 2.7 % is seen with probability 0.99"
    )
