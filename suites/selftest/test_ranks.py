"""Rank processes: every way for a rank to end is told, and nothing is left behind."""

import ast
import errno
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Client, Listener
from pathlib import Path

from fixtures.runtime.processes import OUTPUT_LIMIT, await_end
from fixtures.runtime.ranks import RankContext, ReportError, run_ranks

PATIENCE = 20.0


def test_every_rank_returns_its_own_value() -> None:
    results = run_ranks(_add_rank, 3, 40)
    assert [result.outcome for result in results] == ["returned"] * 3
    assert [result.value for result in results] == [40, 41, 42]
    assert [result.rank for result in results] == [0, 1, 2]


def test_ranks_share_a_process_group() -> None:
    assert [result.value for result in run_ranks(_sum_of_ranks, 4)] == [6.0] * 4


def test_ranks_compute_on_one_thread() -> None:
    assert [result.value for result in run_ranks(_threads, 2)] == [1, 1]


def test_ranks_talk_beside_the_process_group() -> None:
    assert [result.value for result in run_ranks(_greet_peers, 3)] == [{1, 2}, {0, 2}, {0, 1}]


def test_values_larger_than_any_pipe_come_back() -> None:
    size = 8 << 20
    assert [len(result.value or b"") for result in run_ranks(_large_value, 2, size)] == [size] * 2


def test_a_raised_exception_comes_with_message_and_source_line() -> None:
    (result,) = run_ranks(_raise_after_print, 1)
    assert result.outcome == "raised"
    assert result.error is not None
    assert (result.error.kind, result.error.message) == ("ValueError", "no such dtype")
    last = result.error.frames[-1]
    assert (last.file, last.text) == (__file__, 'raise ValueError("no such dtype")')
    assert last.text in result.error.traceback


def test_a_value_that_cannot_travel_is_an_error_of_its_rank() -> None:
    (result,) = run_ranks(_lock, 1)
    assert result.outcome == "raised"
    assert result.error is not None
    assert "pickle" in result.error.message


def test_only_our_own_exceptions_come_as_they_are() -> None:
    (ours,) = run_ranks(_raise_ours, 1)
    (foreign,) = run_ranks(_raise_foreign, 1)
    assert ours.error is not None
    assert isinstance(ours.error.exception, Ours)
    assert foreign.error is not None
    assert foreign.error.exception is None
    assert foreign.error.message.startswith("its message cannot be had: ")


def test_an_error_is_whole_characters_and_not_too_many() -> None:
    (result,) = run_ranks(_raise_garbage, 1)
    assert result.error is not None
    message = result.error.message
    assert message.startswith(r"\udcff")
    assert len(message) < 100_000 < len(_GARBAGE)
    message.encode()


def test_a_rank_that_finds_no_room_for_its_report_says_so() -> None:
    try:
        run_ranks(_fill_the_disk, 1)
    except ReportError as error:  # ranks import this module, and pytest would cost them
        assert "rank 0 cannot leave its report: [Errno 28]" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a report without room")


def test_output_has_a_limit() -> None:
    (result,) = run_ranks(_write_for_ever, 1)
    assert result.value == (errno.EFBIG, OUTPUT_LIMIT)
    assert len(result.output) < 100_000


def test_output_is_captured_below_python() -> None:
    (result,) = run_ranks(_write_everywhere, 1)
    assert [word for word in ("print", "stderr", "descriptor") if word not in result.output] == []


def test_a_rank_that_dies_names_its_signal_and_where_it_stood() -> None:
    (result,) = run_ranks(_abort, 1)
    assert (result.outcome, result.signal) == ("died", "SIGABRT")
    assert result.error is not None
    assert result.error.frames[-1].text == "os.abort()"


def test_a_rank_that_exits_without_a_word_has_died() -> None:
    (result,) = run_ranks(_exit, 1)
    assert (result.outcome, result.exit_code, result.signal) == ("died", 7, None)


def test_ranks_that_wait_for_a_failed_one_are_ended_soon() -> None:
    began = time.monotonic()
    failed, waiting = run_ranks(_fail_first, 2, deadline=PATIENCE)
    assert (failed.outcome, waiting.outcome) == ("raised", "ended")
    assert waiting.error is not None
    assert waiting.error.frames[-1].text == "signal.pause()"
    assert time.monotonic() - began < PATIENCE / 2


def test_a_hang_is_reported_with_the_line_it_hangs_on() -> None:
    quick, hung = run_ranks(_hang_last, 2, deadline=0.5)
    assert (quick.outcome, hung.outcome) == ("returned", "hung")
    assert hung.error is not None
    assert hung.error.frames[-1].text == "signal.pause()"
    assert "_hang_last" in hung.error.traceback
    assert 0.5 <= hung.seconds < PATIENCE


def test_a_rank_that_ignores_its_signals_ends_too() -> None:
    (result,) = run_ranks(_ignore_signals, 1, deadline=0.2)
    assert result.outcome == "hung"


