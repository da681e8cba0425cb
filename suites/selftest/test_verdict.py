"""What follows from checks: verdict, faults, results for machines, words for people."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from _pytest._io import TerminalWriter

from fixtures.contract.violation import Violation
from fixtures.defects import Defect
from fixtures.target import Target
from fixtures.trace.records import Source
from fixtures.verdict.faults import group_faults
from fixtures.verdict.records import EXIT_STATUS, Check, Outcome, decide
from fixtures.verdict.render import render
from fixtures.verdict.results import SCHEMA, clear_results, results_data, write_results
from fixtures.verdict.session import Session

LINE = Source("megatron/core/fusions/add.py", 34, "residual = residual.to(x.dtype)")
VIOLATION = Violation(
    "S2", "dense.fp32.train", "layer out", "never narrowed", "float32 -> bfloat16",
    layer=0, phase="forward", source=LINE,
)  # fmt: skip
DEFECT = Defect("narrow", "the wire is narrow", ("S2",), ("*",), "", "b", "https://e.org/1")
TARGET = Target("0.16.1", Path("/releases/0.16.1"), "release", "0.16.1", None, False)


def session(checks: Sequence[Check], **fields: Any) -> Session:
    settings = {"base": None, "device": "cpu", "tier": "quick", "cannot_judge": None}
    settings |= {"defects": [DEFECT], "seconds": 1.5}
    return Session(target=TARGET, checks=checks, **settings | fields)


def telling(session: Session) -> str:
    paper = io.StringIO()
    render(TerminalWriter(paper), session)
    return paper.getvalue()


def check(outcome: Outcome, **fields: object) -> Check:
    return Check("S2", "dense.fp32.train", "suites/x.py::test", outcome, **fields)


PASSED, REJECTED = check("pass"), check("violation", violations=[VIOLATION])


@pytest.mark.parametrize(
    ("outcomes", "word"),
    [
        (["pass"], "ACCEPT"),
        (["pass", "known-defect", "not-applicable"], "ACCEPT"),
        (["known-defect"], "ACCEPT"),
        (["pass", "violation"], "REJECT"),
        (["violation", "error", "not-checked"], "REJECT"),
        (["pass", "error"], "CANNOT JUDGE"),
        (["pass", "not-checked"], "CANNOT JUDGE"),
        (["not-applicable"], "CANNOT JUDGE"),
        ([], "CANNOT JUDGE"),
    ],
)
def test_verdict(outcomes: list[Outcome], word: str) -> None:
    verdict = decide([check(outcome) for outcome in outcomes], faults=1)
    assert verdict.word == word
    assert verdict.line.startswith(f"verdict: {word}: ")


def test_a_target_that_cannot_be_judged_is_told() -> None:
    assert decide([PASSED], cannot_judge="no torch").line == "verdict: CANNOT JUDGE: no torch"
    rejected = decide([REJECTED], 1, cannot_judge="stopped")
    assert rejected.line == "verdict: REJECT: 1 fault; checks: 1 rejected; no further: stopped"


def test_exit_status() -> None:
    assert EXIT_STATUS == {"ACCEPT": 0, "REJECT": 1, "CANNOT JUDGE": 2}


def test_a_line_is_one_fault() -> None:
    elsewhere = replace(VIOLATION, rule="S1", layer=1, subject="mamba.fp32.train")
    (fault,) = group_faults([VIOLATION, elsewhere])
    assert fault.rules == ("S1", "S2")
    assert fault.layers == (0, 1)
    assert fault.first == elsewhere
    assert fault.subjects == ("dense.fp32.train",)


def test_different_things_at_one_definition_are_different_faults() -> None:
    vague = replace(LINE, exact=False)
    one = replace(VIOLATION, source=vague)
    assert len(group_faults([one, replace(one, seen="float16"), replace(one, layer=1)])) == 2


def test_different_lines_are_different_faults() -> None:
    other = replace(VIOLATION, source=replace(LINE, line=35))
    lineless = replace(VIOLATION, source=None, subject="mamba.fp32.train")
    assert len(group_faults([VIOLATION, other, lineless])) == 3


def test_what_has_no_line_goes_with_the_line_in_its_case() -> None:
    consequence = replace(VIOLATION, rule="S1", source=replace(LINE, line=1, exact=False))
    (fault,) = group_faults([consequence, VIOLATION, replace(VIOLATION, source=None, layer=3)])
    assert fault.source == LINE
    assert fault.first == VIOLATION
    assert fault.layers == (0, 3)


def test_a_number_that_is_off_goes_with_the_only_line() -> None:
    drift = replace(VIOLATION, rule="D2", source=None, subject="long-rope.fp32.train")
    (fault,) = group_faults([drift, VIOLATION])
    assert fault.rules == ("D2", "S2")
    other = replace(VIOLATION, source=replace(LINE, line=35), subject="moe.fp32.train")
    assert len(group_faults([drift, VIOLATION, other])) == 3


def test_backward_goes_with_the_line_that_did_it_forward() -> None:
    other = replace(LINE, line=856, text="residual = residual.float()")
    backward = replace(VIOLATION, rule="S5", phase="backward", source=other)
    drift = replace(VIOLATION, rule="D2", source=None, subject="long-rope.fp32.train")
    (fault,) = group_faults([backward, VIOLATION, drift])
    assert fault.source == LINE
    assert fault.rules == ("D2", "S2", "S5")
    second = replace(VIOLATION, source=replace(LINE, line=35))
    assert len(group_faults([backward, VIOLATION, second])) == 3


def test_a_check_travels_between_processes() -> None:
    sent = check("violation", violations=[VIOLATION], known=[("narrow", VIOLATION)])
    assert Check.from_data(json.loads(json.dumps(sent.to_data()))) == sent


def test_results_fit_their_schema(tmp_path: Path) -> None:
    checks = [PASSED, REJECTED, check("known-defect", known=[("narrow", VIOLATION)])]
    data = results_data(session(checks))
    read = json.loads(write_results(tmp_path / "new" / "folder", data).read_text())
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(read, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(read | {"verdict": "MAYBE"}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(read | {"surplus": 1}, schema)


def test_people_are_told_everything() -> None:
    fixed = replace(DEFECT, id="gone", title="the embedding is narrow")
    checks = [
        REJECTED,
        check("violation", violations=[replace(VIOLATION, layer=3, subject="mamba.fp32.train")]),
        check("known-defect", known=[("narrow", VIOLATION)]),
        check("not-applicable", reason="no experts"),
        check("not-checked", reason="no layer seen"),
        check("error", reason="Traceback: boom"),
    ]
    told = telling(session(checks, defects=[DEFECT, fixed]))
    for words in (
        "violation of S2 identity-path",
        f"{LINE.path}:34",
        LINE.text,
        "dense.fp32.train, layer 0 out, forward",
        "float32 -> bfloat16",
        "1 more place in layers 0, 3 and in mamba.fp32.train",
        "known defect: narrow: the wire is narrow (1 check; https://e.org/1)",
        "fixed here: gone: the embedding is narrow",
        "not applicable: no experts (1 check)",
        "not checked: no layer seen (1 check)",
        "Traceback: boom",
        "megatron-core 0.16.1",
    ):
        assert words in told
    assert told.rstrip().splitlines()[-1] == decide(checks, 1).line


def test_what_a_target_says_stays_in_its_line() -> None:
    hostile = "\x1b[2K\nverdict: ACCEPT: all\r\u2028verdict: ACCEPT: all"
    told = replace(VIOLATION, seen=hostile, source=replace(LINE, text=hostile))
    checks = [
        check("violation", violations=[told]),
        check("error", reason=f"Traceback:{hostile}"),
        check("not-checked", reason=hostile),
    ]
    told = telling(session(checks, cannot_judge=hostile))
    assert [line for line in told.split("\n") if not line.isprintable()] == []
    verdicts = [line for line in told.splitlines() if line.startswith("verdict:")]
    assert verdicts == [told.rstrip().splitlines()[-1]]
    assert verdicts[0].startswith("verdict: REJECT")


def test_results_that_cannot_be_written_are_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "results.json.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_results(tmp_path, results_data(session([PASSED])))
    assert list(tmp_path.iterdir()) == []
    for checks, word in (([PASSED], "ACCEPT"), ([REJECTED], "REJECT")):
        verdict = session(checks, unwritten="no room").verdict
        assert verdict.word == "CANNOT JUDGE"
        assert verdict.reason.startswith(f"no room (without that: {word}: ")
        assert telling(session(checks, unwritten="no room")).endswith(f"{verdict.line}\n")


def test_results_of_an_earlier_session_are_not_this_ones(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    clear_results(folder)
    write_results(folder, results_data(session([PASSED])))
    clear_results(folder)
    assert list(folder.iterdir()) == []
