# SPDX-License-Identifier: Apache-2.0
"""Tensors of a checkpoint's folder as PyTorch's (docs/formats/checkpoints.md says which formats there are). Importing it needs
torch and safetensors."""
import json
import os
import pathlib
from typing import Any, Optional, Union

import torch
from safetensors import safe_open

from . import _tessera
from ._errors import DataLoss, NotFound, Unsupported

NVFP4_GROUP, FP8_BLOCK = 16, 128
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def nvfp4_values(codes: torch.Tensor, scales: torch.Tensor, tensor_scale: float) -> torch.Tensor:
    """float32 [rows, cols] of codes uint8 [rows, cols/2] and scales uint8 or float8_e4m3fn [rows, cols/16]."""
    table = torch.tensor(_E2M1, device=codes.device)
    values = table[torch.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1).long()]
    factors = scales.view(torch.float8_e4m3fn).float()
    return (values.view(*factors.shape, NVFP4_GROUP) * factors.unsqueeze(-1) * tensor_scale).view(values.shape)


def _fp8_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, cols = codes.shape
    if scales.dtype == torch.float8_e8m0fnu:
        scales = torch.exp2(scales.view(torch.uint8).float() - 127)
    factors = scales.float().repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :cols]
    return codes.float() * factors


class Checkpoint:
    """Tensors by the names that Hugging Face's classes have, whichever a checkpoint has. Raises NotFound for a folder without
    tensors."""

    def __init__(self, directory: Union[str, 'os.PathLike[str]']):
        self.directory = pathlib.Path(directory)
        index = self.directory / 'model.safetensors.index.json'
        if index.exists():
            files = sorted({self.directory / file for file in json.loads(index.read_text())['weight_map'].values()})
        else:
            files = sorted(self.directory.glob('*.safetensors'))
        if not files:
            raise NotFound(f'{self.directory}: expected *.safetensors, found none')
        self._files: dict[str, Any] = {}
        for file in files:
            if not file.exists():
                raise NotFound(f'{file}: expected by {index.name}, found no such file')
            opened = safe_open(str(file), framework='pt')
            self._files.update(dict.fromkeys(opened.keys(), opened))
        # A linear map's name lacks what its tensors end in.
        self._names = {}
        for name in self._files:
            self._names[_tessera.hf_name(name) or name] = name
            for end in ('.weight', '.weight_packed'):
                if name.endswith(end):
                    path = name[:-len(end)]
                    self._names[_tessera.hf_name(path) or path] = path

    def _tensor(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)

    def _first(self, names: tuple[str, ...]) -> Optional[torch.Tensor]:
        return next((self._tensor(name) for name in names if name in self._files), None)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def _path(self, name: str) -> str:
        if name not in self:
            raise NotFound(f'{self.directory}: expected a tensor for {name}, found none')
        return self._names[name]

    def nvfp4(self, name: str) -> Optional[tuple[torch.Tensor, torch.Tensor, float]]:
        """A linear map's codes uint8 [rows, cols/2], scales float8_e4m3fn [rows, cols/16] and tensor scale, or None where it
        has another format."""
        path = self._path(name)
        codes = self._first((f'{path}.weight_packed', f'{path}.weight'))
        scales = self._first((f'{path}.weight_scale',))
        if codes is None or scales is None or codes.dtype != torch.uint8 or scales.dtype != torch.float8_e4m3fn:
            return None
        factor, divisor = self._first((f'{path}.weight_scale_2',)), self._first((f'{path}.weight_global_scale',))
        if (factor is None) == (divisor is None):
            raise DataLoss(f'{path}: expected one of weight_scale_2 and weight_global_scale, found '
                           + ('neither' if factor is None else 'both'))
        scale = factor if factor is not None else 1 / divisor  # type: ignore[operator]
        if scale.numel() != 1:
            raise DataLoss(f'{path}: expected one tensor scale, found {list(scale.shape)}')
        return codes, scales, float(scale)

    def dense(self, name: str) -> torch.Tensor:
        """A linear map's values: float32 where they were quantised, else as they are."""
        found = self.nvfp4(name)
        if found is not None:
            return nvfp4_values(*found)
        path = self._path(name)
        weight = self._first((f'{path}.weight',))
        scales = self._first((f'{path}.scale', f'{path}.weight_scale_inv', f'{path}.weight_scale'))
        if weight is not None and weight.dtype == torch.float8_e4m3fn and scales is not None:
            return _fp8_values(weight, scales)
        if weight is None or scales is not None or not weight.is_floating_point() or weight.element_size() < 2:
            found_dtype = 'no weight' if weight is None else str(weight.dtype)
            raise Unsupported(f'{path}: expected NVFP4, FP8 blocks, BF16 or F32, found {found_dtype}; '
                              '`tessera convert` makes NVFP4 of MXFP4')
        return weight

    def tensor(self, name: str) -> torch.Tensor:
        """Of a parameter or buffer of Hugging Face's name."""
        linear = name.removesuffix('.weight')
        return self.dense(linear) if linear != name and linear in self else self._tensor(self._path(name))
