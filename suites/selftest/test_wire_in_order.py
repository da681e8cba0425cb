"""The wire over a backend that keeps order, as NCCL does: played by gloo, which is told to."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work
from torch.distributed.distributed_c10d import _coalescing_manager

from fixtures.runtime.ranks import RankContext, run_ranks
from fixtures.trace import wire as wires
from fixtures.trace.messages import WireMismatch, WireRecord, WireUnmatched, pair
from fixtures.trace.wire import watch_wire

PATIENCE = 0.3


def test_a_receive_is_started_before_its_sender_is_known() -> None:
    records = _records(_receive_first)
    (message,) = pair(records)
    assert (message.status, message.intact, message.kind) == ("matched", True, "gradient")


def test_ends_that_disagree_are_told_before_anybody_waits() -> None:
    assert [each.value for each in run_ranks(_disagree, 2)] == ["WireMismatch"] * 2


def test_an_end_without_another_is_told() -> None:
    assert [each.value for each in run_ranks(_alone, 2)] == ["WireUnmatched", "nothing"]


def test_messages_that_are_taken_in_one_go_are_told_one_by_one() -> None:
    messages = pair(_records(_exchange_in_one_go))
    assert [(m.status, m.intact) for m in messages] == [("matched", True)] * 2
    assert {m.send.rank for m in messages if m.send} == {0, 1}


def test_operations_in_one_go_without_messages_keep_their_handle() -> None:
    assert [each.value for each in run_ranks(_nothing_in_one_go, 2)] == ["_Whole"] * 2


def _records(task: Any) -> list[WireRecord]:
    results = run_ranks(task, 2)
    assert [each.outcome for each in results] == ["returned"] * 2, results[0].error
    return [each.value for each in results if each.value is not None]


@contextmanager
def _ordered(context: RankContext) -> Iterator[wires.Wire]:
    """Watch the wire as if tensors were on GPUs."""
    context.init_process_group()
    with (
        mock.patch.object(wires, "_keeps_order", return_value=True),
        mock.patch.object(wires, "_LOADING", 0.0),
        watch_wire(context.rank, context.peers, patience=PATIENCE) as wire,
    ):
        yield wire


def _receive_first(context: RankContext) -> WireRecord:
    with _ordered(context) as wire:
        if context.rank == 1:
            received = torch.zeros(3)
            work = dist.irecv(received, 0)
            assert wire._operations[0].posted
            dist.barrier()
            work.wait()
            assert received.tolist() == [1.0, 1.0, 1.0]
        else:
            dist.barrier()
            dist.send(torch.ones(3), 1)
    return wire.record()


def _disagree(context: RankContext) -> str:
    try:
        with _ordered(context):
            if context.rank == 0:
                dist.send(torch.ones(4, dtype=torch.bfloat16), 1)
            else:
                dist.recv(torch.zeros(4), 0)
    except WireMismatch as error:
        return type(error).__name__
    return "nothing"


def _alone(context: RankContext) -> str:
    try:
        with _ordered(context):
            if context.rank == 0:
                dist.recv(torch.zeros(4), 1)
    except WireUnmatched as error:
        return type(error).__name__
    return "nothing"


class _Whole(Work):
    """The handle of all that was taken in one go, as NCCL gives it."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        return all(work.wait() for work in self._works)


@contextmanager
def _in_one_go() -> Iterator[None]:
    """Have gloo take operations in one go: it starts them at the end, and gives one handle."""
    waiting: list[Any] = []
    send, receive = ProcessGroup.send, ProcessGroup.recv

    def later(post: Any) -> Any:
        return lambda *arguments: waiting.append(lambda: post(*arguments))

    def begin(_group: ProcessGroup, _device: torch.device) -> None:
        waiting.clear()

    def end(_group: ProcessGroup, _device: torch.device) -> Work:
        return _Whole([post() for post in waiting])

    with (
        mock.patch.object(ProcessGroup, "send", later(send)),
        mock.patch.object(ProcessGroup, "recv", later(receive)),
        mock.patch.object(ProcessGroup, "_start_coalescing", begin),
        mock.patch.object(ProcessGroup, "_end_coalescing", end),
    ):
        yield


def _exchange_in_one_go(context: RankContext) -> WireRecord:
    other = 1 - context.rank
    sent, received = torch.full((3,), float(context.rank)), torch.zeros(3)
    with _in_one_go(), _ordered(context) as wire:
        with _coalescing_manager(None, torch.device("cpu"), async_ops=True) as manager:
            dist.isend(sent, other)
            dist.irecv(received, other)
        for work in manager.works:
            work.wait()
    assert received.tolist() == [float(other)] * 3
    return wire.record()


def _nothing_in_one_go(context: RankContext) -> str:
    with _in_one_go(), _ordered(context):
        with _coalescing_manager(None, torch.device("cpu"), async_ops=True) as manager:
            pass
        return type(manager.works[0]).__name__
