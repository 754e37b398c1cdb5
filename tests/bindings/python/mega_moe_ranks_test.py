# SPDX-License-Identifier: Apache-2.0
"""tessera.mega_moe on several ranks, processes that this test starts (gloo on the CPU; NCCL where there are as many GPUs): each token
gets the bits of one rank that has all experts, whatever number of tokens each rank has, whether ranks gather or exchange."""
import os
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip('torch')

import tessera.mega_moe as mega_moe  # noqa: E402
import tessera.torch as tt  # noqa: E402
from tessera import DeviceError, Error, InvalidArgument, Unsupported, ops  # noqa: E402

EXPERTS, TOP_K, MOST, LIMIT, RANKS = 8, 3, 8, 2.0, 2
WIDTHS = {'cpu': (128, 32), 'cuda': (512, 128)}  # hidden, inner; those of the GPU are the least that its kernels exchange
TOKENS = ((5, 8), (0, 3), (8, 8))  # of rank 0 and 1, in each run
HAS_GROUPS = torch.distributed.is_available()
on_gpus = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f'fewer than {RANKS} GPUs that PyTorch sees')
COUNTS = [pytest.param('cpu', id='cpu'), pytest.param('cuda', id='cuda', marks=on_gpus)]
pytestmark = pytest.mark.skipif(not HAS_GROUPS, reason='PyTorch without torch.distributed')


def weights(rows, cols, seed, which):
    """Those experts of all: codes, block scales, tensor scales."""
    parts = []
    for e in range(EXPERTS):
        generator = torch.Generator().manual_seed(100 * seed + e)
        parts.append(tt.quantize_nvfp4(torch.randn(rows, cols, generator=generator), 'tensor'))
    return tuple(torch.stack([part[i] for part in parts])[which] for i in range(2)) + (torch.cat([part[2] for part in parts])[which],)


def transformed(kind, which, device):
    hidden, inner = WIDTHS[kind]
    return mega_moe.transform_weights(*([w.to(device) for w in weights(rows, cols, seed, which)]
                                        for rows, cols, seed in ((2 * inner, hidden, 1), (hidden, inner, 2))))


def inputs(run, rank, hidden):
    """x, ids (some that no expert has, none twice in a row) and routing of a rank's tokens."""
    generator = torch.Generator().manual_seed(10 * run + rank)
    count = TOKENS[run][rank]
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(MOST)])[:count]
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -1, ids)
    return torch.randn(count, hidden, generator=generator).bfloat16(), ids, torch.rand(count, TOP_K, generator=generator)


