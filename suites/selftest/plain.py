"""A task for ranks: a case run with or without the tracer, and all that it computed."""

from pathlib import Path
from typing import Any

from fixtures.cases import Case
from fixtures.runtime import models
from fixtures.runtime.step import initialize_parallel, step, target_loaded
from fixtures.trace.digest import digest
from fixtures.trace.source import Locator
from fixtures.trace.stream import StreamTracer


def computed(context: Any, case: Case, root: Path, traced: bool) -> dict[str, Any]:
    """Give the losses and a digest of every parameter's gradient."""
    with target_loaded(root):
        context.init_process_group()
        initialize_parallel(case)
        config = models.transformer_config(case)
        chunks = models.build(case, config)
        tracer = StreamTracer(
            models.boundaries_of(case, chunks),
            models.branches_of(chunks),
            models.DTYPES[case.stack.compute_dtype],
            Locator(root),
        )
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
