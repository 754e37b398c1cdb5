# SPDX-License-Identifier: Apache-2.0
"""What tools/mutate_tcgen05, mutate_sm120 and mutate_clusters have in common: one fault planted at a time, and what notices it.

Nothing in the tree is touched: the files that are compiled with the changed text go into a temporary folder, are linked
with the rest of test_backends, which has to be built, and tests are run, each with the mutation's sources that it is for.
A mutation is caught where a test fails and says on what. It survives where all pass. Where a test runs out of time, is
killed, or ends in some other way, or where the mutation can't be tried at all (its text is gone, what it becomes does
not compile), nobody knows, which counts as a failure of these tools as much as a survivor that nobody expects.
"""
import argparse
import concurrent.futures
import hashlib
import json
import pathlib
import re
import shlex
import subprocess
import tempfile
import threading
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
CAUGHT, SURVIVES, UNKNOWN = 'caught', 'survives', 'unknown'


class Mutation(NamedTuple):
    name: str
    path: str       # of what is broken, below src/
    old: str        # every occurrence of it
    new: str
    excuse: str = ''  # why nobody can notice; empty: somebody must
    more: tuple = ()  # other pairs of texts of the file that are replaced with it


class Run(NamedTuple):
    """Tests for sources that are compiled from the changed text: below src/, or below it by '../'."""
    name: str
    sources: tuple
    tests: str  # a filter of GoogleTest


class Suite(NamedTuple):
    mutations: list
    runs: object      # runs(mutation): a list of Run
    folders: tuple    # below the repository: what results are the results of
    limit_s: int


def run(command, folder, limit_s=1200):
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors='replace', timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None, f'ran out of time: {limit_s} s'
    return done.returncode, done.stdout + done.stderr


def verdict(code, output):
    """Of tests: an outcome and what was said."""
    if code is None:
        return UNKNOWN, output
    if code == 0:
        return SURVIVES, ''
    faults = [r'emulated GPU: block \([^)]*\), thread \([^)]*\): (?:src/\S+ ?)?(.*)', r'ERROR: (AddressSanitizer: \S+)',
              r'runtime error: (.*)',
              r'Failure\n(?:Failed\n|Value of: testing::same_(?:bits|bits_or_nan)\(.*\n  Actual: false )?(.*)']
    found = [match for match in (re.search(fault, output) for fault in faults) if match]
    if found:
        # The GPU's own line, which comes behind all that tests say, or what was said first.
        is_gpu = found[0].re.pattern == faults[0]
        first = found[0] if is_gpu else min(found, key=lambda match: match.start())
        return CAUGHT, ' '.join(first.group(1).split())[:150]
    return UNKNOWN, f'exit {code}: ' + ' '.join(output.split())[-150:]


class Build:
    """What ninja knows of test_backends in a build folder."""

    def __init__(self, folder):
        self.folder = folder
        database = json.loads((folder / 'compile_commands.json').read_text())
        self.commands = {str(pathlib.Path(entry['file']).resolve()): shlex.split(entry['command']) for entry in database}
        ninja = subprocess.run(['ninja', '-C', str(folder), '-t', 'commands', 'test_backends'], capture_output=True, text=True)
        # The last command that makes the program, without what is done before and after it.
        line = [text for text in ninja.stdout.splitlines() if '-o tests/backends/test_backends' in text][-1]
        self.link = shlex.split([part for part in line.split('&&') if '-o tests/backends/test_backends' in part][0])

    def compile(self, path, changed, include, target):
        """Null, or what the compiler says."""
        source = (ROOT / 'src' / path).resolve()
        # Undefined behaviour is looked for by the tests themselves, and takes half of the compiler's time.
        command = [word.replace('address,undefined', 'address') for word in self.commands[str(source)] if 'ccache' not in word]
        command[command.index('-o') + 1], command[command.index('-c') + 1] = str(target), str(changed or source)
        command.insert(1, f'-I{include}')
        code, output = run(command, self.folder)
        return None if code == 0 else ' '.join(re.findall(r'error: (.*)', output)[:1]) or output[-300:]

    def link_with(self, objects, program):
        at, names = self.link.index('-o'), {path.name for path in objects}
        # First, so that the linker keeps what the changed text makes of inline functions; a test's own object once.
        rest = [word for word in self.link[1:at] if pathlib.Path(word).name not in names]
        command = self.link[:1] + [str(path) for path in objects] + rest + ['-o', str(program)] + self.link[at + 2:]
        code, output = run(command, self.folder)
        return None if code == 0 else output[-300:]


