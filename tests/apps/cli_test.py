#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The program as a user sees it: answers, streams, exit codes, messages, files.

    cli_test.py PROGRAM MODEL_FOLDER
"""
import json
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import unittest
from xml.etree import ElementTree

from program import MODEL, PROGRAM, ProgramTest, run


def read_safetensors(path):
    data = path.read_bytes()
    size = struct.unpack('<Q', data[:8])[0]
    header, body = json.loads(data[8:8 + size]), data[8 + size:]
    header.pop('__metadata__', None)
    return {name: (entry['dtype'], entry['shape'], body[slice(*entry['data_offsets'])]) for name, entry in header.items()}


def write_safetensors(path, tensors):
    header, data = {}, b''
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {'dtype': dtype, 'shape': shape, 'data_offsets': [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack('<Q', len(text)) + text + data)


class Cli(ProgramTest):
    def copy_model(self):
        copy = self.folder / 'model'
        shutil.copytree(MODEL, copy)
        for path in copy.iterdir():
            path.chmod(0o644)
        return copy

    # ---- convert

    def test_convert_reports_and_its_output_answers(self):
        out = self.folder / 'out'
        result = run('convert', str(MODEL), str(out))
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertIn('experts: 288 NVFP4 already', result.stdout.decode())
        self.assertIn('converted 13.', result.stderr.decode())
        self.assertTrue((out / 'conversion_report.svg').read_text().startswith('<svg'))
        before, after = read_safetensors(MODEL / 'model.safetensors'), read_safetensors(out / 'model.safetensors')
        self.assertEqual(before, after)
        self.assertEqual(json.loads((out / 'hashes.json').read_text())['tensors'].keys(), after.keys())
        self.assertEqual(run('generate', '--model', str(out), 'Compute 257-7.').stdout, b'250\n')
        self.check_error(run('convert', str(MODEL), str(out)), 2, 'expected an empty folder', '--force')
        forced = run('convert', str(MODEL), str(out), '--force', '--json', '--quiet', '--families', 'all')
        self.assertEqual(forced.stderr, b'')
        families = json.loads(forced.stdout)['families']
        self.assertEqual(families['head']['matrices_rounded'], 1)
        self.assertEqual(families['compressor']['matrices_rounded'], 12)

    def test_convert_usage(self):
        self.check_error(run('convert', str(MODEL), str(self.folder / 'x'), '--families', 'expert'), 2, 'found "expert"')
        self.check_error(run('convert', str(MODEL), str(self.folder / 'x'), '--method', 'best'), 2, '--method')
        self.check_error(run('convert', str(MODEL), str(self.folder / 'x'), '--max-shard-size', '5 apples'), 2)
        self.check_error(run('convert', str(MODEL)), 2, 'OUT')
        self.check_error(run('convert', str(self.folder / 'none'), str(self.folder / 'x')), 3, 'none')
        self.check_error(run('convert', str(MODEL), '/proc/nowhere'), 2, '/proc/nowhere')
        self.assertFalse((self.folder / 'x').exists())

    def test_convert_stopped_by_interrupt_resumes(self):
        whole, out = self.folder / 'whole', self.folder / 'out'
        arguments = ['--families', 'all', '--max-shard-size', '300KB', '--quiet']
        self.assertEqual(run('convert', str(MODEL), str(whole), *arguments).returncode, 0)
        process = subprocess.Popen([PROGRAM, 'convert', str(MODEL), str(out), *arguments], stderr=subprocess.PIPE,
                                   stdout=subprocess.PIPE)
        for _ in range(2000):
            if list(out.glob('.tessera-convert/*.safetensors.json')):
                break
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        message = process.communicate()[1].decode()
        if process.returncode == 0:
            self.skipTest('it was done before the signal came')
        self.assertEqual((process.returncode, message),
                         (130, 'tessera: stopped; the same command with --resume continues\n'))
        self.assertFalse((out / 'config.json').exists())
        self.check_error(run('convert', str(MODEL), str(out), *arguments), 2, '--resume')
        resumed = run('convert', str(MODEL), str(out), *arguments, '--resume')
        self.assertEqual(resumed.returncode, 0, resumed.stderr.decode())
        names = sorted(path.name for path in whole.iterdir())
        self.assertEqual(names, sorted(path.name for path in out.iterdir()))
        for name in names:
            self.assertEqual((whole / name).read_bytes(), (out / name).read_bytes(), name)

    # ---- answers

    def test_answers_stream_to_stdout(self):
        for question, answer in (('Compute 257-7.', '250'), ('Spell mire.', 'm i r e'), ('Sort 58769.', '56789')):
            result = run('generate', question)
            self.assertEqual((result.returncode, result.stdout.decode()), (0, answer + '\n'))
            self.assertIn('prompt tokens', result.stderr.decode())

    def test_every_mode_answers(self):
        for mode in ('f32', 'a16', 'a8', 'a4'):
            for cache in ('exact', 'fp8'):
                result = run('generate', '--mode', mode, '--cache', cache, '--quiet', 'Spell mire.')
                self.assertEqual((result.stdout, result.stderr), (b'm i r e\n', b''), mode + cache)

    def test_json(self):
        result = run('generate', '--json', 'Compute 257-7.')
        answer = json.loads(result.stdout)
        self.assertEqual(answer['text'], '250')
        self.assertEqual(answer['finish_reason'], 'stop')
        self.assertEqual(answer['usage'], {'prompt_tokens': 12, 'completion_tokens': len(answer['ids']), 'total_tokens': 12 + len(answer['ids'])})

    def test_stdin_raw_and_ids_are_the_same_prompt(self):
        expected = json.loads(run('generate', '--json', '87+42=').stdout)['ids']
        bos, user, assistant = '<｜begin▁of▁sentence｜>', '<｜User｜>', '<｜Assistant｜>'
        for arguments, stdin in ((['-'], '87+42=\n'), (['--raw', f'{bos}{user}87+42={assistant}</think>'], None),
                                 (['--raw', '-'], f'{bos}{user}87+42={assistant}</think>'), (['--ids', '0,3,31,30,18,27,25,36,4,6'], None)):
            result = run('generate', '--json', *arguments, stdin=stdin.encode() if stdin else None)
            self.assertEqual(json.loads(result.stdout)['ids'], expected, arguments)

    def test_think_changes_the_prompt(self):
        self.assertNotEqual(run('generate', '--quiet', '12*7=').stdout, run('generate', '--quiet', '--think', '12*7=').stdout)

    def test_max_tokens_and_stop(self):
        answer = json.loads(run('generate', '--json', '--max-tokens', '2', 'Spell mire.').stdout)
        self.assertEqual((len(answer['ids']), answer['finish_reason']), (2, 'length'))
        answer = json.loads(run('generate', '--json', '--stop', 'i r', 'Spell mire.').stdout)
        self.assertEqual((answer['text'], answer['finish_reason']), ('m ', 'stop'))
        answer = json.loads(run('generate', '--json', '--max-tokens', '0', 'Spell mire.').stdout)
        self.assertEqual(answer['ids'], [])

    def test_a_seed_repeats_and_threads_do_not_matter(self):
        sampled = [run('generate', '--quiet', '--temperature', '5', '--max-tokens', '40', '--seed', seed, '--threads', threads, '--raw', 'And').stdout
                   for seed, threads in (('7', '1'), ('7', '2'), ('8', '2'))]
        self.assertEqual(sampled[0], sampled[1])
        self.assertNotEqual(sampled[0], sampled[2])

    def test_logits_file(self):
        path = self.folder / 'out.safetensors'
        answer = json.loads(run('generate', '--json', '--logits', str(path), '--ids', '0,3,31,30,18,27,25,36,4,6').stdout)
        tensors = read_safetensors(path)
        count = 10 + len(answer['ids']) - 1
        self.assertEqual(tensors['ids'][:2], ('I32', [count]))
        self.assertEqual(tensors['logits'][:2], ('F32', [count, 1024]))
        ids = struct.unpack(f'<{count}i', tensors['ids'][2])
        self.assertEqual(list(ids), [0, 3, 31, 30, 18, 27, 25, 36, 4, 6] + answer['ids'][:-1])
        values = struct.unpack(f'<{count * 1024}f', tensors['logits'][2])
        for i, token in enumerate(answer['ids']):
            row = values[(9 + i) * 1024:(10 + i) * 1024]
            self.assertEqual(row.index(max(row)), token)
        self.assertEqual([p.name for p in self.folder.iterdir()], ['out.safetensors'])

    def test_plan_and_trace(self):
        plan = run('generate', '--plan', '--quiet', 'Spell mire.').stderr.decode()
        self.assertIn('layers.2.attn.indexer.scores', plan)
        self.assertIn('ref.scalar', plan)
        trace = run('generate', '--trace-op', '--quiet', '--max-tokens', '1', 'Spell mire.').stderr.decode()
        for op in ('layers.0.attn.wq_a', 'layers.5.ffn.experts', 'layers.3.attn.compressor.wkv', 'hc_head', 'head'):
            self.assertRegex(trace, op + r' +\[.*\] +min .* max ')
        self.assertNotIn('NOT FINITE', trace)

    # ---- formats

    def test_inexact_conversion_is_refused_or_allowed(self):
        model = self.copy_model()
        path, stem = model / 'model.safetensors', 'layers.1.ffn.experts.0.w2.'
        tensors = read_safetensors(path)
        rows, half = tensors[stem + 'weight'][1]
        for suffix in ('weight_scale', 'weight_scale_2', 'input_scale'):
            tensors.pop(stem + suffix, None)
        scales = bytearray([115] * (rows * half // 16))
        tensors[stem + 'weight'] = ('I8', [rows, half], b'\x21' * (rows * half))
        tensors[stem + 'scale'] = ('F8_E8M0', [rows, half // 16], scales)
        write_safetensors(path, tensors)
        exact = run('generate', '--model', str(model), '--max-tokens', '1', 'Spell mire.')
        self.assertEqual(exact.returncode, 0, exact.stderr)
        scales[3], scales[9] = 90, 80
        write_safetensors(path, tensors)
        refused = run('generate', '--model', str(model), '--quiet', 'Spell mire.')
        self.check_error(refused, 3, stem, f'found 2 of {len(scales)} blocks', '--allow-inexact')
        allowed = run('generate', '--model', str(model), '--max-tokens', '1', '--allow-inexact', 'Spell mire.')
        self.assertEqual(allowed.returncode, 0, allowed.stderr)
        self.assertIn('2 blocks of MXFP4 experts were rounded', allowed.stderr.decode())

    # ---- other verbs

    def test_version_and_devices(self):
        self.assertIn(b'tessera 0.1.0', run('version').stdout)
        self.assertEqual(json.loads(run('version', '--json').stdout)['backends'][-1], 'ref')
        devices = json.loads(run('devices', '--json').stdout)
        self.assertGreaterEqual(devices['cores'], 1)
        self.assertTrue(devices['backends'][-1]['available'])
        self.assertIn(b'verified: run on hardware', run('devices').stdout)

    def test_devices_says_where_threads_and_memory_go(self):
        two_nodes = 'pack:2 [numa(memory=1GB)] core:2 pu:2'
        line = next(line for line in run('devices', HWLOC_SYNTHETIC=two_nodes).stdout.decode().splitlines()
                    if line.startswith('placement'))
        self.assertIn('2 nodes, 4 cores, 8 processors; threads pinned to 0,4,2,6,1,5,3,7', line)
        self.assertIn('interleaved over nodes 0,1', line)
        self.assertIn('not this machine', line)
        self.assertIn(b'HWLOC_SYNTHETIC', run('devices', HWLOC_SYNTHETIC='nonsense').stderr)
        self.assertEqual(run('devices', HWLOC_SYNTHETIC=two_nodes).stderr, b'')
        off = json.loads(run('devices', '--json', TESSERA_PLACEMENT='off').stdout)['placement']
        self.assertEqual(off['pinned'], [])
        self.assertIn('TESSERA_PLACEMENT', off['why_not_pinned'])
        self.check_error(run('generate', 'a', TESSERA_PLACEMENT='maybe'), 2, 'TESSERA_PLACEMENT')
        # Neither an imagined machine nor any choice changes an answer.
        for choice in ({'HWLOC_SYNTHETIC': two_nodes}, {'TESSERA_PLACEMENT': 'on'}, {'TESSERA_PLACEMENT': 'off'}):
            for threads in ('1', '2', '3'):
                answer = run('generate', '--quiet', '--threads', threads, 'Spell mire.', **choice)
                self.assertEqual(answer.stdout, b'm i r e\n', (choice, threads, answer.stderr))

    def test_backends_are_chosen_and_restricted(self):
        devices = json.loads(run('devices', '--json', TESSERA_BACKENDS='ref').stdout)
        self.assertEqual([b['name'] for b in devices['backends'] if b['available']], ['ref'])
        everywhere = run('generate', '--quiet', 'Spell mire.', TESSERA_BACKENDS='avx2').stdout
        self.assertEqual(everywhere, b'm i r e\n')
        for verb in (['generate', 'a'], ['devices'], ['bench', 'ops'], ['bench', 'model'], ['verify']):
            self.check_error(run(*verb, TESSERA_BACKENDS='avx3'), 2, 'avx3')

    def test_a_backend_named_in_vain_is_a_warning(self):
        devices = json.loads(run('devices', '--json').stdout)
        missing = [b['name'] for b in devices['backends'] if not b['available'] and b['name'] != 'cuda']
        if not missing:
            self.skipTest("this machine runs every CPU's backend")
        names = missing[0] + ',ref'
        for verb in (['generate', '--quiet', 'Spell mire.'], ['devices'],
                     ['bench', 'model', '--contexts', '1', '--decode', '1', '--repeats', '1', '--json'],
                     ['bench', 'ops', '--only', 'flash gate f32', '--tokens', '1', '--seconds', '0']):
            result = run(*verb, TESSERA_BACKENDS=names)
            self.assertEqual(result.returncode, 0, result.stderr)
            warning = b'warning: TESSERA_BACKENDS names ' + missing[0].encode()
            self.assertEqual(result.stderr.count(warning), 1, (verb, result.stderr))

    def test_bench_reports_rows_with_samples(self):
        report = json.loads(run('bench', 'ops', '--json', '--only', 'flash gate bf16', '--tokens', '1,3', '--seconds', '0.01').stdout)
        self.assertGreater(report['read_gbs'], 0)
        self.assertGreaterEqual(report['read_gbs'], report['read_gbs_p10'])
        self.assertEqual([row['tokens'] for row in report['rows']], [1, 3])
        for row in report['rows']:
            self.assertEqual(row['flops'], 2 * 256 * 4096 * row['tokens'])
            self.assertGreaterEqual(len(row['seconds']), 20)
            self.assertEqual(row['is_implausible'], row['share'] > 1.15)
        model = json.loads(run('bench', 'model', '--json', '--contexts', '8', '--decode', '2', '--repeats', '1').stdout)
        self.assertEqual([row['context'] for row in model['rows']], [8])
        self.assertEqual((model['device'], model['mode']), ('cpu', 'a16'))
        self.assertGreater(model['threads'], 0)
        self.assertTrue(model['variants'] and all('.' in name for name in model['variants']), model['variants'])
        self.check_error(run('bench', 'ops', '--tokens', '0'), 2, '--tokens')
        self.check_error(run('bench', 'ops', '--seconds', '-1'), 2, '--seconds')
        self.check_error(run('bench', 'ops', '--seconds', 'nan'), 2, '--seconds')
        self.check_error(run('bench', 'model', '--contexts', '8,100000'), 2, 'contexts')
        self.check_error(run('bench', 'model', '--layers', '3'), 2, '--synthetic')
        for layers in ('0', '44', '5000'):
            self.check_error(run('bench', 'model', '--synthetic', 'flash', '--layers', layers), 2, '--layers', '1 to 43', layers)
        self.check_error(run('bench', 'model', '--synthetic', 'small', '--mode', 'f32'), 2, '--mode', '--synthetic')
        self.check_error(run('bench', 'model', '--mode', 'a32'), 2, '--mode', 'f32, a16')
        self.check_error(run('bench', 'ops', '--mode', 'f32'), 2, '--mode')
        self.check_error(run('bench', 'ops', TESSERA_MEMORY_BYTES='1000000'), 4, 'random weights', 'missing')
        # Room for the weights, and none for the rows of so many tokens.
        self.check_error(run('bench', 'ops', '--only', 'attention flash 128', '--tokens', '65536', '--seconds', '0',
                             TESSERA_MEMORY_BYTES='2000000000'), 4, 'attention flash', '65536 tokens', 'missing')
        self.check_error(run('bench', 'ops', '--only', 'no such row'), 2, 'no such row')

    def test_bench_has_a_row_for_every_op_and_a_plot(self):
        plan = run('generate', '--quiet', '--plan', '--max-tokens', '1', 'a').stderr.decode()
        ops = {line.split()[1] for line in plan.splitlines() if line.startswith(('layers.', 'embed', 'head', 'sample'))}
        self.assertGreater(len(ops), 15, plan[:2000])
        picture = self.folder / 'ops.svg'
        report = json.loads(run('bench', 'ops', '--json', '--only', 'flash', '--tokens', '1', '--seconds', '0.001', '--plot',
                                str(picture), timeout=500).stdout)
        self.assertLessEqual(ops, {row['name'].split()[0] for row in report['rows']})
        drawing = ElementTree.fromstring(picture.read_text())
        titles = [title.text for title in drawing.iter('{http://www.w3.org/2000/svg}title')]
        self.assertEqual(len(titles), len(report['rows']))
        for row, title in zip(report['rows'], titles):
            self.assertGreater(row['share'], 0)
            self.assertEqual(len(row['seconds']), len(row['read_seconds']))
            self.assertIn(row['variant'], title)

    def test_bench_of_one_layer(self):
        flags = ('bench', 'layer', '--shape', 'small', '--tokens', '8', '--context', '300', '--seconds', '0')
        report = json.loads(run(*flags, '--json').stdout)
        self.assertEqual([(row['kind'], row['tokens']) for row in report['rows']],
                         [(kind, tokens) for kind in ('swa', 'csa', 'hca') for tokens in (1, 8)])
        self.assertEqual(report['context'], 256)
        for row in report['rows']:
            self.assertGreater(min(row['bytes'], row['gbs'], row['share_of_read'], len(row['seconds'])), 0)
        self.assertIn(b'csa', run(*flags, '--kind', 'csa').stdout)
        self.check_error(run(*flags, '--kind', 'mla'), 2, 'mla')
        self.check_error(run('bench', 'layer', '--shape', 'huge'), 2, 'huge')
        self.check_error(run('bench', 'layer', '--mode', 'f32'), 2, '--mode')
        self.check_error(run('bench', 'layer', '--device', 'tpu'), 2, 'tpu')
        self.check_error(run('bench', 'ops', '--device', 'tpu'), 2, 'tpu')

    def test_bench_of_a_synthetic_model(self):
        report = json.loads(run('bench', 'model', '--synthetic', 'small', '--layers', '3', '--contexts', '40,1000', '--decode', '2',
                                '--repeats', '1', '--step-tokens', '64', '--json', '--plot',
                                str(self.folder / 'model.svg')).stdout)
        drawing = ElementTree.parse(self.folder / 'model.svg')
        texts = [''.join(text.itertext()) for text in drawing.iter('{http://www.w3.org/2000/svg}text')]
        for expected in ('prefill, context 40', 'prefill, context 1000', 'decode, context 1000', '2: ratio 4'):
            self.assertIn(expected, texts)
        self.assertEqual(len(list(drawing.iter('{http://www.w3.org/2000/svg}title'))), 2 * 2 + 3)
        self.check_error(run('bench', 'model', '--plot', str(self.folder / 'none' / 'a.svg')), 2, 'none')
        self.assertEqual([row['compress_ratio'] for row in report['synthetic']['one_token_in_a_layer']], [4, 128, 4])
        self.assertEqual([(row['context'], row['tokens_with_random_cache_entries']) for row in report['rows']], [(40, 0), (1000, 896)])
        for row in report['rows']:
            self.assertGreater(row['decode_tokens_per_second'][0], 0)
        self.assertIn(b'cache entries are random', run('bench', 'model', '--synthetic', 'small', '--contexts', '1000', '--decode', '1',
                                                       '--repeats', '1').stdout)
        self.check_error(run('bench', 'model', '--synthetic', 'pro', '--layers', '61'), 4, 'does not fit')
        self.check_error(run('bench', 'model', '--synthetic', 'medium'), 2, 'medium')
        self.check_error(run('bench', 'model', '--synthetic', 'small', '--layers', '6'), 2, '1 to 5')

    def test_bench_of_steps_over_ranks(self):
        record = self.folder / 'steps.json'
        flags = ('bench', 'model', '--synthetic', 'small', '--contexts', '50', '--batches', '1,2', '--decode', '2', '--repeats', '1',
                 '--step-tokens', '32', '--threads', '1')
        for split in ('experts', 'heads', 'width', 'experts-width'):
            result = run(*flags, '--ranks', '2', '--rank-split', split, '--record', str(record))
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn(b'cut by ' + split.encode(), result.stdout)
            report = json.loads(record.read_text())
            self.assertEqual((report['ranks'], report['split'], report['layers']), (2, split, 5))
            self.assertEqual([(row['step'], row['sequences'], row['context']) for row in report['rows']],
                             [('prompt', 1, 50), ('decode', 1, 50), ('decode', 2, 50)])
            self.assertEqual([row['tokens'] for row in report['sums']], [1] * 3 + [2] * 3)
        # What nobody named: of processors the split whose results are one rank's.
        self.assertIn(b'cut by experts', run(*flags, '--ranks', '2').stdout)
        alone = json.loads(run(*flags, '--json').stdout)
        self.assertEqual((alone['ranks'], alone['sums'], len(alone['rows'])), (1, [], 3))
        self.assertGreater(alone['weight_bytes_of_a_rank'], report['weight_bytes_of_a_rank'])
        self.check_error(run(*flags, '--ranks', '3'), 2, '--ranks', 'found 3', "16 experts can't be cut over 3 ranks")
        self.check_error(run(*flags[:7], '33', *flags[8:]), 2, 'batches', '1 to 32', '33')
        self.check_error(run('bench', 'model', '--ranks', '2'), 2, '--synthetic')
        self.check_error(run('bench', 'model', '--synthetic', 'small', '--record', str(record)), 2, '--record', '--batches')
        self.check_error(run(*flags, '--plot', str(record)), 2, '--plot')
        self.check_error(run(*flags, '--ranks', '2', TESSERA_PEER_SUMS='on'), 2, 'TESSERA_PEER_SUMS', 'shares or off')

    def test_help_teaches(self):
        text = run('generate', '--help').stdout.decode()
        for flag in ('--raw', '--ids', '--model', '--max-tokens', '--temperature', '--top-p', '--top-k', '--min-p', '--seed', '--stop', '--mode',
                     '--cache', '--allow-inexact', '--think', '--logits', '--json', '--trace-op', '--plan', '--threads', '--quiet'):
            self.assertIn(flag, text)
        self.assertIn('Examples:', text)
        everything = run('--help-all').stdout.decode()
        for word in ('TESSERA_FORCE', 'TESSERA_BACKENDS', 'TESSERA_BYPASS', 'devices', 'version', 'Exit codes'):
            self.assertIn(word, everything)

    # ---- what goes wrong

    def test_usage_errors(self):
        for arguments, part in (
                (['generate'], 'no prompt'), (['generate', 'a', '--ids', '1'], 'not both'), (['generate', '--ids', '1,x'], '--ids'), (['generate', '--ids', ''], '--ids'),
                (['generate', '--ids', '1,,2'], '--ids'), (['generate', '--ids', '1024'], '1023'), (['generate', '--ids', '-5'], 'ids'), (['generate', ''], 'prompt'),
                (['generate', 'a', '--mode', 'a2'], '--mode'), (['generate', 'a', '--cache', 'fp9'], '--cache'), (['generate', 'a', '--temperature', '-1'], 'temperature'),
                (['generate', 'a', '--temperature', 'nan'], 'temperature'), (['generate', 'a', '--temperature', 'hot'], 'temperature'), (['generate', 'a', '--top-p', '0'], 'top-p'),
                (['generate', 'a', '--top-p', '1.1'], 'top-p'), (['generate', 'a', '--top-k', '-1'], 'top-k'), (['generate', 'a', '--min-p', '2'], 'min-p'),
                (['generate', 'a', '--max-tokens', '-1'], 'max-tokens'), (['generate', 'a', '--stop', ''], '--stop'), (['generate', 'a', '--stop', 'x' * 300], '--stop'),
                (['generate', 'a'] + ['--stop', 'x'] * 17, '--stop'), (['generate', 'a', '--seed', '-1'], 'seed'), (['generate', 'a', '--threads', '-1'], '--threads'),
                (['generate', 'a', '--logit-bias', 'x'], '--logit-bias'), (['generate', 'a', '--logit-bias', '5000:1'], 'logit-bias'),
                (['generate', 'a', '--logits', '/no/such/folder/x'], '--logits'), (['generate', 'a', '--raw', '--think'], '--raw'), (['generate', 'a', '--what'], '--what'),
                (['generate', 'a', '--regex', '(a'], '--regex'), (['generate', 'a', '--regex', '((a{99}){99}){99}'], '--regex'),
                (['frobnicate'], 'frobnicate')):
            with self.subTest(arguments=arguments):
                self.check_error(run(*arguments), 2, part)

    def test_misspelt_flags_are_named_alone(self):
        for words, flag, similar in ((('generate', '--modle', 'x', 'hi'), '--modle', '--model'), (('generate', 'hi', '--max-tokns=5'), '--max-tokns', '--max-tokens'),
                                     (('serve', '--prot', '80'), '--prot', '--port'), (('bench', 'ops', '--secnds', '1'), '--secnds', '--seconds'),
                                     (('plan', 'kernels', '--traget', 'h200'), '--traget', '--target')):
            result = run(*words)
            self.check_error(result, 2, f'unknown flag {flag}, did you mean {similar}? (try tessera ')
        result = run('generate', '--frobnicate', 'hi')
        self.check_error(result, 2, 'unknown flag --frobnicate (try tessera generate --help)')
        self.check_error(run('genrate', 'hi'), 2, 'unknown verb genrate, did you mean generate?', 'verbs: generate, chat')
        self.check_error(run('bench', 'opps'), 2, 'unknown verb opps, did you mean ops?')
        self.check_error(run('frobnicate'), 2, 'frobnicate', 'verbs: generate, chat')

    def test_invalid_utf8_and_long_prompts(self):
        self.check_error(run('generate', '-', stdin=b'a\xff'), 2, 'UTF-8')
        self.check_error(run('generate', '-', stdin=b''), 2, 'prompt')
        with tempfile.TemporaryDirectory() as folder:
            unreadable = os.open(folder, os.O_RDONLY)
            result = subprocess.run([PROGRAM, 'generate', '-'], stdin=unreadable, capture_output=True, timeout=120)
            os.close(unreadable)
        self.check_error(result, 2, 'cannot read stdin: Is a directory')
        self.check_error(run('generate', '--raw', '-', stdin=b'word ' * 6000), 2, '4096')

    def test_help_that_cannot_be_written_is_a_failure(self):
        for arguments in (['--help'], ['generate', '--help'], ['--help-all'], ['--version'], []):
            with self.subTest(arguments=arguments), open('/dev/full', 'w') as full:
                result = subprocess.run([PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, timeout=120)
                self.assertNotEqual(result.returncode, 0)
                self.assertIn(b'stdout: cannot write all of the result: No space left', result.stderr)

    def test_closed_standard_files_are_not_taken_for_others(self):
        question = self.folder / 'question.jsonl'
        question.write_text('{"prompt_ids": [0, 3, 24, 4, 6], "expected": "19", "task": "a"}\n')
        for closed in (1, 2):
            answers = self.folder / f'answers{closed}.jsonl'
            result = subprocess.run([PROGRAM, 'eval', str(question), '--answers', str(answers)], capture_output=True, timeout=120,
                                    preexec_fn=lambda: os.close(closed))
            self.assertEqual(result.returncode, 1 if closed == 1 else 0, result.stderr)
            if closed == 1:
                self.assertIn(b'stdout: cannot write all of the result', result.stderr)
            lines = answers.read_text().splitlines()
            self.assertEqual(len(lines), 1, lines)
            json.loads(lines[0])

    def test_bad_models(self):
        self.check_error(run('generate', 'a', '--model', str(self.folder / 'none')), 3, 'none')
        self.check_error(run('generate', 'a', '--model', str(self.folder)), 3, 'config.json')
        model = self.copy_model()
        whole = (model / 'model.safetensors').read_bytes()
        for size in (0, 7, 8, 1000, len(whole) // 2, len(whole) - 1):
            (model / 'model.safetensors').write_bytes(whole[:size])
            self.check_error(run('generate', 'a', '--model', str(model)), 3, 'model.safetensors')
        (model / 'model.safetensors').write_bytes(whole + b'x')
        self.check_error(run('generate', 'a', '--model', str(model)), 3, 'model.safetensors')
        (model / 'model.safetensors').unlink()
        self.check_error(run('generate', 'a', '--model', str(model)), 3, 'model.safetensors')
        # Flags are looked at before weights.
        self.check_error(run('generate', 'a', '--regex', '(a', '--model', str(model)), 2, '--regex')

    def test_bad_config_and_tokenizer(self):
        model = self.copy_model()
        config, tokenizer = (model / 'config.json').read_text(), (model / 'tokenizer.json').read_text()
        for text, part in (('', 'config.json'), ('{}', 'model_type'), (config.replace('"hidden_size": 256', '"hidden_size": 255'), 'tensor'),
                           (config.replace('"hidden_size": 256', '"hidden_size": 1000000000000'), 'hidden_size'), (config[:500], 'config.json'),
                           (config.replace('deepseek_v4', 'llama'), 'model_type')):
            (model / 'config.json').write_text(text)
            self.check_error(run('generate', 'a', '--model', str(model)), 3, part)
        (model / 'config.json').write_text(config)
        for text in ('', '{}', tokenizer[:5000], tokenizer.replace('"BPE"', '"WordPiece"')):
            (model / 'tokenizer.json').write_text(text)
            self.check_error(run('generate', 'a', '--model', str(model)), 3, 'tokenizer.json')
        (model / 'tokenizer.json').unlink()
        self.check_error(run('generate', 'a', '--model', str(model)), 3, 'tokenizer.json')
        result = run('generate', '--ids', '0,3,31,4,6', '--quiet', '--model', str(model))
        self.assertEqual(result.returncode, 0, 'ids need no tokenizer')

    def test_a_damaged_weight_is_named(self):
        model = self.copy_model()
        path = model / 'model.safetensors'
        data = bytearray(path.read_bytes())
        size = struct.unpack('<Q', data[:8])[0]
        entry = json.loads(data[8:8 + size])['layers.2.attn.wq_a.weight_scale']
        data[8 + size + entry['data_offsets'][0] + 11] = 0x7F
        path.write_bytes(data)
        self.check_error(run('generate', 'a', '--model', str(model)), 3, 'layers.2.attn.wq_a.weight_scale', 'element 11', '0x7f')

    def test_an_overflow_is_traced_to_its_op(self):
        model = self.copy_model()
        path = model / 'model.safetensors'
        data = bytearray(path.read_bytes())
        size = struct.unpack('<Q', data[:8])[0]
        entry = json.loads(data[8:8 + size])['layers.3.attn.wkv.weight_scale_2']
        at = 8 + size + entry['data_offsets'][0]
        data[at:at + 4] = struct.pack('<f', 3e38)
        path.write_bytes(data)
        plain = run('generate', 'Spell mire.', '--model', str(model))
        self.check_error(plain, 7, 'first output that is not finite: layers.3.attn.wkv')
        traced = run('generate', '--trace-op', 'Spell mire.', '--model', str(model))
        self.assertEqual(traced.returncode, 7)
        self.assertIn('first output that is not finite: layers.3.attn.wkv', traced.stderr.decode())

    def test_too_little_memory(self):
        self.check_error(run('generate', 'a', TESSERA_MEMORY_BYTES='1000000'), 4, 'missing', 'MiB')

    def test_bypass_is_loud(self):
        for part in ('shared_experts', 'routed_experts', 'compressed_entries'):
            result = run('generate', '--quiet', 'Spell mire.', '--max-tokens', '5', TESSERA_BYPASS=part)
            self.assertEqual(result.returncode, 7)
            self.assertIn('not the model', result.stderr.decode())
        self.check_error(run('generate', 'a', TESSERA_BYPASS='attention'), 2, 'TESSERA_BYPASS')

    def test_forced_variants(self):
        self.assertEqual(run('generate', '--quiet', 'Spell mire.', TESSERA_FORCE='linear=ref').stdout, b'm i r e\n')
        self.check_error(run('generate', 'a', TESSERA_FORCE='linear=amx9'), 2, 'amx9')

    def test_interrupt_keeps_what_was_made(self):
        process = subprocess.Popen([PROGRAM, 'generate', '--max-tokens', '4000', '--temperature', '5', '--seed', '1', '--raw', 'And'],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
        if process.returncode == 0:
            self.skipTest('the model ended by itself first')
        self.assertEqual(process.returncode, 130, errors)
        self.assertTrue(first and rest.endswith(b'\n'))

    def test_a_closed_pipe_ends_it(self):
        process = subprocess.Popen([PROGRAM, 'generate', '--max-tokens', '4000', '--temperature', '5', '--seed', '1', '--raw', 'And'],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.read(1)
        process.stdout.close()
        self.assertIn(process.wait(timeout=60), (0, 1))
        process.stderr.close()


if __name__ == '__main__':
    unittest.main(argv=['cli_test'])
