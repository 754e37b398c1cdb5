#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The C interface through ctypes, against plain Python in double precision.

    ctypes_test.py LIBRARY HEADER [DEVICE]
"""
import ctypes as c
import math
import os
import pathlib
import random
import re
import struct
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / 'bindings' / 'c'))
from tessera_structs import LinearDesc, MoeDesc, MoeWeights, Weight  # noqa: E402

LIBRARY, HEADER = sys.argv[1], pathlib.Path(sys.argv[2])
DEVICE = sys.argv[3] if len(sys.argv) > 3 else 'cpu'
F32, BF16 = 0, 1
W_F32, W_BF16, W_FP8, W_NVFP4 = range(4)
IN_F32, IN_A16, IN_A4, IN_A8 = range(4)
ROWS, TENSOR, FOUR_OVER_SIX = range(3)
INVALID, UNSUPPORTED, NOT_FINITE = 1, 4, 8

lib = c.CDLL(LIBRARY)
for name in ('version', 'error_message', 'status_name', 'linear_kernel', 'moe_kernel', 'attention_kernel'):
    getattr(lib, 'tessera_' + name).restype = c.c_char_p
lib.tessera_attention_entry_bytes.restype = c.c_int64


class AttentionDesc(c.Structure):
    _fields_ = [('heads', c.c_int64), ('head_dim', c.c_int64), ('rope_dim', c.c_int64), ('window', c.c_int64),
                ('scale', c.c_float), ('cache', c.c_int32), ('activation', c.c_int32)]


class AttentionStep(c.Structure):
    _fields_ = [('q', c.c_void_p), ('positions', c.c_void_p), ('window_cache', c.c_void_p), ('window_slots', c.c_int64),
                ('entry_cache', c.c_void_p), ('num_entries', c.c_void_p), ('selected', c.c_void_p),
                ('selected_stride', c.c_int64), ('sink', c.c_void_p), ('out', c.c_void_p), ('num_tokens', c.c_int64)]


class AttentionBatch(c.Structure):
    _fields_ = [('step', AttentionStep), ('window_caches', c.c_void_p), ('entry_caches', c.c_void_p), ('places', c.c_void_p)]


def e4m3(code):
    exponent, mantissa = code >> 3 & 15, code & 7
    size = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(1 + mantissa / 8, exponent - 7)
    return -size if code & 0x80 else size


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E4M3 = [e4m3(code) for code in range(0x7F)]


def f32(x):
    return struct.unpack('f', struct.pack('f', x))[0]


def bf16_bits(x):
    bits = struct.unpack('I', struct.pack('f', x))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def bf16(x):
    return struct.unpack('f', struct.pack('I', bf16_bits(x) << 16))[0]


def nearest_even(values, x):
    """Index of the closest of ascending `values`; at a tie the even one. Beyond the last: the last."""
    best = min(range(len(values)), key=lambda i: (abs(values[i] - x), i % 2))
    return best


def product(row, matrix):
    return [math.fsum(a * b for a, b in zip(row, line)) for line in matrix]


def relative_error(found, expected):
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    return math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(found, expected)) / math.fsum(b * b for b in expected))


class Api(unittest.TestCase):
    def setUp(self):
        self.seed = random.Random(os.environ.get('TESSERA_TEST_SEED')).randrange(1 << 32)
        self.rng = random.Random(self.seed)
        self.context = c.c_void_p()
        self.check(lib.tessera_context_open(DEVICE.encode(), None, 2, c.byref(self.context)))

    def tearDown(self):
        lib.tessera_context_close(self.context)

    def check(self, status):
        self.assertEqual(status, 0, f'{lib.tessera_error_message().decode()} (seed {self.seed})')

    def check_refused(self, status, code, *words):
        message = lib.tessera_error_message().decode()
        self.assertEqual(status, code, message)
        for word in words:
            self.assertIn(word, message)

    def put(self, data):
        data = bytes(data)
        address = c.c_void_p()
        self.check(lib.tessera_allocate(self.context, c.c_size_t(max(len(data), 1)), c.byref(address)))
        self.check(lib.tessera_upload(self.context, address, data, c.c_size_t(len(data))))
        return address.value

    def put_as(self, kind, values):
        return self.put(struct.pack(f'{len(values)}{kind}', *values))

    def put_bf16(self, values):
        return self.put_as('H', [bf16_bits(v) for v in values])

    def get(self, address, kind, count):
        data = c.create_string_buffer(struct.calcsize(kind) * count)
        self.check(lib.tessera_download(self.context, data, c.c_void_p(address), c.c_size_t(len(data))))
        return struct.unpack(f'{count}{kind}', data.raw)

    def get_bf16(self, address, count):
        return [struct.unpack('f', struct.pack('I', bits << 16))[0] for bits in self.get(address, 'H', count)]

    def normal(self, count, scale=1.0):
        return [bf16(self.rng.gauss(0, scale)) for _ in range(count)]

    def quantised(self, values, rows, cols, rule):
        """Codes, scales and globals of values, by the library."""
        sizes = rows * cols // 2, rows * cols // 16, rows if rule == ROWS else 1
        codes, scales, scale = (self.put(b'\xee' * size) for size in (sizes[0], sizes[1], 4 * sizes[2]))
        at = c.c_void_p
        self.check(lib.tessera_quantize_nvfp4(self.context, rule, F32, at(self.put_as('f', values)), c.c_int64(rows),
                                              c.c_int64(cols), at(codes), at(scales), at(scale)))
        return bytes(self.get(codes, 'B', sizes[0])), bytes(self.get(scales, 'B', sizes[1])), list(self.get(scale, 'f', sizes[2]))

    def nvfp4_weight(self, rows, cols):
        """A random weight in the context's memory, and its values."""
        codes, scales, (scale,) = self.quantised(self.normal(rows * cols, 0.1), rows, cols, TENSOR)
        values = []
        for i in range(rows * cols):
            code = codes[i // 2] >> 4 * (i % 2) & 15
            values.append((-1 if code & 8 else 1) * E2M1[code & 7] * e4m3(scales[i // 16]) * scale)
        return Weight(W_NVFP4, rows, cols, self.put(codes), self.put(scales), scale), self.matrix(values, cols)

    def bf16_weight(self, rows, cols):
        values = self.normal(rows * cols, 0.1)
        return Weight(W_BF16, rows, cols, self.put_bf16(values), None, 0), self.matrix(values, cols)

    @staticmethod
    def matrix(values, cols):
        return [values[i:i + cols] for i in range(0, len(values), cols)]

    def test_versions_and_names(self):
        text = HEADER.read_text()
        self.assertRegex(lib.tessera_version().decode(), r'^\d+\.\d+\.\d+$')
        self.assertIn(f'#define TESSERA_ABI_VERSION {lib.tessera_abi_version()}', text)
        self.assertEqual(lib.tessera_status_name(4), b'unsupported')
        self.assertEqual(lib.tessera_status_name(-1), b'unknown')

    def test_only_the_header_is_exported(self):
        declared = set(re.findall(r'^TESSERA_API [\w* ]*?(tessera_\w+)\(', HEADER.read_text(), re.M))
        symbols = subprocess.run(['nm', '-D', '--defined-only', LIBRARY], capture_output=True, text=True, check=True).stdout
        self.assertEqual({line.split()[2].split('@')[0] for line in symbols.splitlines()}, declared)

    def test_quantisation_by_its_definition(self):
        rows, cols = 3, 48
        x = [f32(self.rng.gauss(0, 1) * 10 ** self.rng.uniform(-3, 3)) for _ in range(rows * cols)]
        x[cols:cols + 16] = [0.0] * 16
        for rule in (ROWS, TENSOR):
            codes, scales, scale = self.quantised(x, rows, cols, rule)
            for r in range(rows):
                amax = max(map(abs, x[r * cols:(r + 1) * cols] if rule == ROWS else x))
                self.assertEqual(scale[r if rule == ROWS else 0], f32(amax / 2688))
                g = scale[r if rule == ROWS else 0]
                for block in range(cols // 16):
                    at = r * cols + block * 16
                    values = x[at:at + 16]
                    byte = nearest_even(E4M3, f32(max(map(abs, values)) / f32(6 * g)))
                    self.assertEqual(scales[at // 16], byte, self.seed)
                    step = f32(E4M3[byte] * g)
                    for i, value in enumerate(values):
                        code = codes[(at + i) // 2] >> 4 * (i % 2) & 15
                        wanted = 0 if step == 0 else nearest_even(E2M1, abs(f32(value / step)))
                        self.assertEqual(code & 7, wanted, (self.seed, at + i))
                        self.assertTrue(wanted == 0 or (code >> 3) == (value < 0))

    def test_four_over_six_is_not_worse(self):
        x = self.normal(64 * 64)
        errors = []
        for rule in (TENSOR, FOUR_OVER_SIX):
            codes, scales, (g,) = self.quantised(x, 64, 64, rule)
            errors.append(math.fsum((abs(v) - E2M1[codes[i // 2] >> 4 * (i % 2) & 7] * e4m3(scales[i // 16]) * g) ** 2
                                    for i, v in enumerate(x)))
        self.assertLess(errors[1], errors[0])

    def test_quantisation_refuses(self):
        bad = [0.0] * 17 + [math.nan] + [0.0] * 14
        x, codes, scales, scale = (c.c_void_p(self.put(data)) for data in (struct.pack('32f', *bad), bytes(32), bytes(32), bytes(8)))
        call = lambda ctx, rule, rows, cols, x=x: lib.tessera_quantize_nvfp4(ctx, rule, F32, x, c.c_int64(rows), c.c_int64(cols), codes, scales, scale)
        self.check_refused(call(self.context, ROWS, 1, 24), INVALID, 'cols', '16', '24')
        self.check_refused(call(self.context, 9, 1, 32), INVALID, 'rule')
        self.check_refused(call(self.context, ROWS, -1, 32), INVALID, 'rows')
        self.check_refused(call(self.context, ROWS, 1, 32, None), INVALID, 'x', 'NULL')
        self.check_refused(call(None, ROWS, 1, 32), INVALID, 'context')
        if DEVICE == 'cpu':
            self.check_refused(call(self.context, TENSOR, 2, 16), NOT_FINITE, 'row 1')
        else:
            self.check(call(self.context, TENSOR, 2, 16))
            self.assertEqual(self.get(scales.value, 'B', 2), (0x7F, 0x7F))
            self.assertTrue(math.isnan(self.get(scale.value, 'f', 1)[0]))
        self.check(call(self.context, ROWS, 2, 16))
        self.assertEqual(self.get(scales.value, 'B', 2), (0, 0x7F))

    def linear(self, weight, desc, x, tokens, get):
        handle = c.c_void_p()
        self.check(lib.tessera_linear_create(self.context, c.byref(desc), c.byref(weight), c.c_int64(tokens), c.byref(handle)))
        self.assertIn(b'.', lib.tessera_linear_kernel(handle))
        count = tokens * desc.out * desc.groups
        y = self.put(b'\xff' * (4 * count))
        self.check(lib.tessera_linear_run(handle, c.c_void_p(x), c.c_void_p(y), c.c_int64(tokens)))
        self.check_refused(lib.tessera_linear_run(handle, c.c_void_p(x), c.c_void_p(y), c.c_int64(tokens + 1)), INVALID, 'num_tokens')
        self.check_refused(lib.tessera_linear_run(handle, c.c_void_p(x + 2), c.c_void_p(y), c.c_int64(1)), INVALID, 'x', 'aligned')
        lib.tessera_linear_destroy(handle)
        return get(y, count)

    def test_linear(self):
        tokens, width, out, groups = 5, 64, 19, 2
        x = self.normal(tokens * groups * width)
        address = self.put_bf16(x)
        for make in (self.nvfp4_weight, self.bf16_weight):
            weight, w = make(groups * out, width)
            expected = []
            for t in range(tokens):
                for g in range(groups):
                    row = x[(t * groups + g) * width:][:width]
                    expected += product(row, w[g * out:(g + 1) * out])
            found = self.linear(weight, LinearDesc(width, out, groups, IN_A16, BF16, BF16), address, tokens, self.get_bf16)
            self.assertLess(relative_error(found, expected), 4e-3, self.seed)
            found = self.linear(weight, LinearDesc(width, out, groups, IN_A16, BF16, F32), address, tokens,
                                lambda a, n: self.get(a, 'f', n))
            self.assertLess(relative_error(found, expected), 1e-5, self.seed)

    def test_linear_fp8_blocks(self):
        tokens, width, out = 3, 160, 130
        codes = [self.rng.randrange(0x7F) | self.rng.randrange(2) << 7 for _ in range(out * width)]
        scales = [f32(self.rng.uniform(0.5, 1.5) / 256) for _ in range(2 * 2)]
        w = self.matrix([e4m3(code) * scales[i // width // 128 * 2 + i % width // 128] for i, code in enumerate(codes)], width)
        x = self.normal(tokens * width)
        weight = Weight(W_FP8, out, width, self.put(codes), self.put_as('f', scales), 0)
        found = self.linear(weight, LinearDesc(width, out, 1, IN_A16, BF16, BF16), self.put_bf16(x), tokens, self.get_bf16)
        expected = [v for t in range(tokens) for v in product(x[t * width:(t + 1) * width], w)]
        self.assertLess(relative_error(found, expected), 4e-3, self.seed)

    def test_linear_refuses(self):
        weight, _ = self.bf16_weight(16, 32)
        handle = c.c_void_p(77)
        create = lambda desc, weight=weight, most=4: lib.tessera_linear_create(self.context, c.byref(desc), c.byref(weight), c.c_int64(most), c.byref(handle))
        good = LinearDesc(32, 16, 1, IN_A16, BF16, BF16)
        self.check_refused(create(LinearDesc(32, 17, 1, IN_A16, BF16, BF16)), INVALID, 'weight', '[17, 32]', '[16, 32]')
        self.check_refused(create(LinearDesc(32, 16, 1, IN_A4, BF16, BF16)), UNSUPPORTED, 'NVFP4')
        self.check_refused(create(LinearDesc(32, 16, 1, IN_F32, BF16, BF16)), INVALID, 'activation')
        self.check_refused(create(good, most=0), INVALID, 'max_tokens')
        self.check_refused(create(good, Weight(W_BF16, 16, 32, None, None, 0)), INVALID, 'weight.data', 'NULL')
        self.check_refused(create(good, Weight(7, 16, 32, weight.data, None, 0)), INVALID, 'weight.format')
        self.check_refused(create(LinearDesc(32, 16, 1, IN_A16, BF16, BF16), Weight(W_NVFP4, 16, 32, weight.data, weight.data, 0)), INVALID, 'tensor_scale')
        self.assertEqual(handle.value, 77, 'a failed call leaves its out-pointers')
        self.assertIsNone(lib.tessera_linear_kernel(None))
        lib.tessera_linear_destroy(None)

    def swiglu(self, gate, up, limit):
        return [g / (1 + math.exp(-g)) * u for g, u in ((min(g, limit), max(-limit, min(u, limit))) for g, u in zip(gate, up))]

    def test_mixture_of_experts(self):
        hidden, inner, experts, top_k, tokens, limit, scaling = 32, 48, 6, 2, 4, 10.0, 1.5
        w1, w3, w2 = ([self.nvfp4_weight(*shape) for _ in range(experts)] for shape in ((inner, hidden), (inner, hidden), (hidden, inner)))
        router, gate = self.bf16_weight(experts, hidden)
        bias = [f32(self.rng.gauss(0, 0.3)) for _ in range(experts)]
        shared = [self.nvfp4_weight(*shape) for shape in ((inner, hidden), (inner, hidden), (hidden, inner))]
        array = lambda pairs: (Weight * experts)(*[weight for weight, _ in pairs])
        arrays = [array(w1), array(w3), array(w2)]
        weights = MoeWeights(*arrays, c.pointer(router), self.put_as('f', bias), None, *[c.pointer(w) for w, _ in shared])
        desc = MoeDesc(hidden, inner, experts, 0, experts, top_k, IN_A16, IN_A16, BF16, limit, scaling, 1)
        handle = c.c_void_p()
        self.check(lib.tessera_moe_create(self.context, c.byref(desc), c.byref(weights), c.c_int64(tokens), c.byref(handle)))
        x = self.normal(tokens * hidden, 3)
        x_there, out = self.put_bf16(x), self.put(b'\xff' * (2 * tokens * hidden))
        ids, routing = self.put(b'\xff' * (4 * tokens * top_k)), self.put(b'\xff' * (4 * tokens * top_k))
        at = c.c_void_p
        self.check(lib.tessera_moe_run(handle, at(x_there), None, at(out), at(ids), at(routing), c.c_int64(tokens)))
        slots = self.put(b'\xff' * (2 * tokens * top_k * hidden))
        self.check(lib.tessera_moe_experts_run(handle, at(x_there), at(ids), at(routing), at(slots), c.c_int64(tokens)))
        expected, expected_slots, expected_ids, expected_routing = [], [], [], []
        for row in self.matrix(x, hidden):
            scores = [math.sqrt(math.log1p(math.exp(z))) for z in product(row, gate)]
            chosen = sorted(sorted(range(experts), key=lambda e: -(scores[e] + bias[e]))[:top_k])
            total = sum(scores[e] for e in chosen)
            sum_of_all = [0.0] * hidden
            for e in chosen:
                weight = scores[e] / total * scaling
                inside = [bf16(v * weight) for v in self.swiglu(*([bf16(v) for v in product(row, w[e][1])] for w in (w1, w3)), limit)]
                slot = product(inside, w2[e][1])
                expected_slots += slot
                expected_ids.append(e)
                expected_routing.append(weight)
                sum_of_all = [a + bf16(b) for a, b in zip(sum_of_all, slot)]
            inside = [bf16(v) for v in self.swiglu(*([bf16(v) for v in product(row, w)] for _, w in shared[:2]), limit)]
            expected += [a + bf16(b) for a, b in zip(sum_of_all, product(inside, shared[2][1]))]
        self.assertEqual(list(self.get(ids, 'i', tokens * top_k)), expected_ids, self.seed)
        self.assertLess(relative_error(self.get(routing, 'f', tokens * top_k), expected_routing), 1e-5, self.seed)
        self.assertLess(relative_error(self.get_bf16(slots, tokens * top_k * hidden), expected_slots), 4e-3, self.seed)
        self.assertLess(relative_error(self.get_bf16(out, tokens * hidden), expected), 4e-3, self.seed)
        self.assertIn(b'.', lib.tessera_moe_kernel(handle))
        lib.tessera_moe_destroy(handle)
        # Without a router only the experts and their sum run; and what does not fit together is refused.
        plain = MoeWeights(*arrays)
        self.check(lib.tessera_moe_create(self.context, c.byref(desc), c.byref(plain), c.c_int64(tokens), c.byref(handle)))
        self.check(lib.tessera_moe_combine_run(handle, at(slots), at(out), c.c_int64(tokens)))
        rows = self.matrix(self.get_bf16(slots, tokens * top_k * hidden), hidden)
        sums = [bf16(f32(a + b)) for t in range(tokens) for a, b in zip(rows[2 * t], rows[2 * t + 1])]
        self.assertEqual(list(self.get_bf16(out, tokens * hidden)), sums, self.seed)
        self.check_refused(lib.tessera_moe_combine_run(handle, at(slots), None, c.c_int64(tokens)), INVALID, 'out')
        self.check_refused(lib.tessera_moe_run(handle, at(x_there), None, at(out), None, None, c.c_int64(1)), INVALID, 'router')
        lib.tessera_moe_destroy(handle)
        create = lambda desc, weights: lib.tessera_moe_create(self.context, c.byref(desc), c.byref(weights), c.c_int64(tokens), c.byref(handle))
        self.check_refused(create(desc, MoeWeights(*arrays, c.pointer(router))), INVALID, 'router_bias', 'hash_table')
        self.check_refused(create(MoeDesc(hidden, inner, experts, 3, experts, top_k, IN_A16, IN_A16, BF16, limit, scaling, 1), plain), INVALID, 'first_expert')
        self.check_refused(create(desc, MoeWeights(arrays[0], arrays[2], arrays[2])), INVALID, 'weights.w3')

    def test_hashed_experts_choose_by_the_table(self):
        hidden, inner, experts, top_k = 32, 32, 4, 2
        one = [(Weight * experts)(*[self.nvfp4_weight(32, 32)[0] for _ in range(experts)]) for _ in range(3)]
        router, _ = self.bf16_weight(experts, hidden)
        weights = MoeWeights(*one, c.pointer(router), None, self.put_as('i', [3, 1, 2, 0, 1, 2]))
        desc = MoeDesc(hidden, inner, experts, 0, experts, top_k, IN_A16, IN_A16, BF16, 0, 1, 1)
        handle, at = c.c_void_p(), c.c_void_p
        self.check(lib.tessera_moe_create(self.context, c.byref(desc), c.byref(weights), c.c_int64(3), c.byref(handle)))
        x, out, ids = self.put_bf16(self.normal(3 * hidden)), self.put(b'\0' * 6 * hidden), self.put(b'\xff' * 24)
        self.check(lib.tessera_moe_run(handle, at(x), at(self.put_as('i', [2, 0, 1])), at(out), at(ids), None, c.c_int64(3)))
        self.assertEqual(self.get(ids, 'i', 6), (1, 2, 1, 3, 0, 2))
        self.check_refused(lib.tessera_moe_run(handle, at(x), None, at(out), None, None, c.c_int64(3)), INVALID, 'token_ids')
        lib.tessera_moe_destroy(handle)

    def test_attention_over_window_and_selected_entries(self):
        heads, width, rope, window, tokens, slots, entries = 3, 128, 64, 4, 2, 16, 9
        desc = AttentionDesc(heads, width, rope, window, width ** -0.5, 1, BF16)
        handle, at = c.c_void_p(), c.c_void_p
        self.check(lib.tessera_attention_create(self.context, c.byref(desc), c.c_int64(tokens), c.byref(handle)))
        self.assertEqual(lib.tessera_attention_entry_bytes(handle), 2 * width)
        q, kv, compressed = self.normal(tokens * heads * width), self.normal(slots * width), self.normal(entries * width)
        ring, cache = self.put(b'\0' * slots * 2 * width), self.put(b'\0' * entries * 2 * width)
        store = lambda rows, count, cache: lib.tessera_attention_store(handle, at(self.put_bf16(rows)), at(self.put_as('q', range(count))), c.c_int64(count), at(cache))
        self.check(store(kv, slots, ring))
        self.check(store(compressed, entries, cache))
        positions, lists = [40, 41], [[1, 2, 7, -1], [0, 8, -1, -1]]
        sink = [f32(self.rng.gauss(0, 1)) for _ in range(heads)]
        out = self.put(b'\xff' * (2 * tokens * heads * width))
        step = AttentionStep(self.put_bf16(q), self.put_as('q', positions), ring, slots, cache, self.put_as('i', [3, 2]),
                             self.put_as('i', sum(lists, [])), 4, self.put_as('f', sink), out, tokens)
        self.check(lib.tessera_attention_run(handle, c.byref(step)))
        rows, others, expected = self.matrix(kv, width), self.matrix(compressed, width), []
        for t, position in enumerate(positions):
            keys = [rows[p % slots] for p in range(position - window + 1, position + 1)] + [others[j] for j in lists[t] if j >= 0]
            for h in range(heads):
                weights = [math.exp(z * width ** -0.5) for z in product(q[(t * heads + h) * width:][:width], keys)]
                total = sum(weights) + math.exp(sink[h])
                expected += [math.fsum(w * key[i] for w, key in zip(weights, keys)) / total for i in range(width)]
        self.assertLess(relative_error(self.get_bf16(out, tokens * heads * width), expected), 4e-3, self.seed)
        self.assertIn(b'.', lib.tessera_attention_kernel(handle))
        step.window_slots = 4
        self.check_refused(lib.tessera_attention_run(handle, c.byref(step)), INVALID, 'window_slots')
        step.window_slots, step.sink = slots, None
        self.check_refused(lib.tessera_attention_run(handle, c.byref(step)), INVALID, 'sink')
        lib.tessera_attention_destroy(handle)
        create = lambda *desc: lib.tessera_attention_create(self.context, c.byref(AttentionDesc(*desc)), c.c_int64(1), c.byref(handle))
        self.check_refused(create(heads, 520, 64, window, 1, 1, BF16), INVALID, 'head_dim')
        self.check_refused(create(heads, 100, 64, window, 1, 2, BF16), INVALID, '64')
        self.check_refused(create(heads, 128, 64, window, 1, 2, F32), INVALID, 'activation')

    def test_attention_of_several_sequences_is_that_of_each(self):
        heads, width, window, slots, entries, tokens = 2, 64, 4, 8, 5, 5
        desc = AttentionDesc(heads, width, 32, window, width ** -0.5, 1, BF16)
        handle, at = c.c_void_p(), c.c_void_p
        self.check(lib.tessera_attention_create(self.context, c.byref(desc), c.c_int64(8 * 3), c.byref(handle)))
        places, positions, counts = [2, 0, 1, 1, 0], [9, 3, 5, 6, 4], [5, 1, 0, 3, 2]
        tables = [[self.put(bytes(size * 2 * width)) for _ in range(3)] for size in (slots, entries)]
        pointers = [self.put(struct.pack('3P', *table)) for table in tables]
        for size, table, place in zip((slots, entries), tables, pointers):
            rows = self.normal(3 * size * width)
            owners, numbers = [i % 3 for i in range(3 * size)], [i // 3 for i in range(3 * size)]
            self.check(lib.tessera_attention_store_batch(handle, at(self.put_bf16(rows)), at(self.put_as('q', numbers)),
                                                         at(self.put_as('i', owners)), c.c_int64(3 * size), at(place)))
            for p in range(3):  # each as if stored alone
                mine = sum((rows[i * width:(i + 1) * width] for i in range(p, 3 * size, 3)), [])
                alone = self.put(bytes(size * 2 * width))
                self.check(lib.tessera_attention_store(handle, at(self.put_bf16(mine)), at(self.put_as('q', range(size))), c.c_int64(size), at(alone)))
                self.assertEqual(self.get(table[p], 'H', size * width), self.get(alone, 'H', size * width))
        q, sink = self.normal(tokens * heads * width), self.put_as('f', [0.5, -1.0])
        out = self.put(b'\xff' * (2 * tokens * heads * width))
        step = AttentionStep(self.put_bf16(q), self.put_as('q', positions), None, slots, None, self.put_as('i', counts), None, 0, sink, out, tokens)
        batch = AttentionBatch(step, pointers[0], pointers[1], self.put_as('i', places))
        self.check(lib.tessera_attention_run_batch(handle, c.byref(batch)))
        found = self.get(out, 'H', tokens * heads * width)
        for t in range(tokens):
            one = self.put(b'\xff' * (2 * heads * width))
            row = slice(t * heads * width, (t + 1) * heads * width)
            step = AttentionStep(self.put_bf16(q[row]), self.put_as('q', [positions[t]]), tables[0][places[t]], slots, tables[1][places[t]],
                                 self.put_as('i', [counts[t]]), None, 0, sink, one, 1)
            self.check(lib.tessera_attention_run(handle, c.byref(step)))
            self.assertEqual(found[row], self.get(one, 'H', heads * width), (self.seed, t))
        # Without compressed entries, and what is refused.
        batch.entry_caches = None
        self.check(lib.tessera_attention_run_batch(handle, c.byref(batch)))
        batch.places = None
        self.check_refused(lib.tessera_attention_run_batch(handle, c.byref(batch)), INVALID, 'batch.places')
        batch.places, batch.step.window_cache = self.put_as('i', places), tables[0][0]
        self.check_refused(lib.tessera_attention_run_batch(handle, c.byref(batch)), INVALID, 'batch.step.window_cache')
        self.check_refused(lib.tessera_attention_run_batch(handle, None), INVALID, 'batch')
        self.check_refused(lib.tessera_attention_store_batch(handle, at(out), at(out), None, c.c_int64(1), at(pointers[0])), INVALID, 'places')
        lib.tessera_attention_destroy(handle)

    def test_devices_that_are_not_there(self):
        context = c.c_void_p()
        opened = lambda device, stream=None, threads=0: lib.tessera_context_open(device, stream, threads, c.byref(context))
        self.check_refused(opened(b'tpu'), INVALID, 'tpu')
        self.check_refused(opened(b'cpu', c.c_void_p(1)), INVALID, 'stream')
        self.check_refused(opened(b'cpu', None, -1), INVALID, 'num_threads')
        self.check_refused(opened(None), INVALID, 'device')
        self.assertNotEqual(opened(b'cuda:99'), 0)
        self.check_refused(lib.tessera_release(self.context, c.c_void_p(64)), INVALID, 'tessera_allocate')
        lib.tessera_context_close(None)


if __name__ == '__main__':
    unittest.main(argv=['ctypes_test'])
