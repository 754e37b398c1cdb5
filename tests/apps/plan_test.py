#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tessera plan and tessera plan kernels: their tables, their files, and what they refuse."""
import json
import os
import re
import tempfile
import unittest

from program import MODEL, ProgramTest, run


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

    def test_a_target_without_a_published_row_says_so(self):
        self.assertIn('nobody has published', run('plan', 'kernels', '--target', 'gb10', '--tokens', '1').stdout.decode())

    def test_sizes_are_those_of_other_flags(self):
        in_ks = run('plan', 'kernels', '--target', 'h200', '--tokens', '1,1k', '--square', '8K')
        self.assertEqual(in_ks.returncode, 0, in_ks.stderr)
        self.assertEqual(in_ks.stdout, run('plan', 'kernels', '--target', 'h200', '--tokens', '1,1024', '--square', '8192').stdout)

    def test_json_to_stdout(self):
        for arguments in (('kernels', '--target', 'h200', '--tokens', '1'), ('--gpus', '2xh200'), ('--gpus', 'h200')):
            path = self.folder / 'plan.json'
            to_file = run('plan', *arguments, '--json', str(path))
            to_stdout = run('plan', *arguments, '--json', '-')
            self.assertEqual(to_stdout.stdout.decode(), path.read_text())
            self.assertEqual((to_stdout.returncode, to_stdout.stderr), (to_file.returncode, to_file.stderr))
            self.assertFalse(os.path.exists('-'))

    def test_refusals(self):
        for bad in ('1,ten', '1.5', 'k'):
            self.check_error(run('plan', 'kernels', '--target', 'h200', '--tokens', bad), 2, '--tokens', 'expected a whole number')
        self.check_error(run('plan', 'kernels', '--target', 'b100'), 2, '--target', 'b100', 'rtx6000')
        self.check_error(run('plan', 'kernels'), 2, '--target')
        self.check_error(run('plan', 'kernels', '--target', 'gb10', '--tokens', '0'), 2, '--tokens')
        self.check_error(run('plan', 'kernels', '--target', 'gb10', '--square', '8200'), 2, '--square', 'a multiple of 16', '8200')
        self.check_error(run('plan', 'kernels', '--target', 'gb10', '--model', 'nowhere'), 3, 'nowhere/config.json')


