#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tessera's NVFP4 kernels beside PyTorch's BF16 products on one GPU, as JSON. Not part of the build.

    compare.py LIBRARY [--device cuda:0] [--model flash] [--tokens 1,4,16,64,512] [--only TEXT] [--repeats 30] [--fp8]

LIBRARY is libtessera.so of a build for GPUs (docs/c_api.md). Both sides are called on torch tensors and one CUDA stream,
recorded as CUDA graphs, on the same random NVFP4 weights; PyTorch has them as BF16, which holds them exactly: their
global scale is a power of two. A row has the medians of both, checked against a product in FP64 before it is timed.

  linear    tessera_linear_run against torch.mm, what torch.nn.functional.linear calls, into memory that is there
  experts   tessera_moe_experts_run (w1, w3, SwiGLU, w2; grouped inside) against three torch._grouped_mm over tokens that
            were sorted by expert before, where this PyTorch has it. Sorting and spreading are not in PyTorch's time.
            With --fp8 also three torch._scaled_grouped_mm, inputs and weights rounded to E4M3 with a scale per row:
            lossy, so its error is told and not judged. Rounding inputs is in its time.
            With --module also tessera.torch.Experts (docs/python.md), which combines a token's experts too: what a model
            written in PyTorch calls. Python has to find the package tessera.
            Routing is even: as many different experts as B tokens reach on average, E (1 - (1 - k/E)^B), take turns.

Weights are cold: copies that together exceed --cold MiB are used in turn, so that none is still in the GPU's cache.
Needs PyTorch with CUDA and, for experts in BF16, memory for at least one model's layer (Flash: 12.9 GB).
"""
import argparse
import ctypes as c
import json
import math
import pathlib
import re
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / 'bindings' / 'c'))
from tessera_structs import LinearDesc, MoeDesc, MoeWeights, Weight  # noqa: E402

# Of config.json of deepseek-ai/DeepSeek-V4-Flash and -Pro: (name, out, in) of one group, and the experts.
SHAPES = {
    'flash': {'linear': [('wq_b', 32768, 1024), ('wo_b', 4096, 8192)],
              'experts': {'hidden': 4096, 'inner': 2048, 'count': 256, 'top_k': 6, 'limit': 10.0}},
    'pro': {'linear': [('wq_b', 65536, 1536), ('wo_b', 7168, 16384)],
            'experts': {'hidden': 7168, 'inner': 3072, 'count': 384, 'top_k': 6, 'limit': 10.0}},
}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
BF16, NVFP4, INPUT_A16 = 1, 3, 1  # of tessera.h
BOUND = 4e-3                      # of the relative error of a BF16 output


def fail(message):
    sys.exit(f'compare.py: {message}')


def parse_tokens(text):
    """'1,16' as [1, 16]."""
    if not re.fullmatch(r'[1-9]\d{0,5}(,[1-9]\d{0,5})*', text):
        raise argparse.ArgumentTypeError(f'expected numbers with commas between them, found "{text}"')
    return [int(part) for part in text.split(',')]


def parse_count(text):
    if not re.fullmatch(r'[1-9]\d{0,6}', text):
        raise argparse.ArgumentTypeError(f'expected a number above 0, found "{text}"')
    return int(text)


def distinct_experts(count, top_k, tokens):
    """How many different experts `tokens` tokens reach on average under uniform routing; at least top_k."""
    return max(top_k, min(count, tokens * top_k, round(count * (1 - (1 - top_k / count) ** tokens))))


def even_routing(count, top_k, tokens):
    """top_k different experts of each token, ascending, that together are distinct_experts() ones."""
    reached = distinct_experts(count, top_k, tokens)
    spread = [i * count // reached for i in range(reached)]
    return [sorted(spread[(t * top_k + s) % reached] for s in range(top_k)) for t in range(tokens)]


def spread_of(samples):
    """Median and tenths of times in microseconds."""
    ordered = sorted(samples)
    at = lambda share: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)
    return {'median_us': round(statistics.median(ordered), 3), 'p10_us': at(0.1), 'p90_us': at(0.9)}


def copies_for(num_bytes, cold_bytes):
    return max(1, math.ceil(cold_bytes / num_bytes))


class Tessera:
    """libtessera.so on a torch stream."""

    def __init__(self, path, device, stream):
        try:
            self.lib = c.CDLL(str(pathlib.Path(path).resolve()))
        except OSError as error:
            fail(f'{path}: {error}')
        for name in ('version', 'error_message', 'linear_kernel', 'moe_kernel'):
            getattr(self.lib, 'tessera_' + name).restype = c.c_char_p
        self.context = c.c_void_p()
        self.check(self.lib.tessera_context_open(device.encode(), c.c_void_p(stream.cuda_stream or 1), 0, c.byref(self.context)))

    def check(self, status):
        if status != 0:
            fail(self.lib.tessera_error_message().decode())

    def close(self):
        self.lib.tessera_context_close(self.context)


class Quantised:
    """A random NVFP4 matrix [rows, cols] in the GPU's memory: all codes as likely, scales over four octaves."""

    def __init__(self, torch, rows, cols, device, generator):
        random = lambda low, high, *shape: torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=generator)
        self.codes, self.scales = random(0, 256, rows, cols // 2), random(0x28, 0x48, rows, cols // 16)
        self.scale = 2.0 ** round(-math.log2(4.97 * math.sqrt(cols)))  # rows of about unit length
        self.shape = (rows, cols)

    def struct(self):
        return Weight(NVFP4, *self.shape, self.codes.data_ptr(), self.scales.data_ptr(), self.scale)

    def values(self, torch, dtype):
        """Exact in BF16 too."""
        table = torch.tensor(E2M1, dtype=dtype, device=self.codes.device)
        codes = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).reshape(self.shape).long()
        blocks = self.scales.view(torch.float8_e4m3fn).to(dtype).repeat_interleave(16, dim=1)
        return table[codes] * blocks * self.scale

    def num_bytes(self):
        return self.codes.numel() + self.scales.numel()


