"""The way over GPUs, as far as it can be walked without one: choices, refusals, and who is moved.

What real kernels, NCCL and CUDA graphs do, nothing here knows.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fixtures import observe
from fixtures.cases import Case, case
from fixtures.contract.add import add_cells
from fixtures.contract.neighbours import CaptureSeen, captured
from fixtures.contract.stream import NothingSeen, StageTrace, branch_dtype, every_stream_rule
from fixtures.observe import Observer, judge_stream, observe_case
from fixtures.properties.falsify import Budget
from fixtures.runtime import (
    DEVICE_VARIABLE,
    GPUS_VARIABLE,
    ROOT_VARIABLE,
    device,
    gpus,
    rank_server,
    tasks,
)
from fixtures.runtime.capability import NotApplicable
from fixtures.runtime.engine import real
from fixtures.runtime.observation import RankObservation
from fixtures.runtime.rank_results import RankResult
from fixtures.runtime.ranks import PRELOAD, run_ranks
from fixtures.target import CannotJudge
from fixtures.verdict.base import read_base
from suites.selftest import on_pretend_gpu
from suites.selftest.gate import REPOSITORY, run_gate
from suites.selftest.pretend_gpu import SAID
from suites.selftest.test_contract import good_crossings, traced
from suites.selftest.test_job import TORCHRUN

TWO = "NVIDIA H100;NVIDIA H100"


# Which GPUs a session has


def test_gpus_are_those_that_torch_names() -> None:
    assert gpus.found_gpus("print('2.9 with CUDA'); print('one'); print('two')") == ["one", "two"]


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("print('2.9 without CUDA')", "torch 2.9 without CUDA sees no GPU: use --device cpu"),
        ("import no_such_torch", "cannot be asked for GPUs: ModuleNotFoundError: No module"),
        ("raise SystemExit(3)", "cannot be asked for GPUs: it said nothing"),
    ],
)
def test_without_a_gpu_there_is_no_session_on_one(question: str, said: str) -> None:
    with pytest.raises(CannotJudge, match="--device cuda") as refused:
        gpus.found_gpus(question)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_launcher_starts_one_process_a_gpu() -> None:
    gpus.require_one_each(4, TORCHRUN | {"LOCAL_WORLD_SIZE": "4"})
    gpus.require_one_each(1, {"LOCAL_WORLD_SIZE": "4"})
    with pytest.raises(CannotJudge, match=r"4 processes on a machine with 1 GPU: start one a GPU"):
        gpus.require_one_each(1, TORCHRUN | {"LOCAL_WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("ranks", "environment", "kind"),
    [
        (1, {}, "cpu"),
        (1, {GPUS_VARIABLE: ""}, "cpu"),
        (2, {GPUS_VARIABLE: TWO}, "cuda"),
        (3, {GPUS_VARIABLE: TWO}, "cpu"),
        (4, TORCHRUN | {GPUS_VARIABLE: "NVIDIA H100"}, "cuda"),
        (1, TORCHRUN, "cpu"),
    ],
)
def test_a_world_runs_on_gpus_where_each_rank_has_one(
    ranks: int, environment: dict[str, str], kind: str
) -> None:
    assert gpus.kind_for(ranks, environment) == kind


@pytest.mark.parametrize(
    ("rank", "environment", "gpu"),
    [
        (0, {}, 0),
        (3, {}, 3),
        (5, {}, 1),
        (0, {"PYTEST_XDIST_WORKER": "gw3"}, 3),
        (1, {"PYTEST_XDIST_WORKER": "gw3"}, 0),
        (2, TORCHRUN | {"LOCAL_RANK": "1"}, 1),
        # A task of SLURM's that sees its own GPU only has a number all the same.
        (5, {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1",
             "MASTER_ADDR": "a", "MASTER_PORT": "1"}, 1),
        # Left over in a shell.
        (0, {"LOCAL_RANK": "2"}, 0),
    ],
)  # fmt: skip
def test_ranks_are_spread_over_gpus(rank: int, environment: dict[str, str], gpu: int) -> None:
    assert device.gpu_of(rank, 4, environment) == gpu


# What runs where


def test_servers_are_told_apart_by_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ROOT_VARIABLE)
    usual = ("cpu", None, "gloo")
    assert run_ranks(_device_and_settings, 1)[0].value == usual
    # Without a GPU a rank can be forked for one, but cannot take it.
    (result,) = run_ranks(_device_and_settings, 1, kind="cuda")
    assert result.outcome == "raised"
    assert result.error is not None
    assert "take" in result.error.traceback
    assert run_ranks(_device_and_settings, 1)[0].value == usual
    assert {(PRELOAD, "cpu"), (PRELOAD, "cuda")} <= {*rank_server._SERVERS}


def _device_and_settings(_context: Any) -> tuple[str, str | None, str]:
    return device.kind(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"), device.backend()


_IN_A_SERVER = """
import json, os, sys
from pathlib import Path
import fixtures.runtime.preload_engine as server
import torch
from fixtures.runtime import device
from fixtures.trace.operations import OperationTrace
from fixtures.trace.source import Locator

