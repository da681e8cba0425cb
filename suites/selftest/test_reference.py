"""The fp64 reference is right: by the papers, by finite differences, and by a Megatron in fp32."""

import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures import inputs
from fixtures.cases import Case, case
from fixtures.oracle.arithmetic import EXACT, Arithmetic
from fixtures.oracle.measures import Drift, drift, gamma, unit_roundoff
from fixtures.oracle.reference import Reference, Routed, Tokens, Walk, best, layers
from fixtures.runtime.ranks import run_ranks
from fixtures.stacks import Stack
from suites.selftest import papers
from suites.selftest.papers import numbers
from suites.selftest.recorded import Recorded, record

SEQUENCE, BATCH = 3, 2


def _values(name: str, *shape: int, limit: float = 1.0) -> torch.Tensor:
    # Not a dyadic limit: all 53 bits of a value are used, so that sums have something to round.
    return inputs.uniform(f"reference {name}", shape, 0.99 * limit)


def _weights(tensors: dict[str, torch.Tensor | None]) -> Callable[[str], layers.Weights]:
    """Give the weights of modules from `module.weight` and `module.bias`; None has none."""

    def weights(place: str) -> layers.Weights:
        found = {kind: tensors.get(f"{place}.{kind}") for kind in ("weight", "bias")}
        return {kind: tensor for kind, tensor in found.items() if tensor is not None}

    return weights


def _is_within_bounds(seen: torch.Tensor, exact: Any) -> bool:
    ratio = papers.worst(seen, exact)
    print(f"largest error: {ratio:.2g} of its bound")
    return ratio <= 1


# Against the papers' formulas in 50 digits


@pytest.mark.parametrize("limit", [3.0, 3e-3], ids=["ordinary", "small"])
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_norms(name: str, limit: float) -> None:
    centered = name == "LayerNorm"
    x, gain = _values("stream", SEQUENCE, BATCH, 8, limit=limit), 1 + _values("gain", 8)
    bias = _values("bias", 8) if centered else None
    weights = {"weight": gain} | ({} if bias is None else {"bias": bias})
    exact = papers.by_batch(
        lambda rows: [papers.norm(row, numbers(gain), numbers(bias), centered) for row in rows], x
    )
    assert _is_within_bounds(layers.norm(x, weights, EXACT, centered), exact)


def test_residual_add() -> None:
    stream, branch = (_values(name, SEQUENCE, BATCH, 4) for name in ("stream", "branch"))
    bias = _values("bias", 4)
    for added in (bias, None):
        exact = papers.by_batch(
            lambda rows, others, added=added: [
                papers.add(row, other if added is None else papers.add(other, numbers(added)))
                for row, other in zip(rows, others, strict=True)
            ],
            stream,
            branch,
        )
        assert _is_within_bounds(layers.residual_add(stream, branch, added, EXACT), exact)


def test_rotary_angles() -> None:
    length, size = 40, 16
    cosines, sines = layers.rotary_tables(length, size, EXACT)
    for table, which in ((cosines, 0), (sines, 1)):
        exact = [
            [papers.angle(t, i % (size // 2), size)[which] for i in range(size)]
            for t in range(length)
        ]
        assert table.shape == (length, 1, 1, size)
        assert _is_within_bounds(table, exact)


def test_rotation_turns_pairs_that_are_half_a_head_apart() -> None:
    x = _values("heads", 5, 1, 2, 8)
    tables = layers.rotary_tables(5, 8, EXACT)
    exact = [[[papers.rotate(head, t) for head in numbers(x[t, 0])]] for t in range(5)]
    assert _is_within_bounds(layers.rotate(x, tables, EXACT), exact)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "sees-all"])
@pytest.mark.parametrize("rotary", [True, False], ids=["rope", "no-positions"])
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 2), (2, 1), (4, 2)])
def test_self_attention(heads: int, groups: int, rotary: bool, causal: bool) -> None:
    size = 4 if heads < 4 else 2
    h, rows = heads * size, (heads + 2 * groups) * size
    x = _values("normed", SEQUENCE, BATCH, h, limit=2.0)
    matrix, bias = _values("qkv", rows, h), _values("qkv bias", rows)
    tensors = {
        "linear_qkv.weight": matrix,
        "linear_qkv.bias": bias,
        "linear_proj.weight": _values("proj", h, h),
        "linear_proj.bias": _values("proj bias", h),
    }
    seen, seen_bias = layers.self_attention(
        x, _weights(tensors), layers.Heads(heads, groups), EXACT, rotary, causal
    )
    inner = papers.by_batch(
        lambda rows: papers.self_attention(
            rows, numbers(matrix), numbers(bias), heads, groups, rotary, causal
        ),
        x,
    )
    end = numbers(tensors["linear_proj.weight"])
    assert _is_within_bounds(seen, [[papers.linear(r, end, None) for r in row] for row in inner])
    assert seen_bias is tensors["linear_proj.bias"]


def test_a_hidden_position_has_no_part_in_attention() -> None:
    query, key, value = (_values(name, 4, 1, 2, 4) for name in ("query", "key", "value"))
    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
    before = layers.attend(query, key, value, mask, EXACT)
    key, value = key.clone(), value.clone()
    key[3], value[3] = 1e3, 1e3
    after = layers.attend(query, key, value, mask, EXACT)
    assert torch.equal(before[:3], after[:3])
    assert not torch.equal(before[3], after[3])


