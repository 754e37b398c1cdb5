#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tessera plan kernels: its table, its file, and what it refuses."""
import json
import os
import tempfile
import unittest

from program import ProgramTest, run


class Plan(ProgramTest):
    def test_table_and_file(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, 'plan.json')
            result = run('plan', 'kernels', '--target', 'b200', '--tokens', '1,4096', '--square', '8192', '--details', '--json', path)
            text = result.stdout.decode()
            self.assertEqual(result.returncode, 0, text)
            for word in ('flash wo_b [4096, 8192]', 'ideal', 'published 6.2', 'cycles of products', 'linear_tcgen05'):
                self.assertIn(word, text)
            with open(path) as file:
                plan = json.load(file)
        self.assertEqual((plan['target'], plan['multiprocessors']), ('b200', 148))
        self.assertTrue(all(figure['source'] or figure['name'] == 'copies that compete there' for figure in plan['figures']))
        for row in plan['rows']:
            for end in ('pessimistic', 'optimistic'):
                self.assertAlmostEqual(row[end]['us'], sum(kernel['us'] for kernel in row[end]['kernels']), places=6)
            self.assertLessEqual(row['optimistic']['us'], row['pessimistic']['us'] * (1 + 1e-9))

    def test_refusals(self):
        self.check_error(run('plan', 'kernels', '--target', 'b100'), 2, 'b100', 'rtx6000')
        self.check_error(run('plan', 'kernels'), 2, '--target')
        self.check_error(run('plan', 'kernels', '--target', 'gb10', '--tokens', '0'), 2, '--tokens')
        self.check_error(run('plan', 'kernels', '--target', 'gb10', '--model', 'nowhere'), 3, 'nowhere/config.json')


if __name__ == '__main__':
    unittest.main(argv=['plan_test'])
