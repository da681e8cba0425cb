"""Released megatron-core through the whole quick tier: clean ones pass, broken ones are named."""

import json
from pathlib import Path

import jsonschema
import pytest

from fixtures.target import default_cache, resolve
from fixtures.verdict.results import SCHEMA
from suites.selftest.gate import run_gate
from suites.selftest.mutants import ADD

# A whole quick tier in one process, on a machine that may be busy with another one.
pytestmark = pytest.mark.timeout(420)

CLEAN = ("0.17.1", "0.18.2", "0.19.2")
# The newest broken release through all that needs no recording, older ones where it shows best.
_WHOLE, _SHOWN = "not (property or golden)", "-k=dense.fp32.train or long-rope"
BROKEN = {
    "0.12.3": ("-m", _WHOLE, _SHOWN),
    "0.14.0": ("-m", _WHOLE, _SHOWN),
    "0.15.3": ("-m", _WHOLE, _SHOWN),
    "0.16.1": ("-m", _WHOLE),
}
EXPECTED_DEFECTS = {
    "fp32-decoder-input", "fp32-bias", "bf16-static-inputs", "stock-layernorm", "stock-rmsnorm",
    "fused-norm-input", "narrow-token-counts",
}  # fmt: skip


@pytest.mark.parametrize("version", CLEAN)
def test_clean_release_is_accepted(version: str, tmp_path: Path) -> None:
    run = run_gate(resolve(version, default_cache()).root, tmp_path)
    assert (run.status, run.last_line.split(":")[1]) == (0, " ACCEPT"), run.output
    shown = {known["defect"] for check in run.results["checks"] for known in check["known"]}
    assert shown == EXPECTED_DEFECTS
    assert all(name in run.output for name in shown)
    validate(run.results)
    measured = [
        row for check in run.results["checks"] for row in check["evidence"].get("drift", ())
    ]
    for name in ("long-rope.fp32.train", "long-rope.off.train"):
        rows = [row for row in measured if row["case"] == name and row["place"] == "stream"]
        assert [(row["phase"], row["layer"]) for row in rows] == [
            ("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0),
        ]  # fmt: skip


@pytest.mark.parametrize(("version", "chosen"), BROKEN.items(), ids=list(BROKEN))
def test_broken_release_is_rejected(version: str, chosen: tuple[str, ...], tmp_path: Path) -> None:
    run = run_gate(resolve(version, default_cache()).root, tmp_path, *chosen)
    assert (run.status, run.last_line.split(":")[1]) == (1, " REJECT"), run.output
    found = [violation for check in run.results["checks"] for violation in check["violations"]]
    (narrowing,) = (v for v in found if (v["rule"], v["subject"]) == ("S2", "dense.fp32.train"))
    assert narrowing["layer"] == 0
    # The sum itself says so too, without knowing of dtypes, and the reference, without lines.
    summed = [v for v in found if (v["rule"], v["subject"]) == ("D1", "dense.fp32.train")]
    assert (summed[0]["place"], summed[0]["layer"]) == ("layer out", 0)
    drifted = {(v["rule"], v["layer"]) for v in found if v["subject"] == "long-rope.fp32.train"}
    assert {("D2", 0), ("D3", 1)} <= drifted
    assert narrowing["source"]["path"] == ADD
    assert "residual.to(x.dtype)" in narrowing["source"]["text"]
    assert f"{ADD}:{narrowing['source']['line']}" in run.output
    validate(run.results)


def validate(results: dict[str, object]) -> None:
    """Hold results.json against its schema."""
    jsonschema.validate(results, json.loads(SCHEMA.read_text()))
