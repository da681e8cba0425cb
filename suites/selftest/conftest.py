"""What the suite's own tests share: a release of megatron-core, and the table at their end."""

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from fixtures.target import default_cache, resolve
from suites.selftest.gate import REPOSITORY

NEWEST = "0.19.2"


@pytest.fixture(scope="session")
def newest_release() -> Path:
    """The root of the newest release that the gate is tested on."""
    return resolve(NEWEST, default_cache()).root


@pytest.fixture
def gate_command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Give ci/gate as a module: what it understands and clears away."""
    monkeypatch.syspath_prepend(REPOSITORY / "ci")
    loader = SourceFileLoader("gate_command", str(REPOSITORY / "ci" / "gate"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the smallest size at which each mutant of arithmetic is seen."""
    rows = [
        value
        for report in terminalreporter.stats.get("passed", [])
        for name, value in report.user_properties
        if name == "smallest"
    ]
    if not rows:
        return
    terminalreporter.section("smallest size at which a mutant shows (layers x tokens, h = 64)")
    for row in [("mutant", "flag", "size", "rules"), *sorted(map(tuple, rows))]:
        name, flag, size, rules = row
        terminalreporter.write_line(f"{name:52}{flag:6}{size:24}{rules}")
