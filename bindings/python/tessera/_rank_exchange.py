# SPDX-License-Identifier: Apache-2.0
"""How ranks of a torch.distributed group come to exchange rows of experts through their GPUs' memory, all of them or none
(docs/decisions/0034-experts-over-ranks.md). For tessera.mega_moe."""
import contextlib
import os
import pathlib
import secrets
import socket
from typing import Any, Callable, Optional, Sequence

import torch

from . import ops
from . import torch as tessera_torch
from ._errors import Error, InvalidArgument, Unsupported

_SECRET_BYTES = 32
_KINDS = {kind.__name__: kind for kind in (InvalidArgument, Unsupported)}  # errors that keep their type from rank to rank


def gathered(group: Any, mine: Any) -> list[Any]:
    """An object of each rank, by rank."""
    found: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(found, mine, group=group)
    return found


def _fault_of(error: Optional[Exception]) -> Optional[tuple[str, str]]:
    """As the other ranks learn it, whose Python may not have its type."""
    return None if error is None else (type(error).__name__, str(error))


def _raise_faults(error: Optional[Exception], faults: Sequence[Optional[tuple[str, str]]]) -> None:
    """Where ranks failed: this one's own error, on others the first rank's."""
    if error is not None:
        raise error
    for rank, fault in enumerate(faults):
        if fault is not None:
            name, text = fault
            raise _KINDS.get(name, Error)(f'rank {rank}: {text}' if name in _KINDS else f'rank {rank}: {name}: {text}')


def _machine() -> str:
    """The same for processes that find each other by the loopback: of one run of a machine, and of one network on it."""
    try:
        return pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip() + os.readlink('/proc/self/ns/net')
    except OSError:
        return socket.gethostname()


def _why_not_here(device: torch.device, rank: int, ranks: int, num_experts: int, num_topk: int, hidden: int, inner: int) -> str:
    if device.type != 'cuda':
        return f'the device is {device}, no GPU'
    try:
        with tessera_torch.ordered(device) as context:
            return ops.RankExperts.why_not(context, hidden=hidden, inner=inner, num_local=num_experts // ranks, top_k=num_topk,
                                           rank=rank, ranks=ranks)
    except Error as error:  # the others have to hear of it, not to wait
        return str(error)


def _first(reasons: Sequence[str]) -> str:
    """The first rank's that has one; empty: none has."""
    if reasons[0] and all(why == reasons[0] for why in reasons):
        return reasons[0]
    return next((f'rank {rank}: {why}' for rank, why in enumerate(reasons) if why), '')


def _check_alike(names: Sequence[str], every: Sequence[Sequence[Any]]) -> None:
    for rank, values in enumerate(every):
        for name, first, value in zip(names, every[0], values):
            if first != value:
                raise InvalidArgument(f'{name}: expected the same on all ranks, found {first} on rank 0, {value} on rank {rank}')


def _join(group: Any, device: torch.device, max_tokens: int, num_topk: int, hidden: int) -> tuple[Optional[ops.ExpertGroup], str]:
    """The group, or the reason of the first rank that has none."""
    rank, made, why, told = group.rank(), None, '', [None]
    listener, failed = None, None
    if rank == 0:
        try:
            listener = ops.RankListener()
            told = [(listener.port, secrets.token_hex(_SECRET_BYTES))]
        except Exception as error:
            told = [str(error) or type(error).__name__]
    torch.distributed.broadcast_object_list(told, src=torch.distributed.get_global_rank(group, 0), group=group)
    if isinstance(told[0], str):
        return None, f'rank 0: {told[0]}'
    port, secret = told[0]
    try:
        with tessera_torch.ordered(device) as context:
            made = ops.ExpertGroup(context, rank=rank, ranks=group.size(), port=port, secret=secret, listener=listener,
                                   max_tokens=max_tokens, top_k=num_topk, hidden=hidden)
        why = made.why_not
    except Error as error:
        why = str(error)
    except Exception as error:
        failed = error
    every = gathered(group, (_fault_of(failed), why))
    why = _first([why for _, why in every])
    is_whole = not why and all(fault is None for fault, _ in every)
    if not is_whole and made is not None:
        made.close()
    _raise_faults(failed, [fault for fault, _ in every])
    return made if is_whole else None, why


def _current(device: Optional[torch.device]) -> Any:
    """Collectives of objects go by the current GPU where the group's tensors are on GPUs."""
    is_there = device is not None and device.type == 'cuda' and (device.index or 0) < torch.cuda.device_count()
    return torch.cuda.device(device) if is_there else contextlib.nullcontext()


def make_buffer(group: Any, find_device: Callable[[], torch.device], make: Callable[[torch.device], Any],
                wanted: Optional[bool]) -> Any:
    """What make(find_device()) gives (a SymmetricBuffer) with the exchange on all ranks, or on none and why not. All ranks call it together.
    wanted: False for none, True to raise Unsupported where there is none. Raises InvalidArgument, on all ranks, where they ask
    for different things. Where a rank fails it says so to the others, who would wait for it, and all raise."""
    names = ('exchange', 'num_experts', 'num_max_tokens_per_rank', 'num_topk', 'hidden', 'intermediate_hidden')
    device, buffer, mine, why, failed = None, None, None, '', None
    try:
        device = find_device()
        buffer = make(device)
        mine = (wanted, buffer.num_experts, buffer.num_max_tokens_per_rank, buffer.num_topk, buffer.hidden,
                buffer.intermediate_hidden)
        why = 'the caller asked for none' if wanted is False else _why_not_here(
            device, group.rank(), group.size(), buffer.num_experts, buffer.num_topk, buffer.hidden,
            buffer.intermediate_hidden)
    except Exception as error:
        failed = error
    made = None
    with _current(device):
        every = gathered(group, (_fault_of(failed), mine, why, _machine()))
        _raise_faults(failed, [fault for fault, *_ in every])
        _check_alike(names, [asked for _, asked, _, _ in every])
        why = _first([why for _, _, why, _ in every])
        if not why:
            elsewhere = [rank for rank, (*_, machine) in enumerate(every) if machine != every[0][-1]]
            why = f'rank {elsewhere[0]} is on another machine than rank 0, or in another network of it' if elsewhere else ''
        if not why:
            made, why = _join(group, device, buffer.num_max_tokens_per_rank, buffer.num_topk, buffer.hidden)
    if wanted and made is None:
        raise Unsupported(f'exchange: expected ranks that reach the memory of each other\'s GPUs, found others: {why}')
    buffer.exchange, buffer.exchange_why_not = made, why
    return buffer
