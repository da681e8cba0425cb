"""What a fork copies to have its changes judged: files that fit, and that trust nobody.

They are held to what others check such files with. Each check also looks at a file that is broken,
and must see that.
"""

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from suites.selftest.pipelines import GITLAB, action, evaluate, jobs, load, step, workflow

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