@pytest.mark.parametrize("heads", [1, 2])
def test_cross_attention(heads: int) -> None:
    h = 4
    x, other = _values("normed", SEQUENCE, BATCH, h), _values("context", 4, BATCH, h)
    tensors = {
        f"{place}.{kind}": _values(f"{place}.{kind}", rows, *([h] if kind == "weight" else []))
        for place, rows in (("linear_q", h), ("linear_kv", 2 * h), ("linear_proj", h))
        for kind in ("weight", "bias")
    }
    seen, bias = layers.cross_attention(
        x, other, _weights(tensors), layers.Heads(heads, heads), EXACT
    )
    query, pair = (
        tuple(numbers(tensors[f"{place}.{kind}"]) for kind in ("weight", "bias"))
        for place in ("linear_q", "linear_kv")
    )
    inner = papers.by_batch(
        lambda rows, others: papers.cross_attention(rows, others, query, pair, heads), x, other
    )
    end = numbers(tensors["linear_proj.weight"])
    assert _is_within_bounds(seen, [[papers.linear(r, end, None) for r in row] for row in inner])
    assert bias is tensors["linear_proj.bias"]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "gelu"])
def test_mlp(gated: bool, bias: bool) -> None:
    h, inner = 4, 6
    x, rows = _values("normed", SEQUENCE, BATCH, h, limit=2.0), 2 * inner if gated else inner
    first, second = _values("fc1", rows, h), _values("fc2", h, inner)
    first_bias = _values("fc1 bias", rows) if bias else None
    second_bias = _values("fc2 bias", h) if bias else None
    tensors = {
        "linear_fc1.weight": first,
        "linear_fc1.bias": first_bias,
        "linear_fc2.weight": second,
        "linear_fc2.bias": second_bias,
    }
    seen, seen_bias = layers.mlp(x, _weights(tensors), EXACT, gated)
    exact = papers.by_batch(
        lambda rows: [
            papers.mlp(row, (numbers(first), numbers(first_bias)), numbers(second), gated)
            for row in rows
        ],
        x,
    )
    assert _is_within_bounds(seen, exact)
    assert seen_bias is second_bias


@pytest.mark.parametrize("gated", [True, False], ids=["silu", "gelu"])
def test_activations_far_from_zero(gated: bool) -> None:
    x = torch.linspace(-9, 9, 37, dtype=torch.float64)[:, None, None]
    one = torch.ones(1, 1, dtype=torch.float64)
    # The gate sees x, and what it multiplies is x too.
    tensors = {"linear_fc1.weight": torch.cat([one, one]) if gated else one}
    seen, _ = layers.mlp(x, _weights({**tensors, "linear_fc2.weight": one}), EXACT, gated)
    exact = [
        papers.silu(each) * each if gated else papers.gelu(each) for each in numbers(x.flatten())
    ]
    assert _is_within_bounds(seen, exact)


@pytest.mark.parametrize("softmax_first", [True, False], ids=["before-top-k", "after-top-k"])
def test_router_and_experts(softmax_first: bool) -> None:
    h, inner, count = 4, 5, 3
    x, router = _values("normed", SEQUENCE, BATCH, h), _values("router", count, h, limit=3.0)
    tensors = {
        f"experts.local_experts.{number}.{place}.weight": _values(f"{number} {place}", *shape)
        for number in range(count)
        for place, shape in (("linear_fc1", (2 * inner, h)), ("linear_fc2", (h, inner)))
    }
    logits = layers.router_logits(x, router, EXACT)
    chosen = best(logits, 2)
    probabilities = layers.router_probabilities(logits, chosen, EXACT, softmax_first)
    seen = layers.experts(x, probabilities, _weights(tensors), EXACT, gated=True)
    weights, rows = [], []
    for s, b in itertools.product(range(SEQUENCE), range(BATCH)):
        token = numbers(x[s, b])
        exact_logits = papers.linear(token, numbers(router), None)
        values = [logit.value for logit in exact_logits]
        choice = [sum(other > value for other in values) < 2 for value in values]
        assert chosen[s, b].tolist() == choice
        weights.append(papers.router_probabilities(exact_logits, choice, softmax_first))
        outputs = [
            papers.mlp(
                token,
                (numbers(tensors[f"experts.local_experts.{k}.linear_fc1.weight"]), None),
                numbers(tensors[f"experts.local_experts.{k}.linear_fc2.weight"]),
                gated=True,
            )
            for k in range(count)
        ]
        rows.append(papers.weighted_sum(weights[-1], outputs))
    assert _is_within_bounds(probabilities, weights)
    assert _is_within_bounds(seen, rows)


def test_experts_with_biases_are_refused() -> None:
    # The release adds them as it combines the experts; no stack has them.
    bias = {"linear_fc2.bias": _values("bias", 4)}
    tensors = {"linear_fc1.weight": _values("fc1", 5, 4), "linear_fc2.weight": _values("fc2", 4, 5)}
    weights = _weights({f"experts.local_experts.0.{n}": t for n, t in (tensors | bias).items()})
    x, all_of_it = _values("normed", SEQUENCE, BATCH, 4), torch.ones(SEQUENCE, BATCH, 1)
    with pytest.raises(ValueError, match="no experts with biases"):
        layers.experts(x, all_of_it, weights, EXACT, gated=False)


def test_decay_mixer() -> None:
    h = 4
    x = _values("normed", 5, BATCH, h, limit=2.0)
    entry, end = _values("in", 2 * h, h), _values("out", h, h)
    weights = _weights({"in_proj.weight": entry, "out_proj.weight": end})
    seen, bias = layers.decay_mixer(x, weights, EXACT)
    exact = papers.by_batch(lambda rows: papers.decay_mixer(rows, numbers(entry), numbers(end)), x)
    assert _is_within_bounds(seen, exact)
    assert bias is None


