#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One model shared by several processes, through the program: the same answers, and the end of all where one is lost.

    ranks_test.py PROGRAM MODEL_FOLDER
"""
import contextlib
import ctypes
import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import threading
import time
import unittest
import urllib.request

from program import LAUNCHER, MODEL, PROGRAM, ProgramTest, environment, run
from served import LoadingServer

QUESTION = 'Compute 257-7.'


def generate(*flags, **changes):
    return run('generate', QUESTION, '--model', str(MODEL), '--json', '--max-tokens', '24', *flags, **changes)


def children_of(pid):
    """Processes that run the program for it; its grammar helper has another name for its arguments' end."""
    found = []
    for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
        try:
            parent = int(path.read_text().rpartition(')')[2].split()[1])
            arguments = (path.parent / 'cmdline').read_bytes()
        except (OSError, ValueError):
            continue
        if parent == pid and b'--rank-secret-file' in arguments:
            found.append(int(path.parent.name))
    return found


def rank_of(pid):
    variables = pathlib.Path(f'/proc/{pid}/environ').read_bytes().split(b'\0')
    return int(next(text for text in variables if text.startswith(b'RANK=')).removeprefix(b'RANK='))


def is_running(pid):
    try:
        return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    except OSError:
        return False


def wedge(pid):
    """Halts the process's main thread, but not those that send its heartbeats: where it waits for an order, not where it
    is about to let go of what they need. False: it may not be done here."""
    while pathlib.Path(f'/proc/{pid}/task/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'S':
        time.sleep(0.02)
    ptrace = ctypes.CDLL(None).ptrace
    ptrace.argtypes, ptrace.restype = [ctypes.c_long] * 4, ctypes.c_long
    seize, interrupt = 0x4206, 0x4207
    return ptrace(seize, pid, 0, 0) == 0 and ptrace(interrupt, pid, 0, 0) == 0


def end_of(process, wedged, seconds):
    """Its exit code, or None. Who has halted a process must also see it end before its parent can."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        try:
            os.waitpid(wedged, os.WNOHANG | 0x40000000)  # __WALL
        except ChildProcessError:
            pass
        time.sleep(0.05)
    return process.returncode


class Server:
    def __init__(self, *flags, silence='10'):
        self.process = subprocess.Popen(
            [PROGRAM, 'serve', '--model', str(MODEL), '--port', '0', '--quiet', '--cache-memory', '0.1', '--prefix-cache-memory', '0.1',
             '--max-model-len', '512', '--rank-timeout', silence, *flags],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True)
        self.url = self.process.stdout.readline().strip()
        self.followers = children_of(self.process.pid)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.followers:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()

    def metrics(self):
        with urllib.request.urlopen(self.url + '/metrics', timeout=60) as answer:
            return answer.read().decode()

    def ask(self, question):
        body = {'model': MODEL.name, 'temperature': 0, 'max_tokens': 24, 'messages': [{'role': 'user', 'content': question}]}
        request = urllib.request.Request(self.url + '/v1/chat/completions', json.dumps(body).encode(), {'Content-Type': 'application/json'})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)['choices'][0]['message']['content']


class Client(threading.Thread):
    """A request, until the server closes its connection: the bytes that came."""

    def __init__(self, url, **more):
        super().__init__()
        self.answer = b''
        self.body = json.dumps({'model': MODEL.name, 'prompt': 'One, two', 'max_tokens': 450, 'temperature': 1, 'ignore_eos': True, **more}).encode()
        self.address = url.removeprefix('http://').split(':')
        self.start()

    def run(self):
        with socket.create_connection(self.address, timeout=90) as client:
            client.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s' % (len(self.body), self.body))
            while part := client.recv(65536):
                self.answer += part


class Ranks(ProgramTest):
    def test_every_split_gives_one_ranks_tokens(self):
        alone = generate()
        self.assertEqual(alone.returncode, 0, alone.stderr)
        for split in ('auto', 'experts', 'heads', 'width', 'experts-width'):
            with self.subTest(split=split):
                shared = generate('--ranks', '2', '--rank-split', split)
                self.assertEqual((shared.returncode, shared.stdout), (0, alone.stdout), shared.stderr)
        for heads in ('own', 'all'):
            with self.subTest(heads=heads):
                shared = generate('--ranks', '2', '--rank-split', 'width', '--rank-heads', heads)
                self.assertEqual((shared.returncode, shared.stdout), (0, alone.stdout), shared.stderr)

    def test_sharded_caches_change_no_token(self):
        # Some pages long, so that each rank reads the others'.
        flags = ('--raw', '--max-tokens', '48', '--temperature', '1', '--seed', '3')
        prompt = ' '.join(f'{n} plus {n * 7}' for n in range(150))
        for split in ('experts', 'width'):
            with self.subTest(split=split):
                whole = run('generate', *flags, '--model', str(MODEL), '--ranks', '2', '--rank-split', split, prompt)
                sharded = run('generate', *flags, '--model', str(MODEL), '--ranks', '2', '--rank-split', split, '--rank-caches', 'sharded', prompt)
                self.assertEqual((sharded.returncode, sharded.stdout), (0, whole.stdout), sharded.stderr)
                self.assertGreater(len(whole.stdout), 0)

    def test_the_programs_name_and_left_over_variables_do_no_harm(self):
        shared = generate('--ranks', '2', LOCAL_WORLD_SIZE='8')
        self.assertEqual((shared.returncode, shared.stdout), (0, generate().stdout), shared.stderr)
        renamed = subprocess.run(['generate', 'generate', QUESTION, '--model', str(MODEL), '--json', '--max-tokens', '24', '--ranks', '2'],
                                 executable=PROGRAM, capture_output=True, timeout=120, env=environment())
        self.assertEqual((renamed.returncode, renamed.stdout), (0, shared.stdout), renamed.stderr)

    def test_a_launcher_of_one_process_starts_the_program_alone(self):
        for variables in ({'RANK': '0', 'WORLD_SIZE': '1', 'LOCAL_RANK': '0'}, {'SLURM_PROCID': '0', 'SLURM_STEP_NUM_TASKS': '1'},
                          {'LWS_WORKER_INDEX': '0', 'LWS_GROUP_SIZE': '1', 'LWS_LEADER_ADDRESS': 'leader'}):
            with self.subTest(variables=variables):
                shared = generate('--ranks', '2', **variables)
                self.assertEqual((shared.returncode, shared.stdout), (0, generate().stdout), shared.stderr)

    def test_a_slurm_jobs_script_starts_its_ranks(self):
        job = {'SLURM_PROCID': '0', 'SLURM_LOCALID': '0', 'SLURM_NTASKS': '2', 'SLURM_JOB_ID': '7'}
        shared = generate('--ranks', '2', '--quiet', **job)
        self.assertEqual((shared.returncode, shared.stdout), (0, generate().stdout), shared.stderr)
        self.assertEqual(shared.stderr.decode(), '--ranks 2: all on this machine; srun, which starts ranks as tasks of a job (SLURM_NTASKS is 2), '
                         'has not started this one\n')
        self.assertEqual(generate('--ranks', '2', '--quiet', **job | {'SLURM_NTASKS': '1'}).stderr, b'')
        self.check_error(generate('--ranks', '2', '--rank-secret-file', __file__, **job), 2,
                         '--rank-secret-file: expected a launcher that starts the ranks', 'found the script of a SLURM job', 'start them with srun')
        # A task of srun's waits for the other.
        self.check_error(generate('--ranks', '2', SLURM_STEP_NUM_TASKS='2', **job), 2, '--rank-secret-file: expected a file, since a launcher starts the ranks')

    def test_one_rank_takes_what_many_are_given(self):
        flags = ('--ranks', '1', '--rank-split', 'width', '--rank-heads', 'all', '--rank-caches', 'sharded', '--rank-wait', '9', '--rank-timeout', '5')
        self.assertEqual(generate(*flags).stdout, generate().stdout)
        for only_launchers in (('--rank-secret-file', __file__), ('--rank-listen', '127.0.0.1')):
            with self.subTest(flags=only_launchers):
                self.assertEqual(generate(*flags, *only_launchers, OMPI_COMM_WORLD_RANK='0', OMPI_COMM_WORLD_SIZE='1').returncode, 0)
                self.check_error(generate(*flags, *only_launchers), 2,
                                 f'{only_launchers[0]}: expected a launcher that starts the ranks (RANK and WORLD_SIZE), found none')

    def test_seeded_draws_of_experts_by_id_are_one_ranks(self):
        flags = ('--temperature', '0.9', '--seed', '7')
        shared = generate('--ranks', '2', *flags)
        self.assertEqual((shared.returncode, shared.stdout), (0, generate(*flags).stdout), shared.stderr)

    def test_the_server_answers_and_ends(self):
        for caches in ('replicated', 'sharded'):
            with self.subTest(caches=caches), Server('--ranks', '2', '--rank-caches', caches) as server:
                self.assertEqual(len(server.followers), 1)
                expected = json.loads(generate().stdout)['text']
                self.assertEqual([server.ask(QUESTION) for _ in range(2)], [expected] * 2)  # the second from the prefix cache
                server.process.send_signal(signal.SIGTERM)
                self.assertEqual(server.process.wait(60), 0, server.process.stderr.read())
                self.assertFalse(is_running(server.followers[0]))

    def test_a_server_that_loads_ends_all(self):
        with LoadingServer('--ranks', '2') as server:
            followers = children_of(server.process.pid)
            self.assertEqual(len(followers), 1)
            self.assertEqual(server.end(), 0)
            for _ in range(500):
                if not is_running(followers[0]):
                    break
                time.sleep(0.01)
            self.assertFalse(is_running(followers[0]))
            server.go_on()
            self.assertEqual(server.said(), [])

    def expect_all_end(self, victim, by, named):
        with Server('--ranks', '4') as server:
            self.assertEqual(len(server.followers), 3)
            ranks = [server.process.pid, *sorted(server.followers, key=rank_of)]
            os.kill(ranks[victim], by)
            begin = time.monotonic()
            while any(is_running(pid) for rank, pid in enumerate(ranks) if rank != victim) and time.monotonic() < begin + 90:
                time.sleep(0.05)
            for rank, pid in enumerate(ranks):
                self.assertEqual(is_running(pid), False, f'rank {rank}')
            said = server.process.stderr.read()
            # Rank 0 says once what all found; without it each says so by itself.
            self.assertEqual(said.count(named), 3 if victim == 0 else 1, said)
            if victim != 0:
                self.assertEqual(server.process.wait(60), 5)

    def test_a_killed_rank_ends_all(self):
        self.expect_all_end(1, signal.SIGKILL, 'lost rank 1 of 4')

    def test_a_killed_rank_0_ends_all(self):
        self.expect_all_end(0, signal.SIGKILL, 'lost rank 0 of 4')

    def test_a_stopped_rank_ends_all(self):
        self.expect_all_end(2, signal.SIGSTOP, 'lost rank 2 of 4')

    def test_clients_are_told_of_a_lost_rank(self):
        for by, silence, seconds in ((signal.SIGKILL, '10', 2), (signal.SIGSTOP, '3', 12)):
            with self.subTest(by=by), Server('--ranks', '2', silence=silence) as server:
                whole, stream = Client(server.url), Client(server.url, stream=True)
                idle = socket.create_connection(whole.address)  # does not hold up the end
                self.addCleanup(idle.close)
                while 'tessera_requests_running{model_name="tiny-v4"} 2\n' not in server.metrics():
                    time.sleep(0.01)
                os.kill(server.followers[0], by)
                begin = time.monotonic()
                self.assertEqual(server.process.wait(60), 5)
                self.assertLess(time.monotonic() - begin, seconds)
                for client in (whole, stream):
                    client.join()
                error = b'{"error":{"message":"server: expected ready, found ending: rank 1 was lost","type":"server_error","param":null,"code":"unavailable"}}'
                self.assertTrue(whole.answer.startswith(b'HTTP/1.1 503 '), whole.answer)
                self.assertTrue(whole.answer.endswith(b'\r\n\r\n' + error), whole.answer)
                self.assertTrue(stream.answer.startswith(b'HTTP/1.1 200 '), stream.answer)
                self.assertTrue(stream.answer.endswith(b'data: ' + error + b'\n\n\r\n0\r\n\r\n'), stream.answer[-400:])
                self.assertRegex(server.process.stderr.read(), r'^tessera: lost rank 1 of 2 \(.*\n$')

    def test_ranks_that_have_not_joined_end_with_rank_0(self):
        process = subprocess.Popen([PROGRAM, 'generate', QUESTION, '--model', str(MODEL), '--ranks', '3', '--quiet'],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
        followers = []
        while not followers and process.poll() is None:
            followers = children_of(process.pid)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 60
        while any(is_running(pid) for pid in followers) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = [pid for pid in followers if is_running(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self.assertEqual(left, [])

    def test_a_program_that_waits_for_its_ranks_is_stopped_with_them(self):
        for verb, code in ((('generate', QUESTION), 130), (('serve', '--port', '0'), 0)):
            with self.subTest(verb=verb[0]):
                process = subprocess.Popen([PROGRAM, *verb, '--model', str(MODEL), '--ranks', '2'], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                           env=environment(), text=True)
                followers = []
                while not followers and process.poll() is None:
                    followers = children_of(process.pid)
                os.kill(followers[0], signal.SIGSTOP)
                time.sleep(0.5)
                process.send_signal(signal.SIGINT)
                said = process.communicate(timeout=60)[1]
                self.assertEqual((process.returncode, said), (code, ''))
                self.assertFalse(is_running(followers[0]))

    def test_a_benchmark_that_is_stopped_ends_quietly(self):
        flags = ('bench', 'model', '--synthetic', 'small', '--ranks', '2', '--threads', '1', '--contexts', '24', '--batches', '1', '--decode', '2', '--repeats', '1000')
        secret = self.folder / 'secret'
        secret.write_text('a secret of these ranks')
        secret.chmod(0o600)
        with socket.socket() as probe:
            probe.bind(('127.0.0.1', 0))
            port = probe.getsockname()[1]
        by_launcher = [({'RANK': str(rank), 'WORLD_SIZE': '2', 'MASTER_PORT': str(port)}, ('--rank-secret-file', str(secret))) for rank in (0, 1)]
        for ranks in ([({}, ())], by_launcher):
            for by in (signal.SIGINT, signal.SIGTERM):
                with self.subTest(by=by, processes=len(ranks)):
                    processes = [subprocess.Popen([PROGRAM, *flags, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                                  env=environment(**variables)) for variables, more in ranks]
                    self.assertIn('random weights', processes[0].stdout.readline())
                    processes[0].send_signal(by)
                    said = [process.communicate(timeout=60)[1] for process in processes]
                    self.assertEqual([process.returncode for process in processes], [130] * len(ranks), said)
                    self.assertEqual(said, [''] * len(ranks))

    def test_a_rank_that_is_lost_shortly_before_a_signal_is_said(self):
        flags = ('bench', 'model', '--synthetic', 'small', '--ranks', '2', '--threads', '1', '--contexts', '24', '--batches', '1', '--decode', '2', '--repeats', '1000')
        process = subprocess.Popen([PROGRAM, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
        self.assertIn('random weights', process.stdout.readline())
        os.kill(children_of(process.pid)[0], signal.SIGKILL)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 130, said)
        self.assertIn('lost rank 1 of 2', said)
        self.assertEqual(said.count('\n'), 1, said)

    def test_ranks_inherit_no_open_files(self):
        with Server('--ranks', '2') as server:
            links = []
            for path in pathlib.Path(f'/proc/{server.followers[0]}/fd').iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    links.append(os.readlink(path))
            self.assertEqual([link for link in links if 'rank-secret' in link], [])
            self.assertEqual(links.count('/dev/null'), 2, links)  # its stdin and stdout

    def ask_in_vain(self, server):
        try:
            server.ask(QUESTION)
        except (OSError, http.client.HTTPException):
            pass

    def test_a_rank_that_comes_to_no_step_ends_the_server(self):
        with Server('--ranks', '2') as server:
            if not wedge(server.followers[0]):
                self.skipTest('ptrace is not allowed here')
            asking = threading.Thread(target=self.ask_in_vain, args=(server,))
            asking.start()
            self.assertEqual(end_of(server.process, server.followers[0], 90), 5)
            asking.join()
            said = server.process.stderr.read()
            self.assertRegex(said, r'tessera: rank 0 of 2 failed: .*: rank 1 of 2 stalls: nothing came from it within 12.5 s\n')

    def test_a_rank_that_does_not_end_is_ended(self):
        with Server('--ranks', '2') as server:
            if not wedge(server.followers[0]):
                self.skipTest('ptrace is not allowed here')
            server.process.send_signal(signal.SIGTERM)
            self.assertEqual(end_of(server.process, server.followers[0], 90), 5)
            self.assertIn('rank 1 of 2 stalls: nothing came from it within 20 s', server.process.stderr.read())
            self.assertFalse(is_running(server.followers[0]))

    def test_a_stopped_rank_does_not_hold_up_the_end(self):
        for by in (signal.SIGTERM, signal.SIGINT):
            with self.subTest(by=by), Server('--ranks', '2', silence='60') as server:
                os.kill(server.followers[0], signal.SIGSTOP)
                server.process.send_signal(by)
                begin = time.monotonic()
                self.assertEqual(server.process.wait(60), 5)
                self.assertLess(time.monotonic() - begin, 12)
                self.assertRegex(server.process.stderr.read(), r'^tessera: lost rank 1 of 2 \(.*\): silent for [5-9].* s\n$')
                self.assertFalse(is_running(server.followers[0]))
        process = subprocess.Popen([PROGRAM, 'generate', '--raw', 'One, two', '--max-tokens', '100000', '--model', str(MODEL), '--ranks', '2', '--rank-timeout', '60',
                                    '--quiet'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True)
        process.stdout.read(1)  # it answers
        os.kill(children_of(process.pid)[0], signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        said = process.communicate(timeout=60)[1]
        self.assertLess(time.monotonic() - begin, 12)
        self.assertEqual(process.returncode, 5)
        self.assertRegex(said, r'tessera: .*lost rank 1 of 2 \(.*\): silent for [5-9].* s\n$')

    def test_caches_that_do_not_fit_are_refused(self):
        for flags in (('--cache-memory', '900000'), ('--cache-memory', '0.1', '--prefix-cache-memory', '900000')):
            with self.subTest(flags=flags):
                result = run('serve', '--ranks', '2', '--model', str(MODEL), '--port', '0', '--quiet', '--max-model-len', '512', *flags)
                said = result.stderr.decode()
                self.assertEqual((result.returncode, result.stdout), (4, b''), said)
                self.assertRegex(said, r'tessera: caches: expected at most the .* that the weights leave .*, found .* for answers and .* for prefixes')

    def test_a_fault_that_all_ranks_find_is_said_once(self):
        bad = self.folder / 'bad'
        shutil.copytree(MODEL, bad)
        os.truncate(bad / 'model.safetensors', (MODEL / 'model.safetensors').stat().st_size - 100)
        for _ in range(5):  # which of them ends first is chance
            result = run('generate', QUESTION, '--model', str(bad), '--ranks', '4')
            self.check_error(result, 3, 'model.safetensors: ', ': data_offsets: expected')
        for _ in range(5):
            result = generate('--ranks', '4', TESSERA_FORCE='linear=nothing')
            self.check_error(result, 2, 'TESSERA_FORCE: no variant "nothing" of an op "linear" can run on this machine')

    def test_the_exit_code_is_the_causes(self):
        # Rank 0 has a file there, the others /dev/null: before they have come (the tokenizer), and once all are there.
        for file in ('tokenizer.json', 'model.safetensors'):
            folder = self.folder / file
            shutil.copytree(MODEL, folder)
            (folder / file).unlink()
            (folder / file).symlink_to('/proc/self/fd/0')
            with self.subTest(file=file), open(MODEL / file, 'rb') as whole:
                result = subprocess.run([PROGRAM, 'generate', QUESTION, '--model', str(folder), '--ranks', '2', '--quiet'], stdin=whole,
                                        capture_output=True, timeout=120, env=environment())
                self.check_error(result, 3, 'tessera: rank 1 of 2: ', f'/{file}: ')

    def test_a_rank_that_ends_before_it_has_come_ends_all_at_once(self):
        for by in (signal.SIGKILL, signal.SIGTERM):
            for _ in range(10):  # it may have come before it is found
                process = subprocess.Popen([PROGRAM, 'generate', QUESTION, '--model', str(MODEL), '--ranks', '4', '--quiet'],
                                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True)
                followers = []
                while not followers and process.poll() is None:
                    followers = children_of(process.pid)
                rank = rank_of(followers[0])
                os.kill(followers[0], by)
                begin = time.monotonic()
                said = process.communicate(timeout=120)[1]
                self.assertLess(time.monotonic() - begin, 4)
                if not any(words in said for words in ('lost rank', 'has gone', 'dropped a connection')):
                    break
            self.assertEqual((process.returncode, said), (5, f'tessera: rank {rank} of 4 failed: ended before it had come: signal {int(by)}\n'))

    def test_the_last_rank_by_itself_is_measured(self):
        flags = ('--synthetic', 'small', '--ranks', '2', '--only-last-rank', '--batches', '1,2',
                 '--decode', '2', '--repeats', '1')
        measured = run('bench', 'model', *flags, '--contexts', '24', '--json')
        self.assertEqual(measured.returncode, 0, measured.stderr)
        steps = json.loads(measured.stdout)
        self.assertEqual((steps['ranks'], steps['only_last_rank']), (2, True))
        self.assertEqual([row['sequences'] for row in steps['rows']], [1, 1, 2])
        self.assertIn(b'rank 1 of 2 by itself', run('bench', 'model', *flags, '--contexts', '24').stdout)
        # Steps whose tokens are cut, and one behind random cache entries.
        cut = run('bench', 'model', '--synthetic', 'small', '--layers', '3', '--ranks', '2', '--only-last-rank', '--contexts', '1024,131200',
                  '--step-tokens', '1024', '--batches', '1', '--decode', '1', '--repeats', '1')
        self.assertEqual(cut.returncode, 0, cut.stderr)
        self.assertIn(b"(the first 130176 tokens' cache entries are random)", cut.stdout)
        for wrong, part in (
                (('--synthetic', 'small', '--only-last-rank'), '--only-last-rank: expected --gpus or --ranks besides'),
                ((*flags, '--contexts', '1030', '--step-tokens', '1025'), '--step-tokens 1025: with --only-last-rank expected steps that 2 ranks share'),
                (('--synthetic', 'small', '--ranks', '1', '--only-last-rank'), '--only-last-rank: expected --ranks of 2 or more, found 1'),
                ((*flags, '--rank-listen', '127.0.0.1'), '--rank-listen: expected a launcher')):
            with self.subTest(flags=wrong):
                self.check_error(run('bench', 'model', *wrong), 2, part)
        self.check_error(run('bench', 'model', *flags, '--contexts', '24', RANK='0', WORLD_SIZE='2'), 2, '--only-last-rank: expected no launcher')

    def test_wrong_flags_are_refused(self):
        for flags, part in ((('--ranks', ''), '--ranks: expected a whole number, found ""'),
                            (('--gpus', ''), '--gpus: expected a whole number, found ""'),
                            (('--ranks', '2', '--rank-wait', ''), '--rank-wait: expected a number, found ""'),
                            (('--ranks', '2', '--rank-timeout', ''), '--rank-timeout: expected a number, found ""'),
                            (('--ranks', 'many'), '--ranks: expected a whole number, found "many"'),
                            (('--ranks', '2', '--rank-timeout', 'x'), '--rank-timeout: expected a number, found "x"'),
                            (('--ranks', '-1'), '--ranks: expected 1 to 1024, found -1'),
                            (('--ranks', '0'), '--ranks: expected 1 to 1024, found 0'),
                            (('--gpus', '0'), '--gpus: expected 1 to 1024, found 0'),
                            (('--gpus', '0', '--ranks', '2'), 'give --gpus or --ranks, not both'),
                            (('--rank-split', 'heads'), '--rank-split: expected --gpus or --ranks besides'),
                            (('--rank-heads', 'all'), '--rank-heads: expected --gpus or --ranks besides'),
                            (('--ranks', '2', '--rank-heads', 'some'), '--rank-heads: expected auto, own or all, found "some"'),
                            (('--rank-caches', 'sharded'), '--rank-caches: expected --gpus or --ranks besides'),
                            (('--ranks', '2', '--rank-caches', 'some'), '--rank-caches: expected auto, replicated or sharded, found "some"'),
                            (('--rank-wait', '9'), '--rank-wait: expected --gpus or --ranks besides'),
                            (('--ranks', '7'), '--ranks: expected a number that divides what --rank-split experts cuts, found 7'),
                            (('--ranks', '2', '--gpus', '2'), 'give --gpus or --ranks, not both'),
                            (('--ranks', '2', '--rank-split', 'layers'), '--rank-split: expected auto, experts, heads, width or experts-width'),
                            (('--ranks', '2', '--device', 'cuda:1'), '--ranks takes processors: expected --device cpu, found cuda:1'),
                            (('--gpus', '2', '--device', 'cpu'), '--gpus takes cuda:0 on: expected no --device, found cpu'),
                            (('--ranks', '2', '--rank-timeout', '0'), '--rank-timeout: expected 0.5 to 1000000, found 0'),
                            (('--ranks', '2', '--rank-listen', 'node0:29500'),
                             '--rank-listen: expected a host\'s name or IP address, without a port, or *, found "node0:29500"')):
            with self.subTest(flags=flags):
                self.check_error(generate(*flags), 2, part)
        self.check_error(generate('--ranks', '2', '--rank-secret-file', __file__), 2, '--rank-secret-file: expected a launcher')
        self.check_error(generate('--ranks', '2', '--rank-listen', '*'), 2, '--rank-listen: expected a launcher')
        self.check_error(generate('--ranks', '2', RANK='0', WORLD_SIZE='2'), 2, '--rank-secret-file')
        self.check_error(generate('--ranks', '2', '--rank-secret-file', __file__, SLURM_PROCID='0', SLURM_STEP_NUM_TASKS='1'), 2,
                         '--rank-secret-file: expected a launcher', 'found one of a single process (SLURM_PROCID)')
        self.check_error(generate('--ranks', '3', RANK='0', WORLD_SIZE='2'), 2, '--ranks: expected 2', 'found 3')


for name in LAUNCHER:
    os.environ.pop(name, None)
if __name__ == '__main__':
    unittest.main(argv=['ranks_test'])
