"""The report as a page: what it tells, that it is valid, and that nothing from a target is markup.

What only a browser can tell is in test_page_in_browser.py.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import jinja2
import pytest
from html5lib import HTMLParser, getTreeBuilder
from html5lib.html5parser import ParseError

from fixtures.contract.rules import RULES
from fixtures.report.page import write as report
from fixtures.report.page.commands import command
from fixtures.report.page.drift import Panel, figures, panels
from fixtures.report.page.faults import fault_groups
from fixtures.report.page.maps import Map, maps
from fixtures.report.page.plots import draw
from fixtures.report.page.visible import clipped, clipped_start, is_web_address, visible
from fixtures.report.page.wire import wires
from fixtures.verdict.records import Check
from suites.selftest.gate import REPOSITORY
from suites.selftest.report_samples import (
    CRASH_LINE,
    GONE_LINE,
    HOSTILE,
    LINE,
    OLD_LINE,
    PIPED,
    TRACEBACK,
    broken_results,
    clean_results,
    drift,
    hostile,
    unjudged_results,
)

BASE_DRIFT = drift(scale=0.8)
ELEMENTS = set(
    "html head meta link title style body header main footer nav section article details summary "
    "h1 h2 h3 p div span a b br code pre ul li dl dt dd table thead tbody tr th td wbr figure "
    "figcaption svg g path rect circle text defs use clipPath".split()
)


def parsed(html: str) -> Element:
    """Read a page that has to be valid."""
    builder = getTreeBuilder("etree")
    return HTMLParser(builder, strict=True, namespaceHTMLElements=False).parse(html)


def text_of(element: Element) -> str:
    return "".join(element.itertext())


def of_class(element: Element, name: str) -> list[Element]:
    return [each for each in element.iter() if name in each.get("class", "").split()]


@pytest.fixture(scope="module")
def broken() -> Element:
    return parsed(report.page(broken_results(), BASE_DRIFT))


@pytest.mark.parametrize(
    ("status", "lines"),
    [
        ("introduced", (LINE, CRASH_LINE)),
        ("already in base", (OLD_LINE,)),
        ("fixed", (GONE_LINE,)),
    ],
)
def test_faults_are_told_by_status_with_their_lines(
    broken: Element, status: str, lines: tuple[Any, ...]
) -> None:
    told = [
        text_of(fault)
        for fault in of_class(broken, "fault")
        if text_of(of_class(fault, "status")[0]) == status
    ]
    assert len(told) == len(lines)
    for fault, line in zip(told, lines, strict=True):
        assert f"{line}" in fault
        assert line.text in fault


def test_a_fault_tells_why_with_a_public_source_and_how_to_see_it_again(broken: Element) -> None:
    fault = of_class(broken, "fault")[0]
    told = text_of(fault)
    for words in ("bf16 instead of fp32", "dense.fp32.train, layer 0 out", "A bf16 stream loses"):
        assert words in told
    assert "https://github.com/NVIDIA/Megatron-LM/pull/3504" in hrefs(fault)
    assert text_of(of_class(fault, "command")[0]) == (
        "./ci/gate --megatron '~/fork@feature' --tier full -- "
        "'suites/x.py::test_dtype[dense.fp32.train]'"
    )


def test_the_rest_is_told_too(broken: Element) -> None:
    told = text_of(broken)
    for words in (
        *("REJECT", "2 faults introduced", "~/fork@feature", "~/fork@main", "at 5eed5eed5eed"),
        *(TRACEBACK, "the target has none", "KeyError\nin the gate", "not looked at"),
        *("stock-norm", "the norm refuses an fp32 stream", "dense-deep.fp32.train.pp2-interleaved"),
        *("narrowed on the way", "1.3454", "1.2500", "4.3 %", "with probability 0.99"),
    ):
        assert words in told


@pytest.mark.parametrize(("strict", "rejecting"), [(False, 2), (True, 3)])
def test_what_rejects_stands_out(strict: bool, rejecting: int) -> None:
    results = broken_results()
    results["base"]["strict"] = strict
    page = parsed(report.page(results, []))
    assert len(of_class(page, "heavy")) == rejecting


def test_rules_are_told_with_how_their_checks_came_out(broken: Element) -> None:
    (rules,) = of_class(broken, "rules")
    told = {each.attrib["id"]: (each.attrib["class"], text_of(each)) for each in rules}
    assert set(told) == {f"rule-{rule}" for rule in RULES}
    for rule, state, words in (
        ("S1", "violation", "1 rejected"),
        ("S2", "pass", "1 passed"),
        ("N2", "in-base", "1 no worse than the base"),
        ("N7", "known-defect", "1 with known defects"),
        ("D4", "none", "not looked at"),
    ):
        assert told[f"rule-{rule}"][0] == state
        assert words in told[f"rule-{rule}"][1]


def test_a_clean_page_says_so() -> None:
    told = text_of(parsed(report.page(clean_results(), [])))
    assert "Nothing: every rule held" in told
    assert "the quick tier leaves out" in told


def test_a_session_that_could_not_judge_says_first_why() -> None:
    checks = [Check("S1", "x", "suites/x.py::test[x]", "not-checked", "no layer was seen")]
    told = text_of(parsed(report.page(unjudged_results(*checks), [])))
    assert told.index("the session was broken off") < told.index("no layer was seen")
    assert told.index("no layer was seen") < told.index("What broke")


def hrefs(element: Element) -> list[str]:
    return [link.attrib["href"] for link in element.iter("a")]


@pytest.fixture(scope="module")
def hostile_html() -> str:
    return report.page(hostile(broken_results()), hostile(BASE_DRIFT))


def assert_harmless(html: str) -> None:
    page = parsed(html)
    assert {element.tag.rpartition("}")[2] for element in page.iter()} <= ELEMENTS
    names = {name for element in page.iter() for name in element.attrib}
    assert not {name for name in names if name.startswith("on")}
    assert not names & {"src", "srcset", "action", "formaction", "autofocus", "srcdoc"}
    assert all(re.match(r"#|https://", href) for href in hrefs(page))


def test_what_comes_from_a_target_is_no_markup(hostile_html: str) -> None:
    assert_harmless(hostile_html)
    page = parsed(hostile_html)
    for place in ("reason", "facts", "line", "trace", "card", "plots", "dtype", "defects"):
        assert any("</script>" in text_of(each) for each in of_class(page, place)), place
    assert visible(LINE.text + HOSTILE) in text_of(page)


@pytest.mark.parametrize("off", ["autoescape", "finalize"])
def test_what_guards_against_a_target_is_what_keeps_it_harmless(
    off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = jinja2.Environment.__init__

    def weakened(environment: jinja2.Environment, **settings: Any) -> None:
        whole(environment, **settings | {off: None})

    monkeypatch.setattr(jinja2.Environment, "__init__", weakened)
    with pytest.raises((AssertionError, ParseError)):
        assert_harmless(report.page(hostile(broken_results()), []))


def test_what_does_not_show_is_spelled_out() -> None:
    assert visible("a\tb\n é ✓") == "a\tb\n é ✓"
    hidden = "\x00\x1b\r\x7f\x9b\u00ad\u200b\u202e\u2066\u2028\ud800\ufdd0\U000e0041"
    assert visible(hidden).isascii()
    assert visible("\u202e\x1b") == r"\u202e\x1b"


def test_what_is_too_long_is_cut_and_says_so() -> None:
    assert clipped("abcd", 4) == "abcd"
    assert clipped("abcde", 4) == "abcd… (1 more characters)"
    assert clipped_start("abcde", 4) == "(1 more characters) …bcde"
    results = json.loads(json.dumps(broken_results()).replace(LINE.text, "x" * 10**6))
    assert len(report.page(results, [])) < 10**6


def test_what_is_no_web_address_is_no_link() -> None:
    assert is_web_address("https://e.org/1")
    assert not any(map(is_web_address, ("data:text/html,x", "//e.org", "HTTPS", "")))
    results = broken_results()
    results["known_defects"][0]["source"] = "javascript:alert(1)"
    (defects,) = of_class(parsed(report.page(results, [])), "defects")
    assert "javascript:alert(1)" in text_of(defects)
    assert not hrefs(defects)


def test_the_policy_of_the_page_forbids_scripts_and_the_network(broken: Element) -> None:
    policies = [m.attrib["content"] for m in broken.iter("meta") if "http-equiv" in m.attrib]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_names_within_the_page_are_unique_and_every_reference_has_its_end(
    broken: Element,
) -> None:
    names = [element.attrib["id"] for element in broken.iter() if "id" in element.attrib]
    assert len(names) == len(set(names))
    values = [value for each in broken.iter() for value in each.attrib.values()]
    inner = [value[1:] for value in values if re.fullmatch(r"#[\w-]+", value)]
    inner += [name for value in values for name in re.findall(r"url\(#(.*?)\)", value)]
    assert len(inner) > 20
    assert set(inner) <= set(names)


def test_a_page_that_is_not_valid_is_noticed() -> None:
    with pytest.raises(ParseError):
        parsed(report.page(clean_results(), []).replace("</section>", "", 1))


def test_the_same_results_give_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    base = broken_results() | {"base": None}
    pages = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        for name, data in (("results", broken_results()), ("base", base)):
            (folder / f"{name}.json").write_text(json.dumps(data))
        arguments = [str(folder / "results.json"), str(folder / "base.json")]
        done = subprocess.run(
            [sys.executable, "-m", "fixtures.report.page", *arguments],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == str(folder / "report.html")
        pages.append((folder / "report.html").read_bytes())
    assert pages[0] == pages[1]
    assert "flag on, base" in pages[0].decode()


def map_of(case: str) -> Map:
    return next(each for each in maps(broken_results()) if each.case == case)


def told_cells(drawn: Map) -> dict[str, list[str]]:
    """The cells of each line: dtype, `!` where a rule breaks, `v` where the stream is narrowed."""
    return {
        line.label: [
            " ".join(
                cell.dtype + "!" * bool(cell.broken) + "v" * cell.narrowed
                for cell in line.cells.get(column, ())
            )
            for column in drawn.columns
        ]
        for part in drawn.parts
        for line in part.lines
    }


def test_a_map_has_a_line_for_each_layer_and_a_column_for_each_boundary() -> None:
    drawn = map_of("dense.fp32.train")
    assert drawn.columns == [
        ("forward", "in"), ("forward", "out"), ("recompute", "in"), ("recompute", "out"),
        ("backward", "out"), ("backward", "in"),
    ]  # fmt: skip
    wide, narrow = "float32", "bfloat16"
    assert told_cells(drawn) == {
        "embedding out": ["", wide, "", "", "", ""],
        "stage in": [wide, "", "", "", "", ""],
        "layer 0": [wide, f"{narrow}!v", "", "", "", wide],
        "layer 1": [narrow, f"{narrow}!", "", narrow, narrow, ""],
        "final norm in": [narrow, "", "", "", "", ""],
    }
    assert list(told_cells(drawn))[-1] == "final norm in"


def test_maps_with_violations_come_first() -> None:
    assert [bool(each.wrong) for each in maps(broken_results())] == [True, False, False]


def test_a_pipeline_is_in_the_order_that_the_stream_takes() -> None:
    drawn = map_of(PIPED)
    assert [part.label for part in drawn.parts] == [
        "stage 0, chunk 0", "stage 1, chunk 0", "stage 0, chunk 1", "stage 1, chunk 1",
    ]  # fmt: skip
    assert list(told_cells(drawn)) == ["layer 0", "layer 1", "layer 2", "layer 3"]


def test_an_encoder_comes_before_its_decoder() -> None:
    results = broken_results()
    row = results["checks"][0]["evidence"]["boundaries"][2] | {"case": "cross-attention.fp32.train"}
    results["checks"][0]["evidence"]["boundaries"] = [row | {"chunk": 1}, row]
    (drawn,) = (each for each in maps(results) if each.case == row["case"])
    assert [part.label for part in drawn.parts] == ["encoder", "decoder"]


def test_a_dtype_that_only_some_microbatches_had_is_marked_alone() -> None:
    results = broken_results()
    rows = results["checks"][0]["evidence"]["boundaries"]
    rows.append(rows[5] | {"dtype": "float32"})
    cells = {each.case: told_cells(each) for each in maps(results)}
    assert cells["dense.fp32.train"]["layer 1"][1] == "bfloat16! float32"


def test_the_wire_is_told_with_what_breaks_on_it(broken: Element) -> None:
    (wire,) = wires(broken_results())
    assert [(each.data["kind"], each.broken) for each in wire.channels] == [
        ("activation", ("P3",)), ("gradient", ()),
    ]  # fmt: skip
    told = [" ".join(text_of(row).split()) for row in of_class(broken, "wire")[0].iter("tr")]
    assert told == [
        "ranksmessagessentreceived",
        "0 → 13 \N{MULTIPLICATION SIGN} activationbf16bf16 breaks a rule",
        "1 → 03 \N{MULTIPLICATION SIGN} gradientfp32nothing",
    ]


def panel_of(run: str, phase: str = "forward") -> Panel:
    found = panels(broken_results(), BASE_DRIFT)
    return next(each for each in found if (each.run, each.phase) == (run, phase))


def test_a_panel_has_head_and_base_with_the_flag_on_and_off() -> None:
    panel = panel_of("long-rope.train")
    points = {(curve.flag_on, curve.of_base): curve.points for curve in panel.curves}
    assert set(points) == {(True, False), (False, False), (True, True), (False, True)}
    first, second = points[True, False]
    assert (first.drift, first.ceiling, first.broken) == (1.0, pytest.approx(1.02), False)
    assert second.broken
    assert [point.drift for point in points[True, True]] == pytest.approx([0.8, 0.8 * 2**0.5])


def test_a_case_that_only_the_base_has_is_not_drawn() -> None:
    assert panels(clean_results(), BASE_DRIFT) == []


def test_figures_compare_with_the_base() -> None:
    found = {
        (each.head["case"], each.head["phase"], each.head["layer"]): each
        for each in figures(broken_results(), BASE_DRIFT)
    }
    each = found["long-rope.fp32.train", "forward", 1]
    assert each.base is not None
    assert each.change is not None
    assert (each.base["normwise"], each.change["ratio"]) == (pytest.approx(0.8 * 2**0.5), 1.3454)
    assert each.broken == ("D2",)


@pytest.mark.parametrize("run", ["long-rope.train", "depth-16.train"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_picture_has_the_colours_of_its_page_and_names_of_its_own(run: str, phase: str) -> None:
    pictures = [draw(panel_of(run, phase), number) for number in (0, 1)]
    names = [set(re.findall(r'id="(.*?)"', picture)) for picture in pictures]
    assert names[0]
    assert not names[0] & names[1]
    for picture in pictures:
        assert "<style" not in picture
        assert "font-family" not in picture
        assert set(re.findall(r"(?:stroke|fill): ([^;\"]*)", picture)) == {
            "none", "currentColor", "var(--line)", "var(--flag-on)", "var(--flag-off)",
            *(["var(--bad)"] if (run, phase) == ("long-rope.train", "forward") else []),
        }  # fmt: skip


def test_numbers_without_a_place_in_a_picture_are_left_out_of_it() -> None:
    results = broken_results()
    for check in results["checks"]:
        for row in check["evidence"].get("drift", ()):
            row["normwise"] = {0: float("nan"), 1: float("inf"), 2: 0.0}.get(row["layer"], 1.0)
    for number, panel in enumerate(panels(results, [])):
        assert "nan" not in draw(panel, number)
    parsed(report.page(results, []))


AWKWARD = ["0.16.1", "~/a fork@feature", "it's", "a\nb", "tab\tand \x1b[31m", "$(date) `id` \\", ""]


@pytest.mark.parametrize("spec", AWKWARD)
def test_a_shell_gives_the_gate_what_a_command_means(spec: str) -> None:
    results = broken_results()
    results["target"]["spec"] = spec
    check = results["checks"][0] | {"test": f"suites/x.py::test[{spec}]"}
    told = command(results, check)
    assert visible(told) == told
    shell = f'show() {{ printf "%s\\0" "$@"; }}; show {told.removeprefix("./ci/gate")}'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == [
        "--megatron", spec, "--tier", "full", "--", f"suites/x.py::test[{spec}]",
    ]  # fmt: skip


def test_commands_fit_what_they_show_again() -> None:
    results = broken_results()
    checks = {check["rule"]: check for check in results["checks"]}
    assert command(results, checks["S2"], of_base=True).startswith(
        "./ci/gate --megatron '~/fork@main' --tier full -- "
    )
    for rule in ("D5", "S7"):
        assert shlex.split(command(results, checks[rule]))[3:] == [
            "--base", "~/fork@main", "--tier", "full",
            "--", "suites/x.py", "-k", f"[{checks[rule]['subject']}]",
        ]  # fmt: skip
        assert "--base" not in command(clean_results(), checks[rule])
    assert "--base" not in command(results, checks["S1"])
    told = {group.status: group.faults[0].again for group in fault_groups(results)}
    assert "'~/fork@main'" in told["fixed"]
    assert "'~/fork@feature'" in told["in base"]
    plain = clean_results()
    plain["target"]["spec"] = None
    assert command(plain, checks["S1"]) == (
        "./ci/gate -- 'suites/x.py::test_dtype[dense.fp32.train]'"
    )


def test_a_violations_own_command_goes_first() -> None:
    results = broken_results()
    own = "./ci/gate -- suites/x.py::test_dtype '--example=layers=1'"
    for violation in (results["faults"][0]["first"], results["checks"][0]["violations"][0]):
        violation["again"] = own
    assert fault_groups(results)[0].faults[0].again == own
    (listed,) = of_class(parsed(report.page(results, [])), "commands")[:1]
    told = [text_of(each) for each in of_class(listed, "command")]
    assert told[0] == own
    assert shlex.split(told[1])[-1].endswith("test_dtype[dense.fp32.train]")


def test_the_page_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = report.write_page(tmp_path / "new", clean_results(), [])
    before = path.read_text()
    monkeypatch.setattr(report, "page", lambda *_: "\ud800")
    with pytest.raises(UnicodeEncodeError):
        report.write_page(tmp_path / "new", clean_results(), [])
    assert path.read_text() == before
