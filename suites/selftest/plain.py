"""A task for ranks: a case run with or without the tracer, and all that it computed."""

from pathlib import Path
from typing import Any

from fixtures.cases import Case
from fixtures.runtime.step import prepare, step, target_loaded
from fixtures.trace.digest import digest


def computed(context: Any, case: Case, root: Path, traced: bool) -> dict[str, Any]:
    """Give the losses and a digest of every parameter's gradient."""
    with target_loaded(root):
        config, chunks, tracer = prepare(context, case, root)
        if traced:
            with tracer.watch():
                losses = step(case, config, chunks)
        else:
            losses = step(case, config, chunks)
        return {"losses": losses} | {
            f"{number} {name}": digest(parameter.grad)
            for number, chunk in enumerate(chunks)
            for name, parameter in chunk.core.named_parameters()
            if parameter.grad is not None
        }
