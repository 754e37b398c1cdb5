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

What a handle made of a module's weights is made anew where their tensors change (load_state_dict, an assignment, a write in
place): a graph captured before must then be captured again. A write that PyTorch does not count (through .data, or into an
inference tensor) is not noticed: call module.repack() after it. Copies of a module, and pickled ones, have handles of their own.

On a GPU the kernels have one stream per device, tied to PyTorch's current stream by events: a call's work begins after what
that stream held and ends before what it gets next, in a CUDA graph too. A handle is made at the first call on a device,
which waits and allocates: make one call before a graph is captured. tessera.mega_moe has the fused mixture in the shape of
the public mega-MoE interface. Replays and other calls with one handle share its scratch memory: keep them in the order of one
stream, or of events. docs/python.md says what was tested where."""
import contextlib
import itertools
import threading
import weakref
from typing import Any, Callable, Hashable, Iterable, Iterator, Optional, Sequence, Union

import torch

from . import ops
from ._errors import InvalidArgument, Unsupported

# By device: the context, and its stream on a GPU.
_contexts: dict[str, tuple[ops.Context, Optional[torch.cuda.Stream]]] = {}
_contexts_lock = threading.Lock()
# An op goes with the module that made it.
_handles: 'weakref.WeakValueDictionary[int, Handle]' = weakref.WeakValueDictionary()
_RULES = ('rows', 'tensor', 'four-over-six')  # of Context.quantize_nvfp4
_numbers = itertools.count(2)  # TorchDynamo takes 0 and 1 for constants whatever is said of them
# And a module's integers, unless it is told of them: it would compile a module's code anew for each handle and stop at the
# eighth. This says it of our attribute alone.
_DYNAMIC = r'.*\.tessera_handle$'
_dynamic_sources = getattr(torch.compiler.config, 'dynamic_sources', _DYNAMIC)  # torch before 2.8 has no such setting
if _DYNAMIC not in _dynamic_sources:
    torch.compiler.config.dynamic_sources = ','.join(filter(None, (_dynamic_sources, _DYNAMIC)))


def _place(device: torch.device) -> tuple[ops.Context, Optional[torch.cuda.Stream]]:
    if device.type not in ('cpu', 'cuda'):
        raise InvalidArgument(f'device: expected cpu or cuda, found {device}')
    is_gpu = device.type == 'cuda'
    index = torch.cuda.current_device() if is_gpu and device.index is None else device.index
    name = f'cuda:{index}' if is_gpu else 'cpu'
    with _contexts_lock:
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
    """Something that make(context, *key) makes for `operator` at its first use on a device, and again where the key or the
    memory or version of weights() has changed: what it made before goes then, and what it made for another device where there
    are weights, which have moved. The operator knows it by `number` for as long as this object lives, and gives it max_tokens
    at a time."""

    def __init__(self, operator: str, make: Callable[..., Any], max_tokens: int, num_experts: int = 0,
                 weights: Callable[[], Iterable[torch.Tensor]] = tuple):
        self.operator, self.max_tokens, self.num_experts = operator, max_tokens, num_experts
        self._make, self._weights = make, weights
        self._made: dict[str, tuple[tuple[Hashable, ...], Any, list[torch.Tensor]]] = {}  # by device
        self._lock = threading.Lock()
        self.number = next(_numbers)
        _handles[self.number] = self

    def at(self, context: ops.Context, *key: Hashable) -> Any:
        # What was made is kept with the weights that it was made of, so another tensor has another address.
        weights = list(self._weights())
        versions = tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights)
        with self._lock:
            found = self._made.get(context.device)
            if found is None or found[0] != (*key, *versions):
                if context.device != 'cpu' and torch.cuda.is_current_stream_capturing():
                    raise InvalidArgument('handle: expected a call with it before the graph is captured, found its first call '
                                          'during capture')
                found = None
                self._made.pop(context.device, None)  # first, so that both are never there
                found = (*key, *versions), self._make(context, *key), weights
                if weights:
                    self._made.clear()
                self._made[context.device] = found
            return found[1]

    def drop(self) -> None:
        """The next call makes all anew."""
        with self._lock:
            self._made.clear()


def handle_of(number: int, operator: str) -> Handle:
    """Raises InvalidArgument for the number of one that is gone, or is another operator's."""
    handle = _handles.get(number)
    if handle is None:
        raise InvalidArgument(f'handle: expected one whose module lives, found {number}')
    if handle.operator != operator:
        raise InvalidArgument(f'handle: expected one for tessera::{operator}, found {number} for tessera::{handle.operator}')
    return handle


def plain(x: torch.Tensor) -> torch.Tensor:
    """As the kernels take it: dense, from an address that is a multiple of 16 on."""
    x = x.detach().contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[Optional[int]]) -> None:
    """None stands for any size."""
    if tensor.dim() != len(shape) or any(s is not None and s != f for s, f in zip(shape, tensor.shape)):
        expected = ', '.join('any' if size is None else str(size) for size in shape)
        raise InvalidArgument(f'{name}: expected shape [{expected}], found {list(tensor.shape)}')


