"""What is written for the places where people look: each format, and hostile text in each."""

import copy
import html.parser
import io
import json
import posixpath
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import cmarkgfm
import jsonschema
import pytest
from _pytest._io import TerminalWriter
from cmarkgfm.cmark import Options

from fixtures.contract.rules import RULES
from fixtures.contract.violation import Violation
from fixtures.defects import Defect
from fixtures.report import summary, write_all
from fixtures.report.annotations import annotations, hold_commands, refusal
from fixtures.report.findings import findings, one_line
from fixtures.report.gitlab import code_quality
from fixtures.report.sarif import sarif_log
from fixtures.report.summary import summary_page
from fixtures.target import Target
from fixtures.trace.records import Source
from fixtures.verdict.base import Base
from fixtures.verdict.plugin import Judge
from fixtures.verdict.records import Check
from fixtures.verdict.render import render
from fixtures.verdict.results import SCHEMA, results_data, write_results
from fixtures.verdict.session import Session
from suites.selftest.gate import REPOSITORY, run_gate
from suites.selftest.mutants import MUTANTS
from suites.selftest.published import require_code_quality, require_sarif
from suites.selftest.runner import Command, carried_out

BELOW = "third_party/Megatron-LM/"
TARGET = Target("fork", Path("/fork"), "checkout", "0.19.2", "a" * 40, False, BELOW)
LINE = Source("megatron/core/add.py", 34, "residual = residual.to(x.dtype)")
ONE = Violation(
    "S2", "dense.fp32.train", "layer out", "never narrowed", "float32 -> bfloat16",
    layer=0, phase="forward", source=LINE,
)  # fmt: skip
OTHER = replace(ONE, rule="S1", source=Source("megatron/core/other.py", 7, "x = y"))
GONE = replace(ONE, source=Source("megatron/core/gone.py", 5, "was here"))
LINELESS = replace(ONE, rule="P1", source=None, subject="mamba.fp32.train")
DEFECT = Defect("narrow", "the wire is narrow", ("S2",), ("*",), "", "b", "https://e.org/1")

HOSTILE = (
    "`a` | b <script>alert(1)</script> **c** [d](https://evil.example) @everyone &amp; \\| \\",
    "</code></td></tr></table>\n\n# heading\n\n<img src=https://evil.example/x>\n\n- item",
    "x\n::add-mask::verdict\n::error file=a.py,line=1::forged\r\n##[add-mask]verdict",
    "100% %0A%25 a: b, c=d :: e, file=/etc/passwd {0} {evil}",
    "\x1b[31mred\x07 \u202egnp.\u2028 \ud800 \x00",
    "A" * 5000,
)


def session(*violations: Violation, base: Base | None = None, **fields: Any) -> Session:
    check = Check("S2", "dense.fp32.train", "suites/x.py::test")
    try:
        Judge(check, [], base)(violations)
    except (pytest.fail.Exception, pytest.xfail.Exception):
        assert check.outcome != "pass"
    settings = {"defects": [DEFECT], "cannot_judge": None, "target": TARGET} | fields
    return Session(base=base, device="cpu", tier="quick", checks=[check], seconds=1.5, **settings)


def results(*violations: Violation, base: Base | None = None, **fields: Any) -> dict[str, Any]:
    data = results_data(session(*violations, base=base, **fields))
    jsonschema.validate(data, json.loads(SCHEMA.read_text()))
    # As it comes out of the file.
    return json.loads(json.dumps(data))


def base_with(*violations: Violation, strict: bool = False) -> Base:
    (check,) = session(*violations).checks
    told = results(*violations)
    return Base(told["target"], "REJECT", "1 fault", {check.test: check}, strict)


def hostile(text: str) -> Violation:
    """A violation whose every text is hostile, its file's name among them."""
    source = Source(f"megatron/core/{text}", 3, text)
    return replace(ONE, subject=text, place=text, expected=text, seen=text, source=source)


# --- Findings -------------------------------------------------------------------------------


def test_paths_lead_from_the_top_of_the_repository() -> None:
    (finding,) = findings(results(ONE))
    assert (finding.path, finding.line) == ("third_party/Megatron-LM/megatron/core/add.py", 34)


@pytest.mark.parametrize("path", ["../../../etc/passwd", "/etc/passwd", "a/../../../../x", ".."])
def test_a_path_that_leads_out_of_the_repository_is_none(path: str) -> None:
    (finding,) = findings(results(replace(ONE, source=replace(LINE, path=path))))
    assert (finding.path, finding.text) == (None, "")
    assert "no line of the target could be named" in finding.message


def marks(*violations: Violation, base: Base | None = None) -> list[str]:
    return [finding.fingerprint for finding in findings(results(*violations, base=base))]


