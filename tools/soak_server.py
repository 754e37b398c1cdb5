#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tessera serve under abuse, for longer than the tests: overload, slow clients, signals and kills at any moment, mixed
traffic.

    tools/soak_server.py PROGRAM [--seconds 60] [--signals 100] [--kills 100] [--only NAME,...] [--record FILE.json]

Other parts by name: disconnects (clients that go at random points, FIN and RST), schemas (hostile ones beside streams),
bodies (giant ones beside /health/live), conformance (schemathesis, where this Python has it: each operation of /openapi.json on servers of its own, in --seconds together). Each part fails where a promise breaks: an error that is no refusal, an answer that differs from that of the same request
alone, something left in the caches at the end. Times and memory are printed and recorded, not judged.
"""
import argparse
import concurrent.futures
import contextlib
import datetime
import http.client
import json
import os
import pathlib
import platform
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / 'tests/apps'))
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('program')
parser.add_argument('--seconds', type=float, default=60, help='of each part that has a length')
parser.add_argument('--signals', type=int, default=100)
parser.add_argument('--kills', type=int, default=100)
parser.add_argument('--disconnects', type=int, default=1000)
parser.add_argument('--examples', type=int, default=500, help='of each operation, by schemathesis')
parser.add_argument('--slow', type=int, default=300, help='slow connections')
parser.add_argument('--seed', type=int, default=0, help='of random moments')
parser.add_argument('--pause', type=float, default=0,
                    help="seconds between a client's requests in mixed traffic, after 20 s without (soaks beside other work)")
parser.add_argument('--only', default='signals,kills,overload,slow,mixed')
parser.add_argument('--record')
ARGUMENTS = parser.parse_args()
sys.argv = [sys.argv[0], ARGUMENTS.program, str(ROOT / 'models/tiny-v4')]
from served import Server, chat, end_at_a_moment, post_bytes, stream_text  # noqa: E402 (reads the program's path from the arguments)

LONG = dict(temperature=1.5, ignore_eos=True)


def resident(server):
    """KiB."""
    status = pathlib.Path(f'/proc/{server.process.pid}/status').read_text()
    return int(re.search(r'VmRSS:\s+(\d+)', status).group(1))


def descriptors(server):
    return len(os.listdir(f'/proc/{server.process.pid}/fd'))


def check(is_so, *what):
    if not is_so:
        raise AssertionError(' '.join(str(one) for one in what))


@contextlib.contextmanager
def setting(event):
    """However the block ends: threads that wait for the event would hold up what it raised."""
    try:
        yield
    finally:
        event.set()


def quantile_ms(seconds, share):
    return round(sorted(seconds)[int(share * (len(seconds) - 1))] * 1e3, 2)


def becomes_idle(server):
    for _ in range(3000):
        if server.metric('tessera_requests_running') == 0 and server.metric('tessera_requests_waiting') == 0:
            break
        time.sleep(0.01)
    check(server.metric('tessera_requests_running') == 0, 'requests run after their clients have gone')
    check(server.metric('tessera_cache_bytes') == 0, 'caches of running answers hold bytes at rest')


def signals():
    """One signal or two at random moments of streams."""
    generator = random.Random(f'signals {ARGUMENTS.seed}')
    twice = sum(end_at_a_moment(generator, drain_seconds=0.2) for _ in range(ARGUMENTS.signals))
    return {'signals': ARGUMENTS.signals, 'of_them_twice': twice, 'exit_code': 0}


def kills():
    """kill -9 while the cache on the disk is written: the next life starts, sweeps, and answers as it always did."""
    generator = random.Random(f'kills {ARGUMENTS.seed}')
    rules = ['Rule %d: ' % i + 'say what is asked and no more. ' * 8 for i in range(6)]
    ask = lambda rule, question: {**chat(question, temperature=0, max_tokens=8), 'messages': [
        {'role': 'system', 'content': rule}, {'role': 'user', 'content': question}]}
    answers, starts, hits = {}, [], 0
    with tempfile.TemporaryDirectory() as folder:
        folder = os.path.join(folder, 'cache')
        for i in range(ARGUMENTS.kills + 1):
            start = time.monotonic()
            with Server('--prefix-cache-disk', folder, '--prefix-cache-disk-size', '0.02') as server:
                check(server.url, 'the server did not start')
                starts.append(time.monotonic() - start)
                check(not [one for one in os.listdir(folder) if '.tmp-' in one], 'temporary files after a start')
                pool = concurrent.futures.ThreadPoolExecutor(4)

                def one():
                    rule, question = generator.choice(rules), f'Compute {generator.randrange(40)}+{generator.randrange(9)}.'
                    try:
                        status, _, body = server.post('/v1/chat/completions', ask(rule, question))
                    except OSError:
                        return  # it was killed
                    check(status == 200, 'status', status, body)
                    text = json.loads(body)['choices'][0]['message']['content']
                    check(answers.setdefault((rule, question), text) == text, 'an answer differs over lives:', question, text)

                asked = [pool.submit(one) for _ in range(12)]
                if i == ARGUMENTS.kills:  # the last life ends by itself
                    pool.shutdown()
                    check(server.tier('faults_total') == 0, 'faults of the cache')
                    hits = server.tier('hits_total')
                    check(server.end() == 0, 'exit code')
                else:
                    time.sleep(generator.random() * 0.8)
                    server.process.kill()
                    pool.shutdown()
                for future in asked:
                    if error := future.exception():
                        check(isinstance(error, (http.client.HTTPException, OSError)), repr(error))
    starts.sort()
    return {'kills': ARGUMENTS.kills, 'questions': len(answers), 'hits_of_the_last_life': hits,
            'start_seconds_p50': round(starts[len(starts) // 2], 2), 'start_seconds_most': round(starts[-1], 2)}


def loaded(server, *load):
    """What a load of `tessera bench serve` met: gaps and refusals without an interpreter in them."""
    out = subprocess.run([ARGUMENTS.program, 'bench', 'serve', '--url', server.url, '--requests', '1000000', '--prompt-tokens', '32',
                          '--output-tokens', '64', '--quiet', '--json', *load], capture_output=True, text=True, timeout=ARGUMENTS.seconds + 120)
    check(out.returncode == 0, 'bench serve:', out.returncode, out.stderr)
    row = json.loads(out.stdout)['rows'][0]
    check(not row['errors'], 'errors under load:', row['errors'])
    return row


def ratio(over, under):
    return round(over / under, 2) if under else None


def overload():
    """Ten times what is answered at capacity: who is refused is told so quickly; the others' tokens come as they did."""
    with Server('--max-running', '8', '--max-waiting', '8') as server:
        begin = resident(server)
        loaded(server, '--concurrency', '8', '--seconds', '1', '--seed', '1')
        # As many at a time as run: the most that is answered, and the gaps of full steps.
        full = loaded(server, '--concurrency', '8', '--seconds', str(ARGUMENTS.seconds / 4), '--seed', '2')
        rate = full['requests_per_second']
        over = loaded(server, '--rates', f'{10 * rate:.1f}', '--seconds', str(ARGUMENTS.seconds), '--seed', '3')
        check(over['refused_429'] > 0 and over['answered'] > 0, 'answered and refused', over['answered'], over['refused_429'])
        # As many as there is room for, held: the next one is refused.
        becomes_idle(server)
        held = []
        for wanted in ([8, 0], [8, 8]):
            for _ in range(8):
                held.append(socket.create_connection(('127.0.0.1', server.port)))
                held[-1].sendall(post_bytes(chat('Tell me.', max_tokens=3000, stream=True, **LONG)))
            for _ in range(1000):
                taken = [server.metric(f'tessera_requests_{name}') for name in ('running', 'waiting')]
                if taken == wanted:
                    break
                time.sleep(0.01)
            check(taken == wanted, 'requests that run and wait', taken)
        status, headers, _ = server.post('/v1/chat/completions', chat('Tell me.', max_tokens=64, **LONG))
        check(status == 429 and int(headers['Retry-After']) >= 1, 'a refusal with Retry-After:', status, headers)
        for client in held:
            client.close()
        becomes_idle(server)
        grown = resident(server) - begin
        check(server.end() == 0, 'exit code')
    gap = {name: row['between_tokens_seconds']['p99'] * 1e3 for name, row in (('at_capacity', full), ('overloaded', over))}
    return {'requests_per_second_at_capacity': round(rate, 1), 'requests_per_second_sent': round(10 * rate, 1),
            'answered': over['answered'], 'refused': over['refused_429'],
            'refusal_ms_p50': round(over['refusal_seconds']['p50'] * 1e3, 2), 'refusal_ms_p99': round(over['refusal_seconds']['p99'] * 1e3, 2),
            'gap_ms_p99_at_capacity': round(gap['at_capacity'], 2), 'gap_ms_p99_overloaded': round(gap['overloaded'], 2),
            'gap_ratio': ratio(gap['overloaded'], gap['at_capacity']), 'resident_growth_kib': grown}


