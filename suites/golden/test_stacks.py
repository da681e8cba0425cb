"""Every stack against its recorded values: the reference, runs with and without the flag, bits."""

from dataclasses import asdict

import pytest

from fixtures.cases import case
from fixtures.contract.golden import flag_off_unchanged, golden_stack, reference_frozen
from fixtures.observe import Observer
from fixtures.oracle.bits import first_departure
from fixtures.oracle.golden import NotRecorded, Summary, in_order, reference_file
from fixtures.recording import golden_run, recorded_bits, recorded_reference
from fixtures.verdict.base import Base
from fixtures.verdict.plugin import Judge

_QUICK = ("dense", "dense-rms-swiglu-gqa-rope", "moe-alltoall-shared", "hybrid")
_FULL = (
    "dense-rms-bias-rope", "dense-swiglu-bias-gqa", "dense-fp16", "dense-deep", "moe-allgather",
    "moe-mixed", "mamba", "hybrid-dense", "hybrid-fp16", "cross-attention",
    "cross-attention-rms-swiglu-rope",
)  # fmt: skip

over_stacks = pytest.mark.parametrize(
    "stack", [*_QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in _FULL)]
)


@pytest.mark.rule("G1")
@over_stacks
def test_reference_is_frozen(stack: str, observer: Observer, judge: Judge, record: bool) -> None:
    golden, each = recorded_reference(observer, stack, record), case(stack)
    run = golden_run(observer, each, golden.seed)
    judge(reference_frozen(each, in_order(run.exact, golden, reference_file(each.stack))))


@pytest.mark.rule("G2")
@over_stacks
def test_stack_meets_its_record(stack: str, observer: Observer, judge: Judge, record: bool) -> None:
    golden = recorded_reference(observer, stack, record)
    judge(
        [
            violation
            for each in (case(stack), case(stack, fp32_residual=False))
            for violation in golden_stack(
                each,
                in_order(
                    golden_run(observer, each, golden.seed).seen, golden, reference_file(each.stack)
                ),
            )
        ]
    )


@pytest.mark.rule("S7")
@over_stacks
def test_flag_off_is_unchanged(stack: str, observer: Observer, judge: Judge, record: bool) -> None:
    each, seed = case(stack, fp32_residual=False), recorded_reference(observer, stack, record).seed
    run = golden_run(observer, each, seed)
    judge.note("bits", [{"case": each.name} | asdict(place) for place in run.seen])
    bits = recorded_bits(observer, stack, record)
    pairs = in_order(run.seen, bits.golden, bits.path)
    if flag_off_unchanged(each, pairs):
        run = golden_run(observer, each, seed, explain=True)
    judge(flag_off_unchanged(each, pairs, first_departure(run.operations, bits.golden)))


@pytest.mark.against_base
@pytest.mark.rule("S7")
@over_stacks
def test_flag_off_is_as_in_base(
    stack: str, observer: Observer, judge: Judge, base: Base, record: bool
) -> None:
    each, seed = case(stack, fp32_residual=False), recorded_reference(observer, stack, record).seed
    seen = golden_run(observer, each, seed).seen
    rows = [row for row in base.evidence("bits") if row["case"] == each.name]
    expected = [Summary(**{k: v for k, v in row.items() if k != "case"}) for row in rows]
    if [one.key for one in seen] != [one.key for one in expected]:
        raise NotRecorded(f"the base has no bits of {each.name} to compare with")
    pairs = list(zip(seen, expected, strict=True))
    judge(flag_off_unchanged(each, pairs, expected="the base's bits"))
