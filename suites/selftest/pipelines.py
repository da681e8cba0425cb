"""GitHub and GitLab as far as the files in ci/github and ci/gitlab need them, to run their steps.

What a step calls is real but for the gate: the one that stands in for it writes down how it was
called, and ends as it is told.
"""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from suites.selftest.gate import REPOSITORY

ACTION = REPOSITORY / "ci" / "github" / "action.yml"
WORKFLOW = REPOSITORY / "ci" / "github" / "precision-gate.yml"
GITLAB = REPOSITORY / "ci" / "gitlab" / "precision-gate.yml"

_EXPRESSION = re.compile(r"\$\{\{\s*(.+?)\s*\}\}", re.DOTALL)
_INPUT = re.compile(r"\$\[\[\s*inputs\.([\w-]+)\s*\]\]")
_NAME = re.compile(r"'[^']*'|[a-z_][\w-]*(?:\.[\w-]+)+|!cancelled\(\)")

_GATE = f"""#!{sys.executable}
import json, os, pathlib, sys

out = next(a for a in sys.argv if a.startswith("--out=")).removeprefix("--out=")
out = pathlib.Path(out)
out.mkdir(parents=True)
(out / "results.sarif").touch()
called = dict(arguments=sys.argv[1:], folder=os.getcwd(), environment=dict(os.environ))
(out / "called.json").write_text(json.dumps(called))
sys.exit(int(os.environ.get("STUB_STATUS", 0)))
"""


def load(path: Path) -> list[Any]:
    """Read the documents of a YAML file, as YAML 1.2 has it (`on` is no truth value)."""
    return list(YAML(typ="safe", pure=True).load_all(path.read_text(encoding="utf-8")))


def action() -> Any:
    """Give the composite action's data."""
    return load(ACTION)[0]


def workflow() -> Any:
    """Give the example workflow's data."""
    return load(WORKFLOW)[0]


def jobs(**inputs: Any) -> dict[str, Any]:
    """Give GitLab's jobs with some inputs."""
    return gitlab_jobs(load(GITLAB), {"gate-url": "https://example.com/gate.git"} | inputs)


def step(data: Any, name: str) -> Any:
    """Give a step of an action by its name."""
    return next(each for each in data["runs"]["steps"] if each["name"] == name)


def write_stand_in(root: Path) -> Path:
    """Write a repository of the gate in which all is there that the steps touch."""
    (root / "ci" / "github").mkdir(parents=True)
    for name in ("conftest.py", "tox.ini", "ci/requirements.txt", "fixtures/a.py", "suites/b.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "ci" / "gate").write_text(_GATE)
    (root / "ci" / "environment.py").write_text("import sys; print(sys.argv)\n")
    return root


@dataclass(frozen=True)
class Call:
    """How the gate was called."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]

    @classmethod
    def read(cls, results: Path) -> "Call":
        """Read what the stand-in wrote down."""
        return cls(**json.loads((results / "called.json").read_text(encoding="utf-8")))


# --- GitHub ---------------------------------------------------------------------------------


def evaluate(expression: str, look: Callable[[str], Any]) -> Any:
    """Evaluate an expression of GitHub's made of names, strings and operators."""

    def python(found: re.Match[str]) -> str:
        token = found[0]
        if token.startswith("'"):
            return token
        return "True" if token == "!cancelled()" else f"look({token!r})"

    translated = _NAME.sub(python, expression).replace("&&", " and ").replace("||", " or ")
    return eval(translated.strip(), {"look": look})


@dataclass
class Composite:
    """A run of a composite action's shell steps.

    Attributes:
        action: its data.
        gate: the folder of the gate's repository.
        here: folder for all else; the workspace is below it.
    """

    action: dict[str, Any]
    gate: Path
    here: Path

    @property
    def workspace(self) -> Path:
        """Where the fork is checked out."""
        return self.here / "workspace"

    def run(self, inputs: Mapping[str, str], **variables: str) -> tuple[int, dict[str, Any]]:
        """Run the steps until one fails; the last status, and the steps' outputs."""
        given = {name: str(each.get("default", "")) for name, each in self.action["inputs"].items()}
        given |= inputs
        outputs: dict[str, dict[str, str]] = {}

        def look(name: str) -> str:
            kind, *path = name.split(".")
            return given[path[0]] if kind == "inputs" else outputs[path[0]].get(path[2], "")

        self.workspace.mkdir(parents=True, exist_ok=True)
        status = 0
        for number, step in enumerate(self.action["runs"]["steps"]):
            if "run" not in step or status:
                continue
            written = self.here / f"output-{number}"
            written.touch()
            status = self._step(step, look, written, variables)
            lines = written.read_text(encoding="utf-8").splitlines()
            pairs = [line.partition("=") for line in lines]
            outputs[step.get("id", str(number))] = {name: value for name, _, value in pairs}
        return status, outputs

    def _step(
        self,
        step: Mapping[str, Any],
        look: Callable[[str], str],
        written: Path,
        variables: Mapping[str, str],
    ) -> int:
        def filled(text: str) -> str:
            return _EXPRESSION.sub(lambda found: str(evaluate(found[1], look)), text)

        assert step["shell"] == "bash"
        script = self.here / "script.sh"
        script.write_text(filled(step["run"]), encoding="utf-8")
        environment = {
            "PATH": os.environ["PATH"],
            "GITHUB_ACTION_PATH": str(self.gate / "ci" / "github"),
            "GITHUB_WORKSPACE": str(self.workspace),
            "GITHUB_OUTPUT": str(written),
            "RUNNER_TEMP": str(self.here / "temp"),
            "RUNNER_OS": "Linux",
            "RUNNER_ARCH": "X64",
        } | variables
        environment |= {name: filled(value) for name, value in step.get("env", {}).items()}
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
        return subprocess.run(command, cwd=self.workspace, env=environment, check=False).returncode


# --- GitLab ---------------------------------------------------------------------------------


def gitlab_jobs(documents: list[Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Give the jobs with inputs filled in, as GitLab does before it looks at them."""
    header, jobs = documents
    declared = header["spec"]["inputs"]
    given = {name: (each or {}).get("default") for name, each in declared.items()} | dict(inputs)

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: filled(each) for name, each in value.items()}
        if isinstance(value, list):
            return [filled(each) for each in value]
        if not isinstance(value, str):
            return value
        if (alone := _INPUT.fullmatch(value)) and not isinstance(given[alone[1]], bool):
            return given[alone[1]]
        return _INPUT.sub(lambda found: json.dumps(given[found[1]]), value)

    return filled(copy.deepcopy(jobs))


def run_gitlab_job(jobs: Mapping[str, Any], name: str, project: Path, **variables: str) -> int:
    """Run a job's script in its project; the status."""
    job = jobs[name]
    base = jobs[job["extends"]]
    settings = base["variables"] | job.get("variables", {})
    settings = {
        key: value.replace("$CI_PROJECT_DIR", str(project)) for key, value in settings.items()
    }
    environment = {"PATH": os.environ["PATH"], "CI_PROJECT_DIR": str(project)}
    script = "\n".join(job.get("script", base["script"]))
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        cwd=project,
        env=environment | settings | variables,
        check=False,
    ).returncode
