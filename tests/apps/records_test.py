#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/results: every record, and what tessera bench would record, against the folder's schema."""
import json
import pathlib
import unittest

from program import ProgramTest, end_as_skipped, run

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


class Records(ProgramTest):
    def test_every_record(self):
        paths = sorted(path for path in RESULTS.glob('*.json') if path.name != 'schema.json')
        self.assertGreater(len(paths), 50)
        for path in paths:
            with self.subTest(record=path.name):
                record = json.loads(path.read_text())
                self.assertEqual(faults(record), [])
                self.assertTrue(path.name.startswith(record['date'] + '-'), record['date'])
                found = list(reports(record))
                for report in found:
                    self.assertEqual(faults(report, 'report'), [])
                if record['date'] >= FIRST_WHOLE:
                    self.assertIn('commit', record)
                    self.assertTrue(found or 'command' in record, 'no report of a program in it, and no command')

    def test_what_bench_writes(self):
        record = self.folder / 'record.json'
        steps = run('bench', 'model', '--synthetic', 'small', '--contexts', '20', '--batches', '2', '--decode', '1', '--repeats', '1',
                    '--step-tokens', '32', '--record', str(record))
        self.assertEqual(steps.returncode, 0, steps.stderr)
        made = {'model': json.loads(record.read_text())}
        for name, flags in (('ops', ('--only', 'flash gate bf16', '--tokens', '1', '--seconds', '0.01')),
                            ('layer', ('--shape', 'small', '--kind', 'swa', '--tokens', '2', '--seconds', '0.01'))):
            result = run('bench', name, *flags, '--json')
            self.assertEqual(result.returncode, 0, result.stderr)
            made[name] = json.loads(result.stdout)
        for name, report in made.items():
            with self.subTest(verb=name):
                self.assertEqual(faults(report, 'report'), [])
                self.assertEqual(report['what'], f'tessera bench {name}')
                self.assertEqual(report['command'][1:3], ['bench', name])
                self.assertNotIn('driver', report)

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
