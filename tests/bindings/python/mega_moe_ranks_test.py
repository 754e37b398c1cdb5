# SPDX-License-Identifier: Apache-2.0
"""tessera.mega_moe on several ranks, processes that this test starts (gloo on the CPU; NCCL where there are as many GPUs): each token
gets the bits of one rank that has all experts, whatever number of tokens each rank has."""
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip('torch')

import tessera.mega_moe as mega_moe  # noqa: E402
import tessera.torch as tt  # noqa: E402

EXPERTS, HIDDEN, INNER, TOP_K, MOST, LIMIT, RANKS = 8, 128, 32, 3, 8, 2.0, 2
TOKENS = ((5, 8), (0, 3), (8, 8))  # of rank 0 and 1, in each run
COUNTS = [pytest.param('cpu', id='cpu'), pytest.param('cuda', id='cuda', marks=pytest.mark.skipif(
    torch.cuda.device_count() < RANKS, reason=f'fewer than {RANKS} GPUs that PyTorch sees'))]


def weights(rows, cols, seed, which):
    """Those experts of all: codes, block scales, tensor scales."""
    parts = []
    for e in range(EXPERTS):
        generator = torch.Generator().manual_seed(100 * seed + e)
        parts.append(tt.quantize_nvfp4(torch.randn(rows, cols, generator=generator), 'tensor'))
    return tuple(torch.stack([part[i] for part in parts])[which] for i in range(2)) + (torch.cat([part[2] for part in parts])[which],)


def inputs(run, rank):
    """x, ids (some that no expert has, none twice in a row) and routing of a rank's tokens."""
    generator = torch.Generator().manual_seed(10 * run + rank)
    count = TOKENS[run][rank]
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(MOST)])[:count]
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -1, ids)
    return torch.randn(count, HIDDEN, generator=generator).bfloat16(), ids, torch.rand(count, TOP_K, generator=generator)


def answers(group, which, device, ranks_of):
    """y of each run for the tokens of those ranks, and how many tokens each of the experts got."""
    l1, l2 = mega_moe.transform_weights(*([w.to(device) for w in weights(rows, cols, seed, which)]
                                          for rows, cols, seed in ((2 * INNER, HIDDEN, 1), (HIDDEN, INNER, 2))))
    buffer = mega_moe.get_symmetric_buffer(group, EXPERTS, MOST * len(ranks_of), TOP_K, HIDDEN, INNER, device=device)
    stats = torch.zeros(l1.num_experts, dtype=torch.int32, device=device)
    found = []
    for run in range(len(TOKENS)):
        x, ids, routing = (torch.cat(parts) for parts in zip(*(inputs(run, rank) for rank in ranks_of)))
        n = x.shape[0]
        buffer.x[:n].copy_(x), buffer.topk_idx[:n].copy_(ids), buffer.topk_weights[:n].copy_(routing)
        y = torch.empty((n, HIDDEN), dtype=torch.bfloat16, device=device)
        mega_moe.run(y, l1, l2, buffer, cumulative_local_expert_recv_stats=stats, activation_clamp=LIMIT)
        found.append(y.cpu())
    return found, stats.cpu()


def rank_main(rank, store, out, kind):
    device = f'cuda:{rank}' if kind == 'cuda' else 'cpu'
    torch.set_num_threads(1)
    if kind == 'cuda':
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group('nccl' if kind == 'cuda' else 'gloo', init_method=f'file://{store}', rank=rank, world_size=RANKS)
    local = EXPERTS // RANKS
    torch.save(answers(torch.distributed.group.WORLD, slice(rank * local, (rank + 1) * local), device, (rank,)), f'{out}/{rank}.pt')
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize('kind', COUNTS)
def test_every_token_gets_the_bits_of_one_rank(tmp_path, kind):
    if not torch.distributed.is_available():
        pytest.skip('PyTorch without torch.distributed')
    code = ('import sys, mega_moe_ranks_test as t; '
            f't.rank_main(int(sys.argv[1]), {str(tmp_path / "store")!r}, {str(tmp_path)!r}, {kind!r})')
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])}
    started = [subprocess.Popen([sys.executable, '-c', code, str(rank)], env=environment) for rank in range(RANKS)]
    try:
        assert [process.wait(240) for process in started] == [0] * RANKS
    finally:
        for process in started:
            process.kill()
    expected, counts = answers(None, slice(None), 'cuda:0' if kind == 'cuda' else 'cpu', range(RANKS))
    found = [torch.load(f'{tmp_path}/{rank}.pt') for rank in range(RANKS)]
    for run, whole in enumerate(expected):
        assert whole.shape[0] == sum(TOKENS[run]) and whole.any()
        assert torch.equal(torch.cat([of_rank[0][run] for of_rank in found]), whole)
    assert torch.equal(torch.cat([of_rank[1] for of_rank in found]), counts) and counts.sum() > 0
