# SPDX-License-Identifier: Apache-2.0
"""Our experts inside Transformers' own DeepSeek-V4 class, with random weights and with a checkpoint's, against its eager
experts on the dequantised ones; and our function is what was called."""
import os
import shutil

import pytest

torch = pytest.importorskip('torch')
pytest.importorskip('transformers.models.deepseek_v4')

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf  # noqa: E402

import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402
import tessera.transformers as ours  # noqa: E402

DEVICES = ['cpu', pytest.param('cuda', marks=pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU that PyTorch sees'))]


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


def prompts(model):
    """Tokens of a question, and of a text that fills windows, both compressors and the indexer's choice."""
    text = 'Compute 12+34. Spell mire. Reverse abc. Sort 5 3 9 1. ' * 12
    return [torch.tensor([ids]) for ids in (model.encode_chat('Compute 257-7.'), model.tokenize(text)[:300])]


@torch.no_grad()
@pytest.mark.parametrize('device', DEVICES)
def test_a_checkpoint_runs_in_the_real_class(model, monkeypatch, device):
    calls = []
    original = ours.experts_forward
    monkeypatch.setattr(ours, 'experts_forward', lambda *a, **k: calls.append(1) or original(*a, **k))
    loaded = ours.load(tessera.bundled_model(), device, max_tokens=128)
    assert type(loaded) is hf.DeepseekV4ForCausalLM and not any('experts.gate_up_proj' in n for n, _ in loaded.named_parameters())
    eager = ours.load(tessera.bundled_model(), device, experts='eager')
    for ids in prompts(model):
        ids = ids.to(device)
        calls.clear()
        found = loaded(ids).logits[0].float()
        assert len(calls) == loaded.config.num_hidden_layers
        expected = eager(ids).logits[0].float()
        assert len(calls) == loaded.config.num_hidden_layers  # the eager model did not come here
        # docs/contracts/numerics.md, section 5: greedy tokens are equal, or the top-2 gap is within twice the difference.
        best = expected.topk(2, dim=-1).values
        differs = found.argmax(-1) != expected.argmax(-1)
        assert not (differs & (best[:, 0] - best[:, 1] > 2 * (found - expected).abs().amax(-1))).any()
        assert differs.float().mean() < 0.1 and torch.isfinite(found).all()
    question = prompts(model)[0].to(device)
    answer = loaded.generate(question, max_new_tokens=8, do_sample=False)[0, question.shape[1]:]
    assert model.detokenize(answer.tolist(), skip_special=True) == '250'


@torch.no_grad()
@pytest.mark.parametrize('device', DEVICES)
def test_each_layers_experts_hold_the_contract(model, device):
    """What experts got in the eager BF16 model, through ours and through float32 on dequantised weights."""
    folder = tessera.bundled_model()
    eager, loaded = ours.load(folder, device, experts='eager'), ours.load(folder, device)
    exact = ours.load(folder, device, experts='eager', dtype=torch.float32)
    seen = []
    for layer in eager.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    eager(prompts(model)[1].to(device))
    assert len(seen) == len(eager.model.layers)
    for i, (x, ids, routing) in enumerate(seen):
        expected = exact.model.layers[i].mlp.experts(x.float(), ids, routing.float())
        found = loaded.model.layers[i].mlp.experts(x, ids, routing).float()
        assert (found - expected).norm() <= 4e-3 * expected.norm(), i


@pytest.mark.skipif('TESSERA_TINY_BF16' not in os.environ, reason='TESSERA_TINY_BF16: no BF16 original of the bundled model')
def test_a_converted_checkpoint_loads(model, tmp_path):
    tessera.convert(os.environ['TESSERA_TINY_BF16'], tmp_path / 'out', families='experts')
    loaded = ours.load(tmp_path / 'out')
    question = prompts(model)[0]
    answer = loaded.generate(question, max_new_tokens=8, do_sample=False)[0, question.shape[1]:]
    assert model.detokenize(answer.tolist(), skip_special=True) == '250'
    # On the same values the dense original and its NVFP4 differ by what NVFP4 rounds, which is not nothing.
    dense = ours.load(os.environ['TESSERA_TINY_BF16'], experts='eager')
    with torch.no_grad():
        found, expected = loaded(question).logits.float(), dense(question).logits.float()
    assert 1e-3 < ((found - expected).norm() / expected.norm()).item() < 0.2
    with pytest.raises(tessera.Unsupported, match=r'gate_up_proj: expected NVFP4.*found fused.*tessera convert'):
        ours.load(os.environ['TESSERA_TINY_BF16'])


def test_folders_that_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match='expected config.json'):
        ours.load(tmp_path)
    source = tessera.bundled_model()
    for text, error, words in (('{', tessera.DataLoss, 'expected a JSON object, found '), ('[]', tessera.DataLoss, 'found list'),
                               ('{"model_type": "llama"}', tessera.Unsupported, "expected model_type 'deepseek_v4', found 'llama'"),
                               ('{}', tessera.Unsupported, "expected model_type 'deepseek_v4', found None")):
        (tmp_path / 'config.json').write_text(text)
        with pytest.raises(error, match=rf'config\.json: .*{words}'):
            ours.load(tmp_path)
    for options, words in (({'max_tokens': 0}, 'max_tokens: expected at least 1, found 0'),
                           ({'dtype': torch.int8}, 'dtype: expected a floating-point .*found torch.int8')):
        with pytest.raises(tessera.InvalidArgument, match=words):
            ours.load(source, **options)
    shutil.copy(f'{source}/config.json', tmp_path)
    with pytest.raises(FileNotFoundError, match=r'expected \*\.safetensors, found none'):
        ours.load(tmp_path)
    tensors = load_file(f'{source}/model.safetensors')
    for name, new, error, words in (
        ('layers.1.attn.wkv.weight', None, tessera.NotFound, r'expected a tensor for model\.layers\.1\.self_attn\.kv_proj\.weight'),
        ('layers.1.attn_norm.weight', None, tessera.NotFound, r'expected a tensor for model\.layers\.1\.input_layernorm\.weight'),
        ('layers.1.attn_norm.weight', torch.zeros(8), tessera.InvalidArgument, r'input_layernorm\.weight: expected shape \[256\], found \[8\]'),
        ('layers.2.ffn.experts.3.w2.weight_scale_2', None, tessera.DataLoss, r'experts\.3\.w2: expected one of weight_scale_2.*neither'),
    ):
        changed = {k: v for k, v in tensors.items() if k != name} | ({} if new is None else {name: new})
        save_file(changed, tmp_path / 'model.safetensors')
        with pytest.raises(error, match=words) as caught:
            ours.load(tmp_path)
        assert '\n' not in str(caught.value)
