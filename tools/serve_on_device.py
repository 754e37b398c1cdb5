#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tessera serve on a device, end to end, within a given time: answers, equality with generate, caches, grammars, load.

    tools/serve_on_device.py [--device cuda:0] [--seconds 200] [--record FILE.json] -- PROGRAM...

PROGRAM is tessera, or what runs it (build/cuda/bundle/run tessera). Needs Python's standard library alone and no network
but 127.0.0.1. Each part fails where a promise breaks; the program then exits with 1, and the record says where. What the
time does not suffice for is left out, and the record says so too. Times are measured, not judged.
"""
import argparse
import concurrent.futures
import datetime
import http.client
import json
import os
import pathlib
import platform
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parent.parent
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument('program', nargs='+')
parser.add_argument('--device', default='cuda:0')
parser.add_argument('--model', default=str(ROOT / 'models/tiny-v4'))
parser.add_argument('--seconds', type=float, default=200, help='for all of it')
parser.add_argument('--streams', default='1,4,16,64,256', help='loads of the last part, comma-separated')
parser.add_argument('--only', help='parts, comma-separated')
parser.add_argument('--record', help='FILE.json, as in bench/results')
ARGUMENTS = parser.parse_args()
MODEL = pathlib.Path(ARGUMENTS.model).name
START = time.monotonic()
QUESTIONS = ['Compute 257-7.', 'Spell mire.', 'Compute 12+30.', 'Compute 8*7.']
COMMON = ['--model', ARGUMENTS.model, '--device', ARGUMENTS.device]
# The device's memory is left to what is measured beside the server.
SERVE = ['--port', '0', '--max-running', '256', '--max-waiting', '1024', '--max-model-len', '2048', '--cache-memory', '0.5',
         '--prefix-cache-memory', '0.1']


class OutOfTime(Exception):
    pass


def left():
    return ARGUMENTS.seconds - (time.monotonic() - START)


def need(seconds):
    """Raises OutOfTime where less is left."""
    if left() < seconds:
        raise OutOfTime(f'{seconds:.0f} s are needed, {max(left(), 0):.0f} s are left')


def say(text):
    print(f'[{time.monotonic() - START:6.1f} s] {text}', file=sys.stderr, flush=True)


def check(is_so, *what):
    if not is_so:
        raise AssertionError(' '.join(str(one)[:600] for one in what))


class Server:
    """The program from its first line on stdout to its end."""

    def __init__(self, *flags):
        begin = time.monotonic()
        self.notes = tempfile.TemporaryFile(mode='w+')
        self.process = subprocess.Popen([*ARGUMENTS.program, 'serve', *COMMON, *SERVE, *flags], stdout=subprocess.PIPE,
                                        stderr=self.notes, text=True)
        lines = queue.Queue()
        threading.Thread(target=lambda: lines.put(self.process.stdout.readline()), daemon=True).start()
        try:
            url = lines.get(timeout=max(1, left())).strip()
        except queue.Empty:
            url = ''
        if not url:
            self.process.kill()
        check(url, 'the server did not start:', self.said())
        self.port = int(url.rsplit(':', 1)[1])
        self.url, self.seconds_to_start, self.mib = url, time.monotonic() - begin, device_mib()

    def said(self):
        self.process.poll()
        self.notes.seek(0)
        return self.notes.read()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        check(self.process.wait(60) == 0, 'exit code', self.process.returncode, self.said()[-300:])

    def ask(self, method, path, body=None):
        """Status and body."""
        connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=max(5, left() + 5))
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {'Content-Type': 'application/json'} if data else {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def post(self, path, body):
        status, text = self.ask('POST', path, body)
        check(status == 200, path, 'status', status, text)
        return json.loads(text)

    def stream(self, path, body):
        """The events' data, in order."""
        status, text = self.ask('POST', path, {**body, 'stream': True})
        check(status == 200, path, 'status', status, text)
        return [line[6:] for line in text.decode().split('\n') if line.startswith('data: ')]

    def metrics(self):
        """Values by name, and by name and tier."""
        out = {}
        for line in self.ask('GET', '/metrics')[1].decode().splitlines():
            found = re.fullmatch(r'(\w+)(?:\{(.*)\})? (\S+)', line)
            if found:
                tier = re.search(r'tier="(\w+)"', found[2] or '')
                out.setdefault(found[1] + ('/' + tier[1] if tier else ''), float(found[3]))
        return out

    def becomes_idle(self):
        for _ in range(1000):
            now = self.metrics()
            if now['tessera_requests_running'] == 0 and now['tessera_requests_waiting'] == 0:
                break
            time.sleep(0.01)
        check(now['tessera_requests_running'] == 0, 'requests run after their clients have gone')
        check(now['tessera_cache_bytes'] == 0, 'caches of running answers hold bytes at rest')


