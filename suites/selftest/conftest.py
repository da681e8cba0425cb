"""What the suite's own tests share: a release of megatron-core, and the table at their end."""

from pathlib import Path

import pytest

from fixtures.target import default_cache, resolve

NEWEST = "0.19.2"


@pytest.fixture(scope="session")
def newest_release() -> Path:
    """The root of the newest release that the gate is tested on."""
    return resolve(NEWEST, default_cache()).root


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
