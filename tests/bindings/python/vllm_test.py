# SPDX-License-Identifier: Apache-2.0
"""tessera.vllm against stand-ins of the vLLM classes that it uses (vLLM itself is not needed, and not looked at): what it
claims, which layers become ours, and what they compute. tools/verify_plugins.py holds it against vLLM."""
import importlib
import importlib.util
import sys
import types

import pytest

torch = pytest.importorskip('torch')
if importlib.util.find_spec('vllm') is not None:
    pytest.skip('vLLM is installed: tools/verify_plugins.py checks it', allow_module_level=True)

import tessera  # noqa: E402
from modelopt_cases import (BuiltIn, FP8, LEGACY, MIXED, NVFP4, PUBLISHED, Parameter, expected_experts,  # noqa: E402
                            check_rest, fill_experts, fill_linear, nvfp4, relative)


class RoutedExperts(torch.nn.Module):
    expert_map, apply_router_weight_on_input, top_k, swiglu_limit = None, False, 2, 2.0
    moe_config = types.SimpleNamespace(is_act_and_mul=True)


class LinearBase(torch.nn.Module):
    pass


class Attention(torch.nn.Module):
    pass


class FusedMoEMethodBase:
    def __init__(self, moe):
        self.moe = moe


class QuantizationConfig:
    def __init__(self):
        self.packed_modules_mapping = {}


@pytest.fixture
def plugin(monkeypatch):
    registered = {}

    def module(name, **contents):
        made = types.ModuleType(name)
        made.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    def get_quantization_config(name):
        return types.SimpleNamespace(from_config=lambda config: BuiltIn(name, config))

    layers = 'vllm.model_executor.layers'
    for name in ('vllm', 'vllm.model_executor', layers):
        module(name)
    module(f'{layers}.fused_moe', FusedMoEMethodBase=FusedMoEMethodBase, RoutedExperts=RoutedExperts)
    linear = module(f'{layers}.linear', WEIGHT_LOADER_V2_SUPPORTED=['Fp8LinearMethod'], LinearBase=LinearBase, LinearMethodBase=object)
    module(f'{layers}.quantization', get_quantization_config=get_quantization_config,
           register_quantization_config=lambda name: lambda cls: registered.setdefault(name, cls))
    module(f'{layers}.quantization.base_config', QuantizationConfig=QuantizationConfig)
    module('vllm.model_executor.parameter', ModelWeightParameter=Parameter, PerTensorScaleParameter=Parameter)
    monkeypatch.delitem(sys.modules, 'tessera.vllm', raising=False)
    found = importlib.import_module('tessera.vllm')
    found.registered, found.loaders = registered, linear.WEIGHT_LOADER_V2_SUPPORTED
    yield found
    sys.modules.pop('tessera.vllm', None)
    del tessera.vllm


def test_registration(plugin):
    plugin.register()
    plugin.register()
    assert plugin.registered == {'tessera': plugin.TesseraConfig}
    assert plugin.loaders == ['Fp8LinearMethod', 'TesseraLinearMethod']


def test_claims(plugin):
    claim = plugin.TesseraConfig.override_quantization_method
    deepseek, other = types.SimpleNamespace(model_type='deepseek_v4'), types.SimpleNamespace(model_type='llama')
    for config in (NVFP4, LEGACY, MIXED, PUBLISHED):
        assert claim(config, 'tessera', other) == 'tessera' == claim(config, 'tessera', deepseek)
        assert claim(config, None, deepseek) is None and claim(config, 'modelopt_fp4', deepseek) is None
        assert claim(config, 'tessera') == 'tessera' and claim(config, None) is None  # a vLLM that does not give hf_config
    for config in (FP8, {'quant_method': 'fp8'}, {'quant_method': 'awq', 'quant_algo': 'NVFP4'}, {}, None):
        assert claim(config, 'tessera', deepseek) is None
    with pytest.raises(tessera.Unsupported, match="expected NVFP4 of ModelOpt, found quant_method 'modelopt', quant_algo 'FP8'"):
        plugin.TesseraConfig.from_config(FP8)
    with pytest.raises(tessera.Unsupported, match='group_size: expected 16, found 32'):
        plugin.TesseraConfig.from_config({**NVFP4, 'group_size': 32})