def device_mib():
    """What all programs have of the device's memory; None where there is no nvidia-smi."""
    text = said_by('nvidia-smi', '--query-gpu=memory.used', '--format=csv,noheader,nounits',
                   f'--id={ARGUMENTS.device.rsplit(":", 1)[-1]}')
    return int(text) if text.isdigit() else None


def chat(question, **more):
    return {'model': MODEL, 'messages': [{'role': 'user', 'content': question}], **more}


def content(answer):
    return answer['choices'][0]['message']['content']


def generate(question, *flags):
    result = subprocess.run([*ARGUMENTS.program, 'generate', *COMMON, '--json', '--quiet', question, *flags],
                            capture_output=True, text=True, timeout=max(5, left() + 5))
    check(result.returncode == 0, 'generate:', result.returncode, result.stderr)
    return json.loads(result.stdout)


def routes(server):
    """Every API answers, streams add up, and bad requests are refused with the field's name."""
    for path in ['/health/live', '/health/ready', '/health/deep', '/v1/models', '/metrics', '/openapi.json', '/']:
        status, body = server.ask('GET', path)
        check(status == 200 and body, path, status, body)
    asked = chat('Compute 257-7.', temperature=0)
    check(content(server.post('/v1/chat/completions', asked)) == '250', 'the answer to 257-7')
    events = server.stream('/v1/chat/completions', asked)
    text = ''.join(choice['delta'].get('content') or '' for one in events[:-1] for choice in json.loads(one)['choices'])
    check(text == '250' and events[-1] == '[DONE]', 'the stream:', events)
    message = server.post('/v1/messages', {**asked, 'max_tokens': 20})
    check(message['content'][0]['text'] == '250', '/v1/messages:', message)
    response = server.post('/v1/responses', {'model': MODEL, 'input': 'Compute 257-7.', 'temperature': 0})
    check(response['output'][-1]['content'][0]['text'] == '250', '/v1/responses:', response)
    ids = server.post('/tokenize', {'model': MODEL, 'prompt': 'Compute 257-7.'})['tokens']
    check(server.post('/detokenize', {'model': MODEL, 'tokens': ids})['prompt'].endswith('Compute 257-7.'), 'detokenize')
    scored = server.post('/v1/completions', {'model': MODEL, 'prompt': ids, 'echo': True, 'logprobs': 1, 'max_tokens': 1})
    logprobs = scored['choices'][0]['logprobs']['token_logprobs']
    check(len(logprobs) == len(ids) + 1 and all(one <= 0 for one in logprobs[1:]), 'log probabilities:', logprobs)
    choices = server.post('/v1/chat/completions', chat('Tell me.', n=4, seed=7, temperature=1, max_tokens=8))['choices']
    check(sorted(one['index'] for one in choices) == [0, 1, 2, 3], 'n = 4:', choices)
    for field, value in [('temperature', 'x'), ('max_tokens', -1), ('n', 17), ('stop', 5), ('messages', {})]:
        status, body = server.ask('POST', '/v1/chat/completions', {**asked, field: value})
        check(status == 400 and field in json.loads(body)['error']['message'], field, status, body)
    return {'seconds_to_start': round(server.seconds_to_start, 2)}


