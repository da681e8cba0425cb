"""Bias-dropout-add, called directly in every way that Megatron calls it."""

import pytest

from fixtures.contract.add import add_cells, residual_add
from fixtures.observe import Observer
from fixtures.runtime import tasks
from fixtures.verdict.plugin import Judge

GROUPS = dict.fromkeys(cell.group for cell in add_cells())


@pytest.mark.rule("S6")
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_residual_add(group: str, observer: Observer, judge: Judge) -> None:
    (seen,) = observer.once(
        "add", lambda: observer.run("add", tasks.run_adds, 1, add_cells(), observer.root)
    )
    judge(residual_add([each for each in seen if each.cell.group == group]))
