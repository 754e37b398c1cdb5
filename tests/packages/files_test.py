#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The container's and Kubernetes' files, without Docker or a cluster: what they name exists here and means the same.

    files_test.py SOURCE_FOLDER PROGRAM
"""
import http.server
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import unittest

SOURCE, PROGRAM = pathlib.Path(sys.argv[1]), sys.argv[2]
DOCKER = SOURCE / 'packaging/docker'
MANIFEST = SOURCE / 'examples/kubernetes/leader-worker-set.yaml'


def instructions():
    """(instruction, rest) of the Dockerfile, continued lines joined."""
    text = re.sub(r'^#.*\n', '', (DOCKER / 'Dockerfile').read_text(), flags=re.M).replace('\\\n', ' ')
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def serve_flags():
    text = subprocess.run([PROGRAM, 'serve', '--help'], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r'--[a-z-]+', text))


class Dockerfile(unittest.TestCase):
    def test_instructions_are_known_and_stages_exist(self):
        stages = []
        for name, rest in instructions():
            self.assertIn(name, ('ARG', 'FROM', 'WORKDIR', 'COPY', 'RUN', 'ENV', 'ADD', 'USER', 'EXPOSE', 'STOPSIGNAL', 'HEALTHCHECK',
                                 'ENTRYPOINT', 'CMD'))
            if name == 'FROM':
                base, *alias = re.fullmatch(r'(\S+)(?: AS (\S+))?', rest).groups()
                if base == 'toolkit-${TOOLKIT}':
                    self.assertTrue({'toolkit-none', 'toolkit-cuda'} <= set(stages))
                else:
                    self.assertTrue(base in stages or base == 'debian:12-slim', base)
                stages += alias
            for stage in re.findall(r'--from=(\S+)', rest):
                self.assertIn(stage, stages)
        self.assertIn(('ARG', 'TOOLKIT=none'), instructions())

    def test_what_is_copied_exists(self):
        ignored = (SOURCE / '.dockerignore').read_text().split()
        copied = [rest.split()[:-1] for name, rest in instructions() if name == 'COPY' and '--from' not in rest]
        self.assertGreater(len(copied), 2)
        for source in sum(copied, []):
            self.assertTrue((SOURCE / source).exists(), source)
            self.assertFalse([entry for entry in ignored if source.startswith(entry)], source)
        # ./setup reads these before the rest of the sources is there.
        read = set(re.findall(r'tools/requirements[a-z-]*\.txt', re.sub(r'.*"\$dev" = 1.*', '', (SOURCE / 'setup').read_text())))
        self.assertEqual(read, {source for source in sum(copied, []) if source.startswith('tools/')})

    def test_it_builds_as_the_presets_do(self):
        presets = {preset['name']: preset for preset in json.loads((SOURCE / 'CMakePresets.json').read_text())['configurePresets']}
        architectures = presets['cuda-all']['cacheVariables']['CMAKE_CUDA_ARCHITECTURES']
        text = (DOCKER / 'Dockerfile').read_text()
        self.assertIn(f'-DCMAKE_CUDA_ARCHITECTURES={architectures}"', text)
        for preset in re.findall(r'--preset (\w+)', text):
            self.assertIn(preset, presets)

    def test_it_does_not_run_as_root(self):
        last = {}
        for name, rest in instructions():
            if name == 'FROM':
                last = {}
            last[name] = rest
        self.assertRegex(last['USER'], r'^[1-9]\d+:[1-9]\d+$')
        self.assertEqual(json.loads(last['ENTRYPOINT']), ['tessera'])
        verb, *flags = json.loads(last['CMD'])
        self.assertEqual(verb, 'serve')
        self.assertTrue({flag for flag in flags if flag.startswith('--')} <= serve_flags())
        port = flags[flags.index('--port') + 1]
        self.assertEqual(last['EXPOSE'], port)
        self.assertEqual(json.loads(last['HEALTHCHECK'].split('CMD ')[1]), ['healthcheck'])
        self.assertIn(('ENV', f'TESSERA_HEALTH_SCHEME=http TESSERA_HEALTH_PORT={port}'), instructions())


class Healthcheck(unittest.TestCase):
    def check(self, port, scheme):
        environment = {**os.environ, 'TESSERA_HEALTH_PORT': str(port), 'TESSERA_HEALTH_SCHEME': scheme}
        return subprocess.run([DOCKER / 'healthcheck'], capture_output=True, env=environment).returncode

    def ask(self, status, scheme='http'):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status if self.path == '/health/ready' else 404)
                self.end_headers()

            def log_message(self, *arguments):
                pass

        server = http.server.HTTPServer(('127.0.0.1', 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            return self.check(server.server_port, scheme)
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def test_it_tells_ready_from_not(self):
        self.assertEqual(self.ask(200), 0)
        self.assertEqual(self.ask(503), 1)
        self.assertEqual(self.ask(503, 'https'), 0)  # it asks nothing

    def test_nobody_there(self):
        with socket.socket() as bound:  # and not listening: nobody else gets the port
            bound.bind(('127.0.0.1', 0))
            for scheme in ('http', 'https'):
                self.assertEqual(self.check(bound.getsockname()[1], scheme), 1)


class Kubernetes(unittest.TestCase):
    def test_it_agrees_with_the_program_and_the_image(self):
        text = MANIFEST.read_text()
        arguments = json.loads(re.search(r'args: (\[.*?\])', text, re.S)[1])
        self.assertEqual(arguments[0], 'serve')
        self.assertTrue({argument for argument in arguments if argument.startswith('--')} <= serve_flags())
        user = dict(instructions())['USER'].split(':')[0]
        self.assertEqual(re.search(r'runAsUser: (\d+)', text)[1], user)
        drain = arguments[arguments.index('--drain') + 1]
        self.assertGreater(int(re.search(r'terminationGracePeriodSeconds: (\d+)', text)[1]), int(drain))
        self.assertEqual(re.search(r'containerPort: (\d+)', text)[1], arguments[arguments.index('--port') + 1])

    def test_it_is_yaml(self):
        try:
            import yaml
        except ImportError:
            self.skipTest('PyYAML is not installed')
        workers, service = yaml.safe_load_all(MANIFEST.read_text())
        self.assertEqual(workers['kind'], 'LeaderWorkerSet')
        template = workers['spec']['leaderWorkerTemplate']
        self.assertEqual(template['size'], 1)
        pod = template['workerTemplate']['spec']
        mounted = {mount['name'] for mount in pod['containers'][0]['volumeMounts']}
        self.assertEqual(mounted, {volume['name'] for volume in pod['volumes']})
        self.assertEqual(service['spec']['selector']['leaderworkerset.sigs.k8s.io/name'], workers['metadata']['name'])


if __name__ == '__main__':
    unittest.main(argv=['files_test'])
