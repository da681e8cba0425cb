"""Mutants as data: defects put into a copy of a release, which the gate must reject.

An edit quotes only the few tokens that it has to match, and fails loudly where they no longer are.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

_CORE = "megatron/core"
ADD = f"{_CORE}/fusions/fused_bias_dropout.py"
LAYER = f"{_CORE}/transformer/transformer_layer.py"
BLOCK = f"{_CORE}/transformer/transformer_block.py"
CONFIG = f"{_CORE}/transformer/transformer_config.py"
MAMBA = f"{_CORE}/ssm/mamba_layer.py"
EMBEDDING = f"{_CORE}/models/common/embeddings/language_model_embedding.py"
LINEAR = f"{_CORE}/tensor_parallel/layers.py"
CHECKPOINT = f"{_CORE}/tensor_parallel/random.py"
P2P = f"{_CORE}/pipeline_parallel/p2p_communication.py"

_UPCAST = "residual = residual.float()"
_ROUNDED = "residual = residual.bfloat16().float()"
_COMPUTE = "residual = residual.to(self.config.params_dtype)"


@dataclass(frozen=True)
class Edit:
    """Replace the nth occurrence (from 1) of some tokens in a file of the target."""

    file: str
    tokens: str
    replacement: str
    nth: int = 1

    def apply(self, root: Path) -> None:
        """Edit the file below `root`; its hard links elsewhere keep the old text.

        Raises:
            ValueError: the tokens are not there (any more).
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        parts = text.split(self.tokens)
        if len(parts) <= self.nth:
            found = len(parts) - 1
            raise ValueError(f"{self.file}: {self.tokens!r}: wanted number {self.nth} of {found}")
        head, tail = self.tokens.join(parts[: self.nth]), self.tokens.join(parts[self.nth :])
        path.unlink()
        path.write_text(head + self.replacement + tail, encoding="utf-8")


@dataclass(frozen=True)
class Mutant:
    """A defect, and how it must be found.

    Attributes:
        name: what is wrong.
        edits: how it is put in.
        looked_for: pytest's -m for where it is looked for; "" leaves that to the rule.
        rule: one of the rules that must be named.
        file: the file that must be named with it; None where no line can be named.
    """

    name: str
    rule: str
    file: str | None
    edits: tuple[Edit, ...]
    looked_for: str = ""

    def make(self, release: Path, into: Path) -> Path:
        """Make a mutated copy of a release in a new folder; unchanged files are shared."""
        shutil.copytree(release / "megatron", into / "megatron", copy_function=os.link)
        for edit in self.edits:
            edit.apply(into)
        return into


def _when(condition: str, otherwise: str = _UPCAST) -> str:
    """Round the residual through bf16 under a condition."""
    rounded = _ROUNDED.removeprefix("residual = ")
    return f"residual = {rounded} if {condition} else {otherwise.removeprefix('residual = ')}"


_LAST_RANK = "torch.distributed.get_rank() == torch.distributed.get_world_size() - 1"
ROUNDING_FUNCTION = """class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.bfloat16().float()


logger ="""


