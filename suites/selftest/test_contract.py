"""The rules on hand-made traces: each is shown to pass and to fail."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fixtures.cases import case
from fixtures.contract.add import AddCell, AddSeen, add_cells, residual_add
from fixtures.contract.pipeline import (
    Configured,
    PipelineTrace,
    override_notice,
    pipeline_dtype,
    schedule_equivalence,
    wire_dtype,
    wire_values,
)
from fixtures.contract.rules import RULES
from fixtures.contract.stream import STREAM_RULES, NothingSeen, StageTrace, every_stream_rule
from fixtures.trace.messages import Channel, Message, MessageEnd
from fixtures.trace.records import Crossing, DtypeChange, MatrixProduct, StreamTrace

DENSE = case("dense")
PIPED = case("dense", layout="pp2-uneven")


def crossing(place: str = "layer out", layer: int | None = 0, **fields: object) -> Crossing:
    known: dict[str, object] = {
        "phase": "forward", "microbatch": 0, "chunk": 0, "dtype": "float32", "shape": (16, 2, 64),
        "path": "intact", "changes": (), "poor_rows": 0, "rows": 32,
        "digest": "bits", "source": None,
    }  # fmt: skip
    return Crossing(place=place, layer=layer, **{**known, **fields})


def good_crossings(layers: Sequence[int] = (0, 1)) -> list[Crossing]:
    forward = [crossing(place, n) for n in layers for place in ("layer in", "layer out")]
    return forward + [replace(each, phase="backward") for each in reversed(forward)]


def traced(
    *crossings: Crossing, products: Sequence[MatrixProduct] = (), rank: int = 0
) -> StageTrace:
    return StageTrace(rank, rank, StreamTrace(list(crossings), list(products), products_seen=8))


NARROWING = DtypeChange("_to_copy", "float32", "bfloat16", narrows=True, source=None)
PRODUCT = MatrixProduct("mm", "MLP", 0, ("float32", "float32", "float32"), "forward", None)

WRONG_CROSSINGS = {
    "S1": crossing("layer in", 1, dtype="bfloat16", poor_rows=None),
    "S2": crossing("layer out", 1, path="narrowed", changes=(NARROWING,)),
    "S3": crossing("layer out", 1, poor_rows=1),
    "S5": crossing("layer out", 1, phase="backward", path="broken"),
}


def test_a_good_trace_breaks_no_rule() -> None:
    assert every_stream_rule(DENSE, [traced(*good_crossings())]) == []


@pytest.mark.parametrize("rule", WRONG_CROSSINGS)
def test_a_wrong_crossing_breaks_its_rule(rule: str) -> None:
    trace = [traced(*good_crossings(), WRONG_CROSSINGS[rule])]
    (violation,) = STREAM_RULES[rule](DENSE, trace)
    assert (violation.rule, violation.layer) == (rule, 1)
    assert {each.rule for each in every_stream_rule(DENSE, trace)} == {rule}


def test_a_wide_product_breaks_s4() -> None:
    trace = [traced(*good_crossings(), products=[PRODUCT])]
    (violation,) = STREAM_RULES["S4"](DENSE, trace)
    assert (violation.seen, violation.expected) == ("float32 x float32 x float32", "bfloat16")


def test_a_wide_router_is_no_wide_branch() -> None:
    router = replace(PRODUCT, place="router")
    backward = replace(PRODUCT, place="backward", phase="backward")
    trace = [traced(*good_crossings(), products=[router, backward])]
    assert STREAM_RULES["S4"](DENSE, trace) == []
    trace = [traced(*good_crossings(), products=[router, replace(backward, layer=1)])]
    assert [each.layer for each in STREAM_RULES["S4"](DENSE, trace)] == [1]


def test_with_the_flag_off_an_fp32_stream_breaks_s1() -> None:
    off = case("dense", fp32_residual=False)
    found = STREAM_RULES["S1"](off, [traced(*good_crossings())])
    assert {violation.expected for violation in found} == {"bfloat16"}


def test_an_embedding_may_hold_rounded_values_but_a_layer_not() -> None:
    rounded = [
        crossing("embedding out", None, poor_rows=32, path="start"),
        crossing("stage in", None, poor_rows=32),
        crossing("layer in", 0, poor_rows=32),
    ]
    assert STREAM_RULES["S3"](DENSE, [traced(*rounded, *good_crossings())]) == []
    later = crossing("layer in", 1, poor_rows=32)
    assert STREAM_RULES["S3"](DENSE, [traced(*rounded, *good_crossings(), later)])


@pytest.mark.parametrize("rule", STREAM_RULES)
def test_an_empty_trace_is_no_verdict(rule: str) -> None:
    with pytest.raises(NothingSeen):
        STREAM_RULES[rule](DENSE, [StageTrace(0, 0, StreamTrace())])


# Configuration

NOTICE = "pipeline_dtype changes from torch.bfloat16 to torch.float32"


def configured(rank: int = 0, **fields: object) -> Configured:
    known: dict[str, object] = {
        "flag": True, "asked": "bfloat16", "got": "float32", "notices": (), "source": None,
    }  # fmt: skip
    return Configured(rank=rank, **{**known, **fields})


@pytest.mark.parametrize(
    ("flag", "asked", "got", "right"),
    [
        (True, "bfloat16", "float32", True),
        (True, "bfloat16", "bfloat16", False),
        (True, None, None, True),
        (True, None, "float32", False),
        (False, "bfloat16", "bfloat16", True),
        (False, "bfloat16", "float32", False),
    ],
)
def test_pipeline_dtype(flag: bool, asked: str | None, got: str | None, right: bool) -> None:
    ranks = [configured(rank, flag=flag, asked=asked, got=got) for rank in (0, 1)]
    assert (pipeline_dtype("config", ranks) == []) is right


@pytest.mark.parametrize(
    ("asked", "notices", "right"),
    [
        ("bfloat16", [(NOTICE,), ()], True),
        ("bfloat16", [(NOTICE,), (NOTICE,)], False),
        ("bfloat16", [(NOTICE, NOTICE), ()], False),
        ("bfloat16", [(), ()], False),
        ("bfloat16", [("pipeline_dtype changes",), ()], False),
        ("float32", [(), ()], True),
        ("float32", [(NOTICE,), ()], False),
    ],
)
def test_notice(asked: str, notices: list[tuple[str, ...]], right: bool) -> None:
    ranks = [configured(rank, asked=asked, notices=each) for rank, each in enumerate(notices)]
    assert (override_notice("config", ranks) == []) is right


# The wire


def end(direction: str, kind: str, **fields: object) -> MessageEnd:
    forward = kind == "activation"
    channel = Channel("pp", (0, 1), 0 if forward else 1, 1 if forward else 0, 0)
    rank = channel.source if direction == "send" else channel.target
    known: dict[str, object] = {
        "rank": rank, "sequence": 0, "order": 0, "dtype": "float32", "shape": (16, 2, 64),
        "digest": f"{kind} bits", "source": None,
    }  # fmt: skip
    return MessageEnd(direction=direction, channel=channel, kind=kind, **{**known, **fields})


def message(kind: str, sent: dict | None = None, received: dict | None = None) -> Message:
    return Message(end("send", kind, **(sent or {})), end("receive", kind, **(received or {})))


def pipeline(*messages: Message) -> PipelineTrace:
    stages = []
    for rank, place in ((0, "stage out"), (1, "stage in")):
        layer = good_crossings([rank])
        forward = crossing(place, None, digest="activation bits")
        backward = crossing(place, None, digest="gradient bits", phase="backward")
        stages.append(traced(*layer, *[forward, backward] * 2, rank=rank))
    return PipelineTrace(stages, messages)


GOOD_WIRE = [message(kind) for kind in ("activation", "gradient") for _ in range(2)]


def test_a_good_wire_breaks_no_rule() -> None:
    assert wire_dtype(PIPED, pipeline(*GOOD_WIRE)) == []
    assert wire_values(PIPED, pipeline(*GOOD_WIRE)) == []


def test_a_narrow_wire_breaks_p3() -> None:
    narrow = {"dtype": "bfloat16"}
    run = pipeline(*GOOD_WIRE[1:], message("activation", narrow, narrow))
    (violation,) = wire_dtype(PIPED, run)
    assert (violation.rule, violation.seen) == ("P3", "bfloat16")


def test_ends_that_disagree_break_p3_and_both_are_named() -> None:
    run = pipeline(*GOOD_WIRE, message("gradient", None, {"dtype": "bfloat16"}))
    (violation,) = wire_dtype(PIPED, run)
    assert "rank 1 sends to rank 0 float32" in violation.seen
    assert "rank 0 receives from rank 1 bfloat16" in violation.seen


@pytest.mark.parametrize("kind", ["activation", "gradient"])
def test_bits_that_change_on_the_wire_break_p4(kind: str) -> None:
    others = [each for each in GOOD_WIRE if each.kind != kind]
    run = pipeline(*others, message(kind), message(kind, None, {"digest": "other"}))
    assert {violation.rule for violation in wire_values(PIPED, run)} == {"P4"}


def test_bits_that_change_before_the_wire_break_p4() -> None:
    other = {"digest": "rounded"}
    run = pipeline(*GOOD_WIRE[1:], message("activation", other, other))
    assert [violation.rank for violation in wire_values(PIPED, run)] == [0, 1]


def test_a_silent_wire_is_no_verdict() -> None:
    with pytest.raises(NothingSeen, match="activation"):
        wire_dtype(PIPED, pipeline())


def test_schedules_must_agree_at_every_layer() -> None:
    alone = [traced(*good_crossings())]
    run = [traced(*good_crossings([rank]), rank=rank) for rank in (0, 1)]
    assert schedule_equivalence(PIPED, run, alone) == []
    run[1].trace.crossings[1] = crossing("layer out", 1, digest="other")
    (violation,) = schedule_equivalence(PIPED, run, alone)
    assert (violation.rule, violation.layer, violation.rank) == ("P5", 1, 1)
    with pytest.raises(NothingSeen):
        schedule_equivalence(PIPED, run[:1], alone)


# The add and the neighbours

CELL = AddCell("bfloat16", "float32", "bfloat16", True, False, True, 0.5)


def add_seen(**fields: object) -> AddSeen:
    known: dict[str, object] = {
        "cell": CELL, "dtype": "float32", "connected": True, "worst": 0.5,
        "kept": 2048, "elements": 4096,
    }  # fmt: skip
    return AddSeen(**{**known, **fields})


def test_a_good_add_breaks_no_rule() -> None:
    assert residual_add([add_seen()]) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "bfloat16"},
        {"connected": False},
        {"worst": 1.01},
        {"worst": float("nan")},
        {"kept": 4096},
        {"kept": 0},
        {"changed": ("residual",)},
        {"changed": ("bias",)},
        {"changed": ("x",)},
        {"changes": (NARROWING, replace(NARROWING, before="bfloat16", after="float32"))},
    ],
    ids=str,
)
def test_a_wrong_add_breaks_s6(fields: dict[str, object]) -> None:
    (violation,) = residual_add([add_seen(**fields)])
    assert violation.rule == "S6"


def test_an_evaluation_without_gradients_may_use_up_its_branch() -> None:
    in_place = replace(CELL, training=False, gradients=False)
    assert residual_add([add_seen(cell=in_place, changed=("x",), kept=4096)]) == []


def test_cells_differ_in_name() -> None:
    names = [cell.name for cell in add_cells()]
    assert len(set(names)) == len(names)


def test_rules_tell_their_source() -> None:
    for name, rule in RULES.items():
        assert rule.id == name
        assert rule.source.startswith(("https://github.com/", "https://arxiv.org/"))
        assert rule.demand.endswith(".")
        assert rule.why.endswith(".")
