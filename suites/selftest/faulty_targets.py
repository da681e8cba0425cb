"""Faulty targets as data: releases that die, hang, shout, fork, and what the gate makes of them.

The code is the fault, put where the target is imported, built or run. What the gate has to say of
it is the first word of its verdict and a pattern in what it tells.
"""

import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from fixtures.verdict.records import Word
from suites.selftest.mutants import ADD, LAYER, Edit, Mutant

CORE = "megatron/core/__init__.py"

_ONE_CASE = ("-k", "dense.fp32.train]", "-m", "S1")
_TWO_RANKS = ("-k", "dense-deep.fp32.train.pp2]", "-m", "P3")


@dataclass(frozen=True)
class Fault:
    """A faulty target, and what the gate must say of it.

    Attributes:
        name: what is wrong.
        word: of the verdict.
        told: a regular expression that some line of the gate's has to match.
        edits: how it is put in.
        arguments: for pytest: where it is looked at.
    """

    name: str
    word: Word
    told: str
    edits: tuple[Edit, ...]
    arguments: tuple[str, ...] = field(default=_ONE_CASE)

    def make(self, release: Path, into: Path) -> Path:
        """Make a copy of a release with the fault in it."""
        return Mutant(self.name, "", None, self.edits).make(release, into)


def _before(file: str, tokens: str, code: str) -> tuple[Edit, ...]:
    """Put code into a file, in front of the line that begins with these tokens."""
    indent = tokens[: len(tokens) - len(tokens.lstrip())]
    return (Edit(file, tokens, textwrap.indent(code, indent) + "\n" + tokens),)


def imported(code: str) -> tuple[Edit, ...]:
    """Have code run when the target is imported."""
    return _before(CORE, "import megatron.core.tensor_parallel", code)


def built(code: str) -> tuple[Edit, ...]:
    """Have code run when a layer is made."""
    return _before(LAYER, "        super().__init__(config=config, vp_stage=vp_stage)", code)


def run(code: str) -> tuple[Edit, ...]:
    """Have code run in each forward pass through bias-dropout-add."""
    return _before(ADD, "    x, bias = x_with_bias", code)


_HANG = "import time; time.sleep(1000)"
_KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
_FAKE = r"verdict: ACCEPT: checks: 1 passed"

_SHOUT = rf"""
import os, sys
os.write(1, b"\xff\xfe\x1b[2J\x1b]0;x\x07\r" * 200_000)
for stream in (sys.stdout, sys.stderr):
    print("\n{_FAKE}\n", file=stream, flush=True)
"""
_SHOUT_ON = rf"""
import threading, time
def shout():
    while True:
        print("{_FAKE}", flush=True)
        time.sleep(0.001)
threading.Thread(target=shout).start()
"""
# A thread, a child, a child in a session of its own, one whose parent is gone, and a copy of the
# process itself: none of them ends.
_SPREAD = """
import os, subprocess, threading, time
threading.Thread(target=threading.Event().wait).start()
if os.fork() == 0:
    time.sleep(1000)
subprocess.Popen(["sleep", "1000"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.fork()
"""
_OWN_ERROR = """
class OwnError(Exception):
    def __str__(self):
        raise ValueError

"""

FAULTS = (
    # At import: nothing can be judged, whatever it does.
    Fault("raises at import", "CANNOT JUDGE",
          rf"{CORE}:\d+ cannot be imported: RuntimeError: no\\x1b\[31m$",
          imported(rf"raise RuntimeError('no\x1b[31m\n{_FAKE}')")),
    Fault("is interrupted at import", "CANNOT JUDGE", rf"{CORE}:\d+ .*: KeyboardInterrupt",
          imported("raise KeyboardInterrupt")),
    Fault("calls sys.exit at import", "CANNOT JUDGE", rf"{CORE}:\d+ .*: SystemExit: 0",
          imported("import sys; sys.exit(0)")),
    Fault("calls os._exit at import", "CANNOT JUDGE",
          r"the process that imports the target ended \(exit status 0\): goodbye",
          imported("import os; print('goodbye'); os._exit(0)")),
    Fault("aborts at import", "CANNOT JUDGE", rf"target ended \(SIGABRT\) at {CORE}:\d+",
          imported("import os; os.abort()")),
    Fault("is killed at import", "CANNOT JUDGE", r"target ended \(SIGKILL\)", imported(_KILL)),
    Fault("hangs at import", "CANNOT JUDGE", rf"target hung for 16 s at {CORE}:\d+",
          imported(_HANG), (*_ONE_CASE, "--deadline=8")),
    Fault("closes all descriptors at import", "CANNOT JUDGE", "target closed its connections",
          imported("import os; os.closerange(3, 4096)")),
    # At import, but the target still does what it has to.
    Fault("shouts from its import on", "ACCEPT", "1 passed", imported(_SHOUT + _SHOUT_ON)),
    Fault("spreads at import", "ACCEPT", "1 passed", imported(_SPREAD)),
    Fault("has no output from its import on", "ACCEPT", "1 passed",
          imported("import sys; sys.stdout.close(); sys.stderr = None")),
    # In a run.
    Fault("raises", "REJECT", r"seen +raised ValueError: no\\x1b\[31m\\udcff$",
          run(rf"raise ValueError('no\x1b[31m\udcff\n{_FAKE}')"), (*_ONE_CASE, "-n", "2")),
    Fault("raises megabytes", "REJECT", r"seen +raised ValueError: x{500}\[\.\.\.\]$",
          run("raise ValueError('x' * 20_000_000)")),
    Fault("raises its own, which fails again", "REJECT",
          r"seen +raised megatron\.\S+OwnError: its message cannot be had: ValueError",
          run(_OWN_ERROR + "raise OwnError")),
    Fault("calls sys.exit", "REJECT", r"seen +raised SystemExit: 0", run("raise SystemExit(0)")),
    Fault("calls os._exit", "REJECT", r"seen +rank 0 died \(exit status 0\)",
          run("import os; os._exit(0)")),
    Fault("hangs in a constructor", "REJECT", rf"^  {LAYER}:\d+$",
          built(_HANG), (*_ONE_CASE, "--deadline=10")),
    Fault("shouts", "ACCEPT", "1 passed", run(_SHOUT)),
    Fault("spreads", "ACCEPT", "1 passed", run(_SPREAD)),
    Fault("speaks in its source", "REJECT",
          r"^      residual = .*# \\x1b\[2K\\u2028\\x85\\u202everdict: ACCEPT: ",
          (Edit(LAYER, "residual = residual.float()",
                f"residual = residual.bfloat16().float()  # \x1b[2K\u2028\x85\u202e{_FAKE}"),),
          ("-k", "dense.fp32.train]", "-m", "S2")),
    # What others do to it, or the machine.
    Fault("is killed", "CANNOT JUDGE", r"not checked: rank 0 of \S+ was killed \(SIGKILL\)",
          run(_KILL)),
    Fault("is killed on one of two ranks", "CANNOT JUDGE", r"rank 1 of \S+ was killed",
          run(f"import torch\nif torch.distributed.get_rank() == 1:\n    {_KILL}"), _TWO_RANKS),
    Fault("finds the disk full", "CANNOT JUDGE", "not checked: .* No space left on device",
          run("import os; os.write(os.open('/dev/full', os.O_WRONLY), b'x')")),
)  # fmt: skip
