#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tessera verify: a quick run, its report, and what it refuses."""
import json
import os
import tempfile
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
        self.assertLessEqual({'version', 'commit', 'command', 'cpu', 'gpu', 'device', 'seed', 'rows', 'is_sound'}, set(report))
        self.assertTrue(report['is_sound'])
        self.assertEqual(len({row['op'] for row in report['rows']}), len(report['rows']))
        self.assertEqual(len(report['rows']), 30)
        for row in report['rows']:
            self.assertEqual((row['failed'], row['is_reference'], row['worst_error']), (0, True, 0), row)

    def test_report_is_written_beside_the_table(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, 'report.json')
            quick = ('verify', '--quick', '--quiet', '--op', 'linear', '--seed', '3')
            result = run(*quick, '--report', path, timeout=600, TESSERA_BACKENDS='ref')
            self.assertEqual(result.returncode, 0)
            self.assertIn('all agree with the reference', result.stdout.decode())
            with open(path) as file:
                report = json.load(file)
            self.assertEqual((report['seed'], report['is_sound']), (3, True))
            self.assertEqual(report['num_calls'], sum(row['cases'] for row in report['rows']))
            calls = [call for row in report['rows'] for call in row['calls']]
            self.assertEqual(len(calls), report['num_calls'])
            self.assertTrue(all(call['is_sound'] and call['different_values'] == 0 for call in calls))
            self.assertTrue(any('141 tokens' in call['shape'] and 'one weight a row' in call['shape'] for call in calls))
            self.check_error(run(*quick, '--report', os.path.join(folder, 'none', 'r.json')), 2, 'none/r.json')
            self.check_error(run(*quick, '--report', folder), 2, folder)
            self.check_error(run(*quick, '--report', ''), 2, '--report')
            # Nothing is left of a run that could not begin.
            bad = os.path.join(folder, 'bad.json')
            self.check_error(run('verify', '--op', 'norm', '--report', bad), 2, "'norm'", 'rms_norm')
            self.check_error(run(*quick, '--device', 'tpu', '--report', bad), 2, 'tpu')
            self.assertEqual(os.listdir(folder), ['report.json'])

    def test_other_devices_are_refused(self):
        self.check_error(run('verify', '--device', 'tpu'), 2, 'device', 'tpu')


if __name__ == '__main__':
    unittest.main(argv=['verify_test'])
