"""Files of recorded values: what is written, what is read, and what is said of one that is bad."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch

from fixtures import recording
from fixtures.cases import case
from fixtures.contract.golden import (
    flag_off_unchanged,
    golden_stack,
    golden_training,
    reference_frozen,
    reference_training,
)
from fixtures.observe import Observer
from fixtures.oracle import bits
from fixtures.oracle.adamw import AdamW
from fixtures.oracle.golden import (
    RECORDED,
    Golden,
    GoldenError,
    GoldenRun,
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
from fixtures.trace.operations import OperationTrace
from fixtures.trace.records import Operation, Source
from fixtures.trace.source import Locator
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
        (lambda text: text.replace('"format": 2', '"format": 0'), "has format 0, not 2"),
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


def test_every_recording_of_bits_is_whole() -> None:
    files = sorted((RECORDED / "flag-off").glob("*/*.json"))
    assert files
    for file in files:
        golden = read(file, STACKS[file.name.split(".")[0]])
        assert all(place.digest for place in golden.places)
        assert golden.operations["aten.mm.default"]


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
    assert violation.source is None
    (violation,) = flag_off_unchanged(off, [(moved, recorded)], ADDED)
    assert violation.seen.endswith("; aten.add.Tensor is the first operation not on record")
    assert violation.source == ADDED.source


MULTIPLIED = Operation("aten.mm.default", "m", "1", None)
ADDED = Operation("aten.add.Tensor", "a", "2", Source("fused.py", 7, "x + y", exact=True))
RUN = (MULTIPLIED, ADDED)


@pytest.fixture
def recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Give what records operations as one of the recordings of dense for the backend "cpu"."""
    monkeypatch.setattr(bits, "RECORDED", tmp_path)

    def record(number: int, *operations: Operation) -> Path:
        path = tmp_path / "flag-off" / "cpu" / f"dense.{number}.json"
        write(path, Golden(stack_data(DENSE), 0, (PLACE,), operations=bits.by_operator(operations)))
        return path

    return record


def test_a_machine_finds_the_recording_of_its_arithmetic(recordings: Callable[..., Path]) -> None:
    for number in (1, 2, 10):
        recordings(number, replace(MULTIPLIED, result=f"other {number}"), ADDED)
    ours = recordings(3, *RUN)
    assert bits.find_bits(DENSE, "cpu", RUN).path == ours
    assert bits.file_to_record(DENSE, "cpu", RUN) == ours


def test_other_arithmetic_is_recorded_beside(recordings: Callable[..., Path]) -> None:
    theirs = recordings(1, replace(MULTIPLIED, result="other"), ADDED)
    with pytest.raises(NotRecorded, match=r"whose aten\.mm\.default give other results than"):
        bits.find_bits(DENSE, "cpu", RUN)
    assert bits.file_to_record(DENSE, "cpu", RUN) == theirs.with_name("dense.2.json")


def test_an_unknown_backend_is_recorded_first(recordings: Callable[..., Path]) -> None:
    recordings(1, *RUN)
    with pytest.raises(NotRecorded, match="no bits of dense are recorded for cuda"):
        bits.find_bits(DENSE, "cuda", RUN)
    assert bits.file_to_record(DENSE, "cuda", RUN).parts[-2:] == ("cuda", "dense.1.json")


def test_bits_without_operations_are_refused(recordings: Callable[..., Path]) -> None:
    path = recordings(1)
    with pytest.raises(GoldenError, match="holds no operations: record it again"):
        bits.find_bits(DENSE, "cpu", RUN)
    assert bits.file_to_record(DENSE, "cpu", RUN) == path


def test_a_recording_that_shares_no_operation_says_nothing(
    recordings: Callable[..., Path],
) -> None:
    recordings(1, *(replace(one, name=f"{one.name} on two threads") for one in RUN))
    with pytest.raises(NotRecorded, match="recorded with torch's settings of this run"):
        bits.find_bits(DENSE, "cpu", RUN)
    shared = recordings(2, MULTIPLIED)
    assert bits.find_bits(DENSE, "cpu", RUN).path == shared