class Machine(ProgramTest):
    def plan(self, *arguments):
        """Its text and its file. Where it does not fit that is the exit code, with one line on stderr."""
        path = self.folder / 'plan.json'
        result = run('plan', *arguments, '--json', str(path))
        plan, said = json.loads(path.read_text()), result.stderr.decode()
        self.assertEqual(result.returncode, 0 if plan['fits'] else 4, said)
        if plan['fits']:
            self.assertEqual(said, '')
        else:
            self.assertRegex(said, f'^tessera: does not fit: .* GB of each GPU, .*; {re.escape(plan["advice"][0])}\\n$')
        return result.stdout.decode(), plan

    def test_pro_on_eight(self):
        text, plan = self.plan('--model', 'pro', '--gpus', '8xh200', '--context', '1m', '--batch', '4')
        for word in ('Plan: heads, experts by width', 'of 150.75: fits',
                     'four sequences of 1,048,576 tokens, 4,194,304 in all', "of it padding to the kernels' units",
                     'sums over ranks', 'not written', 'chosen'):
            self.assertIn(word, text)
        self.assertTrue(plan['fits'])
        self.assertGreaterEqual(plan['longest_sequences'], 4)
        chosen = plan['candidates'][plan['chosen']]
        self.assertTrue(chosen['is_written'])
        for step in ('decode', 'prefill'):
            parts = sum(part['us'] * layer['count'] for layer in chosen[step]['layers'] for part in layer['parts'])
            self.assertAlmostEqual(parts / chosen[step]['us'], 1, places=6)
        text, plan = self.plan('--model', 'pro', '--gpus', '8xh200')
        self.assertIn('Plan: heads, experts by width', text)
        self.assertEqual(plan['longest_sequences'], 4)
        # On another machine a million does not fit four times.
        text, plan = self.plan('--model', 'pro', '--gpus', '8xrtx6000', '--dense', 'nvfp4')
        self.assertIn('do not fit', text)

    def test_every_gpu_and_a_folder(self):
        for gpu in ('h100', 'h200', 'b200', 'b300', 'rtx6000', 'gb10'):
            text, plan = self.plan('--gpus', f'4x{gpu}', '--dense', 'nvfp4')
            self.assertEqual((plan['gpu'], plan['gpus']), (gpu, 4))
            self.assertIn('Memory of each rank', text)
        text, plan = self.plan('--model', str(MODEL), '--gpus', '2xrtx6000', '--context', '512')
        self.assertTrue(plan['fits'])
        text, plan = self.plan('--gpus', 'h200')
        self.assertFalse(plan['fits'])
        self.assertIn('DOES NOT FIT', text)
        self.assertIn('try --gpus 2xh200', text)

    def test_a_rank_with_all_heads_has_more_than_there_are(self):
        self.assertRegex(self.plan('--gpus', '2xh200')[0], "queries and outputs of heads +5.77  all 4.33, and its own heads' apart\n")

    def test_what_the_shared_expert_adds_is_labelled(self):
        note = 'shared expert, added: to the launches of the routed ones'
        self.assertEqual(self.plan('--gpus', '2xh200')[0].count(note), 1)  # of decode; prompts have launches for it
        self.assertEqual(self.plan('--gpus', '2xh200', '--batch', '4')[0].count(note), 0)

    def test_one_is_singular(self):
        text = self.plan('--gpus', '2xh200', '--context', '1', '--step-tokens', '1')[0]
        for line in (': 1 sequence of 1 token\n', 'steps of up to 1 token\n', '1 sequence of 1 token, ', 'at 1 token:',
                     'Prefill of 1 token by 1,', '  1 token a sequence:'):
            self.assertIn(line, text)
        self.assertNotRegex(text, r'(?<![0-9.,])1 (tokens|sequences)\b')

    def test_kernels_are_those_of_the_inputs(self):
        plain, plan = self.plan('--gpus', '8xb200', '--dense', 'nvfp4')
        self.assertEqual(plan['mode'], 'a16')
        self.assertIn('kernels: the portable ones, of BF16 inputs', plain)
        own, plan = self.plan('--gpus', '8xb200', '--dense', 'nvfp4', '--mode', 'a4')
        self.assertEqual(plan['mode'], 'a4')
        self.assertIn('FP8 maps, which are streamed, may take less', own)
        self.assertNotIn('kernels:', self.plan('--gpus', '8xh200')[0])

    def test_help_without_arguments(self):
        result = run('plan')
        self.assertEqual(result.returncode, 0)
        self.assertEqual(result.stdout, run('plan', '--help').stdout)

    def test_refusals(self):
        self.check_error(run('plan', '--gpus', '8xb100'), 2, '8xb100', '1 to 8', 'rtx6000')
        self.check_error(run('plan', '--gpus', '9xh200'), 2, '9xh200')
        self.check_error(run('plan', '--gpus', '7xh200'), 2, '--gpus: expected 1, 2, 4 or 8', 'found 7', '256 experts',
                         '64 heads in 8 output groups')
        self.check_error(run('plan', '--model', 'pro'), 2, '--gpus', '8xh200')
        self.check_error(run('plan', '--gpus', '2xh200', '--context', '2m'), 2, '1048576', '2097152')
        for value in ('long', '1.5k', '16e', 'k', '1e6', '9999999999g', '-1'):
            self.check_error(run('plan', '--gpus', '2xh200', '--context=' + value), 2, '--context: expected a whole number', f'"{value}"')
        self.check_error(run('plan', '--gpus', '2xh200', 'kernels', '--target', 'b200'), 2, '--gpus', 'kernels')
        self.check_error(run('plan', '--gpus', '2xh200', '--json', ''), 2, '--json')
        self.check_error(run('plan', '--gpus', '2xh200', '--model', ''), 2, '--model')
        self.check_error(run('plan', '--gpus', '2xh200', '--batch', '0'), 2, 'batch', 'found 0')
        self.check_error(run('plan', '--gpus', '2xh200', '--batch', '5000'), 2, 'batch', '4096')
        for mode in ('a8', 'f32', ''):
            self.check_error(run('plan', '--gpus', '2xh200', '--mode', mode), 2, '--mode: expected a16 or a4', f'"{mode}"')
        self.check_error(run('plan', '--gpus', '2xh200', '--dense', 'int4'), 2, '--dense', 'int4')
        self.check_error(run('plan', '--gpus', '2xh200', '--model', 'nowhere'), 3, 'nowhere/config.json')


if __name__ == '__main__':
    unittest.main(argv=['plan_test'])