def test_no_hanging_process_outlives_the_run() -> None:
    with _pids_of_ranks(2) as (address, pids):
        run_ranks(_pid_then_hang, 2, address, deadline=0.5)
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []


def test_no_returned_process_outlives_the_run() -> None:
    with _pids_of_ranks(2) as (address, pids):
        run_ranks(_pid_then_return, 2, address)
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []


def test_nothing_that_a_rank_has_started_outlives_the_run() -> None:
    for task in (_start_and_return, _start_and_die):
        with _pids_of_ranks(3) as (address, pids):
            run_ranks(task, 1, address)
        assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []


def test_a_copy_of_a_rank_is_no_rank() -> None:
    (result,) = run_ranks(_copy, 1)
    assert result.value == "the rank"


def test_what_a_preload_has_started_outlives_a_run_and_not_the_caller(tmp_path: Path) -> None:
    (tmp_path / "helped.py").write_text(
        "import subprocess, threading\n"
        "HELPER = subprocess.Popen(['sleep', '1000'], start_new_session=True).pid\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
    )
    act = "print([ranks.run_ranks(tasks._state_of_helper, 1)[0].value for _ in range(2)])"
    with _caller("helped", act, tmp_path) as caller:
        said = caller.communicate(timeout=PATIENCE)[0]
    (first, helper), (second, same) = ast.literal_eval(said)
    assert (first, second, helper) == ("S", "S", same)
    assert await_end(helper, 0.0)


