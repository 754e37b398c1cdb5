# SPDX-License-Identifier: Apache-2.0
"""tessera.ops on NumPy arrays (on PyTorch's in torch_test.py): values against NumPy, and arrays that must be refused."""
import shutil
import subprocess
import sys
import threading
import time

import pytest

np = pytest.importorskip('numpy')

from tessera import DeviceError, InvalidArgument, Unsupported, _tessera, ops  # noqa: E402


@pytest.fixture(scope='module')
def cpu():
    return ops.Context('cpu', num_threads=1)


def bf16(x):
    """Rounded to BF16: its bits, and its values."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded, values(rounded)


def values(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def nvfp4(cpu, *shape, seed=0):
    """A random weight (codes, scales, tensor scale) and its values; a stack of them for three sizes."""
    parts = [cpu.quantize_nvfp4(w, 'tensor') for w in normal(*shape, seed=seed).reshape(-1, *shape[-2:])]
    dense = [cpu.dequantize_nvfp4(*part) for part in parts]
    if len(shape) == 2:
        return ops.Weight(cpu, parts[0][0], parts[0][1], [float(parts[0][2][0])]), dense[0]
    stack = [np.stack([part[i] for part in parts]) for i in range(2)]
    return ops.Weight(cpu, *stack, [float(part[2][0]) for part in parts]), np.stack(dense)


def test_quantisation_is_close_and_shaped(cpu):
    x = normal(5, 64)
    codes, scales, rows = cpu.quantize_nvfp4(x)
    assert (codes.shape, scales.shape, rows.shape) == ((5, 32), (5, 4), (5,)) and codes.dtype == np.uint8
    back = cpu.dequantize_nvfp4(codes, scales, rows)
    assert back.dtype == np.float32 and np.abs(back - x).max() < 0.17 * np.abs(x).max()
    again = cpu.quantize_nvfp4(bf16(x)[0])
    assert np.abs(cpu.dequantize_nvfp4(*again) - x).max() < 0.17 * np.abs(x).max()
    for rule in ('tensor', 'four-over-six'):
        assert cpu.quantize_nvfp4(x, rule)[2].shape == (1,)
    out = np.zeros_like(codes), np.zeros_like(scales), np.zeros_like(rows)
    made = cpu.quantize_nvfp4(x, out=out)
    assert made[0] is out[0] and all(np.array_equal(a, b) for a, b in zip(out, (codes, scales, rows)))


def test_a_linear_map_is_numpys(cpu):
    weight, dense = nvfp4(cpu, 48, 64)
    assert weight.format == 'nvfp4' and weight.shape == (1, 48, 64)
    linear = ops.Linear(weight, max_tokens=8, output='float32')
    bits, x = bf16(normal(8, 64, seed=1))
    y = linear(bits)
    assert y.dtype == np.float32 and np.abs(y - x @ dense.T).max() < 1e-4 * np.abs(x @ dense.T).max() and '.' in linear.kernel
    assert np.array_equal(linear(bits[:3]), y[:3])  # a token's bits do not depend on its neighbours
    out = np.zeros_like(y)
    assert linear(bits, out) is out and np.array_equal(out, y)
    exact = ops.Linear(ops.Weight(cpu, dense), input='f32')
    assert np.abs(exact(x) - x @ dense.T).max() < 1e-5 * np.abs(x @ dense.T).max()


def test_experts_and_the_mixture_are_numpys(cpu):
    experts, hidden, inner, top_k, tokens = 4, 64, 32, 2, 5
    (w1, d1), (w3, d3), (w2, d2) = (nvfp4(cpu, experts, *shape, seed=s) for s, shape in
                                    ((1, (inner, hidden)), (2, (inner, hidden)), (3, (hidden, inner))))
    moe = ops.Moe(w1, w3, w2, top_k=top_k, swiglu_limit=2.0, input='a16', max_tokens=8,
                  router=ops.Weight(cpu, normal(experts, hidden, seed=4)), router_bias=np.zeros(experts, np.float32))
    bits, x = bf16(normal(tokens, hidden, seed=5))
    ids = np.array([[0, 1], [1, 3], [2, 3], [0, 2], [0, 3]], np.int32)
    routing = np.full((tokens, top_k), 0.5, np.float32)
    out = values(moe.experts(bits, ids, routing))
    for t in range(tokens):
        for s, e in enumerate(ids[t]):
            gate, up = np.minimum(d1[e] @ x[t], 2), np.clip(d3[e] @ x[t], -2, 2)
            expected = d2[e] @ (gate / (1 + np.exp(-gate)) * up * routing[t, s])
            assert np.abs(out[t, s] - expected).max() < 0.02 * np.abs(expected).max()
    slots = moe.experts(bits, ids, routing)
    sums, into = values(slots)[:, 0] + values(slots)[:, 1], np.zeros((tokens, hidden), np.uint16)
    assert np.array_equal(moe.combine(slots), bf16(sums)[0]) and moe.combine(slots, into) is into and np.array_equal(into, bf16(sums)[0])
    whole = moe(bits)
    assert whole.shape == (tokens, hidden) and np.isfinite(values(whole)).all() and np.array_equal(moe(bits[:2]), whole[:2])


def test_attention_is_numpys(cpu):
    heads, width, window, slots = 3, 64, 4, 8
    attention = ops.Attention(cpu, heads=heads, head_dim=width, window=window, rope_dim=32, max_tokens=2)
    rows, keys = bf16(normal(slots, width, seed=1))
    cache = np.zeros((slots, attention.entry_bytes), np.uint8)
    attention.store(rows, np.arange(slots), cache)
    bits, q = bf16(normal(2, heads, width, seed=2))
    sink = np.zeros(heads, np.float32)
    out = values(attention(bits, np.array([5, 6]), cache, sink))
    for t, position in enumerate((5, 6)):
        seen = keys[position - window + 1:position + 1]
        weights = np.exp(q[t] @ seen.T * width**-0.5)
        expected = weights @ seen / (weights.sum(1, keepdims=True) + 1)
        assert np.abs(out[t] - expected).max() < 0.02


def test_indices_outside_of_what_they_index_are_refused(cpu):
    """Each would be read outside of its array."""
    attention = ops.Attention(cpu, heads=2, head_dim=64, window=2, max_tokens=2)
    cache, entries = (np.zeros((slots, attention.entry_bytes), np.uint8) for slots in (8, 4))
    q, sink, places = np.zeros((2, 2, 64), np.uint16), np.zeros(2, np.float32), np.array([5, 6])

    def step(counts, selected=None, positions=places, entries=entries):
        counts = None if counts is None else np.array(counts, np.int32)
        selected = None if selected is None else np.array(selected, np.int32)
        return attention(q, np.array(positions), cache, sink, entries, counts, selected)

    for call, words in (
        (lambda: step([4, 5]), r'num_entries\[1\]: expected 0 to 4, found 5'),
        (lambda: step([-1, 4]), r'num_entries\[0\]: expected 0 to 4, found -1'),
        (lambda: step([2, 3], [[0, 1], [2, 3]]), r'num_entries\[1\]: expected 0 to 2, found 3'),
        (lambda: step([2, 2], [[0, 1], [2, 4]]), r'selected\[1\]\[1\]: expected 0 to 3, found 4'),
        (lambda: step([2, 2], [[-1, 1], [2, 3]]), r'selected\[0\]\[0\]: expected 0 to 3, found -1'),
        (lambda: step([2, 2], positions=[0, -1]), r'positions\[1\]: expected 0 to .*, found -1'),
        (lambda: step([2, 2], entries=None), 'entry_cache: expected an array beside num_entries and selected, found None'),
        (lambda: step(None, [[0], [0]], entries=None), 'entry_cache: expected an array beside.*found None'),
        (lambda: attention.store(np.zeros((1, 64), np.uint16), np.array([8]), cache), r'slots\[0\]: expected -1 to 7, found 8'),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert step([4, 0]).shape == step([2, 1], [[0, 3], [1, 99]]).shape == q.shape  # past its length a list may hold anything


def test_arrays_that_are_refused(cpu):
    weight, _ = nvfp4(cpu, 48, 64)
    linear = ops.Linear(weight, max_tokens=4)
    x = np.zeros((2, 64), np.uint16)
    frozen = np.zeros((2, 48), np.uint16)
    frozen.flags.writeable = False
    for call, error, words in (
        (lambda: linear(x.astype(np.float32)), ValueError, 'x: expected bfloat16.*found float32'),
        (lambda: linear(x.astype(np.float64)), ValueError, 'float64'),
        (lambda: linear(np.zeros((2, 48), np.uint16)), ValueError, r'x: expected shape \[any, 64\], found \[2, 48\]'),
        (lambda: linear(np.zeros(64, np.uint16)), ValueError, r'found \[64\]'),
        (lambda: linear(np.zeros((2, 128), np.uint16)[:, ::2]), ValueError, 'contiguous'),
        (lambda: linear(np.zeros((64, 2), np.uint16).T), ValueError, 'contiguous'),
        (lambda: linear(x, np.zeros((3, 48), np.uint16)), ValueError, 'out'),
        (lambda: linear(x, frozen), ValueError, 'out: expected an array that can be written'),
        (lambda: linear(np.zeros((5, 64), np.uint16)), ValueError, 'num_tokens: expected 0 to 4, found 5'),
        (lambda: linear(np.zeros((2, 65), np.uint16).reshape(-1)[1:129].reshape(2, 64)), ValueError, 'aligned'),
        (lambda: linear([1.0]), TypeError, 'x: expected an array'),
        (lambda: linear(None), TypeError, 'x'),
        (lambda: cpu.quantize_nvfp4(np.zeros((2, 24), np.float32)), ValueError, 'multiples of 16'),
        (lambda: cpu.quantize_nvfp4(np.full((1, 16), np.nan, np.float32), 'tensor'), ArithmeticError, 'NaN'),
        (lambda: cpu.quantize_nvfp4(np.zeros((2, 16), np.float32), 'best'), ValueError, 'rule'),
        (lambda: cpu.quantize_nvfp4(np.zeros((2, 16), np.float32), 'a\n'), ValueError, r'rule: .*found "a\\'),
        (lambda: cpu.quantize_nvfp4(np.zeros((2, 16), np.float32), out=(x, x)), ValueError, 'out: expected 3 arrays.*found 2'),
        (lambda: cpu.quantize_nvfp4(np.zeros((2, 16), np.float32), out=(np.zeros((2, 9), np.uint8),) * 3), ValueError,
         r'codes: expected shape \[2, 8\], found \[2, 9\]'),
        (lambda: ops.Weight(cpu, np.zeros((4, 8), np.uint8)), ValueError, 'block_scales'),
        (lambda: ops.Weight(cpu, np.zeros((4, 8), np.uint8), np.zeros((4, 2), np.uint8)), ValueError, 'block_scales'),
        (lambda: ops.Weight(cpu, np.zeros((4, 16), np.float32), np.zeros((4, 1), np.uint8)), ValueError, 'block_scales'),
        (lambda: ops.Linear(weight, input='a5'), ValueError, 'input'),
        (lambda: ops.Linear(weight, groups=5), ValueError, 'groups'),
        (lambda: ops.Linear(weight, max_tokens=0), ValueError, 'max_tokens'),
        (lambda: ops.Linear(None), TypeError, 'Linear|incompatible'),
        (lambda: ops.Context('tpu'), ValueError, 'tpu'),
    ):
        with pytest.raises(error, match=words):
            call()
    assert linear(np.zeros((0, 64), np.uint16)).shape == (0, 48)


def test_read_only_inputs_and_results_that_outlive_what_made_them():
    context = ops.Context('cpu', num_threads=1)
    x = normal(2, 32)
    x.flags.writeable = False
    parts = context.quantize_nvfp4(x)
    del context
    assert parts[0].sum() > 0  # the memory lives as long as the arrays


def test_ranks_find_each_other_and_hear_who_is_lost():
    listener, groups = ops.RankListener(), {}

    def join(rank):
        groups[rank] = ops.ExpertGroup(ops.Context('cpu', num_threads=1), rank=rank, ranks=2, port=listener.port, secret='s' * 32,
                                       listener=None if rank else listener, max_tokens=8, top_k=2, hidden=64)

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join()
    for group in groups.values():
        assert group.why_not == 'the context is of a CPU'
        with pytest.raises(Unsupported, match="ranks don't reach each other: the context is of a CPU"):
            group.check()
        group.close()
        group.close()
    # A process that ends without a word.
    code = ('import sys, os; from tessera import ops; g = ops.ExpertGroup(ops.Context("cpu"), rank=1, ranks=2, port=int(sys.argv[1]), '
            'secret="s" * 32, max_tokens=8, top_k=2, hidden=64); sys.stdin.read(); os._exit(0)')
    listener = ops.RankListener()
    process = subprocess.Popen([sys.executable, '-c', code, str(listener.port)], stdin=subprocess.PIPE)
    join(0)
    process.communicate()
    with pytest.raises(DeviceError, match="exchange of experts' rows: lost rank 1 of 2"):
        for _ in range(200):
            with pytest.raises(Unsupported):
                groups[0].check()
            threading.Event().wait(0.05)


def test_a_group_that_fails_or_lives_at_exit_tells_the_others():
    code = ('import sys; from tessera import ops; g = ops.ExpertGroup(ops.Context("cpu"), rank=1, ranks=2, port=int(sys.argv[1]), '
            'secret="s" * 32, max_tokens=8, top_k=2, hidden=64); sys.stdin.read(); exec(sys.argv[2])')
    for last, why in (('', 'rank 1 of 2 failed: its process ends'), ('g.fail("no more")', 'rank 1 of 2 failed: no more')):
        listener = ops.RankListener()
        process = subprocess.Popen([sys.executable, '-c', code, str(listener.port), last], stdin=subprocess.PIPE)
        group = ops.ExpertGroup(ops.Context('cpu', num_threads=1), **of_rank(listener))
        began = time.monotonic()
        process.communicate()
        assert process.returncode == 0 and time.monotonic() - began < 8  # it does not wait for this one
        with pytest.raises(DeviceError, match=why):
            for _ in range(200):
                with pytest.raises(Unsupported):
                    group.check()
                time.sleep(0.05)
        group.fail('both')
        with pytest.raises(DeviceError, match=why):
            group.check()
        group.close()


def of_rank(listener, rank=0, **others):
    return {'rank': rank, 'ranks': 2, 'port': listener.port, 'secret': 's' * 32, 'listener': None if rank else listener,
            'max_tokens': 8, 'top_k': 2, 'hidden': 64, **others}


def test_groups_that_cannot_be_are_refused(cpu):
    listener = ops.RankListener()
    assert 0 < listener.port < 65536
    for change, message in (({'rank': 2}, '^rank: expected 0 to 1, found 2'), ({'ranks': 1}, '^ranks: expected 2 to'),
                            ({'port': 0}, '^port: expected 1 to 65535, found 0'), ({'listener': None}, '^listener: expected one of rank 0'),
                            ({'rank': 1}, '^listener: expected None of rank 1'), ({'secret': 'short'}, 'secret'),
                            ({'max_tokens': 0}, '^max_tokens: expected 1 to'), ({'max_tokens': 1 << 40}, '^max_tokens: expected 1 to'),
                            ({'top_k': 0}, '^top_k: expected 1 to'), ({'hidden': 0}, '^hidden: expected 1 to'),
                            ({'hidden': 66}, '^hidden: expected a multiple of 4, found 66'),
                            ({'hidden': 1 << 20}, '^hidden: expected 1 to')):
        with pytest.raises(InvalidArgument, match=message):
            ops.ExpertGroup(cpu, **{**of_rank(listener), **change})


def test_ranks_that_come_wrong_are_refused():
    """A wrong secret is told at once, to the one that has it; a listener serves one group."""
    listener, found, groups = ops.RankListener(), [], {}

    def join(rank, **others):
        groups[rank] = ops.ExpertGroup(ops.Context('cpu', num_threads=1), **of_rank(listener, rank, **others))

    first = threading.Thread(target=join, args=(0,))
    first.start()
    with pytest.raises(DeviceError, match='secret'):
        join(1, secret='t' * 32)
    assert not groups
    join(1)  # who waits was not disturbed
    first.join()
    with pytest.raises(InvalidArgument, match='^listener: expected one that no group has used'):
        ops.ExpertGroup(ops.Context('cpu', num_threads=1), **of_rank(listener))
    for seconds in (0, -1, 86401, float('nan'), float('inf')):
        with pytest.raises(InvalidArgument, match='^seconds: expected more than 0, at most 86400, found'):
            groups[0].close(seconds)
    with pytest.raises(Unsupported):
        groups[0].check()  # it lives
    for group in groups.values():
        group.close(1)


def test_experts_of_ranks_are_refused(cpu):
    nvfp4_stack = ops.Weight(cpu, np.zeros((2, 64, 32), np.uint8), np.zeros((2, 64, 4), np.uint8), [1.0])
    with pytest.raises(Unsupported, match='ranks that reach each other'):
        ops.RankExperts(nvfp4_stack, nvfp4_stack, nvfp4_stack, top_k=2, rank=0, ranks=2)
    with pytest.raises(InvalidArgument, match='^ranks: expected 2 to'):
        ops.RankExperts(nvfp4_stack, nvfp4_stack, nvfp4_stack, top_k=2, rank=0, ranks=1)
    for i, name in enumerate(('w1', 'w3', 'w2')):
        weights = [nvfp4_stack] * 3
        weights[i] = ops.Weight(cpu, np.zeros((2, 64, 64), np.float32))
        with pytest.raises(InvalidArgument, match=f'^{name}: expected nvfp4, found f32$'):
            ops.RankExperts(*weights, top_k=2, rank=0, ranks=2)


@pytest.mark.skipif(shutil.which('readelf') is None, reason='no readelf')
def test_the_extension_needs_no_libcrypto():
    listing = subprocess.run(['readelf', '-d', _tessera.__file__], capture_output=True, text=True, check=True).stdout
    needed = [line for line in listing.splitlines() if '(NEEDED)' in line]
    assert any('libc.so' in line for line in needed) and not any('libcrypto' in line for line in needed)
