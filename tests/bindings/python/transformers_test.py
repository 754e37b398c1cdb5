# SPDX-License-Identifier: Apache-2.0
"""Our experts inside Transformers' own DeepSeek-V4 class, with random weights, against its eager experts on the dequantised
ones; and our function is what was called."""
import pytest

torch = pytest.importorskip('torch')
pytest.importorskip('transformers.models.deepseek_v4')

from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf  # noqa: E402

import tessera.torch as tt  # noqa: E402
import tessera.transformers as ours  # noqa: E402


class Holder(torch.nn.Module):
    """A model of one layer's experts, as far as use_experts looks at models."""

    def __init__(self, config):
        super().__init__()
        self.config, self.experts = config, hf.DeepseekV4Experts(config)

    def set_experts_implementation(self, name):
        self.config._experts_implementation = name


def test_experts_run_ours_and_equal_eager_on_dequantised_weights(monkeypatch):
    config = hf.DeepseekV4Config(hidden_size=64, moe_intermediate_size=32, num_local_experts=4, n_routed_experts=4,
                                 num_experts_per_tok=2)
    torch.manual_seed(0)
    model = Holder(config)
    experts = model.experts
    for weight in (experts.gate_up_proj, experts.down_proj):
        torch.nn.init.normal_(weight)
    for weight in (experts.gate_up_proj, experts.down_proj):  # what NVFP4 holds exactly
        for matrix in weight.data:
            halves = matrix.chunk(2) if weight is experts.gate_up_proj else (matrix,)
            for half in halves:
                half.copy_(tt.context().dequantize_nvfp4(*tt.quantize_nvfp4(half, 'tensor')))
    x = torch.randn(7, experts.hidden_dim).bfloat16().float()
    ids, routing = torch.stack([torch.randperm(4)[:2] for _ in range(7)]), torch.rand(7, 2)
    config._experts_implementation = 'eager'
    expected = experts(x, ids, routing)
    calls = []
    original = ours.experts_forward
    monkeypatch.setattr(ours, 'experts_forward', lambda *a, **k: calls.append(1) or original(*a, **k))
    assert ours.use_experts(model, rule='tensor', max_tokens=4) == 1 and not hasattr(experts, 'gate_up_proj')
    found = experts(x, ids, routing)
    assert calls == [1] and ((found - expected).abs().max() / expected.abs().max()).item() < 0.02
