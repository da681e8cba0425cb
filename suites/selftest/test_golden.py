"""Files of recorded values: what is written, what is read, and what is said of one that is bad."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch

from fixtures.cases import case
from fixtures.contract.golden import (
    flag_off_unchanged,
    golden_stack,
    golden_training,
    reference_frozen,
    reference_training,
)
from fixtures.oracle.adamw import AdamW
from fixtures.oracle.golden import (
    RECORDED,
    Golden,
    GoldenError,
    NotRecorded,
    Summary,
    TrainingStep,
    in_order,
    read,
    reference_file,
    stack_data,
    write,
)
from fixtures.recording import TRAINED, deviation
from fixtures.stacks import STACKS
from fixtures.verdict.results import SCHEMA
from suites.selftest.gate import run_gate

DENSE = STACKS["dense"]
PLACE = Summary(
    "stream", "forward", "decoder", 0, norm=10.0, mean=0.1, size=100,
    samples=(1.0, -1.0, 0.5, 0.25), on=1.0, off=1.5,
)  # fmt: skip
U = 2.0**-8


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "dense.json"
    awkward = replace(PLACE, mean=0.1 + 0.2, norm=5e-324, samples=(1 / 3, -0.0, 1e300, math.pi))
    golden = Golden(
        stack_data(DENSE), 3, (awkward,), (TrainingStep(0, 4.2, 1e-3),), {"on loss": 0.1}
    )
    write(path, golden)
    assert read(path, DENSE) == golden
    before = path.read_bytes()
    write(path, read(path, DENSE))
    assert path.read_bytes() == before
    assert sum(line.strip().startswith('{"place"') for line in before.decode().splitlines()) == 1


def test_what_is_recorded_is_there_and_whole() -> None:
    files = sorted((RECORDED / "reference").glob("*.json"))
    assert files
    for file in files:
        golden = read(file, STACKS[file.stem])
        assert golden.places
        assert bool(golden.training) == (file.stem in TRAINED)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: text[: len(text) // 2], "is corrupt"),
        (lambda text: "", "is corrupt"),
        (lambda text: "[]", "has format None"),
        (lambda text: text.replace('"format": 1', '"format": 0'), "has format 0, not 1"),
        (lambda text: text.replace('"dense"', '"dense", "layers": 3', 1), "for another stack"),
        (lambda text: text.replace('"norm":', '"size_of_norm":', 2), "another stack|incomplete"),
        (lambda text: text.replace('"places"', '"rooms"'), "is incomplete"),
    ],
)
def test_a_bad_file_says_what_is_wrong_and_what_to_do(spoil, words: str, tmp_path: Path) -> None:  # noqa: ANN001
    path = tmp_path / "dense.json"
    path.write_text(spoil(reference_file(DENSE).read_text()))
    with pytest.raises(GoldenError, match=words) as raised:
        read(path, DENSE)
    assert "--record" in str(raised.value)


def test_a_missing_file_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match="nothing is recorded for dense"):
        read(tmp_path / "none.json", DENSE)


def test_other_places_than_recorded_are_told() -> None:
    golden = Golden(stack_data(DENSE), 0, (PLACE,))
    assert in_order([PLACE], golden, Path("file"))
    with pytest.raises(GoldenError, match="other places"):
        in_order([replace(PLACE, layer=1)], golden, Path("file"))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, None),
        ({"norm": 10.0 * (1 + 1.9 * U)}, None),
        ({"norm": 10.0 * (1 + 2.1 * U)}, "norm"),
        ({"mean": 0.1 + 1.9 * U}, None),
        ({"mean": 0.1 + 2.1 * U}, "mean"),
        ({"samples": (1.0, -1.0, 0.5, 0.25 + 17 * U)}, "sample 3"),
        ({"norm": math.nan}, "norm"),
    ],
)
def test_a_stack_is_held_to_its_dtype(change: dict, word: str | None) -> None:
    found = golden_stack(case("dense"), [(replace(PLACE, **change), PLACE)])
    assert [v.rule for v in found] == ([] if word is None else ["G2"])
    assert all(v.seen.startswith(word) for v in found)


def test_where_nothing_may_be_off_anything_is() -> None:
    exact = replace(PLACE, on=0.0)
    assert golden_stack(case("dense"), [(exact, exact)]) == []
    (violation,) = golden_stack(case("dense"), [(replace(exact, norm=10.1), exact)])
    assert violation.seen.endswith("inf times as far as allowed")


def test_the_reference_is_held_to_fp64() -> None:
    assert reference_frozen(case("dense"), [(replace(PLACE, norm=10.0 + 1e-14), PLACE)]) == []
    (violation,) = reference_frozen(case("dense"), [(replace(PLACE, norm=10.0 + 1e-12), PLACE)])
    assert violation.rule == "G1"


def test_other_bits_are_told_in_ulps() -> None:
    recorded = replace(PLACE, digest="a")
    off = case("dense", fp32_residual=False)
    assert flag_off_unchanged(off, [(recorded, recorded)]) == []
    moved = replace(recorded, digest="b", samples=(1.0, -1.0, 0.5, 0.25 * (1 + 2**-7)))
    (violation,) = flag_off_unchanged(off, [(moved, recorded), (moved, recorded)])
    assert "up to 1 ulps of bfloat16" in violation.seen
    assert "1 places after" in violation.seen


def test_training_is_held_to_its_promise() -> None:
    steps = tuple(TrainingStep(i, 4.0, 1.0) for i in range(4))
    names = ("loss", "gradient_norm")
    promise = {f"{flag} {name}": 0.01 for flag in ("on", "off") for name in names}
    golden = Golden(stack_data(DENSE), 0, (PLACE,), steps, promise)
    near = tuple(TrainingStep(i, 4.0 * 1.015, 1.0) for i in range(4))
    far = tuple(TrainingStep(i, 4.0 * 1.05, 1.0) for i in range(4))
    assert deviation(near, steps, "loss") == pytest.approx(0.015)
    assert golden_training(case("dense"), {"loss": deviation(near, steps, "loss")}, golden) == []
    (violation,) = golden_training(case("dense"), {"loss": deviation(far, steps, "loss")}, golden)
    assert (violation.rule, violation.place) == ("G3", "loss")
    assert reference_training(case("dense"), steps, golden) == []
    (violation,) = reference_training(case("dense"), near, golden)
    assert violation.place == "training step 0"


def test_adamw_is_torchs() -> None:
    torch.manual_seed(5)
    start = {name: torch.randn(3, 4, dtype=torch.float64) for name in "ab"}
    theirs = {name: each.clone().requires_grad_() for name, each in start.items()}
    optimizer = torch.optim.AdamW(theirs.values(), lr=0.01, weight_decay=0.01)
    ours = AdamW(start, 0.01)
    for _ in range(5):
        gradients = {name: torch.randn(3, 4, dtype=torch.float64) for name in "ab"}
        for name, each in theirs.items():
            each.grad = gradients[name]
        optimizer.step()
        ours.step(gradients)
    for name, each in theirs.items():
        torch.testing.assert_close(start[name], each.detach(), rtol=1e-13, atol=0)


def test_a_backend_without_record_is_counted(newest_release: Path, tmp_path: Path) -> None:
    # Other kernels of torch's, as another kind of machine would have them.
    run = run_gate(
        newest_release,
        tmp_path,
        "-k",
        "test_stacks and dense",
        ATEN_CPU_CAPABILITY="default",
    )
    assert run.status == 0, run.output
    jsonschema.validate(run.results, json.loads(SCHEMA.read_text()))
    assert run.results["counts"]["not-recorded"] > 0
    assert "not recorded: nothing is recorded for dense" in run.output
    assert "not recorded" in run.last_line
