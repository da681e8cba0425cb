"""What a fork copies to have the gate judge its changes: workflows that fit, run, and trust nobody.

The files are held to what others check such files with, and their shell steps are run. Each check
also looks at a file that is broken, and must see that.
"""

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ruamel.yaml import YAML

from suites.selftest.pipelines import (
    ACTION,
    GITLAB,
    WORKFLOW,
    Call,
    Composite,
    evaluate,
    gitlab_jobs,
    load,
    run_gitlab_job,
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

PROGRAMS = Path(sys.executable).parent

Break = Callable[[Any], object]


def tool(name: str, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program that a package of the environment brings."""
    command = [str(PROGRAMS / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def write(path: Path, data: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump(data, file)
    return path


def action() -> Any:
    return load(ACTION)[0]


def workflow() -> Any:
    return load(WORKFLOW)[0]


def jobs(**inputs: Any) -> dict[str, Any]:
    return gitlab_jobs(load(GITLAB), {"gate-url": "https://example.com/gate.git"} | inputs)


def step(data: Any, name: str) -> Any:
    return next(each for each in data["runs"]["steps"] if each["name"] == name)


def broken(data: Any, change: Break) -> Any:
    data = copy.deepcopy(data)
    change(data)
    return data


# --- Published schemas ----------------------------------------------------------------------


def fits(schema: str, data: Any, folder: Path) -> bool:
    file = folder / "data.json"
    file.write_text(json.dumps(data))
    done = tool("check-jsonschema", "--builtin-schema", schema, file)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0


@pytest.mark.parametrize(
    ("schema", "read", "change"),
    [
        ("vendor.github-workflows", workflow, lambda data: data["jobs"]["cpu"].pop("runs-on")),
        ("vendor.github-actions", action, lambda data: data["runs"].update(using="shell")),
        ("vendor.gitlab-ci", jobs, lambda data: data["precision-gate"].update(rules="always")),
        ("vendor.gitlab-ci", lambda: load(GITLAB)[0], lambda data: data["spec"].update(inputs=3)),
    ],
)
def test_files_fit_their_published_schemas(
    schema: str, read: Callable[[], Any], change: Break, tmp_path: Path
) -> None:
    assert fits(schema, read(), tmp_path)
    assert not fits(schema, broken(read(), change), tmp_path)


# --- Linters --------------------------------------------------------------------------------


def actionlint(folder: Path, workflow: Any, action: Any) -> str:
    """What actionlint says of a workflow in a repository that has the action at hand."""
    text = write(folder / ".github" / "workflows" / "gate.yml", workflow)
    text.write_text(
        text.read_text().replace("your-organization/precision-gate/ci/github@v1", "./gate")
    )
    write(folder / "gate" / "action.yml", action)
    own = write(folder / "own.yaml", {"self-hosted-runner": {"labels": ["gpu"]}})
    (folder / ".git").mkdir(exist_ok=True)
    options = ("-config-file", own, "-shellcheck", PROGRAMS / "shellcheck", "-pyflakes", "")
    done = tool("actionlint", *options, cwd=folder)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def as_workflow(action: Any) -> Any:
    """The action's steps as a job, because the linter looks at steps in jobs only."""
    inputs = {
        name: {"type": "string", "default": each["default"]}
        for name, each in action["inputs"].items()
    }
    return {
        "on": {"workflow_call": {"inputs": inputs}},
        "permissions": {"contents": "read"},
        "jobs": {"steps": {"runs-on": "ubuntu-latest", "steps": action["runs"]["steps"]}},
    }


def test_actionlint_finds_nothing(tmp_path: Path) -> None:
    assert actionlint(tmp_path, workflow(), action()) == ""
    assert actionlint(tmp_path, as_workflow(action()), action()) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data["jobs"]["cpu"]["steps"][1]["with"].update(bass="x"), '"bass"'),
        (lambda data: data["jobs"]["gpu"].update({"if": "github.evnt == 'x'"}), '"evnt"'),
        (lambda data: data["jobs"]["gpu"].update({"runs-on": "cray"}), '"cray"'),
        (lambda data: data["on"]["pull_request"].update(types=["opend"]), '"opend"'),
    ],
)
def test_actionlint_sees_a_broken_workflow(change: Break, said: str, tmp_path: Path) -> None:
    assert said in actionlint(tmp_path, broken(workflow(), change), action())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: step(data, "Judge")["env"].update(BASE="${{ inputs.bass }}"), '"bass"'),
        (lambda data: step(data, "Judge")["env"].update(X="${{ steps.place.outputs }}"), '"place"'),
        (lambda data: step(data, "Set up Python").update({"with": {"pyton": "3"}}), '"pyton"'),
        (lambda data: step(data, "Judge").update(run="python3 $BASE\n"), "SC2086"),
    ],
)  # fmt: skip
def test_actionlint_sees_a_broken_action(change: Break, said: str, tmp_path: Path) -> None:
    mutant = broken(action(), change)
    assert said in actionlint(tmp_path, as_workflow(mutant), mutant)


def zizmor(folder: Path, workflow: Any, action: Any) -> set[str]:
    """What zizmor, which looks for ways to attack a workflow, finds."""
    files = (
        write(folder / ".github" / "workflows" / "gate.yml", workflow),
        write(folder / "gate" / "action.yml", action),
    )
    # Tags of a major version, as this project's examples have them, are wanted.
    rules = {"rules": {"unpinned-uses": {"config": {"policies": {"*": "ref-pin"}}}}}
    own = write(folder / "zizmor.yml", rules)
    arguments = ("--offline", "--quiet", "--no-exit-codes", "--format=json", "--config", own)
    done = tool("zizmor", *arguments, *files)
    assert done.returncode == 0, done.stderr
    return {each["ident"] for each in json.loads(done.stdout)}


