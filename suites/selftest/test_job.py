"""Worlds spread over the processes of a launcher's job: torchrun's over gloo, on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.runtime.job import launched
from suites.selftest.gate import REPOSITORY

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "2", "WORLD_SIZE": "4"}
STEP = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "8",
    "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        (TORCHRUN, (2, 4)),
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, None),
        # Left over in a shell: nobody launched this process.
        ({"RANK": "2", "WORLD_SIZE": "4"}, None),
        (STEP, (1, 8)),
        # In a shell of an allocation there is no step; and ranks cannot meet without an address.
        ({name: value for name, value in STEP.items() if name != "SLURM_STEP_ID"}, None),
        ({name: value for name, value in STEP.items() if name != "MASTER_ADDR"}, None),
    ],
)
def test_a_rank_of_a_launcher_is_told_from_a_shell(
    environment: dict[str, str], place: tuple[int, int] | None
) -> None:
    assert launched(environment) == place


def torchrun(size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python's arguments in so many processes of a job; none of them outlives the call."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(size), *arguments]
    with subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as launcher:
        try:
            output, _ = launcher.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            # Being asked to end, the launcher ends its processes first.
            launcher.terminate()
            output, _ = launcher.communicate()
        return subprocess.CompletedProcess(command, launcher.returncode, output)


@pytest.mark.parametrize(
    ("release", "status", "words"),
    [("newest", 0, "verdict: ACCEPT: checks: 3 passed"), ("0.16.1", 1, "verdict: REJECT: 1 fault")],
)
def test_a_job_judges_like_one_process_and_rank_0_reports(
    release: str, status: int, words: str, newest_release: Path, tmp_path: Path
) -> None:
    target = str(newest_release) if release == "newest" else release
    finished = torchrun(
        2, "-m", "pytest", "suites/pipeline", "-q", "-p", "no:cacheprovider",
        f"--megatron={target}", f"--out={tmp_path}", "-m", "P3 or P5 or P7",
        "-k", "hybrid.fp32.no-grad.pp2",
    )  # fmt: skip
    assert finished.returncode == status, finished.stdout
    assert finished.stdout.count("verdict: ") == 1
    assert words in finished.stdout
    assert (tmp_path / "results.json").is_file()


def test_a_world_larger_than_the_job_is_not_applicable(newest_release: Path) -> None:
    finished = torchrun(
        2, "-m", "pytest", "suites/pipeline", "-q", "-p", "no:cacheprovider",
        f"--megatron={newest_release}", "-m", "P7", "-k", "hybrid.fp32.train.pp4",
    )  # fmt: skip
    assert "not applicable: 4 ranks are needed, and the job has 2 (1 check)" in finished.stdout


def test_workers_of_xdist_are_refused(newest_release: Path) -> None:
    finished = torchrun(
        2, "-m", "pytest", "suites/pipeline", "-n", "2", f"--megatron={newest_release}"
    )
    assert "verdict: CANNOT JUDGE: a launcher's ranks are the workers" in finished.stdout


@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("sums", "0 returned 3.0, 1 returned 3.0, 2 returned 3.0"),
        ("raises", "0 ended None, 1 raised ValueError: not me, 2 ended None"),
        ("dies", "0 ended None, 1 died 7, 2 ended None"),
        ("hangs", "0 returned None, 1 hung None, 2 returned None"),
        ("leaves", "JobError: the process of rank 1 of the job is gone"),
    ],
)
def test_every_process_learns_how_every_rank_ended(act: str, said: str) -> None:
    finished = torchrun(3, "-m", "suites.selftest.job_acts", act)
    told = [line for line in finished.stdout.splitlines() if line.startswith("told: ")]
    assert told == [f"told: {said}"] * (2 if act == "leaves" else 3), finished.stdout