def relative_error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


def time_calls(torch, stream, calls, repeats):
    """Microseconds of calls[i](), in turn, each round recorded as one graph."""
    for call in calls:
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    samples = []
    for i in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        graph.replay()
        end.record(stream)
        end.synchronize()
        if i >= 3:  # the first ones warm up
            samples.append(start.elapsed_time(end) * 1000 / len(calls))
    return samples


def compare_linear(torch, tessera, stream, options, name, out, width):
    generator = torch.Generator(options.device).manual_seed(options.seed)
    first = Quantised(torch, out, width, options.device, generator)
    cold = options.cold << 20
    ours = [first] + [Quantised(torch, out, width, options.device, generator)
                      for _ in range(copies_for(first.num_bytes(), cold) - 1)]
    dense = [w.values(torch, torch.bfloat16) for w in ours[:copies_for(2 * out * width, cold)]]
    most = max(options.tokens)
    desc = LinearDesc(width, out, 1, INPUT_A16, BF16, BF16)
    handles = []
    for weight in ours:
        handle = c.c_void_p()
        tessera.check(tessera.lib.tessera_linear_create(tessera.context, c.byref(desc), c.byref(weight.struct()), c.c_int64(most), c.byref(handle)))
        handles.append(handle)
    x = torch.randn(most, width, device=options.device, generator=generator, dtype=torch.float32).bfloat16()
    y, z = (torch.empty(most, out, device=options.device, dtype=torch.bfloat16) for _ in range(2))
    # In parts: an FP64 copy of a large map would be gigabytes.
    expected = torch.cat([x.double() @ part.double().T for part in first.values(torch, torch.float32).split(1024)], 1)
    rows = []
    for tokens in options.tokens:
        run = lambda handle: tessera.check(tessera.lib.tessera_linear_run(handle, c.c_void_p(x.data_ptr()), c.c_void_p(y.data_ptr()), c.c_int64(tokens)))
        y.fill_(math.nan)
        run(handles[0])
        stream.synchronize()
        multiply = lambda weight: torch.mm(x[:tokens], weight.T, out=z[:tokens])
        multiply(dense[0])
        stream.synchronize()
        errors = relative_error(y[:tokens], expected[:tokens]), relative_error(z[:tokens], expected[:tokens])
        if not max(errors) < 2 * BOUND or not errors[0] < BOUND:
            fail(f'{name}, {tokens} tokens: relative errors {errors}: expected below {BOUND}')
        rows.append(row_of(f'linear {name} [{out}, {width}]', tokens, tessera.lib.tessera_linear_kernel(handles[0]).decode(),
                           time_calls(torch, stream, [lambda h=h: run(h) for h in handles], options.repeats), errors[0], first.num_bytes(),
                           {'torch_bf16': (time_calls(torch, stream, [lambda w=w: multiply(w) for w in dense], options.repeats), errors[1])}))
    for handle in handles:
        tessera.lib.tessera_linear_destroy(handle)
    return rows


