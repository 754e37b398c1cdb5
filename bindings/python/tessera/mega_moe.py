# SPDX-License-Identifier: Apache-2.0
"""Routed experts as one call, in the shape of the public mega-MoE interface (DeepGEMM's transform_weights_for_mega_moe,
get_symm_buffer_for_mega_moe, bf16_mega_moe and fp8_fp4_mega_moe), with NVFP4 weights. Importing it needs torch.

    l1, l2 = mega_moe.transform_weights(gate_up, down)      # each: codes, block scales, tensor scales
    buffer = mega_moe.get_symmetric_buffer(None, num_experts, num_max_tokens, num_topk, hidden, intermediate_hidden)
    buffer.x[:n].copy_(x); buffer.topk_idx[:n].copy_(ids); buffer.topk_weights[:n].copy_(weights)
    mega_moe.run(y, l1, l2, buffer, activation_clamp=10.0)  # y bfloat16 [n, hidden]

On one rank nothing is dispatched, and run() is the operator tessera::mega_moe of grouped experts and their sum. On several each
has as many experts, rank 0 the first; get_symmetric_buffer() and run() are then called on all of them, each with its own tokens,
and are no operators. A token has the bits of one rank: its sum is in ascending expert, by its own rank. There are two ways:

    exchange  up to eight Hopper GPUs of one machine that reach each other's memory: kernels send a token's row to the ranks of its
              experts, and those write what they give into the token's rank's memory; nothing waits for the host. Run on two H200
              (bench/results/2026-11-26-h200-x2-mega-moe.json)
    gather    all else, such as CPUs: torch.distributed gathers the inputs on every rank, each runs its experts, and what they gave
              goes back by slot

All ranks go the same way; buffer.exchange_why_not says why they don't exchange. Activations are BF16, or E4M3 by 32 with
power-of-two scales, which are widened to BF16: exactly, so that the products are of the very values. What lies between the two
maps stays BF16. The first run() packs the weights and waits: run once before a CUDA graph is captured. A run() with another
num_topk, num_max_tokens, clamp or way than the one before packs them again and drops what was packed: keep to one set, and
capture graphs again after a change."""
import contextlib
import math
import sys
from typing import Any, Optional, Union

import torch

from . import _rank_exchange, ops
from ._errors import InvalidArgument, Unsupported
from . import torch as tessera_torch

MMA_TYPES = ('bf16xnvfp4', 'fp8xnvfp4')
_SCALE_GROUP = 32  # values of x that share a scale in x_sf


def _check_swiglu(activation: str) -> None:
    if activation != 'swiglu':
        raise Unsupported(f"activation: expected 'swiglu', found {activation!r}")


