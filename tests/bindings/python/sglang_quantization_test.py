# SPDX-License-Identifier: Apache-2.0
"""tessera.sglang_quantization against stand-ins of the SGLang classes that it uses (SGLang itself is not needed, and not looked at):
what it claims, which layers become ours, and what they compute. tools/verify_plugins.py holds it against SGLang."""
import collections
import enum
import importlib
import importlib.util
import sys
import types

import pytest

torch = pytest.importorskip('torch')
if importlib.util.find_spec('sglang') is not None:
    pytest.skip('SGLang is installed: tools/verify_plugins.py checks it', allow_module_level=True)

import tessera  # noqa: E402
from modelopt_cases import (BuiltIn, FP8, LEGACY, MIXED, NVFP4, PUBLISHED, Parameter, expected_experts,  # noqa: E402
                            check_rest, fill_experts, fill_linear, nvfp4, relative)


class FusedMoE(torch.nn.Module):
    top_k, num_experts = 2, 6  # of all ranks


class LinearBase(torch.nn.Module):
    pass


class RadixAttention(torch.nn.Module):
    pass


class QuantizationConfig:
    def __init__(self):
        self.packed_modules_mapping = {}


class FusedMoeWeightScaleSupported(enum.Enum):
    TENSOR, CHANNEL, GROUP, BLOCK = 'tensor', 'channel', 'group', 'block'


Dispatched = collections.namedtuple('Dispatched', 'hidden_states topk_output')
Routed = collections.namedtuple('Routed', 'topk_weights topk_ids router_logits')
Bypassed = collections.namedtuple('Bypassed', 'router_logits')
Combined = collections.namedtuple('Combined', 'hidden_states')


def runner_config(**changes):
    return types.SimpleNamespace(**{'activation': 'silu', 'is_gated': True, 'apply_router_weight_on_input': False, 'no_combine': False,
                                    'gemm1_alpha': None, 'swiglu_limit': 2.0, 'routed_scaling_factor': 1.5, **changes})


@pytest.fixture
def plugin(monkeypatch):
    def module(name, **contents):
        made = types.ModuleType(name)
        made.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    methods = {'fp8': 'its own', 'modelopt_fp4': 'its own'}
    layers = 'sglang.srt.layers'
    for name in ('sglang', layers, f'{layers}.moe'):
        module(name)
    args = module('sglang.srt.server_args', QUANTIZATION_CHOICES=['fp8'])
    args.add_quantization_method_choices = args.QUANTIZATION_CHOICES.extend
    module('sglang.srt', server_args=args)
    linear = module(f'{layers}.linear', WEIGHT_LOADER_V2_SUPPORTED=['Fp8LinearMethod'], LinearBase=LinearBase)
    module(f'{layers}.moe.fused_moe_triton', FusedMoE=FusedMoE, FusedMoeWeightScaleSupported=FusedMoeWeightScaleSupported)
    module(f'{layers}.moe.token_dispatcher', StandardCombineInput=Combined)
    module(f'{layers}.parameter', ModelWeightParameter=Parameter, PerTensorScaleParameter=Parameter)
    module(f'{layers}.quantization', QUANTIZATION_METHODS=methods, get_quantization_config=lambda name: types.SimpleNamespace(
        from_config=lambda config: BuiltIn(name, config)))
    module(f'{layers}.quantization.base_config', QuantizationConfig=QuantizationConfig, LinearMethodBase=object,
           FusedMoEMethodBase=object)
    monkeypatch.delitem(sys.modules, 'tessera.sglang_quantization', raising=False)
    found = importlib.import_module('tessera.sglang_quantization')
    found.methods, found.choices, found.loaders = methods, args.QUANTIZATION_CHOICES, linear.WEIGHT_LOADER_V2_SUPPORTED
    yield found
    sys.modules.pop('tessera.sglang_quantization', None)
    del tessera.sglang_quantization


def test_registration_is_first_and_once(plugin):
    plugin.register()
    plugin.register()
    assert list(plugin.methods.items()) == [('tessera', plugin.TesseraConfig), ('fp8', 'its own'), ('modelopt_fp4', 'its own')]
    assert plugin.choices == ['fp8', 'tessera'] and plugin.loaders == ['Fp8LinearMethod', 'TesseraLinearMethod']


def test_it_claims_what_was_asked_for_alone(plugin):
    claim = plugin.TesseraConfig.override_quantization_method
    known = [{'quant_method': 'modelopt_fp4'}, {'quant_method': 'modelopt_mixed'}]  # as SGLang may name a ModelOpt checkpoint
    for config in (NVFP4, LEGACY, MIXED, PUBLISHED, *known):
        assert claim(config, 'tessera') == 'tessera' and claim(config, None) is None and claim(config, 'modelopt_fp4') is None
    for config in (FP8, {'quant_method': 'fp8'}, {'quant_method': 'modelopt_fp4', 'quant_algo': 'FP8'}, {}, None):
        assert claim(config, 'tessera') is None
    with pytest.raises(tessera.Unsupported, match="expected NVFP4 of ModelOpt, found quant_method 'modelopt', quant_algo 'FP8'"):
        plugin.TesseraConfig.from_config(FP8)


