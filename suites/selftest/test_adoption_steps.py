"""The shell steps that a fork runs on GitHub and GitLab, run: what reaches the gate, and how.

Every check of hostile input also looks at a step that trusts it, and must see that.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from suites.selftest.pipelines import (
    Call,
    Composite,
    action,
    jobs,
    run_gitlab_job,
    step,
    write_stand_in,
)

HOSTILE = (
    "; touch pwned",
    "$(touch pwned)",
    "`touch pwned`",
    "\"; touch pwned; '",
    "a  b * ? ~",
    "--megatron=other",
    "-x",
    "x\nverdict=ACCEPT",
    "&& touch pwned ||",
    "<(touch pwned) ${PATH} \\",
)


# --- GitHub's steps, run --------------------------------------------------------------------


@pytest.fixture
def composite(tmp_path: Path) -> Composite:
    return Composite(action(), write_stand_in(tmp_path / "gate"), tmp_path / "here")


def understood(gate_command: ModuleType, call: Call) -> tuple[dict[str, Any], list[str]]:
    """Read a call as the real gate does: its options, and what is for pytest."""
    split = call.arguments.index("--")
    options = vars(gate_command._parser().parse_args(call.arguments[:split]))
    return options, call.arguments[split + 1 :]


def test_inputs_reach_the_gate(composite: Composite, gate_command: ModuleType) -> None:
    status, outputs = composite.run(
        {
            "megatron": "third_party/Megatron-LM",
            "base": "third_party/Megatron-LM@HEAD^1",
            "strict": "true",
            "tier": "auto",
            "device": "cpu",
            "defects": "ci/defects.toml",
            "with": "einops==0.8.2\nflash attention\n",
            "args": "-k\ndense and train\n--hypothesis-profile=deep",
        }
    )
    assert status == 0
    places = outputs["places"]
    call = Call.read(Path(places["results"]))
    options, rest = understood(gate_command, call)
    assert options == {
        "megatron": "third_party/Megatron-LM",
        "base": "third_party/Megatron-LM@HEAD^1",
        "strict": True,
        "tier": "auto",
        "device": "cpu",
        "out": Path(places["results"]),
        "defects": Path("ci/defects.toml"),
        "requirements": ["einops==0.8.2", "flash attention"],
    }
    assert rest == ["-k", "dense and train", "--hypothesis-profile=deep"]
    assert call.folder == str(composite.workspace)
    assert call.environment["PRECISION_GATE_CACHE"] == places["cache"]
    assert places["gate"] == str(composite.gate)


def test_defaults_are_the_gates_own(composite: Composite, gate_command: ModuleType) -> None:
    _, outputs = composite.run({})
    call = Call.read(Path(outputs["places"]["results"]))
    options, rest = understood(gate_command, call)
    expected = vars(gate_command._parser().parse_args([]))
    own = {"megatron": ".", "out": Path(outputs["places"]["results"])}
    assert (options, rest) == (expected | own, [])


@pytest.mark.parametrize(
    ("status", "verdict"),
    [(0, "ACCEPT"), (1, "REJECT"), (2, "CANNOT JUDGE"), (137, "CANNOT JUDGE")],
)
def test_the_verdict_is_an_output_and_the_status(
    composite: Composite, status: int, verdict: str
) -> None:
    ended, outputs = composite.run({}, STUB_STATUS=str(status))
    assert (ended, outputs["judge"]) == (status, {"verdict": verdict, "sarif": "true"})


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_inputs_are_not_carried_out(
    composite: Composite, gate_command: ModuleType, text: str
) -> None:
    names = ("megatron", "base", "defects", "tier", "device", "strict", "with", "args")
    _, outputs = composite.run(dict.fromkeys(names, text))
    assert not list(composite.here.parent.rglob("pwned"))
    assert set(outputs["places"]) == {"gate", "cache", "results", "environment", "bases"}
    assert outputs["judge"]["verdict"] == "ACCEPT"
    arguments = Call.read(Path(outputs["places"]["results"])).arguments
    split = arguments.index("--")
    assert arguments[:split] == [
        f"--megatron={text}",
        f"--tier={text}",
        f"--device={text}",
        f"--out={outputs['places']['results']}",
        f"--base={text}",
        f"--defects={text}",
        *(f"--with={line}" for line in text.splitlines()),
    ]
    assert arguments[split + 1 :] == text.splitlines()


@pytest.mark.parametrize("where", ["in the script", "split into words"])
def test_an_action_that_trusts_its_inputs_is_seen(where: str, tmp_path: Path) -> None:
    mutant = action()
    script = step(mutant, "Judge")["run"]
    trusted = "${{ inputs.megatron }}" if where == "in the script" else '$(eval "echo $MEGATRON")'
    step(mutant, "Judge")["run"] = script.replace("$MEGATRON", trusted)
    composite = Composite(mutant, write_stand_in(tmp_path / "gate"), tmp_path / "here")
    composite.run({"megatron": "$(touch pwned)"})
    assert list(tmp_path.rglob("pwned"))


def test_cache_keys_follow_what_decides(composite: Composite) -> None:
    def keys(**changed: str) -> tuple[str, str]:
        inputs = {"base": ".@HEAD"} | changed
        for old in composite.here.glob("temp/precision-gate/results/*"):
            old.unlink()
        for old in composite.here.glob("temp/precision-gate/results"):
            old.rmdir()
        status, outputs = composite.run(inputs)
        assert status == 0
        return outputs["places"]["environment"], outputs["places"]["bases"]

    def commit(text: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
        run = ["git", "-C", str(composite.workspace), *identity]
        subprocess.run([*run, "commit", "--quiet", "--allow-empty", "-m", text], check=True)

    composite.workspace.mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet", str(composite.workspace)], check=True)
    commit("one")
    environment, bases = keys()
    assert keys() == (environment, bases)
    assert keys(megatron="elsewhere") == (environment, bases)
    assert keys(tier="full")[1] != bases
    commit("two")
    assert keys() == (environment, keys()[1])
    assert keys()[1] != bases
    assert keys(base=".@HEAD^1") == (environment, bases)
    (composite.gate / "suites" / "b.py").write_text("a rule more")
    assert keys(base=".@HEAD^1")[0] == environment
    assert keys(base=".@HEAD^1")[1] != bases
    (composite.gate / "tox.ini").write_text("another torch")
    assert keys()[0] != environment


# --- GitLab's script, run -------------------------------------------------------------------


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """A repository of the gate that can be cloned, with a tag `v1`."""
    root = write_stand_in(tmp_path / "remote")
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
    for arguments in (
        ("init", "--quiet", "--initial-branch", "main"),
        ("add", "--all"),
        ("commit", "--quiet", "--message", "gate"),
        ("tag", "v1"),
    ):
        subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True)
    return root


def on_gitlab(
    remote: Path, name: str, inputs: dict[str, Any], **variables: str
) -> tuple[int, Call, Path]:
    """Run a job in a project whose cache is there already; the status, and the call."""
    project = remote.parent / "project"
    (project / ".precision-gate" / "gate" / ".tox").mkdir(parents=True)
    given = jobs(**{"gate-url": str(remote), "gate-ref": "v1"} | inputs)
    status = run_gitlab_job(given, name, project, **variables)
    return status, Call.read(project / "precision-gate-results"), project


MERGE_REQUEST = {
    "CI_PIPELINE_SOURCE": "merge_request_event", "CI_MERGE_REQUEST_DIFF_BASE_SHA": "b" * 40,
}  # fmt: skip


@pytest.mark.parametrize(
    ("job", "variables", "expected", "rest"),
    [
        ("precision-gate", MERGE_REQUEST, {"base": f".@{'b' * 40}"}, []),
        ("precision-gate", MERGE_REQUEST | {"CI_MERGE_REQUEST_TARGET_BRANCH_SHA": "c" * 40},
         {"base": f".@{'c' * 40}"}, []),
        ("precision-gate", {"CI_PIPELINE_SOURCE": "push", "CI_COMMIT_SHA": "d" * 40},
         {"base": f".@{'d' * 40}"}, []),
        ("precision-gate-gpu", MERGE_REQUEST, {"base": f".@{'b' * 40}", "device": "cuda"}, []),
        ("precision-gate-nightly", {"CI_PIPELINE_SOURCE": "schedule"}, {"tier": "full"},
         ["--hypothesis-profile=deep"]),
    ],
)  # fmt: skip
def test_gitlab_jobs_call_the_gate(
    job: str,
    variables: dict[str, str],
    expected: dict[str, str],
    rest: Sequence[str],
    remote: Path,
    gate_command: ModuleType,
) -> None:
    status, call, project = on_gitlab(remote, job, {}, **variables)
    options, given = understood(gate_command, call)
    own = {"megatron": ".", "out": Path("precision-gate-results")}
    assert status == 0
    assert options == vars(gate_command._parser().parse_args([])) | own | expected
    assert given == rest
    assert call.folder == str(project)
    assert call.environment["PRECISION_GATE_CACHE"] == f"{project}/.precision-gate/cache"


def test_gitlab_ends_with_the_gates_status(remote: Path) -> None:
    assert on_gitlab(remote, "precision-gate", {}, **MERGE_REQUEST, STUB_STATUS="1")[0] == 1


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_inputs_are_not_carried_out_on_gitlab(text: str, remote: Path) -> None:
    names = ("megatron", "tier", "defects", "requirements", "arguments")
    inputs = dict.fromkeys(names, text) | {"strict": True}
    _, call, _ = on_gitlab(remote, "precision-gate", inputs, **MERGE_REQUEST)
    assert not list(remote.parent.rglob("pwned"))
    assert call.arguments == [
        f"--megatron={text}",
        f"--tier={text}",
        "--device=auto",
        "--out=precision-gate-results",
        f"--base={text}@{'b' * 40}",
        "--strict",
        f"--defects={text}",
        *(f"--with={line}" for line in text.splitlines()),
        "--",
        *text.splitlines(),
    ]


def test_gitlab_shows_what_the_gate_writes() -> None:
    reports = jobs()[".precision-gate"]["artifacts"]["reports"]
    assert reports == {
        "codequality": "precision-gate-results/gitlab-code-quality.json",
        "junit": "precision-gate-results/junit.xml",
    }


def test_only_gitlabs_default_branch_writes_the_cache() -> None:
    given = jobs()
    assert given[".precision-gate"]["cache"]["policy"] == "$GATE_CACHE_POLICY"
    assert given[".precision-gate"]["variables"]["GATE_CACHE_POLICY"] == "pull"
    writing = [
        rule["if"]
        for job in given.values()
        for rule in job.get("rules", ())
        if rule.get("variables", {}).get("GATE_CACHE_POLICY") == "pull-push"
    ]
    assert writing == ['$CI_PIPELINE_SOURCE == "push" && $CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH']
