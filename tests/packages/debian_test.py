#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Debian package: made by cpack, unpacked, and run.

    debian_test.py CPACK BUILD_FOLDER SOURCE_FOLDER

dpkg-dev is needed; systemd-analyze and lintian judge where they are installed.
"""
import configparser
import os
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

    @unittest.skipUnless(shutil.which('lintian'), 'lintian is not installed')
    def test_lintian(self):
        done = subprocess.run(['lintian', '--allow-root', self.package], capture_output=True, text=True)
        self.assertEqual([line for line in done.stdout.splitlines() if line[:2] in ('E:', 'W:')], [])


class Scripts(unittest.TestCase):
    """What dpkg runs, on a root in a temporary folder, where commands of systemd only write down that they were called."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name, 'root')
        (self.root / 'run/systemd/system').mkdir(parents=True)
        self.log = pathlib.Path(temporary.name, 'log')
        self.commands = pathlib.Path(temporary.name, 'bin')
        self.commands.mkdir()
        for name in ('systemctl', 'deb-systemd-invoke', 'deb-systemd-helper'):
            # They fail, and no script may fail with them.
            (self.commands / name).write_text(f'#!/bin/sh\necho {name} "$@" >> "{self.log}"\nexit 1\n')
            (self.commands / name).chmod(0o755)

    def run_script(self, name, *arguments):
        """Its calls, in their order."""
        self.log.write_text('')
        environment = {'PATH': f'{self.commands}:{os.environ["PATH"]}', 'TESSERA_ROOT': str(self.root)}
        call('sh', f'{SOURCE}/packaging/debian/{name}', *arguments, env=environment)
        return self.log.read_text().splitlines()

    def test_installing_starts_nothing(self):
        self.assertEqual(self.run_script('postinst', 'configure', ''), ['systemctl --system daemon-reload'])

    def test_an_upgrade_restarts_what_runs(self):
        self.assertEqual(self.run_script('prerm', 'upgrade', '0.2'), [])
        self.assertEqual(self.run_script('postrm', 'upgrade', '0.2'), [])
        self.assertEqual(self.run_script('postinst', 'configure', '0.1'),
                         ['systemctl --system daemon-reload', 'deb-systemd-invoke try-restart tessera.service'])

    def test_removing_stops_it(self):
        self.assertEqual(self.run_script('prerm', 'remove'), ['deb-systemd-invoke stop tessera.service'])

    def test_purging_leaves_nothing(self):
        kept = self.root / 'var/lib/private/another/file'
        kept.parent.mkdir(parents=True)
        kept.touch()
        wants = self.root / 'etc/systemd/system/multi-user.target.wants'
        wants.mkdir(parents=True)
        (wants / 'tessera.service').symlink_to('/lib/systemd/system/tessera.service')
        for folder in ('lib', 'cache'):
            state = self.root / f'var/{folder}/private/tessera'
            state.mkdir(parents=True)
            (state / 'entry').touch()
            (self.root / f'var/{folder}/tessera').symlink_to('private/tessera')
        self.assertEqual(self.run_script('postrm', 'remove'), ['systemctl --system daemon-reload'])
        self.assertFalse((wants / 'tessera.service').is_symlink(), 'systemctl enable made it')
        self.assertTrue((self.root / 'var/lib/tessera/entry').exists(), 'only a purge takes what the service wrote')
        self.assertEqual(self.run_script('postrm', 'purge'),
                         ['systemctl --system daemon-reload', 'deb-systemd-helper purge tessera.service'])
        left = [path for path in self.root.rglob('*') if path.is_file() or path.is_symlink()]
        self.assertEqual(left, [kept])
        self.run_script('postrm', 'purge')  # nothing there is no fault

    def test_without_systemd(self):
        """As in a container: nobody to tell."""
        (self.root / 'run/systemd/system').rmdir()
        for name, action in (('postinst', 'configure'), ('prerm', 'remove'), ('postrm', 'remove')):
            self.assertEqual(self.run_script(name, action), [])


if __name__ == '__main__':
    unittest.main(argv=['debian_test'])
