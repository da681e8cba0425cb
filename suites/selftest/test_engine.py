"""Transformer Engine on the CPU: kernels against fp64, what is refused, and whole modules."""

import functools
import importlib.metadata
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fixtures.oracle.bounds import UNIT_ROUNDOFF, gamma
from fixtures.runtime import engine
from fixtures.runtime.capability import NotApplicable
from fixtures.runtime.engine import constants, extension, kernels
from fixtures.runtime.ranks import WITH_ENGINE, RankContext, run_ranks

FP32 = UNIT_ROUNDOFF["float32"]
H = 48


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(seen: torch.Tensor, exact: torch.Tensor, terms: int, magnitude: torch.Tensor) -> bool:
    """Whether each element is the exact one within fp32 sums of so many terms and one rounding."""
    summed = gamma(terms, FP32) * magnitude
    rounding = torch.finfo(seen.dtype).eps / 2 * (exact.abs() + summed)
    return bool(((seen.double() - exact).abs() <= summed + rounding).all())


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("turn_a", "turn_b"), [(True, False), (False, False), (False, True)])
def test_gemm_sums_in_fp32_and_rounds_once(turn_a: bool, turn_b: bool, out: torch.dtype) -> None:
    a = values(H, 32) if turn_a else values(32, H)
    b = values(32, 24, seed=1) if turn_b else values(24, 32, seed=1)
    bias = values(H, seed=2)
    wide_a, wide_b = a.double(), b.double()
    factors = (wide_b.T if turn_b else wide_b), (wide_a.T if turn_a else wide_a)
    exact = factors[0] @ factors[1] + bias.double()
    size = factors[0].abs() @ factors[1].abs() + bias.double().abs()
    (seen, *rest) = gemm(a, turn_a, b, turn_b, None, out, bias, grad=False)
    assert seen.dtype is out
    assert rest == [None, None, None]
    assert close(seen, exact, 33, size)


def gemm(
    a: Any, turn_a: bool, b: Any, turn_b: bool, out: Any, dtype: Any, bias: Any, grad: bool,
    accumulate: bool = False, **more: Any,
) -> list[Any]:  # fmt: skip
    kinds = {torch.bfloat16: "kBFloat16", torch.float16: "kFloat16", torch.float32: "kFloat32"}
    kind = None if dtype is None else constants.DType[kinds[dtype]]
    return extension.generic_gemm(
        a, turn_a, b, turn_b, out, more.pop("quantizer", None), kind, bias, None,
        more.pop("gelu", False), None, grad, None, 0, accumulate, True, **more,
    )  # fmt: skip


def test_gemm_keeps_leading_dimensions_and_sums_biases_gradients() -> None:
    weight, x = values(H, 32), values(5, 3, 32, seed=1)
    assert gemm(weight, True, x, False, None, torch.bfloat16, None, False)[0].shape == (5, 3, H)
    upstream = values(5, 3, H, seed=2)
    by_weight, by_bias, *_ = gemm(
        x, False, upstream, True, None, torch.float32, values(H), grad=True
    )
    wide = upstream.double().flatten(0, 1)
    assert close(by_weight, wide.T @ x.double().flatten(0, 1), 15,
                 wide.abs().T @ x.double().abs().flatten(0, 1))  # fmt: skip
    assert close(by_bias, wide.sum(0), 15, wide.abs().sum(0))


def test_gemm_adds_to_what_is_there() -> None:
    a, b = values(32, H), values(24, 32, seed=1)
    out = torch.full((24, H), 256.0)
    gemm(a, False, b, False, out, None, None, grad=False, accumulate=True)
    exact = b.double() @ a.double() + 256
    assert close(out, exact, 33, b.double().abs() @ a.double().abs() + 256)


