#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ranks that a launcher starts, through the program: how they meet, agree, and end where one does not come.

    launcher_test.py PROGRAM MODEL_FOLDER
"""
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest

from program import LAUNCHER, MODEL, PROGRAM, ProgramTest, environment, run

QUESTION = 'Compute 257-7.'


class Launched(ProgramTest):
    def launched(self, *flags_of_ranks, world=2, mode=0o600, secret='a secret of these ranks\n', has_verbs=False, changes=({}, {}), model=MODEL):
        """Exit codes and stderr of ranks that a launcher starts. Its free port may be another's when rank 0 listens: then again."""
        for _ in range(10):
            codes, said, out = self.launched_once(*flags_of_ranks, world=world, mode=mode, text=secret, has_verbs=has_verbs, changes=changes, model=model)
            if not any("can't listen at" in line for line in said[0]):
                break
        return codes, said, out

    def launched_once(self, *flags_of_ranks, has_verbs, **how):
        if not has_verbs:
            flags_of_ranks = [('generate', QUESTION, '--json', '--max-tokens', '4', *flags) for flags in flags_of_ranks]
        ranks = self.start(*flags_of_ranks, **how)
        ends = [(rank.communicate(timeout=120), rank.returncode) for rank in ranks]
        return [code for _, code in ends], [said[1].splitlines() for said, _ in ends], [said[0] for said, _ in ends]

    def start(self, *flags_of_ranks, world, mode=0o600, text='a secret of these ranks', changes=({}, {}), model=MODEL):
        """The processes, as a launcher starts them, of those of `world` ranks whose verb and flags are given."""
        secret = self.folder / 'secret'
        secret.write_text(text)
        secret.chmod(mode)
        with socket.socket() as probe:
            probe.bind(('127.0.0.1', 0))
            port = self.port = probe.getsockname()[1]
        ranks = []
        for rank, flags in enumerate(flags_of_ranks):
            env = environment(RANK=str(rank), WORLD_SIZE=str(world), MASTER_PORT=str(port), **{'MASTER_ADDR': '127.0.0.1'} | changes[rank])
            ranks.append(subprocess.Popen([PROGRAM, *flags, '--model', str(model[rank] if isinstance(model, tuple) else model), '--ranks', str(world), '--rank-secret-file', str(secret)],
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True))
        return ranks

    def test_a_launchers_ranks_join(self):
        codes, said, out = self.launched(('--quiet',), ())
        self.assertEqual(codes, [0, 0], said)
        self.assertIn('"text"', out[0])
        self.assertEqual(out[1], '')
        self.assertNotIn("the ranks' secret", ' '.join(said[0] + said[1]))

    def test_a_launchers_rank_that_fails_before_it_has_come_ends_all(self):
        begin = time.monotonic()
        flags = ('--rank-wait', '100')
        codes, said, _ = self.launched(flags, flags, flags, flags, world=4, changes=({},) * 4,
                                       model=(MODEL, MODEL, MODEL, self.folder / 'nothing'))
        self.assertLess(time.monotonic() - begin, 60)
        self.assertEqual(codes, [5, 5, 5, 3], said)
        self.assertRegex(said[3][-1], '^tessera: rank 3 of 4: .*/nothing/config.json: ')
        for rank in range(3):
            self.assertRegex(said[rank][-1], '^tessera: .*rank 3 of 4 failed: .*/nothing/config.json: ')

    def test_a_launchers_rank_0_that_fails_before_it_has_come_ends_all(self):
        begin = time.monotonic()
        flags = ('--rank-wait', '100')
        codes, said, _ = self.launched(flags, flags, flags, flags, world=4, changes=({},) * 4, model=(self.folder / 'nothing', MODEL, MODEL, MODEL))
        self.assertLess(time.monotonic() - begin, 60)
        self.assertEqual(codes, [3, 5, 5, 5], said)
        self.assertRegex(said[0][-1], '^tessera: .*/nothing/config.json: ')
        for rank in range(1, 4):
            self.assertRegex(said[rank][-1], f'^tessera: rank {rank} of 4: rank 0 at .*: rank 0 of 4 failed: .*/nothing/config.json: ')

    def test_a_launchers_ranks_that_all_fail_each_say_why(self):
        begin = time.monotonic()
        codes, said, _ = self.launched(*[('--rank-wait', '100')] * 4, world=4, changes=({},) * 4, model=self.folder / 'nothing')
        self.assertLess(time.monotonic() - begin, 60)
        self.assertEqual(codes, [3] * 4, said)
        for rank in range(4):
            self.assertEqual(len(said[rank]), 1, said)
            self.assertIn('/nothing/config.json: no such file', said[rank][0])

    def test_a_launchers_rank_that_its_flags_end_ends_all(self):
        serve = ('serve', '--port', '0', '--rank-wait', '100')
        right = ('generate', QUESTION, '--rank-wait', '100')
        for wrong, others, words in (
                ((*right, '--rank-timeout', '0'), right, '--rank-timeout: expected 0.5 to 1000000, found 0'),
                ((*right[:2], '--rank-wait', '0'), right, '--rank-wait: expected 0.1 to 1000000, found 0'),
                ((*right, '--rank-split', 'layers'), right, '--rank-split: expected auto, experts, heads, width or experts-width'),
                ((*right, '--raw', '--think'), right, '--raw takes the text as it is'),
                ((*serve, '--max-waiting', '0'), serve, '--max-waiting: expected 1 to 1000000, found 0')):
            for failing in (0, 1):
                with self.subTest(flags=wrong, failing=failing):
                    begin = time.monotonic()
                    flags = [others, others]
                    flags[failing] = wrong
                    codes, said, _ = self.launched(*flags, has_verbs=True)
                    self.assertLess(time.monotonic() - begin, 60)
                    self.assertEqual((codes[failing], codes[1 - failing]), (2, 5), said)
                    self.assertIn(words, said[failing][-1])
                    self.assertIn(f'rank {failing} of 2 failed: {words}', said[1 - failing][-1])

    def test_ranks_that_wait_for_another_are_stopped_with_rank_0(self):
        for verb, code, all_are_told in ((('generate', QUESTION), 130, False), (('serve', '--port', '0'), 0, False),
                                         (('generate', QUESTION), 130, True)):
            for by in (signal.SIGINT, signal.SIGTERM):
                with self.subTest(verb=verb[0], by=by, all_are_told=all_are_told):
                    ranks = self.start_two_that_wait(*verb)
                    for rank in ranks if all_are_told else ranks[:1]:
                        rank.send_signal(by)
                    said = [rank.communicate(timeout=60)[1] for rank in ranks]
                    # Who has not met the others yet is ended as usual.
                    self.assertEqual(ranks[0].returncode, code, said)
                    self.assertIn(ranks[1].returncode, (code, -by) if all_are_told else (code,), said)
                    self.assertEqual(said, [''] * 2)

    def start_two_that_wait(self, *flags):
        """Ranks 0 and 1 of four, when rank 0 has admitted the other."""
        said = None
        for _ in range(10):
            ranks = self.start(*[(*flags, '--rank-wait', '100')] * 2, world=4)
            while all(rank.poll() is None for rank in ranks):
                for line in pathlib.Path('/proc/net/tcp').read_text().splitlines()[1:]:
                    _, local, _, state = line.split()[:4]
                    if int(local.rpartition(':')[2], 16) == self.port and state == '01':  # connected
                        time.sleep(0.5)
                        return ranks
                time.sleep(0.02)
            for rank in ranks:
                rank.kill()
            said = [rank.communicate() for rank in ranks]
            if 'listen' not in said[0][1]:  # else the free port was another's when rank 0 listened
                break
        self.fail(f'two ranks that wait ended: {said}')

    def test_a_secret_that_others_can_read_is_remarked(self):
        codes, said, _ = self.launched((), (), mode=0o644)
        self.assertEqual(codes, [0, 0], said)
        self.assertRegex(said[0][0], "^warning: .*/secret: others than its owner can read or change the ranks' secret")

    def test_ranks_that_differ_say_in_what(self):
        for flags, other, words in (
                (('--mode', 'a16'), ('--mode', 'a8'), '--mode: expected "a16", found "a8"'),
                (('--cache', 'fp8'), ('--cache', 'exact'), '--cache: expected "fp8", found "exact"'),
                (('--rank-split', 'width'), ('--rank-split', 'heads'), '--rank-split: expected "width", found "heads"'),
                ((), ('--allow-inexact',), '--allow-inexact: expected "not given", found "given"')):
            with self.subTest(flags=other):
                codes, said, _ = self.launched(flags, other)
                self.assertEqual(codes, [2, 2], said)  # of whoever comes first
                for rank in range(2):
                    self.assertRegex(said[rank][-1], f'^tessera: rank 1 of 2 differs from rank 0 in {words}$')

    def test_a_damaged_checkpoint_of_one_rank_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            for number, (name, at, words) in enumerate((('model.safetensors', 0.65, 'the weights of model.safetensors'),
                                                        ('config.json', 1, 'config.json'))):
                other = pathlib.Path(folder) / str(number)
                shutil.copytree(MODEL, other)
                content = bytearray((other / name).read_bytes())
                if at < 1:
                    content[int(at * len(content))] ^= 1
                else:
                    content += b' '
                (other / name).write_bytes(content)
                codes, said, _ = self.launched((), (), model=(MODEL, other))
                self.assertEqual(codes, [2, 2], said)
                for rank in range(2):
                    self.assertIn(f'rank 1 of 2 differs from rank 0 in {words}: expected "', said[rank][-1])

    def test_other_verbs_and_longest_sequences_differ(self):
        codes, said, _ = self.launched(('serve', '--port', '0'), ('generate', QUESTION), has_verbs=True)
        self.assertEqual(codes, [2, 2], said)
        for rank in range(2):
            self.assertIn('rank 1 of 2 differs from rank 0 in verb: expected "serve", found "generate"', said[rank][-1])
        for flag, expected, found in (('--max-model-len', 4096, 256), ('--max-step-tokens', 64, 32), ('--max-running', 16, 3)):
            with self.subTest(flag=flag):
                codes, said, _ = self.launched(('serve', '--port', '0'), ('serve', '--port', '0', flag, str(found)), has_verbs=True)
                self.assertEqual(codes, [2, 2], said)
                for rank in range(2):
                    self.assertIn(f'differs from rank 0 in {flag}: expected "{expected}", found "{found}"', said[rank][-1])

    def test_every_rank_counts_rank_0s_prompt_and_answer(self):
        longer = self.folder / 'longer'
        shutil.copytree(MODEL, longer)
        config = json.loads((longer / 'config.json').read_text())
        config['max_position_embeddings'] = 1 << 20
        (longer / 'config.json').write_text(json.dumps(config))
        # What rank 0 alone is told needs more than rank 1 has.
        few, many = (('generate', QUESTION, '--rank-wait', '30', '--max-tokens', tokens) for tokens in ('4', '1000000'))
        changes = ({}, {'TESSERA_MEMORY_BYTES': str(200 << 20)})
        codes, said, _ = self.launched(many, few, has_verbs=True, model=longer, changes=changes)
        self.assertEqual(codes, [5, 4], said)
        self.assertRegex(said[1][-1], '^tessera: rank 1 of 2: does not fit: .* of sequence state .* are missing')
        self.assertRegex(said[0][-1], '^tessera: rank 1 of 2 failed: does not fit: ')
        codes, said, _ = self.launched(few, many, has_verbs=True, model=longer, changes=changes)
        self.assertEqual(codes, [0, 0], said)

    def test_the_least_of_cache_memory_is_said(self):
        secret = self.folder / 'secret'
        secret.write_text('a secret of these ranks')
        secret.chmod(0o600)
        for _ in range(10):  # the free port may be another's when rank 0 listens
            with socket.socket() as probe:
                probe.bind(('127.0.0.1', 0))
                port = probe.getsockname()[1]
            ranks = [subprocess.Popen([PROGRAM, 'serve', '--port', '0', '--model', str(MODEL), '--ranks', '2', '--rank-secret-file', str(secret),
                                       '--max-model-len', '512', '--cache-memory', running, '--prefix-cache-memory', prefixes],
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                      env=environment(RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port)))
                     for rank, (running, prefixes) in enumerate((('0.5', '0.25'), ('0.25', '0')))]
            is_ready = ranks[0].stdout.readline() != ''
            ranks[0].terminate()
            said = [rank.communicate(timeout=120)[1] for rank in ranks]
            if is_ready:
                break
        self.assertEqual([rank.returncode for rank in ranks], [0, 0], said)
        self.assertIn('caches 256.00 MiB (the least that a rank has; --cache-memory is 512.00 MiB here): a token', said[0])
        self.assertIn('prefix cache off (the least that a rank has; --prefix-cache-memory is 256.00 MiB here)', said[0])

    def test_a_secret_that_is_none_names_its_file(self):
        for text, found in (('', 0), ('short', 5), (' ' * 40, 0)):
            codes, said, _ = self.launched((), (), secret=text)
            self.assertEqual(codes, [2, 2], said)
            self.assertRegex(said[0][-1], f'--rank-secret-file .*: expected at least 16 characters, found {found}$')

    def test_nothing_but_a_secret_that_is_taken_is_remarked(self):
        short = self.folder / 'short'
        short.write_text('short')
        short.chmod(0o644)
        self.folder.chmod(0o755)
        for path, code, words in ((self.folder / 'none', 3, 'No such file'), (self.folder, 3, 'expected a regular file'), (short, 2, 'expected at least 16 characters, found 5')):
            with self.subTest(path=path.name):
                result = run('generate', QUESTION, '--model', str(MODEL), '--ranks', '2', '--rank-secret-file', str(path), '--rank-wait', '1', RANK='0', WORLD_SIZE='2')
                self.check_error(result, code, f'--rank-secret-file {path}: ', words)

    def test_an_address_that_is_not_this_machines_names_its_flag(self):
        for listen, name in ((('--rank-listen', '192.0.2.1'), '--rank-listen'), ((), 'MASTER_ADDR')):
            codes, said, _ = self.launched((*listen, '--rank-wait', '2'), changes=({'MASTER_ADDR': '192.0.2.1'},))
            self.assertEqual(codes, [2], said)
            self.assertIn(f'tessera: {name}: expected an address of this machine, found "192.0.2.1": ', said[0][-1])

    def test_a_missing_rank_is_named_by_those_who_wait(self):
        codes, said, _ = self.launched(('--rank-wait', '20'), (), world=4)
        self.assertEqual(codes, [5, 5])
        for rank in range(2):
            self.assertIn('ranks 2, 3 of 4 did not come to 127.0.0.1', said[rank][-1])


for name in LAUNCHER:
    os.environ.pop(name, None)
if __name__ == '__main__':
    unittest.main(argv=['launcher_test'])
