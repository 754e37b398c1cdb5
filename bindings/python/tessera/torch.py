# SPDX-License-Identifier: Apache-2.0
"""The kernels as operators of PyTorch (torch.library), for torch.compile and CUDA graphs. Importing it needs torch.

    linear = tessera.torch.Linear(codes, scales, tensor_scale)      # an nn.Module with NVFP4 weights
    y = torch.compile(linear, fullgraph=True)(x)

Weights belong to a handle, made once (kernels pack them and take scratch memory); the operators take its number:

    tessera::linear(x, handle, num_outputs) -> y             [tokens, in] to [tokens, out]
    tessera::experts(x, experts, routing, handle) -> out     [tokens, hidden], [tokens, top_k] to [tokens, hidden]
    tessera::attention(q, positions, window_cache, sink, handle, entry_cache, num_entries, selected) -> out
    tessera::attention_store(rows, slots, cache, handle)     writes into the cache
    tessera::quantize_nvfp4(x, rule) -> codes, scales, globals

On a GPU the kernels have one stream per device, tied to PyTorch's current stream by events: a call's work begins after what
that stream held and ends before what it gets next, in a CUDA graph too. A handle is made at the first call on a device,
which waits and allocates: make one call before a graph is captured. tessera.mega_moe has the fused mixture in the shape of
the public mega-MoE interface. Replays and other calls with one handle share its scratch memory: keep them in the order of one
stream, or of events. Tested on the CPU alone; tests/bindings/python/torch_test.py is what a GPU has to show."""
import contextlib
import itertools
import weakref
from typing import Any, Callable, Hashable, Iterator, Optional, Sequence, Union

import torch

from . import ops
from ._errors import InvalidArgument

# By device: the context, and its stream on a GPU.
_contexts: dict[str, tuple[ops.Context, Optional[torch.cuda.Stream]]] = {}
# An op goes with the module that made it.
_handles: 'weakref.WeakValueDictionary[int, Handle]' = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def _place(device: torch.device) -> tuple[ops.Context, Optional[torch.cuda.Stream]]:
    if device.type not in ('cpu', 'cuda'):
        raise InvalidArgument(f'device: expected cpu or cuda, found {device}')
    is_gpu = device.type == 'cuda'
    index = torch.cuda.current_device() if is_gpu and device.index is None else device.index
    name = f'cuda:{index}' if is_gpu else 'cpu'
    if name not in _contexts:
        stream = torch.cuda.Stream(index) if is_gpu else None
        _contexts[name] = ops.Context(name, stream.cuda_stream if stream else 0), stream
    return _contexts[name]


def context(device: Union[str, torch.device] = 'cpu') -> ops.Context:
    """The context of a device, the same one at every call. On a GPU it has a stream of its own: use it inside ordered()."""
    return _place(torch.device(device))[0]


@contextlib.contextmanager
def ordered(device: Union[str, torch.device]) -> Iterator[ops.Context]:
    """The context, whose work inside the block comes after what PyTorch's current stream of the device holds, and before
    what that stream gets afterwards."""
    found, stream = _place(torch.device(device))
    if stream is None:
        yield found
        return
    current = torch.cuda.current_stream(stream.device)
    with torch.cuda.device(stream.device):  # the kernels make their device the thread's current one
        stream.wait_stream(current)
        try:
            yield found
        finally:
            current.wait_stream(stream)


class Handle:
    """Something that make(context, *key) makes at its first use on a device with that key; operators know it by `number` for
    as long as this object lives, and give it max_tokens at a time."""

    def __init__(self, make: Callable[..., Any], max_tokens: int):
        self._make, self.max_tokens = make, max_tokens
        self._made: dict[tuple[Hashable, ...], Any] = {}
        self.number = next(_numbers)
        _handles[self.number] = self

    def at(self, context: ops.Context, *key: Hashable) -> Any:
        place = (context.device, *key)
        if place not in self._made:
            if context.device != 'cpu' and torch.cuda.is_current_stream_capturing():
                raise InvalidArgument('handle: expected a call with it before the graph is captured, found its first call '
                                      'during capture')
            self._made[place] = self._make(context, *key)
        return self._made[place]


def handle_of(number: int) -> Handle:
    """Raises InvalidArgument for the number of one that is gone."""
    handle = _handles.get(number)
    if handle is None:
        raise InvalidArgument(f'handle: expected one whose module lives, found {number}')
    return handle