def test_bits_of_a_run_that_changes_torchs_settings_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = GoldenRun((), (), (), "cpu", RUN, ("on one thread", "on two threads"))
    monkeypatch.setattr(recording, "recorded_reference", lambda *_a: Golden({}, 0, ()))
    monkeypatch.setattr(recording, "golden_run", lambda *_a: run)
    observer = Observer(Path(), deadline=1.0, memory={})
    with pytest.raises(NotRecorded, match="runs that change torch's settings"):
        recording.recorded_bits(observer, "dense", record=False)


def test_a_departure_is_the_first_operation_that_gives_something_new() -> None:
    golden = Golden(stack_data(DENSE), 0, (), operations=bits.by_operator(RUN))
    renamed = replace(MULTIPLIED, name="same product in another layout")
    new = replace(ADDED, name="b", result="3")
    assert bits.first_departure(RUN, golden) is None
    assert bits.first_departure((renamed, ADDED), golden) is None
    assert bits.first_departure((renamed, new, ADDED), golden) == new
    assert bits.contradiction((renamed, new), golden) is None
    assert bits.contradiction((replace(ADDED, result="3"),), golden) == "aten.add.Tensor"


def traced(compute: Callable[[], object]) -> list[Operation]:
    """Give the operations that a computation issues."""
    trace = OperationTrace(Locator(Path(__file__).parent))
    with trace:
        compute()
    return trace.operations


def test_an_operation_is_named_by_all_that_decides_its_result() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    y, same = x.clone().add_(1), x.clone()
    transposed = y.t().contiguous()

    def name(compute: Callable[[], object]) -> str:
        (operation,) = traced(compute)
        return operation.name

    usual = name(lambda: torch.mm(x, y.t()))
    assert name(lambda: torch.mm(same, y.t())) == usual
    assert name(lambda: torch.mm(x, transposed)) != usual
    assert name(lambda: torch.mm(y, y.t())) != usual
    assert name(lambda: x + y) != name(lambda: torch.add(x, y, alpha=2))
    torch.use_deterministic_algorithms(True)
    try:
        assert name(lambda: torch.mm(x, y.t())) != usual
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_default_dtype_is_part_of_a_name_where_it_decides() -> None:
    x, steps = torch.ones(3), torch.arange(3)

    def names() -> list[str]:
        made = traced(
            lambda: (torch.ones(3), 0.5**steps, torch.ones(3, dtype=torch.float32), x + x)
        )
        return [operation.name for operation in made]

    usual = names()
    torch.set_default_dtype(torch.float64)
    try:
        wide = names()
    finally:
        torch.set_default_dtype(torch.float32)
    assert [one != other for one, other in zip(usual, wide, strict=True)] == [
        True, True, False, False,
    ]  # fmt: skip


def test_the_settings_that_operations_ran_under_are_known() -> None:
    trace = OperationTrace(Locator(Path(__file__).parent))
    threads = torch.get_num_threads()
    with trace:
        torch.ones(3)
        torch.set_num_threads(threads + 1)
        torch.ones(3)
        torch.set_num_threads(threads)
        torch.ones(3)
    assert [each.split()[0] for each in trace.settings] == [str(threads), str(threads + 1)]


def test_a_random_operation_is_named_by_the_generator_too() -> None:
    torch.manual_seed(1)
    first, second = (traced(lambda: torch.rand(3))[-1] for _ in range(2))
    torch.manual_seed(1)
    again = traced(lambda: torch.rand(3))[-1]
    assert first == again
    assert first.name != second.name
    assert first.result != second.result


def test_what_is_written_in_place_is_part_of_a_result() -> None:
    x, out = torch.ones(3), torch.zeros(3)
    (first,), (second,) = (traced(lambda: x.add_(1)) for _ in range(2))
    assert first.result != second.result
    (given,) = traced(lambda: torch.add(x, 1, out=out))
    (other,) = traced(lambda: torch.add(x, 2, out=out))
    assert given.result != other.result
    # What the memory held before decides nothing where it is only written to.
    assert traced(lambda: torch.add(x, 2, out=out)) == [other]


def test_unfilled_memory_is_the_same_in_every_run() -> None:
    torch.full((1000,), 7.0)
    assert traced(lambda: torch.empty(1000).sum()) == traced(lambda: torch.zeros(1000).sum())[-1:]


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
    assert "not recorded: no bits of dense are recorded for arithmetic like this" in run.output
    assert "not recorded" in run.last_line