def test_a_preload_that_hangs_is_ended_with_the_line_it_hangs_on(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text("import time\ntime.sleep(1000)")
    act = "ranks.run_ranks(tasks._add_rank, 1, 0, patience=1.0)"
    act = (
        f"try: {act}\n"
        "except ranks.RankServerError as error: print(error.ending, error.frames[-1].text)"
    )
    with _caller("hanging", f"exec({act!r})", tmp_path) as caller:
        assert caller.communicate(timeout=PATIENCE)[0] == "hung for 1 s time.sleep(1000)\n"


def test_a_server_that_ends_under_its_ranks_is_not_their_end(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text("import signal\nsignal.alarm(1)")
    act = "ranks.run_ranks(tasks._hang_last, 1)"
    with _caller("leaving", act, tmp_path) as caller:
        assert "RankServerError" in (said := caller.communicate(timeout=PATIENCE)[1])
    assert "ended (SIGALRM)" in said


def test_no_process_outlives_a_killed_caller() -> None:
    with _caller_of_hanging_ranks() as (caller, watched):
        caller.kill()
        assert _all_end(watched, PATIENCE)


def test_an_interrupted_caller_leaves_at_once() -> None:
    with _caller_of_hanging_ranks() as (caller, watched):
        caller.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in caller.communicate(timeout=PATIENCE / 4)[1]
        assert _all_end(watched, 0.0)


def test_the_server_preloads_with_the_import_path_of_its_caller(tmp_path: Path) -> None:
    (tmp_path / "witness.py").write_text("import os\nPID = os.getpid()\n")
    act = "print(ranks.run_ranks(tasks._witness, 1)[0].value)"
    with _caller("witness", act, tmp_path) as caller:
        assert caller.communicate(timeout=PATIENCE)[0].strip() == "imported by another process"


def test_a_preload_that_breaks_the_server_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no server today')")
    with _caller("broken", "ranks.run_ranks(tasks._add_rank, 1, 0)", tmp_path) as caller:
        said = caller.communicate(timeout=PATIENCE)[1]
    assert "RankServerError" in said
    assert "which imports broken, ended (exit status 1): RuntimeError: no server today" in said


def test_a_preload_that_does_not_import_is_an_error_of_every_rank() -> None:
    act = "print([r.error.kind for r in ranks.run_ranks(tasks._add_rank, 2, 0)])"
    with _caller("absent", act) as caller:
        said = caller.communicate(timeout=PATIENCE)[0]
    assert said.strip() == str(["ModuleNotFoundError"] * 2)


def test_a_world_without_ranks_is_refused() -> None:
    for size in (0, -1):
        try:
            run_ranks(_add_rank, size, 1)
        except ValueError as error:  # ranks import this module, and pytest would cost them
            assert "at least one rank" in str(error)  # noqa: PT017
        else:
            raise AssertionError(f"a world of {size} ranks")


@contextmanager
def _pids_of_ranks(count: int) -> Iterator[tuple[str, list[int]]]:
    """An address for ranks to report to, and the process ids that have come in by the end."""
    pids: list[int] = []
    with Listener() as listener:
        clerk = threading.Thread(target=_accept_pids, args=(listener, pids, count), daemon=True)
        clerk.start()
        yield str(listener.address), pids
        clerk.join(PATIENCE)
    assert len(pids) == count


def _accept_pids(listener: Listener, pids: list[int], count: int) -> None:
    for _ in range(count):
        with listener.accept() as client:
            pids.append(client.recv())


@contextmanager
def _caller(preload: str, act: str, *path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that runs ranks, forked from a server that preloads something else."""
    entries = [str(entry) for entry in path] + sys.path
    code = (
        f"import sys; sys.path[:] = {entries!r}; import {__name__} as tasks; "
        f"from fixtures.runtime import ranks; ranks.PRELOAD = {preload!r}; {act}"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as caller:
        try:
            yield caller
        finally:
            caller.kill()


@contextmanager
def _caller_of_hanging_ranks() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process whose two ranks are known to hang, and a descriptor for each of these."""
    with ExitStack() as stack:
        with _pids_of_ranks(2) as (address, pids):
            act = f"ranks.run_ranks(tasks._pid_then_hang, 2, {address!r}, deadline=600)"
            caller = stack.enter_context(_caller("os", act))
        yield caller, [os.pidfd_open(pid) for pid in pids]


def _all_end(descriptors: list[int], timeout: float) -> bool:
    """Whether all processes end in time. Closes the descriptors, and ends what is left."""
    limit = time.monotonic() + timeout
    ended = []
    for descriptor in descriptors:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if poll.poll(max(limit - time.monotonic(), 0) * 1000):
            ended.append(descriptor)
        else:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)
    return len(ended) == len(descriptors)


# Tasks


def _add_rank(context: RankContext, offset: int) -> int:
    return context.rank + offset


def _sum_of_ranks(context: RankContext) -> float:
    import torch

    context.init_process_group()
    total = torch.tensor(float(context.rank))
    torch.distributed.all_reduce(total)
    return total.item()


def _threads(context: RankContext) -> int:
    import torch

    return torch.get_num_threads()


def _greet_peers(context: RankContext) -> set[int]:
    for peer in context.peers.values():
        peer.send(context.rank)
    return {peer.recv() for peer in context.peers.values()}


def _large_value(context: RankContext, size: int) -> bytes:
    return bytes(size)


class Ours(Exception):
    """An exception of the suite's."""


class Foreign(Exception):
    """An exception that fails again when it is asked what it is."""

    __module__ = "elsewhere"

    def __str__(self) -> str:
        raise ZeroDivisionError


_GARBAGE = "\udcff" * 200_000


def _raise_ours(context: RankContext) -> None:
    raise Ours


def _raise_foreign(context: RankContext) -> None:
    raise Foreign


def _raise_garbage(context: RankContext) -> None:
    raise ValueError(_GARBAGE)


def _fill_the_disk(context: RankContext) -> None:
    (context.directory / f"report.{context.rank}").symlink_to("/dev/full")


def _write_for_ever(context: RankContext) -> tuple[int | None, int]:
    written = 0
    try:
        while True:
            written += os.write(1, bytes(1 << 20))
    except OSError as error:
        return error.errno, written


def _start_all(address: str) -> None:
    """Start a thread, a child, one in a session of its own, and one whose parent is gone."""
    threading.Thread(target=threading.Event().wait).start()
    if os.fork() == 0:
        _pid_then_hang_alone(address)
    if os.fork() == 0:
        os.setsid()
        _pid_then_hang_alone(address)
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            _pid_then_hang_alone(address)
        os._exit(0)
    os.waitpid(middle, 0)


def _pid_then_hang_alone(address: str) -> None:
    with Client(address) as client:
        client.send(os.getpid())
        client.recv()
    signal.pause()


def _start_and_return(context: RankContext, address: str) -> None:
    _start_all(address)


def _start_and_die(context: RankContext, address: str) -> None:
    _start_all(address)
    os._exit(3)


def _copy(context: RankContext) -> str:
    copy = os.fork()
    if copy:
        os.waitpid(copy, 0)
    return "the rank" if copy else "a copy"


def _state_of_helper(context: RankContext) -> tuple[str, int]:
    helper = sys.modules["helped"].HELPER
    with open(f"/proc/{helper}/stat") as file:
        return file.read().split()[2], helper


def _raise_after_print(context: RankContext) -> None:
    raise ValueError("no such dtype")


def _lock(context: RankContext) -> object:
    return threading.Lock()


def _write_everywhere(context: RankContext) -> None:
    print("print", end="")
    print("stderr", end="", file=sys.stderr)
    os.write(2, b"descriptor")


def _abort(context: RankContext) -> None:
    os.abort()


def _exit(context: RankContext) -> None:
    os._exit(7)


def _fail_first(context: RankContext) -> None:
    if context.rank == 0:
        raise RuntimeError
    signal.pause()


def _hang_last(context: RankContext) -> None:
    if context.rank == context.world_size - 1:
        signal.pause()


def _witness(context: RankContext) -> str:
    imported_by = sys.modules["witness"].PID
    return (
        "imported by this process" if imported_by == os.getpid() else "imported by another process"
    )


def _ignore_signals(context: RankContext) -> None:
    ours = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGABRT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ours)
    threading.Event().wait()


def _pid_then_hang(context: RankContext, address: str) -> None:
    _pid_then_return(context, address)
    signal.pause()


def _pid_then_return(context: RankContext, address: str) -> None:
    with Client(address) as client:
        client.send(os.getpid())