def row_of(name, tokens, kernel, ours, error, num_bytes, others):
    row = {'name': name, 'tokens': tokens, 'weight_bytes': num_bytes,
           'tessera': {'kernel': kernel, 'relative_error': error, **spread_of(ours), 'samples_us': [round(s, 3) for s in ours]}}
    for other, (samples, other_error) in others.items():
        row[other] = {'relative_error': other_error, **spread_of(samples), 'samples_us': [round(s, 3) for s in samples]}
        row[f'times_{other}'] = round(row[other]['median_us'] / row['tessera']['median_us'], 3)
    return row


def swiglu(torch, gate, up, limit):
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def compare_experts(torch, tessera, stream, options, hidden, inner, count, top_k, limit):
    generator = torch.Generator(options.device).manual_seed(options.seed)
    shapes = {'w1': (inner, hidden), 'w3': (inner, hidden), 'w2': (hidden, inner)}
    # All experts of a layer are far more than a cache; one token alone uses different ones in turn (below).
    weights = {name: [Quantised(torch, *shape, options.device, generator) for _ in range(count)] for name, shape in shapes.items()}
    arrays = {name: (Weight * count)(*[w.struct() for w in all_of]) for name, all_of in weights.items()}
    most = max(options.tokens)
    desc = MoeDesc(hidden, inner, count, 0, count, top_k, INPUT_A16, INPUT_A16, BF16, limit, 1.0, 1)
    handle = c.c_void_p()
    tessera.check(tessera.lib.tessera_moe_create(tessera.context, c.byref(desc), c.byref(MoeWeights(arrays['w1'], arrays['w3'], arrays['w2'])),
                                                 c.c_int64(most), c.byref(handle)))
    has_grouped = hasattr(torch, '_grouped_mm')
    # [experts, in, out] as _grouped_mm takes its second matrix: each expert's is the transpose of a row-major one.
    dense = {name: torch.stack([w.values(torch, torch.bfloat16) for w in all_of]).transpose(1, 2)
             for name, all_of in weights.items()} if has_grouped else {}
    bytes_of_expert = sum(all_of[0].num_bytes() for all_of in weights.values())
    module = module_of(torch, weights, top_k, limit, most) if options.module else None
    rounded = {name: rounded_experts(torch, all_of) for name, all_of in weights.items()} if options.fp8 else {}
    rows = []
    for tokens in options.tokens:
        x = torch.randn(tokens, hidden, device=options.device, generator=generator, dtype=torch.float32).bfloat16()
        routing = torch.full((tokens, top_k), 1 / top_k, device=options.device)
        chosen = even_routing(count, top_k, tokens)
        reached = len({e for row in chosen for e in row})
        rounds = min(count // top_k, copies_for(reached * bytes_of_expert, options.cold << 20))
        # Round r uses the experts r further on.
        tables = [torch.tensor([sorted((e + r) % count for e in row) for row in chosen], dtype=torch.int32, device=options.device)
                  for r in range(rounds)]
        out = torch.full((tokens, top_k, hidden), math.nan, device=options.device, dtype=torch.bfloat16)

        def run(table):
            tessera.check(tessera.lib.tessera_moe_experts_run(handle, c.c_void_p(x.data_ptr()), c.c_void_p(table.data_ptr()),
                                                              c.c_void_p(routing.data_ptr()), c.c_void_p(out.data_ptr()), c.c_int64(tokens)))

        run(tables[0])
        stream.synchronize()
        token = tokens - 1
        expected = torch.stack([expert_in_double(torch, weights, e, x[token].double(), limit) for e in tables[0][token].tolist()]) / top_k
        error = relative_error(out[token], expected)
        if not error < 2 * BOUND:  # two roundings to BF16 follow each other
            fail(f'experts, {tokens} tokens: relative error {error}: expected below {2 * BOUND}')
        others, calls = {}, {}
        if has_grouped:
            calls['torch_grouped_bf16'] = lambda sorted_x, ends: grouped_experts(torch, sorted_x, ends, dense, limit)
        if options.fp8:
            calls['torch_scaled_grouped_fp8'] = lambda sorted_x, ends: scaled_experts(torch, sorted_x, ends, rounded, limit)
        grouped = [group(torch, table, x, top_k, count) for table in tables] if calls else []
        for other, call in calls.items():
            back = call(*grouped[0][:2])
            slot = int((grouped[0][2] == token * top_k).nonzero())  # the token's first expert
            other_error = relative_error(back[slot] / top_k, expected[0])
            if other == 'torch_grouped_bf16' and not other_error < 10 * BOUND:
                fail(f'experts, {tokens} tokens: torch._grouped_mm has a relative error of {other_error}')
            others[other] = (time_calls(torch, stream, [lambda g=g: call(*g[:2]) for g in grouped], options.repeats), other_error)
        if module is not None:
            summed = module(x, tables[0], routing)[token]
            module_error = relative_error(summed, expected.sum(0))
            if not module_error < 2 * BOUND:
                fail(f'experts, {tokens} tokens: tessera.torch.Experts has a relative error of {module_error}')
            others['tessera_module'] = (time_calls(torch, stream, [lambda t=t: module(x, t, routing) for t in tables],
                                                   options.repeats), module_error)
        rows.append(row_of(f'experts top {top_k} of {count} [{inner}, {hidden}], {reached} reached', tokens,
                           tessera.lib.tessera_moe_kernel(handle).decode(),
                           time_calls(torch, stream, [lambda t=t: run(t) for t in tables], options.repeats), error,
                           reached * bytes_of_expert, others))
    tessera.lib.tessera_moe_destroy(handle)
    return rows


def module_of(torch, weights, top_k, limit, most):
    """tessera.torch.Experts on the same weights."""
    import tessera.torch
    stacked = [(torch.stack([w.codes for w in all_of]), torch.stack([w.scales for w in all_of]),
                torch.tensor([w.scale for w in all_of])) for all_of in weights.values()]
    return tessera.torch.Experts(*stacked, top_k=top_k, swiglu_limit=limit, max_tokens=(most + 7) // 8 * 8)


def expert_in_double(torch, weights, expert, x, limit):
    w1, w3, w2 = (weights[name][expert].values(torch, torch.float64) for name in ('w1', 'w3', 'w2'))
    return w2 @ swiglu(torch, w1 @ x, w3 @ x, limit)


def group(torch, table, x, top_k, count):
    """Rows of x sorted by expert, the end of each expert's rows, and which slot each row is."""
    order = torch.argsort(table.flatten(), stable=True)
    ends = torch.cumsum(torch.bincount(table.flatten().long(), minlength=count), 0).to(torch.int32)
    return x[order // top_k].contiguous(), ends, order


def grouped_experts(torch, x, ends, dense, limit):
    multiply = lambda rows, name: torch._grouped_mm(rows, dense[name], offs=ends)
    return multiply(swiglu(torch, multiply(x, 'w1'), multiply(x, 'w3'), limit), 'w2')


def to_e4m3(torch, values):
    """E4M3 with a scale per row of the last dimension."""
    scales = values.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448
    return (values.float() / scales).to(torch.float8_e4m3fn), scales.squeeze(-1)


def rounded_experts(torch, all_of):
    pairs = [to_e4m3(torch, w.values(torch, torch.bfloat16)) for w in all_of]
    return torch.stack([codes for codes, _ in pairs]).transpose(1, 2), torch.stack([s for _, s in pairs])


def scaled_experts(torch, x, ends, rounded, limit):
    def multiply(values, name):
        codes, scales = to_e4m3(torch, values)
        return torch._scaled_grouped_mm(codes, rounded[name][0], scales, rounded[name][1], offs=ends, out_dtype=torch.bfloat16)
    return multiply(swiglu(torch, multiply(x, 'w1'), multiply(x, 'w3'), limit), 'w2')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('library', help='libtessera.so')
    parser.add_argument('--device', default='cuda:0')
    parser.add_argument('--model', default='flash', choices=sorted(SHAPES))
    parser.add_argument('--tokens', type=parse_tokens, default=[1, 4, 16, 64, 512])
    parser.add_argument('--only', default='', help='rows whose name contains this: wq_b, wo_b, experts')
    parser.add_argument('--repeats', type=parse_count, default=30)
    parser.add_argument('--cold', type=parse_count, default=512, metavar='MIB', help='weights used in turn (512)')
    parser.add_argument('--fp8', action='store_true', help='experts by torch._scaled_grouped_mm too')
    parser.add_argument('--module', action='store_true', help='experts by tessera.torch.Experts too')
    parser.add_argument('--seed', type=parse_count, default=1)
    options = parser.parse_args()
    if not re.fullmatch(r'cuda:\d+', options.device):
        fail(f'--device: expected cuda:N, found "{options.device}"')
    if not pathlib.Path(options.library).is_file():
        fail(f'{options.library}: no such file')
    try:
        import torch
    except ImportError:
        fail('this needs PyTorch with CUDA (package torch)')
    if not torch.cuda.is_available():
        fail('PyTorch sees no GPU')
    if options.fp8 and not hasattr(torch, '_scaled_grouped_mm'):
        fail(f'--fp8: this PyTorch, {torch.__version__}, has no torch._scaled_grouped_mm')
    torch.cuda.set_device(options.device)
    stream = torch.cuda.Stream(options.device)
    shapes, rows = SHAPES[options.model], []
    with torch.cuda.stream(stream), torch.inference_mode():
        tessera = Tessera(options.library, options.device, stream)
        for name, out, width in shapes['linear']:
            if options.only in name:
                rows += compare_linear(torch, tessera, stream, options, name, out, width)
                torch.cuda.empty_cache()
        if options.only in 'experts':
            rows += compare_experts(torch, tessera, stream, options, **{k: v for k, v in shapes['experts'].items()})
        version = tessera.lib.tessera_version().decode()
        tessera.close()
    if not rows:
        fail(f'--only: nothing is named "{options.only}"')
    print(json.dumps({'gpu': torch.cuda.get_device_name(options.device), 'torch': torch.__version__, 'cuda': torch.version.cuda,
                      'tessera': version, 'model': options.model, 'seed': options.seed, 'repeats': options.repeats,
                      'cold_mib': options.cold, 'has_grouped_mm': hasattr(torch, '_grouped_mm'), 'rows': rows}, indent=1))


if __name__ == '__main__':
    main()
