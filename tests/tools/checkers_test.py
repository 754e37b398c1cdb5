#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The checkers find what they are for: each gets a small bad tree."""
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SPDX = '// SPDX-License-Identifier: Apache-2.0\n'


class Checkers(unittest.TestCase):
    def setUp(self):
        self.root = pathlib.Path(tempfile.mkdtemp(prefix='tessera-tree-'))
        self.addCleanup(shutil.rmtree, self.root, True)
        for room in ('base', 'numeric', 'tensor', 'device', 'ops', 'model', 'engine', 'text', 'checkpoint', 'backends/ref', 'backends/cpu_common', 'backends/avx512'):
            (self.root / 'src' / room).mkdir(parents=True)
        shutil.copy(ROOT / 'HOUSE.md', self.root)

    def write(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def check(self, tool):
        result = subprocess.run([ROOT / 'tools' / tool, self.root], capture_output=True, text=True)
        return result.returncode, result.stdout

    def test_layers(self):
        good = {'src/base/a.h': '#include <string>', 'src/ops/a.cc': '#include "numeric/bf16.h"\n#include "ops/a.h"', 'src/engine/a.cc': '#include "model/runner.h"',
                'src/backends/ref/a.cc': '#include "ops/a.h"\n#include "backends/cpu_common/b.h"'}
        for path, text in good.items():
            self.write(path, text)
        self.assertEqual(self.check('check_layers')[0], 0)
        for path, text in (('src/base/b.cc', '#include "tensor/a.h"'), ('src/ops/b.cc', '#include "model/config.h"'), ('src/engine/b.cc', '#include "model/model.h"'),
                           ('src/engine/b.cc', '#include "text/a.h"'), ('src/text/b.cc', '#include "checkpoint/a.h"'), ('src/model/b.cc', '#include "backends/registry.h"'),
                           ('src/backends/ref/b.cc', '#include "backends/avx512/a.h"'), ('src/base/b.h', '#include <iostream>'), ('src/base/b.h', '#include <functional>'),
                           ('src/ops/b.cc', '#include "b.h"'), ('src/base/b.cc', '  #  include   "ops/a.h"')):
            with self.subTest(path=path, text=text):
                self.write(path, text)
                code, out = self.check('check_layers')
                self.assertEqual(code, 1)
                self.assertIn(path + ':1', out)
                (self.root / path).unlink()

    def test_sizes(self):
        self.write('src/base/a.cc', SPDX + 'int a;\n')
        self.assertEqual(self.check('check_sizes')[0], 0)
        for text, part in (('int a;\n', 'SPDX'), (SPDX + 'int a;\n' * 700, 'Size:'), (SPDX + '// Size: one table.\n' + 'int a;\n' * 1001, 'more than 1000'),
                           (SPDX + 'const char* p = "' + '/ro' + 'ot/x";\n', 'one machine'), (SPDX + 'void f() { a' + 'sm("nop"); }\n', 'assembly')):
            self.write('src/base/b.cc', text)
            code, out = self.check('check_sizes')
            self.assertEqual(code, 1, part)
            self.assertIn(part, out)
        self.write('src/base/b.cc', SPDX + '// Size: one table.\n' + 'int a;\n' * 700)
        self.write('bench/results/a.json', '{}\n')
        self.assertEqual(self.check('check_sizes')[0], 0)
        self.write('bench/results/a.json', '{}\nrc 0\n')
        code, out = self.check('check_sizes')
        self.assertEqual(code, 1)
        self.assertIn('bench/results/a.json: no JSON', out)


if __name__ == '__main__':
    unittest.main()