def plain(x: torch.Tensor) -> torch.Tensor:
    """As the kernels take it."""
    return x.detach().contiguous()


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[Optional[int]]) -> None:
    """None stands for any size."""
    if tensor.dim() != len(shape) or any(s is not None and s != f for s, f in zip(shape, tensor.shape)):
        expected = ', '.join('any' if size is None else str(size) for size in shape)
        raise InvalidArgument(f'{name}: expected shape [{expected}], found {list(tensor.shape)}')


def routed(moe: ops.Moe, max_tokens: int, x: torch.Tensor, experts: torch.Tensor, routing: torch.Tensor,
           out: torch.Tensor) -> None:
    """out [tokens, hidden] = the sum over a token's experts, in ascending id whatever their order."""
    check_shape('x', x, (None, None))
    check_shape('experts', experts, (x.shape[0], None))
    check_shape('routing', routing, experts.shape)
    if experts.is_floating_point() or experts.is_complex() or experts.dtype == torch.bool:
        raise InvalidArgument(f'experts: expected integers, found {experts.dtype}')
    # An id that no expert has, as Transformers uses for "skip", gives 0.
    ids, order = experts.to(torch.int32).sort(dim=-1)
    inputs, ids, weights = plain(x), plain(ids), plain(routing.to(torch.float32).gather(-1, order))
    slots = x.new_empty((min(max_tokens, x.shape[0]), *experts.shape[1:], x.shape[1]))
    with ordered(x.device):
        for i in range(0, x.shape[0], max_tokens):
            chunk = slice(i, i + max_tokens)
            part = slots[:inputs[chunk].shape[0]]
            moe.experts(inputs[chunk], ids[chunk], weights[chunk], part)
            moe.combine(part, out[chunk])


@torch.library.custom_op('tessera::linear', mutates_args=())
def linear(x: torch.Tensor, handle: int, num_outputs: int) -> torch.Tensor:
    check_shape('x', x, (None, None))
    out = x.new_empty((x.shape[0], num_outputs))
    inputs, found = plain(x), handle_of(handle)
    with ordered(x.device) as c:
        op = found.at(c)
        for i in range(0, x.shape[0], found.max_tokens):
            op(inputs[i:i + found.max_tokens], out[i:i + found.max_tokens])
    return out


@linear.register_fake
def _(x: torch.Tensor, handle: int, num_outputs: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], num_outputs))


@torch.library.custom_op('tessera::experts', mutates_args=())
def experts(x: torch.Tensor, experts: torch.Tensor, routing: torch.Tensor, handle: int) -> torch.Tensor:
    found = handle_of(handle)
    with ordered(x.device) as c:
        moe = found.at(c)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    routed(moe, found.max_tokens, x, experts, routing, out)
    return out


