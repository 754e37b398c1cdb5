#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Debian package: made by cpack, unpacked, and run.

    debian_test.py CPACK BUILD_FOLDER SOURCE_FOLDER

dpkg-dev is needed; systemd-analyze and lintian judge where they are installed.
"""
import configparser
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

CPACK, BUILD, SOURCE = sys.argv[1:4]


def call(*arguments, **options):
    done = subprocess.run(arguments, capture_output=True, text=True, **options)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    return done.stdout


@unittest.skipUnless(shutil.which('dpkg-shlibdeps'), 'dpkg-dev is not installed')
class Debian(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = pathlib.Path(temporary.name)
        call(CPACK, '--config', f'{BUILD}/CPackConfig.cmake', '-B', cls.folder)
        cls.package, = cls.folder.glob('*.deb')
        cls.root = cls.folder / 'root'
        call('dpkg-deb', '--extract', cls.package, cls.root)
        cls.control = cls.folder / 'control'
        call('dpkg-deb', '--control', cls.package, cls.control)

    def test_contents(self):
        found = {str(path.relative_to(self.root)) for path in self.root.rglob('*') if path.is_file()}
        for name in ('usr/bin/tessera', 'lib/systemd/system/tessera.service', 'etc/default/tessera',
                     'usr/share/man/man1/tessera.1.gz', 'usr/share/man/man1/tessera-serve.1.gz',
                     'usr/share/bash-completion/completions/tessera', 'usr/share/doc/tessera/tessera.spdx.json'):
            self.assertIn(name, found)
        self.assertFalse([name for name in found if 'models' in name or '.so' in name], 'a model or libraries')
        owners = {line.split()[1] for line in call('dpkg-deb', '--contents', self.package).splitlines()}
        self.assertEqual(owners, {'root/root'})

    def test_what_it_depends_on(self):
        depends = call('dpkg-deb', '--field', self.package, 'Depends')
        for name in ('libc6', 'libfmt9', 'libssl3', 'libstdc++6', 'libpcre2-8-0'):
            self.assertIn(name, depends)
        self.assertNotIn('libasan', depends)

    def test_every_verb_has_a_page(self):
        verbs = re.findall(r'^  (\w+) ', call(self.root / 'usr/bin/tessera', '--help').split('Subcommands:')[1].split('Exit codes:')[0], re.M)
        self.assertIn('serve', verbs)
        pages = {path.name for path in (self.root / 'usr/share/man/man1').iterdir()}
        self.assertEqual(pages, {'tessera.1.gz', *(f'tessera-{verb}.1.gz' for verb in verbs)})

    def test_the_program_runs(self):
        program = self.root / 'usr/bin/tessera'
        answer = call(program, 'generate', '--quiet', '--model', f'{SOURCE}/models/tiny-v4', 'Compute 257-7.')
        self.assertEqual(answer.strip(), '250')
        # Debian's libraries are where the loader looks, so it needs no path of its own; and there is no model.
        self.assertNotRegex(call('readelf', '--dynamic', program), 'RPATH|RUNPATH')
        lost = subprocess.run([program, 'generate', 'x'], capture_output=True, text=True)
        self.assertEqual(lost.returncode, 3)
        self.assertIn('no bundled model', lost.stderr)

    def test_the_service(self):
        path = self.root / 'lib/systemd/system/tessera.service'
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.optionxform = str
        unit.read(path)
        service = unit['Service']
        self.assertEqual(service['Type'], 'notify')
        for name in ('DynamicUser', 'NoNewPrivileges', 'PrivateTmp', 'RestrictNamespaces'):
            self.assertEqual(service[name], 'yes', name)
        self.assertEqual(service['ProtectSystem'], 'strict')
        # The variables that it passes on are those of the default file, which survives an upgrade.
        defaults = (self.root / 'etc/default/tessera').read_text()
        self.assertEqual(set(re.findall(r'\$\{?([A-Z_]+)', service['ExecStart'])), set(re.findall(r'^([A-Z_]+)=', defaults, re.M)))
        self.assertEqual((self.control / 'conffiles').read_text(), '/etc/default/tessera\n')
        flags = call(self.root / 'usr/bin/tessera', 'serve', '--help')
        for flag in re.findall(r'--[a-z-]+', service['ExecStart'] + defaults):
            self.assertIn(flag, flags)
        if shutil.which('systemd-analyze'):
            exposure = call('systemd-analyze', 'security', '--offline=true', path)
            self.assertLess(float(re.search(r'exposure level for .*: ([\d.]+)', exposure)[1]), 2.0, exposure)

    def test_scripts(self):
        for name in ('postinst', 'prerm', 'postrm'):
            call('sh', '-n', self.control / name)
            # As in a container: nothing there to tell.
            if not pathlib.Path('/run/systemd/system').exists():
                call('sh', self.control / name, 'remove')

    @unittest.skipUnless(shutil.which('lintian'), 'lintian is not installed')
    def test_lintian(self):
        done = subprocess.run(['lintian', '--allow-root', self.package], capture_output=True, text=True)
        self.assertEqual([line for line in done.stdout.splitlines() if line[:2] in ('E:', 'W:')], [])


if __name__ == '__main__':
    unittest.main(argv=['debian_test'])