def equality(server):
    """Answers beside 64 others are those of `tessera generate` on the device, greedy and sampled."""
    flags = {question: ('--temperature', '0') for question in QUESTIONS}
    flags[QUESTIONS[1] + ' '] = ('--temperature', '1.2', '--seed', '77', '--max-tokens', '40')
    alone = {}
    for question, more in flags.items():
        need(5)
        alone[question] = generate(question, *more)
    ends, num_others = threading.Event(), [0]

    def other(number):
        while not ends.is_set():
            server.post('/v1/chat/completions', chat('Tell me.', temperature=1.5, seed=number, max_tokens=64, ignore_eos=True))
            num_others[0] += 1

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        others = [pool.submit(other, number) for number in range(64)]
        try:
            most = 0
            for _ in range(200):
                most = max(most, server.metrics()['tessera_requests_running'])
                if most >= 48:
                    break
                time.sleep(0.01)
            num_compared, begin = 0, time.monotonic()
            for _ in range(5):
                if num_compared > 0 and time.monotonic() - begin > ARGUMENTS.seconds / 10:
                    break
                for question, one in alone.items():
                    sampled = 'seed' in ' '.join(flags[question])
                    asked = dict(temperature=1.2, seed=77, max_tokens=40) if sampled else dict(temperature=0)
                    answer = server.post('/v1/chat/completions', chat(question, **asked))
                    check(content(answer) == one['text'], question, 'alone:', one['text'], 'beside others:', content(answer))
                    check(answer['usage']['completion_tokens'] == one['usage']['completion_tokens'], question, answer['usage'])
                    num_compared += 1
        finally:
            ends.set()
        for one in others:
            one.result()
    server.becomes_idle()
    return {'answers_compared': num_compared, 'most_running_at_once': most, 'answers_of_others': num_others[0]}


def turns(server, salt, num_turns, shares=True):
    """A conversation that grows; (text, cached tokens, prompt tokens) of each turn. `shares`: turns have one salt."""
    messages = [{'role': 'system', 'content': 'You answer. ' + 'All of this is said before each question. ' * 12}]
    out = []
    for i in range(num_turns):
        messages.append({'role': 'user', 'content': QUESTIONS[i % len(QUESTIONS)]})
        body = {'model': MODEL, 'messages': messages, 'temperature': 0, 'max_tokens': 16,
                'cache_salt': salt if shares else f'{salt}{i}'}
        answer = server.post('/v1/chat/completions', body)
        usage = answer['usage']
        out.append((content(answer), usage['prompt_tokens_details']['cached_tokens'], usage['prompt_tokens']))
        messages.append({'role': 'assistant', 'content': content(answer)})
    return out


def prefix_cache(server):
    """What is replayed comes from the cache, with the answers that are made without it."""
    first = turns(server, 'a', 6)
    again = turns(server, 'a', 6)
    without = turns(server, 'alone', 6, shares=False)
    check(all(one[1] == 0 for one in without), 'a salt of its own finds nothing:', without)
    for answers in (first, again):
        check([one[0] for one in answers] == [one[0] for one in without], 'answers with and without the cache:', answers, without)
    check(first[0][1] == 0, 'the first turn finds nothing:', first[0])
    check(all(one[1] > 0 for one in first[1:] + again), 'later turns find what came before:', first, again)
    other = turns(server, 'b', 1)
    check(other[0][1] == 0, 'another salt finds nothing:', other)
    prompt, cached = (sum(one[i] for one in again) for i in (2, 1))
    return {'prompt_tokens_asked_again': prompt, 'of_them_cached': cached}


def disk(_):
    """A later life of the server has what an earlier one wrote, and answers the same."""
    need(20)
    with tempfile.TemporaryDirectory() as folder:
        flags = ['--prefix-cache-disk', os.path.join(folder, 'cache'), '--prefix-cache-disk-size', '1']
        with Server(*flags) as server:
            first = turns(server, '', 4)
            server.end()
        with Server(*flags) as server:
            second = turns(server, '', 4)
            now = server.metrics()
            server.end()
    check([one[0] for one in first] == [one[0] for one in second], 'answers after a restart:', first, second)
    hits, faults = (now.get(f'tessera_cache_tier_{name}_total/disk') for name in ('hits', 'faults'))
    check(hits and hits > 0 and not faults and second[0][1] > 0, 'hits and faults of the disk:', hits, faults, second)
    return {'hits': hits, 'tokens_of_the_first_turn_cached': second[0][1], 'seconds_to_start_again': round(server.seconds_to_start, 2)}


