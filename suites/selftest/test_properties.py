"""Properties: their examples, the search, and for each of them a defect that it finds."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from fixtures.properties.examples import StackExample, from_text, to_text
from fixtures.properties.falsify import Budget, Finding, falsify
from fixtures.properties.statements import PROPERTIES
from fixtures.properties.strategies import adds, stacks
from fixtures.runtime.capability import NotApplicable
from suites.selftest.gate import run_gate
from suites.selftest.mutants import ADD, LAYER, Edit, Mutant

_BEFORE_ADD = "    if x.dtype != residual.dtype:"
_UPCAST = "residual = residual.float()"
_NARROW = ".bfloat16().float()"


def _at_add(lines: str) -> Edit:
    return Edit(ADD, _BEFORE_ADD, f"{lines}\n{_BEFORE_ADD}")


def _at_attention(replacement: str) -> Edit:
    return Edit(LAYER, _UPCAST, replacement)


def _rounded_when(condition: str) -> Edit:
    return _at_attention(
        f"residual = residual{_NARROW} if {condition} else residual.float()",
    )


def _backward(gives: str) -> tuple[Edit, Edit]:
    """Put an autograd function on the residual's way that leaves all alone but the gradient."""
    function = f"""class _Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return {gives}


logger ="""
    return Edit(LAYER, "logger =", function), _at_attention("residual = _Passing.apply(residual)")


_EVERY_OTHER_CALL = "setattr(self, '_n', getattr(self, '_n', 0) + 1) or self._n % 2"
_LAST_STAGE = "self.config.pipeline_model_parallel_size > 1 and torch.distributed.get_rank() == 1"

# By the test of the property that must find it.
MUTANTS = {
    "test_add_is_the_exact_sum_rounded_once": Mutant(
        "bias added before the upcast", "S6", ADD, (
            _at_add("    if bias is not None:\n        x, bias = x + bias, None"),
        )),
    "test_add_has_the_residuals_dtype": Mutant(
        "only an fp32 residual is cast to", "S6", ADD, (
            Edit(ADD, _BEFORE_ADD, "    if residual.dtype == torch.float32:"),
        )),
    "test_add_of_views_is_that_of_copies": Mutant(
        "only a dense residual is kept wide", "S6", ADD, (
            _at_add("    if not residual.is_contiguous():\n"
                    "        residual = residual.bfloat16().to(residual.dtype)"),
        )),
    "test_dropout_of_everything_leaves_the_residual": Mutant(
        "the residual is dropped too", "S6", ADD, (
            _at_add("    residual = torch.nn.functional.dropout(residual, prob, training)"),
        )),
    "test_zero_branches_leave_the_stream": Mutant(
        "silent bf16 round trip", "D1", LAYER, (_rounded_when("True"),)),
    "test_zero_layers_change_nothing": Mutant(
        "rounding from the second layer on", "D1", LAYER, (
            _rounded_when("self.layer_number > 1"),
        )),
    "test_stream_is_a_prefix_of_a_deeper_one": Mutant(
        "rounding in the last layer", "D1", LAYER, (
            _rounded_when("self.layer_number == self.config.num_layers"),
        )),
    "test_scaled_embedding_scales_drift": Mutant(
        "a stream in fixed point", "D1", ADD, (
            _at_add("    residual = torch.round(residual * 2.0**20) / 2.0**20"),
        )),
    "test_gradient_is_linear_in_powers_of_two": Mutant(
        "gradient through fp16", "S5", LAYER, _backward("gradient.half().float()")),
    "test_gradient_flows_unrounded": Mutant(
        "gradient rounded to bf16", "S5", LAYER, _backward("gradient.bfloat16().float()")),
    "test_permuted_microbatches_permute_outputs": Mutant(
        "rounding at every other microbatch", "P5", LAYER, (_rounded_when(_EVERY_OTHER_CALL),)),
    "test_pipeline_may_be_cut_at_any_layer": Mutant(
        "rounding only on the last stage", "P5", LAYER, (_rounded_when(_LAST_STAGE),)),
}  # fmt: skip


@pytest.mark.parametrize("test", MUTANTS)
def test_a_defect_falsifies(test: str, newest_release: Path, tmp_path: Path) -> None:
    mutant = MUTANTS[test]
    run = run_gate(
        mutant.make(newest_release, tmp_path / "target"),
        tmp_path / "out",
        "-k",
        test,
        "--tier=full",
    )
    assert run.status == 1, run.output
    assert (mutant.rule, mutant.file) in run.rules_and_files(), run.output
    assert re.search(rf"again +\./ci/gate --megatron .*::{test} .*--example=", run.output)


