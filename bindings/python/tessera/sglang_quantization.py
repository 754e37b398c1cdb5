# SPDX-License-Identifier: Apache-2.0
"""Tessera's kernels in SGLang's own engine: a quantisation plug-in for ModelOpt NVFP4 (linear maps and fused MoE). Importing it
needs SGLang.

SGLang finds register() by the entry point "tessera" of sglang.srt.plugins, in each of its processes. Then

    sglang serve DIR --quantization tessera      # an NVFP4 checkpoint of ModelOpt, or DeepSeek-V4 with NVFP4 experts

Layers that are NVFP4 are ours, with activations in BF16; all others (FP8, excluded ones, caches) are left to the method that
SGLang has for the checkpoint. Nothing is claimed that was not asked for. Tensor and expert parallelism are SGLang's own, tokens
are dispatched by its standard dispatcher (--moe-a2a-backend none), and a shared expert that is not NVFP4 must not be fused
with the routed ones (--disable-shared-experts-fusion). **Tested by import against stand-ins of SGLang's classes; it has not run
inside SGLang.** Written against SGLang's main of summer 2026. tools/verify_plugins.py checks it where both are installed."""
from typing import Any, Optional

import torch
from sglang.srt import server_args
from sglang.srt.layers.linear import WEIGHT_LOADER_V2_SUPPORTED, LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE, FusedMoeWeightScaleSupported
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.parameter import ModelWeightParameter, PerTensorScaleParameter
from sglang.srt.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, LinearMethodBase, QuantizationConfig

from ._errors import Unsupported
from ._modelopt import NAME, Nvfp4Experts, Nvfp4Layers, Nvfp4Linear, rest_name

_FP8 = 'fp8'


class TesseraConfig(Nvfp4Layers, QuantizationConfig):
    """What of a checkpoint is NVFP4, and SGLang's own config for the rest."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        name = rest_name(config, _FP8)
        self.read_layers(config, name)
        self.packed_modules_mapping = config.get('packed_modules_mapping') or {}
        self.rest = get_quantization_config(name).from_config(config)

    def update_packed_modules_mapping(self, mapping: dict[str, list[str]]) -> None:
        self.packed_modules_mapping = mapping
        self.rest.update_packed_modules_mapping(mapping)

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Optional[dict[str, Any]], user_quant: Optional[str]) -> Optional[str]:
        """Claims what was asked for where it has NVFP4. SGLang may give here no more than the method's name, which it has
        worked out itself; from_config() gets all of it."""
        if user_quant != NAME or hf_quant_cfg is None:
            return None
        method = str(hf_quant_cfg.get('quant_method') or '').lower()
        is_known = method in ('modelopt_fp4', 'modelopt_mixed') and not hf_quant_cfg.get('quant_algo')
        return NAME if is_known or rest_name(hf_quant_cfg, _FP8) is not None else None

    def get_scaled_act_names(self) -> list[str]:
        return []

    def apply_weight_name_mapper(self, hf_to_sglang_mapper: Any) -> None:
        self.rename_layers(hf_to_sglang_mapper)
        self.rest.apply_weight_name_mapper(hf_to_sglang_mapper)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, (LinearBase, FusedMoE)) and self.is_nvfp4(prefix, isinstance(layer, FusedMoE)):
            return TesseraLinearMethod() if isinstance(layer, LinearBase) else TesseraMoEMethod()
        return self.rest.get_quant_method(layer, prefix)


class TesseraLinearMethod(Nvfp4Linear, LinearMethodBase):
    matrix, number = ModelWeightParameter, PerTensorScaleParameter


class TesseraMoEMethod(Nvfp4Experts, FusedMoEMethodBase):
    matrix, number = ModelWeightParameter, PerTensorScaleParameter

    def create_weights(self, layer: torch.nn.Module, num_experts: int, hidden_size: int, intermediate_size_per_partition: int,
                       params_dtype: torch.dtype, **extra_weight_attrs: Any) -> None:
        """num_experts: of this rank; layer.num_experts is of all."""
        made = self.add_experts(layer, num_experts, hidden_size, intermediate_size_per_partition,
                                extra_weight_attrs.get('weight_loader'), layer.num_experts)
        # What SGLang's loader asks a parameter for, to know a scale of blocks from one of a matrix, and that all ranks' come.
        for name, parameter in made.items():
            if name.endswith('weight_scale'):
                parameter.quant_method = FusedMoeWeightScaleSupported.BLOCK.value
            elif name.endswith('weight_scale_2'):
                parameter.quant_method = FusedMoeWeightScaleSupported.TENSOR.value
            elif name.endswith('input_scale'):
                parameter._sglang_require_global_experts = True

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: Any) -> None:
        """There is none: apply() runs the kernels. What they do not do is refused before weights are read."""
        for name, expected in (('activation', 'silu'), ('is_gated', True), ('apply_router_weight_on_input', False),
                               ('no_combine', False), ('gemm1_alpha', None), ('gemm1_clamp_limit', None)):
            found = getattr(moe_runner_config, name, expected)
            if found != expected:
                raise Unsupported(f'{name}: expected {expected!r}, found {found!r}')
        self.moe_runner_config = moe_runner_config

    def process_weights_after_loading(self, layer: Any) -> None:
        self.pack_experts(layer, layer.top_k, getattr(self.moe_runner_config, 'swiglu_limit', None))

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        routed = getattr(dispatch_output, 'topk_output', None)
        if not hasattr(routed, 'topk_ids'):
            raise Unsupported(f'dispatch_output: expected tokens with topk_ids (--moe-a2a-backend none), found '
                              f'{type(dispatch_output).__name__} with {type(routed).__name__}')
        # Models leave their factor to the method, unless the choice of experts has it already. Ids of other ranks are -1, which
        # gives 0.
        weights = routed.topk_weights
        factor = getattr(self.moe_runner_config, 'routed_scaling_factor', None)
        if factor is not None and not getattr(layer, 'should_fuse_routed_scaling_factor_in_topk', False):
            weights = weights * factor
        return StandardCombineInput(hidden_states=layer.tessera_experts(dispatch_output.hidden_states, routed.topk_ids, weights))


def register() -> None:
    """The entry point. May be called again."""
    others = {name: config for name, config in QUANTIZATION_METHODS.items() if name != NAME}
    QUANTIZATION_METHODS.clear()
    # First: the first method that claims a checkpoint gets it, and SGLang's own claim theirs whatever was asked for.
    QUANTIZATION_METHODS.update({NAME: TesseraConfig, **others})
    if NAME not in server_args.QUANTIZATION_CHOICES:
        server_args.add_quantization_method_choices([NAME])
    if TesseraLinearMethod.__name__ not in WEIGHT_LOADER_V2_SUPPORTED:
        WEIGHT_LOADER_V2_SUPPORTED.append(TesseraLinearMethod.__name__)
