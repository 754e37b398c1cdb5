#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds answers that grammars of JSON Schemas allow against the `jsonschema` package.

    tools/compare_schemas.py DRAW_ANSWERS TOKENIZER_JSON [--count 2000] [--seed N] [--calls | --patterns]

Random schemas, many of which combine keywords that few people would, go through what requests' schemas go through. Each is
refused with a reason, or answers are drawn at random from its grammar, and each has to be JSON that fits the schema.
Schemas in the form that pydantic, zod and agents write must not be refused. With --calls the schemas are of a strict tool's
parameters, objects at the top, and the answers a call's arguments. With --patterns regular expressions instead, of whole
answers, which Python's re module checks.

Needs the PyPI package `jsonschema` (tools/requirements-test.txt). Exits 1 where an answer does not fit.
"""
import argparse
import collections
import json
import random
import re
import subprocess
import sys

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

NAMES = ['a', 'b', 'name', 'format', 'pattern', 'x-1', 'ä']
TYPES = ['null', 'boolean', 'object', 'array', 'string', 'integer', 'number']
PATTERNS = ['^[a-z]{1,4}$', '[0-9]+', '^x', '(yes|no)', '^\\d{2}-\\w$', 'a|b', '^\\d{1,2}(\\.\\d{1,2})?$', '^(a,*|b){2,}$', '"\\\\?']
FORMATS = ['date', 'uuid', 'ipv4', 'int32', 'email', 'time']
# Such numbers reach clients as strings (docs/server-api.md).
BEYOND_DOUBLE = re.compile(r'[0-9][eE]\+?[0-9]{3}')
# What people's tools write.
COMMON = [
    {'type': 'object', 'properties': {'n': {'type': 'integer', 'title': 'N'}}, 'required': ['n'], 'title': 'Model'},
    {'type': 'object', 'properties': {'n': {'anyOf': [{'type': 'integer'}, {'type': 'null'}], 'default': None}}},
    {'$defs': {'Color': {'enum': ['red', 'blue'], 'title': 'Color', 'type': 'string'}}, 'type': 'object',
     'properties': {'c': {'$ref': '#/$defs/Color'}, 'd': {'$ref': '#/$defs/Color', 'default': 'red'}}, 'required': ['c']},
    {'type': 'object', 'properties': {'k': {'const': 'cat', 'type': 'string'}}, 'required': ['k'], 'additionalProperties': False},
    {'type': 'object', 'properties': {'t': {'type': 'array', 'prefixItems': [{'type': 'integer'}, {'type': 'string'}],
                                            'minItems': 2, 'maxItems': 2}}, 'required': ['t']},
    {'type': 'object', 'additionalProperties': {'type': 'integer'}},
    {'type': 'object', 'propertyNames': {'type': 'string'}, 'additionalProperties': {'type': 'number'}},
    {'type': 'string', 'format': 'uuid', 'pattern': '^([0-9a-f]{8}-[0-9a-f]{4})$'},
    {'type': 'object', 'properties': {'p': {'oneOf': [
        {'type': 'object', 'properties': {'kind': {'const': 'a'}}, 'required': ['kind']},
        {'type': 'object', 'properties': {'kind': {'const': 'b'}, 'n': {'type': 'number'}}, 'required': ['kind', 'n']}],
        'discriminator': {'propertyName': 'kind'}}}, 'required': ['p']},
    {'type': ['string', 'null']},
    {'type': 'object', 'properties': {'x': {'type': 'number', 'minimum': 0, 'maximum': 1}}, 'required': ['x'],
     '$schema': 'http://json-schema.org/draft-07/schema#'},
    {'type': 'object', 'properties': {'x': {'allOf': [{'$ref': '#/definitions/y'}], 'title': 'X'}},
     'definitions': {'y': {'type': 'boolean'}}, 'required': ['x']},
    {'type': 'object', 'properties': {'children': {'type': 'array', 'items': {'$ref': '#'}, 'maxItems': 1}},
     'additionalProperties': False},
]


class Patterns:
    """Of what Python and ECMAScript read alike, and little that is refused."""
    LITERALS = list('abcxyzABC019 _-,:;!@#%&~`\'"<>=/') + ['ä', '中', '🙂']
    ESCAPES = [r'\d', r'\w', r'\s', r'\D', r'\W', r'\S', r'\.', r'\*', r'\(', r'\[', r'\]', r'\{', r'\|', r'\^', r'\$', r'\\',
               r'\-', r'\n', r'\t', r'\x41', r'\u0042', r'\/', r'\"']
    IN_CLASSES = [r'\d', r'\w', r'\s', r'\.', r'\]', r'\[', r'\\', r'\-', r'\n', r'\^', r'\x41', r'\u00e4']

    def __init__(self, rng):
        self.rng = rng

    def char_class(self):
        rng, items = self.rng, []
        for _ in range(rng.randrange(1, 4)):
            kind = rng.random()
            items.append(rng.choice('abcxyz019 _,') if kind < 0.4 else '-'.join(sorted(rng.sample('abcxyz', 2))) if kind < 0.7
                         else rng.choice(self.IN_CLASSES))
        return '[' + '^' * (rng.random() < 0.3) + ''.join(items) + '-' * (rng.random() < 0.15) + ']'

    def atom(self, depth):
        kind = self.rng.random()
        if kind < 0.35 or (kind >= 0.76 and depth > 2):
            return re.escape(self.rng.choice(self.LITERALS))
        if kind < 0.5:
            return self.rng.choice(self.ESCAPES)
        if kind < 0.7:
            return self.char_class()
        return '.' if kind < 0.76 else self.rng.choice(['(', '(?:']) + self.pattern(depth + 1) + ')'

    def sequence(self, depth):
        def times():
            return '' if self.rng.random() < 0.6 else self.rng.choice(
                ['*', '+', '?', '{2}', '{1,3}', '{0,2}', '{2,}', '{1}']) + '?' * (self.rng.random() < 0.15)
        return ''.join(self.atom(depth) + times() for _ in range(self.rng.randrange(1, 5)))

    def pattern(self, depth=0):
        return '|'.join(self.sequence(depth) for _ in range(self.rng.choice([1, 1, 1, 2, 3])))


class Schemas:
    def __init__(self, rng, is_call):
        self.rng, self.is_call = rng, is_call

    def value(self, depth=0):
        kind = self.rng.randrange(9 if depth < 2 else 7)
        if kind == 7:
            return [self.value(depth + 1) for _ in range(self.rng.randrange(3))]
        if kind == 8:
            return {self.rng.choice(NAMES): self.value(depth + 1) for _ in range(self.rng.randrange(3))}
        return self.rng.choice([None, True, False, 0, -7, 2.5, 1e3, 'a', 'xy', '', 'zä"\\', 12345678901234567890][kind:kind + 6])

    def number(self):
        return self.rng.choice([0, 1, -1, 3, 10, -25, 0.5, -1.25, 0.1234567, 1e-7, 99.99, 1000000, 2.0, -3.0, 1e15])

    def some(self, schema, chance, key, make):
        if self.rng.random() < chance:
            schema[key] = make()

    def of_type(self, schema, kind, depth, chance):
        rng = self.rng
        if kind == 'object':
            def names():
                return rng.sample(NAMES, rng.randrange(3)) if rng.random() < 0.3 else rng.sample(
                    list(schema.get('properties', {})), rng.randrange(len(schema.get('properties', {})) + 1))
            self.some(schema, 0.8, 'properties',
                      lambda: {n: self.schema(depth + 1) for n in rng.sample(NAMES, rng.randrange(4))})
            self.some(schema, 0.7, 'required', names)
            self.some(schema, chance, 'additionalProperties', lambda: self.schema(depth + 1))
            self.some(schema, chance / 2, 'unevaluatedProperties', lambda: self.schema(depth + 1))
            self.some(schema, chance / 2, 'patternProperties',
                      lambda: {p: self.schema(depth + 1) for p in rng.sample(PATTERNS, rng.randrange(1, 3))})
            self.some(schema, chance / 2, 'propertyNames', lambda: self.schema(depth + 1))
            self.some(schema, chance / 2, 'minProperties', lambda: rng.randrange(4))
            self.some(schema, chance / 2, 'maxProperties', lambda: rng.randrange(4))
        elif kind == 'array':
            self.some(schema, 0.7, 'items', lambda: self.schema(depth + 1))
            self.some(schema, chance, 'prefixItems', lambda: [self.schema(depth + 1) for _ in range(rng.randrange(3))])
            self.some(schema, chance / 2, 'unevaluatedItems', lambda: self.schema(depth + 1))
            self.some(schema, chance, 'minItems', lambda: rng.randrange(4))
            self.some(schema, chance, 'maxItems', lambda: rng.randrange(4))
            self.some(schema, chance / 4, 'uniqueItems', lambda: rng.random() < 0.5)
        elif kind == 'string':
            self.some(schema, chance, 'minLength', lambda: rng.randrange(5))
            self.some(schema, chance, 'maxLength', lambda: rng.randrange(9))
            self.some(schema, chance, 'pattern', lambda: rng.choice(PATTERNS))
            self.some(schema, chance, 'format', lambda: rng.choice(FORMATS))
        elif kind in ('integer', 'number'):
            for key in ('minimum', 'maximum', 'exclusiveMinimum', 'exclusiveMaximum'):
                self.some(schema, chance, key, self.number)
            self.some(schema, chance / 2, 'multipleOf', lambda: rng.choice([1, 2, 3, 7, 0.5]))

    def schema(self, depth=0):
        rng = self.rng
        if rng.random() < 0.08:
            return rng.random() < 0.8
        schema = {}
        chance = rng.choice([0, 0.15, 0.4])
        head = rng.random()
        if depth < 3 and head < 0.15:
            key = rng.choice(['anyOf', 'oneOf', 'allOf'])
            schema[key] = [self.schema(depth + 1) for _ in range(rng.randrange(4))]
        elif head < 0.22:
            schema['enum'] = [self.value() for _ in range(rng.randrange(4))]
        elif head < 0.28:
            schema['const'] = self.value()
        elif head < 0.34:
            schema['$ref'] = rng.choice(['#/$defs/one', '#/$defs/two', '#'])
        if rng.random() < (0.25 if schema else 0.93):
            kinds = rng.sample(TYPES, 2) if rng.random() < 0.15 else [rng.choice(TYPES if depth < 3 else TYPES[:2] + TYPES[4:])]
            schema['type'] = kinds if len(kinds) > 1 or rng.random() < 0.1 else kinds[0]
            for kind in kinds:
                self.of_type(schema, kind, depth, chance if len(schema) == 1 else chance / 3)
        elif rng.random() < 0.2:
            self.of_type(schema, rng.choice(TYPES), depth, chance)
        if depth == 0 and self.is_call:
            schema = {'type': 'object'}
            self.of_type(schema, 'object', 0, chance)
        if depth == 0:
            schema['$defs'] = {'one': self.schema(1), 'two': self.schema(1)}
        return schema


def reason(text):
    return re.sub(r'[0-9]+', 'N', text.split(': expected')[-1])[:60]


def fault_of_text(pattern, text):
    # Python's search can take exponentially long for longer ones.
    if len(text) > 40 or re.fullmatch(pattern, text, re.ASCII):
        return None
    return 'does not fit'


def validator_of(schema):
    """A function that says what is wrong with an answer, or nothing."""
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        return lambda text, fault=error.message: 'taken, but no schema: ' + fault
    validator = Draft202012Validator(schema)

    def fault_of(text):
        try:
            return next((e.message for e in validator.iter_errors(json.loads(text))), None)
        except json.JSONDecodeError as error:
            return str(error)
        except RecursionError:  # {"anyOf": [{"$ref": "#"}, ...]}
            return None
    return fault_of


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('draw_answers')
    parser.add_argument('tokenizer')
    parser.add_argument('--count', type=int, default=2000)
    parser.add_argument('--seed', type=int, default=random.randrange(1 << 32))
    parser.add_argument('--calls', action='store_true', help="schemas of a strict tool's parameters")
    parser.add_argument('--patterns', action='store_true', help='regular expressions')
    parser.add_argument('--reasons', action='store_true', help='say how often schemas were refused, and why')
    args = parser.parse_args()
    rng = random.Random(args.seed)
    make = Schemas(rng, args.calls)
    common = [] if args.patterns else [s for s in COMMON if not args.calls or s['type'] == 'object']
    one = Patterns(rng).pattern if args.patterns else make.schema
    schemas = common + [one() for _ in range(args.count)]
    mode = ['calls'] if args.calls else ['patterns'] if args.patterns else []
    run = subprocess.run([args.draw_answers, args.tokenizer, str(rng.randrange(1 << 60)), *mode], check=True, text=True,
                         stdout=subprocess.PIPE, input=''.join(json.dumps(s) + '\n' for s in schemas))
    num_answers, wrong, reasons = 0, [], collections.Counter()
    for i, (schema, line) in enumerate(zip(schemas, run.stdout.split('\n')[:-1], strict=True)):
        outcome = json.loads(line)
        if 'refused' in outcome:
            reasons[reason(outcome['refused'])] += 1
            if i < len(common):
                wrong.append((schema, 'refused: ' + outcome['refused']))
            continue
        fault_of = fault_of_text if args.patterns else validator_of(schema)
        for text in outcome['answers']:
            if args.calls and BEYOND_DOUBLE.search(text):
                continue
            num_answers += 1
            fault = fault_of(schema, text) if args.patterns else fault_of(text)
            if fault is not None:
                wrong.append((schema, f'{text}: {fault}'))
                break
    if args.reasons:
        for text, count in reasons.most_common():
            print(f'{count:6} {text}')
    print(f'seed {args.seed}: {len(schemas)} schemas, {sum(reasons.values())} refused, {num_answers} answers, {len(wrong)} wrong')
    for schema, why in sorted(wrong, key=lambda pair: len(json.dumps(pair[0])))[:10]:
        print(json.dumps(schema), '\n   ', why[:300])
    if num_answers < args.count:
        print(f'expected an answer a schema on average, found {num_answers}')
        return 1
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())
