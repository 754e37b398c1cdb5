# SPDX-License-Identifier: Apache-2.0
"""Tessera's experts inside Hugging Face's DeepSeek-V4 classes. Importing it needs torch and transformers.

    tessera.transformers.use_experts(model)      # quantises each layer's experts to NVFP4 and switches the model to them

The function is registered as "tessera" in ALL_EXPERTS_FUNCTIONS, which transformers asks at every forward; no class is
patched. Tested on the CPU, with a small random model; no GPU has run it."""
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from . import torch as tessera_torch

NAME = 'tessera'


def _stack(weights: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    parts = [tessera_torch.quantize_nvfp4(weight, rule) for weight in weights]
    return torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]), torch.cat([p[2] for p in parts])


def experts_forward(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, top_k] to [tokens, hidden]. An index equal to
    the number of experts is skipped. Values are rounded to BF16 on their way in."""
    module = getattr(self, 'tessera_experts', None)
    if module is None:
        raise ValueError('experts: expected NVFP4 weights, found none; call tessera.transformers.use_experts(model)')
    inputs, chunk = hidden_states.to(torch.bfloat16), self.tessera_max_tokens
    parts = [module(inputs[i:i + chunk], top_k_index[i:i + chunk], top_k_weights[i:i + chunk])
             for i in range(0, inputs.shape[0], chunk)]
    return torch.cat(parts).to(hidden_states.dtype)


def use_experts(model: torch.nn.Module, *, rule: str = 'four-over-six', keep_dense: bool = False, max_tokens: int = 4096) -> int:
    """Quantises gate_up_proj [experts, 2 inner, hidden] and down_proj [experts, hidden, inner] of every DeepseekV4Experts in
    the model, drops them unless keep_dense, and switches the model to them. Returns the number of layers. `rule` as that of
    Context.quantize_nvfp4."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    count = 0
    for part in list(model.modules()):
        if type(part).__name__ != 'DeepseekV4Experts':
            continue
        gate_up, down = part.gate_up_proj.detach(), part.down_proj.detach()
        inner = gate_up.shape[1] // 2
        w1, w3, w2 = (_stack(w, rule) for w in (gate_up[:, :inner], gate_up[:, inner:], down))
        part.tessera_experts = tessera_torch.Experts(w1, w3, w2, top_k=model.config.num_experts_per_tok,
                                                     swiglu_limit=float(part.limit), max_tokens=max_tokens)
        part.tessera_max_tokens = max_tokens
        if not keep_dense:
            del part.gate_up_proj, part.down_proj
        count += 1
    model.set_experts_implementation(NAME)
    return count