def test_zizmor_finds_nothing(tmp_path: Path) -> None:
    assert zizmor(tmp_path, workflow(), action()) == set()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda w, a: w["on"].update(pull_request_target={}), "dangerous-triggers"),
        (lambda w, a: w.update(permissions="write-all"), "excessive-permissions"),
        (lambda w, a: w["jobs"]["cpu"]["steps"][0].pop("with"), "artipacked"),
        (lambda w, a: step(a, "Judge").update(run="x ${{ inputs.base }}"), "template-injection"),
    ],
)
def test_zizmor_sees_a_hole(
    change: Callable[[Any, Any], object], found: str, tmp_path: Path
) -> None:
    changed_workflow, changed_action = workflow(), action()
    change(changed_workflow, changed_action)
    assert found in zizmor(tmp_path, changed_workflow, changed_action)


def shellcheck(script: str) -> str:
    return tool("shellcheck", "--shell=bash", "-", input=script).stdout


def test_shellcheck_finds_nothing() -> None:
    scripts = [each["run"] for each in action()["runs"]["steps"] if "run" in each]
    scripts.append("\n".join(jobs()[".precision-gate"]["script"]))
    for script in scripts:
        assert shellcheck(script) == ""
    assert "SC2086" in shellcheck(scripts[-1].replace('"$GATE_URL"', "$GATE_URL"))


# --- What is granted to whom ----------------------------------------------------------------


def texts(value: Any) -> list[str]:
    """All strings in data, keys left out."""
    if isinstance(value, dict):
        return [text for each in value.values() for text in texts(each)]
    if isinstance(value, list):
        return [text for each in value for text in texts(each)]
    return [str(value)]


def holes(workflow: Any, action: Any) -> list[str]:
    """What would let a pull request do more than be judged."""
    found = []
    steps = [each for job in workflow["jobs"].values() for each in job["steps"]]
    if workflow["permissions"] != {"contents": "read"}:
        found.append("permissions")
    if any("permissions" in job or "secrets" in job for job in workflow["jobs"].values()):
        found.append("permissions of a job")
    if any("secrets." in text for text in texts(workflow) + texts(action)):
        found.append("secrets")
    if not set(workflow["on"]) <= {"pull_request", "push", "schedule"}:
        found.append("event")
    if any(
        each["with"].get("persist-credentials") is not False
        for each in steps
        if each["uses"].startswith("actions/checkout@")
    ):
        found.append("credentials left behind")
    for used in (each["uses"] for each in [*steps, *action["runs"]["steps"]] if "uses" in each):
        if not re.fullmatch(r"[\w./-]+@v\d+", used):
            found.append(f"unpinned {used}")
    names = [each["name"] for each in action["runs"]["steps"]]
    if names.index("Keep the environment") > names.index("Judge"):
        found.append("the environment is kept after it could be changed")
    if "github.event_name != 'pull_request'" not in step(
        action, "Keep what was judged of the base"
    )["if"].split(" && "):
        found.append("a pull request keeps what is judged of the base")
    if any("${{" in each.get("run", "") for each in action["runs"]["steps"]):
        found.append("an expression in a script")
    return found


def test_a_pull_request_can_but_be_judged() -> None:
    assert holes(workflow(), action()) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda w, a: w["permissions"].update(contents="write"), "permissions"),
        (lambda w, a: w["jobs"]["gpu"].update(permissions={}), "permissions of a job"),
        (lambda w, a: step(a, "Judge")["env"].update(T="${{ secrets.T }}"), "secrets"),
        (lambda w, a: w["on"].update(issue_comment={}), "event"),
        (lambda w, a: w["jobs"]["gpu"]["steps"][0]["with"].pop("persist-credentials"),
         "credentials left behind"),
        (lambda w, a: step(a, "Set up Python").update(uses="actions/setup-python@main"),
         "unpinned actions/setup-python@main"),
        (lambda w, a: a["runs"]["steps"].append(a["runs"]["steps"].pop(4)),
         "the environment is kept after it could be changed"),
        (lambda w, a: step(a, "Keep what was judged of the base").update({"if": "!cancelled()"}),
         "a pull request keeps what is judged of the base"),
        (lambda w, a: step(a, "Judge").update(run="x ${{ inputs.base }}"),
         "an expression in a script"),
    ],
)  # fmt: skip
def test_a_hole_is_seen(change: Callable[[Any, Any], object], found: str) -> None:
    changed_workflow, changed_action = workflow(), action()
    change(changed_workflow, changed_action)
    assert holes(changed_workflow, changed_action) == [found]


Event = tuple[str, str]

EVENTS: dict[Event, tuple[set[str], str]] = {
    ("pull_request", ""): ({"cpu"}, ".@HEAD^1"),
    ("pull_request", "documentation"): ({"cpu"}, ".@HEAD^1"),
    ("pull_request", "precision-gpu"): ({"cpu", "gpu"}, ".@HEAD^1"),
    ("push", ""): ({"cpu"}, ".@HEAD"),
    ("schedule", ""): ({"nightly"}, ".@HEAD"),
}


@pytest.mark.parametrize("event", EVENTS)
def test_each_event_starts_its_jobs(event: Event) -> None:
    names = dict(zip(("github.event_name", "github.event.label.name"), event, strict=True))
    data = workflow()
    runs = {name for name, job in data["jobs"].items() if evaluate(job["if"], names.__getitem__)}
    base = data["jobs"]["cpu"]["steps"][1]["with"]["base"].removeprefix("${{").removesuffix("}}")
    assert (runs, evaluate(base, names.__getitem__)) == EVENTS[event]


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
