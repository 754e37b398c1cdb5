#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tessera verify: a quick run, its report, and what it refuses."""
import json
import unittest

from program import ProgramTest, run


class Verify(ProgramTest):
    def test_text_names_every_op_and_the_seed(self):
        result = run('verify', '--quick', '--seed', '7', '--threads', '2', timeout=600)
        text = result.stdout.decode()
        self.assertEqual(result.returncode, 0, text)
        for word in ('linear', 'moe_experts', 'attention', 'sample', 'seed 7', 'all agree with the reference'):
            self.assertIn(word, text)

    def test_json_is_a_report_to_send(self):
        result = run('verify', '--quick', '--json', '--quiet', timeout=600, TESSERA_BACKENDS='ref')
        self.assertEqual((result.returncode, result.stderr), (0, b''))
        report = json.loads(result.stdout)
        self.assertLessEqual({'version', 'commit', 'cpu', 'gpu', 'driver', 'device', 'seed', 'rows', 'is_sound'}, set(report))
        self.assertTrue(report['is_sound'])
        self.assertEqual(len(report['rows']), 25)
        for row in report['rows']:
            self.assertEqual((row['failed'], row['is_reference'], row['worst_error']), (0, True, 0), row)

    def test_other_devices_are_refused(self):
        self.check_error(run('verify', '--device', 'tpu'), 2, 'device', 'tpu')


if __name__ == '__main__':
    unittest.main(argv=['verify_test'])
