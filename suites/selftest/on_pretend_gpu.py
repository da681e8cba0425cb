"""Tasks for ranks: another task on a pretended GPU, or with something that is not moved there."""

import importlib
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

# A mode's class asks once, when it is made, whether anything may be compiled under it.
import fixtures.trace.lineage
import fixtures.trace.operations  # noqa: F401
from fixtures.contract.add import add_cells
from fixtures.properties.examples import AddExample
from fixtures.runtime import probe, tasks
from fixtures.runtime.properties import adds
from suites.selftest.pretend_gpu import pretend_gpu


def pretended(context: Any, task: Any, *arguments: Any) -> Any:
    """Run a task of the gate's as if this rank had a GPU."""
    with pretend_gpu():
        return task(context, *arguments)


def with_one_not_moved(context: Any, module: str, task: Any, *arguments: Any) -> Any:
    """Run a task with what a module makes for the target left on the CPU."""
    forgetful = importlib.import_module(module)
    with mock.patch.object(forgetful, "here", return_value=torch.device("cpu")):
        return pretended(context, task, *arguments)


def with_nothing_brought_back(context: Any, task: Any, *arguments: Any) -> Any:
    """Run a task with nothing copied to the CPU before it is judged there."""
    with pretend_gpu(), mock.patch.object(torch.Tensor, "cpu", lambda tensor: tensor):
        return task(context, *arguments)


def values_of_golden(context: Any, *arguments: Any) -> Any:
    """Run a stack for its recorded values, and give what does not tell where it was run."""
    return replace(tasks.run_golden(context, *arguments), backend="", operations=())


def operands_of_adds(_context: Any) -> set[bool]:
    """Say whether all that adds are called with is on the GPU."""
    cell = next(each for each in add_cells() if each.bias is not None)
    elements = ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    examples = [
        AddExample("bfloat16", "float32", elements, "bfloat16", rows=2, view=view)
        for view in ("dense", "transposed", "strided", "broadcast")
    ]
    with pretend_gpu() as gpu:
        made = [*probe._operands(cell)]
        for example in examples:
            made += vars(adds._operands(example)).values()
        return {gpu.has(each) for each in made}
