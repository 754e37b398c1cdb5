#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An installed C interface serves another CMake project: examples/c is configured, built and run outside this one.

    find_package_test.py CMAKE NINJA BUILD_FOLDER SOURCE_FOLDER
"""
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

CMAKE, NINJA, BUILD, SOURCE = sys.argv[1:5]


class FindPackage(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        installed = self.folder / 'installed here'
        self.call(CMAKE, '--install', BUILD, '--component', 'library', '--prefix', installed)
        # Nothing may depend on where it was installed.
        self.prefix = self.folder / 'moved'
        installed.rename(self.prefix)

    def call(self, *arguments, **options):
        return subprocess.run(arguments, check=True, capture_output=True, text=True, **options).stdout

    def configure(self, source):
        return subprocess.run([CMAKE, '-G', 'Ninja', f'-DCMAKE_MAKE_PROGRAM={NINJA}', f'-DCMAKE_PREFIX_PATH={self.prefix}',
                               '-S', source, '-B', self.folder / 'build'], capture_output=True, text=True)

    def test_the_example_builds_and_runs(self):
        done = self.configure(pathlib.Path(SOURCE, 'examples/c'))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.call(CMAKE, '--build', self.folder / 'build')
        said = self.call(self.folder / 'build/example')
        self.assertIn('tessera 0.1', said)
        loaded = self.call('ldd', self.folder / 'build/example')
        self.assertIn(str(self.prefix / 'lib/libtessera.so.0'), loaded)

    def test_another_version_is_refused(self):
        source = self.folder / 'wants_more'
        shutil.copytree(pathlib.Path(SOURCE, 'examples/c'), source)
        listing = (source / 'CMakeLists.txt').read_text()
        self.assertIn('tessera 0.1 ', listing)
        (source / 'CMakeLists.txt').write_text(listing.replace('tessera 0.1 ', 'tessera 0.2 '))
        done = self.configure(source)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn('0.2', done.stderr)

    def test_nothing_names_the_build(self):
        texts = [path for path in self.prefix.rglob('*') if path.is_file() and '.so' not in path.name]
        self.assertTrue({'.cmake', '.pc', '.h'} <= {path.suffix for path in texts}, texts)
        for path in texts:
            for folder in (SOURCE, BUILD):
                self.assertNotIn(folder.encode(), path.read_bytes(), path)


if __name__ == '__main__':
    unittest.main(argv=['find_package_test'])
