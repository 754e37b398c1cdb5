# SPDX-License-Identifier: Apache-2.0
"""The kernels as operators of PyTorch (torch.library), for torch.compile and CUDA graphs. Importing it needs torch.

    linear = tessera.torch.Linear(codes, scales, tensor_scale)      # an nn.Module with NVFP4 weights
    y = torch.compile(linear, fullgraph=True)(x)

Weights belong to a handle, made once (kernels pack them and take scratch memory); the operators take its number:

    tessera::linear(x, handle, num_outputs) -> y             [tokens, in] to [tokens, out]
    tessera::experts(x, experts, routing, handle) -> out     [tokens, hidden], [tokens, top_k] to [tokens, hidden]
    tessera::quantize_nvfp4(x, rule) -> codes, scales, globals

Each call's work is queued on PyTorch's current stream of the tensors' device. A handle belongs to the stream on which its first
call was made and is made again, weights packed anew, for another: make a call on the stream that will capture before a CUDA
graph is captured there. Tested on the CPU; no GPU has run it."""
import itertools
import weakref
from typing import Any, Callable, Union

import torch

from . import ops

_contexts: dict[tuple[str, int], ops.Context] = {}
# An op goes with the module that made it.
_handles: 'weakref.WeakValueDictionary[int, _Handle]' = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def _place(device: torch.device) -> tuple[str, int]:
    """The context's device and stream; PyTorch's stream 0 is the legacy default stream."""
    if device.type == 'cpu':
        return 'cpu', 0
    if device.type != 'cuda':
        raise ValueError(f'device: expected cpu or cuda, found {device}')
    index = torch.cuda.current_device() if device.index is None else device.index
    return f'cuda:{index}', torch.cuda.current_stream(index).cuda_stream or 1


def context(device: Union[str, torch.device] = 'cpu') -> ops.Context:
    """The context of a device and PyTorch's current stream there; the same one at every call."""
    place = _place(torch.device(device))
    if place not in _contexts:
        _contexts[place] = ops.Context(*place)
    return _contexts[place]


class _Handle:
    """An op by place, made at its first call there."""

    def __init__(self, make: Callable[[ops.Context], Any]):
        self._make = make
        self._made: dict[tuple[str, int], Any] = {}
        self.number = next(_numbers)
        _handles[self.number] = self

    def at(self, device: torch.device) -> Any:
        place = _place(device)
        if place not in self._made:
            self._made[place] = self._make(context(device))
        return self._made[place]


def _handle(number: int) -> _Handle:
    handle = _handles.get(number)
    if handle is None:
        raise ValueError(f'handle: expected one whose module lives, found {number}')
    return handle


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous()


@torch.library.custom_op('tessera::linear', mutates_args=())
def linear(x: torch.Tensor, handle: int, num_outputs: int) -> torch.Tensor:
    out = x.new_empty((x.shape[0], num_outputs))
    _handle(handle).at(x.device)(_plain(x), out)
    return out


@linear.register_fake
def _(x: torch.Tensor, handle: int, num_outputs: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], num_outputs))


@torch.library.custom_op('tessera::experts', mutates_args=())
def experts(x: torch.Tensor, experts: torch.Tensor, routing: torch.Tensor, handle: int) -> torch.Tensor:
    moe = _handle(handle).at(x.device)
    # The kernels want ascending ids. An id that no expert has, as Transformers uses for "skip", gives 0.
    ids, order = experts.to(torch.int32).sort(dim=-1)
    weights = routing.to(torch.float32).gather(-1, order)
    slots = x.new_empty((*experts.shape, x.shape[1]))
    moe.experts(_plain(x), _plain(ids), _plain(weights), slots)
    return slots.to(torch.float32).sum(dim=1).to(x.dtype)


@experts.register_fake
def _(x: torch.Tensor, experts: torch.Tensor, routing: torch.Tensor, handle: int) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op('tessera::quantize_nvfp4', mutates_args=())
def quantize_nvfp4(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return context(x.device).quantize_nvfp4(_plain(x), rule)


@quantize_nvfp4.register_fake
def _(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, cols = x.shape
    globals_ = x.new_empty((rows if rule == 'rows' else 1,), dtype=torch.float32)
    return x.new_empty((rows, cols // 2), dtype=torch.uint8), x.new_empty((rows, cols // 16), dtype=torch.uint8), globals_


class Linear(torch.nn.Module):
    """y = W x with an NVFP4 weight: codes uint8 [out, in/2], block_scales uint8 or float8_e4m3fn [out, in/16], tensor_scale.
    x bfloat16 [..., in] (float32 with input="f32"). No gradients. At most max_tokens rows a call."""

    def __init__(self, codes: torch.Tensor, block_scales: torch.Tensor, tensor_scale: float, *, input: str = 'a16',
                 max_tokens: int = 256):
        super().__init__()
        self.num_outputs = codes.shape[0]
        self.register_buffer('codes', codes)
        self.register_buffer('block_scales', block_scales.view(torch.uint8))
        self._handle = _Handle(lambda c: ops.Linear(ops.Weight(c, self.codes, self.block_scales, [tensor_scale]), input=input,
                                                    max_tokens=max_tokens))
        self.handle = self._handle.number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.tessera.linear(x.reshape(-1, x.shape[-1]), self.handle, self.num_outputs)
        return y.reshape(*x.shape[:-1], self.num_outputs)


class Experts(torch.nn.Module):
    """Routed experts with NVFP4 weights, each a tuple of codes uint8 [experts, rows, cols/2], block_scales
    [experts, rows, cols/16] and tensor scales float32 [experts] or one number. x [tokens, hidden], experts [tokens, top_k] of
    any integer, in any order (an id that no expert has gives 0), routing [tokens, top_k]; returns their sum
    [tokens, hidden]. The shape of a fused mixture: routing stays the caller's."""

    def __init__(self, w1: tuple[Any, ...], w3: tuple[Any, ...], w2: tuple[Any, ...], *, top_k: int,
                 swiglu_limit: float = 0.0, input: str = 'a16', max_tokens: int = 256):
        super().__init__()
        scales = []
        for name, (codes, block_scales, tensor_scales) in (('w1', w1), ('w3', w3), ('w2', w2)):
            self.register_buffer(f'{name}_codes', codes)
            self.register_buffer(f'{name}_scales', block_scales.view(torch.uint8))
            scales.append(torch.as_tensor(tensor_scales, dtype=torch.float32).reshape(-1).tolist())

        def make(c: ops.Context) -> ops.Moe:
            weights = [ops.Weight(c, getattr(self, f'{name}_codes'), getattr(self, f'{name}_scales'), tensor_scales)
                       for name, tensor_scales in zip(('w1', 'w3', 'w2'), scales)]
            # One more than there are, so that the id that says "skip" is one of an expert that is not here.
            return ops.Moe(*weights, top_k=top_k, num_experts=weights[0].shape[0] + 1, swiglu_limit=swiglu_limit, input=input,
                           max_tokens=max_tokens)

        self._handle = _Handle(make)
        self.handle = self._handle.number

    def forward(self, x: torch.Tensor, experts: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        return torch.ops.tessera.experts(x, experts, routing, self.handle)
