# SPDX-License-Identifier: Apache-2.0
"""Tensors of a checkpoint's folder as PyTorch's (docs/formats/checkpoints.md says which formats there are). Importing it needs
torch and safetensors."""
import json
import os
import pathlib
from typing import Any, Optional, Union

import torch
from safetensors import SafetensorError, safe_open

from . import _tessera
from . import torch as tessera_torch
from ._errors import DataLoss, NotFound, Unsupported

NVFP4_GROUP, FP8_BLOCK = 16, 128


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Raises DataLoss for what is no JSON object."""
    try:
        found = json.loads(path.read_text(encoding='utf-8'))
    except (ValueError, RecursionError) as error:
        raise DataLoss(f'{path}: expected a JSON object, found {first_line(error)}') from None
    if not isinstance(found, dict):
        raise DataLoss(f'{path}: expected a JSON object, found {type(found).__name__}')
    return found


def _check_scales(path: str, scales: torch.Tensor, expected: tuple[int, ...], codes: torch.Tensor) -> None:
    if tuple(scales.shape) != expected:
        raise DataLoss(f'{path}: expected scales {list(expected)} for a weight stored as {list(codes.shape)}, '
                       f'found {list(scales.shape)}')


def _fp8_values(path: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if codes.dim() != 2:
        raise DataLoss(f'{path}: expected a matrix, found shape {list(codes.shape)}')
    rows, cols = codes.shape
    _check_scales(path, scales, (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK)), codes)
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
            files = sorted(self._indexed(index))
        else:
            files = sorted(self.directory.glob('*.safetensors'))
        if not files:
            raise NotFound(f'{self.directory}: expected *.safetensors, found none')
        self._files: dict[str, Any] = {}
        for file in files:
            if not file.exists():
                raise NotFound(f'{file}: expected by {index.name}, found no such file')
            try:
                opened = safe_open(str(file), framework='pt')
                names = list(opened.keys())
            except (SafetensorError, OSError, ValueError) as error:
                raise DataLoss(f'{file}: expected a safetensors file, found {first_line(error)}') from None
            for name in names:
                if name in self._files:
                    raise DataLoss(f'{file}: expected each tensor in one file, found {name!r} in another one too')
                self._files[name] = opened
        # A linear map's name lacks what its tensors end in.
        self._names = {}
        for name in self._files:
            self._names[_tessera.hf_name(name) or name] = name
            for end in ('.weight', '.weight_packed'):
                if name.endswith(end):
                    path = name[:-len(end)]
                    self._names[_tessera.hf_name(path) or path] = path

    def _indexed(self, index: pathlib.Path) -> set[pathlib.Path]:
        """Its files, all in the folder."""
        names = read_object(index).get('weight_map')
        if not isinstance(names, dict):
            raise DataLoss(f'{index}: expected weight_map, an object, found {type(names).__name__}')
        for name, file in names.items():
            if not isinstance(file, str) or not file.endswith('.safetensors') or pathlib.PurePath(file).name != file:
                raise DataLoss(f"{index}: expected weight_map[{name!r}] to be a *.safetensors of this folder, found {file!r}")
        return {self.directory / file for file in names.values()}

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
        if codes.dim() != 2:
            raise DataLoss(f'{path}: expected a matrix, found shape {list(codes.shape)}')
        _check_scales(f'{path}.weight_scale', scales, (codes.shape[0], 2 * codes.shape[1] // NVFP4_GROUP), codes)
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
            codes, scales, scale = found  # copied, since a file's need not be aligned
            return tessera_torch.context().dequantize_nvfp4(codes.clone(), scales.clone(), torch.tensor([scale]))
        path = self._path(name)
        weight = self._first((f'{path}.weight',))
        scales = self._first((f'{path}.scale', f'{path}.weight_scale_inv', f'{path}.weight_scale'))
        if weight is not None and weight.dtype == torch.float8_e4m3fn and scales is not None:
            return _fp8_values(path, weight, scales)
        if weight is None or scales is not None or not weight.is_floating_point() or weight.element_size() < 2:
            found_dtype = 'no weight' if weight is None else str(weight.dtype)
            raise Unsupported(f'{path}: expected NVFP4, FP8 blocks, BF16 or F32, found {found_dtype}; '
                              '`tessera convert` makes NVFP4 of MXFP4')
        return weight

    def tensor(self, name: str) -> torch.Tensor:
        """Of a parameter or buffer of Hugging Face's name."""
        linear = name.removesuffix('.weight')
        return self.dense(linear) if linear != name and linear in self else self._tensor(self._path(name))