class SymmetricBuffer:
    """Inputs of run(), each an allocation whose size depends on the arguments alone, the same on every rank:

    x             [num_max_tokens, hidden] bfloat16, or float8_e4m3fn with mma_type "fp8xnvfp4"
    x_sf          None, or int32 [num_max_tokens, hidden / 128]: four UE8M0 exponents each, of 32 values, the first lowest
    topk_idx      int64 [num_max_tokens, num_topk]; an id that no expert has, such as -1, gives 0
    topk_weights  float32 [num_max_tokens, num_topk]

    exchange is how several ranks reach each other, None where they gather, and exchange_why_not says why they do ("" where they
    exchange)."""

    def __init__(self, num_experts: int, num_max_tokens: int, num_topk: int, hidden: int, intermediate_hidden: int,
                 mma_type: str, device: torch.device, group: Any = None):
        self.group = group  # None: one rank
        self.exchange: Optional[ops.ExpertGroup] = None
        self.exchange_why_not = 'one rank has nothing to exchange'
        self.num_experts, self.num_max_tokens_per_rank, self.num_topk = num_experts, num_max_tokens, num_topk
        self.hidden, self.intermediate_hidden, self.mma_type = hidden, intermediate_hidden, mma_type
        self._device = device
        is_fp8 = mma_type == 'fp8xnvfp4'

        def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros((num_max_tokens, count), dtype=dtype, device=device)

        self.x = empty(hidden, torch.float8_e4m3fn if is_fp8 else torch.bfloat16)
        self.x_sf = empty(hidden // (4 * _SCALE_GROUP), torch.int32) if is_fp8 else None
        self.topk_idx, self.topk_weights = empty(num_topk, torch.int64), empty(num_topk, torch.float32)

    def check(self) -> None:
        """Raises DeviceError, naming it, where a rank is lost with which this one exchanges: outputs since then mean nothing, and
        no call can be made any more. run() asks too; a graph's replays do not."""
        if self.exchange is not None:
            self.exchange.check()

    def _end_exchange(self, is_dropped: bool) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            with tessera_torch.ordered(self._device):  # behind replays in the current stream too
                if not is_dropped:
                    exchange.close()
                del exchange  # closes it, but waits for the others less long

    def destroy(self) -> None:
        """Gives the memory back. Ranks that exchange call it together, once each has queued its last run(): it waits for those,
        and ends the others' where a rank does not come within a minute. Graphs that run() is captured in go before."""
        try:
            self._end_exchange(False)
        finally:
            self.x = self.x_sf = self.topk_idx = self.topk_weights = None  # type: ignore[assignment]

    def __del__(self) -> None:
        if getattr(self, 'exchange', None) is not None and not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self._end_exchange(True)


def _check_sizes(ranks: int, num_experts: int, num_max_tokens_per_rank: int, num_topk: int, hidden: int, intermediate_hidden: int,
                 mma_type: str, activation: str) -> None:
    if num_experts % ranks:
        raise InvalidArgument(f'num_experts: expected a multiple of {ranks}, the ranks of the group, found {num_experts}')
    if mma_type not in MMA_TYPES:
        raise Unsupported(f'mma_type: expected one of {", ".join(MMA_TYPES)} (weights are NVFP4), found {mma_type!r}')
    _check_swiglu(activation)
    for name, value in (('num_experts', num_experts), ('num_max_tokens_per_rank', num_max_tokens_per_rank)):
        if value < 1:
            raise InvalidArgument(f'{name}: expected at least 1, found {value}')
    if not 1 <= num_topk <= num_experts:
        raise InvalidArgument(f'num_topk: expected 1 to {num_experts}, found {num_topk}')
    multiple = 4 * _SCALE_GROUP if mma_type == 'fp8xnvfp4' else 16
    for name, value, of in (('hidden', hidden, multiple), ('intermediate_hidden', intermediate_hidden, 16)):
        if value < of or value % of:
            raise InvalidArgument(f'{name}: expected a multiple of {of}, found {value}')


def _device_of(given: Union[str, torch.device, None]) -> torch.device:
    if given is None:
        given = 'cuda' if torch.cuda.is_available() else 'cpu'
    device = torch.device(given)
    if device.type == 'cuda' and device.index is None:
        device = torch.device('cuda', torch.cuda.current_device())
    return device


def get_symmetric_buffer(group: Any, num_experts: int, num_max_tokens_per_rank: int, num_topk: int, hidden: int,
                         intermediate_hidden: int, mma_type: str = 'bf16xnvfp4', activation: str = 'swiglu',
                         device: Union[str, torch.device, None] = None, exchange: Optional[bool] = None) -> SymmetricBuffer:
    """group: a torch.distributed process group, whose backend moves tensors of the device, or None for one rank; num_experts: of
    all ranks. On several ranks all call it together, with the same arguments. device: None for the current GPU, or the CPU where
    there is none. exchange: None for ranks that exchange where they can, False for ranks that gather, True to raise Unsupported,
    with the reason, where they can't exchange. Raises InvalidArgument for sizes that no weight has or that differ between ranks
    and experts that ranks cannot share alike, Unsupported for other types. Where a rank fails, all raise: the others an error
    that names it."""
    ranks = 1 if group is None else group.size()

    def make(found: torch.device) -> SymmetricBuffer:
        _check_sizes(ranks, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, mma_type, activation)
        if exchange is not None and not isinstance(exchange, bool):
            raise InvalidArgument(f'exchange: expected None, False or True, found {exchange!r}')
        if exchange and ranks == 1:
            raise Unsupported('exchange: expected a group of several ranks, found one rank')
        return SymmetricBuffer(num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, mma_type,
                               found, group if ranks > 1 else None)

    if ranks == 1:
        return make(_device_of(device))
    return _rank_exchange.make_buffer(group, lambda: _device_of(device), make, exchange)


symmetric_buffer = get_symmetric_buffer  # as others call it


class TransformedWeights:
    """One of the pair that transform_weights returns, for run()."""

    def __init__(self, handle: tessera_torch.Handle, name: str, num_experts: int, hidden: int, intermediate_hidden: int):
        self._handle, self.handle, self.name = handle, handle.number, name
        self.num_experts, self.hidden, self.intermediate_hidden = num_experts, hidden, intermediate_hidden


def _stack(name: str, weights: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if not isinstance(weights, (tuple, list)) or len(weights) != 3:
        found = f'{len(weights)} of them' if isinstance(weights, (tuple, list)) else type(weights).__name__
        raise Unsupported(f'{name}: expected NVFP4 (codes, block scales, tensor scales), found {found}')
    codes, scales, tensor_scales = weights
    tessera_torch.check_nvfp4((f'{name}[0]', f'{name}[1]'), codes, scales, 3)
    globals_ = torch.as_tensor(tensor_scales, dtype=torch.float32)
    return codes.detach().view(torch.uint8), scales.detach().view(torch.uint8), globals_


def transform_weights(l1_weights: tuple[Any, ...], l2_weights: tuple[Any, ...],
                      activation: str = 'swiglu') -> tuple[TransformedWeights, TransformedWeights]:
    """l1_weights: gate above up, codes [experts, 2 intermediate, hidden / 2] uint8 (E2M1, even column in the low nibble), scales
    [experts, 2 intermediate, hidden / 16] (E4M3), tensor scales float32: one number, [experts], or [experts, 2] for gate and
    up. l2_weights: the same of [experts, hidden, intermediate]. On several ranks the experts are those of this one. Gate and up are
    copied; the kernels pack at the first run."""
    _check_swiglu(activation)
    (codes1, scales1, globals1), (codes2, scales2, globals2) = _stack('l1_weights', l1_weights), _stack('l2_weights', l2_weights)
    if codes1.shape[1] % 2:
        raise InvalidArgument(f'l1_weights[0]: expected an even number of rows, gate above up, found {codes1.shape[1]}')
    num_experts, inner, hidden = codes1.shape[0], codes1.shape[1] // 2, 2 * codes1.shape[2]
    tessera_torch.check_shape('l2_weights[0]', codes2, (num_experts, hidden, inner // 2))
    for name, found, width in (('l1_weights[2]', globals1, 2), ('l2_weights[2]', globals2, 1)):
        if found.numel() != 1 and tuple(found.shape) not in ((num_experts,), (num_experts, width)):
            raise InvalidArgument(f'{name}: expected one number, [{num_experts}] or [{num_experts}, {width}], '
                                  f'found {list(found.shape)}')
    halves = globals1.reshape(-1, 1).expand(-1, 2) if globals1.dim() < 2 else globals1
    plain = tessera_torch.plain
    parts = [(plain(codes1[:, :inner]), plain(scales1[:, :inner]), halves[:, 0].tolist()),
             (plain(codes1[:, inner:]), plain(scales1[:, inner:]), halves[:, -1].tolist()),
             (plain(codes2), plain(scales2), globals2.reshape(-1).tolist())]

    def make(context: ops.Context, top_k: int, max_tokens: int, clamp: float, rank: int = 0, ranks: int = 1,
             exchanges: bool = False) -> Union[ops.Moe, ops.RankExperts]:
        w1, w3, w2 = (ops.Weight(context, *part) for part in parts)
        if exchanges:
            return ops.RankExperts(w1, w3, w2, top_k=top_k, rank=rank, ranks=ranks, swiglu_limit=clamp, max_tokens=max_tokens)
        # One more than there are, so that every row has room for ids that no expert has.
        return ops.Moe(w1, w3, w2, top_k=top_k, num_experts=ranks * num_experts + 1, first_expert=rank * num_experts,
                       swiglu_limit=clamp, max_tokens=max_tokens)

    handle = tessera_torch.Handle('mega_moe', make, 0, num_experts)  # the buffer says how many tokens
    return (TransformedWeights(handle, 'l1_weights', num_experts, hidden, inner),
            TransformedWeights(handle, 'l2_weights', num_experts, hidden, inner))


def _widened(x: torch.Tensor, x_sf: torch.Tensor) -> torch.Tensor:
    """E4M3 codes, as bytes, times powers of two: 4 significant bits, so that BF16 holds them (2^-127 counts as 0)."""
    exponents = x_sf.contiguous().view(torch.uint8).to(torch.int16)
    scales = (exponents << 7).view(torch.bfloat16)
    return (x.view(torch.float8_e4m3fn).to(torch.bfloat16).view(*scales.shape, _SCALE_GROUP) * scales.unsqueeze(-1)).view(x.shape)


@torch.library.custom_op('tessera::mega_moe', mutates_args=('y',))
def mega_moe(y: torch.Tensor, x: torch.Tensor, x_sf: Optional[torch.Tensor], topk_idx: torch.Tensor,
             topk_weights: torch.Tensor, handle: int, max_tokens: int, activation_clamp: float) -> None:
    tessera_torch.check_shape('topk_idx', topk_idx, (None, None))
    found = tessera_torch.handle_of(handle, 'mega_moe')
    with tessera_torch.ordered(x.device) as c:
        moe = found.at(c, topk_idx.shape[-1], max_tokens, activation_clamp)
    tessera_torch.routed(moe, found.num_experts, max_tokens, x if x_sf is None else _widened(x, x_sf), topk_idx, topk_weights, y)


@mega_moe.register_fake
def _(y: torch.Tensor, x: torch.Tensor, x_sf: Optional[torch.Tensor], topk_idx: torch.Tensor, topk_weights: torch.Tensor,
      handle: int, max_tokens: int, activation_clamp: float) -> None:
    return None


def _choices(buffer: SymmetricBuffer, tokens: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the buffer's first `rows` rows, the ids in ascending order and their weights. An id that no expert has comes last, as
    num_experts, and so are those of the rows behind `tokens`, which are of no token."""
    ids = tessera_torch.known_ids(buffer.topk_idx[:rows], buffer.num_experts)
    ids[tokens:] = buffer.num_experts
    ids, order = ids.to(torch.int32).sort(dim=-1, stable=True)
    return ids, buffer.topk_weights[:rows].gather(-1, order)


def _gathered(group: Any, mine: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(parts, mine.contiguous(), group=group)
    return torch.cat(parts)


def _run_gathered(y: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, routing: torch.Tensor, buffer: SymmetricBuffer,
                  handle: tessera_torch.Handle, clamp: float) -> torch.Tensor:
    """x [most, hidden] bfloat16, ids and routing [most, num_topk], of as many rows on all ranks; those from y's number on are of no
    token. Returns the ids of all ranks' tokens."""
    group, experts, top_k = buffer.group, buffer.num_experts, buffer.num_topk
    rank, ranks, tokens, most = group.rank(), group.size(), y.shape[0], x.shape[0]
    all_x, all_ids, all_routing = (_gathered(group, mine) for mine in (x, ids, routing))
    with tessera_torch.ordered(x.device) as c:
        moe = handle.at(c, top_k, buffer.num_max_tokens_per_rank, clamp, rank, ranks)
        slots = x.new_empty((ranks, most, top_k, buffer.hidden))
        for r in range(ranks):
            rows = slice(r * most, (r + 1) * most)
            moe.experts(all_x[rows], tessera_torch.plain(all_ids[rows]), tessera_torch.plain(all_routing[rows]), slots[r])
    found = torch.empty_like(slots)
    torch.distributed.all_to_all_single(found, slots, group=group)
    # Each slot from the rank that has its expert; ids that nobody has are 0 everywhere.
    owner = (ids[:tokens] // (experts // ranks)).clamp(max=ranks - 1).to(torch.int64)
    index = owner[None, :, :, None].expand(1, *owner.shape, buffer.hidden)
    chosen = found[:, :tokens].gather(0, index)[0].contiguous()
    if tokens:
        with tessera_torch.ordered(x.device):
            moe.combine(chosen, y)
    return all_ids


def _run_exchanged(y: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, routing: torch.Tensor, most: int, buffer: SymmetricBuffer,
                   handle: tessera_torch.Handle, clamp: float) -> None:
    """Of y's number of tokens; no rank has more than `most`."""
    buffer.check()
    inputs = tessera_torch.plain(x), tessera_torch.plain(ids), tessera_torch.plain(routing)
    with tessera_torch.ordered(x.device) as c:
        op = handle.at(c, buffer.num_topk, buffer.num_max_tokens_per_rank, clamp, buffer.group.rank(), buffer.group.size(), True)
        op(buffer.exchange, *inputs, y, most)


def _run_on_ranks(y: torch.Tensor, buffer: SymmetricBuffer, handle: tessera_torch.Handle, clamp: float, most: int,
                  counts: bool) -> Optional[torch.Tensor]:
    """Returns, where `counts`, the ids of all ranks' tokens."""
    tokens = y.shape[0]

    def rows_of_x(rows: int) -> torch.Tensor:
        x = buffer.x[:rows]
        return x if buffer.x_sf is None else _widened(x.view(torch.uint8), buffer.x_sf[:rows])

    if buffer.exchange is None:
        return _run_gathered(y, rows_of_x(most), *_choices(buffer, tokens, most), buffer, handle, clamp)
    ids, routing = _choices(buffer, tokens, most if counts else tokens)
    _run_exchanged(y, rows_of_x(tokens), ids[:tokens], routing[:tokens], most, buffer, handle, clamp)
    return _gathered(buffer.group, ids) if counts else None


def _check_y(y: torch.Tensor, buffer: SymmetricBuffer) -> None:
    tessera_torch.check_shape('y', y, (None, buffer.hidden))
    if y.shape[0] > buffer.num_max_tokens_per_rank:
        raise InvalidArgument(f'y: expected at most {buffer.num_max_tokens_per_rank} tokens, found {y.shape[0]}')
    for expected, found in ((torch.bfloat16, y.dtype), (buffer.x.device, y.device)):
        if found != expected:
            raise InvalidArgument(f'y: expected {expected}, found {found}')
    if not y.is_contiguous() or (not torch.compiler.is_compiling() and y.data_ptr() % 16):
        raise InvalidArgument(f'y: expected a dense tensor aligned to 16 bytes, found strides {y.stride()}')


def run(y: torch.Tensor, l1_weights: TransformedWeights, l2_weights: TransformedWeights, sym_buffer: SymmetricBuffer,
        cumulative_local_expert_recv_stats: Optional[torch.Tensor] = None, activation: str = 'swiglu',
        activation_clamp: Optional[float] = None, most_tokens: Optional[int] = None) -> None:
    """y [n, hidden] bfloat16 = the experts' sum for the first n tokens of the buffer. cumulative_local_expert_recv_stats int32
    [experts of this rank]: the tokens that each got, of any rank's, are added; on several ranks torch.distributed then gathers
    the ids, so all of them give it or none. activation_clamp: None for none. most_tokens: no rank has more in this call, and all ranks say the same; None for as
    many as the buffer has room for. On several ranks all have to call it: where one refuses its arguments,
    the others wait for it, ranks that gather until the group gives up, those that exchange until it comes, ends or destroys its
    buffer. Raises DeviceError where a rank is lost with which this one exchanges."""
    _check_swiglu(activation)
    for name, weights in (('l1_weights', l1_weights), ('l2_weights', l2_weights)):
        if weights.name != name:
            raise InvalidArgument(f'{name}: expected those of transform_weights, in its order, found {weights.name}')
    if l1_weights.handle != l2_weights.handle:
        raise InvalidArgument('l2_weights: expected what transform_weights returned with l1_weights, found those of others')
    ranks = 1 if sym_buffer.group is None else sym_buffer.group.size()
    for name, times in (('num_experts', ranks), ('hidden', 1), ('intermediate_hidden', 1)):
        expected = times * getattr(l1_weights, name)
        if getattr(sym_buffer, name) != expected:
            raise InvalidArgument(f'sym_buffer.{name}: expected {expected}, as the weights have, found {getattr(sym_buffer, name)}')
    if sym_buffer.x is None:
        raise InvalidArgument('sym_buffer: expected one that lives, found a destroyed one')
    _check_y(y, sym_buffer)
    clamp = 0.0 if activation_clamp is None else activation_clamp
    if not 0 <= clamp < math.inf:
        raise InvalidArgument(f'activation_clamp: expected None or a finite number of at least 0, found {clamp}')
    stats = cumulative_local_expert_recv_stats
    if stats is not None:
        tessera_torch.check_shape('cumulative_local_expert_recv_stats', stats, (l1_weights.num_experts,))
        if stats.dtype != torch.int32:
            raise InvalidArgument(f'cumulative_local_expert_recv_stats: expected torch.int32, found {stats.dtype}')
    tokens, room = y.shape[0], sym_buffer.num_max_tokens_per_rank
    most = room if most_tokens is None else most_tokens
    if not max(tokens, 1) <= most <= room:
        raise InvalidArgument(f'most_tokens: expected {max(tokens, 1)} to {room}, found {most}')
    topk_idx = sym_buffer.topk_idx[:tokens]
    x, x_sf = sym_buffer.x[:tokens], sym_buffer.x_sf
    if ranks > 1:
        found = _run_on_ranks(y, sym_buffer, l1_weights._handle, clamp, most, stats is not None)
        topk_idx = topk_idx if found is None else found - sym_buffer.group.rank() * l1_weights.num_experts
    else:
        torch.ops.tessera.mega_moe(y, x if x_sf is None else x.view(torch.uint8), None if x_sf is None else x_sf[:tokens], topk_idx,
                                   sym_buffer.topk_weights[:tokens], l1_weights.handle, sym_buffer.num_max_tokens_per_rank, clamp)
    if stats is not None:
        experts = l1_weights.num_experts
        ids = tessera_torch.known_ids(topk_idx.reshape(-1), experts)
        counts = torch.zeros(experts + 1, dtype=torch.int32, device=y.device)
        counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        stats.add_(counts[:experts])
