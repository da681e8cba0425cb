"""Stacks become the models that they name, with the same weights however they are spread."""

import dataclasses
import hashlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures import inputs, target
from fixtures.cases import (
    LAYOUTS,
    MODES,
    STACKS,
    Case,
    case,
    cases_for,
    fused_norm_cases,
    makes_sense,
    without_pipeline,
)
from fixtures.runtime import capability, models, step
from fixtures.runtime.capability import NotApplicable
from fixtures.runtime.modules import DecayMixer, StreamNorm
from fixtures.runtime.ranks import RankContext, run_ranks
from fixtures.runtime.standin import cpu_for_cuda
from fixtures.runtime.weights import global_names
from fixtures.trace.stream import Boundary

DEEP = case("dense-deep")
INTERLEAVED = case("dense-deep", layout="pp2-interleaved")
UNEVEN = case("hybrid", layout="pp2-uneven")
HYBRID = case("hybrid")
HYBRID_SPLIT = case("hybrid", mode="sequence-parallel")
EXPERTS = case("moe-alltoall-shared")
EXPERTS_SPLIT = case("moe-alltoall-shared", mode="sequence-parallel")
CROSS = case("cross-attention")

CASES = [
    DEEP, INTERLEAVED, without_pipeline(INTERLEAVED), UNEVEN, without_pipeline(UNEVEN),
    HYBRID, HYBRID_SPLIT, EXPERTS, EXPERTS_SPLIT, CROSS,
]  # fmt: skip


@dataclass(frozen=True)
class Built:
    """What one rank built for a case, and what came of a step with it.

    Attributes:
        split_at: along which dimension parameters are split over tensor-parallel ranks.
        boundaries: with how many tokens the stream was seen at each, microbatch by microbatch.
    """

    parameters: dict[str, torch.Tensor]
    split_at: dict[str, int]
    boundaries: dict[str, list[int]]
    branches: list[tuple[str, int]]
    losses: list[str]


def _build_all(context: RankContext, cases: list[Case], root: Path) -> list[Built]:
    """Build the models of several cases one after another: the target is imported once."""
    with cpu_for_cuda():
        target.load(root)
        context.init_process_group()
        return [_build(each) for each in cases]


def _build(each: Case) -> Built:
    with _parallel(each):
        config = models.transformer_config(each)
        chunks = models.build(each, config)
        parameters, split_at = {}, {}
        for chunk in chunks:
            names = global_names(chunk.core)
            for local_name, parameter in chunk.core.named_parameters():
                name = names[local_name]
                parameters[name] = parameter.detach().clone()
                if getattr(parameter, "tensor_model_parallel", False):
                    split_at[name] = parameter.partition_dim
        boundaries = {
            f"{boundary.chunk} {boundary.position} {boundary.place} {boundary.layer}": _watch(
                boundary
            )
            for boundary in models.boundaries_of(each, chunks)
        }
        branches = [(branch.kind, branch.layer) for branch in models.branches_of(each, chunks)]
        return Built(parameters, split_at, boundaries, branches, step.step(each, config, chunks))