def test_which_layers_are_ours(plugin):
    linear, experts = LinearBase(), RoutedExperts()

    def kind(config, layer, prefix):
        made = plugin.TesseraConfig.from_config(config)
        made.packed_modules_mapping = {'gate_up': ['gate_proj', 'up_proj']}
        method = made.get_quant_method(layer, prefix)
        return method if isinstance(method, str) else type(method).__name__

    layer1 = {**NVFP4, 'ignore': ['model.layers.1', 'model.layers.2.*']}
    for config, layer, prefix, expected in (
        (layer1, linear, 'model.layers.1.q_a', 'modelopt_fp4: model.layers.1.q_a'),
        (layer1, linear, 'model.layers.2.q_a', 'modelopt_fp4: model.layers.2.q_a'),
        (layer1, linear, 'model.layers.10.q_a', 'TesseraLinearMethod'),
        (NVFP4, linear, 'model.layers.0.q_a', 'TesseraLinearMethod'),
        (NVFP4, experts, 'model.layers.0.mlp.experts', 'TesseraMoEMethod'),
        (NVFP4, linear, 'model.layers.0.mlp.gate', 'modelopt_fp4: model.layers.0.mlp.gate'),
        (NVFP4, linear, 'lm_head', 'modelopt_fp4: lm_head'),
        (NVFP4, Attention(), 'model.layers.0.attn', 'modelopt_fp4: model.layers.0.attn'),
        (LEGACY, linear, 'model.layers.0.q_a', 'TesseraLinearMethod'),
        (MIXED, linear, 'model.layers.0.q_a', 'modelopt_mixed: model.layers.0.q_a'),
        (MIXED, linear, 'model.layers.0.other', 'modelopt_mixed: model.layers.0.other'),
        (MIXED, linear, 'model.layers.0.gate_up', 'TesseraLinearMethod'),
        (MIXED, experts, 'model.layers.0.mlp.experts', 'TesseraMoEMethod'),
        (PUBLISHED, experts, 'model.layers.0.mlp.experts', 'TesseraMoEMethod'),
        (PUBLISHED, linear, 'model.layers.0.q_a', 'deepseek_v4_fp8: model.layers.0.q_a'),
    ):
        assert kind(config, layer, prefix) == expected, prefix
    with pytest.raises(tessera.Unsupported, match='gate_up: expected one quant_algo in a fused layer, found FP8, NVFP4'):
        kind(MIXED, linear, 'model.layers.1.gate_up')
    check_rest(plugin.TesseraConfig.from_config(PUBLISHED))
    made = plugin.TesseraConfig.from_config(MIXED)
    mapper = types.SimpleNamespace(apply_list=lambda names: names, apply_dict=lambda d: {f'vllm.{k}': v for k, v in d.items()})
    made.apply_vllm_mapper(mapper)
    assert made.rest.mapped is mapper and type(made.get_quant_method(linear, 'vllm.model.layers.0.gate_proj')) is plugin.TesseraLinearMethod


def test_a_linear_map_of_fused_parts(plugin):
    layer, method, parts = LinearBase(), plugin.TesseraLinearMethod(), [nvfp4(24, 64, 1), nvfp4(8, 64, 2)]
    method.create_weights(layer, 64, [24, 8], 64, 32, torch.bfloat16, weight_loader=len)
    assert layer.weight.weight_loader is len and layer.weight.shape == (32, 32) and layer.weight_scale_2.shape == (2,)
    fill_linear(layer, parts)
    method.process_weights_after_loading(layer)
    assert not [name for name, _ in layer.named_parameters()]
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    expected = x.float() @ torch.cat([part[3] for part in parts]).T
    assert relative(method.apply(layer, x), expected) <= 4e-3
    bias = torch.arange(32).bfloat16()
    assert torch.equal(method.apply(layer, x, bias), method.apply(layer, x) + bias)
    with pytest.raises(tessera.InvalidArgument, match='input_size_per_partition: expected a multiple of 16, found 24'):
        method.create_weights(LinearBase(), 24, [8], 24, 8, torch.bfloat16)


def test_experts_of_a_rank(plugin):
    num_experts, hidden, inner = 3, 64, 32
    layer = RoutedExperts()
    method = plugin.TesseraMoEMethod(layer.moe_config)
    method.create_weights(layer, num_experts, hidden, inner, torch.bfloat16, weight_loader=len, global_num_experts=6)
    assert layer.w13_weight.shape == (3, 64, 32) and layer.w13_weight_scale_2.shape == (3, 2) and method.uses_weight_scale_2_pattern()
    dense = fill_experts(layer, num_experts, hidden, inner)
    method.process_weights_after_loading(layer)
    assert not [name for name, _ in layer.named_parameters()] and method.get_fused_moe_quant_config(layer) is None
    layer.expert_map = torch.tensor([-1, 0, -1, 1, 2, -1], dtype=torch.int32)
    x = torch.randn(4, hidden, generator=torch.Generator().manual_seed(7)).bfloat16()
    ids, weights = torch.tensor([[1, 3], [0, 4], [2, 5], [4, 1]], dtype=torch.int32), torch.tensor([[0.25, 0.5]] * 4)
    expected = expected_experts(dense, x, layer.expert_map[ids.long()], weights, 2)
    found = method.apply(layer, x, weights, ids, None, None)
    assert relative(found, expected) <= 4e-3 and not found[2].any()
    layer.apply_router_weight_on_input = True
    with pytest.raises(tessera.Unsupported, match='apply_router_weight_on_input: expected False, found True'):
        method.apply(layer, x, weights, ids, None, None)