PERSON = {'type': 'object', 'additionalProperties': False, 'required': ['city', 'n', 'k', 'list'], 'properties': {
    'city': {'type': 'string', 'maxLength': 8}, 'n': {'type': 'integer', 'minimum': 1, 'maximum': 40},
    'k': {'enum': ['x', 'y']}, 'list': {'type': 'array', 'items': {'type': 'boolean'}, 'maxItems': 3}}}
PATTERN = '(yes|no), [0-9]{2,4}( [a-z]+){1,3}!'


def fits(value):
    """PERSON, checked by hand."""
    return (set(value) == set(PERSON['required']) and isinstance(value['city'], str) and len(value['city']) <= 8
            and type(value['n']) is int and 1 <= value['n'] <= 40 and value['k'] in ('x', 'y')
            and isinstance(value['list'], list) and len(value['list']) <= 3 and all(type(one) is bool for one in value['list']))


def grammars(server):
    """Sampled at a high temperature, every answer that ends fits its schema, pattern or tool; others beside it are free."""
    tool = {'type': 'function', 'function': {'name': 'find', 'strict': True, 'parameters': PERSON}}
    kinds = {
        'schema': ({'response_format': {'type': 'json_schema', 'json_schema': {'name': 'a', 'schema': PERSON}}},
                   lambda message: fits(json.loads(message['content']))),
        'pattern': ({'response_format': {'type': 'regex', 'pattern': PATTERN}},
                    lambda message: re.fullmatch(PATTERN, message['content'])),
        'tool': ({'tools': [tool], 'tool_choice': 'required', 'parallel_tool_calls': False},
                 lambda message: fits(json.loads(message['tool_calls'][0]['function']['arguments']))),
        'free': ({}, lambda message: True),
    }
    counts = {name: {'ended': 0, 'cut': 0, 'not_asked': 0} for name in kinds}
    begin = time.monotonic()

    def one(number):
        name = list(kinds)[number % len(kinds)]
        asked, is_right = kinds[name]
        if number >= 32 and time.monotonic() - begin > ARGUMENTS.seconds / 8:
            return name, 'not_asked'
        answer = server.post('/v1/chat/completions', chat('Tell me.', temperature=1.5, seed=number,
                                                          max_tokens=800 if 'tools' in asked else 200, **asked))
        choice = answer['choices'][0]
        if choice['finish_reason'] == 'length':
            return name, 'cut'
        check(is_right(choice['message']), name, 'number', number, choice)
        return name, 'ended'

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        for name, how in pool.map(one, range(160)):
            counts[name][how] += 1
    check(all(counts[name]['ended'] > 0 for name in kinds), 'answers that end:', counts)
    status, body = server.ask('POST', '/v1/chat/completions', chat('x', response_format={'type': 'regex', 'pattern': '(a'}))
    check(status == 400, 'a bad pattern:', status, body)
    server.becomes_idle()
    return counts


