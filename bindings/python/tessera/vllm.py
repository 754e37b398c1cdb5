# SPDX-License-Identifier: Apache-2.0
"""Tessera's kernels in vLLM: a quantisation plug-in for ModelOpt NVFP4 (linear maps and fused MoE). Importing it needs vLLM.

vLLM finds register() by the entry point "tessera" of vllm.general_plugins, in each of its processes. Then

    vllm serve DIR --quantization tessera      # any NVFP4 checkpoint of ModelOpt
    vllm serve DIR                             # DeepSeek-V4 with NVFP4 experts is claimed by itself

Layers that are NVFP4 are ours, with activations in BF16; all others (FP8, excluded ones, caches) are left to the method that
vLLM has for the checkpoint. Tensor and expert parallelism are vLLM's own. **Tested by import against stand-ins of vLLM's
classes; it has not run inside vLLM.** Written against vLLM's main of summer 2026 (base_config.py 026bb17, modelopt.py 00155cd,
routed_experts.py 002d607). tools/verify_plugins.py checks it where both are installed."""
import fnmatch
from typing import Any, Optional

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.linear import WEIGHT_LOADER_V2_SUPPORTED, LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.parameter import ModelWeightParameter, PerTensorScaleParameter

from . import torch as tessera_torch
from ._errors import InvalidArgument, Unsupported

NAME = 'tessera'
GROUP = 16
_ALGORITHMS = ('NVFP4', 'W4A16_NVFP4')  # the second says that activations are BF16, which here they always are
_MAX_TOKENS = 1024  # longer steps run so many at a time


def _facts(config: dict[str, Any]) -> dict[str, Any]:
    """The part of quantization_config, or of hf_quant_config.json, that says what is quantised."""
    inner = config.get('quantization')
    return inner if isinstance(inner, dict) else config


def _algorithm(facts: dict[str, Any]) -> str:
    return str(facts.get('quant_algo') or '').upper()


def _rest_name(config: dict[str, Any]) -> Optional[str]:
    """vLLM's own method for a checkpoint that has NVFP4, or None where it has none."""
    facts = _facts(config)
    method = str(config.get('quant_method') or '').lower()
    if method.startswith('modelopt') or 'quantization' in config:
        if _algorithm(facts) == 'MIXED_PRECISION':
            layers = (facts.get('quantized_layers') or {}).values()
            return 'modelopt_mixed' if any(_algorithm(layer) in _ALGORITHMS for layer in layers) else None
        return 'modelopt_fp4' if _algorithm(facts) in _ALGORITHMS else None
    # DeepSeek-V4 as NVIDIA publishes it: FP8 blocks, and experts in NVFP4.
    return 'deepseek_v4_fp8' if method == 'fp8' and str(facts.get('moe_quant_algo') or '').upper() == 'NVFP4' else None


class TesseraConfig(QuantizationConfig):
    """What of a checkpoint is NVFP4, and vLLM's own config for the rest."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        name, facts = _rest_name(config), _facts(config)
        if name is None:
            raise Unsupported(f'quantization_config: expected NVFP4 of ModelOpt, found quant_method '
                              f'{config.get("quant_method")!r}, quant_algo {facts.get("quant_algo")!r}')
        group = facts.get('group_size') or GROUP
        if group != GROUP:
            raise Unsupported(f'group_size: expected {GROUP}, found {group}')
        self.experts_only = name == 'deepseek_v4_fp8'
        self.quantized_layers: Optional[dict[str, Any]] = None
        if name == 'modelopt_mixed':
            self.quantized_layers = dict(facts['quantized_layers'])
        self.exclude_modules: list[str] = list(facts.get('exclude_modules') or facts.get('ignore') or [])
        self.rest = get_quantization_config(name).from_config(config)

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ['hf_quant_config.json']

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> 'TesseraConfig':
        return cls(config)

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], user_quant: Optional[str],
                                     hf_config: Any = None) -> Optional[str]:
        """Claims NVFP4 where it was asked for, and DeepSeek-V4's where nothing was."""
        is_ours = user_quant == NAME or (user_quant is None and getattr(hf_config, 'model_type', None) == 'deepseek_v4')
        return NAME if is_ours and hf_quant_cfg is not None and _rest_name(hf_quant_cfg) is not None else None

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.exclude_modules = hf_to_vllm_mapper.apply_list(self.exclude_modules)
        if self.quantized_layers is not None:
            self.quantized_layers = hf_to_vllm_mapper.apply_dict(self.quantized_layers)
        self.rest.apply_vllm_mapper(hf_to_vllm_mapper)

    def _parts(self, prefix: str) -> list[str]:
        """The layers of the checkpoint that vLLM has fused into this one."""
        base, _, name = prefix.rpartition('.')
        return [f'{base}.{part}' for part in self.packed_modules_mapping.get(name, [name])]

    def _is_nvfp4(self, layer: torch.nn.Module, prefix: str) -> bool:
        if self.experts_only:
            return isinstance(layer, RoutedExperts)
        parts = self._parts(prefix)
        # Whole parts of a name, or a pattern: "model.layers.1" is not in "model.layers.10".
        if any(f'.{part}.' in f'.{p}.' or fnmatch.fnmatch(p, part) for part in self.exclude_modules for p in (prefix, *parts)):
            return False
        if self.quantized_layers is None:
            return True
        found = {_algorithm(info) for name, info in self.quantized_layers.items()
                 if name in (prefix, *parts) or (isinstance(layer, RoutedExperts) and name.startswith(f'{prefix}.'))}
        if len(found & set(_ALGORITHMS)) and len(found) > 1 and not found <= set(_ALGORITHMS):
            raise Unsupported(f'{prefix}: expected one quant_algo in a fused layer, found {", ".join(sorted(found))}')
        return bool(found & set(_ALGORITHMS))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, (LinearBase, RoutedExperts)) and self._is_nvfp4(layer, prefix):
            return TesseraLinearMethod() if isinstance(layer, LinearBase) else TesseraMoEMethod(layer.moe_config)
        self.rest.packed_modules_mapping = self.packed_modules_mapping
        return self.rest.get_quant_method(layer, prefix)


