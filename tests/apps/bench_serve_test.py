#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tessera bench serve: measures a server that it starts, or one that runs; its limits, its end by Ctrl-C, bad input.

    bench_serve_test.py PROGRAM MODEL_FOLDER
"""
import json
import re
import signal
import subprocess
import time
import unittest

from program import MODEL, PROGRAM, ProgramTest, environment, run

BENCH = ['bench', 'serve', '--quiet']
SMALL = ['--requests', '4', '--prompt-tokens', 'uniform:4-8', '--output-tokens', '5']


class BenchServe(ProgramTest):
    def serve(self, *flags):
        process = subprocess.Popen([PROGRAM, 'serve', '--model', str(MODEL), '--port', '0', '--quiet', *flags],
                                   stdout=subprocess.PIPE, env=environment(), text=True)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait, 30)
        self.addCleanup(process.kill)
        return process.stdout.readline().strip()

    def test_a_server_of_its_own(self):
        plot = self.folder / 'plot.svg'
        result = run(*BENCH, *SMALL, '--model', str(MODEL), '--concurrency', '1,2', '--rates', '50', '--json', '--plot',
                     str(plot), '--shared-prefix', '0.5', '--seed', '7', '--', '--max-running', '2')
        self.assertEqual(result.returncode, 0, result.stderr)
        report = json.loads(result.stdout)
        self.assertEqual(report['model'], MODEL.name)
        self.assertEqual(report['serve_flags'], ['--max-running', '2'])
        for field in ('commit', 'date', 'command', 'cpu', 'seed', 'prompt_tokens'):
            self.assertIn(field, report)
        self.assertEqual([row['load'] for row in report['rows']], ['50 requests/s', '1 at a time', '2 at a time'])
        for row in report['rows']:
            self.assertEqual((row['requests'], row['answered'], row['refused_429'], row['errors']), (4, 4, 0, {}))
            self.assertEqual(row['output_tokens'], 20)
            self.assertEqual(len(row['samples']['whole_answer_seconds']), 4)
            self.assertTrue(16 <= row['prompt_tokens'] <= 32, row['prompt_tokens'])
            self.assertLessEqual(row['first_token_seconds']['p50'], row['whole_answer_seconds']['p99'])
        # No load asks what an earlier one asked: with this seed their lengths differ.
        self.assertGreater(len({row['prompt_tokens'] for row in report['rows']}), 1)
        self.assertTrue(plot.read_text().startswith('<svg '))

    def test_a_server_that_runs(self):
        keys = self.folder / 'keys'
        keys.write_text('secret\n')
        url = self.serve('--api-key-file', str(keys))
        self.check_error(run(*BENCH, '--url', url), 2, '/v1/models', '401', 'TESSERA_API_KEY')
        prompts = self.folder / 'prompts'
        prompts.write_text('{"messages": [{"role": "user", "content": "Compute 257-7."}]}\n{"prompt": "x", "max_tokens": 2}\n')
        result = run(*BENCH, '--url', url + '/', '--requests', '4', '--concurrency', '2', '--prompts', str(prompts),
                     TESSERA_API_KEY='secret')
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr, b'')
        self.assertRegex(result.stdout.decode().splitlines()[-1], r'^2 at a time +4 +0 +0 ')

    def test_ctrl_c_reports_what_there_is(self):
        process = subprocess.Popen([PROGRAM, *BENCH, '--requests', '100000', '--concurrency', '2,4', '--model', str(MODEL)],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True)
        self.addCleanup(process.kill)
        process.stdout.readline()  # what is asked; the server takes requests
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, notes = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, notes)
        rows = [line for line in out.splitlines() if 'at a time' in line]
        self.assertEqual(len(rows), 1, out)
        self.assertIn('2 at a time: stopped before its end', notes)

    def test_time_ends_a_load(self):
        start = time.monotonic()
        result = run(*BENCH, '--model', str(MODEL), '--requests', '1000000', '--seconds', '0.3', '--concurrency', '2',
                     '--output-tokens', '5', '--prompt-tokens', '4', '--json')
        self.assertEqual(result.returncode, 0, result.stderr)
        row = json.loads(result.stdout)['rows'][0]
        self.assertLess(row['seconds'], time.monotonic() - start)
        self.assertEqual(row['requests'], row['answered'])
        self.assertGreater(row['requests'], 0)

    def test_bad_input(self):
        prompts = self.folder / 'prompts'
        prompts.write_text('{"prompt": "x"}\n{"text": "x"}\n')
        for flags, code, parts in [
                (['--url', 'https://127.0.0.1'], 2, ['--url', 'http://', 'TLS']),
                (['--url', 'http://127.0.0.1:1'], 1, ['http://127.0.0.1:1/v1/models', 'Connection refused']),
                (['--concurrency', '0'], 2, ['--concurrency', '0']),
                (['--rates', 'nan'], 2, ['--rates']),
                (['--rates', 'many'], 2, ['--rates', '(try tessera bench serve --help)']),
                (['--requests', '0'], 2, ['--requests']),
                (['--shared-prefix', '2'], 2, ['--shared-prefix']),
                (['--max-token-id', '2'], 2, ['--max-token-id']),
                (['--prompt-tokens', 'many'], 2, ['--prompt-tokens', 'many']),
                (['--prompts', str(prompts)], 3, ['line 2', '"prompt" or "messages"']),
                (['--prompts', str(self.folder / 'none')], 3, ['none']),
                (['--plot', str(self.folder / 'no' / 'plot')], 2, ['plot'])]:
            self.check_error(run(*BENCH, *flags), code, *parts)
        result = run(*BENCH, '--model', str(self.folder))
        self.assertEqual(result.returncode, 2)
        self.assertRegex(result.stderr.decode(), re.escape(str(self.folder)))


if __name__ == '__main__':
    import sys
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
