# SPDX-License-Identifier: Apache-2.0
"""How ranks of a torch.distributed group come to exchange rows of experts through their GPUs' memory, all of them or none
(docs/decisions/0034-experts-over-ranks.md). For tessera.mega_moe."""
import contextlib
import os
import pathlib
import secrets
import socket
from typing import Any, Optional, Sequence

import torch

from . import ops
from . import torch as tessera_torch
from ._errors import Error, InvalidArgument, Unsupported

_SECRET_BYTES = 32


def gathered(group: Any, mine: Any) -> list[Any]:
    """An object of each rank, by rank."""
    found: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(found, mine, group=group)
    return found


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
    listener = None
    if rank == 0:
        try:
            listener = ops.RankListener()
            told = [(listener.port, secrets.token_hex(_SECRET_BYTES))]
        except Error as error:
            told = [str(error)]
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
    why = _first(gathered(group, why))
    if why and made is not None:
        made.close()
    return None if why else made, why


def make_exchange(group: Any, device: torch.device, wanted: Optional[bool], *, num_experts: int, max_tokens: int, num_topk: int,
                  hidden: int, inner: int) -> tuple[Optional[ops.ExpertGroup], str]:
    """All ranks call it together; the exchange on all of them, or on none and why not. wanted: False for none, True to raise
    Unsupported where there is none. Raises InvalidArgument, on all ranks, where they ask for different things."""
    # Collectives of objects go by the current GPU where the group's tensors are on GPUs.
    with torch.cuda.device(device) if device.type == 'cuda' else contextlib.nullcontext():
        names = ('exchange', 'num_experts', 'num_max_tokens_per_rank', 'num_topk', 'hidden', 'intermediate_hidden')
        mine = (wanted, num_experts, max_tokens, num_topk, hidden, inner)
        why = 'the caller asked for none' if wanted is False else _why_not_here(
            device, group.rank(), group.size(), num_experts, num_topk, hidden, inner)
        every = gathered(group, (mine, why, _machine()))
        _check_alike(names, [asked for asked, _, _ in every])
        why = _first([why for _, why, _ in every])
        if not why:
            elsewhere = [rank for rank, (_, _, machine) in enumerate(every) if machine != every[0][2]]
            why = f'rank {elsewhere[0]} is on another machine than rank 0, or in another network of it' if elsewhere else ''
        made = None
        if not why:
            made, why = _join(group, device, max_tokens, num_topk, hidden)
    if wanted and made is None:
        raise Unsupported(f'exchange: expected ranks that reach the memory of each other\'s GPUs, found others: {why}')
    return made, why
