"""Units of the identity path: what keeps it, what narrows it, what breaks it."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fixtures.trace.lineage import IdentityPath, Lineage
from fixtures.trace.records import Source
from fixtures.trace.source import Locator

Step = Callable[[torch.Tensor], torch.Tensor]
BRANCH = torch.full((4, 2, 8), 0.5)


def trace(step: Step, start: torch.Tensor | None = None) -> IdentityPath | None:
    """Give the path of a tensor [4, 2, 8] through a step."""
    stream = torch.ones(4, 2, 8) if start is None else start
    lineage = Lineage(Locator(Path("/nowhere")))
    lineage.forward.follow(stream)
    with lineage:
        out = step(stream)
    return lineage.forward.path_to(out)


KEPT: dict[str, Step] = {
    "nothing": lambda x: x,
    "addition": lambda x: x + BRANCH,
    "addition from the left": lambda x: BRANCH + x,
    "addition of a narrower branch": lambda x: x + BRANCH.bfloat16(),
    "addition in place": lambda x: x.add_(BRANCH),
    "addition into a branch": lambda x: BRANCH.clone().add_(x),
    "view": lambda x: x.view(8, 8).transpose(0, 1).contiguous(),
    "copy": lambda x: torch.empty_like(x).copy_(x),
    "pieces put together": lambda x: torch.cat([piece + 1.0 for piece in x.chunk(2)]),
    "detour that is not taken": lambda x: x + (x.bfloat16() * 2),
    "narrow copy added to the wide one": lambda x: x + x.bfloat16(),
}

NARROWED: dict[str, Step] = {
    "cast": lambda x: x.bfloat16(),
    "round trip": lambda x: x.bfloat16().float(),
    "round trip through fp16": lambda x: x.half().float() + BRANCH,
    "addition into a narrow branch": lambda x: BRANCH.bfloat16().add_(x),
    "copy into a narrow tensor": lambda x: torch.empty(x.shape, dtype=torch.bfloat16).copy_(x),
    "one narrowed piece": lambda x: torch.cat([x[:2], x[2:].bfloat16().float()]),
}

BROKEN: dict[str, Step] = {
    "norm": lambda x: x * torch.rsqrt(x.square().mean()),
    "matrix product": lambda x: x @ torch.eye(8),
    "multiplication in place": lambda x: x.clone().mul_(2),
    "overwritten": lambda x: x.clone().copy_(BRANCH),
    "something else": lambda x: BRANCH + BRANCH,
    "half of it": lambda x: torch.cat([x[:2], BRANCH[2:]]),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept(name: str) -> None:
    path = trace(KEPT[name])
    assert path is not None
    assert not path.narrowings


@pytest.mark.parametrize("name", NARROWED)
def test_narrowed(name: str) -> None:
    path = trace(NARROWED[name])
    assert path is not None
    assert path.narrowings


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name: str) -> None:
    assert trace(BROKEN[name]) is None


def test_widening_is_a_change_but_no_narrowing() -> None:
    path = trace(lambda x: x.float() + BRANCH, torch.ones(4, 2, 8, dtype=torch.bfloat16))
    assert path is not None
    assert [(change.before, change.after) for change in path.changes] == [("bfloat16", "float32")]
    assert not path.narrowings


def test_line_of_a_narrowing_is_named(tmp_path: Path) -> None:
    module = tmp_path / "megatron" / "layer.py"
    module.parent.mkdir()
    module.write_text("def run(x):\n    y = x + 1\n    return y.half()\n")
    stream = torch.ones(4, 2, 8)
    lineage = Lineage(Locator(tmp_path))
    lineage.forward.follow(stream)
    with lineage:
        out = runpy.run_path(str(module))["run"](stream)
    path = lineage.forward.path_to(out)
    assert path is not None
    assert path.narrowings[0].source == Source("megatron/layer.py", 3, "return y.half()")
