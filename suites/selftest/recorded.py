"""A task for ranks: cases run once, and all of them that the reference is held against."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fixtures.cases import Case
from fixtures.runtime import models
from fixtures.runtime.capability import attribute
from fixtures.runtime.step import batch, initialize_parallel, step, target_loaded
from fixtures.runtime.weights import global_names
from fixtures.trace.stream import Boundary


@dataclass
class Recorded:
    """What a run computed, in the run's own dtype; streams are [s, b, h].

    Attributes:
        weights, gradients: of the parameters, by their names in the whole stack.
        streams, stream_gradients: by block, one before each layer and one after the last.
        chosen: bool [s, b, experts], by layer.
        tokens, labels, encoder_tokens: the batch.
        losses: [b, s].
    """

    weights: dict[str, torch.Tensor]
    tokens: torch.Tensor
    labels: torch.Tensor
    encoder_tokens: torch.Tensor
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    streams: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    stream_gradients: dict[str, list[torch.Tensor | None]] = field(default_factory=dict)
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: torch.Tensor | None = None


def record(
    context: Any, cases: Sequence[Case], root: Path, embedding_scale: float = 1.0
) -> list[Recorded]:
    """Run cases of one rank one after another; embeddings are scaled, and so the first stream."""
    with target_loaded(root):
        context.init_process_group()
        return [_record(each, embedding_scale) for each in cases]


def _record(case: Case, embedding_scale: float) -> Recorded:
    initialize_parallel(case)
    config = models.transformer_config(case)
    chunks = models.build(case, config)
    core = chunks[0].core
    names = global_names(core)
    parameters = {names[name]: each for name, each in core.named_parameters()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name.startswith("embedding."):
                parameter.mul_(embedding_scale)
    made = batch(case, 0)
    run = Recorded(
        {name: each.detach().clone() for name, each in parameters.items()},
        made.tokens,
        made.labels,
        made.encoder_tokens,
    )
    blocks = ("encoder", "decoder") if hasattr(core, "encoder") else ("decoder",)

    def keep_losses(losses: torch.Tensor) -> None:
        run.losses = losses.clone()

    with ExitStack() as hooks:
        for boundary in models.boundaries_of(case, chunks):
            if boundary.place in ("layer in", "final norm in"):
                hooks.callback(_watch(run, blocks[boundary.chunk], boundary).remove)
        for branch in models.branches_of(case, chunks):
            if branch.kind == "router":
                hooks.callback(_watch_router(run, branch.layer, branch.module).remove)
        step(case, config, chunks, keep_losses)
    for name, parameter in parameters.items():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        run.gradients[name] = gradient.detach().clone()
    attribute("megatron.core.parallel_state", "destroy_model_parallel")()
    return run


def _watch(run: Recorded, block: str, boundary: Boundary) -> Any:
    streams = run.streams.setdefault(block, [])
    gradients = run.stream_gradients.setdefault(block, [])

    def look(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        stream = boundary.take(module, args, kwargs, None)
        number = len(streams)
        streams.append(stream.detach().clone())
        gradients.append(None)

        def keep(gradient: torch.Tensor) -> None:
            gradients[number] = gradient.detach().clone()

        stream.register_hook(keep)

    return boundary.module.register_forward_pre_hook(look, with_kwargs=True)


def _watch_router(run: Recorded, layer: int, router: torch.nn.Module) -> Any:
    def look(_module: Any, args: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        run.chosen[layer] = output[1].detach().reshape(*args[0].shape[:2], -1).bool()

    return router.register_forward_hook(look)
