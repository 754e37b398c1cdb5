# SPDX-License-Identifier: Apache-2.0
"""NVFP4 checkpoints of ModelOpt as serving engines load them: which layers are NVFP4, the parameters that their loaders fill, and
what the kernels make of those. vLLM's interface and SGLang's, which began as a copy of it, share this; importing it needs
torch alone."""
import fnmatch
from typing import Any, Optional

import torch

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


def rest_name(config: dict[str, Any], fp8_name: str) -> Optional[str]:
    """The engine's own method for what is not NVFP4 in a checkpoint that has NVFP4, or None where it has none. fp8_name: the
    engine's for DeepSeek-V4 in blocks of FP8."""
    facts = _facts(config)
    method = str(config.get('quant_method') or '').lower()
    if method.startswith('modelopt') or 'quantization' in config:
        if _algorithm(facts) == 'MIXED_PRECISION':
            layers = (facts.get('quantized_layers') or {}).values()
            return 'modelopt_mixed' if any(_algorithm(layer) in _ALGORITHMS for layer in layers) else None
        return 'modelopt_fp4' if _algorithm(facts) in _ALGORITHMS else None
    # DeepSeek-V4 as NVIDIA publishes it: FP8 blocks, and experts in NVFP4.
    return fp8_name if method == 'fp8' and str(facts.get('moe_quant_algo') or '').upper() == 'NVFP4' else None


class Nvfp4Layers:
    """Of an engine's config: which layers are NVFP4. The engine's base class has packed_modules_mapping, layers of the
    checkpoint by the name of the one that they are fused into; `rest` is the engine's own config for what is not NVFP4, and
    answers for what models ask a config of that kind (weight_block_size and the like)."""
    packed_modules_mapping: dict[str, list[str]]

    def __getattr__(self, name: str) -> Any:
        # Not before there is a rest, as while copying, and nothing of Python's own protocols.
        if name.startswith('__') or 'rest' not in self.__dict__:
            raise AttributeError(f'{type(self).__name__} has no attribute {name!r}')
        return getattr(self.rest, name)

    # What both engines ask any config; vLLM some of it of an instance.
    @classmethod
    def get_name(cls) -> str:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ['hf_quant_config.json']

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> 'Nvfp4Layers':
        return cls(config)  # an engine's

    def read_layers(self, config: dict[str, Any], rest: Optional[str]) -> None:
        facts = _facts(config)
        if rest is None:
            raise Unsupported(f'quantization_config: expected NVFP4 of ModelOpt, found quant_method '
                              f'{config.get("quant_method")!r}, quant_algo {facts.get("quant_algo")!r}')
        group = facts.get('group_size') or GROUP
        if group != GROUP:
            raise Unsupported(f'group_size: expected {GROUP}, found {group}')
        self.experts_only = not rest.startswith('modelopt')
        self.quantized_layers: Optional[dict[str, Any]] = None
        if rest == 'modelopt_mixed':
            self.quantized_layers = dict(facts['quantized_layers'])
        self.exclude_modules: list[str] = list(facts.get('exclude_modules') or facts.get('ignore') or [])

    def rename_layers(self, mapper: Any) -> None:
        """From the checkpoint's names to the engine's."""
        self.exclude_modules = mapper.apply_list(self.exclude_modules)
        if self.quantized_layers is not None:
            self.quantized_layers = mapper.apply_dict(self.quantized_layers)

    def is_nvfp4(self, prefix: str, is_experts: bool) -> bool:
        if self.experts_only:
            return is_experts
        base, _, name = prefix.rpartition('.')
        parts = [f'{base}.{part}' for part in self.packed_modules_mapping.get(name, [name])]
        # Whole parts of a name, or a pattern: "model.layers.1" is not in "model.layers.10".
        if any(f'.{part}.' in f'.{p}.' or fnmatch.fnmatch(p, part) for part in self.exclude_modules for p in (prefix, *parts)):
            return False
        if self.quantized_layers is None:
            return True
        found = {_algorithm(info) for name, info in self.quantized_layers.items()
                 if name in (prefix, *parts) or (is_experts and name.startswith(f'{prefix}.'))}
        if len(found & set(_ALGORITHMS)) and len(found) > 1 and not found <= set(_ALGORITHMS):
            raise Unsupported(f'{prefix}: expected one quant_algo in a fused layer, found {", ".join(sorted(found))}')
        return bool(found & set(_ALGORITHMS))