@pytest.mark.parametrize("limit", [3.0, 1e4, 1e300], ids=["ordinary", "large", "huge"])
def test_cross_entropy(limit: float) -> None:
    logits = _values("logits", SEQUENCE, BATCH, 7, limit=limit)
    labels = inputs.tokens("reference labels", (BATCH, SEQUENCE), 7)
    seen = layers.cross_entropy(logits, labels)
    exact = [
        [papers.cross_entropy(numbers(logits[s, b]), int(labels[b, s])) for s in range(SEQUENCE)]
        for b in range(BATCH)
    ]
    assert seen.isfinite().all()
    assert _is_within_bounds(seen, exact)


def test_a_layer_adds_each_branch_of_the_normalised_stream() -> None:
    stack = Stack("tiny", hidden=4, heads=2, layers=1, sequence=SEQUENCE, vocabulary=5)
    weights = _tiny_weights(stack)
    x = _values("stream", SEQUENCE, 1, 4)
    layer = {
        name.removeprefix("decoder.layers.0."): numbers(tensor) for name, tensor in weights.items()
    }

    def both(place: str) -> tuple[Any, Any]:
        return layer[f"{place}.weight"], layer[f"{place}.bias"]

    def exact(rows: papers.Matrix) -> list[list[papers.Number]]:
        normed = [papers.norm(row, *both("input_layernorm"), True) for row in rows]
        inner = papers.self_attention(
            normed, *both("self_attention.linear_qkv"), 2, 2, rotary=False, causal=True
        )
        branch = [papers.linear(row, *both("self_attention.linear_proj")) for row in inner]
        rows = [papers.add(*pair) for pair in zip(rows, branch, strict=True)]
        normed = [papers.norm(row, *both("pre_mlp_layernorm"), True) for row in rows]
        second, bias = both("mlp.linear_fc2")
        branch = [
            papers.add(papers.mlp(row, both("mlp.linear_fc1"), second, gated=False), bias)
            for row in normed
        ]
        return [papers.add(*pair) for pair in zip(rows, branch, strict=True)]

    assert _is_within_bounds(
        Reference(stack, weights).layer("decoder", 0, x), [[r] for r in exact(numbers(x[:, 0]))]
    )


def test_a_wrong_formula_is_out_of_bounds() -> None:
    x, gain = _values("stream", 1, 1, 8, limit=3.0), torch.ones(8, dtype=torch.float64)
    exact = [papers.norm(numbers(x[0, 0]), numbers(gain), None, centered=False)]
    seen = layers.norm(x, {"weight": gain}, EXACT, centered=False)
    assert papers.worst(seen, exact) <= 1
    assert papers.worst(seen * (1 + 2.0**-48), exact) > 1


# Stacks that are small enough for finite differences


def _tiny(family: str, **fields: Any) -> Stack:
    common = {"hidden": 4, "heads": 2, "layers": 1, "sequence": SEQUENCE, "encoder_sequence": 4}
    return Stack("tiny", family=family, vocabulary=5, batch=1, **{**common, **fields})


TINY = {
    "dense": _tiny("gpt", layers=2),
    "gated": _tiny("gpt", gated=True),
    "rms-gqa-rope": _tiny(
        "gpt", norm="RMSNorm", hidden=8, heads=4, query_groups=2, positions="rope", bias=False
    ),
    "experts": _tiny(
        "gpt", layers=2, experts=3, moe_layers=(0, 1), shared_experts=True, gated=True, bias=False
    ),
    "experts-softmax-first": _tiny(
        "gpt", experts=3, moe_layers=(1,), softmax_before_top_k=True, bias=False
    ),
    "hybrid": _tiny("hybrid", layers=4, pattern="M*-E", experts=3, norm="RMSNorm", bias=False),
    "encoder-decoder": _tiny("encoder-decoder", layers=2),
    "encoder-decoder-rope": _tiny(
        "encoder-decoder", hidden=8, norm="RMSNorm", gated=True, positions="rope", bias=False
    ),
}

over_tiny_stacks = pytest.mark.parametrize("stack", TINY.values(), ids=TINY)


def _tiny_weights(stack: Stack) -> dict[str, torch.Tensor]:
    """Give the weights of a stack, named as Megatron's are (the runs below prove the names)."""
    return {name: inputs.weight(name, shape) for name, shape in _shapes(stack)}


