"""What the end of a run means: a finding only where the target did it, and told in one line."""

import signal
from pathlib import Path

import pytest

from fixtures.contract.stream import NothingSeen
from fixtures.endings import GateError, RunFailed, import_failed, refuse
from fixtures.foreign import MOST, cut, first_line, printable
from fixtures.observe import Observer
from fixtures.runtime.rank_results import Frame, Outcome, RankContext, RankError, RankResult
from fixtures.runtime.rank_server import RankServerError
from fixtures.runtime.ranks import run_ranks
from fixtures.target import CannotJudge
from fixtures.trace.source import Locator

ROOT = Path("/target")
FRAME = Frame("/target/megatron/core/block.py", 7, "x = y")
OURS = Frame("/suite/fixtures/step.py", 1, "step()")


def result(outcome: Outcome, error: RankError | None = None, **fields: object) -> RankResult[None]:
    usual = {"rank": 0, "value": None, "exit_code": None, "output": "", "seconds": 5.0}
    return RankResult(outcome=outcome, error=error, **usual | fields)


def raised(kind: str, message: str, *frames: Frame) -> RankResult[None]:
    return result("raised", RankError(kind, message, "Traceback", frames), rank=1)


def ending(*failed: RankResult[None]) -> RunFailed:
    with pytest.raises(RunFailed) as told:
        refuse("dense", failed, Locator(ROOT))
    return told.value


def test_what_a_rank_raises_is_a_violation_at_the_targets_line() -> None:
    violation = ending(raised("ValueError", "\nno\nverdict: ACCEPT", FRAME, OURS)).against("S1")
    assert (violation.rule, violation.subject, violation.rank) == ("S1", "dense", 1)
    assert violation.seen == "raised ValueError: no"
    assert str(violation.source) == "megatron/core/block.py:7"


def test_what_no_line_of_the_target_raised_is_an_error_of_the_gate() -> None:
    with pytest.raises(GateError, match="Traceback"):
        refuse("dense", [raised("ValueError", "no", OURS)], Locator(ROOT))


def test_a_rank_that_died_comes_before_those_that_raised_for_it() -> None:
    died = result("died", exit_code=3, output="loading\nout of luck\n")
    failed = ending(raised("RuntimeError", "connection closed by peer", FRAME), died)
    assert failed.violation.seen == "rank 0 died (exit status 3): out of luck"
    assert ending(result("hung"), died).violation == failed.violation
    assert ending(result("ended"), result("hung")).violation.seen.startswith("rank 0 hung for 5 s")


def test_the_last_words_of_a_rank_are_those_before_its_stacks() -> None:
    stacks = 'no newThread 0x01 (most recent call first):\n  File "a.py", line 1 in f\n'
    died = result("died", exit_code=-signal.SIGABRT, output=f"\x1b[2J first\n{stacks}")
    assert ending(died).violation.seen == "rank 0 died (SIGABRT): no new"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_others_kill_is_no_finding(number: signal.Signals) -> None:
    killed = result("died", exit_code=-number)
    with pytest.raises(NothingSeen, match=rf"rank 0 of dense was killed \({number.name}\)"):
        refuse("dense", [raised("RuntimeError", "closed", FRAME), killed], Locator(ROOT))


@pytest.mark.parametrize("number", [28, 122, 27])
def test_a_full_disk_is_no_finding(number: int) -> None:
    with pytest.raises(NothingSeen, match="dense could not write"):
        refuse("dense", [raised("OSError", f"[Errno {number}] full", FRAME)], Locator(ROOT))
    assert ending(raised("OSError", "[Errno 2] full", FRAME))
    assert ending(raised("ValueError", f"[Errno {number}] full", FRAME))


def test_an_import_that_failed_names_its_line() -> None:
    at_line = import_failed(RankServerError("it", "hung for 9 s", (FRAME, OURS)), Locator(ROOT))
    nowhere = import_failed(RankServerError("it", "ended: a\nb", ()), Locator(ROOT))
    assert isinstance(at_line, CannotJudge)
    assert str(at_line).endswith("imports the target hung for 9 s at megatron/core/block.py:7")
    assert str(nowhere).endswith("imports the target ended: a")


def test_a_target_that_hangs_is_not_waited_for_again_and_again() -> None:
    assert run_ranks(_return, 1)[0].outcome == "returned", "the server has imported all it needs"
    observer = Observer(ROOT, deadline=1.0, memory={})
    for subject in ("one", "two", "three"):
        with pytest.raises(RunFailed):
            observer.run(subject, _pause, 1)
    with pytest.raises(NothingSeen, match="not run, because these hung: one, two, three"):
        observer.run("four", _pause, 1)


def _return(context: RankContext) -> None:
    return


def _pause(context: RankContext) -> None:
    signal.pause()


def test_foreign_text_moves_nothing() -> None:
    hostile = "a\tb\x1b[2K\rc\nd\x85e\u2028f\u202eg\udcff\x7f\x9b"
    assert printable(hostile) == r"a b\x1b[2K\rc\nd\x85e\u2028f\u202eg\udcff\x7f\x9b"
    assert printable("é ∑ 漢 🙂") == "é ∑ 漢 🙂"


def test_a_foreign_line_has_an_end() -> None:
    assert first_line(" \n\n  one \nverdict: ACCEPT") == "one"
    assert first_line("\n \n") == ""
    assert cut("x" * MOST) == "x" * MOST
    assert first_line("x" * 10**7) == "x" * MOST + "[...]"