@pytest.mark.parametrize("exact", [True, False])
def test_a_fingerprint_stays_when_its_line_moves(exact: bool) -> None:
    one = replace(ONE, source=replace(LINE, exact=exact))
    moved = replace(one, source=replace(one.source, line=99))
    assert marks(one) == marks(moved)
    edited = replace(one, source=replace(one.source, text="residual = residual.half()"))
    elsewhere = replace(one, source=replace(one.source, path="megatron/core/b.py"))
    assert len({*marks(one), *marks(edited), *marks(elsewhere)}) == 3


def test_fingerprints_of_a_session_differ() -> None:
    vague = replace(ONE, rule="D2", subject="other", source=replace(LINE, exact=False))
    twice = replace(ONE, source=replace(LINE, line=50))
    found = marks(ONE, twice, OTHER, LINELESS, vague, replace(vague, seen="float16"))
    assert len(set(found)) == 6


def test_a_second_such_line_does_not_rename_the_first() -> None:
    (before,) = marks(ONE)
    above = replace(ONE, layer=1, source=replace(LINE, line=2))
    found = findings(results(ONE, above, base=base_with(ONE)))
    assert {each.status: each.fingerprint == before for each in found} == {
        "in base": True, "introduced": False,
    }  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
def test_what_rejects_is_known(strict: bool) -> None:
    found = findings(results(ONE, OTHER, base=base_with(ONE, GONE, strict=strict)))
    assert {each.status: each.rejects for each in found} == {
        "introduced": True, "in base": strict, "fixed": False,
    }  # fmt: skip
    assert [each.rejects for each in findings(results(ONE))] == [True]


# --- GitHub's annotations -------------------------------------------------------------------


