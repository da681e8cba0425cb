"""The one environment that every command of the project runs in, built on first use.

`ci/gate` and `ci/selftest` must work on a machine that has git and Python and nothing else,
and must start at once where they ran before. So: a small environment of our own holds a
pinned tox, tox builds the `suite` environment that tox.ini describes, and a stamp of what
went into it tells later starts that there is nothing to do. Standard library only.

`python ci/environment.py ARGS` runs the environment's Python with ARGS.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent

_TOX = "tox==4.67.15"
_HEARTBEAT = 20.0
_MAX_WORKERS = 8

# Of the caller's shell these would change what is imported or run.
_FOREIGN = re.compile(r"PYTHON(PATH|HOME|STARTUP|SAFEPATH)|PYTEST_.*|TOX.*")


class SetUpError(Exception):
    """The environment cannot be built; the message is one line: why, and what to do."""


def suite_python() -> Path:
    """The Python of the suite's environment, which is built or brought up to date first."""
    if sys.version_info < (3, 12):  # noqa: UP036 (this is where an older Python is told)
        raise SetUpError(f"{sys.executable} is older than 3.12, which is needed as python3")
    suite = ROOT / ".tox" / "suite"
    python = suite / "bin" / "python"
    stamp = suite / ".ready"
    wanted = _fingerprint()
    if _is_ready(python, stamp, wanted):
        return python
    with _one_at_a_time() as lock:
        if not _is_ready(python, stamp, wanted):
            tox = _tox(lock)
            _say("installing the requirements, torch among them: minutes the first time")
            again = ["--recreate"] if suite.exists() and not python.exists() else []
            _patiently([tox, "run", "--notest", "-e", "suite", "--workdir", ".tox", *again], lock)
            stamp.write_text(wanted, encoding="utf-8")
            _say("the environment is ready")
    return python


def clean_environment() -> dict[str, str]:
    """The caller's environment variables without those that change what is imported or run."""
    kept = {k: v for k, v in os.environ.items() if not _FOREIGN.fullmatch(k)}
    # Progress must show at once, through a pipe too.
    return kept | {"PYTHONUNBUFFERED": "1"}


def worker_options(pytest_arguments: Sequence[str]) -> list[str]:
    """pytest-xdist's option for this machine, unless `pytest_arguments` have their own."""
    workers = min(len(os.sched_getaffinity(0)), _MAX_WORKERS)
    said = any(re.match(r"-n|--numprocesses|--pdb|-p=?no:xdist", a) for a in pytest_arguments)
    return [] if said or workers < 2 else ["-n", str(workers)]


def run(python: Path, *arguments: str) -> int:
    """Run the environment's Python in the repository's folder until it ends by itself.

    Its status, negative for a signal. Being told to stop is passed on and waited for, because
    pytest reports what it has found until then.
    """
    child = subprocess.Popen([str(python), *arguments], cwd=ROOT, env=clean_environment())

    def stop(_signal: int, _frame: FrameType | None) -> None:
        child.terminate()

    signal.signal(signal.SIGTERM, stop)
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            # The terminal has sent it to the child too.
            continue


def names_tests(pytest_arguments: Sequence[str]) -> bool:
    """Whether `pytest_arguments` choose test files or folders themselves."""
    return any(
        not argument.startswith("-") and (ROOT / argument.partition("::")[0]).exists()
        for argument in pytest_arguments
    )


def _fingerprint() -> str:
    """What the environment is made from: while this stays, there is nothing to install."""
    parts = [*sorted((ROOT / "ci").glob("requirements*.txt")), ROOT / "tox.ini"]
    return hashlib.sha256(b"\0".join(part.read_bytes() for part in parts)).hexdigest()


def _is_ready(python: Path, stamp: Path, wanted: str) -> bool:
    # exists() follows the link: the Python that the environment stands on may be gone.
    return python.exists() and stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[int]:
    """Let one process build, and the others wait for it; gives the lock's file descriptor."""
    work = ROOT / ".tox"
    try:
        work.mkdir(exist_ok=True)
        lock = (work / "setup.lock").open("w")
    except OSError as error:
        raise SetUpError(f"the environment's folder cannot be written: {error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another process that builds the environment")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def _tox(lock: int) -> str:
    """The pinned tox, in an environment of its own."""
    home = ROOT / ".tox" / "bootstrap"
    tox, stamp = home / "bin" / "tox", home / ".ready"
    if _is_ready(home / "bin" / "python", stamp, _TOX):
        return str(tox)
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SetUpError(
            f"{sys.executable} cannot make environments: install its venv and ensurepip "
            f"modules (Debian, Ubuntu: apt install python{version}-venv)"
        )
    _say(f"setting up {_TOX} in {home}")
    shutil.rmtree(home, ignore_errors=True)
    _patiently([sys.executable, "-m", "venv", str(home)], lock)
    pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    _patiently([*pip, "install", "--quiet", _TOX], lock)
    stamp.write_text(_TOX, encoding="utf-8")
    return str(tox)


def _patiently(command: Sequence[str], lock: int) -> None:
    """Run one step of the set-up, with a sign of life while it lasts and a log for failures.

    The step inherits the lock, and so keeps others out even if this process is killed.
    """
    log = ROOT / ".tox" / "setup.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[lock],
        )
        started = time.monotonic()
        try:
            while child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_HEARTBEAT)
                    break
                _say(f"  still at it after {time.monotonic() - started:.0f} s")
        finally:
            child.kill()
    if child.returncode:
        raise SetUpError(f"the set-up failed: {_reason(log)} (all of it: {log})")


def _reason(log: Path) -> str:
    """The line of a failed step that says most: pip's error, or else the last."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line.strip() for line in lines if line.strip()]
    errors = [line for line in told if re.search(r"\bERROR: |^Error: |No space left", line)]
    return (errors[:1] or told[-1:] or ["no output"])[0]


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _main() -> int:
    try:
        python = suite_python()
    except SetUpError as error:
        _say(f"error: {error}")
        return 2
    return run(python, *sys.argv[1:])


if __name__ == "__main__":
    sys.exit(_main())
