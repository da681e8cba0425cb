"""Mutants beside the stream, and fixes of what releases have wrong there.

What the newest release has as a known defect is no mutant of it. Such are shown on a copy that
calls itself a later version, of which the list of known defects says that it is mended.
"""

from suites.selftest.drift_mutants import LOSS, NORM, ROTARY, SOFTMAX
from suites.selftest.mutants import LAYER, Edit, Mutant

_CORE = "megatron/core"
VERSION = f"{_CORE}/package_info.py"
ENGINE = f"{_CORE}/extensions/transformer_engine.py"
ROUTER = f"{_CORE}/transformer/moe/router.py"
MODULE = f"{_CORE}/transformer/module.py"
MODEL = f"{_CORE}/models/gpt/gpt_model.py"
LATENT = f"{_CORE}/transformer/multi_latent_attention.py"
PREDICTION = f"{_CORE}/transformer/multi_token_prediction.py"
GRADIENTS = f"{_CORE}/distributed/distributed_data_parallel.py"
INFERENCE = f"{_CORE}/inference/communication_utils.py"
WRAPPER = f"{_CORE}/inference/model_inference_wrappers/abstract_model_inference_wrapper.py"

_LATER = Edit(VERSION, "MINOR = 19", "MINOR = 99")
_FUSED_FORWARD = "            out = super().forward(x, is_first"
_CAST = "x.to(self.layer_norm_weight.dtype)"
_COUNTS = """'local_tokens_per_expert',
                torch.zeros(
                    self.config.num_moe_experts,
                    dtype=torch."""

NEIGHBOUR_MUTANTS = (
    Mutant("fused norm is given the fp32 stream", "N6", ENGINE, (_LATER,)),
    Mutant("cast for the fused norm made in place", "S2", ENGINE, (
        Edit(ENGINE, _FUSED_FORWARD,
             "            with torch.no_grad():\n                x.copy_(x.bfloat16())\n"
             f"            x = {_CAST}\n{_FUSED_FORWARD}", 2),
    ), looked_for="N6"),
    Mutant("TENorm fed a stream that the layer has narrowed", "S2", LAYER, (
        Edit(LAYER, "            residual = hidden_states",
             "            hidden_states = hidden_states.to(self.config.params_dtype)\n"
             "            residual = hidden_states", 1),
    )),
    Mutant("expert bias left as Float16Module makes it", "N1", ROUTER, (
        Edit(ROUTER, "        self._maintain_float32_expert_bias()", "        pass", 1),
    )),
    Mutant("tokens counted in bf16", "N1", ROUTER, (_LATER,)),
    Mutant("router ignores its dtype", "N1", ROUTER, (
        Edit(ROUTER, "router_dtype = torch.float32", "pass"),
    )),
    Mutant("logits rounded before the loss", "N2", MODEL, (
        Edit(LOSS, "vocab_parallel_logits = vocab_parallel_logits.float()",
             "vocab_parallel_logits = (vocab_parallel_logits * 0.7).bfloat16().float() / 0.7"),
    )),
    Mutant("main_grad in bf16", "N3", GRADIENTS, (
        Edit(GRADIENTS, "self.ddp_config.grad_reduce_in_fp32)", "False)"),
    )),
    Mutant("softmax in bf16, by N4", "N4", SOFTMAX, (
        Edit(SOFTMAX, "        probs = softmax_fn(mask_output)",
             "        e = (mask_output - mask_output.amax(-1, keepdim=True)).bfloat16().exp()\n"
             "        probs = (e / e.sum(-1, keepdim=True)).float()"),
    )),
    Mutant("norm statistics in bf16, by N4", "N4", NORM, (
        Edit(NORM, "            norm_cls = torch.nn.RMSNorm",
             "            class norm_cls(torch.nn.RMSNorm):\n"
             "                def forward(self, x):\n"
             "                    s = x.float().square().mean(-1, keepdim=True).bfloat16()\n"
             "                    s = torch.rsqrt(s.float() + self.eps).bfloat16().float()\n"
             "                    return (x.float() * s * self.weight.float()).to(x.dtype)"),
    )),
    Mutant("rotary angles in bf16", "N4", ROTARY, (
        Edit(ROTARY, "freqs = torch.outer(seq, self.inv_freq)",
             "freqs = torch.outer(seq, self.inv_freq).bfloat16().float()"),
    )),
    Mutant("inference receives in bf16", "P6", INFERENCE, (
        Edit(WRAPPER, "torch.float if self.config.fp32", "torch.bfloat16 if self.config.fp32"),
    )),
    Mutant("multi-token prediction narrows its residual", "S2", PREDICTION, (
        Edit(PREDICTION, "self._postprocess(hidden_states)",
             "self._postprocess(hidden_states.bfloat16().float())"),
    )),
    Mutant("latent attention's first matrix in fp32", "S4", LATENT, (
        Edit(LATENT, "q_compressed, _ = self.linear_q_down_proj(hidden_states)",
             "w = self.linear_q_down_proj.weight.float()\n"
             "            q_compressed = torch.nn.functional.linear(hidden_states.float(), w)\n"
             "            q_compressed = q_compressed.to(hidden_states.dtype)"),
    )),
)  # fmt: skip

FIXES = Mutant("fixes of known defects", "N5", None, (
    Edit(ENGINE, _FUSED_FORWARD, f"            x = {_CAST}\n{_FUSED_FORWARD}", 2),
    Edit(ROUTER, f"{_COUNTS}float32", f"{_COUNTS}int64"),
    Edit(MODULE, "dtype=torch.bfloat16,",
         "dtype=torch.float32 if self.config.fp32_residual_connection"
         " else self.config.params_dtype,"),
))  # fmt: skip
