#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds our tokenizer against Hugging Face's `tokenizers` package on random and adversarial strings.

    tools/compare_tokenizer.py TOKENIZE_STRINGS TOKENIZER_JSON [--count 100000] [--seed N] [--texts DIR [--megabytes 100]]

With --texts on files of UTF-8 below a folder instead, whole, so many megabytes of them in a random order.

Needs the PyPI package `tokenizers` (tools/requirements-test.txt). Exits 1 at the first differences.
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys

from tokenizers import Tokenizer

SPACES = [' ', '\t', '\n', '\r', '\r\n', '\u00a0', '\u180e', '\u2003', '\u2028', '\u3000', '\x0b', '\x1c', '\x85', '\u200b']
WORDS = ['the', 'Hello', "don't", 'naïve', 'x86_64', '_under', '~/.bashrc', '1234567890', '3.14', '...', '!!!', 'ＡＢ', '中文',
         'こんにちは', '한국어', 'العربية', 'हिन्दी', 'ไทย', 'e\u0301', '\u0301', '🙂', '👩\u200d👩\u200d👧', '½', 'Ⅷ', '٣٤', '€5', '+=', '`code`']
MARKERS = ['<', '>', '|', '｜', '▁', '<think>', '</think>', '<｜User｜>', '<｜Assistant｜>', '<｜User', 'User｜>', '｜DSML｜',
           '<｜begin▁of▁sentence｜>', '<｜end▁of▁sentence｜>', '<｜begin▁of', '<<think>>', '</｜DSML｜invoke>']


def scalar(rng):
    while True:
        kind = rng.random()
        c = (rng.randrange(0x80) if kind < 0.3 else rng.randrange(0x800) if kind < 0.5 else rng.randrange(0x10000)
             if kind < 0.8 else rng.randrange(0x110000))
        if not 0xD800 <= c <= 0xDFFF:
            return chr(c)


def one(rng):
    kind = rng.random()
    if kind < 0.35:
        return ''.join(scalar(rng) for _ in range(rng.randrange(40)))
    parts = []
    for _ in range(rng.randrange(1, 14)):
        pick = rng.random()
        if pick < 0.35:
            parts.append(rng.choice(WORDS))
        elif pick < 0.6:
            parts.append(rng.choice(SPACES) * rng.randrange(1, 5))
        elif pick < 0.7:
            parts.append(rng.choice(MARKERS))
        elif pick < 0.85:
            parts.append(''.join(rng.choice('abcXYZ 019.,-_\n') for _ in range(rng.randrange(1, 12))))
        else:
            parts.append(scalar(rng) * rng.randrange(1, 9))
    return ''.join(parts)


def strings(count, seed):
    rng = random.Random(seed)
    out = ['', ' ', '\n', 'a' * 5000, ' ' * 3000 + 'x', '\n' * 999, '0' * 1000, '中' * 700]
    # Every scalar value once, alone between letters: classes and splits of all of Unicode.
    every = [chr(c) for c in range(1, 0x110000) if not 0xD800 <= c <= 0xDFFF]
    out += [' '.join(every[i:i + 256]) + ' a' + 'b'.join(every[i:i + 256]) for i in range(0, len(every), 256)]
    while len(out) < count:
        out.append(one(rng))
    return out


def texts_of(folder, megabytes, seed):
    """Files of text; those above a megabyte are data."""
    paths = sorted(path for path in pathlib.Path(folder).rglob('*') if path.is_file() and not path.is_symlink() and 0 < path.stat().st_size < 1e6)
    random.Random(seed).shuffle(paths)
    out, size = [], 0
    for path in paths:
        if size >= megabytes * 1e6:
            break
        try:
            data = path.read_bytes()
            text = data.decode()
        except (OSError, UnicodeDecodeError):
            continue
        if '\0' not in text:
            out.append(text)
            size += len(data)
    print(f'{len(out)} files, {size / 1e6:.1f} MB')
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('program')
    parser.add_argument('tokenizer')
    parser.add_argument('--count', type=int, default=100_000)
    parser.add_argument('--seed', type=int, default=random.randrange(2 ** 32))
    parser.add_argument('--texts', help='a folder')
    parser.add_argument('--megabytes', type=float, default=100)
    args = parser.parse_args()
    texts = texts_of(args.texts, args.megabytes, args.seed) if args.texts else strings(args.count, args.seed)
    theirs = Tokenizer.from_file(args.tokenizer)
    lines = '\n'.join(json.dumps(text) for text in texts) + '\n'
    ours = subprocess.run([args.program, args.tokenizer], input=lines, capture_output=True, text=True, check=True).stdout
    expected = [encoding.ids for encoding in theirs.encode_batch(texts, add_special_tokens=False)]
    found = [[int(word) for word in line.split()] for line in ours.split('\n')[:-1]]
    if len(found) != len(texts):
        sys.exit(f'{len(found)} results for {len(texts)} strings')
    different = [i for i in range(len(texts)) if found[i] != expected[i]]
    for i in different[:10]:
        print(f'{texts[i][:200]!r}\n  ours   {found[i][:40]}\n  theirs {expected[i][:40]}')
    print(f'{len(texts)} strings, {sum(map(len, expected))} tokens, seed {args.seed}: {len(different)} differences')
    sys.exit(1 if different else 0)


if __name__ == '__main__':
    main()
