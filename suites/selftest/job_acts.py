"""What test_job has the processes of a job do, and tell: `python -m suites.selftest.job_acts ACT`.

Worlds of two sizes follow each other, so that processes get ahead of one another.
"""

import os
import sys
import time

from fixtures.runtime import ranks
from fixtures.runtime.job import JobError, current_job
from fixtures.runtime.rank_results import RankContext, RankResult

_ODD_ONE = 1


def sums(context: RankContext) -> float:
    """Add up the numbers of all ranks over gloo."""
    import torch
    import torch.distributed

    context.init_process_group()
    total = torch.tensor(float(context.rank))
    torch.distributed.all_reduce(total)
    return total.item()


def raises(context: RankContext) -> None:
    """Raise on one rank, while the others wait for it."""
    if context.rank == _ODD_ONE:
        raise ValueError("not me")
    sums(context)


def dies(context: RankContext) -> None:
    """Exit on one rank, while the others wait for it."""
    if context.rank == _ODD_ONE:
        os._exit(7)
    time.sleep(60)


def hangs(context: RankContext) -> None:
    """Stay on one rank."""
    if context.rank == _ODD_ONE:
        time.sleep(60)


def _told(result: RankResult[object]) -> str:
    left: object = result.value
    if result.outcome == "raised" and result.error is not None:
        left = f"{result.error.kind}: {result.error.message}"
    if result.outcome == "died":
        left = result.exit_code
    return f"{result.rank} {result.outcome} {left}"


def _tell(words: str) -> None:
    """Write a line in one piece: other processes write to the same pipe."""
    os.write(sys.stdout.fileno(), f"told: {words}\n".encode())


def main(act: str) -> None:
    """Run small worlds, then the act on one of all ranks, and tell how each rank ended."""
    ranks.PRELOAD = "torch.distributed"
    job = current_job()
    assert job is not None
    for size in (1, 2, 3, 1):
        assert [each.value for each in ranks.run_ranks(sums, size)] == [sum(range(size))] * size
    if act == "leaves":
        if job.rank == _ODD_ONE:
            return
        act = "sums"
    task = {"sums": sums, "raises": raises, "dies": dies, "hangs": hangs}[act]
    try:
        results = ranks.run_ranks(task, job.size, deadline=6.0)
    except JobError as error:
        _tell(f"JobError: {error}")
    else:
        _tell(", ".join(map(_told, results)))


if __name__ == "__main__":
    from suites.selftest import job_acts

    # Ranks import the tasks, so they have to live in a module with a name.
    job_acts.main(sys.argv[1])