@experts.register_fake
def _(x: torch.Tensor, experts: torch.Tensor, routing: torch.Tensor, handle: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op('tessera::attention', mutates_args=())
def attention(q: torch.Tensor, positions: torch.Tensor, window_cache: torch.Tensor, sink: torch.Tensor, handle: int,
              entry_cache: Optional[torch.Tensor] = None, num_entries: Optional[torch.Tensor] = None,
              selected: Optional[torch.Tensor] = None) -> torch.Tensor:
    if entry_cache is None and num_entries is not None:
        raise InvalidArgument('entry_cache: expected a tensor beside num_entries, found None')
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    inputs = [None if t is None else plain(t) for t in (q, positions, window_cache, sink, entry_cache, num_entries, selected)]
    with ordered(q.device) as c:
        handle_of(handle).at(c)(*inputs, out)
    return out


@attention.register_fake
def _(q: torch.Tensor, positions: torch.Tensor, window_cache: torch.Tensor, sink: torch.Tensor, handle: int,
      entry_cache: Optional[torch.Tensor] = None, num_entries: Optional[torch.Tensor] = None,
      selected: Optional[torch.Tensor] = None) -> torch.Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op('tessera::attention_store', mutates_args=('cache',))
def attention_store(rows: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, handle: int) -> None:
    inputs = plain(rows), plain(slots)
    with ordered(rows.device) as c:
        handle_of(handle).at(c).store(*inputs, cache)


@attention_store.register_fake
def _(rows: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, handle: int) -> None:
    return None


@torch.library.custom_op('tessera::quantize_nvfp4', mutates_args=())
def quantize_nvfp4(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_shape('x', x, (None, None))
    out = _quantized(x, rule)
    inputs = plain(x)
    with ordered(x.device) as c:
        c.quantize_nvfp4(inputs, rule, out)
    return out


def _quantized(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, cols = x.shape
    globals_ = x.new_empty((rows if rule == 'rows' else 1,), dtype=torch.float32)
    return x.new_empty((rows, cols // 2), dtype=torch.uint8), x.new_empty((rows, cols // 16), dtype=torch.uint8), globals_


quantize_nvfp4.register_fake(_quantized)


class Linear(torch.nn.Module):
    """y = W x with an NVFP4 weight: codes uint8 [out, in/2], block_scales uint8 or float8_e4m3fn [out, in/16], tensor_scale.
    x bfloat16 [..., in] (float32 with input="f32"), max_tokens rows at a time (a multiple of 8). No gradients."""

    def __init__(self, codes: torch.Tensor, block_scales: torch.Tensor, tensor_scale: float, *, input: str = 'a16',
                 max_tokens: int = 256):
        super().__init__()
        self.num_outputs = codes.shape[0]
        self.register_buffer('codes', codes)
        self.register_buffer('block_scales', block_scales.view(torch.uint8))
        self._handle = Handle(lambda c: ops.Linear(ops.Weight(c, self.codes, self.block_scales, [tensor_scale]), input=input,
                                                    max_tokens=max_tokens), max_tokens)
        self.handle = self._handle.number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.tessera.linear(x.reshape(-1, x.shape[-1]), self.handle, self.num_outputs)
        return y.reshape(*x.shape[:-1], self.num_outputs)


class Experts(torch.nn.Module):
    """Routed experts with NVFP4 weights, each a tuple of codes uint8 [experts, rows, cols/2], block_scales
    [experts, rows, cols/16] and tensor scales float32 [experts] or one number. x [tokens, hidden], experts [tokens, top_k] of
    any integer, in any order (an id that no expert has gives 0), routing [tokens, top_k]; returns their sum
    [tokens, hidden]. Runs max_tokens at a time (a multiple of 8), which changes no bit."""

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

        self._handle = Handle(make, max_tokens)
        self.handle = self._handle.number

    def forward(self, x: torch.Tensor, experts: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        return torch.ops.tessera.experts(x, experts, routing, self.handle)


class Attention(torch.nn.Module):
    """A step of DeepSeek-V4's attention for tokens of one sequence; heads, head_dim, window, rope_dim, scale, cache and
    max_tokens as those of tessera.ops.Attention. Write the tokens' rows with store() before the step."""

    def __init__(self, *, heads: int, head_dim: int, window: int, rope_dim: int = 0, scale: Optional[float] = None,
                 cache: str = 'bf16', max_tokens: int = 256):
        super().__init__()
        self._handle = Handle(lambda c: ops.Attention(c, heads=heads, head_dim=head_dim, window=window, rope_dim=rope_dim,
                                                      scale=scale, cache=cache, max_tokens=max_tokens), max_tokens)
        self.handle = self._handle.number

    def new_cache(self, slots: int, device: Union[str, torch.device] = 'cpu') -> torch.Tensor:
        """uint8 [slots, bytes of an entry], zero."""
        with ordered(device) as c:
            entry_bytes = self._handle.at(c).entry_bytes
        return torch.zeros((slots, entry_bytes), dtype=torch.uint8, device=device)

    def store(self, rows: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
        """Encodes rows [num_rows, head_dim] into entries slots int64 [num_rows] of the cache; -1 leaves a row out."""
        torch.ops.tessera.attention_store(rows, slots, cache, self.handle)

    def forward(self, q: torch.Tensor, positions: torch.Tensor, window_cache: torch.Tensor, sink: torch.Tensor,
                entry_cache: Optional[torch.Tensor] = None, num_entries: Optional[torch.Tensor] = None,
                selected: Optional[torch.Tensor] = None) -> torch.Tensor:
        """q [tokens, heads, head_dim], positions int64 [tokens], window_cache a ring (position p is entry p mod slots), sink
        float32 [heads]; entry_cache, num_entries int32 [tokens], selected int32 [tokens, n]: compressed entries. Returns
        [tokens, heads, head_dim]."""
        return torch.ops.tessera.attention(q, positions, window_cache, sink, self.handle, entry_cache, num_entries, selected)
