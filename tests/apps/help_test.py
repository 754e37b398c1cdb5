#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Help as it was last agreed on, and what is made from it: completion scripts and the manual page.

    help_test.py PROGRAM MODEL_FOLDER [--update]

--update writes the texts of tests/apps/help anew; look at the difference before committing it.
"""
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

from program import ProgramTest, run

SNAPSHOTS = pathlib.Path(__file__).resolve().parent / 'help'


def help_of(*verb):
    result = run(*verb, '--help')
    assert result.returncode == 0, result.stderr
    return result.stdout.decode()


def verbs():
    text = help_of()
    return re.findall(r'^  (\w+) ', text[text.index('Subcommands:'):text.index('Exit codes:')], re.M)


def current_help():
    return {'tessera': help_of(), **{verb: help_of(verb) for verb in verbs()}}


class Help(ProgramTest):
    maxDiff = None

    def test_snapshots(self):
        texts = current_help()
        self.assertEqual(sorted(path.stem for path in SNAPSHOTS.glob('*.txt')), sorted(texts), 'see --update above')
        for name, text in texts.items():
            with self.subTest(verb=name):
                self.assertEqual(text, (SNAPSHOTS / f'{name}.txt').read_text(), 'the help changed: see --update above')

    def test_every_line_fits_and_every_verb_says_what_it_does(self):
        for name, text in current_help().items():
            self.assertFalse([line for line in text.splitlines() if len(line) > 160], name)
            self.assertNotEqual(text.splitlines()[0].strip(), '', name)

    def flags(self):
        return {name: re.findall(r'^  (?:-\w,)?(--[\w-]+)', text, re.M) for name, text in current_help().items() if name != 'tessera'}

    def test_the_manual_has_every_verb_and_flag(self):
        page = run('man').stdout.decode()
        self.assertTrue(page.startswith('.TH TESSERA 1'))
        for verb, flags in self.flags().items():
            part = page[page.index(f'.SS {verb}\n'):]
            part = part[:part.find('.SS ', 4) if '.SS ' in part[4:] else len(part)]
            for flag in flags:
                self.assertIn(flag.replace('-', '\\-'), part, verb)
        for word in ('TESSERA_MODEL', '130 stopped by Ctrl'):
            self.assertIn(word, page.replace('\\-', '-'))
        if shutil.which('groff'):
            checked = subprocess.run(['groff', '-man', '-Tutf8', '-ww', '-K', 'utf8', '-P', '-c'], input=page.encode(), capture_output=True)
            self.assertEqual(checked.stderr, b'')

    def test_every_verb_has_a_page(self):
        for verb, flags in self.flags().items():
            page = run('man', verb).stdout.decode()
            self.assertTrue(page.startswith(f'.TH TESSERA-{verb} 1'), verb)
            self.assertIn(f'tessera-{verb} \\- ', page)
            for flag in flags:
                self.assertIn(flag.replace('-', '\\-'), page, verb)
            if shutil.which('groff'):
                checked = subprocess.run(['groff', '-man', '-Tutf8', '-ww', '-K', 'utf8', '-P', '-c'], input=page.encode(), capture_output=True)
                self.assertEqual(checked.stderr, b'', verb)
        self.check_error(run('man', 'nothing'), 2, 'nothing')
        self.check_error(run('man', ''), 2, 'VERB')

    def complete(self, script, *words):
        line = ' '.join(f"'{word}'" for word in words)
        code = f'source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _tessera; printf "%s\\n" "${{COMPREPLY[@]}}"'
        result = subprocess.run(['bash', '-c', code], capture_output=True, cwd=self.folder)
        self.assertEqual(result.stderr, b'')
        return result.stdout.decode().split()

    def test_bash_completes(self):
        script = self.folder / 'tessera.bash'
        script.write_bytes(run('completion', 'bash').stdout)
        (self.folder / 'questions.jsonl').touch()
        self.assertEqual(self.complete(script, 'tessera', 'ev'), ['eval'])
        self.assertEqual(set(self.complete(script, 'tessera', '')) - {'-h', '--help', '--help-all', '--version'}, set(verbs()))
        for verb, flags in self.flags().items():
            self.assertLessEqual(set(flags), set(self.complete(script, 'tessera', verb, '--')), verb)
        self.assertEqual(self.complete(script, 'tessera', 'eval', 'ques'), ['questions.jsonl'])
        self.assertIn('questions.jsonl', self.complete(script, 'tessera', 'eval', '--answers', 'q'))
        self.assertEqual(self.complete(script, 'tessera', 'eval', 'x', '--li'), ['--limit'])

    def test_other_shells(self):
        for shell in ('zsh', 'fish'):
            script = run('completion', shell).stdout
            for verb, flags in self.flags().items():
                self.assertIn(verb.encode(), script)
                for flag in flags:
                    self.assertIn(flag.encode() if shell == 'zsh' else b' -l ' + flag[2:].encode(), script)
            if shutil.which(shell):
                path = self.folder / shell
                path.write_bytes(script)
                self.assertEqual(subprocess.run([shell, '-n', str(path)], capture_output=True).stderr, b'')
        self.check_error(run('completion', 'tcsh'), 2, 'tcsh')
        self.check_error(run('completion'), 2, 'SHELL')


if __name__ == '__main__':
    if sys.argv[3:] == ['--update']:
        SNAPSHOTS.mkdir(exist_ok=True)
        for old in SNAPSHOTS.glob('*.txt'):
            old.unlink()
        for name, text in current_help().items():
            (SNAPSHOTS / f'{name}.txt').write_text(text)
    else:
        unittest.main(argv=['help_test'])