found = {
    "target": "megatron" in sys.modules,
    "engine": "transformer_engine" in sys.modules,
    "ours": "fixtures.runtime.models" in sys.modules,
    "cuda": torch.cuda.is_initialized(),
    "compiler off": os.environ.get("TORCHDYNAMO_DISABLE"),
}
graphs = []

def keep(graph, _inputs):
    graphs.append(graph)
    return graph.forward

fused = torch.compile(lambda x: (x + 1) * 2, backend=keep)
trace = OperationTrace(Locator(Path("/")))
x = torch.ones(2)
with trace:
    fused(x)
found["traced"] = [each.operator for each in trace.operations], len(graphs)
fused(x)
found["compiled"] = len(graphs)
with device.computing():
    products, networks = torch.backends.cuda.matmul, torch.backends.cudnn
    found["on"] = torch.are_deterministic_algorithms_enabled(), networks.deterministic
    found["off"] = [
        networks.benchmark, networks.allow_tf32, products.allow_tf32,
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction,
        # Nothing stands in for CUDA.
        torch.cuda.is_available(),
    ]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def server(newest_release: Path) -> dict[str, Any]:
    """What a server for ranks on GPUs is like, and how its ranks are made to compute."""
    variables = {ROOT_VARIABLE: str(newest_release), DEVICE_VARIABLE: "cuda"}
    # These tests have imported what sets it for servers on the CPU.
    ours = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    asked = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _IN_A_SERVER],
        cwd=REPOSITORY,
        env={**ours, "PYTHONPATH": str(REPOSITORY), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout.splitlines()[-1])


def test_a_server_for_gpus_starts_no_cuda_and_loads_no_target(server: dict[str, Any]) -> None:
    assert (server["target"], server["engine"], server["cuda"]) == (False, False, False)
    assert server["ours"]


def test_arithmetic_on_gpus_is_deterministic_and_rounds_once(server: dict[str, Any]) -> None:
    assert server["on"] == [True, True]
    assert server["off"] == [False] * 6


def test_fused_functions_are_compiled_but_where_the_trace_looks_on(server: dict[str, Any]) -> None:
    assert server["compiler off"] is None
    assert server["traced"] == [["aten.add.Tensor", "aten.mul.Tensor"], 0]
    assert server["compiled"] == 1


@contextmanager
def _on_gpus(names: str) -> Iterator[list[tuple[int, str]]]:
    """Have worlds that are asked for noted, with their device, instead of run."""
    asked: list[tuple[int, str]] = []

    def note(_task: Any, ranks: int, *_args: Any, kind: str, **_rest: Any) -> list[RankResult[Any]]:
        asked.append((ranks, kind))
        return [RankResult(rank, "returned", rank, None, None, "", 0.0) for rank in range(ranks)]

    with (
        mock.patch.dict(os.environ, {GPUS_VARIABLE: names}),
        mock.patch.object(observe, "run_ranks", note),
    ):
        yield asked


def test_worlds_of_more_ranks_than_gpus_run_on_the_cpu() -> None:
    observer = Observer(Path("/"), 60.0, {})
    with _on_gpus(TWO) as asked:
        for ranks in (1, 2, 3):
            observer.run("any", tasks.run_case, ranks)
    assert asked == [(1, "cuda"), (2, "cuda"), (3, "cpu")]


def test_runs_that_are_compared_are_on_one_kind_of_device() -> None:
    observer = Observer(Path("/"), 60.0, {})
    alone, piped = case("dense-deep"), case("dense-deep", layout="pp2")
    with _on_gpus("NVIDIA H100") as asked:
        observe_case(observer, piped)
        observe_case(observer, alone, like=piped)
        observe_case(observer, alone)
        observe_case(observer, alone)
    assert asked == [(2, "cpu"), (1, "cpu"), (1, "cuda")]