def _shapes(stack: Stack) -> Iterator[tuple[str, tuple[int, ...]]]:
    h, size, pair = stack.hidden, stack.hidden // stack.heads, 2 if stack.gated else 1
    two_blocks = stack.family == "encoder-decoder"
    length = max(stack.sequence, stack.encoder_sequence) if two_blocks else stack.sequence

    def norm(place: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{place}.weight", (h,)
        if stack.norm == "LayerNorm":
            yield f"{place}.bias", (h,)

    def linear(
        place: str, rows: int, columns: int, bias: bool = stack.bias
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{place}.weight", (rows, columns)
        if bias:
            yield f"{place}.bias", (rows,)

    def mlp(place: str, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from linear(f"{place}.linear_fc1", pair * inner, h)
        yield from linear(f"{place}.linear_fc2", h, inner)

    def branch(layer: str, kind: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        if kind == "mamba":
            yield from norm(f"{layer}.norm")
            yield from linear(f"{layer}.mixer.in_proj", 2 * h, h, bias=False)
            yield from linear(f"{layer}.mixer.out_proj", h, h, bias=False)
        elif kind == "attention":
            rows = h + 2 * size * (stack.query_groups or stack.heads)
            yield from norm(f"{layer}.input_layernorm")
            yield from linear(f"{layer}.self_attention.linear_qkv", rows, h)
            yield from linear(f"{layer}.self_attention.linear_proj", h, h)
        elif kind == "cross attention":
            yield from norm(f"{layer}.pre_cross_attn_layernorm")
            yield from linear(f"{layer}.cross_attention.linear_q", h, h)
            yield from linear(f"{layer}.cross_attention.linear_kv", 2 * h, h)
            yield from linear(f"{layer}.cross_attention.linear_proj", h, h)
        elif kind == "mlp":
            yield from norm(f"{layer}.pre_mlp_layernorm")
            yield from mlp(f"{layer}.mlp", 2 * h)
        else:
            yield from norm(f"{layer}.pre_mlp_layernorm")
            yield from linear(f"{layer}.mlp.router", stack.experts, h, bias=False)
            for number in range(stack.experts):
                yield from mlp(f"{layer}.mlp.experts.local_experts.{number}", 2 * h)
            if stack.shared_experts:
                yield from mlp(f"{layer}.mlp.shared_experts", h)

    yield "embedding.word_embeddings.weight", (stack.vocabulary, h)
    if stack.positions == "learned_absolute":
        yield "embedding.position_embeddings.weight", (length, h)
    for block in ("encoder", "decoder") if two_blocks else ("decoder",):
        for number in range(stack.layers):
            for kind in _kinds(stack, block, number):
                yield from branch(f"{block}.layers.{number}", kind)
        yield from norm(f"{block}.final_{'norm' if stack.family == 'hybrid' else 'layernorm'}")
    yield ("lm_head." if two_blocks else "") + "output_layer.weight", (stack.vocabulary, h)


def _kinds(stack: Stack, block: str, number: int) -> list[str]:
    """List the branches of a layer."""
    if stack.family == "hybrid":
        names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "experts"}
        return [names[stack.pattern[number]]]
    if stack.family == "encoder-decoder" and block == "decoder":
        return ["attention", "cross attention", "mlp"]
    with_experts = stack.moe_layers and stack.moe_layers[number]
    return ["attention", "experts" if with_experts else "mlp"]


def _tiny_tokens(stack: Stack) -> Tokens:
    shape = (stack.batch, stack.sequence)
    return Tokens(
        inputs.tokens("reference tokens", shape, stack.vocabulary),
        inputs.tokens("reference labels", shape, stack.vocabulary),
        inputs.tokens("encoder", (stack.batch, stack.encoder_sequence), stack.vocabulary),
    )


def _routed(stack: Stack) -> Routed | None:
    """Give a choice of two experts for each token; nobody chooses the last one."""
    if not stack.experts:
        return None
    chosen = torch.ones(stack.sequence, stack.batch, stack.experts, dtype=torch.bool)
    chosen[..., -1] = False
    return Routed(chosen)


def _composed(reference: Reference, tokens: Tokens, routed: Routed | None) -> torch.Tensor:
    """Give the mean loss of a whole stack in one piece."""
    context = None
    for block in reference.blocks:
        ids = tokens.encoder if block == "encoder" else tokens.decoder
        assert ids is not None
        stream = reference.embed(ids)
        for number in range(reference.stack.layers):
            stream = reference.layer(block, number, stream, context, routed)
        if block == "encoder":
            context = reference.final_norm(block, stream)
    return reference.losses(stream, tokens.labels).mean()


# Against finite differences

# Central differences over a step e are off by e^2/6 of the third derivative and by u/e of the
# value. Both are smallest together at e = cbrt(u), where they are near u^(2/3) = 2e-11; what is
# allowed leaves room for derivatives and values of a few hundred.
_STEP = math.cbrt(2.0**-53)
_ALLOWED = 1e-8


def _has_right_gradients(
    function: Callable[..., Any], *arguments: torch.Tensor, along_each: bool = True
) -> bool:
    """Compare gradients with differences, by every element or along one direction a tensor."""
    leaves = tuple(each.detach().clone().requires_grad_() for each in arguments)
    options = {"eps": _STEP, "atol": _ALLOWED, "rtol": _ALLOWED, "fast_mode": not along_each}
    return torch.autograd.gradcheck(function, leaves, **options)


@pytest.mark.parametrize("centered", [True, False], ids=["LayerNorm", "RMSNorm"])
def test_gradients_of_norms(centered: bool) -> None:
    assert _has_right_gradients(
        lambda x, w, b: layers.norm(x, {"weight": w, "bias": b}, EXACT, centered),
        _values("stream", 2, 1, 4),
        1 + _values("gain", 4),
        _values("bias", 4),
    )


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "sees-all"])
def test_gradients_of_self_attention(causal: bool) -> None:
    def function(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        names = ("linear_qkv.weight", "linear_qkv.bias", "linear_proj.weight")
        given = _weights(dict(zip(names, weights, strict=True)))
        return layers.self_attention(x, given, layers.Heads(2, 1), EXACT, True, causal)[0]

    x, qkv = _values("normed", 2, 1, 4), _values("qkv", 8, 4)
    assert _has_right_gradients(function, x, qkv, _values("b", 8), _values("proj", 4, 4))


def test_gradients_of_cross_attention() -> None:
    def function(x: torch.Tensor, other: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        names = ("linear_q.weight", "linear_kv.weight", "linear_proj.weight")
        given = _weights(dict(zip(names, weights, strict=True)))
        return layers.cross_attention(x, other, given, layers.Heads(2, 2), EXACT)[0]

    streams = _values("normed", 2, 1, 4), _values("context", 3, 1, 4)
    assert _has_right_gradients(
        function, *streams, _values("q", 4, 4), _values("kv", 8, 4), _values("proj", 4, 4)
    )


@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "gelu"])
def test_gradients_of_an_mlp_and_of_a_probability(gated: bool) -> None:
    def function(x: torch.Tensor, scale: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        names = ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight")
        given = _weights(dict(zip(names, weights, strict=True)))
        return layers.mlp(x, given, EXACT, gated, scale)[0]

    x, rows = _values("normed", 2, 4), 10 if gated else 5
    weights = _values("fc1", rows, 4), _values("b", rows), _values("fc2", 4, 5)
    assert _has_right_gradients(function, x, _values("scale", 2, 1), *weights)


@pytest.mark.parametrize("softmax_first", [True, False], ids=["before-top-k", "after-top-k"])
def test_gradients_of_a_router(softmax_first: bool) -> None:
    x, weight = _values("normed", 2, 1, 4), _values("router", 3, 4)
    chosen = best(x @ weight.T, 2)
    assert _has_right_gradients(
        lambda x, weight: layers.router_probabilities(
            layers.router_logits(x, weight, EXACT), chosen, EXACT, softmax_first
        ),
        x,
        weight,
    )


def test_gradients_of_the_mixer_and_of_cross_entropy() -> None:
    assert _has_right_gradients(
        lambda x, entry, end: layers.decay_mixer(
            x, _weights({"in_proj.weight": entry, "out_proj.weight": end}), EXACT
        )[0],
        _values("normed", 2, 1, 4),
        _values("in", 8, 4),
        _values("out", 4, 4),
    )
    labels = inputs.tokens("reference labels", (BATCH, SEQUENCE), 5)
    logits = _values("logits", SEQUENCE, BATCH, 5, limit=5.0)
    assert _has_right_gradients(lambda logits: layers.cross_entropy(logits, labels), logits)


@over_tiny_stacks
def test_gradients_of_whole_stacks(stack: Stack) -> None:
    weights, tokens, routed = _tiny_weights(stack), _tiny_tokens(stack), _routed(stack)
    names = list(weights)

    def loss(*values: torch.Tensor) -> torch.Tensor:
        return _composed(Reference(stack, dict(zip(names, values, strict=True))), tokens, routed)

    # One direction a parameter: random ones, in which an error of any element shows.
    assert _has_right_gradients(loss, *weights.values(), along_each=False)


# Layer by layer and in one piece


def _walked(
    stack: Stack, weights: dict[str, torch.Tensor], tokens: Tokens, arithmetic: Arithmetic = EXACT,
    routed: Routed | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """Walk a stack; give the losses and the gradients."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    walk = Walk(Reference(stack, leaves, arithmetic), tokens)
    blocks = walk.reference.blocks
    for block in blocks:
        walk.enter(block)
        for _ in range(stack.layers):
            # Nothing holds a graph that is wider than a layer.
            assert not walk.advance(block, routed).requires_grad
    losses = walk.losses()
    for block in reversed(blocks):
        walk.turn(block)
        for _ in range(stack.layers):
            walk.retreat(block)
        walk.leave(block)
    return losses, walk.gradients


@over_tiny_stacks
@pytest.mark.parametrize("replayed", [True, False], ids=["replayed-routing", "own-routing"])
def test_a_walk_gives_the_gradients_of_one_pass(stack: Stack, replayed: bool) -> None:
    """Only the order may differ in which the parts of a gradient are summed.

    A parameter or the context has a part from each of at most 2 (layers + 1) uses, the stream from
    each of at most four within a layer: together under 32 additions.
    """
    weights, tokens = _tiny_weights(stack), _tiny_tokens(stack)
    routed = _routed(stack) if replayed else None
    losses, gradients = _walked(stack, weights, tokens, routed=routed)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    loss = _composed(Reference(stack, leaves), tokens, routed)
    loss.backward()
    assert float(losses.mean()) == float(loss.detach())
    assert gradients.keys() == leaves.keys()
    for name, leaf in leaves.items():
        exact = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        error = torch.linalg.vector_norm(gradients[name] - exact)
        assert error <= gamma(32, 2.0**-53) * torch.linalg.vector_norm(exact), name


def test_an_expert_that_nobody_chose_has_no_gradient() -> None:
    stack = TINY["experts"]
    _, gradients = _walked(stack, _tiny_weights(stack), _tiny_tokens(stack), routed=_routed(stack))
    place = "decoder.layers.1.mlp.experts.local_experts"
    for name, gradient in gradients.items():
        if name.startswith(f"{place}.2."):
            assert not gradient.any(), name
        elif name.startswith(place):
            assert gradient.any(), name


# Arithmetic

NARROW = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_what_is_kept_is_rounded_and_so_is_its_gradient(dtype: torch.dtype) -> None:
    x, upstream = _values("x", 1000, limit=4.0), _values("upstream", 1000, limit=4.0)
    x.requires_grad_()
    kept = Arithmetic(compute=dtype).kept(x)
    kept.backward(upstream)
    for seen, exact in ((kept.detach(), x.detach()), (x.grad, upstream)):
        assert seen.dtype == torch.float64
        assert torch.equal(seen, exact.to(dtype).double())
        # Torch rounds to bf16 and fp16 by way of fp32, which a run does too: 2^-24 more at most.
        u = unit_roundoff(dtype) + (0 if dtype == torch.float32 else 2.0**-24)
        assert ((seen - exact).abs() <= u * exact.abs()).all()
        assert not torch.equal(seen, exact)


def test_each_dtype_is_for_its_own_places() -> None:
    x = _values("x", 100)
    dtypes = torch.bfloat16, torch.float32, torch.float16
    a = Arithmetic(*dtypes)
    for place, dtype in zip((a.kept, a.in_stream, a.in_router), dtypes, strict=True):
        assert torch.equal(place(x), x.to(dtype).double())


def test_exact_arithmetic_gives_back_what_it_gets() -> None:
    x = _values("x", 10)
    assert all(place(x) is x for place in (EXACT.kept, EXACT.in_stream, EXACT.in_router))


@over_tiny_stacks
def test_rounding_to_fp64_is_no_rounding(stack: Stack) -> None:
    weights, tokens, wide = _tiny_weights(stack), _tiny_tokens(stack), torch.float64
    exact, gradients = _walked(stack, weights, tokens, EXACT)
    losses, same = _walked(stack, weights, tokens, Arithmetic(wide, wide, wide))
    assert torch.equal(losses, exact)
    # What is kept apart on the way back is summed in another order, as above. A single parameter's
    # gradient may have cancelled to next to nothing: it is their length together that bounds it.
    names = list(gradients)
    all_same, all_exact = (torch.cat([g[n].flatten() for n in names]) for g in (same, gradients))
    error = torch.linalg.vector_norm(all_same - all_exact)
    assert error <= gamma(32, 2.0**-53) * torch.linalg.vector_norm(all_exact)


@over_tiny_stacks
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_promised_drift_is_a_few_roundoffs(stack: Stack, dtype: torch.dtype) -> None:
    """Weights are rounded, which no sum undoes; at most so many roundings lie on a path.

    A layer of three branches keeps at most 10 tensors a branch, on the way forward and back.
    """
    weights = {n: w.to(dtype).double() for n, w in _tiny_weights(stack).items()}
    tokens, routed = _tiny_tokens(stack), _routed(stack)
    _, exact = _walked(stack, weights, tokens, routed=routed)
    promise = Arithmetic(compute=dtype, stream=torch.float32, router=dtype)
    _, promised = _walked(stack, weights, tokens, promise, routed)
    seen, exact_all = (torch.cat([g[n].flatten() for n in weights]) for g in (promised, exact))
    found = drift(seen, exact_all, dtype).normwise
    print(f"{found:.2f} u")
    blocks = len(Reference(stack, weights).blocks)
    assert 0.25 < found < 2 * 10 * 3 * (blocks * stack.layers + 1)


# Measures

HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def _row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_unit_roundoff(dtype: torch.dtype) -> None:
    assert unit_roundoff(dtype) == HALF_ULP[dtype]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_drift_of_what_is_exact_is_zero(dtype: torch.dtype) -> None:
    for values in (_row(1.0, -2.0, 0.0), _row(0.0, 0.0), _row()):
        assert drift(values.to(dtype), values, dtype) == Drift(0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("power", [-3, 0, 5])
def test_drift_of_one_unit_in_the_last_place(dtype: torch.dtype, power: int) -> None:
    exact = _row(2.0**power)
    up = _row(2.0**power * (1 + 2 * HALF_ULP[dtype]))
    down = _row(2.0**power * (1 - HALF_ULP[dtype]))
    assert drift(up.to(dtype), exact, dtype) == Drift(2.0, 2.0, 0.0, 1.0)
    # Below a power of two numbers lie twice as close, and the unit is that of the exact one.
    assert drift(down.to(dtype), exact, dtype) == Drift(1.0, 1.0, 0.0, 0.5)
    almost = _row(2.0 ** (power + 1) * (1 - HALF_ULP[dtype]))
    assert drift(_row(2.0 ** (power + 1)), almost, dtype).ulps == 1.0


def test_drift_by_norm_and_by_component() -> None:
    u = 2.0**-24
    found = drift(_row(3.0, 4.0 + 10 * u), _row(3.0, 4.0), torch.float32)
    assert found.normwise == 2.0
    assert found.componentwise == 2.5
    assert found.ulps == 10 * u / (4 * 2 * u)
    # The part across (3, 4) is 10 u times 3/5, and half its square over 5^2 is 1 - cos.
    assert found.cosine == pytest.approx((6 / 5) ** 2 / 2, rel=1e-6)


def test_cosine_of_a_turn_and_of_a_change_in_length() -> None:
    u = 2.0**-8
    exact = _row(1.0, 0.0)
    longer, opposite = (drift(x, exact, torch.bfloat16) for x in (2 * exact, -exact))
    assert (longer.cosine, longer.normwise) == (0.0, 1 / u)
    assert (opposite.cosine, opposite.normwise, opposite.componentwise) == (2 / u**2, 2 / u, 2 / u)
    turned = drift(_row(math.cos(1e-6), math.sin(1e-6)), exact, torch.bfloat16)
    assert turned.cosine * u**2 == pytest.approx(5e-13, rel=1e-9)


def test_drift_from_zero() -> None:
    some = drift(_row(1.0, 1e-3), _row(1.0, 0.0), torch.float32)
    assert some.componentwise == math.inf
    assert some.normwise == pytest.approx(1e-3 * 2**24)
    assert some.ulps == pytest.approx(1e-3 * 2.0**149)
    assert drift(_row(1.0), _row(0.0), torch.float32).normwise == math.inf
    gone = drift(_row(0.0, 0.0), _row(3.0, 4.0), torch.float32)
    assert (gone.normwise, gone.componentwise) == (2.0**24, 2.0**24)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_drift_of_what_is_no_number_is_never_small(value: float) -> None:
    found = drift(_row(1.0, value), _row(1.0, 1.0), torch.float32)
    for measure in (found.normwise, found.componentwise, found.cosine, found.ulps):
        assert not measure <= 1e30


def test_gamma() -> None:
    assert gamma(0, 2.0**-8) == 0
    assert gamma(1, 2.0**-8) == 1 / 255
    assert gamma(128, 2.0**-8) == 1.0
    for count in (256, 1000):
        with pytest.raises(ValueError, match=f"gamma_{count} "):
            gamma(count, 2.0**-8)


# Against a Megatron that computes in fp32


def _in_fp32(name: str, **fields: Any) -> Case:
    each = case(name)
    return replace(each, stack=replace(each.stack, compute_dtype="float32", **fields))


FP32 = {
    each.stack.name: each
    for each in (
        _in_fp32("dense"),
        _in_fp32("dense-rms-swiglu-gqa-rope"),
        _in_fp32("dense-swiglu-bias-gqa"),
        _in_fp32("moe-alltoall-shared"),
        _in_fp32("moe-allgather", softmax_before_top_k=True, router_dtype="fp32"),
        _in_fp32("hybrid"),
        _in_fp32("cross-attention"),
        _in_fp32("cross-attention-rms-swiglu-rope"),
    )
}
SMALL_STREAM = ("dense", "dense-rms-swiglu-gqa-rope")

over_fp32_cases = pytest.mark.parametrize("name", FP32)


@pytest.fixture(scope="module")
def recorded(newest_release: Path) -> dict[str, Recorded]:
    """What Megatron computes in fp32, by the stack's name."""
    return _record(newest_release, list(FP32), 1.0)


@pytest.fixture(scope="module")
def recorded_small(newest_release: Path) -> dict[str, Recorded]:
    """The same from a stream that is small enough for a norm's epsilon to count."""
    return _record(newest_release, SMALL_STREAM, 2.0**-3)


def _record(root: Path, names: Any, embedding_scale: float) -> dict[str, Recorded]:
    (result,) = run_ranks(record, 1, [FP32[name] for name in names], root, embedding_scale)
    assert result.error is None, result.error.traceback
    assert result.value is not None
    return dict(zip(names, result.value, strict=True))


# How long the inner products are that lie one after another on a path through a branch, on the way
# forward and on the way back. A sum over tokens is as long as the sequence, a norm is one of h.


def _lengths(stack: Stack, kind: str, other: int) -> tuple[list[int], list[int]]:
    h, size, inner = stack.hidden, stack.hidden // stack.heads, 2 * stack.hidden
    pair = 2 if stack.gated else 1
    if kind == "mamba":
        return [h, h, other, h], [h, other, 2 * h, h]
    if kind in ("mlp", "experts"):
        # A router and a shared expert lie beside these, and are no longer.
        return [h, h, inner], [h, pair * inner, h]
    rows = 3 * h if kind == "attention" else 2 * h
    # Norm, qkv, scores, softmax, weighted sum, projection; angles of up to s are off by s u.
    rotary = [stack.sequence] if stack.positions == "rope" and kind == "attention" else []
    return [h, h, *rotary, size, other, other, h], [h, size, other, other, *rotary, rows, h]


def _bounds(stack: Stack) -> dict[tuple[str, str, int], float]:
    """Give the bound in u of the stream's error after so many layers, and of its gradient's.

    An inner product of length n is off by sqrt(n) u, where its roundings are independent and zero
    in the mean (Higham and Mary, A new approach to probabilistic rounding error analysis, SIAM J.
    Sci. Comput. 41, 2019). So are those of different products, which therefore add up as squares
    do: a path through products of lengths n_i is off by sqrt(sum n_i) u. A layer neither amplifies
    nor dampens a relative error of its stream, since norms undo its scale.
    """
    decoder, encoder = stack.sequence, stack.encoder_sequence
    bounds, total = {}, 0.0
    blocks = ("encoder", "decoder") if stack.family == "encoder-decoder" else ("decoder",)
    for block in blocks:
        total += 1
        bounds["forward", block, 0] = 1.0
        for number in range(stack.layers):
            for kind in _kinds(stack, block, number):
                crosses = block == "encoder" or kind == "cross attention"
                total += sum(_lengths(stack, kind, encoder if crosses else decoder)[0])
            bounds["forward", block, number + 1] = math.sqrt(total)
        # The norm at the end, and for a decoder the logits and the softmax of the loss.
        total += stack.hidden
        if block == "decoder":
            total += stack.hidden + stack.vocabulary
            bounds["losses", block, 0] = math.sqrt(total)
            total += stack.vocabulary
    for block in reversed(blocks):
        total += stack.hidden
        bounds["backward", block, stack.layers] = math.sqrt(total)
        for number in reversed(range(stack.layers)):
            for kind in _kinds(stack, block, number):
                crosses = block == "encoder" or kind == "cross attention"
                total += sum(_lengths(stack, kind, encoder if crosses else decoder)[1])
            bounds["backward", block, number] = math.sqrt(total)
    # A parameter's gradient is a last sum, over all tokens.
    total += stack.batch * max(decoder, encoder)
    bounds["parameters", "", 0] = math.sqrt(total)
    return bounds


def _in_bounds(each: Case, run: Recorded) -> dict[str, float]:
    """Walk beside what was recorded; give each error in units of its bound, by what it is of."""
    stack, bounds = each.stack, _bounds(each.stack)
    leaves = {name: tensor.double().requires_grad_() for name, tensor in run.weights.items()}
    walk = Walk(Reference(stack, leaves), Tokens(run.tokens, run.labels, run.encoder_tokens))
    found: dict[str, float] = {}

    def compare(what: str, place: tuple[str, str, int], seen: Any, exact: torch.Tensor) -> None:
        assert seen.dtype == torch.float32
        found[what] = drift(seen, exact, torch.float32).normwise / bounds[place]

    def compare_stream(phase: str, block: str, number: int, exact: torch.Tensor) -> None:
        streams = run.streams if phase == "forward" else run.stream_gradients
        what = f"{phase} {block} {number}"
        compare(what, (phase, block, number), streams[block][number], exact)

    blocks = walk.reference.blocks
    for block in blocks:
        compare_stream("forward", block, 0, walk.enter(block))
        for number in range(stack.layers):
            chosen = run.chosen.get(number)
            routed = None if chosen is None else Routed(chosen)
            compare_stream("forward", block, number + 1, walk.advance(block, routed))
    compare("losses", ("losses", "decoder", 0), run.losses, walk.losses())
    for block in reversed(blocks):
        compare_stream("backward", block, stack.layers, walk.turn(block))
        for number in reversed(range(stack.layers)):
            compare_stream("backward", block, number, walk.retreat(block))
        walk.leave(block)
    assert walk.gradients.keys() == run.gradients.keys()
    for name, exact in walk.gradients.items():
        compare(name, ("parameters", "", 0), run.gradients[name], exact)
    return found


@over_fp32_cases
def test_a_megatron_in_fp32_agrees(name: str, recorded: dict[str, Recorded]) -> None:
    found = _in_bounds(FP32[name], recorded[name])
    worst = max(found, key=lambda what: found[what])
    print(f"largest error: {found[worst]:.3f} of its bound, {worst}")
    assert found[worst] <= 1, worst


@pytest.mark.parametrize("name", SMALL_STREAM)
def test_a_megatron_in_fp32_agrees_on_a_small_stream(
    name: str, recorded_small: dict[str, Recorded]
) -> None:
    found = _in_bounds(FP32[name], recorded_small[name])
    worst = max(found, key=lambda what: found[what])
    print(f"largest error: {found[worst]:.3f} of its bound, {worst}")
    assert found[worst] <= 1, worst


@over_fp32_cases
def test_weights_have_the_names_and_shapes_of_a_megatron(
    name: str, recorded: dict[str, Recorded]
) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in recorded[name].weights.items()}
    assert dict(_shapes(FP32[name].stack)) == shapes


@pytest.mark.parametrize("name", ["moe-alltoall-shared", "moe-allgather", "hybrid"])
def test_the_reference_chooses_the_experts_that_a_megatron_chooses(
    name: str, recorded: dict[str, Recorded]
) -> None:
    each, run = FP32[name], recorded[name]
    assert run.chosen
    assert _in_bounds(each, replace(run, chosen={})) == _in_bounds(each, run)


# What would be noticed: each of these is out of bounds tenfold, forward and backward

FAR = 10


def _is_far_out(each: Case, run: Recorded) -> bool:
    found = _in_bounds(each, run)
    phases = {"forward", "backward"}
    worst = {p: max(v for what, v in found.items() if what.startswith(p)) for p in phases}
    print({phase: f"{value:.0f} times the bound" for phase, value in worst.items()})
    return all(value > FAR for value in worst.values())


@pytest.mark.parametrize("name", SMALL_STREAM)
def test_a_wrong_epsilon_is_far_out(
    name: str, recorded_small: dict[str, Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "NORM_EPSILON", 1e-6)
    assert _is_far_out(FP32[name], recorded_small[name])


@pytest.mark.parametrize("name", ["dense-rms-swiglu-gqa-rope", "cross-attention-rms-swiglu-rope"])
def test_a_wrong_rotary_base_is_far_out(
    name: str, recorded: dict[str, Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "ROTARY_BASE", 10100.0)
    assert _is_far_out(FP32[name], recorded[name])


@pytest.mark.parametrize("name", ["dense", "moe-allgather", "hybrid", "cross-attention"])
def test_the_tanh_formula_of_gelu_is_far_out(
    name: str, recorded: dict[str, Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    def erf(scaled: torch.Tensor) -> torch.Tensor:
        x = scaled * math.sqrt(2)
        return torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))

    monkeypatch.setattr(layers.torch, "erf", erf)
    assert _is_far_out(FP32[name], recorded[name])


@pytest.mark.parametrize("name", ["dense-rms-swiglu-gqa-rope", "dense-swiglu-bias-gqa"])
def test_another_order_of_heads_is_far_out(
    name: str, recorded: dict[str, Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    def repeated(tensor: torch.Tensor, count: int, dim: int) -> torch.Tensor:
        return torch.cat([tensor] * count, dim=dim)

    monkeypatch.setattr(torch.Tensor, "repeat_interleave", repeated)
    assert _is_far_out(FP32[name], recorded[name])


@pytest.mark.parametrize("name", ["moe-alltoall-shared", "moe-allgather"])
def test_a_softmax_on_the_other_side_of_the_choice_is_far_out(
    name: str, recorded: dict[str, Recorded]
) -> None:
    each = FP32[name]
    other = replace(each.stack, softmax_before_top_k=not each.stack.softmax_before_top_k)
    assert _is_far_out(replace(each, stack=other), recorded[name])


# Independence

_IMPORTED = """
import sys
import fixtures.oracle.reference
names = ("megatron", "fixtures.runtime", "fixtures.trace", "fixtures.target", "fixtures.contract")
found = [m for m in sys.modules if any(m == n or m.startswith(n + ".") for n in names)]
print(*found)
"""


def test_the_reference_imports_no_megatron_and_nothing_that_does() -> None:
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", _IMPORTED], cwd=root, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == []
