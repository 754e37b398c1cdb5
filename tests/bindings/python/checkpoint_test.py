# SPDX-License-Identifier: Apache-2.0
"""tessera._checkpoint: every format of a linear map gives its values, under official names and Hugging Face's."""
import json

import pytest

torch = pytest.importorskip('torch')
pytest.importorskip('safetensors')

from safetensors.torch import save_file  # noqa: E402

import tessera  # noqa: E402
import tessera.torch as tt  # noqa: E402
from tessera._checkpoint import Checkpoint  # noqa: E402

ROWS, COLS = 160, 192


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_formats_of_linear_maps(tmp_path):
    codes, scales, scale = tt.quantize_nvfp4(normal(ROWS, COLS), 'tensor')
    nvfp4 = tt.context().dequantize_nvfp4(codes, scales, scale)
    fp8 = normal(ROWS, COLS, seed=1).to(torch.float8_e4m3fn)
    factors = 2.0 ** torch.tensor([[-3.0, 0.0], [1.0, -7.0]])
    blocks = torch.empty(ROWS, COLS)
    for r in range(ROWS):
        for c in range(COLS):
            blocks[r, c] = fp8[r, c].float() * factors[r // 128, c // 128]
    plain = normal(ROWS, COLS, seed=2).bfloat16()
    save_file({
        'layers.0.attn.wq_a.weight': codes, 'layers.0.attn.wq_a.weight_scale': scales.view(torch.float8_e4m3fn),
        'layers.0.attn.wq_a.weight_scale_2': scale[0],
        'model.layers.0.self_attn.q_b_proj.weight_packed': codes.clone(),
        'model.layers.0.self_attn.q_b_proj.weight_scale': scales.view(torch.float8_e4m3fn).clone(),
        'model.layers.0.self_attn.q_b_proj.weight_global_scale': 1 / scale,
    }, tmp_path / 'a.safetensors')
    save_file({
        'layers.0.attn.wkv.weight': fp8, 'layers.0.attn.wkv.scale': (factors.log2() + 127).to(torch.uint8).view(torch.float8_e8m0fnu),
        'layers.0.attn.wo_a.weight': fp8.clone(), 'layers.0.attn.wo_a.weight_scale_inv': factors,
        'layers.0.attn.wo_b.weight': plain,
        'layers.0.ffn.shared_experts.w1.weight': codes.clone(), 'layers.0.ffn.shared_experts.w1.scale': scales.clone(),
        'layers.0.ffn.shared_experts.w2.weight': codes.clone(), 'layers.0.ffn.shared_experts.w2.weight_scale': scales.view(torch.float8_e4m3fn).clone(),
    }, tmp_path / 'b.safetensors')
    checkpoint = Checkpoint(tmp_path)
    attention = 'model.layers.0.self_attn.'
    assert torch.equal(checkpoint.dense(attention + 'q_a_proj'), nvfp4)
    assert (checkpoint.dense(attention + 'q_b_proj') - nvfp4).abs().max() <= 1e-6 * nvfp4.abs().max()  # a reciprocal of a reciprocal
    for name in ('kv_proj', 'o_a_proj'):
        assert torch.equal(checkpoint.dense(attention + name), blocks), name
        assert checkpoint.nvfp4(attention + name) is None
    assert torch.equal(checkpoint.tensor(attention + 'o_b_proj.weight'), plain)
    shared = 'model.layers.0.mlp.shared_experts.'
    with pytest.raises(tessera.Unsupported, match=r'shared_experts\.w1: expected NVFP4, FP8 blocks.*found torch.uint8'):
        checkpoint.dense(shared + 'gate_proj')
    with pytest.raises(tessera.DataLoss, match=r'shared_experts\.w2: expected one of weight_scale_2.*neither'):
        checkpoint.dense(shared + 'down_proj')
    (tmp_path / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': {'x': 'c.safetensors'}}))
    with pytest.raises(tessera.NotFound, match='c.safetensors: expected by model.safetensors.index.json'):
        Checkpoint(tmp_path)


def test_scales_of_another_shape_are_refused(tmp_path):
    codes, scales, scale = tt.quantize_nvfp4(normal(ROWS, COLS), 'tensor')
    save_file({
        'layers.0.attn.wq_a.weight': codes, 'layers.0.attn.wq_a.weight_scale': scales[:, :-1].contiguous().view(torch.float8_e4m3fn),
        'layers.0.attn.wq_a.weight_scale_2': scale[0],
        'layers.0.attn.wkv.weight': normal(256, 256).to(torch.float8_e4m3fn), 'layers.0.attn.wkv.weight_scale_inv': torch.ones(4, 4),
    }, tmp_path / 'a.safetensors')
    for name, words in (('q_a_proj', r'weight_scale: expected scales \[160, 12\].*found \[160, 11\]'),
                        ('kv_proj', r'wkv: expected scales \[2, 2\] for a weight stored as \[256, 256\], found \[4, 4\]')):
        with pytest.raises(tessera.DataLoss, match=words):
            Checkpoint(tmp_path).dense(f'model.layers.0.self_attn.{name}')


def test_folders_that_are_refused(tmp_path):
    save_file({'a': torch.ones(16)}, tmp_path / 'a.safetensors')
    whole, file, index = (tmp_path / 'a.safetensors').read_bytes(), tmp_path / 'b.safetensors', tmp_path / 'model.safetensors.index.json'

    def refused(words):
        with pytest.raises(tessera.DataLoss, match=words) as caught:
            Checkpoint(tmp_path)
        assert '\n' not in str(caught.value)

    for contents in (whole[:-8], b'', b'x' * 100):
        file.write_bytes(contents)
        refused(r'b\.safetensors: expected a safetensors file, found .')
    file.write_bytes(whole)
    refused(r"b\.safetensors: expected each tensor in one file, found 'a' in another")
    for text, words in (
        ('nonsense', 'expected a JSON object, found Expecting value'),
        ('[]', 'expected a JSON object, found list'),
        ('{}', 'expected weight_map, an object, found NoneType'),
        ('{"weight_map": {"a": 5}}', r"expected weight_map\['a'\] to be a \*\.safetensors of this folder, found 5"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', r"expected .* of this folder, found '\.\./"),
        ('{"weight_map": {"a": "../a.safetensors"}}', r"expected .* of this folder, found '\.\./"),
    ):
        index.write_text(text)
        refused(rf'index\.json: {words}')
