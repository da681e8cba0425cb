"""What the README shows is what the code says."""

from fixtures.contract.rules import rules_table
from fixtures.stacks import STACKS
from suites.selftest.gate import REPOSITORY

README = (REPOSITORY / "README.md").read_text()


def test_the_rules_are_those_of_the_code() -> None:
    assert rules_table() in README


def test_the_top_level_is_what_it_should_be() -> None:
    visible = {path.name for path in REPOSITORY.iterdir() if not path.name.startswith(".")}
    made = {"results", "__pycache__"}
    assert visible - made == {
        "LICENSE", "README.md", "ci", "conftest.py", "fixtures", "suites", "tox.ini",
    }  # fmt: skip


def test_stacks_are_found_by_their_names() -> None:
    assert all(stack.name == name for name, stack in STACKS.items())