def fill(buffer, run, ranks_of):
    """Puts in the tokens of those ranks, and how many they are."""
    x, ids, routing = (torch.cat(parts) for parts in zip(*(inputs(run, rank, buffer.hidden) for rank in ranks_of)))
    n = x.shape[0]
    if buffer.x_sf is None:
        buffer.x[:n].copy_(x)
    else:  # each group's exponent is its number's
        buffer.x[:n].view(torch.uint8).copy_(x.to(torch.float8_e4m3fn).view(torch.uint8))
        buffer.x_sf.view(torch.uint8).copy_((124 + torch.arange(buffer.hidden // 32) % 8).to(torch.uint8))
    buffer.topk_idx[:n].copy_(ids), buffer.topk_weights[:n].copy_(routing)
    return n


def buffer_of(group, kind, device, ranks_of, exchange=None, mma_type='bf16xnvfp4'):
    return mega_moe.get_symmetric_buffer(group, EXPERTS, MOST * len(ranks_of), TOP_K, *WIDTHS[kind], mma_type, device=device,
                                         exchange=exchange)


def answers(group, kind, which, device, ranks_of, exchange=None):
    """y of each run for the tokens of those ranks, and how many tokens each of the experts got."""
    l1, l2 = transformed(kind, which, device)
    stats = torch.zeros(l1.num_experts, dtype=torch.int32, device=device)
    found = []
    for mma_type in mega_moe.MMA_TYPES:
        buffer = buffer_of(group, kind, device, ranks_of, exchange, mma_type)
        assert (buffer.exchange is not None) == bool(exchange) == (buffer.exchange_why_not == '')
        for run in range(len(TOKENS)):
            n = fill(buffer, run, ranks_of)
            y = torch.full((n, buffer.hidden), 7, dtype=torch.bfloat16, device=device)
            most = max(TOKENS[run]) if group is not None and run % 2 else None
            counts = stats if mma_type == mega_moe.MMA_TYPES[0] else None
            mega_moe.run(y, l1, l2, buffer, cumulative_local_expert_recv_stats=counts, activation_clamp=LIMIT, most_tokens=most)
            found.append(y.cpu())
        buffer.destroy()
        with pytest.raises(InvalidArgument, match='destroyed'):
            mega_moe.run(y, l1, l2, buffer)
    return found, stats.cpu()


def share_of(rank):
    local = EXPERTS // RANKS
    return slice(rank * local, (rank + 1) * local)


def gather(rank, kind, device):
    return answers(torch.distributed.group.WORLD, kind, share_of(rank), device, (rank,), False)


def exchange(rank, kind, device):
    return answers(torch.distributed.group.WORLD, kind, share_of(rank), device, (rank,), True)


class StandInGroup:
    """Of ops.ExpertGroup, where there are no GPUs."""
    why_not = ''

    def __init__(self, context, *, rank, ranks, port, secret, listener, max_tokens, top_k, hidden):
        found = mega_moe._rank_exchange.gathered(torch.distributed.group.WORLD, (port, secret, max_tokens, top_k, hidden))
        assert found == [found[0]] * ranks and len(secret) >= 32 and (listener is not None) == (rank == 0)
        assert listener is None or listener.port == port
        self.is_closed = False

    def check(self):
        assert not self.is_closed

    def close(self, seconds=60):
        self.is_closed = True


class StandInExperts:
    """Of ops.RankExperts: the reference, by torch.distributed."""

    def __init__(self, w1, w3, w2, *, top_k, rank, ranks, swiglu_limit, max_tokens):
        self.local, self.most = w1.shape[0], max_tokens
        self.moe = ops.Moe(w1, w3, w2, top_k=top_k, num_experts=ranks * self.local + 1, first_expert=rank * self.local,
                           swiglu_limit=swiglu_limit, max_tokens=max_tokens)

    def __call__(self, group, x, ids, routing, out, most):
        assert not group.is_closed and x.shape[0] == ids.shape[0] == routing.shape[0] == out.shape[0] <= most <= self.most
        assert (ids[:, 1:] >= ids[:, :-1]).all()
        everyone = mega_moe._rank_exchange.gathered
        slots = [self.moe.experts(*one) for one in everyone(torch.distributed.group.WORLD, (x, ids, routing))]
        mine = torch.stack([of_rank[torch.distributed.get_rank()] for of_rank in everyone(torch.distributed.group.WORLD, slots)])
        self.moe.combine(mine.sum(0), out)  # all ranks but a slot's owner have 0


def stand_in(rank, kind, device):
    mega_moe._rank_exchange._why_not_here = lambda *_: ''
    ops.ExpertGroup, ops.RankExperts = StandInGroup, StandInExperts
    return exchange(rank, kind, device)


def refusals(rank, kind, device):
    """Where ranks can't exchange, or don't agree, all hear of it alike."""
    group = torch.distributed.group.WORLD
    assert buffer_of(group, kind, device, (rank,)).exchange_why_not == 'the device is cpu, no GPU'
    assert buffer_of(group, kind, device, (rank,), False).exchange_why_not == 'the caller asked for none'
    with pytest.raises(Unsupported, match='^exchange: expected ranks that reach .* found others: the device is cpu'):
        buffer_of(group, kind, device, (rank,), True)
    with pytest.raises(InvalidArgument, match='^exchange: expected the same on all ranks, found None on rank 0, False on rank 1'):
        buffer_of(group, kind, device, (rank,), (None, False)[rank])
    with pytest.raises(InvalidArgument, match='^num_max_tokens_per_rank: expected the same on all ranks, found 8 on rank 0, 16 on rank 1'):
        buffer_of(group, kind, device, (0,) * (1 + rank))
    with pytest.raises(InvalidArgument, match='num_experts: expected a multiple of 2, .* found 5'):
        mega_moe.get_symmetric_buffer(group, 5, MOST, TOP_K, *WIDTHS[kind], device=device)
    # A rank that fails by itself says so to the others.
    sizes = EXPERTS, MOST, (TOP_K, 0)[rank], *WIDTHS[kind]
    with pytest.raises(InvalidArgument, match=('^rank 1: ', '^')[rank] + 'num_topk: expected 1 to 8, found 0'):
        mega_moe.get_symmetric_buffer(group, *sizes, device=device)
    with pytest.raises(Error, match='^rank 1: RuntimeError: Invalid device') if rank == 0 else pytest.raises(RuntimeError, match='^Invalid'):
        buffer_of(group, kind, ('cpu', 'cpu:x')[rank], (rank,))
    with pytest.raises(InvalidArgument, match=('^rank 1: ', '^')[rank] + 'exchange: expected None, False or True, found 0$'):
        buffer_of(group, kind, device, (rank,), (False, 0)[rank])
    # One rank that can't is enough.
    mega_moe._rank_exchange._why_not_here = lambda *_: ('', 'has no kernel')[rank]
    assert buffer_of(group, kind, device, (rank,)).exchange_why_not == 'rank 1: has no kernel'
    mega_moe._rank_exchange._why_not_here = lambda *_: ''
    machine = mega_moe._rank_exchange._machine()
    mega_moe._rank_exchange._machine = lambda: f'{machine}{rank}'
    assert buffer_of(group, kind, device, (rank,)).exchange_why_not.startswith('rank 1 is on another machine')
    # Then all try, by the loopback, and come so far.
    mega_moe._rank_exchange._machine = lambda: machine
    assert buffer_of(group, kind, device, (rank,)).exchange_why_not == 'the context is of a CPU'
    return True


def replays(rank, kind, device):
    """y of each run, of tokens that are there or have no expert, from one recorded graph."""
    l1, l2 = transformed(kind, share_of(rank), device)
    buffer = buffer_of(torch.distributed.group.WORLD, kind, device, (rank,), True)
    y = run_once(buffer, l1, l2, device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode='thread_local'):
        mega_moe.run(y, l1, l2, buffer, activation_clamp=LIMIT)
    found = []
    for run in range(len(TOKENS)):
        buffer.topk_idx.fill_(-1)
        n = fill(buffer, run, (rank,))
        for _ in range(3):
            graph.replay()
        assert not y[n:].any()
        found.append(y[:n].cpu())
    buffer.check()
    del graph
    buffer.destroy()
    return found


def run_once(buffer, l1, l2, device):
    buffer.topk_idx.copy_(torch.arange(0, EXPERTS, TOP_K)[:TOP_K])  # of both ranks
    y = torch.empty((MOST, buffer.hidden), dtype=torch.bfloat16, device=device)
    mega_moe.run(y, l1, l2, buffer, activation_clamp=LIMIT)
    return y


def wait_for_loss(buffer, who):
    """Heartbeats may be slow to tell it on a busy machine."""
    deadline = time.monotonic() + 60
    with pytest.raises(DeviceError, match=who):
        while time.monotonic() < deadline:
            buffer.check()
            time.sleep(0.05)


def after_a_run(rank, kind, device):
    """A rank's buffer and weights, behind a call that all ranks have made."""
    l1, l2 = transformed(kind, share_of(rank), device)
    buffer = buffer_of(torch.distributed.group.WORLD, kind, device, (rank,), True)
    run_once(buffer, l1, l2, device)
    torch.cuda.synchronize()
    torch.distributed.barrier()
    return buffer, l1, l2


def left_behind(rank, kind, device):
    """Rank 0 calls once more than rank 1, and closes: its kernels end, and rank 1 hears of it."""
    buffer, l1, l2 = after_a_run(rank, kind, device)
    if rank == 0:
        run_once(buffer, l1, l2, device)
        began = time.monotonic()
        buffer.exchange.close(2)
        assert time.monotonic() - began < 30
        with pytest.raises(InvalidArgument, match='closed'):
            run_once(buffer, l1, l2, device)
    torch.distributed.barrier()
    torch.cuda.synchronize()
    if rank == 1:
        wait_for_loss(buffer, 'rank 0 of 2')
        with pytest.raises(DeviceError, match='rank 0 of 2'):
            run_once(buffer, l1, l2, device)
        buffer.destroy()
    return True


def survives(rank, kind, device):
    """Rank 1's process ends in the middle: what rank 0 has queued ends, and it hears who is lost."""
    buffer, l1, l2 = after_a_run(rank, kind, device)
    if rank == 1:
        time.sleep(1)  # rank 0 waits by then
        os._exit(0)
    run_once(buffer, l1, l2, device)
    torch.cuda.synchronize()
    wait_for_loss(buffer, 'rank 1 of 2')
    for call in (buffer.check, lambda: run_once(buffer, l1, l2, device)):
        with pytest.raises(DeviceError, match='rank 1 of 2'):
            call()
    buffer.destroy()
    torch.save(True, f'{sys.argv[2]}/0.pt')
    os._exit(0)  # a group of torch.distributed would wait for rank 1


def rank_main(rank, out, kind, work):
    device = f'cuda:{rank}' if kind == 'cuda' else 'cpu'
    torch.set_num_threads(1)
    if kind == 'cuda':
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group('nccl' if kind == 'cuda' else 'gloo', init_method=f'file://{out}/store', rank=rank,
                                         world_size=RANKS)
    torch.save(globals()[work](rank, kind, device), f'{out}/{rank}.pt')
    torch.distributed.destroy_process_group()


def of_ranks(tmp_path, kind, work, ranks=range(RANKS)):
    """What that function gives on each rank."""
    out = tmp_path / work
    out.mkdir()
    code = f'import sys, mega_moe_ranks_test as t; t.rank_main(int(sys.argv[1]), sys.argv[2], {kind!r}, {work!r})'
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])}
    started = [subprocess.Popen([sys.executable, '-c', code, str(rank), str(out)], env=environment) for rank in range(RANKS)]
    deadline = time.monotonic() + 240
    try:
        # Where one fails the others may wait for it.
        while any(p.poll() is None for p in started) and not any(p.poll() for p in started) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [process.poll() for process in started] == [0] * RANKS
    finally:
        for process in started:
            process.kill()
    return [torch.load(out / f'{rank}.pt') for rank in ranks]


