"""Mutants of arithmetic: rounding where none is promised, which drift and golden values must show.

Each also says with which stack to look for the smallest size at which it is seen.
"""

from dataclasses import dataclass

from suites.selftest.mutants import ADD, LAYER, LINEAR, Edit, Mutant

_CORE = "megatron/core"
SOFTMAX = f"{_CORE}/fusions/fused_softmax.py"
NORM = f"{_CORE}/transformer/torch_norm.py"
ROTARY = f"{_CORE}/models/common/embeddings/rotary_pos_embedding.py"
LOSS = f"{_CORE}/tensor_parallel/cross_entropy.py"
ROUTER = f"{_CORE}/transformer/moe/moe_utils.py"

_NORM_CLASS = "            norm_cls = torch.nn.RMSNorm"
_UPCAST_ADD = "    if x.dtype != residual.dtype:"


@dataclass(frozen=True)
class DriftMutant(Mutant):
    """A mutant of arithmetic.

    Attributes:
        stack: which shows it.
        dropout: p, for what only shows with it.
    """

    stack: str = "long-dense"
    dropout: float = 0.0


DRIFT_MUTANTS = (
    DriftMutant("softmax in bf16", "D3", None, (
        Edit(SOFTMAX, "        probs = softmax_fn(mask_output)",
             "        e = (mask_output - mask_output.amax(-1, keepdim=True)).bfloat16().exp()\n"
             "        probs = (e / e.sum(-1, keepdim=True)).float()"),
    ), stack="long-rope"),
    DriftMutant("norm statistics in bf16", "D2", None, (
        Edit(NORM, _NORM_CLASS,
             "            class norm_cls(torch.nn.RMSNorm):\n"
             "                def forward(self, x):\n"
             "                    s = x.float().square().mean(-1, keepdim=True).bfloat16()\n"
             "                    s = torch.rsqrt(s.float() + self.eps).bfloat16().float()\n"
             "                    return (x.float() * s * self.weight.float()).to(x.dtype)"),
    ), stack="long-stock-rmsnorm"),
    DriftMutant("rotary tables in bf16", "D2", None, (
        Edit(ROTARY, "freqs = torch.outer(seq, self.inv_freq)",
             "freqs = torch.outer(seq, self.inv_freq).bfloat16().float()"),
    ), stack="long-rope"),
    DriftMutant("bias rounded before the add", "S6", ADD, (
        Edit(ADD, _UPCAST_ADD,
             "    if bias is not None:\n        x, bias = x + bias, None\n" + _UPCAST_ADD),
    )),
    DriftMutant("dropout scaling applied to the residual", "S6", ADD, (
        Edit(ADD, _UPCAST_ADD,
             "    if training and prob:\n        residual = residual / (1 - prob)\n" + _UPCAST_ADD),
    ), dropout=0.1),
    DriftMutant("branch output rounded through fp16", "S6", ADD, (
        Edit(ADD, "            x = x + bias", "            x = (x + bias).half().to(x.dtype)"),
    )),
    DriftMutant("bf16 rounding every 8th layer", "D1", LAYER, (
        Edit(LAYER, "residual = residual.float()",
             "residual = residual.bfloat16().float() if self.layer_number % 8 == 0"
             " else residual.float()"),
    )),
    DriftMutant("gradient of a norm in bf16", "D3", None, (
        Edit(NORM, "from megatron.core.jit", """class _NarrowGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        s = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
        y, g = x * s, gradient * weight
        by_weight = (gradient * y).flatten(0, -2).sum(0)
        return s * (g - y * (g * y).mean(-1, keepdim=True)), by_weight, None


from megatron.core.jit"""),
        Edit(NORM, _NORM_CLASS,
             "            class norm_cls(torch.nn.RMSNorm):\n"
             "                def forward(self, x):\n"
             "                    return _NarrowGradient.apply(x, self.weight, self.eps)"),
    ), stack="long-stock-rmsnorm"),
    DriftMutant("loss reduced in bf16", "D2", None, (
        Edit(LOSS, "sum_exp_logits = exp_logits.sum(dim=-1)",
             "sum_exp_logits = exp_logits.bfloat16().sum(dim=-1).float()"),
    ), stack="long-rope"),
    DriftMutant("router probabilities in bf16", "D2", None, (
        Edit(ROUTER, "probs = torch.softmax(scores, dim=-1, dtype=torch.float32)",
             "probs = torch.softmax(scores, dim=-1, dtype=torch.float32).bfloat16().float()"),
    ), stack="long-moe"),
    DriftMutant("router takes the second best", "D2", None, (
        Edit(ROUTER, "scores, top_indices = compute_topk(logits, topk, num_groups, group_topk)",
             "top_indices = torch.topk(logits, topk + 1, dim=-1).indices[:, 1:]\n"
             "                scores = torch.gather(logits, 1, top_indices)"),
    ), stack="long-moe"),
    DriftMutant("rotary base of 1000", "G2", None, (
        Edit(ROTARY, "        self.inv_freq = ",
             "        rotary_base = 1000\n        self.inv_freq = "),
    ), stack="long-rope"),
    DriftMutant("residual add in another order with the flag off", "S7", ADD, (
        Edit(ADD, _UPCAST_ADD,
             "    if bias is not None and residual.dtype == x.dtype:\n"
             "        residual, bias = residual + bias, None\n" + _UPCAST_ADD),
    )),
    DriftMutant("weight gradients half too large", "G3", None, (
        Edit(LINEAR, "grad_weight = grad_output.t().matmul(total_input)",
             "grad_weight = grad_output.t().matmul(total_input) * 1.5"),
    )),
)  # fmt: skip
