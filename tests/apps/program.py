# SPDX-License-Identifier: Apache-2.0
"""How the tests of this folder run the program. Its path and the bundled model's come from the command line."""
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import unittest

PROGRAM, MODEL = sys.argv[1], pathlib.Path(sys.argv[2])

# By which a launcher may have started these tests: none of what they start is its rank.
LAUNCHER = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT')

# What CMake gives ctest as SKIP_RETURN_CODE.
SKIPPED = 77


def environment(**changes):
    env = {k: v for k, v in os.environ.items() if not k.startswith('TESSERA_')}
    env.update(changes, OMP_WAIT_POLICY='passive')
    return env


def run(*arguments, stdin=None, timeout=120, **changes):
    return subprocess.run([PROGRAM, *arguments], input=stdin, capture_output=True, timeout=timeout, env=environment(**changes))


def random_numbers():
    """Others in each run; the same where TESSERA_TEST_SEED is set."""
    return random.Random(os.environ.get('TESSERA_TEST_SEED'))


def end_as_skipped(why):
    """Ends this program so that ctest shows its test as skipped; `why` says what to install."""
    print('skipped: ' + why)
    sys.exit(SKIPPED)


class ProgramTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix='tessera-cli-'))
        self.addCleanup(shutil.rmtree, self.folder, True)

    def check_error(self, result, code, *parts):
        """One line on stderr with all parts, nothing on stdout."""
        message = result.stderr.decode()
        self.assertEqual(result.returncode, code, message)
        self.assertEqual(result.stdout, b'')
        self.assertEqual(message.count('\n'), 1, message)
        self.assertTrue(message.startswith('tessera: '), message)
        for part in parts:
            self.assertIn(part, message)
