#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`tessera bench ops` beside ggml's NVFP4 and MXFP4 on the same shapes, as JSON. Not part of the build.

    compare.py GGML [--tessera PROGRAM] [--threads N] [--tokens 1,4,512] [--model flash] [--only TEXT] [--seconds S]

GGML is your own built checkout of ggml or llama.cpp, or its build folder, with shared libraries:
    cmake -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON && cmake --build build
Needs a C++ compiler. Each side measures in its own process, one after the other; run it on a quiet machine.
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
LINEAR = re.compile(r'^linear \S+ (?P<what>.+) nvfp4 \[(?P<out>\d+), (?P<in>\d+)\]')
EXPERTS = re.compile(r'^moe_experts \S+ nvfp4 (?P<experts>\d+) experts of \[(?P<out>\d+), (?P<in>\d+)\] top (?P<chosen>\d+)')


def fail(message):
    sys.exit(f'compare.py: {message}')


def find_ggml(path):
    """Folders of ggml's headers and of its libraries."""
    root = pathlib.Path(path).resolve()
    if not root.is_dir():
        fail(f'{path}: no such folder')
    roots = [root]
    cache = root / 'CMakeCache.txt'
    if cache.is_file():
        home = re.search(r'^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$', cache.read_text(), re.M)
        roots += [pathlib.Path(home[1])] if home else []
    headers = [r / sub for r in roots for sub in ('include', 'ggml/include') if (r / sub / 'ggml-cpu.h').is_file()]
    if not headers:
        fail(f'{path}: not ggml: expected include/ggml-cpu.h or ggml/include/ggml-cpu.h')
    if 'GGML_TYPE_NVFP4' not in (headers[0] / 'ggml.h').read_text():
        fail(f'{path}: this ggml has no NVFP4: expected GGML_TYPE_NVFP4 in {headers[0] / "ggml.h"}')
    folders = {}
    for name in ('ggml', 'ggml-base', 'ggml-cpu'):
        found = sorted(where for where, _, files in os.walk(root) if f'lib{name}.so' in files)
        if not found:
            fail(f'{path}: no lib{name}.so below: build it first, with -DBUILD_SHARED_LIBS=ON')
        folders[name] = pathlib.Path(found[0])
    return headers[0], folders


def rivals(headers, folders, shapes, options):
    with tempfile.TemporaryDirectory(prefix='tessera-ggml-') as folder:
        program = pathlib.Path(folder) / 'time_ggml'
        libraries = [flag for name, where in folders.items() for flag in (f'-L{where}', f'-l{name}')]
        build = subprocess.run([os.environ.get('CXX', 'c++'), '-std=c++20', '-O2', f'-I{headers}', HERE / 'time_ggml.cc',
                                '-o', program, *libraries], capture_output=True, text=True)
        if build.returncode != 0:
            error = next((line for line in build.stderr.splitlines() if 'error' in line), build.stderr[-200:])
            fail(f'time_ggml.cc does not compile against {headers}: {error.strip()}')
        paths = ':'.join(str(where) for where in folders.values())
        run = subprocess.run([program, str(options.threads), str(options.seconds), options.tokens, *shapes],
                             capture_output=True, text=True, env={**os.environ, 'LD_LIBRARY_PATH': paths})
        if run.returncode != 0:
            fail(f'time_ggml ended with {run.returncode}: {run.stderr.strip()[-300:]}')
        return [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"name"')]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('ggml')
    parser.add_argument('--tessera', default='tessera')
    parser.add_argument('--threads', type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument('--tokens', default='1,4,512')
    parser.add_argument('--model', default='flash', choices=['flash', 'pro'])
    parser.add_argument('--only', default='', help='rows of tessera bench ops whose name contains this')
    parser.add_argument('--seconds', type=float, default=0.5)
    options = parser.parse_args()
    if not re.fullmatch(r'[1-9]\d*(,[1-9]\d*)*', options.tokens):
        fail(f'--tokens: expected numbers with commas between them, found "{options.tokens}"')
    headers, folders = find_ggml(options.ggml)
    rows = []
    for op in ('linear', 'moe_experts'):
        try:
            ours = subprocess.run([options.tessera, 'bench', 'ops', '--json', '--only', f'{op} {options.model}', '--tokens',
                                   options.tokens, '--threads', str(options.threads), '--seconds', str(options.seconds)],
                                  capture_output=True, text=True)
        except OSError as error:
            fail(f'{options.tessera}: {error.strerror}')
        if ours.returncode != 0:
            fail(f'{options.tessera} bench ops: {ours.stderr.strip()}')
        report = json.loads(ours.stdout)
        rows += report['rows']
    shapes, matched = {}, []
    for row in rows:
        found = LINEAR.match(row['name']) or EXPERTS.match(row['name'])
        if not found or options.only not in row['name']:
            continue
        part = found.groupdict()
        shape = ':'.join([f'{len(shapes)}', part['out'], part['in'], *([part['experts'], part['chosen']] if 'experts' in part else [])])
        shape = shapes.setdefault(row['name'], shape)
        matched.append((row, shape.split(':')[0]))
    if not matched:
        fail(f'--only: no NVFP4 map or experts whose name contains "{options.only}"')
    theirs = {(r['name'], r['tokens'], r['type']): r for r in rivals(headers, folders, list(shapes.values()), options)}
    out = []
    for row, key in matched:
        line = {'name': row['name'], 'tokens': row['tokens'], 'tessera': {k: row[k] for k in
                ('variant', 'median_us', 'p10_us', 'share_of_read', 'share_of_products')}}
        for kind in ('nvfp4', 'mxfp4'):
            other = theirs[(key, row['tokens'], kind)]
            line[f'ggml_{kind}'] = {k: other[k] for k in ('buffer', 'median_us', 'p10_us')}
            line[f'times_ggml_{kind}'] = round(other['median_us'] / row['median_us'], 3)
        out.append(line)
    print(json.dumps({'cpu': report['cpu'], 'threads': report['threads'], 'read_gbs': report['read_gbs'],
                      'unstable': report['unstable'], 'ggml': str(options.ggml), 'rows': out}, indent=1))


if __name__ == '__main__':
    main()