def test_a_base_of_another_device_is_refused(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    results.write_text('{"schema_version": 3, "device": "cuda", "checks": []}', encoding="utf-8")
    with pytest.raises(CannotJudge, match="on cuda, and this one is on cpu: judge the base again"):
        read_base(results, strict=False)


def test_a_session_says_where_it_runs(newest_release: Path, tmp_path: Path) -> None:
    # A GPU of which torch only says that it is there: ranks find out.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'get_device_name' in ''.join(sys.orig_argv):\n"
        "    print('2.9 with CUDA\\nNVIDIA H100', flush=True)\n"
        "    os._exit(0)\n"
    )
    run = run_gate(
        newest_release, tmp_path / "out", "--device=cuda", "-m", "N5", "-k", "dense.fp32",
        PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    first = run.output.splitlines()[0]
    assert first.endswith("quick tier, on 1 GPU; worlds of more ranks run on the CPU"), run.output
    assert run.results["device"] == "cuda"
    # The static inputs' check and the capture's, which the CPU's session does not have.
    assert run.results["counts"]["error"] == 2
    assert (run.status, run.results["verdict"]) == (2, "CANNOT JUDGE")


def test_captures_are_no_part_of_a_session_on_the_cpu(newest_release: Path, tmp_path: Path) -> None:
    run = run_gate(newest_release, tmp_path / "out", "-k", "captured", "--collect-only")
    assert "test_captured_layer" not in run.output
    assert "deselected" in run.output


# What a GPU lacks


def test_an_operation_without_deterministic_kernel_is_not_applicable() -> None:
    words = "histc_cuda does not have a deterministic implementation, but you set '...'"
    with mock.patch.dict(os.environ, {DEVICE_VARIABLE: "cuda"}):
        with pytest.raises(NotApplicable, match="on this GPU: histc_cuda does not have"):
            _raise_within(words)
        with pytest.raises(RuntimeError, match="shape"):
            _raise_within("shape mismatch")
    with pytest.raises(RuntimeError, match="histc_cuda"):
        _raise_within(words)


def _raise_within(words: str) -> None:
    with device.refusals():
        raise RuntimeError(words)


def test_bfloat16_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    device.require(torch.float16)
    with pytest.raises(NotApplicable, match="does not compute in bfloat16"):
        device.require(torch.bfloat16)
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    device.require(torch.bfloat16)


def test_the_real_transformer_engine_says_why_it_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    said = real.why_not() or ""
    assert said.startswith("Transformer Engine cannot be imported on this GPU: ")
    assert "transformer_engine" in said


def test_recorded_bits_are_filed_by_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert device.arithmetic_name().startswith("cpu-torch")
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert device.arithmetic_name().startswith("cuda-nvidia-h100-80gb-hbm3-torch2.")


def test_products_that_cannot_be_seen_are_told() -> None:
    dense = case("dense")
    trace = traced(*good_crossings())
    hidden = replace(trace.trace, products_seen=0, products_hidden=True)
    assert every_stream_rule(dense, [StageTrace(0, 0, hidden)]) == []
    with pytest.raises(NothingSeen):
        every_stream_rule(dense, [StageTrace(0, 0, replace(hidden, products_hidden=False))])
    observer = Observer(Path("/"), 60.0, {(dense, False, "cpu"): ([_seen(hidden)], None)})
    assert judge_stream(observer, dense, every_stream_rule) == []
    with pytest.raises(NotApplicable, match="not seen by torch"):
        judge_stream(observer, dense, branch_dtype)


def _seen(trace: Any) -> RankObservation:
    return RankObservation(0, trace)


@pytest.mark.parametrize(
    ("seen", "what"),
    [
        (CaptureSeen("float32", "float32", True, None), None),
        (CaptureSeen("float32", "float32", False, None), "other bits"),
        (CaptureSeen("float32", "bfloat16", False, None), "another dtype"),
    ],
)
def test_captured(seen: CaptureSeen, what: str | None) -> None:
    found = captured(case("dense"), seen)
    assert [(each.rule, each.seen) for each in found] == ([] if what is None else [("N5", what)])


# Who is moved: on a pretended GPU a tensor that somebody forgot raises


def _few() -> Budget:
    return Budget.of_profile(0.05)


_Arguments = Callable[[Path, Path], tuple[Any, ...]]
_RUNS: dict[str, tuple[int, Any, _Arguments]] = {
    "adds": (1, tasks.run_adds, lambda root, _: (add_cells()[::5], root)),
    "drift of experts": (
        1, tasks.measure_drift, lambda root, _: (case("moe-alltoall-shared"), [0], root),
    ),
    "drift of two streams": (
        1, tasks.measure_drift, lambda root, _: (case("cross-attention"), [0], root),
    ),
    "golden": (
        1,
        on_pretend_gpu.values_of_golden,
        lambda root, _: (case("dense", fp32_residual=False), root, True),
    ),
    "training": (1, tasks.train, lambda root, _: (case("dense"), root)),
    "clear seed": (1, tasks.clear_seed, lambda root, _: (case("moe-allgather"), root)),
    "routers": (1, tasks.watch_routers, lambda root, _: (case("router-bias"), root)),
    "logits": (1, tasks.watch_logits, lambda root, _: (case("dense"), root)),
    "statistics": (
        1, tasks.watch_statistics, lambda root, _: (case("dense-rms-swiglu-gqa-rope"), root),
    ),
    "static inputs": (1, tasks.make_static_inputs, lambda root, _: (case("dense"), root)),
    "main gradients": (2, tasks.accumulate_gradients, lambda root, _: (case("dense"), True, root)),
    "inference": (
        2,
        tasks.run_inference,
        lambda root, _: (case("dense-deep", mode="inference", layout="pp2-inference"), root),
    ),
    "property of adds": (
        1, tasks.search_property, lambda root, last: ("exact add", _few(), None, last, root),
    ),
    "property of stacks": (
        1, tasks.search_property, lambda root, last: ("zero branches", _few(), None, last, root),
    ),
    "property of gradients": (
        1, tasks.search_property, lambda root, last: ("scaled gradient", _few(), None, last, root),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _target(newest_release: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers import the release that runs, so that no rank has to."""
    monkeypatch.setenv(ROOT_VARIABLE, str(newest_release))


def _values(results: list[RankResult[Any]]) -> list[Any]:
    assert [each.outcome for each in results] == ["returned"] * len(results), results[0].error
    return [each.value for each in results]


@pytest.mark.parametrize("name", _RUNS)
def test_tasks_move_what_they_make(name: str, newest_release: Path, tmp_path: Path) -> None:
    ranks, task, make = _RUNS[name]
    arguments = make(newest_release, tmp_path / "last")
    plain = _values(run_ranks(task, ranks, *arguments))
    assert _values(run_ranks(on_pretend_gpu.pretended, ranks, task, *arguments)) == plain


_CASES = [
    case("dense", layout="3-microbatches"),
    case("dense", mode="decoder-input-fp32"),
    case("dense-rms-swiglu-gqa-rope", mode="autocast"),
    case("hybrid", mode="recompute-full"),
    case("moe-allgather", mode="recompute-experts"),
    case("cross-attention", mode="dropout"),
    case("qk-norm", mode="no-grad"),
    case("dense", mode="sequence-parallel"),
    case("dense-deep", layout="pp2"),
    case("moe-mixed", layout="pp2-variable-lengths"),
]


@pytest.mark.parametrize("each", _CASES, ids=lambda each: each.name)
def test_cases_move_what_they_make(each: Case, newest_release: Path) -> None:
    arguments = (each, newest_release)
    plain = _values(run_ranks(tasks.run_case, each.world_size, *arguments))
    pretended = run_ranks(on_pretend_gpu.pretended, each.world_size, tasks.run_case, *arguments)
    assert _values(pretended) == plain


def test_a_layer_can_be_captured(newest_release: Path) -> None:
    arguments = (tasks.capture_layer, case("dense"), newest_release)
    (seen,) = _values(run_ranks(on_pretend_gpu.pretended, 1, *arguments))
    assert captured(case("dense"), seen) == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("models", "logits"),
        ("step", "logits"),
        ("neighbours.router", "routers"),
        ("neighbours.gradients", "main gradients"),
        ("properties.stacks", "property of stacks"),
    ],
)
def test_what_is_not_moved_is_seen(
    module: str, name: str, newest_release: Path, tmp_path: Path
) -> None:
    ranks, task, make = _RUNS[name]
    result, *_ = run_ranks(
        on_pretend_gpu.with_one_not_moved, ranks, f"fixtures.runtime.{module}", task,
        *make(newest_release, tmp_path / "last"),
    )  # fmt: skip
    assert SAID in str(result.error or result.value), result


def test_what_adds_are_given_is_moved() -> None:
    # Were all of it left on the CPU, nothing would be mixed up.
    assert _values(run_ranks(on_pretend_gpu.operands_of_adds, 1)) == [{True}]


@pytest.mark.parametrize(
    "name", ["drift of experts", "golden", "training", "clear seed", "statistics"]
)
def test_what_is_not_brought_back_is_seen(name: str, newest_release: Path, tmp_path: Path) -> None:
    _, task, make = _RUNS[name]
    (result,) = run_ranks(
        on_pretend_gpu.with_nothing_brought_back, 1, task, *make(newest_release, tmp_path / "last")
    )
    assert result.outcome == "raised"
    assert SAID in str(result.error)