def check_answers(found, expected):
    (whole, counts), runs = expected, len(TOKENS) * len(mega_moe.MMA_TYPES)
    assert len(whole) == runs and all(len(ys) == runs for ys, _ in found)
    for run in range(runs):
        assert whole[run].shape[0] == sum(TOKENS[run % len(TOKENS)]) and whole[run].any()
        assert torch.equal(torch.cat([ys[run] for ys, _ in found]), whole[run])
    assert torch.equal(torch.cat([of_rank for _, of_rank in found]), counts) and counts.sum() > 0


def one_rank(kind):
    return answers(None, kind, slice(None), 'cuda:0' if kind == 'cuda' else 'cpu', range(RANKS))


@pytest.mark.parametrize('kind', COUNTS)
def test_every_token_gets_the_bits_of_one_rank(tmp_path, kind):
    expected = one_rank(kind)
    check_answers(of_ranks(tmp_path, kind, 'gather'), expected)
    check_answers(of_ranks(tmp_path, kind, 'exchange' if kind == 'cuda' else 'stand_in'), expected)


def test_ranks_that_cannot_exchange_gather_and_say_why(tmp_path):
    assert of_ranks(tmp_path, 'cpu', 'refusals') == [True] * RANKS


@on_gpus
def test_an_exchange_is_captured_and_replayed(tmp_path):
    found, (whole, _) = of_ranks(tmp_path, 'cuda', 'replays'), one_rank('cuda')
    for run in range(len(TOKENS)):
        assert torch.equal(torch.cat([of_rank[run] for of_rank in found]), whole[run])