def test_grouped_gemm_is_each_gemm() -> None:
    weights = [values(H, 32, seed=n) for n in range(3)]
    x = list(values(9, 32, seed=5).split([2, 0, 7]))
    out = torch.empty(9, H, dtype=torch.bfloat16)
    biases = [values(H, seed=7), torch.empty(0), values(H, seed=8)]
    extension.te_general_grouped_gemm(
        weights, True, x, False, [out], None, [2, 0, 7], biases, None, True, None, False, [], 0,
        False, True, 1,
    )  # fmt: skip
    for weight, rows, bias, seen in zip(weights, x, biases, out.split([2, 0, 7]), strict=True):
        added = bias if bias.numel() else None
        alone = gemm(weight, True, rows, False, None, torch.bfloat16, added, False)[0]
        assert torch.equal(seen, alone)


@pytest.mark.parametrize("around_one", [False, True])
@pytest.mark.parametrize("centered", [False, True])
def test_norms_are_those_of_fp64(centered: bool, around_one: bool) -> None:
    x, weight, bias = values(6, H), values(H, seed=1), values(H, seed=2)
    upstream = values(6, H, seed=3)
    wide_x, wide_w, wide_b = (each.double().requires_grad_() for each in (x, weight, bias))
    scale = wide_w + 1 if around_one else wide_w
    middle = wide_x - wide_x.mean(-1, keepdim=True) if centered else wide_x
    exact = middle * torch.rsqrt(middle.square().mean(-1, keepdim=True) + 1e-5) * scale
    exact = exact + wide_b if centered else exact
    exact.backward(upstream.double())
    kind = constants.DType.kBFloat16
    if centered:
        y, mean, inverse = extension.layernorm_fwd(
            x, weight, bias, 1e-5, None, None, kind, 0, around_one
        )
        found = extension.layernorm_bwd(upstream, x, mean, inverse, weight, 0, around_one)
    else:
        y, _, inverse = extension.rmsnorm_fwd(x, weight, 1e-5, None, None, kind, 0, around_one)
        found = extension.rmsnorm_bwd(upstream, x, inverse, weight, 0, around_one)
    # Rows are of size one, so that magnitudes of a few cover every term.
    assert close(y, exact.detach(), 2 * H, torch.full_like(exact, 8.0))
    by = [wide_x.grad, wide_w.grad, wide_b.grad]
    for seen, gradient in zip(found, by, strict=False):
        assert close(seen, gradient, 4 * H, torch.full_like(gradient, 32.0))


@pytest.mark.parametrize("kind", ["plain", "masked", "causal", "aligned"])
def test_softmax_is_that_of_fp64(kind: str) -> None:
    x = values(2, 3, 5, 8 if kind == "aligned" else 5).requires_grad_()
    mask = torch.zeros(2, 1, 5, 5, dtype=torch.bool)
    mask[1, :, :, 3:] = True
    future = torch.ones(5, x.shape[-1], dtype=torch.bool).triu(1 + x.shape[-1] - 5)
    hidden = {"plain": None, "masked": mask}.get(kind, future)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "plain": lambda: extension.scaled_softmax_forward(x.detach(), 0.5),
        "masked": lambda: extension.scaled_masked_softmax_forward(x.detach(), mask, 0.5),
        "causal": lambda: extension.scaled_upper_triang_masked_softmax_forward(x.detach(), 0.5),
        "aligned": lambda: extension.scaled_aligned_causal_masked_softmax_forward(
            x.detach(), torch.tensor(0.5)
        ),
    }
    wide = x.double() * 0.5
    exact = torch.softmax(wide if hidden is None else wide.masked_fill(hidden, -torch.inf), -1)
    seen = calls[kind]()
    assert close(seen, exact.detach(), 16, exact.detach())
    upstream = values(*x.shape, seed=4)
    given = kernels.softmax_backward(upstream, seen, 0.5)
    product = upstream.double() * seen.double()
    backward = (product - seen.double() * product.sum(-1, keepdim=True)) * 0.5
    assert close(given, backward, 16, torch.ones_like(backward) * product.abs().sum(-1, True))


def test_a_row_with_everything_hidden_is_zero() -> None:
    hidden = torch.ones(1, 1, 2, 3, dtype=torch.bool)
    assert not extension.scaled_masked_softmax_forward(values(1, 1, 2, 3), hidden, 1.0).any()