class _Parameters:
    """The engine's classes of parameters: of matrices that ranks cut, and of numbers."""
    matrix: Any
    number: Any

    def add(self, layer: torch.nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype, loader: Any,
            dims: Optional[tuple[int, int]] = None) -> torch.nn.Parameter:
        """dims: of input and output, for what ranks cut."""
        data = torch.zeros(shape, dtype=dtype)
        made = (self.number(data=data, weight_loader=loader) if dims is None else
                self.matrix(data=data, input_dim=dims[0], output_dim=dims[1], weight_loader=loader))
        layer.register_parameter(name, made)
        return made


def _check_width(name: str, width: int) -> None:
    if width % GROUP:
        raise InvalidArgument(f'{name}: expected a multiple of {GROUP}, found {width}')


class Nvfp4Linear(_Parameters):
    """Of an engine's linear method: an NVFP4 linear map, or several that the engine has fused, each with its own tensor scale."""

    def create_weights(self, layer: torch.nn.Module, input_size_per_partition: int, output_partition_sizes: list[int],
                       input_size: int, output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any) -> None:
        _check_width('input_size_per_partition', input_size_per_partition)
        loader, rows = extra_weight_attrs.get('weight_loader'), sum(output_partition_sizes)
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition, layer.output_size_per_partition = input_size_per_partition, rows
        self.add(layer, 'weight', (rows, input_size_per_partition // 2), torch.uint8, loader, (1, 0))
        self.add(layer, 'weight_scale', (rows, input_size_per_partition // GROUP), torch.float8_e4m3fn, loader, (1, 0))
        for name in ('weight_scale_2', 'input_scale'):  # the second: a static range of activations, which is not used
            self.add(layer, name, (len(output_partition_sizes),), torch.float32, loader)

    def process_weights_after_loading(self, layer: Any) -> None:
        codes, scales = layer.weight.data.split(layer.logical_widths), layer.weight_scale.data.split(layer.logical_widths)
        layer.tessera_linears = torch.nn.ModuleList(
            tessera_torch.Linear(tessera_torch.plain(c), tessera_torch.plain(s), g, max_tokens=_MAX_TOKENS)
            for c, s, g in zip(codes, scales, layer.weight_scale_2.tolist()))
        del layer.weight, layer.weight_scale, layer.weight_scale_2, layer.input_scale

    def apply(self, layer: Any, x: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
        parts = [linear(x) for linear in layer.tessera_linears]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return y if bias is None else y + bias


class Nvfp4Experts(_Parameters):
    """Of an engine's method for experts: those of this rank, their weights cut as the engine cuts them."""

    def add_experts(self, layer: torch.nn.Module, num_experts: int, hidden_size: int, inner: int, loader: Any,
                    num_input_scales: int) -> dict[str, torch.nn.Parameter]:
        """w13 (gate above up) and w2, by the ends of their names what each kind of scale is: weight_scale of blocks, weight_scale_2
        of matrices, input_scale, which is not used. num_input_scales: of this rank's experts, or of all."""
        _check_width('hidden_size', hidden_size)
        _check_width('intermediate_size_per_partition', inner)
        made = {}
        for name, rows, cols, more in (('w13', 2 * inner, hidden_size, (2,)), ('w2', hidden_size, inner, ())):
            for end, shape, dtype, dims in (
                ('weight', (num_experts, rows, cols // 2), torch.uint8, (1, 2)),
                ('weight_scale', (num_experts, rows, cols // GROUP), torch.float8_e4m3fn, (1, 2)),
                ('weight_scale_2', (num_experts, *more), torch.float32, None),
                ('input_scale', (num_input_scales, *more), torch.float32, None),
            ):
                made[f'{name}_{end}'] = self.add(layer, f'{name}_{end}', shape, dtype, loader, dims)
        return made

    def pack_experts(self, layer: Any, top_k: int, swiglu_limit: Optional[float]) -> None:
        """layer.tessera_experts in place of the parameters."""
        inner = layer.w13_weight.shape[1] // 2

        def half(rows: slice, column: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return (tessera_torch.plain(layer.w13_weight.data[:, rows]), tessera_torch.plain(layer.w13_weight_scale.data[:, rows]),
                    layer.w13_weight_scale_2.data[:, column])

        down = layer.w2_weight.data, layer.w2_weight_scale.data, layer.w2_weight_scale_2.data
        layer.tessera_experts = tessera_torch.Experts(half(slice(0, inner), 0), half(slice(inner, None), 1), down, top_k=top_k,
                                                      swiglu_limit=float(swiglu_limit or 0), max_tokens=_MAX_TOKENS)
        for name in ('w13', 'w2'):
            for end in ('weight', 'weight_scale', 'weight_scale_2', 'input_scale'):
                delattr(layer, f'{name}_{end}')