def load(server):
    """tessera bench serve, a load at a time; what of the steps' time was not in the model; and the device's memory."""
    rows = []
    streams = [int(one) for one in ARGUMENTS.streams.split(',')]
    # The first steps at each size are recorded or compiled: a short load beforehand.
    for warms, count in [(True, max(streams))] + [(False, one) for one in streams]:
        remaining = len(streams) - len(rows)
        seconds = 1 if warms else min(8.0, (left() - 10) / max(1, remaining) - 2)
        if rows and left() < 8:
            say(f'  from {count} streams on: left out, {max(left(), 0):.0f} s are left')
            break
        need(8)
        before = server.metrics()
        result = subprocess.run(
            [*ARGUMENTS.program, 'bench', 'serve', '--url', server.url, '--concurrency', str(count), '--requests', '100000',
             '--seconds', f'{max(1.0, seconds):.1f}', '--prompt-tokens', '128', '--output-tokens', '64', '--quiet', '--json',
             '--seed', str(1000 * warms + count)],
            capture_output=True, text=True, timeout=left() + 30)
        check(result.returncode == 0, 'bench serve:', result.returncode, result.stderr)
        if warms:
            continue
        row = json.loads(result.stdout)['rows'][0]
        check(row['answered'] == row['requests'] and not row['errors'], 'answers under load:', row)
        row.pop('samples', None)
        after = server.metrics()
        took = {name: after.get(f'tessera_{name}_total', 0) - before.get(f'tessera_{name}_total', 0)
                for name in ('steps', 'step_seconds', 'model_seconds')}
        if took['step_seconds'] > 0:
            row['steps'] = took['steps']
            row['seconds_per_step'] = took['step_seconds'] / took['steps']
            row['engine_share_of_a_step'] = 1 - took['model_seconds'] / took['step_seconds']
        if server.mib is not None:
            row['device_mib'], row['device_mib_when_ready'] = device_mib(), server.mib
        rows.append(row)
        say(f'  {count} streams: {row["output_tokens_per_second"]:.0f} tokens/s, engine\'s share of a step '
            f'{row.get("engine_share_of_a_step", float("nan")):.1%}')
    server.becomes_idle()
    return rows


PARTS = {'routes': routes, 'equality': equality, 'prefix_cache': prefix_cache, 'grammars': grammars, 'disk': disk, 'load': load}


def said_by(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except OSError:
        return ''


def main():
    names = ARGUMENTS.only.split(',') if ARGUMENTS.only else list(PARTS)
    for name in names:
        if name not in PARTS:
            parser.error(f'--only: expected some of {", ".join(PARTS)}, found {name}')
    cpu = next((line.split(':', 1)[1].strip() for line in open('/proc/cpuinfo') if line.startswith('model name')), platform.machine())
    record = {'what': f'tools/serve_on_device.py: tessera serve --device {ARGUMENTS.device} on {MODEL}',
              'command': sys.argv,
              'commit': json.loads(said_by(*ARGUMENTS.program, 'version', '--json') or '{}').get('commit', 'unknown'),
              'version': said_by(*ARGUMENTS.program, 'version').splitlines()[:1],
              'date': datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
              'machine': {'cpu': cpu, 'cores': os.cpu_count(), 'load_average_at_the_start': os.getloadavg()[0],
                          'gpu': said_by('nvidia-smi', '--query-gpu=name,driver_version', '--format=csv,noheader')},
              'serve_flags': COMMON[2:] + SERVE, 'parts': {}, 'left_out': {}, 'failed': {}}
    server = None
    try:
        for name in names:
            say(name)
            try:
                need(3)
                if name != 'disk' and server is None:
                    server = Server()
                    say(f'  the server is up after {server.seconds_to_start:.1f} s')
                begin = time.monotonic()
                record['parts'][name] = PARTS[name](server)
                say(f'  right, {time.monotonic() - begin:.1f} s')
            except OutOfTime as reason:
                record['left_out'][name] = str(reason)
                say(f'  left out: {reason}')
            except Exception as error:  # the other parts still run
                record['failed'][name] = f'{type(error).__name__}: {error}'[:800]
                say(f'  FAILED: {record["failed"][name]}')
                traceback.print_exc()
        if server is not None:
            try:
                server.end()
            except Exception as error:
                record['failed']['end'] = str(error)[:800]
    finally:
        if server is not None:
            server.__exit__()
    record['seconds'] = round(time.monotonic() - START, 1)
    text = json.dumps(record, indent=1) + '\n'
    if ARGUMENTS.record:
        pathlib.Path(ARGUMENTS.record).write_text(text)
    print(text, end='')
    return 1 if record['failed'] or not record['parts'] else 0


sys.exit(main())
