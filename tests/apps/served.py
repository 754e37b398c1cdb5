# SPDX-License-Identifier: Apache-2.0
"""A running `tessera serve`, what is asked of it, and how it may end: for tests of this folder and tools/soak_server.py."""
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time

from program import MODEL, PROGRAM, environment


class Server:
    """The program, from its first line on stdout to its end."""

    def __init__(self, *flags, through=()):
        """`through`: a command that runs the program, as its last words, in its own place."""
        self.process = subprocess.Popen([*through, PROGRAM, 'serve', '--model', str(MODEL), '--port', '0', '--quiet', *flags],
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True)
        self.url = self.process.stdout.readline().strip()
        self.curl = self.process.stdout.readline().strip()
        self.port = int(self.url.rsplit(':', 1)[1]) if self.url else 0

    def end(self, by=signal.SIGTERM):
        self.process.send_signal(by)
        return self.process.wait(30)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()

    def post(self, path, body, **headers):
        """Status, headers and body."""
        connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=60)
        try:
            connection.request('POST', path, json.dumps(body), {'Content-Type': 'application/json', **headers})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def get(self, path):
        connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=60)
        try:
            connection.request('GET', path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def metric(self, name):
        for line in self.get('/metrics')[1].splitlines():
            if line.startswith(name + '{'):
                return float(line.rsplit(' ', 1)[1])
        raise KeyError(name)

    def tier(self, name):
        """A figure of the prefix cache's tier on the disk."""
        for line in self.get('/metrics')[1].splitlines():
            if line.startswith('tessera_cache_tier_' + name + '{') and 'tier="disk"' in line:
                return float(line.rsplit(' ', 1)[1])
        raise KeyError(name)


class LoadingServer(Server):
    """The program once it listens, standing still before its weights: what it has to say then finds no room in stderr."""

    def __init__(self, *flags):
        with socket.socket() as free:
            free.bind(('127.0.0.1', 0))
            self.port = free.getsockname()[1]
        self.stderr, full = os.pipe()
        os.set_blocking(full, False)
        try:
            while True:
                os.write(full, b'.')
        except BlockingIOError:
            os.set_blocking(full, True)
        self.process = subprocess.Popen(
            [PROGRAM, 'serve', '--model', str(MODEL), '--port', str(self.port), '--quiet', *flags], stdout=subprocess.PIPE,
            stderr=full, env=environment(TESSERA_BYPASS='routed_experts'), text=True)
        os.close(full)
        self.reader, self.text = threading.Thread(target=self.read_all), b''
        while self.process.poll() is None:
            try:
                if self.get('/health/live')[0] == 200:
                    break
            except ConnectionRefusedError:
                time.sleep(0.01)

    def go_on(self):
        self.reader.start()

    def read_all(self):
        while part := os.read(self.stderr, 65536):
            self.text += part

    def said(self):
        """Its lines on stderr, after go_on() and its end."""
        self.reader.join()
        return self.text.lstrip(b'.').decode().splitlines()

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.reader.is_alive():
            self.reader.join()
        os.close(self.stderr)
        self.process.stdout.close()


def chat(question, **more):
    return {'model': MODEL.name, 'messages': [{'role': 'user', 'content': question}], **more}


def stream_text(body):
    text, usage = '', None
    for line in body.decode().split('\n\n'):
        if not line.startswith('data: {'):
            continue
        chunk = json.loads(line[6:])
        assert 'error' not in chunk, chunk
        usage = chunk.get('usage') or usage
        for choice in chunk['choices']:
            text += choice['delta'].get('content') or ''
    assert body.endswith(b'data: [DONE]\n\n'), body[-100:]
    return text, usage


def post_bytes(body):
    data = json.dumps(body).encode()
    return b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s' % (len(data), data)


def end_at_a_moment(generator, drain_seconds):
    """Ends a server, by one signal or two, at a random moment of three streams: exit code 0, and each stream ends whole or
    with an error. Whether there were two."""
    with Server('--drain', str(drain_seconds)) as server:
        clients = [socket.create_connection(('127.0.0.1', server.port), timeout=30) for _ in range(3)]
        for client in clients:
            client.sendall(post_bytes(chat('Tell me.', max_tokens=generator.choice([5, 60, 3000]), stream=True, temperature=1.5,
                                           ignore_eos=True)))
        time.sleep(generator.random() * 0.15)
        server.process.send_signal(generator.choice([signal.SIGTERM, signal.SIGINT]))
        is_twice = generator.random() < 0.3
        if is_twice:
            time.sleep(generator.random() * 0.05)
            server.process.send_signal(signal.SIGTERM)
        for client in clients:
            answer = b''
            try:
                while part := client.recv(65536):
                    answer += part
            except ConnectionResetError:
                assert not answer, ('a reset within an answer', answer[-200:])
            assert not answer or b'[DONE]' in answer or b'"error"' in answer, ('a stream without an end', answer[-200:])
            client.close()
        code = server.process.wait(30)
        assert code == 0, ('exit code', code)
        return is_twice