@on_gpus
def test_a_rank_that_closes_alone_ends_the_others_calls(tmp_path):
    assert of_ranks(tmp_path, 'cuda', 'left_behind') == [True] * RANKS


@on_gpus
def test_a_rank_that_is_lost_is_named(tmp_path):
    assert of_ranks(tmp_path, 'cuda', 'survives', [0]) == [True]


def test_arguments_are_refused():
    with pytest.raises(Unsupported, match='^exchange: expected a group of several ranks, found one rank'):
        buffer_of(None, 'cpu', 'cpu', (0,), True)
    for exchange in ('yes', 0, 1):
        with pytest.raises(InvalidArgument, match=f'^exchange: expected None, False or True, found {exchange!r}'):
            buffer_of(None, 'cpu', 'cpu', (0,), exchange)
    buffer = buffer_of(None, 'cpu', 'cpu', (0,))
    assert buffer.exchange is None and buffer.exchange_why_not == 'one rank has nothing to exchange'
    buffer.check()
    l1, l2 = transformed('cpu', slice(None), 'cpu')
    y = torch.empty((3, buffer.hidden), dtype=torch.bfloat16)
    for most in (2, MOST + 1):
        with pytest.raises(InvalidArgument, match=f'^most_tokens: expected 3 to {MOST}, found {most}'):
            mega_moe.run(y, l1, l2, buffer, most_tokens=most)
