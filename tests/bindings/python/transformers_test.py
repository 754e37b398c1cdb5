# SPDX-License-Identifier: Apache-2.0
"""Our experts and our attention inside Transformers' own DeepSeek-V4 class, with random weights and with a checkpoint's, against
its eager experts on the dequantised ones and its eager attention; and our functions are what was called."""
import os
import shutil
import types

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


def record(monkeypatch, name):
    """The arguments of every call of that function of ours from here on."""
    calls, original = [], getattr(ours, name)
    monkeypatch.setattr(ours, name, lambda *a, **k: calls.append((a, k)) or original(*a, **k))
    return calls


@torch.no_grad()
@pytest.mark.parametrize('attention', ['eager', 'tessera'])
@pytest.mark.parametrize('device', DEVICES)
def test_a_checkpoint_runs_in_the_real_class(model, monkeypatch, device, attention):
    calls, attention_calls = record(monkeypatch, 'experts_forward'), record(monkeypatch, 'attention_forward')
    loaded = ours.load(tessera.bundled_model(), device, attention=attention, max_tokens=128)
    assert type(loaded) is hf.DeepseekV4ForCausalLM and not any('experts.gate_up_proj' in n for n, _ in loaded.named_parameters())
    eager = ours.load(tessera.bundled_model(), device, experts='eager')
    for ids in prompts(model):
        ids = ids.to(device)
        calls.clear(), attention_calls.clear()
        found = loaded(ids).logits[0].float()
        expected = eager(ids).logits[0].float()  # which does not come to ours
        layers = loaded.config.num_hidden_layers
        assert len(calls) == layers and len(attention_calls) == (layers if attention == 'tessera' else 0)
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


def eager_attention(call, dtype):
    """Hugging Face's own function on what ours got."""
    (part, query, key, value, mask), options = call
    sinks = part.sinks.detach()
    part = types.SimpleNamespace(sinks=sinks.to(dtype), num_key_value_groups=part.num_key_value_groups, training=False)
    return hf.eager_attention_forward(part, query.to(dtype), key.to(dtype), value.to(dtype), mask.to(dtype),
                                      scaling=options['scaling'], dropout=0.0)[0].float()


@torch.no_grad()
@pytest.mark.parametrize('device', DEVICES)
def test_each_layers_attention_holds_the_contract(model, monkeypatch, device):
    """Prefill, a batch with padding and steps of one token, against float32; a token's bits depend on no other query."""
    calls = record(monkeypatch, 'attention_forward')
    loaded = ours.load(tessera.bundled_model(), device, attention='tessera', max_tokens=128)
    kinds = set(loaded.config.layer_types)
    assert len(kinds) == 3  # window alone, and both kinds of compressed entries
    long = prompts(model)[1].to(device)
    padded = torch.cat([torch.cat([long[:, :9] * 0, long[:, :61]], 1), long[:, :70]])
    mask = torch.ones_like(padded)
    mask[0, :9] = 0
    loaded(long), loaded(padded, attention_mask=mask)
    cache = loaded(long[:, :-2], use_cache=True).past_key_values
    for i in (-2, -1):
        loaded(long[:, long.shape[1] + i:long.shape[1] + i + 1], past_key_values=cache)
    assert len(calls) == 5 * loaded.config.num_hidden_layers
    for call in list(calls):
        (part, query, key, value, visible), options = call
        found, expected = ours.attention_forward(part, query, key, value, visible, **options)[0].float(), eager_attention(call, torch.float32)
        assert found.shape == expected.shape and torch.isfinite(found).all()
        real = (visible[:, 0].max(-1).values == 0) & (query.shape[0] == 1 or mask[:, -query.shape[2]:].bool())
        assert (found[real] - expected[real]).norm() <= 4e-3 * expected[real].norm(), part.layer_type
        # The last token by itself, with the window that it has then.
        extra = query.shape[2] - 1
        entries = 0 if part.compressor is None else query.shape[2] // part.compressor.compress_rate
        window = key.shape[2] - entries - query.shape[2]
        if window == 0 and extra >= part.sliding_window:
            cut = extra - (part.sliding_window - 1)
            alone = ours.attention_forward(part, query[:, :, -1:], key[:, :, cut:], value[:, :, cut:], visible[:, :, -1:, cut:], **options)[0]
            assert torch.equal(alone[:, 0].float(), found[:, -1])


@torch.no_grad()
def test_what_our_attention_refuses(model):
    loaded = ours.load(tessera.bundled_model(), attention='tessera')
    ids = prompts(model)[0]
    holes = torch.ones_like(ids)
    holes[0, 4] = 0
    with pytest.raises(tessera.Unsupported, match='attention_mask: expected the last 32 tokens of each, but for padding'):
        loaded(ids, attention_mask=holes)
    part = loaded.model.layers[0].self_attn
    query, key = torch.zeros(1, part.num_heads, 2, part.head_dim), torch.zeros(1, 1, 2, part.head_dim)
    with pytest.raises(tessera.InvalidArgument, match='attention_mask: expected a tensor, found NoneType'):
        ours.attention_forward(part, query, key, key, None)
    with pytest.raises(tessera.Unsupported, match=r'dropout: expected 0, found 0\.1'):
        ours.attention_forward(part, query, key, key, torch.zeros(1, 1, 2, 2), dropout=0.1)
    del part.tessera_attention
    with pytest.raises(tessera.InvalidArgument, match='expected a module of ours, found none; call tessera.transformers.use_attention'):
        loaded(ids)
    with pytest.raises(tessera.InvalidArgument, match="attention: expected eager or tessera, found 'sdpa'"):
        ours.load(tessera.bundled_model(), attention='sdpa')
    with pytest.raises(tessera.InvalidArgument, match="experts: expected tessera, eager or .*found 'tesera'"):
        ours.load(tessera.bundled_model(), experts='tesera')


def test_models_that_are_not_switched(model):
    other = torch.nn.Linear(2, 2)
    for use, layers in ((ours.use_attention, 'DeepseekV4Attention'), (ours.use_experts, 'DeepseekV4Experts')):
        with pytest.raises(tessera.Unsupported, match=f'model: expected layers of {layers}, found none in Linear'):
            use(other)
    loaded = ours.load(tessera.bundled_model())
    parts = [layer.self_attn for layer in loaded.model.layers]
    for name, value in (('sliding_window', 7), ('scaling', 0.5), ('head_dim', 8)):
        before = getattr(parts[-1], name)
        setattr(parts[-1], name, value)
        with pytest.raises(tessera.Unsupported, match=f'{name}: expected {before} in all layers, found {value}'):
            ours.use_attention(loaded)
        setattr(parts[-1], name, before)
    assert not any(hasattr(part, 'tessera_attention') for part in parts) and loaded.config._attn_implementation == 'eager'
    assert ours.use_attention(loaded) == len(parts)


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