@pytest.mark.parametrize(
    "call",
    [
        lambda: extension.make_module().fused_rope_forward(values(2, 2)),
        lambda: gemm(values(4, 4), True, values(4, 4), False, None, None, None, False, gelu=True),
        lambda: gemm(values(4, 4), True, values(4, 4), False, None, None, None, False, alpha=2.0),
        lambda: gemm(values(4, 4), True, values(4, 4), False, None, None, None, False,
                     quantizer=object()),
        lambda: gemm(values(4, 4).to(torch.uint8), True, values(4, 4), False, None, None, None,
                     False),
        lambda: extension.rmsnorm_fwd(values(2, 4), values(4), 1e-5, None, object(),
                                      constants.DType.kBFloat16, 0, False),
        lambda: extension.rmsnorm_fwd(values(2, 4), values(4), 1e-5, None, None,
                                      constants.DType.kFloat8E4M3, 0, False),
    ],
)  # fmt: skip
def test_what_has_no_kernel_is_refused_by_name(call: Callable[[], object]) -> None:
    with pytest.raises(NotApplicable, match=r"Transformer Engine's .* it needs a GPU"):
        call()


def test_plug_ins_of_others_are_not_there() -> None:
    module = extension.make_module()
    assert not hasattr(module, "flash_attention")
    assert not hasattr(module, "__path__")


@pytest.mark.parametrize(("version", "said"), [
    (None, "is not installed: install transformer_engine==2.20.2"),
    ("2.9.0", "2.9.0 is installed, and only 2.20.2 runs on the CPU"),
])  # fmt: skip
def test_another_version_is_told(
    version: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(_name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert said in (engine.why_not() or "")


def _modules(_context: RankContext) -> dict[str, float]:
    """Give the largest error of whole modules of Transformer Engine in units of bf16's u."""
    from fixtures.runtime.standin import cpu_for_cuda

    with cpu_for_cuda():
        te = sys.modules["transformer_engine"].pytorch
        options = {"params_dtype": torch.bfloat16, "device": "cuda"}
        return {
            "LayerNormLinear": _module_error(te.LayerNormLinear(H, 2 * H, **options)),
            "Linear": _module_error(te.Linear(H, 2 * H, **options)),
            "RMSNorm": _module_error(te.RMSNorm(H, dtype=torch.bfloat16, device="cuda")),
        }


def _module_error(module: Any) -> float:
    """Run a module and fp64's idea of it; give the error relative to the largest element."""
    x = values(4, 2, H).requires_grad_()
    out = module(x)
    upstream = values(*out.shape, seed=1)
    (out * upstream).sum().backward()
    named = {name: each.detach().double() for name, each in module.named_parameters()}
    wide = x.detach().double().requires_grad_()
    exact = wide
    if "layer_norm_weight" in named or set(named) == {"weight"}:
        centred = wide - wide.mean(-1, keepdim=True) if "layer_norm_bias" in named else wide
        scale = named.get("layer_norm_weight", named["weight"])
        exact = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * scale
        exact = exact + named.get("layer_norm_bias", torch.zeros(()))
    if "bias" in named:
        exact = exact @ named["weight"].T + named["bias"]
    (exact * upstream.double()).sum().backward()
    pairs = [(out, exact), (x.grad, wide.grad)]
    u = UNIT_ROUNDOFF["bfloat16"]
    errors = [(one.double() - other).abs().max() / other.abs().max() / u for one, other in pairs]
    return float(max(errors))


def test_modules_are_those_of_fp64() -> None:
    (result,) = run_ranks(_modules, 1, preload=WITH_ENGINE)
    assert result.outcome == "returned", result.error
    # A handful of roundings: input, norm, product, and the same on the way back.
    assert max(result.value.values()) < 8, result.value
    assert min(result.value.values()) > 0.1, result.value


def _without_engine(_context: RankContext) -> tuple[bool, bool]:
    has = functools.partial(sys.modules.get, "transformer_engine")
    return has() is None, torch.zeros(1).is_cuda


def test_ranks_have_it_only_where_it_was_asked_for() -> None:
    (result,) = run_ranks(_without_engine, 1)
    assert result.value == (True, False)
