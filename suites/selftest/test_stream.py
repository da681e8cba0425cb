"""The tracer changes nothing and holds nothing: same bits, flat memory."""

import gc
from pathlib import Path

import pytest
import torch

from fixtures.trace.source import Locator
from fixtures.trace.stream import Boundary, Branch, StreamTracer


class Layer(torch.nn.Module):
    """A residual layer [s, b, h] with one linear branch in bf16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = torch.nn.Linear(width, width, dtype=torch.bfloat16)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.branch(torch.tanh(hidden_states).bfloat16())


def make_layers(count: int, width: int = 16) -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(*(Layer(width) for _ in range(count)))


def make_tracer(layers: torch.nn.Sequential) -> StreamTracer:
    boundaries, branches = [], []
    for number, layer in enumerate(layers):
        boundaries += [
            Boundary("layer in", number, 2 * number, 0, layer, "enter", lambda _m, a, _k, _o: a[0]),
            Boundary("layer out", number, 2 * number + 1, 0, layer, "leave", lambda *seen: seen[3]),
        ]
        branches.append(Branch("MLP", number, layer.branch))
    return StreamTracer(boundaries, branches, torch.bfloat16, Locator(Path("/nowhere")))


def step(layers: torch.nn.Sequential) -> list[torch.Tensor]:
    """Give output and gradients of one forward and backward."""
    layers.zero_grad()
    torch.manual_seed(2)
    stream = torch.randn(4, 2, 16, requires_grad=True)
    out = layers(stream)
    out.square().mean().backward()
    return [out.detach(), stream.grad, *(p.grad.clone() for p in layers.parameters())]


def test_traced_run_gives_the_same_bits() -> None:
    layers = make_layers(3)
    plain = step(layers)
    with make_tracer(layers).watch():
        traced = step(layers)
    after = step(layers)
    for one, other, again in zip(plain, traced, after, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, again)


def test_every_boundary_is_crossed_both_ways() -> None:
    layers = make_layers(3)
    with make_tracer(layers).watch() as trace:
        step(layers)
    forward = [(c.place, c.layer) for c in trace.crossings if c.phase == "forward"]
    backward = [(c.place, c.layer) for c in trace.crossings if c.phase == "backward"]
    assert forward == [(place, n) for n in range(3) for place in ("layer in", "layer out")]
    assert backward == list(reversed(forward))
    assert {c.path for c in trace.crossings} == {"start", "intact"}
    assert trace.products_seen == 3 * 3
    assert trace.products == []


def test_a_second_forward_starts_anew() -> None:
    layers = make_layers(2)
    with make_tracer(layers).watch() as trace:
        step(layers)
        step(layers)
    starts = [(c.phase, c.microbatch) for c in trace.crossings if c.path == "start"]
    assert starts == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]


@pytest.mark.parametrize(
    ("values", "poor", "rows"),
    [
        ([[1.0, 2.0], [1.0 + 2**-20, 2.0]], 1, 2),
        ([[0.0, 0.0], [1.0, 0.5]], 1, 1),
        ([[float("nan"), 1.0], [1 / 3, 1 / 7]], 0, 2),
    ],
)
def test_poor_rows_are_counted(values: list[list[float]], poor: int, rows: int) -> None:
    layer = torch.nn.Identity()
    boundary = Boundary("layer out", 0, 0, 0, layer, "leave", lambda *seen: seen[3])
    tracer = StreamTracer([boundary], [], torch.bfloat16, Locator(Path("/nowhere")))
    with tracer.watch() as trace:
        layer(torch.tensor(values))
    (crossing,) = trace.crossings
    assert (crossing.poor_rows, crossing.rows) == (poor, rows)


def test_storages_held_do_not_grow_with_depth() -> None:
    held = []
    for depth in (4, 16):
        layers = make_layers(depth)
        tracer = make_tracer(layers)
        with tracer.watch(), torch.no_grad():
            layers(torch.randn(4, 2, 16))
        gc.collect()
        held.append(len(tracer._lineage.forward._paths))
    assert held[0] == held[1]