def test_every_property_has_a_test_and_a_defect() -> None:
    tests = Path(__file__).parents[1] / "residual" / "test_properties.py"
    pairs = re.findall(r"def (test_\w+)\(.*\n    judge\(search\(\"(.+)\"\)\)", tests.read_text())
    assert {test for test, _ in pairs} == set(MUTANTS)
    assert {name for _, name in pairs} == set(PROPERTIES)


# One example again


def test_the_printed_command_shows_it_again(newest_release: Path, tmp_path: Path) -> None:
    test = "test_zero_branches_leave_the_stream"
    target = MUTANTS[test].make(newest_release, tmp_path / "target")
    first = run_gate(target, tmp_path / "out", "-k", test, "--tier=full")
    (violation,) = first.results["checks"][0]["violations"]
    _, _, given_target, _, node, example = shlex.split(violation["again"])
    assert (given_target, node) == (str(target), f"suites/residual/test_properties.py::{test}")
    again = run_gate(target, tmp_path / "again", "-k", test, "--tier=full", example)
    assert again.results["checks"][0]["violations"] == [violation]
    sound = run_gate(newest_release, tmp_path / "sound", "-k", test, "--tier=full", example)
    assert sound.status == 0, sound.output


@pytest.mark.parametrize(
    "text",
    [
        # Branch and bias overflow together before they meet the residual.
        "x=float16 residual=float16 elements=-inf:65504.0:16.0 bias=float16",
        "x=bfloat16 residual=bfloat16 elements=nan:inf:-inf,-0.0:-0.0:0.0 bias=bfloat16 rows=0",
    ],
)
def test_extremes_that_no_add_can_help_are_no_fault(
    text: str, newest_release: Path, tmp_path: Path
) -> None:
    only = ("-k", "test_add_is_the_exact_sum_rounded_once")
    run = run_gate(newest_release, tmp_path, *only, f"--example={text}")
    assert run.status == 0, run.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layers=1 heads=x", "'heads=x': invalid literal for int() with base 10: 'x'"),
        ("layer=1", "'layer=1' is no field=value of layers, heads"),
        ("layers=2", "heads, hidden, sequence, batch, seed missing"),
        ("layers=1 heads=1 hidden=7 sequence=1 batch=1 seed=0", "no even multiple of heads"),
        ("layers=1 heads=1 hidden=8 sequence=1 batch=1 seed=0 norm=None", "not one of LayerNorm"),
    ],
)
def test_a_text_that_is_no_example_is_one_line(
    text: str, said: str, newest_release: Path, tmp_path: Path
) -> None:
    only = ("-k", "test_zero_branches_leave_the_stream")
    run = run_gate(newest_release, tmp_path, *only, f"--example={text}")
    assert run.status == 2, run.output
    assert run.last_line.startswith("verdict: CANNOT JUDGE: --example: ")
    assert said in run.last_line
    assert "Traceback" not in run.output


@pytest.mark.parametrize(
    ("statement", "seen"),
    [
        ("assert x.numel() != 1, 'no ones here'", "raised AssertionError: no ones here; example: "),
        ("x.numel() != 1 or __import__('os').abort()", "rank 0 died (SIGABRT)"),
    ],
)
def test_what_a_target_does_on_an_example_is_told_with_it(
    statement: str, seen: str, newest_release: Path, tmp_path: Path
) -> None:
    edit = _at_add(f"    {statement}")
    target = Mutant("fails", "S6", ADD, (edit,)).make(newest_release, tmp_path / "target")
    run = run_gate(target, tmp_path / "out", "-k", "test_add_has_the_residuals_dtype")
    assert run.status == 1, run.output
    (check,) = run.results["checks"]
    (violation,) = check["violations"]
    assert seen in violation["seen"]
    assert violation["source"]["path"] == ADD
    assert violation["source"]["exact"]
    assert "--example=x=" in shlex.split(violation["again"])[-1]
    assert check["reason"]


# Examples

_ANY = st.one_of([each.examples for each in PROPERTIES.values()])
_QUICKLY = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@_QUICKLY
@given(_ANY)
def test_an_example_is_what_its_text_says(example: Any) -> None:
    text = to_text(example)
    assert to_text(from_text(type(example), text)) == text
    # nan is not equal to itself, but its words are.
    assert repr(from_text(type(example), text)) == repr(example)


SMALLEST = StackExample(layers=1, heads=1, hidden=8, sequence=1, batch=1, seed=0)


def _smallest(examples: Any, wanted: Any = lambda _: True) -> Any:
    return find(examples, wanted, settings=settings(_QUICKLY, max_examples=2000))


def test_stacks_shrink_to_the_smallest() -> None:
    assert _smallest(stacks()) == SMALLEST
    hybrid = _smallest(PROPERTIES["zero branches"].examples, lambda e: "-" in e.pattern)
    assert to_text(hybrid) == f"{to_text(SMALLEST)} pattern=-"
    deep = _smallest(PROPERTIES["pipeline splits"].examples, lambda e: e.heads > 2 and e.at > 1)
    assert (deep.layers, deep.heads, deep.hidden, deep.batch, deep.order) == (4, 3, 12, 1, (0,))


def test_adds_shrink_to_the_smallest() -> None:
    assert to_text(_smallest(adds())) == "x=bfloat16 residual=float32 elements="
    swallowed = _smallest(adds(exact=True), lambda e: (256.0, 0.5, 0.0) in e.elements)
    assert swallowed.elements == ((256.0, 0.5, 0.0),)
    assert swallowed.view == "dense"


@pytest.mark.parametrize(
    "wanted",
    [
        lambda e: not e.elements,
        lambda e: len(e.elements) == 1 == e.rows,
        lambda e: e.rows == 0,
        lambda e: e.view == "broadcast" and e.rows > 1,
        lambda e: e.view == "transposed" and e.call == "no-grad",
        lambda e: any("nan" in repr(each) for each in e.elements),
        lambda e: any("-inf" in repr(each) for each in e.elements),
        lambda e: any("-0.0" in repr(each) for each in e.elements),
        lambda e: any(0 < abs(each[0]) < 2.0**-126 for each in e.elements),
        lambda e: any(each[0] == -each[1] != 0 for each in e.elements),
    ],
)
def test_adversarial_adds_are_among_them(wanted: Any) -> None:
    _smallest(PROPERTIES["exact add"].examples, wanted)


@_QUICKLY
@given(stacks(least_layers=2))
def test_a_stack_can_lose_a_layer(example: StackExample) -> None:
    shorter = example.without_layer(example.at)
    assert (shorter.layers, len(shorter.pattern)) in {
        (example.layers - 1, 0), (example.layers - 1, example.layers - 1),
    }  # fmt: skip
    assert example.hidden == shorter.hidden >= 8


# The search

_NUMBERS = st.integers(0, 1000)
_BUDGET = Budget(100, derandomize=True)


def test_a_search_ends_at_the_smallest() -> None:
    searched = falsify(_NUMBERS, lambda n: Finding(f"{n}", "here") if n > 10 else None, _BUDGET)
    assert searched.example == 11
    assert searched.finding == Finding("11", "here")


def test_a_search_is_the_same_every_time() -> None:
    def tried() -> list[int]:
        seen: list[int] = []
        falsify(_NUMBERS, lambda n: seen.append(n), _BUDGET)
        return seen

    assert tried() == tried()
    assert len(set(tried())) > 50


def test_a_target_that_changes_its_mind_is_still_told() -> None:
    calls = iter(range(10**6))
    once = Finding("seen", "here")
    searched = falsify(_NUMBERS, lambda n: once if next(calls) == 20 else None, _BUDGET)
    assert searched.finding == once


def test_what_cannot_be_run_does_not_count() -> None:
    def refuse(number: int) -> None:
        raise NotApplicable(f"no {number % 1}")

    searched = falsify(_NUMBERS, refuse, _BUDGET)
    assert (searched.ran, searched.refused, searched.finding) == (0, "no 0", None)


def test_what_is_no_finding_ends_the_search() -> None:
    calls: list[int] = []

    def fail(number: int) -> None:
        calls.append(number)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        falsify(_NUMBERS, fail, _BUDGET)
    assert len(calls) == 1


def test_one_example_alone() -> None:
    seen: list[int] = []
    searched = falsify(_NUMBERS, lambda n: seen.append(n), _BUDGET, only=7)
    assert (seen, searched.ran) == ([7], 1)


@dataclass
class _Clock:
    now: float = 0.0

    def monotonic(self) -> float:
        """Give a time that goes on by a second a look."""
        self.now += 1.0
        return self.now


def test_a_search_does_not_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fixtures.properties.falsify.time", _Clock())
    assert 0 < falsify(_NUMBERS, lambda _: None, _BUDGET).ran < 45
    found = falsify(_NUMBERS, lambda n: Finding(f"{n}", "here") if n > 900 else None, _BUDGET)
    assert found.finding is None or found.example > 900