def _parameter(layer: torch.nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype, loader: Any,
               dims: Optional[tuple[int, int]] = None) -> None:
    """dims: of input and output, for what ranks cut."""
    data = torch.zeros(shape, dtype=dtype)
    layer.register_parameter(
        name, PerTensorScaleParameter(data=data, weight_loader=loader) if dims is None else
        ModelWeightParameter(data=data, input_dim=dims[0], output_dim=dims[1], weight_loader=loader))


def _check_width(name: str, width: int) -> None:
    if width % GROUP:
        raise InvalidArgument(f'{name}: expected a multiple of {GROUP}, found {width}')


class TesseraLinearMethod(LinearMethodBase):
    """An NVFP4 linear map, or several that vLLM has fused, each with its own tensor scale."""

    def create_weights(self, layer: torch.nn.Module, input_size_per_partition: int, output_partition_sizes: list[int],
                       input_size: int, output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any) -> None:
        _check_width('input_size_per_partition', input_size_per_partition)
        loader, rows = extra_weight_attrs.get('weight_loader'), sum(output_partition_sizes)
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition, layer.output_size_per_partition = input_size_per_partition, rows
        _parameter(layer, 'weight', (rows, input_size_per_partition // 2), torch.uint8, loader, (1, 0))
        _parameter(layer, 'weight_scale', (rows, input_size_per_partition // GROUP), torch.float8_e4m3fn, loader, (1, 0))
        for name in ('weight_scale_2', 'input_scale'):  # the second: a static range of activations, which is not used
            _parameter(layer, name, (len(output_partition_sizes),), torch.float32, loader)

    def process_weights_after_loading(self, layer: Any) -> None:
        codes, scales = layer.weight.data.split(layer.logical_widths), layer.weight_scale.data.split(layer.logical_widths)
        layer.tessera_linears = torch.nn.ModuleList(
            tessera_torch.Linear(c.contiguous(), s.contiguous(), g, max_tokens=_MAX_TOKENS)
            for c, s, g in zip(codes, scales, layer.weight_scale_2.tolist()))
        del layer.weight, layer.weight_scale, layer.weight_scale_2, layer.input_scale

    def apply(self, layer: Any, x: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
        parts = [linear(x) for linear in layer.tessera_linears]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return y if bias is None else y + bias


class TesseraMoEMethod(FusedMoEMethodBase):
    """NVFP4 experts: those of this rank, their weights cut as vLLM cuts them. Shared experts are left to vLLM's runner."""

    def uses_weight_scale_2_pattern(self) -> bool:
        return True

    def create_weights(self, layer: torch.nn.Module, num_experts: int, hidden_size: int, intermediate_size_per_partition: int,
                       params_dtype: torch.dtype, **extra_weight_attrs: Any) -> None:
        _check_width('hidden_size', hidden_size)
        _check_width('intermediate_size_per_partition', intermediate_size_per_partition)
        if not getattr(self.moe, 'is_act_and_mul', True):
            raise Unsupported('experts: expected SwiGLU, found experts without a gate')
        loader, inner = extra_weight_attrs.get('weight_loader'), intermediate_size_per_partition
        layer.num_experts = num_experts
        for name, rows, cols, shape in (('w13', 2 * inner, hidden_size, (num_experts, 2)), ('w2', hidden_size, inner, (num_experts,))):
            _parameter(layer, f'{name}_weight', (num_experts, rows, cols // 2), torch.uint8, loader, (1, 2))
            _parameter(layer, f'{name}_weight_scale', (num_experts, rows, cols // GROUP), torch.float8_e4m3fn, loader, (1, 2))
            _parameter(layer, f'{name}_weight_scale_2', shape, torch.float32, loader)
            _parameter(layer, f'{name}_input_scale', shape, torch.float32, loader)

    def process_weights_after_loading(self, layer: Any) -> None:
        inner = layer.w13_weight.shape[1] // 2

        def half(rows: slice, column: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return (layer.w13_weight.data[:, rows].contiguous(), layer.w13_weight_scale.data[:, rows].contiguous(),
                    layer.w13_weight_scale_2.data[:, column])

        down = layer.w2_weight.data, layer.w2_weight_scale.data, layer.w2_weight_scale_2.data
        layer.tessera_experts = tessera_torch.Experts(
            half(slice(0, inner), 0), half(slice(inner, None), 1), down, top_k=layer.top_k,
            swiglu_limit=float(getattr(layer, 'swiglu_limit', None) or 0), max_tokens=_MAX_TOKENS)
        for name in ('w13', 'w2'):
            for end in ('weight', 'weight_scale', 'weight_scale_2', 'input_scale'):
                delattr(layer, f'{name}_{end}')

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def apply(self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, shared_experts: Any = None,
              shared_experts_input: Optional[torch.Tensor] = None) -> torch.Tensor:
        if layer.apply_router_weight_on_input:
            raise Unsupported('apply_router_weight_on_input: expected False, found True')
        # Of experts of other ranks the map has -1, which gives 0.
        ids = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        return layer.tessera_experts(x, ids, topk_weights)


def register() -> None:
    """The entry point. May be called again."""
    register_quantization_config(NAME)(TesseraConfig)
    if TesseraLinearMethod.__name__ not in WEIGHT_LOADER_V2_SUPPORTED:
        WEIGHT_LOADER_V2_SUPPORTED.append(TesseraLinearMethod.__name__)
