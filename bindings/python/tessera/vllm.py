# SPDX-License-Identifier: Apache-2.0
"""Tessera's kernels in vLLM: a quantisation plug-in for ModelOpt NVFP4 (linear maps and fused MoE). Importing it needs vLLM.

vLLM finds register() by the entry point "tessera" of vllm.general_plugins, in each of its processes. Then

    vllm serve DIR --quantization tessera      # an NVFP4 checkpoint of ModelOpt, or DeepSeek-V4 with NVFP4 experts

Layers that are NVFP4 are ours, with activations in BF16; all others (FP8, excluded ones, caches) are left to the method that
vLLM has for the checkpoint. Nothing is claimed that was not asked for. Tensor and expert parallelism are vLLM's own. **Tested
by import against stand-ins of vLLM's classes; it has not run inside vLLM.** Written against vLLM's main of summer 2026
(base_config.py 026bb17, modelopt.py 00155cd, routed_experts.py 002d607). tools/verify_plugins.py checks it where both are
installed."""
from typing import Any, Optional

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.linear import WEIGHT_LOADER_V2_SUPPORTED, LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.parameter import ModelWeightParameter, PerTensorScaleParameter

from ._errors import Unsupported
from ._modelopt import NAME, Nvfp4Experts, Nvfp4Layers, Nvfp4Linear, rest_name

_FP8 = 'deepseek_v4_fp8'


class TesseraConfig(Nvfp4Layers, QuantizationConfig):
    """What of a checkpoint is NVFP4, and vLLM's own config for the rest."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        name = rest_name(config, _FP8)
        self.read_layers(config, name)
        self.rest = get_quantization_config(name).from_config(config)

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], user_quant: Optional[str],
                                     hf_config: Any = None) -> Optional[str]:
        """Claims what was asked for where it has NVFP4."""
        return NAME if user_quant == NAME and hf_quant_cfg is not None and rest_name(hf_quant_cfg, _FP8) is not None else None

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.rename_layers(hf_to_vllm_mapper)
        self.rest.apply_vllm_mapper(hf_to_vllm_mapper)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, (LinearBase, RoutedExperts)) and self.is_nvfp4(prefix, isinstance(layer, RoutedExperts)):
            return TesseraLinearMethod() if isinstance(layer, LinearBase) else TesseraMoEMethod(layer.moe_config)
        self.rest.packed_modules_mapping = self.packed_modules_mapping
        return self.rest.get_quant_method(layer, prefix)


class TesseraLinearMethod(Nvfp4Linear, LinearMethodBase):
    matrix, number = ModelWeightParameter, PerTensorScaleParameter


class TesseraMoEMethod(Nvfp4Experts, FusedMoEMethodBase):
    """Shared experts are left to vLLM's runner."""
    matrix, number = ModelWeightParameter, PerTensorScaleParameter

    def uses_weight_scale_2_pattern(self) -> bool:
        return True

    def create_weights(self, layer: torch.nn.Module, num_experts: int, hidden_size: int, intermediate_size_per_partition: int,
                       params_dtype: torch.dtype, **extra_weight_attrs: Any) -> None:
        if not getattr(self.moe, 'is_act_and_mul', True):
            raise Unsupported('experts: expected SwiGLU, found experts without a gate')
        layer.num_experts = num_experts
        self.add_experts(layer, num_experts, hidden_size, intermediate_size_per_partition, extra_weight_attrs.get('weight_loader'),
                         num_experts)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.pack_experts(layer, layer.top_k, getattr(layer, 'swiglu_limit', None))

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
