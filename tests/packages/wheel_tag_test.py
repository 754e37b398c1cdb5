#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/tag_wheel on small wheels.

    wheel_tag_test.py SOURCE_FOLDER PROGRAM
"""
import base64
import hashlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

SOURCE, PROGRAM = sys.argv[1:3]


@unittest.skipUnless(shutil.which('readelf'), 'binutils is not installed')
class TagWheel(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def wheel(self, files, platform='linux_x86_64', python='cp311-cp311'):
        path = self.folder / f'some_thing-1.0-{python}-{platform}.whl'
        with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as wheel:
            for name, data in files.items():
                wheel.writestr(zipfile.ZipInfo(f'some/{name}', (2001, 2, 3, 4, 5, 6)), data)
            wheel.writestr('some_thing-1.0.dist-info/WHEEL', f'Wheel-Version: 1.0\nTag: {python}-{platform}\n')
            wheel.writestr('some_thing-1.0.dist-info/RECORD', 'some_thing-1.0.dist-info/WHEEL,sha256=x,1\nsome_thing-1.0.dist-info/RECORD,,\n')
        return path

    def tag(self, path):
        return subprocess.run([f'{SOURCE}/tools/tag_wheel', path], capture_output=True, text=True)

    def check_error(self, path, *words):
        done = self.tag(path)
        self.assertNotEqual(done.returncode, 0)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)

    def libraries(self):
        """What the program needs, but for the C and C++ libraries."""
        lines = [line.split() for line in subprocess.run(['ldd', PROGRAM], capture_output=True, text=True).stdout.splitlines()]
        return {line[0]: pathlib.Path(line[2]).read_bytes() for line in lines if len(line) > 2 and line[1] == '=>'}

    def test_the_program_with_its_libraries(self):
        own = self.wheel({'program': pathlib.Path(PROGRAM).read_bytes(), **self.libraries()})
        done = self.tag(own)
        self.assertEqual(done.returncode, 0, done.stderr)
        tagged = pathlib.Path(done.stdout.strip())
        self.assertRegex(tagged.name, r'^some_thing-1.0-cp311-cp311-manylinux_2_\d\d_x86_64.whl$')
        self.assertFalse(own.exists())
        with zipfile.ZipFile(tagged) as wheel:
            text = wheel.read('some_thing-1.0.dist-info/WHEEL')
            self.assertIn(tagged.stem.split('-', 2)[2], text.decode())
            digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b'=').decode()
            self.assertEqual(wheel.read('some_thing-1.0.dist-info/RECORD').decode(),
                             f'some_thing-1.0.dist-info/WHEEL,sha256={digest},{len(text)}\nsome_thing-1.0.dist-info/RECORD,,\n')
            self.assertEqual(wheel.getinfo('some/program').date_time, (2001, 2, 3, 4, 5, 6))

    def test_the_lowest_tag_that_holds(self):
        for version, expected in (('2.17', 28), ('2.31', 31), ('2.34', 34), ('2.35', 35), ('2.36', 39)):
            with self.subTest(version=version):
                library = self.library_that_needs(version)
                done = self.tag(self.wheel({'x.so': library}))
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn(f'-manylinux_2_{expected}_x86_64.whl', done.stdout)
        self.check_error(self.wheel({'x.so': self.library_that_needs('2.99')}), 'manylinux_2_39', 'GLIBC_2.99', 'x.so')

    def test_a_wheel_for_all_pythons_that_follow(self):
        other = self.wheel({'x.so': self.library_that_needs('2.34')})
        done = self.tag(self.wheel({'x.so': self.library_that_needs('2.34')}, python='cp312-abi3'))
        self.assertEqual(done.returncode, 0, done.stderr)
        tagged = pathlib.Path(done.stdout.strip())
        self.assertEqual(tagged.name, 'some_thing-1.0-cp312-abi3-manylinux_2_34_x86_64.whl')
        with zipfile.ZipFile(tagged) as wheel:
            self.assertIn('Tag: cp312-abi3-manylinux_2_34_x86_64', wheel.read('some_thing-1.0.dist-info/WHEEL').decode())
        self.assertTrue(other.exists())

    def library_that_needs(self, version):
        """A library that takes a symbol of that version from a libc.so.6 of this test."""
        (self.folder / 'map').write_text(f'GLIBC_{version} {{ global: f; }};')
        build = ['cc', '-shared', '-fPIC', '-nostdlib', '-x', 'c', '-']
        subprocess.run([*build, '-o', self.folder / 'libc.so.6', '-Wl,-soname,libc.so.6', f'-Wl,--version-script={self.folder}/map'],
                       input=b'void f(void) {}', check=True)
        subprocess.run([*build, '-o', self.folder / 'x.so', '-x', 'none', self.folder / 'libc.so.6'],
                       input=b'void f(void); void g(void) { f(); }', check=True)
        return (self.folder / 'x.so').read_bytes()

    def test_a_library_that_is_missing(self):
        libraries = self.libraries()
        gone = next(name for name in libraries if name.startswith('libpcre2'))
        del libraries[gone]
        self.check_error(self.wheel({'program': pathlib.Path(PROGRAM).read_bytes(), **libraries}), gone, 'some/program')

    def test_what_is_no_such_wheel(self):
        self.check_error(self.wheel({'a.py': b''}), 'found none')
        self.check_error(self.wheel({'a.py': b''}, 'any'), 'another tag')
        broken = self.folder / 'a-1-py3-none-linux_x86_64.whl'
        broken.write_bytes(b'no archive')
        self.check_error(broken, str(broken))
        self.check_error(self.folder / 'b-1-py3-none-linux_x86_64.whl', 'No such file')


if __name__ == '__main__':
    unittest.main(argv=['wheel_tag_test'])
