# SPDX-License-Identifier: Apache-2.0
"""What the tests of the plug-ins for vLLM and SGLang share: configs of checkpoints, stand-ins of classes that both engines have, and
NVFP4 weights with what they stand for."""
import copy
import pickle

import torch

import tessera.torch as tt

NVFP4 = {'quant_method': 'modelopt', 'quant_algo': 'NVFP4', 'group_size': 16, 'ignore': ['lm_head', '*.gate']}
LEGACY = {'quantization': {'quant_algo': 'NVFP4', 'group_size': 16, 'exclude_modules': ['lm_head'], 'kv_cache_quant_algo': None}}
MIXED = {'quant_method': 'modelopt', 'quant_algo': 'MIXED_PRECISION', 'ignore': [], 'quantized_layers': {
    'model.layers.0.mlp.experts.0.w1': {'quant_algo': 'NVFP4'}, 'model.layers.0.q_a': {'quant_algo': 'FP8'},
    'model.layers.0.gate_proj': {'quant_algo': 'NVFP4'}, 'model.layers.0.up_proj': {'quant_algo': 'NVFP4'},
    'model.layers.1.gate_proj': {'quant_algo': 'NVFP4'}, 'model.layers.1.up_proj': {'quant_algo': 'FP8'}}}
PUBLISHED = {'quant_method': 'fp8', 'moe_quant_algo': 'NVFP4', 'group_size': 16, 'fmt': 'e4m3'}
FP8 = {'quant_method': 'modelopt', 'quant_algo': 'FP8'}


class Parameter(torch.nn.Parameter):
    def __new__(cls, data, weight_loader, **dims):
        made = super().__new__(cls, data, requires_grad=False)
        made.weight_loader = weight_loader
        return made

    def __init__(self, **_):
        pass


class BuiltIn:
    """A config of the engine's own."""

    def __init__(self, name, config):
        self.name, self.config, self.mapped = name, config, None
        self.weight_block_size = [128, 128]

    def get_quant_method(self, layer, prefix):
        return f'{self.name}: {prefix}'

    def apply_vllm_mapper(self, mapper):
        self.mapped = mapper

    apply_weight_name_mapper = apply_vllm_mapper  # SGLang's name

    def update_packed_modules_mapping(self, mapping):
        self.packed = mapping


def check_rest(config):
    """What models read off the engine's own config they get from ours, in copies too."""
    for one in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert one.weight_block_size == [128, 128] and not hasattr(one, 'is_something_else')
    assert not hasattr(object.__new__(type(config)), 'weight_block_size')


def nvfp4(rows, cols, seed):
    generator = torch.Generator().manual_seed(seed)
    codes, scales, scale = tt.quantize_nvfp4(torch.randn(rows, cols, generator=generator) * (1 + seed), 'tensor')
    return codes, scales.view(torch.float8_e4m3fn), scale[0], tt.context().dequantize_nvfp4(codes, scales, scale)


def relative(found, expected):
    return ((found.float() - expected).norm() / expected.norm()).item()


def fill_linear(layer, parts):
    """An NVFP4 layer's parameters from what nvfp4() gave for each part."""
    for name, i in (('weight', 0), ('weight_scale', 1)):
        getattr(layer, name).data.copy_(torch.cat([part[i] for part in parts]))
    layer.weight_scale_2.data.copy_(torch.stack([part[2] for part in parts]))


def fill_experts(layer, num_experts, hidden, inner):
    """Random NVFP4 experts, as an engine's loader leaves them. Returns each one's gate, up and down in float32."""
    dense = []
    for e in range(num_experts):
        gate, up, down = nvfp4(inner, hidden, 3 * e), nvfp4(inner, hidden, 3 * e + 1), nvfp4(hidden, inner, 3 * e + 2)
        for i, name in enumerate(('weight', 'weight_scale')):
            getattr(layer, f'w13_{name}').data[e] = torch.cat([gate[i], up[i]])
            getattr(layer, f'w2_{name}').data[e] = down[i]
        layer.w13_weight_scale_2.data[e] = torch.stack([gate[2], up[2]])
        layer.w2_weight_scale_2.data[e] = down[2]
        dense.append((gate[3], up[3], down[3]))
    return dense


def expected_experts(dense, x, ids, weights, limit):
    """The experts' sum in float32; ids of -1 give 0."""
    out = torch.zeros(x.shape)
    for t, s in [(t, s) for t in range(ids.shape[0]) for s in range(ids.shape[1]) if ids[t, s] >= 0]:
        gate, up, down = dense[int(ids[t, s])]
        h = torch.nn.functional.silu((gate @ x[t].float()).clamp(max=limit)) * (up @ x[t].float()).clamp(-limit, limit)
        out[t] += down @ (h * weights[t, s])
    return out