def changed_text(mutation):
    """Null where a text is gone."""
    text = (ROOT / 'src' / mutation.path).read_text()
    for old, new in ((mutation.old, mutation.new), *mutation.more):
        if old not in text:
            return None
        text = text.replace(old, new)
    return text


def attempt(mutation, suite, build):
    """What each run says: {its name: {outcome, said}}."""
    text = changed_text(mutation)
    if text is None:
        return {'text': {'outcome': UNKNOWN, 'said': f'{mutation.path} does not have it'}}
    results, runs = {}, suite.runs(mutation)
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        changed = scratch / 'src' / mutation.path
        changed.parent.mkdir(parents=True, exist_ok=True)
        changed.write_text(text)
        for one in runs:
            objects, fault = [], None
            for path in one.sources:
                objects.append(scratch / (pathlib.Path(path).name + '.o'))
                fault = fault or build.compile(path, changed if path == mutation.path else None, scratch / 'src', objects[-1])
            program = scratch / 'test'
            fault = fault or build.link_with(objects, program)
            if fault:
                results[one.name] = {'outcome': UNKNOWN, 'said': 'does not compile: ' + fault}
                continue
            code, output = run([str(program), f'--gtest_filter={one.tests}', '--gtest_fail_fast'], build.folder, suite.limit_s)
            outcome, said = verdict(code, output)
            results[one.name] = {'outcome': outcome, 'said': said}
    return results


def outcome_of(results):
    """One that catches is enough; where none does, all have to have passed."""
    outcomes = {result['outcome'] for result in results.values()}
    return CAUGHT if CAUGHT in outcomes else UNKNOWN if UNKNOWN in outcomes else SURVIVES


def words_of(results):
    said = [(f'{name}: ' if len(results) > 1 else '') + (result['said'] or 'nothing') for name, result in results.items()]
    return '; '.join(said).replace('|', '\\|')


class Record:
    """Results of mutations with the sources that they are of, in a file of JSON."""

    def __init__(self, path, suite):
        self.path, self.lock = pathlib.Path(path) if path else None, threading.Lock()
        digest = hashlib.sha256()
        for folder in suite.folders:
            place = ROOT / folder
            for file in sorted(place.rglob('*')) if place.is_dir() else [place]:
                if file.is_file():
                    digest.update(str(file.relative_to(ROOT)).encode() + b'\0' + file.read_bytes())
        self.sources = digest.hexdigest()[:16]
        self.entries = json.loads(self.path.read_text())['mutations'] if self.path and self.path.exists() else []

    def attempt(self, mutation, suite, build):
        key = json.loads(json.dumps(mutation._replace(excuse='')))
        for entry in self.entries:
            if entry['sources'] == self.sources and entry['mutation'] == key:
                return entry['results']
        results = attempt(mutation, suite, build)
        with self.lock:
            self.entries.append({'name': mutation.name, 'outcome': outcome_of(results), 'results': results,
                                 'sources': self.sources, 'mutation': key})
            if self.path:
                self.path.write_text(json.dumps({'mutations': self.entries}, indent=1) + '\n')
        return results


def main(doc, suite):
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--build', default='build/asan')
    parser.add_argument('--only', default='', metavar='EXPRESSION', help='mutations whose names it matches')
    parser.add_argument('--list', action='store_true', help='say which texts are gone, and try none')
    parser.add_argument('--jobs', type=int, default=2)
    parser.add_argument('--record', default='', metavar='FILE',
                        help='keep results there, and take from there those of the same sources')
    options = parser.parse_args()
    chosen = [mutation for mutation in suite.mutations if re.search(options.only, mutation.name)]
    if options.list:
        gone = [mutation for mutation in chosen if changed_text(mutation) is None]
        for mutation in gone:
            print(f'{mutation.name}: {mutation.path} does not have the text')
        print(f'{len(chosen)} mutations, {len(gone)} without their text')
        return 1 if gone else 0
    build, record, failures = Build((ROOT / options.build).resolve()), Record(options.record, suite), 0
    print('| what is broken | what is said |\n| --- | --- |')
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for mutation, results in zip(chosen, pool.map(lambda one: record.attempt(one, suite, build), chosen)):
            outcome = outcome_of(results)
            is_expected = outcome == (SURVIVES if mutation.excuse else CAUGHT)
            failures += not is_expected
            said = words_of(results) if outcome != SURVIVES else f'survives: {mutation.excuse}'
            mark = '' if is_expected else ' **inconclusive**' if outcome == UNKNOWN else ' **unexpected**'
            print(f'| {mutation.name} | {said}{mark} |', flush=True)
    return 1 if failures else 0