def test_which_layers_are_ours(plugin):
    linear, experts = LinearBase(), FusedMoE()
    for config, layer, prefix, expected in (
        (NVFP4, linear, 'model.layers.0.q_a', 'TesseraLinearMethod'),
        (NVFP4, experts, 'model.layers.0.mlp.experts', 'TesseraMoEMethod'),
        (NVFP4, linear, 'lm_head', 'modelopt_fp4: lm_head'),
        (NVFP4, linear, 'model.layers.0.mlp.gate', 'modelopt_fp4: model.layers.0.mlp.gate'),
        (NVFP4, RadixAttention(), 'model.layers.0.attn', 'modelopt_fp4: model.layers.0.attn'),
        (MIXED, linear, 'model.layers.0.q_a', 'modelopt_mixed: model.layers.0.q_a'),
        (MIXED, linear, 'model.layers.0.gate_up', 'TesseraLinearMethod'),
        (MIXED, experts, 'model.layers.0.mlp.experts', 'TesseraMoEMethod'),
        (PUBLISHED, experts, 'model.layers.0.mlp.experts', 'TesseraMoEMethod'),
        (PUBLISHED, linear, 'model.layers.0.q_a', 'fp8: model.layers.0.q_a'),
    ):
        made = plugin.TesseraConfig.from_config({**config, 'packed_modules_mapping': {'gate_up': ['gate_proj', 'up_proj']}})
        method = made.get_quant_method(layer, prefix)
        assert (method if isinstance(method, str) else type(method).__name__) == expected, prefix
    check_rest(plugin.TesseraConfig.from_config(PUBLISHED))
    made = plugin.TesseraConfig.from_config(MIXED)
    assert made.packed_modules_mapping == {}
    made.update_packed_modules_mapping({'gate_up': ['gate_proj', 'up_proj']})
    mapper = types.SimpleNamespace(apply_list=lambda names: names, apply_dict=lambda d: {f'own.{k}': v for k, v in d.items()})
    made.apply_weight_name_mapper(mapper)
    assert made.rest.mapped is mapper and made.rest.packed == made.packed_modules_mapping
    assert type(made.get_quant_method(linear, 'own.model.layers.0.gate_up')) is plugin.TesseraLinearMethod


def test_a_linear_map_of_fused_parts(plugin):
    layer, method, parts = LinearBase(), plugin.TesseraLinearMethod(), [nvfp4(24, 64, 1), nvfp4(8, 64, 2)]
    method.create_weights(layer, 64, [24, 8], 64, 32, torch.bfloat16, weight_loader=len)
    fill_linear(layer, parts)
    method.process_weights_after_loading(layer)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert relative(method.apply(layer, x), x.float() @ torch.cat([part[3] for part in parts]).T) <= 4e-3


def test_experts_of_a_rank(plugin):
    layer, method, hidden, inner = FusedMoE(), plugin.TesseraMoEMethod(), 64, 32
    # As FusedMoE calls it: with the number of this rank's experts.
    method.create_weights(layer=layer, num_experts=3, hidden_size=hidden, intermediate_size_per_partition=inner,
                          params_dtype=torch.bfloat16, weight_loader=len, with_bias=False)
    assert layer.w13_weight.shape == (3, 64, 32) and layer.w2_weight_scale_2.shape == (3,) and layer.w13_input_scale.shape == (6, 2)
    assert layer.w13_weight_scale.quant_method == 'block' and layer.w2_weight_scale_2.quant_method == 'tensor'
    assert layer.w2_input_scale._sglang_require_global_experts and not hasattr(layer.w2_weight, '_sglang_require_global_experts')
    method.create_moe_runner(layer, runner_config())
    dense = fill_experts(layer, 3, hidden, inner)
    method.process_weights_after_loading(layer)
    assert not [name for name, _ in layer.named_parameters()]
    x = torch.randn(4, hidden, generator=torch.Generator().manual_seed(7)).bfloat16()
    ids, weights = torch.tensor([[0, 2], [-1, 1], [-1, -1], [2, 0]], dtype=torch.int32), torch.tensor([[0.25, 0.5]] * 4)
    expected = expected_experts(dense, x, ids, weights, 2)
    found = method.apply(layer, Dispatched(x, Routed(weights, ids, None)))
    assert type(found) is Combined and relative(found.hidden_states, 1.5 * expected) <= 4e-3 and not found.hidden_states[2].any()
    layer.should_fuse_routed_scaling_factor_in_topk = True  # then the weights have the factor already
    assert relative(method.apply(layer, Dispatched(x, Routed(weights, ids, None))).hidden_states, expected) <= 4e-3
    with pytest.raises(tessera.Unsupported, match='expected tokens with topk_ids .*, found Dispatched with Bypassed'):
        method.apply(layer, Dispatched(x, Bypassed(None)))


def test_experts_that_are_refused(plugin):
    method = plugin.TesseraMoEMethod()
    for name, value in (('activation', 'gelu'), ('is_gated', False), ('apply_router_weight_on_input', True), ('no_combine', True),
                        ('gemm1_alpha', 1.702)):
        with pytest.raises(tessera.Unsupported, match=f'{name}: expected .*, found {value!r}'):
            method.create_moe_runner(FusedMoE(), runner_config(**{name: value}))
    with pytest.raises(tessera.InvalidArgument, match='intermediate_size_per_partition: expected a multiple of 16, found 24'):
        method.create_weights(FusedMoE(), 3, 64, 24, torch.bfloat16, weight_loader=len)
