"""Lists of known defects: what they explain, and what is wrong with a wrong one."""

from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.contract.violation import Violation
from fixtures.defects import SHIPPED, Defect, DefectsError, load_defects, require_matches

GOOD = {
    "id": '"narrow"',
    "title": '"the stream is narrowed"',
    "rules": '["S1"]',
    "subjects": '["dense.*"]',
    "versions": '">=0.17,<0.20"',
    "seen": '"bfloat16"',
    "source": '"https://example.org/1"',
}
VIOLATION = Violation("S1", "dense.fp32.train", "layer out", "float32", "bfloat16")


def write(folder: Path, *entries: dict[str, str]) -> Path:
    file = folder / "defects.toml"
    tables = ("\n".join(f"{name} = {value}" for name, value in each.items()) for each in entries)
    file.write_text("".join(f"[[defect]]\n{table}\n" for table in tables))
    return file


def good(folder: Path) -> Defect:
    (defect,) = load_defects(write(folder, GOOD))
    return defect


def test_an_entry_explains_what_fits_it(tmp_path: Path) -> None:
    assert good(tmp_path).explains(VIOLATION)


@pytest.mark.parametrize(
    ("field", "value"), [("rule", "S2"), ("subject", "hybrid.fp32.train"), ("seen", "int8")]
)
def test_an_entry_explains_nothing_else(tmp_path: Path, field: str, value: str) -> None:
    assert not good(tmp_path).explains(replace(VIOLATION, **{field: value}))


@pytest.mark.parametrize(
    ("version", "lives"),
    [("0.16.1", False), ("0.17.1", True), ("0.19.2rc1", True), ("0.20", False)],
)
def test_an_entry_lives_in_its_versions(tmp_path: Path, version: str, lives: bool) -> None:
    assert good(tmp_path).lives_in(version) is lives


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"rules": '["S99"]'}, "no rule 'S99'"),
        ({"rules": '"S1"'}, "'rules' must be a non-empty list"),
        ({"subjects": "[]"}, "'subjects' must be a non-empty list"),
        ({"versions": '"newer"'}, "'versions' is not a version specifier"),
        ({"title": '""'}, "'title' must be a non-empty string"),
        ({"seen": "3"}, "'seen' must be a non-empty string"),
        ({"stack": '"dense"'}, "unknown field 'stack'"),
        ({"source": None}, "'source' is missing"),
    ],
)
def test_a_malformed_entry_is_told_with_its_place(
    tmp_path: Path, change: dict[str, str | None], complaint: str
) -> None:
    entry = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    file = write(tmp_path, {**GOOD, "id": '"first"'}, entry)
    with pytest.raises(DefectsError) as told:
        load_defects(file)
    assert str(told.value).startswith(f"{file}, [[defect]] number 2: {complaint}")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[defect]\n", "not valid TOML"),
        ("defects = 1\n", "unknown key 'defects'"),
        ("[defect]\nid = 1\n", "a list of tables"),
    ],
)
def test_a_malformed_file_is_told(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(DefectsError, match=complaint):
        load_defects(file)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DefectsError, match="cannot be read"):
        load_defects(tmp_path / "none.toml")


def test_an_id_is_taken_once(tmp_path: Path) -> None:
    with pytest.raises(DefectsError, match="'narrow' is taken"):
        load_defects(write(tmp_path, GOOD, GOOD))


def test_an_entry_must_fit_a_check(tmp_path: Path) -> None:
    defect = good(tmp_path)
    require_matches([defect], [("S1", "dense.fp32.train")])
    with pytest.raises(DefectsError, match="'narrow' fits no check"):
        require_matches([defect], [("S2", "dense.fp32.train"), ("S1", "mamba.fp32.train")])


def test_the_shipped_list_is_sound() -> None:
    assert load_defects(SHIPPED)
