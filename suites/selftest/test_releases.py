"""Released megatron-core through the whole quick tier: clean ones pass, broken ones are named."""

import json
from pathlib import Path

import jsonschema
import pytest

from fixtures.target import default_cache, resolve
from fixtures.verdict.results import SCHEMA
from suites.selftest.gate import run_gate
from suites.selftest.mutants import ADD

CLEAN = ("0.17.1", "0.18.2", "0.19.2")
BROKEN = ("0.12.3", "0.14.0", "0.15.3", "0.16.1")
EXPECTED_DEFECTS = {
    "fp32-decoder-input", "fp32-bias", "bf16-static-inputs", "stock-layernorm", "stock-rmsnorm",
}  # fmt: skip


@pytest.mark.parametrize("version", CLEAN)
def test_clean_release_is_accepted(version: str, tmp_path: Path) -> None:
    run = run_gate(resolve(version, default_cache()).root, tmp_path)
    assert (run.status, run.last_line.split(":")[1]) == (0, " ACCEPT"), run.output
    shown = {known["defect"] for check in run.results["checks"] for known in check["known"]}
    assert shown == EXPECTED_DEFECTS
    assert all(name in run.output for name in shown)
    validate(run.results)


@pytest.mark.parametrize("version", BROKEN)
def test_broken_release_is_rejected(version: str, tmp_path: Path) -> None:
    run = run_gate(resolve(version, default_cache()).root, tmp_path)
    assert (run.status, run.last_line.split(":")[1]) == (1, " REJECT"), run.output
    narrowings = [
        violation
        for check in run.results["checks"]
        for violation in check["violations"]
        if violation["rule"] == "S2" and violation["subject"] == "dense.fp32.train"
    ]
    assert [each["layer"] for each in narrowings] == [0]
    (narrowing,) = narrowings
    assert narrowing["source"]["path"] == ADD
    assert "residual.to(x.dtype)" in narrowing["source"]["text"]
    assert f"{ADD}:{narrowing['source']['line']}" in run.output
    validate(run.results)


def validate(results: dict[str, object]) -> None:
    """Hold results.json against its schema."""
    jsonschema.validate(results, json.loads(SCHEMA.read_text()))
