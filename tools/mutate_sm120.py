#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants one fault at a time in the kernels of backend sm120 and says which test of tests/backends/sm120_test.cc notices.

    tools/mutate_sm120.py BUILD [NUMBER...]

BUILD is a folder of the preset asan in which test_backends is built. Sources stay as they are: a mutated copy is compiled
in a temporary folder and linked before the libraries. Prints a table in Markdown; exits 1 where one is not caught.
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUMS, INPUTS, UNITS = 'sm120/scaled_sums.cuh', 'sm120/scaled_inputs.cuh', 'sm120/scaled_units.h'
LINEAR, MOE, EXPERTS, MODEL = 'sm120/linear.cu', 'sm120/moe.cu', 'cuda_common/scaled_experts.cuh', 'cuda_common/ptx/emulated/block_scaled_sums.h'
RELEASE = '''        if (has_tokens) add_unit(s_.stages[at_.stage], totals);
        __syncwarp();
        if (lane_ == 0) s_.free[at_.stage].arrive();
'''
# What, file, text, its replacement (every occurrence).
MUTATIONS = [
    ('scales of A from the other step\'s lanes', SUMS, 'mma_nvfp4<kStep % 2, kStep>', 'mma_nvfp4<1 - kStep % 2, kStep>'),
    ('scales of B from the next lane', SUMS, 'mma_nvfp4<kStep % 2, kStep>', 'mma_nvfp4<kStep % 2, (kStep + 1) % 4>'),
    ('words of B swapped', SUMS, 'kStep % 2 == 0 ? inputs.x : inputs.z', 'kStep % 2 == 0 ? inputs.y : inputs.w'),
    ('few: weights of a wrong step', SUMS, 'add_step<2>(weights.codes[2]', 'add_step<2>(weights.codes[3]'),
    ('wide: weights of a wrong pair of steps', SUMS, '+ 2 * kPair * kWarp', '+ kPair * kWarp'),
    ('scales of the first pair for both', SUMS, '[pair * kWarp + lane]', '[lane]'),
    ('nibbles swapped', INPUTS, 'static_cast<uint32_t>(bytes[i])', 'static_cast<uint32_t>(bytes[i] >> 4 | (bytes[i] & 15) << 4)'),
    ('layout: scales of rows g and g + 8 swapped', UNITS, 'step % 2 * 2 + row / 8', 'step % 2 * 2 + 1 - row / 8'),
    ('layout: registers a1 and a2 swapped', UNITS, '(row / 8 + 2 * half) * 4', '(2 * (row / 8) + half) * 4'),
    ('layout: inputs of two steps interleaved', UNITS, 'step % 2 * 8 + half * 4', 'half * 8 + step % 2 * 4'),
    ('inputs: one block past the width', INPUTS, 'column < width', 'column <= width'),
    ('inputs: NaN scales behind the width', INPUTS, 'uint8_t scale = 0;', 'uint8_t scale = 0x7F;'),
    ('inputs: rows that only fill a unit not zeroed', INPUTS, 'row >= num_units * InputUnit::kRows', 'row >= work.count'),
    ('few: one token too many', SUMS, 'row < map.rows() && token < work.count', 'row < map.rows() && token <= work.count'),
    ('few: one row too many', SUMS, 'row < map.rows() && token < work.count', 'row <= map.rows() && token < work.count'),
    ('few: one unit too many is loaded', SUMS, 'if (unit >= num_units) return;', 'if (unit > num_units) return;'),
    ('few: parts added in descending order', SUMS, 's_parts[part][m][at]', 's_parts[num_parts - 1 - part][m][at]'),
    ('few: parts read before they are there', SUMS, '    __syncthreads();\n    const int num_parts', '    const int num_parts'),
    ('few: parts overwritten while they are read', SUMS, '    __syncthreads();\n  }\n#pragma unroll', '  }\n#pragma unroll'),
    ('few: does not wait for the kernel before', SUMS, '  cuda_common::wait_for_previous();\n  const int thread', '  const int thread'),
    ('wide: one tile of rows too many is copied', SUMS, 'row < map.rows()) {', 'row <= map.rows()) {'),
    ('wide: stages read before they are full', SUMS, 's_.full[at_.stage].wait(at_.parity);', ''),
    ('wide: stages filled before they are free', SUMS, 's.free[at.stage].wait(at.parity ^ 1);', ''),
    ('wide: parity of the producer\'s wait', SUMS, 'wait(at.parity ^ 1)', 'wait(at.parity)'),
    ('wide: stages released before they are read', SUMS, RELEASE,
     ''.join(RELEASE.splitlines(True)[2:] + RELEASE.splitlines(True)[:1])),
    ('wide: released by lane 0 when it alone is done', SUMS, RELEASE,
     RELEASE.replace('        __syncwarp();\n', '')),
    ('wide: bytes of one lane announced', SUMS, 'arrive_and_expect(all_bytes)', 'arrive_and_expect(bytes)'),
    ('wide: one chain through all units', SUMS, 'multiply<0>(stage, input_scales, sums);', 'multiply<0>(stage, input_scales, totals);'),
    ('wide: one token too many', SUMS, 'row >= map.rows() || token >= work.count', 'row >= map.rows() || token > work.count'),
    ('wide: tokens of a quarter forgotten', SUMS, '* InputUnit::kRows < work.count;', '* InputUnit::kRows + 1 < work.count;'),
    ('linear: g left out', LINEAR, '*factor(work, token) * tensor_scale', 'tensor_scale'),
    ('linear: second group has the first one\'s weights', LINEAR, 'work.group * out + row, 0, in', 'row, 0, in'),
    ('experts: up has gate\'s tensor scale', EXPERTS, 'factors[j] * work.tensor_scales[1]', 'factors[j] * work.tensor_scales[0]'),
    ('experts: up is gate', MOE, 'matrix == 0 ? work.data[0] : work.data[1]', 'matrix == 0 ? work.data[0] : work.data[0]'),
    ('experts: routing weight of a position', MOE, 'job.routing[job.slot_of(work, token)]', 'job.routing[work.first + token]'),
    ('experts: g of h always measured', EXPERTS, 'limit > 0 ?', 'limit > 1000 ?'),
    ('model: 34 bits', MODEL, 'kFraction = 35', 'kFraction = 34'),
    ('model: cut toward minus infinity', MODEL, 'return value < 0 ? -(-value >> places) : value >> places;', 'return value >> places;'),
]
DEPENDENTS = {SUMS: [LINEAR], INPUTS: [LINEAR], LINEAR: [LINEAR], MOE: [MOE], EXPERTS: [MOE],
              UNITS: [LINEAR, MOE, 'sm120/scaled_units.cu', 'test'], MODEL: [LINEAR, MOE, 'test']}
