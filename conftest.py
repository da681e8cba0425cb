"""Wires the gate into pytest: options, fixtures, markers. No logic lives here."""

import pytest

from fixtures.observe import Observer
from fixtures.properties.falsify import register_profiles
from fixtures.properties.search import Search
from fixtures.verdict.base import Base
from fixtures.verdict.options import add_options, start
from fixtures.verdict.plugin import GatePlugin, Judge, judge_of, rule_of
from fixtures.verdict.sharing import subject_of

_PLUGIN = pytest.StashKey[GatePlugin]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the gate's options, the same as those of ci/gate, and Hypothesis profiles to choose."""
    add_options(parser)
    register_profiles()


def pytest_configure(config: pytest.Config) -> None:
    """Find the target and start a gate session, unless only the suite's own tests are asked for."""
    plugin = start(config)
    if plugin is not None:
        config.stash[_PLUGIN] = plugin
        config.pluginmanager.register(plugin, "precision-gate")


@pytest.fixture(scope="session")
def observer(pytestconfig: pytest.Config) -> Observer:
    """Give what runs cases on the target, once each."""
    return Observer(
        pytestconfig.stash[_PLUGIN].target.root,
        deadline=pytestconfig.getoption("--deadline"),
        memory={},
        seed=pytestconfig.getoption("--seed"),
    )


@pytest.fixture
def judge(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Judge:
    """Give what compares found violations with known defects and fails the test."""
    return judge_of(request.node, pytestconfig.stash[_PLUGIN])


@pytest.fixture
def base(pytestconfig: pytest.Config) -> Base:
    """Give the session that this one is compared with."""
    base = pytestconfig.stash[_PLUGIN].base
    assert base is not None, "a test that needs a base is marked against_base"
    return base


@pytest.fixture
def search(
    request: pytest.FixtureRequest, pytestconfig: pytest.Config, observer: Observer
) -> Search:
    """Give what searches for an example that falsifies a property."""
    return Search(
        observer,
        rule_of(request.node),
        subject_of(request.node.nodeid),
        request.node.nodeid,
        pytestconfig.getoption("--megatron"),
        pytestconfig.getoption("--example"),
    )


@pytest.fixture(scope="session")
def record(pytestconfig: pytest.Config) -> bool:
    """Say whether golden values are to be written rather than read."""
    return pytestconfig.getoption("--record")
