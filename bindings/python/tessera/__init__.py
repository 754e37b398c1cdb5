# SPDX-License-Identifier: Apache-2.0
"""Tessera: native NVFP4 inference for DeepSeek-V4.

    import tessera
    model = tessera.Model()                            # the bundled tiny model; tessera.Model("DIR", "cuda:0")
    print(model.generate("Compute 257-7.").text)
    for delta in model.stream("Spell mire."):
        print(delta.text, end="")

tessera.ops has the kernels for arrays of NumPy, PyTorch or any library with DLPack; tessera.torch has them as operators of
PyTorch. docs/python.md is the guide."""
from ._errors import (DataLoss, DeviceError, Error, InvalidArgument, NotFinite, NotFound, OutOfMemory, Unsupported)
from ._model import Completion, Delta, Model, Score, Stream, ToolCall
from ._program import bundled_model, devices
from ._tessera import __version__
from ._tools import check, convert

__all__ = [
    'Completion', 'DataLoss', 'Delta', 'DeviceError', 'Error', 'InvalidArgument', 'Model', 'NotFinite', 'NotFound',
    'OutOfMemory', 'Score', 'Stream', 'ToolCall', 'Unsupported', '__version__', 'bundled_model', 'check', 'convert', 'devices',
]