MUTANTS = (
    Mutant("downcast in the add", "S2", ADD, (
        Edit(ADD, "    if x.dtype != residual.dtype:",
             "    residual = residual.to(x.dtype)\n    if x.dtype != residual.dtype:"),
    )),
    Mutant("downcast at self attention", "S2", LAYER, (Edit(LAYER, _UPCAST, _COMPUTE, 1),)),
    Mutant("downcast at cross attention", "S2", LAYER, (Edit(LAYER, _UPCAST, _COMPUTE, 2),)),
    Mutant("downcast at the MLP", "S2", LAYER, (Edit(LAYER, _UPCAST, _COMPUTE, 3),)),
    Mutant("downcast at experts only", "S2", LAYER, (
        Edit(LAYER, _UPCAST, _when("self.is_moe_layer"), 3),
    )),
    Mutant("Mamba ignores the flag", "S2", MAMBA, (Edit(MAMBA, _UPCAST, _COMPUTE),)),
    Mutant("pipeline_dtype not overridden", "P1", CONFIG, (
        Edit(CONFIG, "            self.pipeline_dtype = torch.float\n", "            pass\n"),
    )),
    Mutant("pipeline_dtype overridden when unset", "P1", CONFIG, (
        Edit(CONFIG, "if self.fp32_residual_connection and self.pipeline_dtype is not None:",
             "if self.fp32_residual_connection:"),
    )),
    Mutant("pipeline_dtype overridden with the flag off", "P1", CONFIG, (
        Edit(CONFIG, "if self.fp32_residual_connection and self.pipeline_dtype is not None:",
             "if self.pipeline_dtype is not None:"),
    )),
    Mutant("notice on every rank", "P2", CONFIG, (
        Edit(CONFIG, "if self.pipeline_dtype != torch.float:\n"
             "                log_single_rank(\n                    logger,",
             "if self.pipeline_dtype != torch.float:\n                logger.log("),
    )),
    Mutant("notice when nothing changed", "P2", CONFIG, (
        Edit(CONFIG, "if self.pipeline_dtype != torch.float:", "if True:"),
    )),
    Mutant("embedding not upcast", "S1", EMBEDDING, (
        Edit(EMBEDDING, "embeddings = embeddings.float()", "pass"),
    )),
    Mutant("bias added before the upcast", "S6", ADD, (
        Edit(ADD, "    if x.dtype != residual.dtype:",
             "    if bias is not None:\n        x, bias = x + bias, None\n"
             "    if x.dtype != residual.dtype:"),
    )),
    Mutant("silent bf16 round trip", "S2", LAYER, (Edit(LAYER, _UPCAST, _ROUNDED, 1),)),
    Mutant("rounding only in eval", "S2", LAYER, (
        Edit(LAYER, _UPCAST, _when("not self.training"), 1),
    ), looked_for="S8"),
    Mutant("rounding only in recompute", "S2", LAYER, (
        Edit(LAYER, _UPCAST, _when("torch._C._current_graph_task_id() != -1"), 1),
    ), looked_for="S8"),
    Mutant("rounding only on the last stage", "S2", LAYER, (
        Edit(LAYER, _UPCAST,
             _when(f"self.config.pipeline_model_parallel_size > 1 and {_LAST_RANK}"), 1),
    ), looked_for="S8"),
    Mutant("rounding only in the second chunk", "S2", LAYER, (
        Edit(LAYER, _UPCAST,
             _when("self.config.virtual_pipeline_model_parallel_size"
                   " and self.layer_number > self.config.num_layers // 2"), 1),
    ), looked_for="S8"),
    Mutant("rounding only under sequence parallelism", "S2", LAYER, (
        Edit(LAYER, _UPCAST, _when("self.config.sequence_parallel"), 1),
    ), looked_for="S8"),
    Mutant("rounding only without bias", "S2", ADD, (
        Edit(ADD, "    if x.dtype != residual.dtype:",
             "    if bias is None:\n        residual = residual.bfloat16().float()\n"
             "    if x.dtype != residual.dtype:"),
    )),
    Mutant("rounding only with dropout", "S2", ADD, (
        Edit(ADD, "    if x.dtype != residual.dtype:",
             "    if prob > 0:\n        residual = residual.bfloat16().float()\n"
             "    if x.dtype != residual.dtype:"),
    ), looked_for="S8"),
    Mutant("residual taken after the norm", "S2", ADD, (
        Edit(LAYER, "            residual = hidden_states",
             "            residual = input_layernorm_output", 1),
    )),
    Mutant("rounding at the entry of the block", "S2", BLOCK, (
        Edit(BLOCK, "        hidden_states = make_viewless_tensor(inp=hidden_states,",
             "        hidden_states = make_viewless_tensor(inp=hidden_states.bfloat16().float(),"),
    )),
    Mutant("rounding before the final norm", "S2", BLOCK, (
        Edit(BLOCK, "(cast(Tensor, hidden_states))",
             "(cast(Tensor, hidden_states.bfloat16().float()))"),
    )),
    Mutant("residual changed in place", "S6", ADD, (
        Edit(ADD, "            out.add_(residual)", "            out = residual.add_(out)", 1),
    )),
    Mutant("bf16 on the wire", "P3", P2P, (
        Edit(P2P, "dtype=config.pipeline_dtype", "dtype=torch.bfloat16", 1),
        Edit(P2P, "dtype=config.pipeline_dtype", "dtype=torch.bfloat16", 1),
        Edit(P2P, "        config = self.config\n        tensor_recv_prev_func = None",
             "        config = self.config\n"
             "        if tensor_send_next is not None:\n"
             "            tensor_send_next = tensor_send_next.bfloat16()\n"
             "        if tensor_send_prev is not None:\n"
             "            tensor_send_prev = tensor_send_prev.bfloat16()\n"
             "        tensor_recv_prev_func = None"),
    )),
    Mutant("send rounded behind an fp32 wire", "P4", P2P, (
        Edit(P2P, "        config = self.config\n        tensor_recv_prev_func = None",
             "        config = self.config\n"
             "        if tensor_send_next is not None:\n"
             "            tensor_send_next = tensor_send_next.bfloat16().float()\n"
             "        tensor_recv_prev_func = None"),
    )),
    Mutant("receive buffers too narrow", "P3", P2P, (
        Edit(P2P, "dtype=config.pipeline_dtype", "dtype=torch.bfloat16", 1),
    )),
    Mutant("gradient rounded in an autograd function", "S5", LAYER, (
        Edit(LAYER, "logger =", ROUNDING_FUNCTION, 1),
        Edit(LAYER, _UPCAST, "residual = _Rounding.apply(residual)", 1),
    )),
    Mutant("fp32 matrix product", "S4", LINEAR, (
        Edit(LINEAR, "torch.matmul(total_input, weight.t())",
             "torch.matmul(total_input.float(), weight.t().float()).to(weight.dtype)"),
    )),
    Mutant("stream fp32 with the flag off", "S1", EMBEDDING, (
        Edit(EMBEDDING, "if self.config.fp32_residual_connection:", "if True:"),
    )),
)  # fmt: skip
