#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/make_sbom: a sound SPDX document, with every library that the program loads.

    sbom_test.py SOURCE_FOLDER PROGRAM
"""
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

SOURCE, PROGRAM = sys.argv[1:3]
# Shared libraries, by the name of THIRD_PARTY.md that they are part of. glibc is the system's.
LIBRARIES = {'fmt': 'fmt', 'pcre2-8': 'PCRE2', 'edit': 'libedit', 'tinfo': 'libedit', 'bsd': 'libedit', 'md': 'libedit',
             'ssl': 'OpenSSL', 'crypto': 'OpenSSL', 'sqlite3': 'SQLite', 'hwloc': 'hwloc', 'udev': 'hwloc', 'xxhash': 'xxHash',
             'stdc++': 'libstdc++', 'gcc_s': 'libstdc++', 'boost_context': 'Boost (Asio, Beast)'}
SYSTEM = {'c', 'm', 'dl', 'rt', 'pthread', 'resolv', 'asan', 'ubsan', 'tsan'}


def make(*arguments, **environment):
    return subprocess.run([f'{SOURCE}/tools/make_sbom', '--version', '1.2.3', *arguments], capture_output=True, text=True,
                          env={**os.environ, **environment})


class Sbom(unittest.TestCase):
    def document(self, *arguments, **environment):
        done = make(*arguments, **environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def with_table(self, old, new):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        table = pathlib.Path(temporary.name, 'table.md')
        text = pathlib.Path(SOURCE, 'THIRD_PARTY.md').read_text()
        self.assertIn(old, text)
        table.write_text(text.replace(old, new))
        return '--table', str(table)

    def test_is_sound(self):
        found = self.document('--python', '--gpu')
        self.assertEqual((found['spdxVersion'], found['dataLicense'], found['SPDXID']), ('SPDX-2.3', 'CC0-1.0', 'SPDXRef-DOCUMENT'))
        ids = [package['SPDXID'] for package in found['packages']]
        self.assertEqual(len(ids), len(set(ids)))
        for relation in found['relationships']:
            self.assertIn(relation['spdxElementId'], ['SPDXRef-DOCUMENT', *ids])
            self.assertIn(relation['relatedSpdxElement'], ids)
        self.assertEqual({relation['relatedSpdxElement'] for relation in found['relationships']}, set(ids))
        for package in found['packages']:
            self.assertRegex(package['SPDXID'], r'^SPDXRef-[A-Za-z0-9.-]+$')
            self.assertTrue(package['versionInfo'], package)
        self.assertEqual([one['licenseId'] for one in found['hasExtractedLicensingInfos']], ['LicenseRef-CUDA'])

    def test_has_what_is_inside_and_no_tools(self):
        plain, python = ({package['name'] for package in self.document(*more)['packages']} for more in ((), ('--python',)))
        self.assertTrue({'fmt', 'SQLite', 'DLPack', 'libstdc++'} <= plain, plain)
        self.assertFalse({'GoogleTest', 'cmake, ninja', 'tokenizers', 'CUDA runtime, static, and headers'} & python)
        self.assertEqual(python - plain, {'nanobind'})

    def test_has_every_library_that_the_program_loads(self):
        names = {package['name'] for package in self.document()['packages']}
        loaded = re.findall(r'^\s*lib([\w+.-]+?)\.so\S* =>', subprocess.run(['ldd', PROGRAM], capture_output=True, text=True).stdout, re.M)
        self.assertIn('fmt', loaded)
        for library in loaded:
            self.assertTrue(library in SYSTEM or LIBRARIES.get(library) in names, f'lib{library} is in no row of THIRD_PARTY.md')

    def test_the_same_again(self):
        first, second = (make(SOURCE_DATE_EPOCH='86400').stdout for _ in range(2))
        self.assertEqual(first, second)
        self.assertEqual(json.loads(first)['creationInfo']['created'], '1970-01-02T00:00:00Z')
        changed = self.document(*self.with_table('| 9.1.0 ', '| 9.1.1 '), SOURCE_DATE_EPOCH='86400')
        self.assertNotEqual(changed['documentNamespace'], json.loads(first)['documentNamespace'])

    def test_without_a_date_it_is_the_present(self):
        before = datetime.datetime.now(datetime.timezone.utc).strftime('%Y-%m-%dT%H:%M:%SZ')
        done = make(SOURCE_DATE_EPOCH='')
        self.assertIn('the date is the present', done.stderr)
        self.assertGreaterEqual(json.loads(done.stdout)['creationInfo']['created'], before)

    def test_faults_are_named(self):
        for arguments, words in ((self.with_table('| BSL-1.0 |', '| Boost |'), ('Boost', 'found "Boost"')), (('--table', os.devnull), ('rows',))):
            done = make(*arguments)
            self.assertNotEqual(done.returncode, 0)
            for word in words:
                self.assertIn(word, done.stderr)
        self.assertIn('SOURCE_DATE_EPOCH', make(SOURCE_DATE_EPOCH='soon').stderr)


if __name__ == '__main__':
    unittest.main(argv=['sbom_test'])
