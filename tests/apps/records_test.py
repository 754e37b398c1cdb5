#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/results: every record, and what tessera bench would record, against the folder's schema."""
import json
import pathlib
import unittest

from program import MODEL, ProgramTest, end_as_skipped, run

try:
    import jsonschema
except ImportError:
    end_as_skipped('jsonschema is not installed (./setup --dev)')

RESULTS = pathlib.Path(__file__).resolve().parents[2] / 'bench' / 'results'
SCHEMA = json.loads((RESULTS / 'schema.json').read_text())
# Since this day a record says how to have it again.
FIRST_WHOLE = '2026-11-26'


def validator(part=None):
    schema = SCHEMA if part is None else {'$defs': SCHEMA['$defs'], '$ref': f'#/$defs/{part}'}
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def faults(value, part=None):
    return [f'{error.json_path}: {error.message[:200]}' for error in validator(part).iter_errors(value)]


def reports(value):
    """Objects in it that begin as reports do."""
    if isinstance(value, dict):
        if 'program' in value and isinstance(value.get('command'), list):
            yield value
        for one in value.values():
            yield from reports(one)
    elif isinstance(value, list):
        for one in value:
            yield from reports(one)


def record_faults(record):
    """Of a whole record."""
    found = list(reports(record))
    said = faults(record) + [fault for report in found for fault in faults(report, 'report')]
    if record.get('date', '') >= FIRST_WHOLE:
        said += ['no commit'] if 'commit' not in record else []
        said += ['no report of the program in it, and no command'] if not found and 'command' not in record else []
    return said


class Records(ProgramTest):
    def test_every_record(self):
        paths = sorted(path for path in RESULTS.glob('*.json') if path.name != 'schema.json')
        self.assertGreater(len(paths), 50)
        for path in paths:
            with self.subTest(record=path.name):
                record = json.loads(path.read_text())
                self.assertEqual(record_faults(record), [])
                words = [word for report in reports(record) for word in report['command']]
                self.assertEqual([word for word in words if word.startswith('/')], [], 'paths of the machine that ran it')
                self.assertTrue(path.name.startswith(record['date'] + '-'), record['date'])

    def test_later_records_say_how_to_have_them_again(self):
        old = {'what': 'a run', 'date': '2026-11-25', 'machine': 'one'}
        self.assertEqual(record_faults(old), [])
        later = {**old, 'date': '2026-12-01'}
        self.assertEqual(record_faults(later), ['no commit', 'no report of the program in it, and no command'])
        self.assertEqual(record_faults({**later, 'commit': '0123456789ab', 'command': ['tools/soak_server.py']}), [])

    def report_of(self, *arguments):
        result = run(*arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    def test_what_the_program_writes(self):
        record = self.folder / 'record.json'
        steps = run('bench', 'model', '--synthetic', 'small', '--contexts', '20', '--batches', '2', '--decode', '1', '--repeats', '1',
                    '--step-tokens', '32', '--record', str(record))
        self.assertEqual(steps.returncode, 0, steps.stderr)
        ops = ('ops', '--only', 'flash gate bf16', '--tokens', '1', '--seconds', '0.01')
        layer = ('layer', '--shape', 'small', '--kind', 'swa', '--tokens', '2', '--seconds', '0.01')
        model = ('model', '--contexts', '8', '--decode', '1', '--repeats', '1')
        serve = ('serve', '--model', str(MODEL), '--requests', '2', '--prompt-tokens', '8', '--output-tokens', '2', '--concurrency', '1', '--quiet')
        for report, words in ((json.loads(record.read_text()), ['bench', 'model']),
                              *((self.report_of('bench', *flags, '--json'), ['bench', flags[0]]) for flags in (ops, layer, model, serve)),
                              (self.report_of('verify', '--quick', '--op', 'rms_norm', '--json'), ['verify'])):
            with self.subTest(verb=words):
                self.assertEqual(faults(report, 'report'), [])
                self.assertEqual(report['what'], ' '.join(['tessera', *words]))
                self.assertEqual(report['command'][:len(words) + 1], ['tessera', *words])
                self.assertNotIn('driver', report)
                self.assertEqual(record_faults(report), [])

    def test_the_schema_refuses(self):
        whole = {'what': 'tessera bench ops', 'commit': '0123456789ab', 'program': '0' * 32 + '|glibc 2.36', 'command': ['tessera', 'bench'],
                 'date': '2026-11-26', 'versions': {'tessera': '1', 'compiler': '12'}, 'cpu': 'a', 'cores': 2,
                 'rows': [{'median_us': 1.5, 'seconds': [1.5e-6]}]}
        self.assertEqual(faults(whole, 'report'), [])
        self.assertEqual(faults(whole), [])
        for field in whole:
            self.assertTrue(faults({key: value for key, value in whole.items() if key != field}, 'report'), field)
        for field, bad in (('commit', 'abc'), ('program', 'tessera'), ('command', 'tessera bench'), ('date', '26 November'), ('rows', []),
                           ('rows', [{'seconds': []}]), ('rows', [{'median_us': 0}])):
            self.assertTrue(faults({**whole, field: bad}, 'report'), (field, bad))
        self.assertTrue(faults({'what': 'a run', 'date': '2026-11-26'}), 'a record of no machine')


if __name__ == '__main__':
    unittest.main(argv=['records_test'])
