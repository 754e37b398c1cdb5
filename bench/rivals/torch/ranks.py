#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tessera.mega_moe on several GPUs of one machine: ranks that exchange rows through their GPUs' memory beside ranks that gather
with torch.distributed (NCCL), as JSON. Not part of the build. Python has to find the package tessera, built for GPUs.

    ranks.py --json PATH [--gpus 2] [--tokens 8,32,128] [--samples 9] [--calls 24] [--turns 2] [--commit HASH]
    ranks.py --json PATH --try      two CPU processes that gather, small experts: whether the script runs

Flash's experts, 256 of [2048, 4096], 6 to a token, chosen alike, random NVFP4 weights. Each rank has as many tokens, and the
buffer room for no more. A sample is so many calls behind each other, of other tokens each, in one CUDA graph or launched one by
one; its time is that of the slowest rank by the host's clock, from a barrier to the end of the GPU's work, over the calls. No
copies into the buffer are in it, since its tensors are exchanged for others between calls. Both ways take turns, and their
outputs have to have the same bits, in each replay and round too.
"""
import argparse
import contextlib
import datetime
import json
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from compare import parse_count, parse_tokens, spread_of  # noqa: E402

FLASH = {'experts': 256, 'top_k': 6, 'hidden': 4096, 'inner': 2048, 'limit': 10.0}
SMALL = {'experts': 8, 'top_k': 3, 'hidden': 128, 'inner': 32, 'limit': 10.0}


def fail(message):
    sys.exit(f'ranks.py: {message}')


def random_stack(torch, count, rows, cols, device, generator):
    """codes, block scales over four octaves, and a tensor scale for rows of about unit length."""
    random = lambda low, high, *shape: torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=generator)
    scale = 2.0 ** round(-0.5 * (cols - 1).bit_length() - 2.3)
    return random(0, 256, count, rows, cols // 2), random(0x28, 0x48, count, rows, cols // 16), scale


class Calls:
    """The inputs of as many calls, and a buffer that they are put in turn."""

    def __init__(self, torch, mega_moe, options, shape, tokens, way, device):
        group = torch.distributed.group.WORLD
        generator = torch.Generator(device).manual_seed(100 * tokens + group.rank())
        self.limit, self.inputs, self.outputs = shape['limit'], [], []
        self.buffer = mega_moe.get_symmetric_buffer(group, shape['experts'], tokens, shape['top_k'], shape['hidden'], shape['inner'],
                                                    device=device, exchange=way == 'exchange')
        for _ in range(options.calls):
            keys = torch.rand(tokens, shape['experts'], device=device, generator=generator)
            x = torch.randn(tokens, shape['hidden'], device=device, generator=generator).bfloat16()
            routing = torch.full((tokens, shape['top_k']), 1 / shape['top_k'], device=device)
            self.inputs.append((x, keys.topk(shape['top_k']).indices.contiguous(), routing))
            self.outputs.append(torch.empty_like(x))

    def run(self, mega_moe, weights):
        for (self.buffer.x, self.buffer.topk_idx, self.buffer.topk_weights), y in zip(self.inputs, self.outputs):
            mega_moe.run(y, *weights, self.buffer, activation_clamp=self.limit)


def microseconds(torch, call, options, is_gpu):
    """Of each sample; the first one only warms up."""
    wait = torch.cuda.synchronize if is_gpu else (lambda: None)
    samples = []
    for _ in range(options.samples + 1):
        wait()
        torch.distributed.barrier()
        wait()
        begin = time.perf_counter()
        call()
        wait()
        samples.append((time.perf_counter() - begin) * 1e6 / options.calls)
    return samples[1:]


def times_of(torch, mega_moe, options, shape, tokens, way, weights, device):
    """What (graph, launches) took, the outputs of the first round, and whether those of the last replay and round are the same."""
    calls, is_gpu, found = Calls(torch, mega_moe, options, shape, tokens, way, device), device != 'cpu', {}
    run = lambda: calls.run(mega_moe, weights)
    run()
    outputs = [y.clone() for y in calls.outputs]
    is_same = lambda: all(torch.equal(a, b) for a, b in zip(outputs, calls.outputs))
    are_kept = True
    if is_gpu:
        torch.cuda.synchronize()
        graph, why = torch.cuda.CUDAGraph(), ''
        try:
            with torch.cuda.graph(graph, capture_error_mode='thread_local'):
                run()
        except RuntimeError as error:
            why = str(error).splitlines()[0]
        every = [None] * options.gpus  # a replay waits for all ranks'
        torch.distributed.all_gather_object(every, why)
        if any(every):
            found['graph'] = next(why for why in every if why)
        else:
            found['graph'] = microseconds(torch, graph.replay, options, is_gpu)
            are_kept = is_same()
        del graph
    found['launches'] = microseconds(torch, run, options, is_gpu)
    are_kept = are_kept and is_same()
    calls.buffer.destroy()
    return found, outputs, are_kept


def rank_main(rank, options, folder):
    import torch
    import tessera.mega_moe as mega_moe
    is_gpu, shape = not options.try_, SMALL if options.try_ else FLASH
    device = f'cuda:{rank}' if is_gpu else 'cpu'
    with torch.cuda.device(rank) if is_gpu else contextlib.nullcontext():
        torch.distributed.init_process_group('nccl' if is_gpu else 'gloo', init_method=f'file://{folder}/store', rank=rank,
                                             world_size=options.gpus)
        generator = torch.Generator(device).manual_seed(rank + 1)
        local = shape['experts'] // options.gpus
        weights = mega_moe.transform_weights(random_stack(torch, local, 2 * shape['inner'], shape['hidden'], device, generator),
                                             random_stack(torch, local, shape['hidden'], shape['inner'], device, generator))
        rows, ways = [], ('exchange', 'gather') if is_gpu else ('gather',)
        for tokens in options.tokens:
            expected = None
            for turn in range(options.turns):
                for way in ways:
                    found, outputs, are_kept = times_of(torch, mega_moe, options, shape, tokens, way, weights, device)
                    expected = outputs if expected is None else expected
                    is_same = are_kept and all(torch.equal(a, b) and bool(torch.isfinite(a).all()) for a, b in zip(outputs, expected))
                    every = [None] * options.gpus
                    torch.distributed.all_gather_object(every, (found, is_same))
                    rows += rows_of(way, turn, tokens, every)
                    if rank == 0:
                        print(*(json.dumps({k: v for k, v in row.items() if k != 'us'}) for row in rows[-len(found):]), sep='\n',
                              file=sys.stderr, flush=True)
        if rank == 0:
            write(torch, options, shape, rows)
        torch.distributed.destroy_process_group()


def rows_of(way, turn, tokens, every):
    """A row for each way to launch, from what every rank found."""
    rows, are_same = [], all(is_same for _, is_same in every)
    for launch in every[0][0]:
        row = {'way': way, 'launch': launch, 'turn': turn, 'tokens_of_a_rank': tokens, 'same_bits': are_same}
        of_ranks = [found[launch] for found, _ in every]
        errors = [one for one in of_ranks if isinstance(one, str)]
        if errors:
            rows.append({**row, 'error': errors[0]})
            continue
        slowest = [max(samples) for samples in zip(*of_ranks)]
        rows.append({**row, **spread_of(slowest), 'us': [round(us, 3) for us in slowest]})
    return rows


def write(torch, options, shape, rows):
    is_gpu = not options.try_
    record = {'what': 'tessera.mega_moe on several ranks: exchange beside gather', 'date': datetime.date.today().isoformat(),
              'device': f'{options.gpus} x {torch.cuda.get_device_name(0)}' if is_gpu else f'{options.gpus} CPU processes',
              'commit': options.commit, 'command': sys.argv,
              'torch': torch.__version__, 'cuda': torch.version.cuda, 'nccl': list(torch.cuda.nccl.version()) if is_gpu else None,
              'shape': shape, 'calls': options.calls, 'rows': rows}
    pathlib.Path(options.json).write_text(json.dumps(record, indent=1) + '\n')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', required=True, metavar='PATH')
    parser.add_argument('--gpus', type=parse_count, default=2)
    parser.add_argument('--tokens', type=parse_tokens, default=[8, 32, 128])
    parser.add_argument('--samples', type=parse_count, default=9)
    parser.add_argument('--calls', type=parse_count, default=24)
    parser.add_argument('--turns', type=parse_count, default=2)
    parser.add_argument('--commit', default='unknown', help='that the package was built at')
    parser.add_argument('--try', dest='try_', action='store_true')
    options = parser.parse_args()
    experts = (SMALL if options.try_ else FLASH)['experts']
    if experts % options.gpus:
        fail(f'--gpus: expected a divisor of {experts}, the experts, found {options.gpus}')
    try:
        import torch
    except ImportError:
        fail('this needs PyTorch (package torch)')
    if not options.try_ and torch.cuda.device_count() < options.gpus:
        fail(f'--gpus: expected at most the {torch.cuda.device_count()} that PyTorch sees, found {options.gpus}')
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (options, folder), options.gpus)
    if not all(row['same_bits'] for row in json.loads(pathlib.Path(options.json).read_text())['rows']):
        fail('exchange and gather gave different bits')


if __name__ == '__main__':
    main()
