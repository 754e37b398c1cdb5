#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own operators at DeepSeek-V4's shapes beside Tessera's ops, on one GPU, as JSON. Not part of the build.

    operators.py [PROGRAM] [--device cuda:0] [--only linear,experts,attention,scores] [--repeats 20] [--cold 512]

PROGRAM is tessera, built for GPUs: its rows of the same shapes (`tessera bench targets --only`) are measured by itself, in
the same run. Without it there are PyTorch's rows alone. Each row is checked against FP64 on some outputs before it is timed.

  linear     torch.mm in BF16 (cuBLASLt); torch._scaled_mm on E4M3 with a scale per row, and with one per 128 inputs and
             per 128 x 128 weights (as FP8 checkpoints have them). Rounding inputs to E4M3 is not in the times.
  experts    Flash's routed experts: torch._grouped_mm in BF16 and torch._scaled_grouped_mm on E4M3 with a scale per row, over
             rows that are sorted by expert, gate and up as one product, SwiGLU and down. Of E4M3 the inputs of `down` are
             rounded in the time, for they exist only then; the first inputs are not.
  attention  torch.nn.functional.scaled_dot_product_attention over BF16 keys that are gathered already, one key for all heads.
             No sink: it has none. Which kernel PyTorch takes for heads of 512 channels is left to it.
  scores     the indexer in BF16: products by torch.matmul, relu and the weighted sum of heads.

