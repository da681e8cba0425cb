"""A task for ranks: at which of many sizes a mutated target is the first to break a rule."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fixtures.cases import Case
from fixtures.contract.accumulation import accumulation
from fixtures.contract.drift import CaseDrift, forward_drift, gradient_drift
from fixtures.contract.stream import StageTrace, every_stream_rule
from fixtures.oracle.decide import SEEDS
from fixtures.runtime.capability import attribute
from fixtures.runtime.drift import drift_with_seeds
from fixtures.runtime.step import observe, target_loaded


def first_broken(context: Any, cases: Sequence[Case], root: Path) -> tuple[Case, list[str]] | None:
    """Give the first case that breaks a rule of the stream or of drift, with all that it breaks."""
    with target_loaded(root):
        for case in cases:
            rules = _broken(context, case, root)
            if rules:
                return case, rules
        return None


def _broken(context: Any, case: Case, root: Path) -> list[str]:
    destroy = attribute("megatron.core.parallel_state", "destroy_model_parallel")
    traces = [StageTrace(0, 0, observe(context, case, root).trace)]
    found = [*every_stream_rule(case, traces), *accumulation(case, traces)]
    destroy()
    if not case.mode.dropout:
        drifts = [CaseDrift(case, drift_with_seeds(case, range(SEEDS), root))]
        found += [*forward_drift(drifts), *gradient_drift(drifts)]
        destroy()
    return sorted({violation.rule for violation in found})