TEST = 'tests/backends/sm120_test.cc'
TIMED_OUT = 124  # as an exit code


def run(command, folder, seconds=600):
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)
        return done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        return TIMED_OUT, f'no end within {seconds} s'


def compile_mutant(commands, overlay, source, target):
    entry = commands[str(source)]
    # Undefined behaviour is looked for by the tests themselves, and takes half of the compiler's time.
    words = [w.replace('address,undefined', 'address') for w in entry['command'].split() if 'ccache' not in w]
    mine = overlay / source.relative_to(ROOT / 'src') if source.is_relative_to(ROOT / 'src') else source
    words = [str(mine) if w == str(source) and mine.exists() else w for w in words]
    words[words.index('-o') + 1] = str(target)
    words[1:1] = [f'-I{overlay}']
    code, text = run(words, entry['directory'])
    if code != 0:
        sys.exit(f'{source}: does not compile\n{text[-3000:]}')


def verdict(code, text):
    if code == 0:
        return 'survived'
    if code == TIMED_OUT:  # a machine that was too busy, or a kernel that waits for ever: nobody has said which
        return 'inconclusive: ' + text
    faults = re.findall(r'AddressSanitizer: \S+|runtime error: .*', text)
    tests = sorted(set(re.findall(r'^\[  FAILED  \] (\w+\.\w+)', text, re.M)))
    return 'caught: ' + (', '.join(tests) or (faults[0][:80] if faults else f'exit {code}, {text.strip()[-100:]}'))


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    wanted = [int(n) for n in sys.argv[2:]] or range(1, len(MUTATIONS) + 1)
    commands = {e['file']: e for e in json.loads((build / 'compile_commands.json').read_text())}
    ninja = run(['ninja', '-t', 'commands', 'tests/backends/test_backends'], build)[1].splitlines()
    link = ninja[-1].split('&&')[1].split()  # of ": && link && what follows"
    test = ROOT / TEST
    are_all_caught = True
    for number in wanted:
        what, name, old, new = MUTATIONS[number - 1]
        path = ROOT / 'src/backends' / name
        text = path.read_text()
        if old not in text:
            sys.exit(f'{number}: {name} has no "{old}"')
        with tempfile.TemporaryDirectory() as folder:
            overlay = pathlib.Path(folder)
            copy = overlay / 'backends' / name
            copy.parent.mkdir(parents=True)
            copy.write_text(text.replace(old, new))
            objects = []
            words = list(link)
            for n, dependent in enumerate(DEPENDENTS[name]):
                source = test if dependent == 'test' else ROOT / 'src/backends' / dependent
                target = overlay / f'{n}.o'
                compile_mutant(commands, overlay, source, target)
                objects.append(str(target))
                if dependent == 'test':
                    words = [w for w in words if not w.endswith('sm120_test.cc.o')]
            at = words.index('-o')
            program = overlay / 'mutant'
            words[at + 1] = str(program)
            words[1:1] = objects  # first, so that the linker keeps what the changed text makes of inline functions
            code, output = run(words, build)
            if code != 0:
                sys.exit(f'{number}: does not link\n{output[-3000:]}')
            code, output = run([str(program), '--gtest_filter=BlockScaled*:LaneTest*', '--gtest_brief=1'], build, 120)
        said = verdict(code, output)
        are_all_caught = are_all_caught and said.startswith('caught')
        print(f'| {number} | {what} | {said} |', flush=True)
    sys.exit(not are_all_caught)


if __name__ == '__main__':
    main()
