"""Runs the gate in a process of its own, as a user would, and reads what it says."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class GateRun:
    """A finished gate session: exit status, what it printed, results.json."""

    status: int
    output: str
    results: dict[str, Any]

    @property
    def last_line(self) -> str:
        """The verdict line."""
        return self.output.rstrip().splitlines()[-1]

    def rules_and_files(self) -> set[tuple[str, str | None]]:
        """Rules that were violated, each with the files that were named for it."""
        return {
            (violation["rule"], (violation["source"] or {}).get("path"))
            for check in self.results["checks"]
            for violation in check["violations"]
        }


def run_gate(target: Path | str, out: Path, *arguments: str, **variables: str) -> GateRun:
    """Judge a target with `pytest suites`, in one process, quick tier unless told otherwise.

    Args:
        target: as `--megatron` takes it.
        out: folder for the results.
        arguments: for pytest.
        variables: of the environment, beside those of this process.
    """
    command = [sys.executable, "-m", "pytest", "suites", "-q", "-p", "no:cacheprovider"]
    finished = subprocess.run(
        [*command, f"--megatron={target}", f"--out={out}", *arguments],
        cwd=REPOSITORY,
        env={k: v for k, v in os.environ.items() if not k.startswith("GITHUB_")} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    results = out / "results.json"
    data = json.loads(results.read_text()) if results.is_file() else {}
    return GateRun(finished.returncode, finished.stdout, data)
