"""The wire: what is sent and received is recorded as it was, and what can't meet is stopped."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

# Taken before any watch begins, as a Megatron's own modules do.
from torch.distributed import irecv as early_irecv
from torch.distributed import isend as early_isend
from torch.distributed.distributed_c10d import batch_isend_irecv as early_batch

from fixtures.runtime.ranks import RankContext, RankResult, run_ranks
from fixtures.trace.digest import digest
from fixtures.trace.messages import (
    Channel,
    Message,
    MessageEnd,
    WireMismatch,
    WireRecord,
    WireUnmatched,
    pair,
)
from fixtures.trace.source import Locator
from fixtures.trace.wire import Wire, watch_wire

SHORT = 0.3
LONG = 20.0


def test_a_message_is_recorded_at_both_ends() -> None:
    (message,) = _messages(_send_one)
    assert (message.status, message.intact, message.kind) == ("matched", True, "gradient")
    assert message.send is not None
    assert message.receive is not None
    assert message.send.channel == message.receive.channel
    assert (message.send.rank, message.send.peer) == (0, 1)
    assert (message.receive.rank, message.receive.peer) == (1, 0)
    assert message.receive.kind == message.send.kind
    for end in (message.send, message.receive):
        assert (end.dtype, end.shape, end.numel) == ("bfloat16", (2, 3), 6)
        assert end.digest == digest(torch.arange(6, dtype=torch.bfloat16))


def test_both_ends_name_their_source_line() -> None:
    (message,) = _messages(_send_one)
    assert message.send is not None
    assert message.receive is not None
    assert message.send.source is not None
    assert message.receive.source is not None
    assert message.send.source.path == Path(__file__).name
    assert message.send.source.text == "dist.send(_six(), 1)"
    assert message.receive.source.text == "dist.recv(received, 0)"


def test_every_way_to_post_is_seen() -> None:
    messages = _messages(_post_every_way)
    assert [message.status for message in messages] == ["matched"] * 5
    assert all(message.intact for message in messages)
    assert [message.send.sequence for message in messages if message.send] == [0, 1, 2, 3, 4]


def test_watching_leaves_every_bit_as_it_is() -> None:
    watched, bare = (_values(_send_odd_bits, flag) for flag in (True, False))
    assert watched == bare
    assert watched[0] == watched[1]


def test_kinds_are_told_apart() -> None:
    assert [message.kind for message in _messages(_send_kinds, False)] == [
        "activation",
        "activation",
        "gradient",
        "metadata",
    ]


def test_a_forward_only_run_has_no_gradients() -> None:
    kinds = [message.kind for message in _messages(_send_kinds, True)]
    assert kinds == ["activation", "activation", "activation", "metadata"]


def test_messages_keep_to_their_group_and_tag() -> None:
    messages = _messages(_cross_groups_and_tags)
    assert [message.status for message in messages] == ["matched"] * 4
    assert all(message.intact for message in messages)
    assert len({message.send.channel for message in messages if message.send}) == 4


def test_groups_bear_the_same_name_on_all_their_ranks() -> None:
    messages = _messages(_send_within_halves, world_size=4)
    assert [message.status for message in messages] == ["matched"] * 2
    assert [message.send.channel.ranks for message in messages if message.send] == [(0, 1), (2, 3)]


def test_receives_may_be_posted_long_before_their_sends() -> None:
    assert _values(_receive_first) == [None, [0.0, 1.0, 2.0, 3.0]]


def test_a_message_tells_when_it_is_done() -> None:
    assert _values(_ask) == [(False, True, True, [1.0, 1.0])] * 2


def test_collectives_and_new_groups_work_beside_it() -> None:
    assert _values(_collectives) == [6.0] * 4


def test_a_short_send_is_stopped_and_both_ends_named() -> None:
    _assert_mismatch("bfloat16", [4], "float32", [4])


def test_a_long_send_is_stopped_before_it_aborts_the_receiver() -> None:
    _assert_mismatch("float32", [4], "bfloat16", [4])


def test_another_shape_of_the_same_size_is_stopped() -> None:
    _assert_mismatch("float32", [2, 2], "float32", [4])


def test_same_bytes_in_another_dtype_are_stopped() -> None:
    _assert_mismatch("float16", [4], "bfloat16", [4])


def test_a_mismatch_reaches_a_rank_that_waits_for_something_else() -> None:
    faults = _values(_mismatch_behind_another_wait)
    assert ["rank 1 receives from rank 0 float32 [4]" in fault for fault in faults] == [True, True]


def test_nothing_is_received_after_a_mismatch() -> None:
    assert _values(_go_on_after_mismatch) == [[7.0] * 4, [-1.0] * 4]


def test_a_receive_that_nobody_serves_is_named() -> None:
    (fault,) = _faults(_receive_alone)
    assert fault.startswith("rank 1 receives from rank 0 float32 [6] at test_wire.py:")
    assert fault.endswith(f"posted nothing to meet it in {SHORT:g} s")


def test_a_send_that_nobody_takes_is_named() -> None:
    (fault,) = _faults(_send_alone)
    assert fault.startswith("rank 0 sends to rank 1 float32 [6] at test_wire.py:")


def test_a_peer_that_left_is_not_waited_for() -> None:
    began = time.monotonic()
    (fault,) = _faults(_receive_from_one_who_left)
    assert fault.endswith("rank 0 has left without meeting it")
    assert time.monotonic() - began < LONG / 2


def test_a_peer_that_died_is_not_waited_for() -> None:
    dead, survivor = run_ranks(_receive_from_the_dead, 2)
    assert (dead.outcome, survivor.outcome) == ("died", "returned")
    assert str(survivor.value).endswith("rank 0 has left without meeting it")


def test_a_receive_from_any_source_is_refused() -> None:
    result = run_ranks(_receive_from_anybody, 1)[0]
    assert result.error is not None
    assert result.error.message.startswith("a receive from any source")


def test_nothing_stays_behind() -> None:
    assert _values(_leave_traces) == [(True, True, [])] * 2


def test_the_connections_serve_again() -> None:
    records = _values(_two_watches)
    for watch in range(2):
        messages = pair([rank[watch] for rank in records])
        assert [message.status for message in messages] == ["matched"]
        assert messages[0].intact


def test_pairing_finds_the_unmatched_and_the_mismatched() -> None:
    first, second, third = (_end(0, "send", sequence) for sequence in range(3))
    narrow = _end(1, "receive", 1, "bfloat16")
    stray = _end(1, "receive", 7)
    messages = pair([WireRecord(0, (first, second, third)), WireRecord(1, (narrow, stray))])
    assert messages == [
        Message(first, None),
        Message(second, narrow),
        Message(third, None),
        Message(None, stray),
    ]
    statuses = [message.status for message in messages]
    assert statuses == ["unmatched", "mismatched", "unmatched", "unmatched"]


def test_a_message_changed_on_its_way_is_not_intact() -> None:
    assert not Message(_end(0, "send", 0, digest="a"), _end(1, "receive", 0, digest="b")).intact
    assert Message(_end(0, "send", 0, digest="a"), _end(1, "receive", 0, digest="a")).intact


def test_errors_survive_the_way_to_another_process() -> None:
    one, other = run_ranks(_raise_mismatch, 2)
    for result in (one, other):
        assert result.error is not None
        assert isinstance(result.error.exception, WireMismatch)
        assert result.error.exception.local.rank == result.rank
        assert result.error.exception.remote.rank == 1 - result.rank


def test_a_digest_tells_every_bit() -> None:
    zero = torch.zeros(2, 2)
    assert digest(zero) == digest(torch.zeros(4))
    assert digest(zero) != digest(-zero)
    assert digest(torch.arange(4.0).view(2, 2).t()) == digest(torch.tensor([0.0, 2.0, 1.0, 3.0]))
    assert digest(torch.empty(0)) == digest(torch.empty(0, 3))
    assert digest(torch.tensor(1.0)) == digest(torch.ones(1))


def _end(
    rank: int,
    direction: str,
    sequence: int,
    dtype: str = "float32",
    digest: str | None = None,
) -> MessageEnd:
    channel = Channel("0", (0, 1), 0, 1, 0)
    return MessageEnd(rank, direction, channel, sequence, sequence, dtype, (4,), None, digest, None)


def _messages(task: Callable[..., WireRecord], *args: object, world_size: int = 2) -> list[Message]:
    return pair(_values(task, *args, world_size=world_size))


def _values[T](task: Callable[..., T], *args: object, world_size: int | None = None) -> list[T]:
    size = world_size or (4 if task is _collectives else 2)
    return [_value(result) for result in run_ranks(task, size, *args)]


def _value[T](result: RankResult[T]) -> T:
    assert result.outcome == "returned", (result.error and result.error.traceback, result.output)
    return result.value  # type: ignore[return-value]


def _faults(task: Callable[..., str]) -> list[str]:
    """What the ranks complain of, those left out that do not."""
    return [value for value in _values(task) if value]


def _assert_mismatch(sent: str, sent_shape: list[int], taken: str, taken_shape: list[int]) -> None:
    began = time.monotonic()
    for fault in _values(_mismatched, sent, sent_shape, taken, taken_shape):
        assert f"rank 0 sends to rank 1 {sent} {sent_shape} at test_wire.py:" in fault
        assert f"rank 1 receives from rank 0 {taken} {taken_shape} at test_wire.py:" in fault
    assert time.monotonic() - began < LONG / 2


# Tasks


def _watch(
    context: RankContext, forward_only: bool = False, patience: float = LONG
) -> AbstractContextManager[Wire]:
    if not dist.is_initialized():
        context.init_process_group()
    locator = Locator(Path(__file__).parent, package="")
    return watch_wire(
        context.rank, context.peers, locator, forward_only=forward_only, patience=patience
    )


def _six() -> torch.Tensor:
    return torch.arange(6, dtype=torch.bfloat16).view(2, 3)


def _send_one(context: RankContext) -> WireRecord:
    with _watch(context) as wire:
        if context.rank == 0:
            dist.send(_six(), 1)
        else:
            received = torch.zeros(2, 3, dtype=torch.bfloat16)
            dist.recv(received, 0)
            assert torch.equal(received, _six())
    return wire.record()


def _post_every_way(context: RankContext) -> WireRecord:
    other = 1 - context.rank
    sending = context.rank == 0
    tensors = [torch.full((3,), float(n if sending else -1)) for n in range(5)]
    post, early, wait = (
        (dist.isend, early_isend, dist.send)
        if sending
        else (dist.irecv, early_irecv, dist.distributed_c10d.recv)
    )
    with _watch(context) as wire:
        wait(tensors[0], other)
        post(tensors[1], other).wait()
        early(tensors[2], other).wait()
        works = dist.batch_isend_irecv([dist.P2POp(post, tensors[3], other)])
        works += early_batch([dist.P2POp(early, tensors[4], other)])
        for work in works:
            work.wait()
    assert [tensor[0].item() for tensor in tensors] == [0, 1, 2, 3, 4]
    return wire.record()


def _send_odd_bits(context: RankContext, watched: bool) -> str:
    """Signalling and quiet NaN with payload, denormals, both zeros."""
    patterns = [0x7F800001, 0x7FC00123, 0x00000001, -0x80000000, 0x00000000, 0x3F800001]
    bits = torch.tensor(patterns, dtype=torch.int32)
    tensor = bits.view(torch.float32) if context.rank == 0 else torch.ones(6)
    if watched:
        with _watch(context):
            _exchange(context.rank, tensor)
    else:
        context.init_process_group()
        _exchange(context.rank, tensor)
    assert tensor.view(torch.int32).tolist() == patterns
    return digest(tensor)


def _exchange(rank: int, tensor: torch.Tensor) -> None:
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)


def _send_kinds(context: RankContext, forward_only: bool) -> WireRecord:
    leaf = torch.ones(2, requires_grad=True)
    with _watch(context, forward_only) as wire:
        for tensor in (leaf, leaf * 2, torch.ones(2), torch.ones(3, dtype=torch.int64)):
            sent = tensor if context.rank == 0 else torch.zeros_like(tensor)
            _exchange(context.rank, sent)
    return wire.record()


def _cross_groups_and_tags(context: RankContext) -> WireRecord:
    other = 1 - context.rank
    sending = context.rank == 0
    with _watch(context) as wire:
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        routes = [(first, 0), (second, 0), (None, 0), (first, 5)]
        tensors = [torch.full((3,), float(n if sending else -1)) for n in range(4)]
        posts = list(zip(routes, tensors, strict=True))
        post = dist.isend if sending else dist.irecv
        works = [
            post(tensor, other, group=group, tag=tag)
            for (group, tag), tensor in (posts if sending else reversed(posts))
        ]
        for work in works:
            work.wait()
    assert [tensor[0].item() for tensor in tensors] == [0, 1, 2, 3]
    return wire.record()


def _send_within_halves(context: RankContext) -> WireRecord:
    context.init_process_group()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = halves[context.rank // 2]
    with _watch(context) as wire:
        if context.rank % 2 == 0:
            dist.send(torch.ones(2), group=group, group_dst=1)
        else:
            dist.recv(torch.zeros(2), group=group, group_src=0)
    return wire.record()


def _receive_first(context: RankContext) -> list[float] | None:
    with _watch(context):
        if context.rank == 0:
            dist.barrier()
            works = [dist.isend(torch.full((2,), float(n)), 1) for n in range(4)]
            for work in reversed(works):
                work.wait()
            return None
        received = [torch.full((2,), -1.0) for _ in range(4)]
        works = [dist.irecv(tensor, 0) for tensor in received]
        dist.barrier()
        for work in reversed(works):
            work.wait()
        return [tensor[0].item() for tensor in received]


def _ask(context: RankContext) -> tuple[bool, bool, bool, list[float]]:
    tensor = torch.full((2,), float(1 - context.rank))
    with _watch(context):
        post = dist.isend if context.rank == 0 else dist.irecv
        dist.barrier()
        work = post(tensor, 1 - context.rank)
        before = work.is_completed()
        work.wait()
        (filled,) = work.result()
        return before, work.is_completed(), work.is_success(), filled.tolist()


def _collectives(context: RankContext) -> float:
    total = torch.tensor(float(context.rank))
    with _watch(context):
        after, before = (context.rank + 1) % 4, (context.rank - 1) % 4
        received = torch.zeros(1)
        work = dist.irecv(received, before)
        dist.all_reduce(total, group=dist.new_group([0, 1, 2, 3]))
        dist.isend(torch.full((1,), float(context.rank)), after).wait()
        dist.barrier()
        work.wait()
    assert received.item() == before
    return total.item()


def _mismatched(
    context: RankContext, sent: str, sent_shape: list[int], taken: str, taken_shape: list[int]
) -> str:
    with _watch(context):
        try:
            if context.rank == 0:
                dist.isend(torch.ones(sent_shape, dtype=getattr(torch, sent)), 1).wait()
            else:
                dist.irecv(torch.ones(taken_shape, dtype=getattr(torch, taken)), 0).wait()
        except WireMismatch as fault:
            return str(fault)
    return "passed"


def _raise_mismatch(context: RankContext) -> None:
    with _watch(context):
        _exchange(context.rank, torch.ones(4, dtype=(torch.bfloat16, torch.float32)[context.rank]))


def _mismatch_behind_another_wait(context: RankContext) -> str:
    with _watch(context):
        try:
            dtype = torch.bfloat16 if context.rank == 0 else torch.float32
            post = dist.isend if context.rank == 0 else dist.irecv
            post(torch.ones(4, dtype=dtype), 1 - context.rank)
            dist.recv(torch.ones(2), 1 - context.rank, tag=3)
        except WireMismatch as fault:
            return str(fault)
    return "passed"


def _go_on_after_mismatch(context: RankContext) -> list[float]:
    """Post a good pair behind a bad one; what the good receive's buffer then holds."""
    sending = context.rank == 0
    bad = torch.ones(4, dtype=torch.bfloat16 if sending else torch.float32)
    good = torch.full((4,), 7.0 if sending else -1.0)
    with _watch(context):
        post = dist.isend if sending else dist.irecv
        works = [post(tensor, 1 - context.rank) for tensor in (bad, good)]
        for work in works:
            with suppress(WireMismatch):
                work.wait()
        # Messages between two ranks keep their order: what was under way has arrived by then.
        dist.barrier()
        dist.barrier()
    return good.tolist()