def check_nvfp4(names: Sequence[str], codes: torch.Tensor, scales: torch.Tensor, dims: int) -> None:
    """Of a weight, or of a stack of them with dims 3."""
    if codes.dtype not in (torch.uint8, torch.int8):
        raise Unsupported(f'{names[0]}: expected NVFP4 codes as uint8 or int8, found {codes.dtype}')
    if scales.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise Unsupported(f'{names[1]}: expected E4M3 scales as float8_e4m3fn or uint8, found {scales.dtype}')
    check_shape(names[0], codes, (None,) * dims)
    check_shape(names[1], scales, (*codes.shape[:-1], codes.shape[-1] // 8))


def known_ids(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int64, with num_experts in place of every id that no expert has, as Transformers uses for "skip"."""
    ids = ids.to(torch.int64)
    return torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)


def routed(moe: ops.Moe, num_experts: int, max_tokens: int, x: torch.Tensor, experts: torch.Tensor, routing: torch.Tensor,
           out: torch.Tensor) -> None:
    """out [tokens, hidden] = the sum over a token's experts, in ascending id whatever their order."""
    check_shape('x', x, (None, None))
    check_shape('experts', experts, (x.shape[0], None))
    check_shape('routing', routing, experts.shape)
    if experts.is_floating_point() or experts.is_complex() or experts.dtype == torch.bool:
        raise InvalidArgument(f'experts: expected integers, found {experts.dtype}')
    ids, order = known_ids(experts, num_experts).to(torch.int32).sort(dim=-1, stable=True)
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
    inputs, found = plain(x), handle_of(handle, 'linear')
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
    found = handle_of(handle, 'experts')
    with ordered(x.device) as c:
        moe = found.at(c)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    routed(moe, found.num_experts, found.max_tokens, x, experts, routing, out)
    return out


@experts.register_fake
def _(x: torch.Tensor, experts: torch.Tensor, routing: torch.Tensor, handle: int) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op('tessera::attention', mutates_args=())
def attention(q: torch.Tensor, positions: torch.Tensor, window_cache: torch.Tensor, sink: torch.Tensor, handle: int,
              entry_cache: Optional[torch.Tensor] = None, num_entries: Optional[torch.Tensor] = None,
              selected: Optional[torch.Tensor] = None) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    inputs = [None if t is None else plain(t) for t in (q, positions, window_cache, sink, entry_cache, num_entries, selected)]
    with ordered(q.device) as c:
        handle_of(handle, 'attention').at(c)(*inputs, out)
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
        handle_of(handle, 'attention').at(c).store(*inputs, cache)


@attention_store.register_fake
def _(rows: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, handle: int) -> None:
    return None


@torch.library.custom_op('tessera::quantize_nvfp4', mutates_args=())
def quantize_nvfp4(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = _quantized(x, rule)
    inputs = plain(x)
    with ordered(x.device) as c:
        c.quantize_nvfp4(inputs, rule, out)
    return out


def _quantized(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_shape('x', x, (None, None))
    rows, cols = x.shape
    if cols < 16 or cols % 16:
        raise InvalidArgument(f'x: expected columns in multiples of 16, found {cols}')
    if rule not in _RULES:
        raise InvalidArgument(f'rule: expected rows, tensor or four-over-six, found {rule!r}')
    globals_ = x.new_empty((rows if rule == 'rows' else 1,), dtype=torch.float32)
    return x.new_empty((rows, cols // 2), dtype=torch.uint8), x.new_empty((rows, cols // 16), dtype=torch.uint8), globals_


quantize_nvfp4.register_fake(_quantized)


class _Module(torch.nn.Module):
    """Has a handle for its operator. Copies, and what is unpickled, have one of their own."""

    def _make(self, context: ops.Context) -> Any:
        raise NotImplementedError

    def _take_handle(self, operator: str, max_tokens: int, num_experts: int = 0) -> None:
        if max_tokens < 1:
            raise InvalidArgument(f'max_tokens: expected at least 1, found {max_tokens}')
        self.operator, self.max_tokens, self.num_experts = operator, max_tokens, num_experts
        self._handle = Handle(operator, self._make, max_tokens, num_experts, lambda: self.buffers(recurse=False))
        self.tessera_handle = self._handle.number

    def repack(self) -> None:
        """Drops what was made of the weights, for the next call to make anew. Needed after a write that PyTorch does not count:
        through .data, or into an inference tensor. Capture graphs again after it."""
        self._handle.drop()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ('_handle', 'tessera_handle')}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._take_handle(self.operator, self.max_tokens, self.num_experts)


class Linear(_Module):
    """y = W x with an NVFP4 weight: codes uint8 [out, in/2], block_scales uint8 or float8_e4m3fn [out, in/16], tensor_scale.
    x bfloat16 [..., in] (float32 with input="f32"), max_tokens rows at a time (a multiple of 8). No gradients."""

    def __init__(self, codes: torch.Tensor, block_scales: torch.Tensor, tensor_scale: float, *, input: str = 'a16',
                 max_tokens: int = 256):
        super().__init__()
        check_nvfp4(('codes', 'block_scales'), codes, block_scales, 2)
        self.num_outputs = codes.shape[0]
        self.register_buffer('codes', codes.view(torch.uint8))
        self.register_buffer('block_scales', block_scales.view(torch.uint8))
        self.tensor_scale, self.input = float(tensor_scale), input
        self._take_handle('linear', max_tokens)

    def _make(self, context: ops.Context) -> ops.Linear:
        weight = ops.Weight(context, plain(self.codes), plain(self.block_scales), [self.tensor_scale])
        return ops.Linear(weight, input=self.input, max_tokens=self.max_tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 0:
            raise InvalidArgument('x: expected shape [..., in], found []')
        y = torch.ops.tessera.linear(x.reshape(-1, x.shape[-1]), self.tessera_handle, self.num_outputs)
        return y.reshape(*x.shape[:-1], self.num_outputs)


class Experts(_Module):
    """Routed experts with NVFP4 weights, each a tuple of codes uint8 [experts, rows, cols/2], block_scales
    [experts, rows, cols/16] and tensor scales float32 [experts] or one number. x [tokens, hidden], experts [tokens, top_k] of
    any integer, in any order (an id that no expert has gives 0), routing [tokens, top_k]; returns their sum
    [tokens, hidden]. Runs max_tokens at a time (a multiple of 8), which changes no bit."""

    def __init__(self, w1: tuple[Any, ...], w3: tuple[Any, ...], w2: tuple[Any, ...], *, top_k: int,
                 swiglu_limit: float = 0.0, input: str = 'a16', max_tokens: int = 256):
        super().__init__()
        self.tensor_scales = []
        for name, (codes, block_scales, tensor_scales) in (('w1', w1), ('w3', w3), ('w2', w2)):
            check_nvfp4((f'{name}[0]', f'{name}[1]'), codes, block_scales, 3)
            self.register_buffer(f'{name}_codes', codes.view(torch.uint8))
            self.register_buffer(f'{name}_scales', block_scales.view(torch.uint8))
            self.tensor_scales.append(torch.as_tensor(tensor_scales, dtype=torch.float32).reshape(-1).tolist())
        self.top_k, self.swiglu_limit, self.input = top_k, swiglu_limit, input
        self._take_handle('experts', max_tokens, w1[0].shape[0])

    def _make(self, context: ops.Context) -> ops.Moe:
        weights = [ops.Weight(context, plain(getattr(self, f'{name}_codes')), plain(getattr(self, f'{name}_scales')), tensor_scales)
                   for name, tensor_scales in zip(('w1', 'w3', 'w2'), self.tensor_scales)]
        # One more than there are, so that the id that says "skip" is one of an expert that is not here.
        return ops.Moe(*weights, top_k=self.top_k, num_experts=self.num_experts + 1, swiglu_limit=self.swiglu_limit,
                       input=self.input, max_tokens=self.max_tokens)

    def forward(self, x: torch.Tensor, experts: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        return torch.ops.tessera.experts(x, experts, routing, self.tessera_handle)


class Attention(_Module):
    """A step of DeepSeek-V4's attention for tokens of one sequence; heads, head_dim, window, rope_dim, scale, cache and
    max_tokens as those of tessera.ops.Attention. Write the tokens' rows with store() before the step."""

    def __init__(self, *, heads: int, head_dim: int, window: int, rope_dim: int = 0, scale: Optional[float] = None,
                 cache: str = 'bf16', max_tokens: int = 256):
        super().__init__()
        self.options = {'heads': heads, 'head_dim': head_dim, 'window': window, 'rope_dim': rope_dim, 'scale': scale,
                        'cache': cache}
        self._take_handle('attention', max_tokens)

    def _make(self, context: ops.Context) -> ops.Attention:
        return ops.Attention(context, **self.options, max_tokens=self.max_tokens)

    def new_cache(self, slots: int, device: Union[str, torch.device] = 'cpu') -> torch.Tensor:
        """uint8 [slots, bytes of an entry], zero."""
        with ordered(device) as c:
            entry_bytes = self._handle.at(c).entry_bytes
        return torch.zeros((slots, entry_bytes), dtype=torch.uint8, device=device)

    def store(self, rows: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
        """Encodes rows [num_rows, head_dim] into entries slots int64 [num_rows] of the cache; -1 leaves a row out."""
        torch.ops.tessera.attention_store(rows, slots, cache, self.tessera_handle)

    def forward(self, q: torch.Tensor, positions: torch.Tensor, window_cache: torch.Tensor, sink: torch.Tensor,
                entry_cache: Optional[torch.Tensor] = None, num_entries: Optional[torch.Tensor] = None,
                selected: Optional[torch.Tensor] = None) -> torch.Tensor:
        """q [tokens, heads, head_dim], positions int64 [tokens], window_cache a ring (position p is entry p mod slots), sink
        float32 [heads]; entry_cache, num_entries int32 [tokens], selected int32 [tokens, n]: compressed entries. Returns
        [tokens, heads, head_dim]."""
        return torch.ops.tessera.attention(q, positions, window_cache, sink, self.tessera_handle, entry_cache, num_entries, selected)
