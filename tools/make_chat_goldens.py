#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes chat conversations, completions and JSON texts of our own with what DeepSeek's encoder makes of them.

    tools/make_chat_goldens.py ENCODER COUNT SEED > tests/goldens/chat-reference.jsonl

ENCODER is encoding/encoding_dsv4.py of deepseek-ai/DeepSeek-V4-Flash. One JSON object a line; `kind` is
  render  messages, thinking, drop_thinking, effort -> prompt
  parse   text, thinking -> answer: reasoning, content, tool_calls; null where the encoder refuses the text
  json    text -> dumped: json.dumps(json.loads(text), ensure_ascii=False); null where it isn't JSON
"""
import importlib.util
import json
import random
import sys

DSML = '\uff5cDSML\uff5c'
EOS = '<\uff5cend\u2581of\u2581sentence\uff5c>'
WORDS = ['a', 'Hello', ' world', '\n', '\n\n', '"', '\\', '<', '&', '\u00e9', '\u4e2d\u6587', '\U0001f642', '{x}', '%s',
         '\t', '\x01', '\x7f', '/', '<think>', '</think>', ' ', '`', "'", '>', '</', '\u2028']
NUMBERS = ['0', '-0', '7', '-12', '9223372036854775807', '-9223372036854775809', '123456789012345678901234567890', '1.0',
           '-0.0', '0.1', '1e5', '1E+2', '1e16', '1e15', '123456789012345680.0', '1e-4', '1e-5', '0.00012', '2.5e-7', '1e400',
           '-1e400', '1e-400', '5e-324', '1.7976931348623157e308', '3.141592653589793', '100', '1e22', '12345678.9', '0.3e1']


def words(rng, most=4):
    return ''.join(rng.choice(WORDS) for _ in range(rng.randint(0, most)))


def plain(rng, most=4):
    """Words without special tokens."""
    return words(rng, most).replace('<think>', '').replace('</think>', '')


def json_text(rng, depth=0):
    """The text of a JSON value, with spellings that json.dumps would not choose."""
    space = lambda: rng.choice(['', '', '', ' ', '\n', '\t '])
    pick = rng.random()
    if depth > 2 or pick < 0.35:
        return rng.choice(NUMBERS)
    if pick < 0.6:
        return json.dumps(words(rng), ensure_ascii=rng.random() < 0.5)
    if pick < 0.7:
        return rng.choice(['true', 'false', 'null', 'NaN', 'Infinity', '-Infinity'])
    count = rng.randint(0, 3)
    if pick < 0.85:
        return '[' + ','.join(space() + json_text(rng, depth + 1) + space() for _ in range(count)) + space() + ']'
    return json_object(rng, count, depth)


def json_object(rng, count, depth=0):
    keys = [rng.choice(['a', 'b', '\u00e9', 'k"', 'x y', '']) for _ in range(count)]
    return '{ ' + ', '.join(f'{json.dumps(k)}:{json_text(rng, depth + 1)}' for k in keys) + '}'


def function(rng):
    out = {'name': rng.choice(['add', 'note', 'se\u00e4rch'])}
    if rng.random() < 0.5:
        out['description'] = words(rng)
    if rng.random() < 0.8:
        names = rng.sample(['a', 'b', 'zz', 'c'], rng.randint(0, 3))
        out['parameters'] = {
            'type': 'object',
            'properties': {n: {'type': 'number', 'maximum': json.loads(rng.choice(NUMBERS))} for n in names},
            'required': names,
        }
    return out


def tools(rng):
    return [{'type': 'function', 'function': function(rng)} for _ in range(rng.randint(1, 2))]


def message(rng):
    role = rng.choice(['system', 'user', 'user', 'assistant', 'assistant', 'tool', 'tool', 'developer', 'latest_reminder'])
    out = {'role': role, 'content': words(rng)}
    if role == 'developer':
        out['content'] += 'D'
    if role in ('system', 'developer'):
        if rng.random() < 0.1:
            out['tools'] = tools(rng)
        if rng.random() < 0.1:
            out['response_format'] = {'type': 'json_object', words(rng): 1.0}
    if role == 'tool':
        out['tool_call_id'] = rng.choice(['c0', 'c1', 'c2', 'zz', ''])
        if rng.random() < 0.2:
            out['content'] = [rng.choice([{'type': 'text', 'text': words(rng)}, {'type': 'image_url'}])
                              for _ in range(rng.randint(0, 3))]
    if role == 'assistant':
        if rng.random() < 0.3:
            out['content'] = None
        if rng.random() < 0.6:
            out['reasoning_content'] = words(rng)
        if rng.random() < 0.5:
            ids = rng.sample(['c0', 'c1', 'c2', ''], rng.randint(0, 3))
            out['tool_calls'] = [{'id': i, 'type': 'function', 'function': {
                'name': rng.choice(['add', 'note']), 'arguments': arguments(rng)}} for i in ids]
        if rng.random() < 0.1:
            out['wo_eos'] = True
    if role != 'tool' and rng.random() < 0.06:
        out['task'] = rng.choice(['action', 'query', 'authority', 'domain', 'title', 'read_url'])
    return out


def arguments(rng):
    if rng.random() < 0.15:
        return rng.choice(['', '{', '{"a": 01}', "{'a': 1}", '{"a":1,}', 'text', '{"a":"\n"}'])
    return json_object(rng, rng.randint(0, 3))


def render(rng, encoder):
    messages = [message(rng) for _ in range(rng.randint(1, 8))]
    case = {'kind': 'render', 'messages': messages, 'thinking': rng.random() < 0.7, 'drop_thinking': rng.random() < 0.8,
            'effort': rng.choice([None, None, 'high', 'max'])}
    case['prompt'] = encoder.encode_messages(messages, 'thinking' if case['thinking'] else 'chat',
                                             drop_thinking=case['drop_thinking'], reasoning_effort=case['effort'])
    return case


def completion(rng, thinking):
    parts = []
    if thinking:
        parts += [plain(rng), '</think>']
    parts.append(plain(rng))
    if rng.random() < 0.8:
        parts += ['\n\n', f'<{DSML}tool_calls>', '\n']
        for _ in range(rng.randint(0, 3) or 1):
            parts += [f'<{DSML}invoke', ' name="', rng.choice(['add', 'n"o']), '">', '\n']
            names = rng.sample(['a', 'b', 'k"', '\u00e9', ''], rng.randint(0, 3))
            if not names and rng.random() < 0.5:
                parts.append('\n')
            for name in names:
                is_string = rng.random() < 0.5
                value = words(rng) if is_string else json.dumps(json.loads(rng.choice(['1', '[1, "x"]', '{"a": null}'])))
                parts += [f'<{DSML}parameter', ' name="', name, '" string="', 'true' if is_string else 'false', '">', value,
                          f'</{DSML}parameter', '>', '\n']
            parts += [f'</{DSML}invoke', '>', '\n']
        parts.append(f'</{DSML}tool_calls>')
    parts.append(EOS)
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        at = rng.randrange(len(parts))
        edit = rng.random()
        if edit < 0.4:
            del parts[at]
        elif edit < 0.7:
            parts.insert(at, rng.choice(parts))
        else:
            parts.insert(at, rng.choice(WORDS + [DSML, EOS, f'<{DSML}', f'</{DSML}']))
    return ''.join(parts)


def parse(rng, encoder):
    thinking = rng.random() < 0.5
    text = completion(rng, thinking)
    case = {'kind': 'parse', 'text': text, 'thinking': thinking, 'answer': None}
    try:
        answer = encoder.parse_message_from_completion_text(text, 'thinking' if thinking else 'chat')
    except (AssertionError, ValueError):
        return case
    calls = [call['function'] for call in answer['tool_calls']]
    # The encoder takes tags and end tokens inside names and values, a cut-off text, a line end inside a closing tag, and
    # values that are not JSON. Tessera calls these faults (docs/formats/chat.md).
    odd = EOS not in text or f'<\n/{DSML}parameter' in text
    for call in calls:
        odd = odd or DSML in call['name'] + call['arguments'] or EOS in call['name'] + call['arguments']
        try:
            json.loads(call['arguments'])
        except ValueError:
            odd = True
    if odd:
        return parse(rng, encoder)
    case['answer'] = {'reasoning': answer['reasoning_content'], 'content': answer['content'], 'tool_calls': calls}
    return case


def number(rng, encoder):
    text = json_text(rng)
    if rng.random() < 0.3:
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(['"', '\\', ',', ':', ' ', '0', '.', 'e', '-', '\x00', '\ufeff']) + text[at + rng.randint(0, 1):]
    try:
        dumped = json.dumps(json.loads(text), ensure_ascii=False)
        dumped.encode()  # a lone surrogate cannot be text for a model
    except ValueError:
        dumped = None
    return {'kind': 'json', 'text': text, 'dumped': dumped}


def main():
    spec = importlib.util.spec_from_file_location('encoder', sys.argv[1])
    encoder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(encoder)
    rng = random.Random(int(sys.argv[3]))
    for make in (render, parse, number):
        for _ in range(int(sys.argv[2])):
            print(json.dumps(make(rng, encoder), ensure_ascii=False))


if __name__ == '__main__':
    main()