def _watch(boundary: Boundary) -> list[int]:
    """Give a list to which the lengths of what passes a boundary are added as it passes."""
    lengths = []

    def look(module: torch.nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        stream = boundary.take(module, args, kwargs, output)
        if stream is not None:
            lengths.append(stream.shape[0])

    if boundary.when == "enter":
        boundary.module.register_forward_pre_hook(look, with_kwargs=True)
    else:
        boundary.module.register_forward_hook(look, with_kwargs=True)
    return lengths


@contextmanager
def _parallel(each: Case) -> Iterator[None]:
    step.initialize_parallel(each)
    yield
    capability.attribute("megatron.core.parallel_state", "destroy_model_parallel")()


@pytest.fixture(scope="module")
def built(newest_release: Path) -> dict[Case, list[Built]]:
    """What the ranks of each case built; cases of one rank are run by a second one too."""
    results = run_ranks(_build_all, 2, CASES, newest_release)
    errors = [result.error.traceback for result in results if result.error]
    assert not errors, errors[0]
    first, second = (result.value or [] for result in results)
    pairs = zip(CASES, zip(first, second, strict=True), strict=True)
    return {each: list(pair[: each.world_size]) for each, pair in pairs}


# Weights


@pytest.mark.parametrize(("spread", "alone"), [(INTERLEAVED, DEEP), (UNEVEN, HYBRID)])
def test_stages_and_chunks_have_the_weights_of_the_whole(
    built: dict[Case, list[Built]], spread: Case, alone: Case
) -> None:
    (whole,) = built[alone]
    names = Counter(name for rank in built[spread] for name in rank.parameters)
    assert names == Counter(whole.parameters.keys())
    for rank in built[spread]:
        for name, parameter in rank.parameters.items():
            assert torch.equal(parameter, whole.parameters[name]), name


@pytest.mark.parametrize(
    ("spread", "alone", "halved"),
    [(EXPERTS_SPLIT, EXPERTS, "linear_fc1"), (HYBRID_SPLIT, HYBRID, "in_proj")],
)
def test_tensor_ranks_have_parts_of_the_same_weights(
    built: dict[Case, list[Built]], spread: Case, alone: Case, halved: str
) -> None:
    (whole,) = built[alone]
    first, second = built[spread]
    assert any(halved in name for name in whole.parameters)
    for name, parameter in whole.parameters.items():
        parts = [first.parameters[name], second.parameters[name]]
        if name not in first.split_at:
            joined = parts[0]
            assert torch.equal(*parts), name
        elif halved in name:
            halves = zip(*(part.chunk(2) for part in parts), strict=True)
            joined = torch.cat([torch.cat(half) for half in halves])
        else:
            joined = torch.cat(parts, dim=first.split_at[name])
        assert torch.equal(joined, parameter), name


def test_no_two_parameters_have_the_same_values(built: dict[Case, list[Built]]) -> None:
    for case_alone in (DEEP, HYBRID, EXPERTS, CROSS):
        (whole,) = built[case_alone]
        digests = Counter(_digest(parameter) for parameter in whole.parameters.values())
        assert digests.most_common(1)[0][1] == 1, case_alone.name


@pytest.mark.parametrize("spread", [INTERLEAVED, UNEVEN], ids=lambda each: each.name)
def test_a_pipeline_gives_the_losses_of_one_stage(
    built: dict[Case, list[Built]], spread: Case
) -> None:
    (whole,) = built[without_pipeline(spread)]
    assert built[spread][-1].losses == whole.losses
    assert len(set(whole.losses)) == spread.layout.microbatches


# Places


def test_boundaries_of_an_interleaved_pipeline(built: dict[Case, list[Built]]) -> None:
    first, second = built[INTERLEAVED]
    assert list(first.boundaries) == [
        "0 0 embedding out None", "0 1 stage in None",
        "0 2 layer in 0", "0 3 layer out 0", "0 4 stage out None",
        "1 0 stage in None", "1 1 layer in 2", "1 2 layer out 2", "1 3 stage out None",
    ]  # fmt: skip
    assert list(second.boundaries) == [
        "0 0 stage in None", "0 1 layer in 1", "0 2 layer out 1", "0 3 stage out None",
        "1 0 stage in None", "1 1 layer in 3", "1 2 layer out 3", "1 3 final norm in None",
    ]  # fmt: skip


def test_boundaries_of_an_encoder_and_a_decoder(built: dict[Case, list[Built]]) -> None:
    (both,) = built[CROSS]
    places = [
        "0 embedding out None", "1 stage in None", "2 layer in 0", "3 layer out 0",
        "4 layer in 1", "5 layer out 1", "6 final norm in None",
    ]  # fmt: skip
    stack = CROSS.stack
    lengths = ((0, stack.encoder_sequence), (1, stack.sequence))
    assert both.boundaries == {
        f"{number} {place}": [length] for number, length in lengths for place in places
    }


@pytest.mark.parametrize("each", [INTERLEAVED, UNEVEN, EXPERTS_SPLIT], ids=lambda each: each.name)
def test_every_boundary_sees_every_microbatch(built: dict[Case, list[Built]], each: Case) -> None:
    length = each.stack.sequence // each.mode.tensor_parallel
    for rank in built[each]:
        for place, lengths in rank.boundaries.items():
            assert lengths == [length] * each.layout.microbatches, place


def test_branches_are_those_that_a_layer_has(built: dict[Case, list[Built]]) -> None:
    (hybrid,) = built[HYBRID]
    assert hybrid.branches == [
        ("Mamba mixer", 0), ("self attention", 1), ("MLP", 2), ("experts", 3), ("router", 3),
    ]  # fmt: skip
    (cross,) = built[CROSS]
    assert Counter(kind for kind, _ in cross.branches) == {
        "self attention": 4,
        "cross attention": 2,
        "MLP": 4,
    }
    (experts,) = built[EXPERTS]
    kinds = ("self attention", "experts", "router", "shared experts")
    assert experts.branches == [(kind, layer) for layer in (0, 1) for kind in kinds]


# Inputs


def test_tokens_and_weights_are_as_recorded() -> None:
    matrix, bias = (f"decoder.layers.0.mlp.linear_fc1.{kind}" for kind in ("weight", "bias"))
    assert _digest(inputs.tokens("tokens 0", (2, 16), 96)) == "c2793f44709755a4"
    assert _digest(inputs.weight(matrix, (128, 64))) == "7480b42a28a5aa0b"
    assert _digest(inputs.weight(bias, (128,))) == "64d29c18cc3fdb41"


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


# Modules of our own


@dataclass
class _Config:
    normalization: str = "LayerNorm"
    params_dtype: torch.dtype = torch.bfloat16
    sequence_parallel: bool = False

    def init_method(self, weight: torch.Tensor) -> None:
        """Leave it: the suite fills it."""


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_takes_both_dtypes_and_gives_the_compute_dtype(
    normalization: str, dtype: torch.dtype
) -> None:
    stream = inputs.uniform("stream", (8, 2, 32), 3.0).to(dtype)
    norm = StreamNorm(_Config(normalization), 32)
    exact = stream.double()
    if normalization == "LayerNorm":
        exact = exact - exact.mean(dim=-1, keepdim=True)
    exact = exact / (exact.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    given = norm(stream)
    assert given.dtype == torch.bfloat16
    assert torch.allclose(given.double(), exact, rtol=2**-8, atol=1e-6)


def test_the_mixer_looks_back_and_never_ahead() -> None:
    def linear(inputs_: int, outputs: int, **_options: object) -> torch.nn.Module:
        return _Linear(inputs_, outputs)

    mixer = DecayMixer(_Config(), 8, column_linear=linear, row_linear=linear)
    x = inputs.uniform("x", (6, 1, 8), 1.0).float()
    changed = x.clone()
    changed[3] += 1.0
    differs = (mixer(x)[0] != mixer(changed)[0]).flatten(1).any(dim=1)
    assert differs.tolist() == [False, False, False, True, True, True]


class _Linear(torch.nn.Module):
    def __init__(self, inputs_: int, outputs: int) -> None:
        super().__init__()
        self.weight = inputs.weight("linear", (outputs, inputs_)).float()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.t(), None


# Capabilities


def test_what_a_target_lacks_is_named() -> None:
    with pytest.raises(NotApplicable, match="no field residual_in_fp64"):
        capability.filled(_Config, residual_in_fp64=True)
    with pytest.raises(NotApplicable, match=r"no module json\.hybrid"):
        capability.attribute("json.hybrid", "HybridModel")
    with pytest.raises(NotApplicable, match="json of the target has no HybridModel"):
        capability.attribute("json", "HybridModel")


def test_a_package_that_a_module_misses_is_no_missing_feature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_nobody_has"):
        capability.module_or_none("needy")


def test_a_default_device_is_on_the_cpu_too() -> None:
    with cpu_for_cuda():
        with torch.device("cuda"):
            assert torch.ones(2).device.type == "cpu"
        with torch.device("meta"):
            assert torch.ones(2).device.type == "meta"
        try:
            torch.set_default_device("cuda:0")
            assert torch.ones(2).device.type == "cpu"
        finally:
            torch.set_default_device(None)


def test_what_torchs_compiler_is_part_of_works_within_the_standin() -> None:
    results = run_ranks(_use_the_compilers_parts, 1)
    assert [each.value for each in results] == [True], results[0].error


def _use_the_compilers_parts(context: RankContext) -> bool:
    with cpu_for_cuda():
        torch.use_deterministic_algorithms(True)
        return "torch._dynamo.trace_rules" in sys.modules


def test_the_standin_leaves_torch_as_it_was() -> None:
    def state() -> dict[str, Any]:
        holders = (torch, torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.Tensor)
        return {
            f"{index} {name}": value
            for index, holder in enumerate((*holders, torch.nn.Module))
            for name, value in vars(holder).items()
        }

    def use_and_fail() -> None:
        with cpu_for_cuda():
            assert torch.cuda.is_available()
            assert torch.ones(2, device="cuda").device.type == "cpu"
            assert torch.ones(2).cuda().to("cuda:0").device.type == "cpu"
            raise ZeroDivisionError

    before = state()
    with pytest.raises(ZeroDivisionError):
        use_and_fail()
    after = state()
    assert after.keys() == before.keys()
    assert [name for name, value in before.items() if after[name] is not value] == []


# Cases


def test_tiers_cover_what_they_should() -> None:
    quick, full = cases_for("quick"), cases_for("full")
    assert set(quick) < set(full)
    assert len({each.name for each in full}) == len(full)
    for tier in (quick, full):
        # Two are for neighbours and inference alone.
        apart = {"3-microbatches", "pp2-inference"}
        assert {each.layout.name for each in tier} == LAYOUTS.keys() - apart
        assert {each.stack.family for each in tier} == {each.family for each in STACKS.values()}
        assert {each.fp32_residual for each in tier} == {True, False}
    assert {each.mode.name for each in full} == MODES.keys() - {"inference"}
    ordinary = {name for name, stack in STACKS.items() if not stack.apart}
    for flag in (True, False):
        assert {each.stack.name for each in full if each.fp32_residual is flag} == ordinary
    assert 30 <= len(quick) <= 42
    assert 160 <= len(full) <= 210
    fused = {each.stack.name for each in fused_norm_cases("full")}
    assert fused == {name for name, stack in STACKS.items() if stack.fuses_norms}
    assert set(fused_norm_cases("quick")) < set(fused_norm_cases("full"))


@pytest.mark.parametrize(
    ("stack", "mode", "layout"),
    [
        ("dense", "recompute-mlp", "one-stage"),
        ("dense", "recompute-experts", "one-stage"),
        ("moe-allgather", "train", "pp2-variable-lengths"),
        ("cross-attention", "train", "pp2"),
        ("cross-attention", "decoder-input-fp32", "one-stage"),
        ("mamba", "recompute-selective", "one-stage"),
        ("mamba", "train", "pp4"),
    ],
)
def test_combinations_without_sense_are_left_out(stack: str, mode: str, layout: str) -> None:
    assert not makes_sense(STACKS[stack], MODES[mode], LAYOUTS[layout])


def test_a_stack_is_data_that_can_be_told_apart() -> None:
    contents = [dataclasses.replace(stack, name="") for stack in STACKS.values()]
    assert len(set(contents)) == len(contents)