@pytest.fixture
def github(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")


def printed(finished: Session) -> list[str]:
    """What the gate prints of a session, without its colours."""
    paper = io.StringIO()
    render(TerminalWriter(paper), finished, annotations(results_data(finished)))
    return paper.getvalue().splitlines()


def shown(*lines: str) -> list[Command]:
    return carried_out([*hold_commands(), *lines])


def test_elsewhere_nothing_is_said_to_github(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert [*hold_commands(), *annotations(results(ONE)), *refusal("no")] == []


@pytest.mark.usefixtures("github")
def test_annotations_are_on_the_offending_lines() -> None:
    lines = printed(session(ONE, OTHER, LINELESS, base=base_with(ONE)))
    one, other = shown(*lines)
    assert one == Command(
        "error",
        {
            "file": f"{BELOW}megatron/core/other.py",
            "line": "7",
            "title": "S1 stream-dtype",
        },
        "expected never narrowed, seen float32 -> bfloat16 in dense.fp32.train, layer 0 out, "
        "forward",
    )
    assert other.properties == {"title": "P1 pipeline-dtype"}
    assert "(no line of the target could be named)" in other.data
    assert lines[-1].startswith("verdict: REJECT: ")


@pytest.mark.usefixtures("github")
@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_no_command(text: str) -> None:
    (command,) = shown(*printed(session(hostile(text))))
    assert command.name == "error"
    path = BELOW + one_line(posixpath.normpath(f"megatron/core/{text}"))
    assert command.properties == {"file": path, "line": "3", "title": "S2 identity-path"}
    assert one_line(text) in command.data


@pytest.mark.usefixtures("github")
def test_without_being_held_hostile_text_would_be_a_command() -> None:
    forged = carried_out(printed(session(hostile(HOSTILE[2]))))
    assert {"add-mask", "error"} <= {command.name for command in forged}


@pytest.mark.usefixtures("github")
def test_a_token_cannot_be_guessed() -> None:
    say = "import fixtures.report.annotations as a; print(*a.hold_commands())"
    run = [sys.executable, "-c", say]
    told = {subprocess.check_output(run, cwd=REPOSITORY, text=True) for _ in range(2)}
    assert len(told | {"".join(hold_commands())}) == 3


@pytest.mark.usefixtures("github")
def test_what_cannot_be_judged_is_annotated() -> None:
    for lines in (
        annotations(results(cannot_judge="no torch: 100%\n::x")),
        refusal("no torch: 100%\n::x"),
    ):
        (command,) = shown(*lines)
        assert command == Command(
            "error", {"title": "precision gate"}, "CANNOT JUDGE: no torch: 100%\\n::x"
        )


# --- The summary ----------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    """A page as a browser would see it: its elements, links and text."""

    def __init__(self, markdown: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.links: set[str] = set()
        self.text = ""
        flags = Options.CMARK_OPT_UNSAFE
        self.feed(cmarkgfm.github_flavored_markdown_to_html(markdown, flags))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.links |= {value or "" for _, value in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def is_harmless(markdown: str) -> bool:
    page = Page(markdown)
    plain = {"h2", "h3", "p", "br", "code", "table", "tr", "th", "td", "a", "ul", "li"}
    return page.elements <= plain and page.links <= {rule.source for rule in RULES.values()}


def hostile_results(text: str) -> dict[str, Any]:
    known = replace(DEFECT, id=text, title=text, source=text)
    finished = session(hostile(text), base=base_with(hostile(f"base {text}")), defects=[known])
    finished.checks[0].known.append((text, ONE))
    data = results_data(finished)
    data["target"]["label"] = data["base"]["target"]["label"] = data["reason"] = text
    return data


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_text_in_the_summary(text: str) -> None:
    told = summary_page(hostile_results(text))
    assert is_harmless(told)
    assert Page(told).text.count(one_line(text)[:200]) >= 10
    told.encode("utf-8")


@pytest.mark.parametrize("broken", ["escape", "one_line"])
def test_a_summary_that_trusts_text_is_seen(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "escape":
        environment = summary.Environment
        monkeypatch.setattr(
            summary,
            "Environment",
            lambda **given: environment(**given | {"autoescape": False}),
        )
    else:
        monkeypatch.setattr(summary, "one_line", str)
    pages = [summary_page(hostile_results(text)) for text in HOSTILE[:2]]
    assert not all(map(is_harmless, pages))


def test_the_summary_tells_everything() -> None:
    page = Page(summary_page(results(ONE, OTHER, base=base_with(ONE, GONE))))
    for words in (
        "Precision gate: REJECT",
        "1 fault introduced; checks: 1 rejected",
        "fork",
        "third_party/Megatron-LM/megatron/core/other.py:7",
        "x = y",
        "introduced",
        "S1 stream-dtype",
        "dense.fp32.train, layer 0 out, forward",
        "never narrowed",
        "float32 -> bfloat16",
        "1 introduced, 1 already in base, 1 fixed by this change",
        "(REJECT: 1 fault)",
    ):
        assert words in page.text
    assert {"h2", "h3", "table", "td", "a"} <= page.elements


def test_the_summary_stays_below_what_github_shows() -> None:
    lines = [replace(hostile(f"{n}{HOSTILE[-1]}<"), layer=n) for n in range(300)]
    told = summary_page(results(*lines))
    assert len(told.encode()) < 1 << 20
    assert "200 more in results.json" in told


# --- SARIF and GitLab's Code Quality --------------------------------------------------------


def everything() -> dict[str, Any]:
    return results(ONE, OTHER, LINELESS, base=base_with(ONE, GONE))


Break = Callable[[dict[str, Any]], object]

SARIF_MUTANTS: Sequence[Break] = (
    lambda log: log.update(version="2.0.0"),
    lambda log: log["runs"][0].pop("tool"),
    lambda log: log["runs"][0]["results"][0].pop("message"),
    lambda log: log["runs"][0]["results"][0].update(level="fatal"),
    lambda log: log["runs"][0]["results"][0].update(baselineState="introduced"),
    lambda log: log["runs"][0]["results"][0].update(line=3),
    lambda log: log["runs"][0]["tool"]["driver"]["rules"][0].update(helpUri=3),
    lambda log: _region(log["runs"][0]["results"][0]).update(startLine=0),
)


def _region(result: dict[str, Any]) -> dict[str, Any]:
    return result["locations"][0]["physicalLocation"]["region"]


def test_sarif_fits_its_schema() -> None:
    require_sarif(sarif_log(everything()))
    require_sarif(sarif_log(results()))
    require_sarif(sarif_log(results(cannot_judge="no torch")))


@pytest.mark.parametrize("number", range(len(SARIF_MUTANTS)))
def test_sarif_that_does_not_fit_is_seen(number: int) -> None:
    log = sarif_log(everything())
    SARIF_MUTANTS[number](log)
    with pytest.raises(jsonschema.ValidationError):
        require_sarif(log)


def test_sarif_says_what_rejects_and_what_the_base_has() -> None:
    (run,) = sarif_log(everything())["runs"]
    told = {
        (each["ruleId"], each["level"], each["baselineState"], "suppressions" in each)
        for each in run["results"]
    }
    assert told == {
        ("S1", "error", "new", False),
        ("P1", "error", "new", False),
        ("S2", "note", "unchanged", False),
        ("S2", "note", "absent", True),
    }
    (alone,) = sarif_log(results(ONE))["runs"][0]["results"]
    assert (alone["level"], "baselineState" in alone) == ("error", False)
    for each in run["results"]:
        assert run["tool"]["driver"]["rules"][each["ruleIndex"]]["id"] == each["ruleId"]
    assert {each["id"]: each["helpUri"] for each in run["tool"]["driver"]["rules"]} == {
        rule.id: rule.source for rule in RULES.values()
    }


def test_sarif_names_the_line_and_the_fault() -> None:
    (one,) = sarif_log(results(ONE))["runs"][0]["results"]
    (location,) = one["locations"]
    assert location["physicalLocation"] == {
        "artifactLocation": {"uri": f"{BELOW}megatron/core/add.py", "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": 34, "snippet": {"text": LINE.text}},
    }
    assert one["partialFingerprints"] == {"primaryLocationLineHash": marks(ONE)[0]}


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_text_in_sarif(text: str) -> None:
    log = json.loads(json.dumps(sarif_log(results(hostile(text)))))
    require_sarif(log)
    (one,) = log["runs"][0]["results"]
    uri = one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert not set(uri) & set(" \n<>`|\\:[]")
    assert "](" not in one["message"]["text"]
    assert "{" not in one["message"]["text"].replace("{{", "")


CODE_QUALITY_MUTANTS: Sequence[Break] = (
    lambda entry: entry.pop("fingerprint"),
    lambda entry: entry.pop("check_name"),
    lambda entry: entry.update(severity="error"),
    lambda entry: entry.update(description=""),
    lambda entry: entry["location"].update(path="./a.py"),
    lambda entry: entry["location"].update(path="a/../../b.py"),
    lambda entry: entry["location"]["lines"].update(begin=0),
)


def test_code_quality_has_the_documented_fields() -> None:
    report = code_quality(everything())
    require_code_quality(report)
    assert [(each["check_name"], each["severity"]) for each in report] == [
        ("S1", "critical"), ("P1", "critical"), ("S2", "info"),
    ]  # fmt: skip
    assert report[0]["location"] == {
        "path": f"{BELOW}megatron/core/other.py", "lines": {"begin": 7},
    }  # fmt: skip
    assert len({each["fingerprint"] for each in report}) == 3


@pytest.mark.parametrize("number", range(len(CODE_QUALITY_MUTANTS)))
def test_code_quality_that_lacks_something_is_seen(number: int) -> None:
    report = copy.deepcopy(code_quality(everything()))
    CODE_QUALITY_MUTANTS[number](report[0])
    with pytest.raises(jsonschema.ValidationError):
        require_code_quality(report)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_text_in_code_quality(text: str) -> None:
    report = json.loads(json.dumps(code_quality(results(hostile(text)))))
    require_code_quality(report)
    assert report[0]["description"].isprintable()


# --- Files ----------------------------------------------------------------------------------


def test_reports_are_written_beside_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("what an earlier step said\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    out = tmp_path / "out"
    out.mkdir()
    write_all(out, everything(), [])
    assert {path.name for path in out.iterdir()} == {
        "gitlab-code-quality.json", "report.html", "results.sarif", "summary.md",
    }  # fmt: skip
    require_sarif(json.loads((out / "results.sarif").read_text()))
    require_code_quality(json.loads((out / "gitlab-code-quality.json").read_text()))
    assert page.read_text() == "what an earlier step said\n" + (out / "summary.md").read_text()


def test_an_earlier_runs_files_do_not_stay(tmp_path: Path, gate_command: ModuleType) -> None:
    write_results(tmp_path, everything())
    write_all(tmp_path, everything(), [])
    (tmp_path / "of the user").touch()
    gate_command._clear(tmp_path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["of the user"]


def test_what_cannot_be_written_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no" / "page.md"))
    write_all(tmp_path, everything(), [])
    assert (tmp_path / "results.sarif").is_file()
    told = capsys.readouterr().err
    assert told.startswith("a part of the report is missing: ")
    assert str(tmp_path / "no" / "page.md") in told
    assert told.count("\n") == 1


# --- The gate itself ------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_session_on_github_tells_of_the_forks_own_line(
    newest_release: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "fork"
    target = MUTANTS[0].make(newest_release, repository / "third_party" / "Megatron-LM")
    git(repository, "init", "--quiet")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "vendor it")
    page = tmp_path / "page.md"
    run = run_gate(
        target, tmp_path / "out", "-k", "dense.fp32.train", "-m", "S2",
        GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(page),
    )  # fmt: skip
    assert run.status == 1, run.output
    assert run.last_line.startswith("verdict: REJECT: 1 fault")
    (command,) = carried_out(run.output.splitlines())
    path = f"{BELOW}{MUTANTS[0].file}"
    assert command.properties["file"] == path
    number = int(command.properties["line"])
    text = (repository / path).read_text().splitlines()[number - 1].strip()
    (fault,) = run.results["faults"]
    assert fault["source"]["text"] == text
    assert run.results["target"]["prefix"] == BELOW
    assert path in page.read_text()
    (entry,) = json.loads((tmp_path / "out" / "gitlab-code-quality.json").read_text())
    assert entry["location"] == {"path": path, "lines": {"begin": number}}
