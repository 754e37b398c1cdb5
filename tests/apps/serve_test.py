#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tessera serve as its users meet it: the real program on a free port, answering the bundled model's questions.

    serve_test.py PROGRAM MODEL_FOLDER
"""
import concurrent.futures
import http.client
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
import unittest
import urllib.request

from program import MODEL, PROGRAM, ProgramTest, environment, random_numbers, run
from served import LoadingServer, Server, chat, end_at_a_moment, post_bytes, stream_text

try:
    import anthropic
    import openai
except ImportError:
    anthropic = openai = None

QUESTIONS = ['Compute 257-7.', 'Spell mire.', 'Compute 12+30.', 'Compute 8*7.']


def without_cache(usage):
    """What does not depend on what was asked before."""
    kept = {key: value for key, value in usage.items() if 'cache' not in key and key != 'prompt_tokens_details'}
    return {**kept, 'prompt_tokens': usage['prompt_tokens']}


class Serve(ProgramTest):
    @classmethod
    def setUpClass(cls):
        cls.server = Server('--max-running', '80')
        cls.alone = {}
        for question in QUESTIONS:
            cls.alone[question] = json.loads(run('generate', '--model', str(MODEL), '--json', '--quiet', question).stdout)

    @classmethod
    def tearDownClass(cls):
        code = cls.server.end()
        cls.server.__exit__()
        assert code == 0, code

    def token_bytes(self, answer):
        return [bytes(token['bytes']) for token in answer['choices'][0]['logprobs']['content']]

    def test_address_and_curl(self):
        self.assertRegex(self.server.url, r'^http://127\.0\.0\.1:\d+$')
        result = subprocess.run(self.server.curl, shell=True, capture_output=True, check=True)
        self.assertEqual(json.loads(result.stdout)['choices'][0]['message']['content'], '250')

    def test_answers_are_those_of_generate_while_others_run(self):
        ends = threading.Event()

        def others(seed):
            while not ends.is_set():
                body = chat('Tell me.', temperature=1.5, seed=seed, max_tokens=100, stream=True, ignore_eos=True)
                self.assertEqual(self.server.post('/v1/chat/completions', body)[0], 200)

        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            running = [pool.submit(others, seed) for seed in range(64)]
            try:
                for question in QUESTIONS:
                    expected = self.alone[question]
                    body = chat(question, temperature=0, logprobs=True)
                    status, _, whole = self.server.post('/v1/chat/completions', body)
                    self.assertEqual(status, 200)
                    answer = json.loads(whole)
                    self.assertEqual(answer['choices'][0]['message']['content'], expected['text'])
                    self.assertEqual(answer['usage']['completion_tokens'], expected['usage']['completion_tokens'])
                    self.assertEqual(answer['usage']['prompt_tokens'], expected['usage']['prompt_tokens'])
                    # The ids: those of each token's bytes, and the end token that generate lists too.
                    ids = []
                    for token in self.token_bytes(answer):
                        body = {'model': MODEL.name, 'prompt': token.decode(), 'add_special_tokens': False}
                        ids += json.loads(self.server.post('/tokenize', body)[2])['tokens']
                    self.assertEqual(ids, expected['ids'][:-1])
                    _, _, stream = self.server.post('/v1/chat/completions', chat(
                        question, temperature=0, stream=True, stream_options={'include_usage': True}))
                    text, usage = stream_text(stream)
                    self.assertEqual(text, expected['text'])
                    self.assertEqual(without_cache(usage), without_cache(answer['usage']))
            finally:
                ends.set()
            for one in running:
                one.result()

    def test_seeded_answers_equal_those_of_generate(self):
        for seed in (1, 7):
            expected = json.loads(run('generate', '--model', str(MODEL), '--json', '--quiet', '--temperature', '1.3', '--seed',
                                      str(seed), '--max-tokens', '40', 'Tell me.').stdout)
            _, _, body = self.server.post('/v1/chat/completions',
                                          chat('Tell me.', temperature=1.3, seed=seed, max_tokens=40))
            self.assertEqual(json.loads(body)['choices'][0]['message']['content'], expected['text'])

    def test_completions_with_ids_echo_and_logprobs(self):
        body = {'model': MODEL.name, 'prompt': [0, 3, 24, 4, 6], 'echo': True, 'logprobs': 1, 'max_tokens': 2, 'temperature': 0}
        status, _, text = self.server.post('/v1/completions', body)
        self.assertEqual(status, 200)
        logprobs = json.loads(text)['choices'][0]['logprobs']
        self.assertIsNone(logprobs['token_logprobs'][0])
        self.assertGreaterEqual(len(logprobs['token_logprobs']), 6)
        self.assertTrue(all(value <= 0 for value in logprobs['token_logprobs'][1:]))

    def test_status_pages(self):
        for path in ('/health/live', '/health/ready', '/health/deep', '/v1/models', '/openapi.json', '/metrics'):
            self.assertEqual(self.server.get(path)[0], 200, path)
        status, page = self.server.get('/')
        self.assertEqual(status, 200)
        self.assertIn('</html>', page)
        for foreign in ('http://', 'https://', 'src="//', '@import'):
            self.assertNotIn(foreign, page)

    def test_clients_that_are_killed_leave_nothing(self):
        generator = random_numbers()
        for i in range(60):
            client = socket.create_connection(('127.0.0.1', self.server.port))
            body = json.dumps(chat('Tell me.', temperature=1.5, max_tokens=3000, ignore_eos=True, stream=i % 2 == 0)).encode()
            request = b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s' % (len(body), body)
            client.sendall(request[:generator.randrange(len(request) + 1)] if i % 5 == 0 else request)
            time.sleep(generator.random() * 0.02)
            if i % 2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
            client.close()
        for _ in range(500):
            if self.server.metric('tessera_requests_running') == 0 and self.server.metric('tessera_connections') <= 1:
                break
            time.sleep(0.01)
        self.assertEqual(self.server.metric('tessera_requests_running'), 0)
        self.assertEqual(self.server.metric('tessera_cache_bytes'), 0)

    @unittest.skipUnless(openai, 'the openai package is not installed')
    def test_openai_client(self):
        client = openai.OpenAI(base_url=self.server.url + '/v1', api_key='none', max_retries=0)
        with client:
            answer = client.chat.completions.create(**chat('Compute 257-7.', temperature=0, n=2))
            self.assertEqual([choice.message.content for choice in answer.choices], ['250', '250'])
            parts = client.chat.completions.create(**chat('Compute 257-7.', temperature=0, stream=True))
            self.assertEqual(''.join(part.choices[0].delta.content or '' for part in parts), '250')
            response = client.responses.create(model=MODEL.name, input='Compute 257-7.', temperature=0)
            self.assertEqual(response.output_text, '250')
            self.assertEqual(client.models.list().data[0].id, MODEL.name)
            with self.assertRaises(openai.BadRequestError) as caught:
                client.chat.completions.create(**chat('x', temperature=9))
            self.assertEqual(caught.exception.param, 'temperature')
            with self.assertRaises(openai.NotFoundError):
                client.chat.completions.create(model='other', messages=[{'role': 'user', 'content': 'x'}])

    @unittest.skipUnless(anthropic, 'the anthropic package is not installed')
    def test_anthropic_client(self):
        with anthropic.Anthropic(base_url=self.server.url, api_key='none', max_retries=0) as client:
            question = {'model': MODEL.name, 'messages': [{'role': 'user', 'content': 'Compute 257-7.'}]}
            answer = client.messages.create(max_tokens=20, extra_body={'temperature': 0}, **question)
            self.assertEqual(answer.content[0].text, '250')
            with client.messages.stream(max_tokens=20, extra_body={'temperature': 0}, **question) as stream:
                self.assertEqual(''.join(stream.text_stream), '250')
            self.assertEqual(client.messages.count_tokens(**question).input_tokens, answer.usage.input_tokens)


    SCHEMA = {'type': 'object',
              'properties': {'name': {'type': 'string', 'maxLength': 8},
                             'age': {'type': 'integer', 'minimum': 0, 'maximum': 120},
                             'kind': {'enum': ['cat', 'dog', None]},
                             'tags': {'type': 'array', 'items': {'type': 'string', 'maxLength': 4}, 'maxItems': 2}},
              'required': ['name', 'age', 'kind', 'tags'], 'additionalProperties': False}

    def expect_fits(self, value):
        self.assertEqual(set(value), set(self.SCHEMA['required']))
        self.assertLessEqual(len(value['name']), 8)
        self.assertTrue(isinstance(value['age'], int) and 0 <= value['age'] <= 120, value)
        self.assertIn(value['kind'], ['cat', 'dog', None])
        self.assertTrue(len(value['tags']) <= 2 and all(len(tag) <= 4 for tag in value['tags']), value)

    def test_answers_fit_their_schema_whatever_is_drawn(self):
        form = {'type': 'json_schema', 'json_schema': {'name': 'pet', 'schema': self.SCHEMA, 'strict': True}}

        def ask(seed):
            return self.server.post('/v1/chat/completions',
                                    {'model': MODEL.name, 'messages': [{'role': 'user', 'content': f'A pet, {seed}'}],
                                     'temperature': 1, 'seed': seed, 'response_format': form, 'max_tokens': 400})

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for status, _, body in pool.map(ask, range(24)):
                self.assertEqual(status, 200, body)
                choice = json.loads(body)['choices'][0]
                self.assertEqual(choice['finish_reason'], 'stop', choice)
                self.expect_fits(json.loads(choice['message']['content']))
        status, _, body = self.server.post('/v1/chat/completions', {
            'model': MODEL.name, 'messages': [{'role': 'user', 'content': 'x'}],
            'response_format': {'type': 'regex', 'pattern': '(a{500}){500}'}})
        self.assertEqual((status, json.loads(body)['error']['param']), (400, 'response_format.pattern'))

    @unittest.skipUnless(openai, 'the openai package is not installed')
    def test_openai_structured_output_and_tools(self):
        tools = [{'type': 'function', 'function': {'name': name, 'strict': True, 'parameters': self.SCHEMA}}
                 for name in ('adopt', 'feed')]
        question = [{'role': 'user', 'content': 'Which pet?'}]
        with openai.OpenAI(base_url=self.server.url + '/v1', api_key='none', max_retries=0) as client:
            for choice in ('required', {'type': 'function', 'function': {'name': 'feed'}}):
                for seed in range(3):
                    options = dict(model=MODEL.name, messages=question, tools=tools, tool_choice=choice, seed=seed,
                                   temperature=1, max_tokens=600, parallel_tool_calls=False)
                    message = client.chat.completions.create(**options).choices[0].message
                    self.assertEqual(len(message.tool_calls), 1)
                    self.expect_fits(json.loads(message.tool_calls[0].function.arguments))
                    if choice != 'required':
                        self.assertEqual(message.tool_calls[0].function.name, 'feed')
                    with client.chat.completions.stream(**options) as stream:
                        for _ in stream:
                            pass
                        streamed = stream.get_final_completion().choices[0].message
                    self.assertEqual(streamed.tool_calls[0].function.arguments,
                                     message.tool_calls[0].function.arguments)
            response = client.responses.create(model=MODEL.name, input='A pet', text={
                'format': {'type': 'json_schema', 'name': 'pet', 'schema': self.SCHEMA}})
            self.expect_fits(json.loads(response.output_text))

    @unittest.skipUnless(anthropic, 'the anthropic package is not installed')
    def test_anthropic_forced_tools(self):
        with anthropic.Anthropic(base_url=self.server.url, api_key='none', max_retries=0) as client:
            for choice in ({'type': 'any'}, {'type': 'tool', 'name': 'adopt'}):
                message = client.messages.create(
                    model=MODEL.name, max_tokens=600, messages=[{'role': 'user', 'content': 'Which pet?'}],
                    tools=[{'name': 'adopt', 'input_schema': self.SCHEMA}],
                    tool_choice={**choice, 'disable_parallel_tool_use': True})
                self.assertEqual(message.stop_reason, 'tool_use')
                self.assertEqual(message.content[-1].name, 'adopt')
                self.expect_fits(message.content[-1].input)


class Lives(ProgramTest):
    def test_prompts_are_known_after_a_restart(self):
        folder = self.folder / 'cache'
        question = ' '.join(f'Compute {i}+{i + 30}.' for i in range(60))
        answers, cached = [], []
        for flags in ((), ('--prefix-cache-disk', str(folder)), ('--prefix-cache-disk', str(folder))):
            with Server(*flags) as server:
                _, _, body = server.post('/v1/chat/completions', chat(question, temperature=1.2, seed=9, max_tokens=30))
                body = json.loads(body)
                answers.append(body['choices'][0]['message']['content'])
                cached.append(body['usage']['prompt_tokens_details']['cached_tokens'])
                if flags:
                    self.assertEqual(server.tier('faults_total'), 0)
                    self.assertEqual(server.tier('hits_total'), 1 if cached[-1] else 0)
                self.assertEqual(server.end(), 0)
        self.assertEqual(answers, answers[:1] * 3)
        self.assertEqual(cached[:2], [0, 0])
        self.assertGreater(cached[2], 100)
        self.assertEqual(folder.stat().st_mode & 0o777, 0o700)
        # One server at a time; the other one serves without.
        with Server('--prefix-cache-disk', str(folder)), Server('--prefix-cache-disk', str(folder)) as second:
            self.assertEqual(second.post('/v1/chat/completions', chat('Compute 257-7.', temperature=0))[0], 200)
            self.assertEqual(second.tier('faults_total'), 1)
            self.assertEqual(second.end(), 0)
            self.assertIn('another server uses this cache folder', second.process.stderr.read())

    def test_a_full_disk_costs_the_cache_alone(self):
        # A device of its own, which nobody else sees: its bytes end in the first round, its files in the second.
        folder = self.folder / 'device'
        folder.mkdir()
        mounted = lambda options: ['unshare', '-Urm', 'sh', '-c', 'mount -t tmpfs -o "$1" none "$2" && shift 2 && exec "$@"',
                                   'sh', options, str(folder)]
        if subprocess.run([*mounted('size=1m'), 'true'], capture_output=True).returncode != 0:
            self.skipTest('no mounting in a namespace of its own here')
        questions = [' '.join(f'Compute {i}+{i + 30}.' for i in range(first, first + 40)) for first in range(0, 240, 40)]

        def answer(server, question):
            status, _, body = server.post('/v1/chat/completions', chat(question, temperature=1.2, seed=9, max_tokens=10))
            self.assertEqual(status, 200, body)
            return json.loads(body)['choices'][0]['message']['content']

        def wait_for(server, figure, least):
            for _ in range(500):
                if server.tier(figure) >= least:
                    return
                time.sleep(0.02)
            self.fail(f'{figure} stays at {server.tier(figure)}, below {least}')

        with Server('--prefix-cache-memory', '0') as plain:
            expected = [answer(plain, question) for question in questions]
        flags = ('--prefix-cache-disk', str(folder / 'cache'))
        # 64 MiB of a disk are left to others.
        with Server(*flags, through=mounted('size=128m')) as server:
            self.assertEqual(answer(server, questions[0]), expected[0])
            wait_for(server, 'insertions_total', 1)
            filler = f'/proc/{server.process.pid}/root{folder}/filler'
            with open(filler, 'wb', buffering=0) as file, self.assertRaisesRegex(OSError, 'No space left'):
                while True:
                    file.write(bytes(1 << 20))
            for question, text in zip(questions[1:], expected[1:]):
                self.assertEqual(answer(server, question), text)
            wait_for(server, 'refusals_total', 1)
            self.assertEqual(server.tier('faults_total'), 0)
            os.remove(filler)
            before = server.tier('insertions_total')
            answer(server, 'Spell mire. ' + questions[0])
            wait_for(server, 'insertions_total', before + 1)
            self.assertEqual(server.end(), 0)
            self.assertEqual(server.process.stderr.read().count('the oldest entries go\n'), 1)
        # Without room for: the lock, the index, its journal, a snapshot's file, the third snapshot's.
        for num_files in (2, 3, 4, 5, 7):
            with Server(*flags, through=mounted(f'size=128m,nr_inodes={num_files}')) as server:
                for question, text in zip(questions, expected):
                    self.assertEqual(answer(server, question), text)
                wait_for(server, 'faults_total', 1)
                self.assertEqual(server.end(), 0)
                self.assertRegex(server.process.stderr.read(),
                                 r'\Awarning: prefix cache on disk: .*(no disk is used|No space left on device; answers do not need it)\n\Z')

    def test_keys_and_overload(self):
        keys = self.folder / 'keys'
        keys.write_text('# ours\nsecret-1\n\nsecret-2\n')
        with Server('--api-key-file', str(keys), '--max-running', '1', '--max-waiting', '1') as server:
            self.assertEqual(server.post('/v1/chat/completions', chat('x'))[0], 401)
            key = {'Authorization': 'Bearer secret-2'}
            slow = chat('Tell me.', max_tokens=3000, ignore_eos=True, temperature=1.5)
            with concurrent.futures.ThreadPoolExecutor(12) as pool:
                answers = [answer.result() for answer in
                           [pool.submit(server.post, '/v1/chat/completions', slow, **key) for _ in range(12)]]
            statuses = [status for status, _, _ in answers]
            self.assertIn(429, statuses)
            self.assertEqual(set(statuses), {200, 429})
            for status, headers, body in answers:
                if status == 429:
                    self.assertGreaterEqual(int(headers['Retry-After']), 1)
                    self.assertEqual(json.loads(body)['error']['type'], 'rate_limit_error')
            self.assertEqual(server.end(), 0)

    @unittest.skipUnless(openai, 'the openai and anthropic packages are not installed')
    def test_clients_come_again_after_429(self):
        slow = dict(max_tokens=600, temperature=1.5)
        with Server('--max-running', '1', '--max-waiting', '1') as server:
            theirs = openai.OpenAI(base_url=server.url + '/v1', api_key='none', max_retries=50, timeout=120)
            others = anthropic.Anthropic(base_url=server.url, api_key='none', max_retries=50, timeout=120)
            with theirs, others, concurrent.futures.ThreadPoolExecutor(6) as pool:
                more = {'extra_body': {'ignore_eos': True}}
                answers = [pool.submit(theirs.chat.completions.create, **chat('Tell me.', **slow), **more) for _ in range(3)]
                messages = [pool.submit(others.messages.create, **chat('Tell me.', max_tokens=600),
                                        extra_body={'temperature': 1}) for _ in range(3)]
                self.assertEqual({one.result().usage.completion_tokens for one in answers}, {600})
                self.assertTrue(all(one.result().usage.output_tokens for one in messages))
            metrics = server.get('/metrics')[1]
            for route in ('chat/completions', 'messages'):
                self.assertRegex(metrics, rf'tessera_http_responses_total{{.*route="/v1/{route}",status="429"}} [1-9]')
            self.assertEqual(server.end(), 0)

    def test_prompts_that_begin_alike_share_their_beginning(self):
        system = 'You compute. ' + ' '.join(str(number * 7919 % 1000) for number in range(300))
        messages = [{'role': 'system', 'content': system}]
        with Server() as server, Server('--prefix-cache-memory', '0') as plain:
            num_seen = 0
            for question in ['Compute 257-7.', 'Spell mire.', 'Compute 12+30.']:
                messages.append({'role': 'user', 'content': question})
                body = {'model': MODEL.name, 'messages': messages, 'temperature': 1, 'seed': 5, 'max_tokens': 20}
                answer, expected = (json.loads(one.post('/v1/chat/completions', body)[2]) for one in (server, plain))
                message = answer['choices'][0]['message']
                self.assertEqual(message, expected['choices'][0]['message'])
                self.assertEqual(without_cache(answer['usage']), without_cache(expected['usage']))
                self.assertEqual(expected['usage']['prompt_tokens_details']['cached_tokens'], 0)
                num_cached = answer['usage']['prompt_tokens_details']['cached_tokens']
                self.assertEqual(num_cached == 0, num_seen == 0)
                self.assertGreaterEqual(num_cached, 0.95 * num_seen)
                self.assertLess(num_cached, answer['usage']['prompt_tokens'])
                num_seen = answer['usage']['prompt_tokens']
                messages.append({'role': 'assistant', 'content': message['content'] or ''})
            # Once more the last question: by another tenant, and through the other API, whole and streamed.
            _, _, other = server.post('/v1/chat/completions', {**body, 'messages': messages[:-1], 'cache_salt': 'theirs'})
            self.assertEqual(json.loads(other)['usage']['prompt_tokens_details']['cached_tokens'], 0)
            body = {'model': MODEL.name, 'system': system, 'messages': messages[1:-1], 'max_tokens': 20, 'temperature': 0}
            whole = json.loads(server.post('/v1/messages', body)[2])['usage']
            self.assertGreaterEqual(whole['cache_read_input_tokens'], 0.95 * num_seen)
            self.assertEqual(whole['cache_read_input_tokens'] + whole['input_tokens'], num_seen)
            events = [json.loads(line[6:]) for line in server.post('/v1/messages', {**body, 'stream': True})[2].decode().splitlines()
                      if line.startswith('data: ')]
            for usage in (events[0]['message']['usage'], events[-2]['usage']):
                self.assertEqual(usage['cache_read_input_tokens'], whole['cache_read_input_tokens'])
                self.assertEqual(usage['input_tokens'], whole['input_tokens'])
            # Reasoning is left out of what follows: the prompt departs where the answer began.
            thinks = {'model': MODEL.name, 'max_tokens': 5, 'chat_template_kwargs': {'thinking': True}}
            more = [*messages, {'role': 'user', 'content': 'Spell mire.'}]
            first = json.loads(server.post('/v1/chat/completions', {**thinks, 'messages': messages[:-1]})[2])['usage']
            second = json.loads(server.post('/v1/chat/completions', {**thinks, 'messages': more})[2])['usage']
            self.assertGreater(second['prompt_tokens_details']['cached_tokens'], first['prompt_tokens'] - 20)
            metrics = server.get('/metrics')[1]
            self.assertIn('tessera_prefix_cache_lookups_total{model_name="%s",result="hit"} 6' % MODEL.name, metrics)
            self.assertEqual(server.metric('vllm:prefix_cache_hits_total'), server.metric('tessera_prefix_cache_hits_total'))
            self.assertGreater(server.metric('tessera_prefix_cache_hits_total'), 3 * len(system) / 8)
            self.assertGreater(server.metric('tessera_prefix_cache_snapshots'), 0)
            self.assertEqual(server.metric('tessera_prefix_cache_evictions_total'), 0)
            self.assertEqual(plain.metric('tessera_prefix_cache_queries_total'), 0)
            self.assertEqual((server.end(), plain.end()), (0, 0))

    def test_the_start_says_what_caches_take(self):
        process = subprocess.Popen([PROGRAM, 'serve', '--model', str(MODEL), '--port', '0', '--prefix-cache-memory', '0.5'],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True)
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, notes = process.communicate(timeout=30)
        self.assertRegex(notes, r'caches .*: a token takes \d+ B, a sequence [\d.]+ \S+ besides')
        self.assertRegex(notes, r'prefix cache 512\S* MiB: a snapshot takes [\d.]+ \S+ besides its pages of [\d.]+ \S+, '
                                r'which snapshots share, for 256 tokens each')

    def test_it_says_that_it_loads(self):
        with LoadingServer() as server:
            self.assertEqual(json.loads(server.get('/health/live')[1])['status'], 'live')
            for path in ('/health', '/health/ready', '/health/deep'):
                status, body = server.get(path)
                self.assertEqual((status, json.loads(body)['status']), (503, 'loading'), path)
            kept = http.client.HTTPConnection('127.0.0.1', server.port, timeout=60)
            self.addCleanup(kept.close)
            question = ('POST', '/v1/chat/completions', json.dumps(chat('Compute 257-7.', temperature=0)))
            kept.request(*question)
            answer = kept.getresponse()
            self.assertEqual((answer.status, answer.getheader('Retry-After')), (503, '5'))
            self.assertEqual(json.loads(answer.read())['error']['code'], 'model_loading')
            self.assertEqual(select.select([server.process.stdout], [], [], 0)[0], [], 'an address before it is ready')
            server.go_on()
            self.assertEqual(server.process.stdout.readline().strip(), f'http://127.0.0.1:{server.port}')
            self.assertEqual(server.get('/health/ready')[0], 200)
            kept.request(*question)
            self.assertEqual(kept.getresponse().status, 200)
            self.assertEqual(server.end(), 7)  # of the switch that lets it stand still

    def test_it_ends_while_it_loads(self):
        for by in (signal.SIGTERM, signal.SIGINT):
            with LoadingServer() as server:
                self.assertEqual(server.end(by), 0)
                self.assertEqual(server.process.stdout.read(), '')

    def test_told_to_end_while_it_loads_it_is_never_ready(self):
        with LoadingServer() as server, socket.create_connection(('127.0.0.1', server.port), timeout=30) as client:
            # The end waits for this client, for long enough that the weights may be there before.
            client.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{')
            self.assertEqual(server.get('/health/ready')[0], 503)  # so the other connection is known too
            server.process.send_signal(signal.SIGTERM)
            server.go_on()
            self.assertEqual(server.process.wait(30), 0)
            self.assertEqual(server.process.stdout.read(), '')

    def test_a_load_that_fails_ends_it(self):
        with LoadingServer('--cache-memory', '0.0000001') as server:
            self.assertEqual(server.get('/health/ready')[0], 503)
            server.go_on()
            self.assertEqual(server.process.wait(30), 4)
            self.assertEqual(server.process.stdout.read(), '')
            lines = server.said()
            self.assertEqual(len(lines), 2, lines)
            self.assertIn('TESSERA_BYPASS', lines[0])
            self.assertIn('--cache-memory', lines[1])

    def test_the_end_lets_streams_finish(self):
        with Server() as server:
            body = chat('Tell me.', temperature=1.5, seed=3, max_tokens=400, ignore_eos=True, stream=True)
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                answers = [pool.submit(server.post, '/v1/chat/completions', body) for _ in range(4)]
                time.sleep(0.3)
                self.assertEqual(server.end(), 0)
                texts = {stream_text(answer.result()[2])[0] for answer in answers}
            self.assertEqual(len(texts), 1)

    def test_the_end_comes_at_any_moment(self):
        generator = random_numbers()
        for _ in range(100):
            end_at_a_moment(generator, drain_seconds=0.1)

    def test_no_signal_turns_an_end_into_a_failure(self):
        with Server('--drain', '0.1') as server:
            # One comes at each moment of the end, up to that at which there is no process any more.
            while server.process.poll() is None:
                server.process.send_signal(signal.SIGTERM)
                time.sleep(0.0001)
            self.assertEqual(server.process.returncode, 0)

    def test_a_second_signal_ends_at_once(self):
        with Server('--drain', '600') as server:
            client = socket.create_connection(('127.0.0.1', server.port))
            client.sendall(post_bytes(chat('Tell me.', temperature=1.5, max_tokens=4000, ignore_eos=True, stream=True)))
            client.recv(100)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            self.assertEqual(server.end(), 0)
            client.close()

    def test_the_service_manager_is_told(self):
        path = str(self.folder / 'notify')
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(path)
            manager.settimeout(20)
            os.environ['NOTIFY_SOCKET'] = path
            try:
                server = Server()
            finally:
                del os.environ['NOTIFY_SOCKET']
            with server:
                self.assertEqual(manager.recv(100), b'READY=1')
                self.assertEqual(server.end(), 0)
                self.assertEqual(manager.recv(100), b'STOPPING=1')

    def test_tls(self):
        made = subprocess.run(['openssl', 'req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes',
                               '-keyout', self.folder / 'key', '-out', self.folder / 'cert', '-days', '2', '-subj', '/CN=localhost',
                               '-addext', 'subjectAltName=IP:127.0.0.1'], capture_output=True)
        if made.returncode != 0:
            self.skipTest('no openssl program')
        import ssl
        with Server('--tls-cert', str(self.folder / 'cert'), '--tls-key', str(self.folder / 'key')) as server:
            self.assertTrue(server.url.startswith('https://'))
            context = ssl.create_default_context(cafile=str(self.folder / 'cert'))
            request = urllib.request.Request(server.url + '/v1/chat/completions',
                                             json.dumps(chat('Compute 257-7.', temperature=0, stream=True)).encode())
            with urllib.request.urlopen(request, context=context, timeout=30) as answer:
                self.assertEqual(stream_text(answer.read())[0], '250')
            plain = socket.create_connection(('127.0.0.1', server.port))
            plain.sendall(b'GET / HTTP/1.1\r\n\r\n')
            plain.close()
            self.assertEqual(server.end(), 0)

    def test_refusals(self):
        model = ('serve', '--model', str(MODEL))
        self.check_error(run(*model, '--cache-memory', '0.0000001'), 4, '--cache-memory', '4096 tokens')
        self.check_error(run(*model, '--cache-memory', '900000', '--quiet'), 4, 'does not fit', '--cache-memory', 'missing')
        self.check_error(run(*model, '--prefix-cache-memory', '900000', '--quiet'), 4, 'does not fit',
                         '878.91 TiB for prefixes (--prefix-cache-memory)', 'missing')
        self.check_error(run(*model, '--prefix-cache-memory', '-1'), 2, '--prefix-cache-memory')
        self.check_error(run(*model, '--max-model-len', '99999'), 2, '--max-model-len', '4096')
        self.check_error(run(*model, '--tls-cert', 'x'), 2, '--tls-key')
        self.check_error(run(*model, '--host', 'no such host', '--quiet'), 2, '--host')
        self.check_error(run(*model, '--api-key-file', str(self.folder / 'none')), 3, 'none')
        with socket.socket() as taken:
            taken.bind(('127.0.0.1', 0))
            taken.listen()
            self.check_error(run(*model, '--port', str(taken.getsockname()[1]), '--quiet'), 2, '--port')
            # Before the weights, which may take minutes: here they are missing.
            for name in ('config.json', 'tokenizer.json', 'tokenizer_config.json'):
                if (MODEL / name).exists():
                    shutil.copy(MODEL / name, self.folder)
            bare = ('serve', '--model', str(self.folder), '--quiet')
            self.check_error(run(*bare, '--port', str(taken.getsockname()[1])), 2, '--port')
            self.check_error(run(*bare, '--tls-cert', str(MODEL / 'config.json'), '--tls-key', 'x'), 2, 'PEM')
            self.check_error(run(*bare, '--port', '0'), 3)


if __name__ == '__main__':
    import sys
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