def _receive_alone(context: RankContext) -> str:
    return _alone(context, lambda: context.rank == 1 and dist.recv(torch.ones(6), 0), SHORT)


def _send_alone(context: RankContext) -> str:
    return _alone(context, lambda: context.rank == 0 and dist.send(torch.ones(6), 1), SHORT)


def _alone(context: RankContext, act: Callable[[], object], patience: float) -> str:
    """Act while the other rank is there and does not."""
    with _watch(context, patience=patience):
        fault = _fault(act)
        dist.barrier()
    return fault


def _fault(act: Callable[[], object]) -> str:
    try:
        act()
    except WireUnmatched as fault:
        return str(fault)
    return ""


def _receive_from_one_who_left(context: RankContext) -> str:
    with _watch(context):
        return _fault(lambda: context.rank == 1 and dist.recv(torch.ones(6), 0))


def _receive_from_the_dead(context: RankContext) -> str:
    with _watch(context):
        dist.barrier()
        if context.rank == 0:
            os._exit(3)
        return _fault(lambda: dist.recv(torch.ones(6), 0))


def _receive_from_anybody(context: RankContext) -> None:
    with _watch(context):
        dist.irecv(torch.ones(1))


def _leave_traces(context: RankContext) -> tuple[bool, bool, list[str]]:
    before = (dist.ProcessGroup.send, dist.ProcessGroup.recv)
    with _watch(context):
        inside = (dist.ProcessGroup.send, dist.ProcessGroup.recv)
        _exchange(context.rank, torch.ones(2))
    after = (dist.ProcessGroup.send, dist.ProcessGroup.recv)
    threads = [thread.name for thread in threading.enumerate() if thread.name == "wire"]
    return inside != before, after == before, threads


def _two_watches(context: RankContext) -> list[WireRecord]:
    wires: list[Wire] = []
    for _ in range(2):
        with _watch(context) as wire:
            wires.append(wire)
            _exchange(context.rank, torch.ones(2))
    return [wire.record() for wire in wires]
