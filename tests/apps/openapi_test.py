#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""schemathesis over /openapi.json against tessera serve: no server error, and no status, type or schema that the document
does not have. ./setup --dev installs it; where it is missing this ends with 77, which ctest shows as skipped.

    openapi_test.py PROGRAM MODEL_FOLDER
"""
import importlib.util
import json
import os
import subprocess
import sys
import unittest

from program import MODEL, ProgramTest, end_as_skipped, random_numbers
from served import Server

# Nothing is looked for in the network.
OFFLINE = {**os.environ, 'HF_HUB_OFFLINE': '1', 'HF_DATASETS_OFFLINE': '1', 'LANGSMITH_TRACING': 'false', 'DO_NOT_TRACK': '1'}
CHECKS = 'not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance'


def name_the_model(document):
    """Lets every "model" of a body be the one that is served; how many there were."""
    count = 0
    if isinstance(document, list):
        return sum(name_the_model(one) for one in document)
    if not isinstance(document, dict):
        return 0
    for name, value in document.items():
        if name == 'model' and isinstance(value, dict) and value.get('type') == 'string':
            value['enum'] = [MODEL.name]
            count += 1
        else:
            count += name_the_model(value)
    return count


def conform(test, server, *flags, seconds=None):
    """Fails the test where schemathesis, run with these flags, does."""
    # Nearly every random body would end at the name of an unknown model.
    document = json.loads(server.get('/openapi.json')[1])
    test.assertGreater(name_the_model(document), 4)
    (test.folder / 'openapi.json').write_text(json.dumps(document))
    # Its health checks are about how fast a busy machine makes bodies, not about the server.
    result = subprocess.run([sys.executable, '-c', 'from schemathesis.cli import schemathesis; schemathesis()', 'run',
                             'openapi.json', '--url', server.url, '--checks', CHECKS, '--request-timeout', '60', '--workers', '1',
                             '--suppress-health-check', 'all', '--no-color', *flags],
                            env=OFFLINE, cwd=test.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            timeout=seconds)
    test.assertEqual(result.returncode, 0, result.stdout[-10000:])
    test.assertRegex(result.stdout, r'\d generated')
    test.assertEqual(server.get('/health/ready')[0], 200)


class OpenApi(ProgramTest):
    """Half a minute together; tools/soak_server.py --only conformance has more examples, and bad values one by one."""

    @classmethod
    def setUpClass(cls):
        cls.server = Server('--max-model-len', '512')

    @classmethod
    def tearDownClass(cls):
        code = cls.server.end()
        cls.server.__exit__()
        assert code == 0, code

    def test_each_value_that_the_document_allows(self):
        conform(self, self.server, '--phases', 'examples,coverage', '--mode', 'positive', '--seed', '1', seconds=120)

    def test_random_bodies(self):
        seed = random_numbers().randrange(1 << 32)
        print(f'seed {seed}', flush=True)
        conform(self, self.server, '--phases', 'fuzzing', '--max-examples', '25', '--seed', str(seed), seconds=120)


if __name__ == '__main__':
    if importlib.util.find_spec('schemathesis') is None:
        end_as_skipped('no schemathesis in this Python; ./setup --no-run --dev installs it into .venv')
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
