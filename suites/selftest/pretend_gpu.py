"""A GPU for tests on machines without one: memory that is told apart, and computed on by the CPU.

What a GPU is good for here is to refuse: an operation on tensors of which some are on the GPU and
some are not raises, as it does on a real one. So a tensor that somebody forgot to move shows. All
else is the CPU's, bits included; nothing is learnt of a GPU's arithmetic, streams or backends.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_iter

from fixtures.runtime import DEVICE_VARIABLE, device, standin
from fixtures.trace.dispatch import WatchingMode

GPU = torch.device("cuda", 0)
SAID = "Expected all tensors to be on the same device"

_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")

# Between devices, as torch has it: copies, and indices of the CPU into anything.
_BETWEEN = ("copy_", "_to_copy", "set_", "index", "index_put_", "index_put", "_index_put_impl_")


class PretendGpu(python_dispatch.TorchDispatchMode):
    """While active, knows which memory is the GPU's and refuses operations that mix it up."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self) -> None:
        super().__init__()
        # Weakly held: a storage that is gone keeps its address to itself.
        self._held: dict[int, StorageWeakRef] = {}

    def has(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is on the GPU."""
        return tensor.untyped_storage()._cdata in self._held

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say that a tensor is on the GPU."""
        storage = tensor.untyped_storage()
        self._held[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        there = [each for each in given if self.has(each)]
        if func.namespace == "c10d":
            return func(*args, **kwargs)
        self._refuse_mixture(func, given, there)
        out = func(*args, **kwargs)
        if there:
            known = {each.untyped_storage()._cdata for each in given}
            for made in tree_iter(out):
                if isinstance(made, torch.Tensor) and made.untyped_storage()._cdata not in known:
                    self.put(made)
        return out

    def _refuse_mixture(
        self, func: Any, given: list[torch.Tensor], there: list[torch.Tensor]
    ) -> None:
        # A number in the CPU's memory is welcome anywhere.
        elsewhere = [each for each in given if not self.has(each) and each.dim() > 0]
        if there and elsewhere and func.overloadpacket.__name__ not in _BETWEEN:
            raise RuntimeError(f"{SAID}, but found cuda:0 and cpu in {func}")

    def moved(self, tensor: torch.Tensor, copy: torch.Tensor, to: Any) -> torch.Tensor:
        """Give the copy of a tensor that a move to a device made, or the tensor where it is."""
        wanted = standin._names_cuda(to)
        if wanted == self.has(copy):
            return copy
        # A copy is where its original is, unless it is made out of nobody's sight.
        with torch._C._DisableTorchDispatchForReal():  # type: ignore[attr-defined]
            other = copy.clone()
        return self.put(other) if wanted else other


def _made_there(gpu: PretendGpu, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what makes a tensor, so that it is made on the device that was asked for."""

    def make(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        asked = kwargs.get("device")
        return made if asked is None else gpu.moved(made, made, asked)

    return make


def _asked_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the device among the arguments of `Tensor.to`, None where it is about the dtype."""
    if "device" in kwargs:
        return kwargs["device"]
    first = args[0] if args else kwargs.get("other")
    if isinstance(first, torch.Tensor):
        return first.device
    return first if isinstance(first, str | int | torch.device) else None


@contextmanager
def pretend_gpu() -> Iterator[PretendGpu]:
    """Have this process compute on a pretended GPU, whose ranks talk over gloo."""
    gpu = PretendGpu()
    with ExitStack() as stack:

        def put(holder: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(holder, name, value, create=True))

        real_device, module_to = torch.Tensor.device, torch.nn.Module.to
        stack.enter_context(mock.patch.dict("os.environ", {DEVICE_VARIABLE: "cuda"}))
        stack.enter_context(standin.cpu_for_cuda())
        put(device, "backend", lambda: "gloo")
        put(device, "_settle_arithmetic", lambda: None)
        put(torch.cuda, "is_bf16_supported", lambda **_k: True)
        put(torch.cuda, "CUDAGraph", PretendGraph)
        put(torch.cuda, "graph", lambda graph: graph.capture())
        for constructor in _device_constructors():
            name = constructor.__name__
            if hasattr(torch, name):
                put(torch, name, _made_there(gpu, getattr(torch, name)))
        for holder, names in ((torch, _LIKE), (torch.Tensor, _NEW)):
            for name in names:
                put(holder, name, _made_there(gpu, getattr(holder, name)))

        to = torch.Tensor.to

        def moved_to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            asked = _asked_device(args, kwargs)
            made = to(tensor, *args, **kwargs)
            return made if asked is None else gpu.moved(tensor, made, asked)

        put(torch.Tensor, "to", moved_to)
        put(torch.Tensor, "cuda", lambda tensor, *_a, **_k: moved_to(tensor, GPU))
        put(torch.Tensor, "cpu", lambda tensor: moved_to(tensor, "cpu"))
        put(torch.nn.Module, "to", module_to)
        put(torch.nn.Module, "cuda", lambda module, *_a: module._apply(lambda each: each.cuda()))
        put(torch.Tensor, "is_cuda", property(gpu.has))
        put(
            torch.Tensor,
            "device",
            property(lambda t: GPU if gpu.has(t) else real_device.__get__(t)),
        )
        put(torch.Tensor, "numpy", _numpy(gpu, torch.Tensor.numpy))
        backend_of = ProcessGroup._get_backend
        put(ProcessGroup, "_get_backend", lambda group, _device: backend_of(group, standin.CPU))
        put(torch._C, "_DisableTorchDispatchForReal", torch._C._DisableTorchDispatch)
        put(torch._C, "_DisableTorchDispatch", _unwatched)
        stack.enter_context(gpu)
        yield gpu


def _numpy(gpu: PretendGpu, function: Callable[..., Any]) -> Callable[..., Any]:
    def numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if gpu.has(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return function(tensor, *args, **kwargs)

    return numpy


@contextmanager
def _unwatched() -> Iterator[None]:
    """Set the suite's watching modes aside, as `unobserved` wants it, but leave the GPU there."""
    aside = []
    while isinstance(python_dispatch._get_current_dispatch_mode(), WatchingMode):
        aside.append(python_dispatch._pop_mode())
    try:
        yield
    finally:
        for mode in reversed(aside):
            python_dispatch._push_mode(mode)


class _Recorder(python_dispatch.TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class PretendGraph:
    """A CUDA graph: keeps the operations of a capture, and does them again in the same memory."""

    def __init__(self) -> None:
        self._recorder = _Recorder()

    def capture(self) -> _Recorder:
        """Give what records operations, and does them too, which a capture does not."""
        return self._recorder

    def replay(self) -> None:
        """Do what was recorded."""
        for func, args, kwargs, out in self._recorder.calls:
            for kept, made in zip(tree_iter(out), tree_iter(func(*args, **kwargs)), strict=True):
                if isinstance(kept, torch.Tensor) and made is not kept and not func.is_view:
                    kept.copy_(made)