Weights are cold: copies that together exceed --cold MiB are used in turn. Calls are recorded as one CUDA graph.
"""
import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from compare import copies_for, even_routing, parse_count, relative_error, spread_of, swiglu, time_calls, to_e4m3  # noqa: E402

MAPS = {'wq_b': (32768, 1024), 'wo_b': (4096, 8192)}
MAP_TOKENS, EXPERT_TOKENS, BATCHES = [1, 64, 256, 1024, 4096], [1, 4, 16, 64, 256, 10923], [1, 8, 32, 128]
HIDDEN, INNER, EXPERTS, TOP_K, LIMIT = 4096, 2048, 256, 6, 10.0
ATTENTION = {'flash': (64, 128 + 512), 'pro': (128, 128 + 1024)}  # heads, keys
SCORES = [(32768, [1, 256]), (262144, [1, 32])]                   # index keys of 128K and of 1M, tokens at once
INDEX_HEADS, INDEX_WIDTH = 64, 128
OURS = {'linear': ['linear flash wq_b', 'linear flash wo_b'], 'experts': ['moe_experts flash'], 'attention': ['attention '],
        'scores': ['index_scores']}
BF16_BOUND, E4M3_BOUND = 1e-2, 6e-2  # of the relative error of one product


def fail(message):
    sys.exit(f'operators.py: {message}')


class Rows:
    """Rows as they are measured; a line of each on stderr."""

    def __init__(self, torch, stream, options):
        self.torch, self.stream, self.options, self.all = torch, stream, options, []

    def add(self, what, operator, tokens, num_bytes, flops, calls, error, bound):
        if not error < bound:
            fail(f'{what}, {operator}, {tokens} tokens: relative error {error}: expected below {bound}')
        samples = time_calls(self.torch, self.stream, calls, self.options.repeats)
        row = {'what': what, 'operator': operator, 'tokens': tokens, 'relative_error': error, 'bytes': num_bytes, 'flops': flops,
               **spread_of(samples), 'tflops': round(flops / statistics.median(samples) * 1e-6, 2),
               'samples_us': [round(s, 3) for s in samples]}
        self.all.append(row)
        print(f'{what} {operator} {tokens}: {row["median_us"]} us, error {error:.1e}', file=sys.stderr)

    def refused(self, what, operator, tokens, error):
        self.all.append({'what': what, 'operator': operator, 'tokens': tokens, 'refused': str(error).splitlines()[0][:200]})


def by_blocks(torch, values, rows):
    """E4M3 with a scale for each `rows` x 128 values, and the scales."""
    height, width = values.shape
    parts = values.view(height // rows, rows, width // 128, 128).float()
    scales = parts.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / 448
    return (parts / scales).to(torch.float8_e4m3fn).view(height, width), scales.view(height // rows, width // 128)


def linear(torch, rows, device):
    for name, (out, width) in MAPS.items():
        scale = 1 / math.sqrt(width)
        copies = copies_for(out * width, rows.options.cold << 20)
        weights = [torch.randn(out, width, device=device, dtype=torch.bfloat16) * scale for _ in range(copies)]
        per_row = [to_e4m3(torch, w) for w in weights]
        per_block = [by_blocks(torch, w, 128) for w in weights]
        most = torch.randn(max(MAP_TOKENS), width, device=device, dtype=torch.bfloat16)
        for tokens in MAP_TOKENS:
            x = most[:tokens]
            expected = x[:64].double() @ weights[0].double().T
            flops, what = 2 * tokens * out * width, f'linear flash {name} [{out}, {width}]'
            z = torch.empty(tokens, out, device=device, dtype=torch.bfloat16)
            calls = [lambda w=w: torch.mm(x, w.T, out=z) for w in weights]
            rows.add(what, 'torch.mm bf16', tokens, 2 * out * width, flops, calls, relative_error(calls[0]()[:64], expected), BF16_BOUND)
            codes, scales = to_e4m3(torch, x)
            blocked, blocks = by_blocks(torch, x, 1)
            columns = blocks.T.contiguous().T  # a row's scale follows that of the row before
            multiply = lambda a, w, a_scale, w_scale: torch._scaled_mm(a, w.T, a_scale, w_scale, out_dtype=torch.bfloat16)
            for operator, calls in (('rows', [lambda w=w: multiply(codes, w[0], scales[:, None], w[1][None, :]) for w in per_row]),
                                    ('blocks', [lambda w=w: multiply(blocked, w[0], columns, w[1].T) for w in per_block])):
                try:
                    error = relative_error(calls[0]()[:64], expected)
                except (RuntimeError, ValueError) as refusal:
                    rows.refused(what, f'torch._scaled_mm e4m3 by {operator}', tokens, refusal)
                    continue
                rows.add(what, f'torch._scaled_mm e4m3 by {operator}', tokens, out * width, flops, calls, error, E4M3_BOUND)


def experts(torch, rows, device):
    # [experts, in, out], each the transpose of a row-major matrix.
    random = lambda out, width: (torch.randn(EXPERTS, out, width, device=device, dtype=torch.bfloat16) / math.sqrt(width)).transpose(1, 2)
    up, down = random(2 * INNER, HIDDEN), random(HIDDEN, INNER)
    rounded = []
    for dense in (up, down):
        pairs = [to_e4m3(torch, part.T.contiguous()) for part in dense]
        rounded.append((torch.stack([codes for codes, _ in pairs]).transpose(1, 2), torch.stack([s for _, s in pairs])))

    def in_bf16(x, ends):
        gate, raised = torch._grouped_mm(x, up, offs=ends).chunk(2, 1)
        return torch._grouped_mm(swiglu(torch, gate, raised, LIMIT), down, offs=ends)

    def in_e4m3(codes, scales, ends):
        multiply = lambda c, s, w: torch._scaled_grouped_mm(c, w[0], s, w[1], offs=ends, out_dtype=torch.bfloat16)
        gate, raised = multiply(codes, scales, rounded[0]).chunk(2, 1)
        return multiply(*to_e4m3(torch, swiglu(torch, gate, raised, LIMIT)), rounded[1])

    for tokens in EXPERT_TOKENS:
        table = torch.tensor(even_routing(EXPERTS, TOP_K, tokens), device=device)
        reached = int(table.unique().numel())
        num_bytes = reached * 3 * INNER * HIDDEN
        rounds = min(EXPERTS // TOP_K, copies_for(num_bytes, rows.options.cold << 20))
        groups = []
        for r in range(rounds):  # round r uses the experts r further on
            chosen = ((table + r) % EXPERTS).flatten().sort().values
            ends = torch.cumsum(torch.bincount(chosen, minlength=EXPERTS), 0).to(torch.int32)
            groups.append((torch.randn(chosen.numel(), HIDDEN, device=device, dtype=torch.bfloat16), ends, int(chosen[0])))
        x, _, first = groups[0]
        gate, raised = (x[0].double() @ up[first].double()).chunk(2)
        expected = swiglu(torch, gate, raised, LIMIT) @ down[first].double()
        codes = [(*to_e4m3(torch, g[0]), g[1]) for g in groups]
        flops, what = 6 * tokens * TOP_K * HIDDEN * INNER, f'experts flash, {reached} reached'
        for operator, size, calls, bound in (('torch._grouped_mm bf16', 2, [lambda g=g: in_bf16(*g[:2]) for g in groups], BF16_BOUND),
                                             ('torch._scaled_grouped_mm e4m3 by rows', 1, [lambda c=c: in_e4m3(*c) for c in codes], 2 * E4M3_BOUND)):
            rows.add(what, operator, tokens, size * num_bytes, flops, calls, relative_error(calls[0]()[0], expected), bound)


def attention(torch, rows, device):
    for name, (heads, keys) in ATTENTION.items():
        for tokens in BATCHES:
            q = torch.randn(tokens, 1, heads, 512, device=device, dtype=torch.bfloat16)
            kv = torch.randn(tokens, 1, keys, 512, device=device, dtype=torch.bfloat16)
            call = lambda: torch.nn.functional.scaled_dot_product_attention(q, kv, kv)
            exact = torch.softmax(q[0, 0].double() @ kv[0, 0].double().T / math.sqrt(512), 1) @ kv[0, 0].double()
            rows.add(f'attention {name}, {heads} heads, {keys} keys', 'scaled_dot_product_attention bf16', tokens, tokens * keys * 1024,
                     4 * tokens * keys * heads * 512, [call] * 8, relative_error(call()[0, 0], exact), BF16_BOUND)


def scores(torch, rows, device):
    for entries, counts in SCORES:
        keys = torch.randn(entries, INDEX_WIDTH, device=device, dtype=torch.bfloat16)
        for tokens in counts:
            q = torch.randn(tokens * INDEX_HEADS, INDEX_WIDTH, device=device, dtype=torch.bfloat16)
            weights = torch.randn(tokens, 1, INDEX_HEADS, device=device, dtype=torch.bfloat16)

            def call():
                return torch.matmul(weights, torch.matmul(q, keys.T).relu_().view(tokens, INDEX_HEADS, entries))[:, 0]

            exact = (weights[0].double() @ (q[:INDEX_HEADS].double() @ keys[:4096].double().T).relu())[0]
            rows.add(f'index_scores flash, {entries} keys', 'torch.matmul bf16', tokens, entries * INDEX_WIDTH * 2,
                     2 * tokens * entries * INDEX_HEADS * INDEX_WIDTH, [call] * 4, relative_error(call()[0, :4096], exact), BF16_BOUND)


PARTS = {'linear': linear, 'experts': experts, 'attention': attention, 'scores': scores}


def ours(program, device, parts):
    """The program's own rows of these parts."""
    found = {'rows': []}
    for only in [name for part in parts for name in OURS[part]]:
        with tempfile.TemporaryDirectory() as folder:
            record = pathlib.Path(folder) / 'record.json'
            command = [*program, 'bench', 'targets', '--device', device, '--only', only, '--record', str(record)]
            done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
            if not record.is_file():
                fail(f'{" ".join(command)}: {done.stderr.strip()}')
            part = json.loads(record.read_text())
            found.update({key: value for key, value in part.items() if key not in ('rows', 'seconds')})
            found['rows'] += [{k: v for k, v in row.items() if k != 'read_seconds'} for row in part['rows']]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('program', nargs='*', help='tessera, or what runs it')
    parser.add_argument('--device', default='cuda:0')
    parser.add_argument('--only', default=','.join(PARTS), help='parts, with commas between them')
    parser.add_argument('--repeats', type=parse_count, default=20)
    parser.add_argument('--cold', type=parse_count, default=512, metavar='MIB', help='weights used in turn (512)')
    options = parser.parse_args()
    parts = options.only.split(',')
    for part in parts:
        if part not in PARTS:
            fail(f'--only: expected {", ".join(PARTS)}, found "{part}"')
    try:
        import torch
    except ImportError:
        fail('this needs PyTorch with CUDA (package torch)')
    if not torch.cuda.is_available():
        fail('PyTorch sees no GPU')
    torch.cuda.set_device(options.device)
    torch.manual_seed(1)
    stream = torch.cuda.Stream(options.device)
    rows = Rows(torch, stream, options)
    record = {'gpu': torch.cuda.get_device_name(options.device), 'torch': torch.__version__, 'cuda': torch.version.cuda}
    with torch.cuda.stream(stream), torch.inference_mode():
        for part in parts:
            PARTS[part](torch, rows, options.device)
            torch.cuda.empty_cache()
    record['torch_rows'] = rows.all
    if options.program:
        record['tessera'] = ours(options.program, options.device, parts)
    print(json.dumps(record))


if __name__ == '__main__':
    main()
