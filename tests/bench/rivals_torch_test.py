#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What bench/rivals/torch/compare.py does without PyTorch: arguments, routing, statistics, and the structs of tessera.h.

    rivals_torch_test.py COMPARE
"""
import ctypes
import importlib.util
import pathlib
import subprocess
import sys
import unittest

COMPARE = pathlib.Path(sys.argv[1])
spec = importlib.util.spec_from_file_location('compare', COMPARE)
compare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare)


class Rivals(unittest.TestCase):
    def refused(self, *arguments):
        run = subprocess.run([sys.executable, COMPARE, *arguments], capture_output=True, text=True)
        self.assertNotEqual(run.returncode, 0)
        return run.stderr

    def test_arguments(self):
        self.assertEqual(compare.parse_tokens('1,16,512'), [1, 16, 512])
        self.assertIn('found "1,,2"', self.refused(__file__, '--tokens', '1,,2'))
        self.assertIn('found "0"', self.refused(__file__, '--repeats', '0'))
        self.assertIn('no such file', self.refused('/nowhere/libtessera.so'))
        self.assertIn('expected cuda:N', self.refused(__file__, '--device', 'cpu'))
        help_text = subprocess.run([sys.executable, COMPARE, '--help'], capture_output=True, text=True, check=True).stdout
        self.assertIn('--cold', help_text)

    def test_routing_is_even(self):
        for count, top_k in ((256, 6), (384, 6), (8, 2)):
            for tokens in (1, 2, 4, 16, 64, 512):
                rows = compare.even_routing(count, top_k, tokens)
                reached = {expert for row in rows for expert in row}
                self.assertEqual(len(reached), compare.distinct_experts(count, top_k, tokens))
                self.assertAlmostEqual(len(reached), max(top_k, count * (1 - (1 - top_k / count) ** tokens)), delta=1)
                self.assertLess(max(reached), count)
                for row in rows:
                    self.assertEqual(row, sorted(set(row)))
                    self.assertEqual(len(row), top_k)

    def test_statistics(self):
        self.assertEqual(compare.spread_of([5, 1, 3, 2, 4]), {'median_us': 3, 'p10_us': 1, 'p90_us': 5})
        self.assertEqual(compare.copies_for(100, 250), 3)
        row = compare.row_of('linear x', 4, 'cuda.mma', [2.0, 2.0], 1e-3, 100, {'torch_bf16': ([3.0], 2e-3)})
        self.assertEqual(row['times_torch_bf16'], 1.5)

    def test_structs(self):
        self.assertEqual([ctypes.sizeof(s) for s in (compare.Weight, compare.LinearDesc, compare.MoeDesc, compare.MoeWeights)],
                         [48, 40, 72, 72])
        self.assertEqual([v for v in compare.E2M1[:8]], [0, 0.5, 1, 1.5, 2, 3, 4, 6])


if __name__ == '__main__':
    unittest.main(argv=['rivals_torch_test'])