def slow():
    """Connections that send a header or body byte by byte, or do not read, beside healthy streams."""
    # Room for one more than all that do not read, paused as they are.
    with Server('--max-running', str(ARGUMENTS.slow // 3 + 9), '--max-waiting', str(ARGUMENTS.slow)) as server:
        begin = resident(server)
        healthy = lambda seed: loaded(server, '--concurrency', '1', '--seconds', str(ARGUMENTS.seconds / 2), '--seed', str(seed))
        loaded(server, '--concurrency', '1', '--seconds', '1', '--seed', '1')
        alone = healthy(2)
        ends = threading.Event()
        num_closed = [0]

        def dawdle(kind):
            request = post_bytes(chat('x' * 2000, max_tokens=3000, stream=True, **LONG))
            client = socket.socket()
            if kind == 'read':
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.settimeout(5)
            client.connect(('127.0.0.1', server.port))
            try:
                if kind == 'read':
                    client.sendall(request.replace(b'x' * 2000, b'x'))
                    ends.wait()
                    return
                at = 20 if kind == 'header' else request.index(b'\r\n\r\n') + 5
                client.sendall(request[:at])
                while not ends.wait(0.5):
                    client.sendall(request[at:at + 1])
                    at += 1
            except OSError:
                num_closed[0] += 1
            finally:
                client.close()

        with concurrent.futures.ThreadPoolExecutor(ARGUMENTS.slow) as pool:
            with setting(ends):
                asked = [pool.submit(dawdle, ['header', 'body', 'read'][i % 3]) for i in range(ARGUMENTS.slow)]
                time.sleep(2)  # they have all connected
                beside = healthy(3)
                status, _, body = server.post('/v1/chat/completions', chat('Compute 257-7.', temperature=0, stream=True))
        for one in asked:
            one.result()
        check(status == 200 and stream_text(body)[0] == '250', 'a healthy client:', status, body)
        becomes_idle(server)
        grown = resident(server) - begin
        check(server.end() == 0, 'exit code')
    gap = {name: row['between_tokens_seconds']['p99'] * 1e3 for name, row in (('alone', alone), ('beside', beside))}
    return {'slow_connections': ARGUMENTS.slow, 'closed_by_the_server': num_closed[0], 'healthy_answers': beside['answered'],
            'healthy_gap_ms_p99_alone': round(gap['alone'], 3), 'healthy_gap_ms_p99_beside': round(gap['beside'], 3),
            'gap_ratio': ratio(gap['beside'], gap['alone']), 'resident_growth_kib': grown}


def bodies():
    """/health/live's answers while bodies come in: a million token ids; 64 MiB of text; a byte more, announced (refused before
    it is sent) and in chunks (refused where it passes the limit)."""
    limit = 64 << 20
    million = json.dumps({'model': chat('')['model'], 'prompt': [7] * 1_000_000, 'max_tokens': 1}).encode()
    most = json.dumps({'model': chat('')['model'], 'prompt': '', 'max_tokens': 1}).encode()
    most = most.replace(b'""', b'"' + b'a ' * ((limit - len(most)) // 2) + b'"')
    with Server() as server:
        def send(kind):
            connection = http.client.HTTPConnection('127.0.0.1', server.port, timeout=60)
            try:
                if kind in ('million_tokens', 'largest'):
                    body = million if kind == 'million_tokens' else most
                    connection.request('POST', '/v1/completions', body, {'Content-Type': 'application/json'})
                    return connection.getresponse().status
                connection.putrequest('POST', '/v1/completions')
                connection.putheader(*(('Content-Length', str(limit + 1)) if kind == 'too_large' else ('Transfer-Encoding', 'chunked')))
                connection.endheaders()
                if kind == 'too_large_in_chunks':
                    part = b'%x\r\n%s\r\n' % (1 << 20, b' ' * (1 << 20))
                    with contextlib.suppress(ConnectionError):  # the refusal may come while the last ones go out
                        for _ in range(65):
                            connection.send(part)
                return connection.getresponse().status
            finally:
                connection.close()

        out = {}
        for kind, expected in [('nothing', None), ('million_tokens', 400), ('largest', 400), ('too_large', 413), ('too_large_in_chunks', 413)]:
            ends, statuses, times = threading.Event(), set(), []

            def probe():
                connection = http.client.HTTPConnection('127.0.0.1', server.port, timeout=60)
                while not ends.wait(0.001):
                    start = time.monotonic()
                    connection.request('GET', '/health/live')
                    connection.getresponse().read()
                    times.append(time.monotonic() - start)
                connection.close()

            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                with setting(ends):
                    probed = pool.submit(probe)
                    end = time.monotonic() + ARGUMENTS.seconds / 5
                    while time.monotonic() < end:
                        if expected is None:
                            time.sleep(0.01)
                        else:
                            statuses.add(send(kind))
                probed.result()
            check(statuses == ({expected} if expected else set()), kind, statuses)
            out[kind] = {'live_ms_p50': quantile_ms(times, 0.5), 'live_ms_p99': quantile_ms(times, 0.99), 'live_ms_most': quantile_ms(times, 1)}
        becomes_idle(server)
        check(server.end() == 0, 'exit code')
    return out


def mixed():
    """Answers, streams, errors and clients that go; one in a hundred requests is asked again alone, and must be the same."""
    with Server('--max-running', '16', '--prefix-cache-memory', '0.02') as server, Server('--prefix-cache-memory', '0') as alone:
        ends, mutex = threading.Event(), threading.Lock()
        count = {'answered': 0, 'refused_400': 0, 'left': 0, 'asked_again': 0}
        samples = []

        def client(number):
            generator = random.Random(number)
            while not ends.wait(ARGUMENTS.pause * generator.uniform(0.5, 1.5) if time.monotonic() - start > 20 else 0):
                kind = generator.random()
                body = chat(f'Tell me {generator.randrange(200)}.', temperature=1.3, seed=generator.randrange(1 << 30),
                            max_tokens=generator.randrange(1, 80))
                if kind < 0.1:
                    status, _, _ = server.post('/v1/chat/completions', {**body, 'temperature': 'x'})
                    check(status == 400, 'status', status)
                    name = 'refused_400'
                elif kind < 0.3:
                    leaver = socket.create_connection(('127.0.0.1', server.port))
                    leaver.sendall(post_bytes({**body, 'stream': True, 'max_tokens': 2000, 'ignore_eos': True}))
                    time.sleep(generator.random() * 0.1)
                    if kind < 0.2:
                        leaver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
                    leaver.close()
                    name = 'left'
                else:
                    status, _, text = server.post('/v1/chat/completions', body)
                    check(status == 200, 'status', status, text)
                    name = 'answered'
                    if generator.random() < 0.01:
                        answer = alone.post('/v1/chat/completions', body)[2]
                        messages = [json.loads(one)['choices'][0]['message'] for one in (text, answer)]
                        check(messages[0] == messages[1], 'an answer differs from the same one alone:', messages)
                        with mutex:
                            count['asked_again'] += 1
                with mutex:
                    count[name] += 1

        start = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            with setting(ends):
                clients = [pool.submit(client, number) for number in range(12)]
                while (now := time.monotonic() - start) < ARGUMENTS.seconds:
                    samples.append((now, resident(server), descriptors(server)))
                    time.sleep(min(1, ARGUMENTS.seconds / 20))
        for one in clients:
            one.result()
        becomes_idle(server)
        check((server.end(), alone.end()) == (0, 0), 'exit code')
    late = [one for one in samples if one[0] >= ARGUMENTS.seconds / 2] or samples[-2:]
    mean_t, mean_r = (sum(one[i] for one in late) / len(late) for i in (0, 1))
    spread = sum((one[0] - mean_t)**2 for one in late) or 1
    slope = sum((one[0] - mean_t) * (one[1] - mean_r) for one in late) / spread
    return {**count, 'seconds': ARGUMENTS.seconds, 'resident_kib_begin': samples[0][1], 'resident_kib_middle': late[0][1],
            'resident_kib_end': late[-1][1], 'resident_slope_mib_per_hour_in_the_second_half': round(slope * 3600 / 1024, 2),
            'most_descriptors': max(one[2] for one in samples)}


def disconnects():
    """Clients that go: anywhere within a request, while it waits, in its prompt, in its answer, in its tools' schema. Then, one
    at a time: what passes until /metrics has neither the stream nor its request nor bytes of its caches."""
    generator = random.Random(f'disconnects {ARGUMENTS.seed}')
    left = {'fin': 0, 'rst': 0}

    def leave(kind, request, sent, wait):
        client = socket.create_connection(('127.0.0.1', server.port))
        try:
            client.sendall(request[:sent])
            client.settimeout(wait or 1e-4)
            try:
                while client.recv(4096):
                    pass
            except TimeoutError:
                pass
            if kind == 'rst':
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        except OSError:
            pass
        client.close()

    with Server('--max-running', '8') as server, concurrent.futures.ThreadPoolExecutor(16) as pool:
        begin = descriptors(server)
        asked = []
        for _ in range(ARGUMENTS.disconnects):
            more = dict(max_tokens=2000, stream=generator.random() < 0.7, **LONG)
            point = generator.choice(['anywhere', 'prompt', 'answer', 'tools'])
            if point == 'tools':
                parameters = {'type': 'object', 'properties': {f'p{generator.randrange(9)}': {'type': 'string'}}}
                more['tools'] = [{'type': 'function', 'function': {'name': 'f', 'parameters': parameters, 'strict': True}}]
                more['tool_choice'] = 'required'
            request = post_bytes(chat('Tell me. ' * (300 if point == 'prompt' else 1), **more))
            sent = generator.randrange(len(request)) if point == 'anywhere' else len(request)
            kind = generator.choice(['fin', 'rst'])
            left[kind] += 1
            asked.append(pool.submit(leave, kind, request, sent, generator.random() * 0.1))
        for one in asked:
            one.result()
        becomes_idle(server)
        check(server.post('/v1/chat/completions', chat('Compute 257-7.', temperature=0))[0] == 200, 'an answer afterwards')
        for _ in range(500):  # the last connections are closed a moment later
            if descriptors(server) <= begin:
                break
            time.sleep(0.01)
        grown = descriptors(server) - begin
        check(grown <= 0, grown, 'descriptors more than at the start')
        times = []
        for i in range(100):
            client = socket.create_connection(('127.0.0.1', server.port))
            client.sendall(post_bytes(chat('Tell me.', max_tokens=3000, stream=True, **LONG)))
            while b'"content"' not in client.recv(4096):
                pass
            if i % 2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
            start = time.monotonic()
            client.close()
            while any(server.metric(f'tessera_{name}') for name in ('streams', 'requests_running', 'cache_bytes')):
                check(time.monotonic() - start < 30, 'a stream outlives its client')
            times.append(time.monotonic() - start)
        check(server.end() == 0, 'exit code')
    return {**left, 'cache_bytes_at_rest': 0, 'descriptors_grown': grown,
            'gone_ms_p50': quantile_ms(times, 0.5), 'gone_ms_p99': quantile_ms(times, 0.99), 'gone_ms_most': quantile_ms(times, 1)}


def schemas():
    """The gaps of eight streams, alone and while hostile schemas are compiled; each ends in 400, or 503 on a busy machine."""
    def hostile(number):
        parameters = {'type': 'object', 'properties': {f'p{number}_{i}': {'type': 'string'} for i in range(3000)}}
        return chat('x', response_format={'type': 'json_schema', 'json_schema': {'name': 'a', 'schema': parameters}})

    with Server() as server:
        gaps, ends = {'alone': [], 'beside': []}, threading.Event()

        def stream(kind):
            while not ends.is_set():
                connection = http.client.HTTPConnection('127.0.0.1', server.port, timeout=120)
                connection.request('POST', '/v1/chat/completions', json.dumps(chat('Tell me.', max_tokens=200, stream=True, **LONG)))
                last = None
                for line in connection.getresponse():
                    now = time.monotonic()
                    if line.startswith(b'data: {'):
                        if last is not None:
                            gaps[kind].append(now - last)
                        last = now
                connection.close()

        begin, counts, times, number = resident(server), {}, [], 0
        for kind in gaps:
            ends.clear()
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                with setting(ends):
                    asked = [pool.submit(stream, kind) for _ in range(8)]
                    end = time.monotonic() + ARGUMENTS.seconds / 2
                    while (now := time.monotonic()) < end:
                        if kind == 'alone':
                            time.sleep(end - now)
                            continue
                        number += 1
                        status, _, body = server.post('/v1/chat/completions', hostile(number))
                        check(status == 503 or status == 400 and b'response_format' in body, 'status', status, body[:300])
                        counts[status] = counts.get(status, 0) + 1
                        times.append(time.monotonic() - now)
            for one in asked:
                one.result()
        becomes_idle(server)
        grown = resident(server) - begin
        check(server.end() == 0, 'exit code')
    return {'hostile_schemas': counts, 'refused_after_seconds_most': round(max(times), 2), 'gap_ms_p99_alone': quantile_ms(gaps['alone'], 0.99),
            'gap_ms_p99_beside': quantile_ms(gaps['beside'], 0.99), 'resident_growth_kib': grown}


def conformance():
    """schemathesis: every operation with its own server; no server error, documented statuses, types and schemas."""
    from openapi_test import OFFLINE, name_the_model
    with Server('--max-model-len', '512') as server:
        document = json.loads(server.get('/openapi.json')[1])
    name_the_model(document)
    operations = [(path, method) for path, methods in document['paths'].items() for method in methods]

    def hold(job):
        (path, method), phases, seed, examples = job
        unfinished = {'operation': f'{method} {path}', 'phases': phases, 'seed': seed, 'cases': None}
        left = end - time.monotonic()
        if left < 3:
            return unfinished
        with Server('--max-model-len', '512') as server, tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, 'openapi.json').write_text(json.dumps(document))
            out = subprocess.Popen(
                [sys.executable, '-c', 'from schemathesis.cli import schemathesis; schemathesis()', 'run', 'openapi.json',
                 '--url', server.url, '--include-name', f'{method.upper()} {path}', '--max-examples', str(examples), '--seed', str(seed), '--checks',
                 'not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance',
                 '--phases', phases, '--request-timeout', '60', '--suppress-health-check', 'too_slow', '--no-color'],
                env=OFFLINE, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            try:
                text, _ = out.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                out.kill()
                text = out.communicate()[0]
            cases = re.search(r'([\d,]+) generated', text)
            errors = sum(float(line.rsplit(' ', 1)[1]) for line in server.get('/metrics')[1].splitlines()
                         if line.startswith('tessera_http_responses_total') and 'status="500"' in line)
            check(errors == 0, 'server errors', path, text[-2000:])
            check(server.get('/health/ready')[0] == 200, 'ready', path)
            check(server.end() == 0, 'exit code')
        check(out.returncode != 1, 'schemathesis:', path, text[-2000:])
        return {**unfinished, 'cases': int(cases.group(1).replace(',', ''))} if cases else unfinished

    # Fuzzing by five seeds, so that operations whose bodies take long to make have more than one process.
    jobs = [(one, 'fuzzing', seed, -(-ARGUMENTS.examples // 5)) for seed in range(1, 6) for one in operations]
    jobs += [(one, 'examples,coverage', 1, 1) for one in operations]
    end = time.monotonic() + ARGUMENTS.seconds
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        done = list(pool.map(hold, sorted(jobs, key=lambda job: job[0][1] == 'get')))
    out = {}
    for one in done:
        found = out.setdefault(one['operation'], {'cases': 0, 'unfinished': []})
        found['cases'] += one['cases'] or 0
        if one['cases'] is None:
            found['unfinished'].append(f"{one['phases']}, seed {one['seed']}")
    return {'examples': ARGUMENTS.examples, 'server_errors': 0, 'operations': out}


PARTS = {'disconnects': disconnects, 'schemas': schemas, 'bodies': bodies, 'conformance': conformance, 'signals': signals, 'kills': kills, 'overload': overload, 'slow': slow, 'mixed': mixed}
cpu = next((line.split(':', 1)[1].strip() for line in open('/proc/cpuinfo') if line.startswith('model name')), platform.machine())
record = {'what': 'tools/soak_server.py',
          'command': sys.argv,
          'commit': subprocess.run(['git', '-C', ROOT, 'rev-parse', '--short=12', 'HEAD'], capture_output=True, text=True).stdout.strip(),
          'date': datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
          'machine': {'cpu': cpu, 'cores': os.cpu_count(), 'load_average_at_the_start': os.getloadavg()[0]}}
for name in ARGUMENTS.only.split(','):
    record[name] = PARTS[name]()
    print(name, json.dumps(record[name]), flush=True)
if ARGUMENTS.record:
    pathlib.Path(ARGUMENTS.record).write_text(json.dumps(record, indent=1) + '\n')
