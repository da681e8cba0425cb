"""Rules N1 to N5 and P6 on hand-made observations: each is shown to pass and to fail."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fixtures.cases import case
from fixtures.contract.neighbours import (
    GradientSeen,
    LogitsSeen,
    RouterSeen,
    StaticInput,
    StatisticSeen,
    inference_wire,
    logits,
    main_gradients,
    router,
    static_inputs,
    statistics,
)
from fixtures.contract.pipeline import PipelineTrace
from fixtures.contract.stream import StageTrace
from fixtures.runtime.neighbours.statistics import norm_error, rotary_error, softmax_error
from fixtures.trace.records import StreamTrace
from suites.selftest.test_contract import crossing, good_crossings

DENSE = case("dense")
BIASED = case("router-bias")
ROUTER = RouterSeen(1, ("float32",), ("float32",), "float32", (5.0, 3.0), "int64", (5, 3), None)
ENDS = LogitsSeen("bfloat16", True, "float32", 0.5, "float32", (2, 16, 96), None)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({}, None),
        ({"bias": None, "counted": None}, None),
        ({"logits": ("bfloat16",)}, "the router's logits"),
        ({"probabilities": ("bfloat16", "float32")}, "the router's probabilities"),
        ({"bias": "bfloat16"}, "the expert bias"),
        ({"counted": (5.0, 2.0)}, "tokens an expert"),
    ],
)
def test_router(change: dict[str, Any], place: str | None) -> None:
    found = router(BIASED, [replace(ROUTER, **change)])
    assert [(v.rule, v.place) for v in found] == ([] if place is None else [("N1", place)])


def test_router_dtype_is_the_compute_dtype_unless_asked_for() -> None:
    narrow = replace(ROUTER, logits=("bfloat16",), probabilities=("bfloat16",))
    assert router(case("moe-allgather"), [narrow]) == []
    assert len(router(case("router-fp64"), [narrow])) == 2


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({}, None),
        ({"logits": "float32"}, "the logits"),
        ({"losses": "bfloat16"}, "the losses"),
        ({"error": 1.5}, "the losses"),
        ({"error": float("nan")}, "the losses"),
        ({"unlabelled": "bfloat16"}, "the output without labels"),
        ({"unlabelled_shape": (2, 16)}, "the output without labels"),
    ],
)
def test_logits(change: dict[str, Any], place: str | None) -> None:
    found = logits(DENSE, replace(ENDS, **change))
    assert [(v.rule, v.place) for v in found] == ([] if place is None else [("N2", place)])


def test_wide_logits_must_hold_what_narrow_ones_cannot() -> None:
    wide = replace(ENDS, logits="float32", fit_compute=False)
    asked = case("te-wide-logits")
    assert logits(asked, wide) == []
    assert [v.place for v in logits(asked, replace(wide, fit_compute=True))] == ["the logits"]
    assert len(logits(asked, ENDS)) == 2


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({}, None),
        ({"dtypes": ("bfloat16",)}, "main_grad"),
        ({"dtypes": ("bfloat16", "float32")}, "main_grad"),
        ({"kept": 256.0}, "the sum over microbatches"),
        ({"reduced": 129.0}, "the mean over ranks"),
    ],
)
def test_main_gradients(change: dict[str, Any], place: str | None) -> None:
    seen = replace(GradientSeen(0, ("float32",), 257.0, 128.75, None), **change)
    found = main_gradients(DENSE, True, [seen])
    assert [(v.rule, v.place) for v in found] == ([] if place is None else [("N3", place)])


def test_narrow_main_gradients_owe_a_dtype_and_no_more() -> None:
    seen = GradientSeen(1, ("bfloat16",), 256.0, 129.0, None)
    assert main_gradients(DENSE, False, [seen]) == []
    (violation,) = main_gradients(DENSE, False, [replace(seen, dtypes=("float32",))])
    assert (violation.expected, violation.rank) == ("bfloat16", 1)


@pytest.mark.parametrize(
    ("name", "dtype", "error", "count"),
    [
        ("final_layernorm", "bfloat16", 0.9, 0),
        ("final_layernorm", "float32", 0.9, 1),
        ("final_layernorm", "bfloat16", 1.1, 1),
        ("final_layernorm", "bfloat16", float("nan"), 1),
        ("rotary_pos_emb", "float32", 0.9, 0),
        ("rotary_pos_emb", "bfloat16", 0.9, 1),
    ],
)
def test_statistics(name: str, dtype: str, error: float, count: int) -> None:
    found = statistics(DENSE, [StatisticSeen(name, dtype, error, None)])
    assert [v.rule for v in found] == ["N4"] * count


def test_static_inputs_have_the_streams_dtype() -> None:
    assert static_inputs(DENSE, [StaticInput("hidden_states", "float32", None)]) == []
    assert static_inputs(DENSE, [StaticInput("hidden_states", "bfloat16", None)])
    assert static_inputs(DENSE, [StaticInput("attention_mask", "bool", None)]) == []


def test_a_narrow_stream_in_inference_is_told_as_such() -> None:
    piped = case("dense", mode="inference", layout="pp2-uneven")
    narrow = [replace(crossing("layer out", n), dtype="bfloat16") for n in (0, 1)]
    stages = [StageTrace(0, 0, StreamTrace(crossings=[*good_crossings(), *narrow]))]
    with pytest.raises(Exception, match="messages between stages"):
        inference_wire(piped, PipelineTrace(stages, []))


def _values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_in_fp32_are_within_their_bound_and_others_are_not(kind: str) -> None:
    module: Any = torch.nn.RMSNorm(64) if kind == "RMSNorm" else torch.nn.LayerNorm(64)
    config = SimpleNamespace(normalization=kind, layernorm_epsilon=1e-5)
    module.eps = 1e-5
    # An offset makes the mean large beside the deviation, where a narrow statistic is worst.
    x = (_values(128, 64).float() + 0.5).bfloat16()
    good = module(x.float()).detach().bfloat16()
    assert 0.3 < norm_error(module, (x,), good, config) <= 1
    wide = x.float() - x.float().mean(-1, keepdim=True) if kind == "LayerNorm" else x.float()
    variance = wide.square().mean(-1, keepdim=True).bfloat16().float()
    narrow = (wide * torch.rsqrt(variance + 1e-5)).bfloat16()
    assert norm_error(module, (x,), narrow, config) > 1.2


def test_softmax_in_fp32_is_within_its_bound_and_others_are_not() -> None:
    scores, module = _values(2, 4, 16, 16) * 4, SimpleNamespace(scale=None)
    mask = torch.ones(16, 16, dtype=torch.bool).triu(1)
    filled = scores.float().masked_fill(mask, -10000.0)
    good = torch.softmax(filled, -1).bfloat16()
    assert 0.3 < softmax_error(module, (scores, mask), good) <= 1
    powers = (filled - filled.amax(-1, keepdim=True)).bfloat16().exp()
    narrow = powers / powers.sum(-1, keepdim=True)
    assert softmax_error(module, (scores, mask), narrow) > 1.2


def test_rotary_angles_in_fp32_are_within_their_bound_and_others_are_not() -> None:
    frequencies = 1.0 / 10000 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)
    angles = torch.outer(torch.arange(64, dtype=torch.float32), frequencies)
    table = torch.cat((angles, angles), -1)[:, None, None, :]
    assert 0 < rotary_error(table) <= 1
    assert rotary_error(table.bfloat16().float()) > 100
