"""Sessions to make reports of, one of them told by a target that wants to break the report."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema

from fixtures.contract.violation import Violation
from fixtures.defects import Defect
from fixtures.target import Target
from fixtures.trace.records import Source
from fixtures.verdict.base import Base
from fixtures.verdict.records import Check
from fixtures.verdict.results import SCHEMA, results_data
from fixtures.verdict.session import Session

HEAD = Target("~/fork@feature", Path("/fork"), "revision", "0.19.2", "5eed" * 10, False)
LINE = Source("megatron/core/fusions/add.py", 34, "residual = residual.to(x.dtype)")
OLD_LINE = Source("megatron/core/models/old.py", 7, "logits = logits.bfloat16()")
GONE_LINE = Source("megatron/core/models/gone.py", 9, "def forward(self, *args):", exact=False)
CRASH_LINE = Source("megatron/core/extensions/norm.py", 11, "return super().forward(x)")
TRACEBACK = "Traceback (most recent call last):\n  File 'norm.py'\nTypeError: no fp32 here"
DEFECT = Defect(
    "stock-norm", "the norm refuses an fp32 stream", ("N7",), ("*",), "", "", "https://e.org/1"
)
PIPED = "dense-deep.fp32.train.pp2-interleaved"
WIRE = "activation from rank 0 to 1"

NARROWED = Violation(
    "S1", "dense.fp32.train", "layer out", "float32", "bfloat16",
    layer=0, phase="forward", source=LINE,
)  # fmt: skip
OLD = Violation("N2", "dense.off.train", "logits", "float32", "bfloat16", source=OLD_LINE)
GONE = Violation("S2", "dense.fp32.eval", "layer in", "intact", "broken", layer=1, source=GONE_LINE)
CRASHED = Violation(
    "N6", "te-dense.fp32.train", "the run", "a run to its end", "raised TypeError",
    source=CRASH_LINE,
)  # fmt: skip
ON_WIRE = Violation("P3", PIPED, WIRE, "float32", "bfloat16", stage=0, phase="forward", source=LINE)
DRIFTED = Violation(
    "D2", "long-rope.fp32.train", "layer out", "no more drift", "1.3 times that",
    layer=1, phase="forward",
)  # fmt: skip
GREW = Violation(
    "D5", "long-rope.fp32.train", "all layers together", "no more drift", "1.3 times that"
)


def broken_session() -> Session:
    """A change that broke something, fixed something and left something as broken as it was."""
    base = Base(
        {
            "spec": "~/fork@main", "label": "~/fork@main", "kind": "revision",
            "version": "0.19.2", "revision": "ba5e" * 10, "modified": False, "prefix": "",
        },
        "REJECT", "2 faults", {},
    )  # fmt: skip
    return Session(HEAD, base, "cpu", "full", list(_checks()), [DEFECT], None, 61.2)


def _checks() -> Iterator[Check]:
    narrow = [replace(NARROWED, layer=layer) for layer in (0, 1)]
    yield _check(
        NARROWED,
        "test_dtype",
        "violation",
        violations=narrow,
        evidence={"boundaries": narrowed_stream("dense.fp32.train")},
    )
    yield _check(OLD, "test_logits", "in-base", in_base=[OLD])
    yield _check(GONE, "test_path", fixed=[GONE])
    yield _check(CRASHED, "test_fused_norm", "violation", violations=[CRASHED], reason=TRACEBACK)
    yield _check(
        ON_WIRE,
        "test_wire",
        "violation",
        violations=[ON_WIRE],
        evidence={"boundaries": interleaved_stream(PIPED), "messages": messages(PIPED)},
    )
    yield _check(
        DRIFTED, "test_drift", "violation", violations=[DRIFTED], evidence={"drift": drift()}
    )
    yield _check(
        GREW,
        "test_no_worse",
        "violation",
        violations=[GREW],
        evidence={"drift-change": drift_changes()},
    )
    known = Violation("N7", "stock.fp32.train", "the run", "a run", "refused")
    yield _check(known, "test_norm", "known-defect", known=[("stock-norm", known)])
    yield Check("N1", "x", "suites/x.py::test_router[x]", "not-applicable", "the target has none")
    yield Check("S7", "y", "suites/x.py::test_bits[y]", "error", "KeyError\nin the gate")
    yield Check("S3", "z", "suites/x.py::test_values[z]",
                evidence={"boundaries": clean_stream("dense-fp16.off.train")})  # fmt: skip


def _check(of: Violation, test: str, outcome: Any = "pass", **fields: Any) -> Check:
    return Check(of.rule, of.subject, f"suites/x.py::{test}[{of.subject}]", outcome, **fields)


def _crossing(case: str, place: str, phase: str, dtype: str, **fields: Any) -> dict[str, Any]:
    row = {"case": case, "stage": 0, "chunk": 0, "layer": None, "place": place, "phase": phase}
    return row | {"dtype": dtype, "narrowed": False} | fields


def narrowed_stream(case: str) -> list[dict[str, Any]]:
    """Two layers of which the first narrows the stream."""
    wide, narrow = "float32", "bfloat16"
    return [
        _crossing(case, "embedding out", "forward", wide),
        _crossing(case, "stage in", "forward", wide),
        _crossing(case, "layer in", "forward", wide, layer=0),
        _crossing(case, "layer out", "forward", narrow, layer=0, narrowed=True),
        _crossing(case, "layer in", "forward", narrow, layer=1),
        _crossing(case, "layer out", "forward", narrow, layer=1),
        _crossing(case, "final norm in", "forward", narrow),
        _crossing(case, "layer out", "recompute", narrow, layer=1),
        _crossing(case, "layer out", "backward", narrow, layer=1),
        _crossing(case, "layer in", "backward", wide, layer=0),
    ]


def clean_stream(case: str) -> list[dict[str, Any]]:
    """One layer as it should be."""
    places = ("layer in", "layer out")
    return [_crossing(case, place, "forward", "float16", layer=0) for place in places]


def interleaved_stream(case: str) -> list[dict[str, Any]]:
    """Four layers on two stages with two chunks each, as the ranks told them: stage by stage."""
    return [
        _crossing(case, "layer out", "forward", "bfloat16", stage=stage, chunk=chunk, layer=layer)
        for stage, chunk, layer in ((0, 0, 0), (0, 1, 2), (1, 0, 1), (1, 1, 3))
    ]


def messages(case: str) -> list[dict[str, Any]]:
    """A wire on which an activation is narrow and a gradient was never received."""
    ends = {"case": case, "messages": 3}
    return [
        ends | {"sender": sender, "receiver": receiver, "kind": kind, "sent": sent, "received": got}
        for sender, receiver, kind, sent, got in (
            (1, 0, "gradient", "float32", None),
            (0, 1, "activation", "bfloat16", "bfloat16"),
        )
    ]


def drift(scale: float = 1.0) -> list[dict[str, Any]]:
    """Drift of a short stack and of a deep one, flag on and off."""
    return [
        {
            "case": f"{stack}.{flag}.train", "place": "stream", "phase": phase, "block": "decoder",
            "layer": layer, "seeds": 2, "unit": "u of bfloat16",
            "normwise": scale * (layer + 1) ** 0.5, "promised": (layer + 1) ** 0.4,
            "allowed": 1.02, "by_seed": [1.0, 1.0], "componentwise": None, "ulps": None,
            "cosine": 0.0,
        }
        for stack, layers in (("long-rope", 2), ("depth-16", 16))
        for flag in ("fp32", "off")
        for phase in ("forward", "backward")
        for layer in range(layers)
    ]  # fmt: skip


def drift_changes() -> list[dict[str, Any]]:
    """How a case drifts against its base: at one place, and as a whole."""
    row = {"case": "long-rope.fp32.train", "seeds": 2, "visible": 0.043, "grew": True}
    at = {"place": "stream", "phase": "forward", "block": "decoder", "layer": 1}
    whole = {"place": "all", "phase": "", "block": None, "layer": None}
    return [row | at | {"ratio": 1.3454}, row | whole | {"ratio": 1.25}]


def broken_results() -> dict[str, Any]:
    """Give the results of `broken_session` as they are read from its file."""
    return _valid(json.loads(json.dumps(results_data(broken_session()))))


def clean_results() -> dict[str, Any]:
    """Give the results of a session without a base that found nothing."""
    checks = [Check("S1", "dense.fp32.train", "suites/x.py::test[dense.fp32.train]")]
    return _valid(results_data(Session(HEAD, None, "cpu", "quick", checks, [], None, 30.0)))


def unjudged_results(*checks: Check) -> dict[str, Any]:
    """Give the results of a session that ended before its time."""
    reason = "the session was broken off"
    return _valid(results_data(Session(HEAD, None, "cpu", "quick", checks, [], reason, 3.0)))


def _valid(results: dict[str, Any]) -> dict[str, Any]:
    jsonschema.validate(results, json.loads(SCHEMA.read_text()))
    return results


HOSTILE = (
    "</script></style></title></code></pre>--><script>alert(1)</script>"
    "<img src=x onerror=alert(1)>\" onmouseover=\"alert(1)' autofocus='"
    "&lt;\x00\x1b[31m\r\u202e\u2028\ud800\ufffe{{ 7 * 7 }}{% raw %}$\\frac$"
)
"""What a target may put into its lines, messages and names."""

_FREE = frozenset(
    "spec label version revision reason subject test expected seen path text where elsewhere why "
    "reference title id again dtype sent received unit case".split()
)
_FIXED = frozenset({"stream", "losses", "parameters", "all"})


def hostile(data: Any, name: str = "") -> Any:
    """Put hostile text behind every text of results that a target may have a say in."""
    if isinstance(data, dict):
        return {key: hostile(value, key) for key, value in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, str):
        return [hostile(value, name) for value in data]
    free = name in _FREE or (name in ("place", "source") and data not in _FIXED)
    return data + HOSTILE if free and data and isinstance(data, str) else data
