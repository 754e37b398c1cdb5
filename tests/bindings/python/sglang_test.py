# SPDX-License-Identifier: Apache-2.0
"""tessera.sglang against a stand-in of SGLang's interface for runtimes; and the package's entry points, where it is installed."""
import dataclasses
import importlib.metadata
import os
import subprocess
import sys
import types

import pytest
import tessera.sglang


@dataclasses.dataclass(frozen=True)
class ServeBackend:
    api_version: int
    run: object
    detect: object = None
    requires_model_path: bool = True


def test_the_backend_is_explicit_and_of_version_1(monkeypatch):
    for name in ('sglang', 'sglang.cli', 'sglang.cli.serve_backends'):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules['sglang.cli.serve_backends'].ServeBackend = ServeBackend
    backend = tessera.sglang.create_backend()
    assert backend == ServeBackend(1, tessera.sglang.run)


def test_arguments_are_tessera_serves():
    assert tessera.sglang.arguments(('--model-path', 'DIR', '--port', '1')) == ['serve', '--model', 'DIR', '--port', '1']
    assert tessera.sglang.arguments(('--model-path=DIR', '--think')) == ['serve', '--model=DIR', '--think']


def test_the_process_becomes_the_program(tmp_path):
    def run(*argv, **environment):
        code = f'import types, tessera.sglang; tessera.sglang.run(types.SimpleNamespace(argv={argv!r}))'
        return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, env={**os.environ, **environment})

    done = run('--help')
    assert done.returncode == 0 and 'Answer requests over HTTP' in done.stdout
    done = run('--model-path', str(tmp_path / 'none'), '--port', '0')
    assert done.returncode == 3 and 'none/config.json: no such file' in done.stderr
    done = run(TESSERA_PROGRAM=str(tmp_path / 'none'))
    assert done.returncode == 1 and done.stderr == f'tessera: {tmp_path}/none: No such file or directory\n'


def test_entry_points_of_the_installed_package():
    try:
        found = importlib.metadata.distribution('tessera-nvfp4').entry_points
    except importlib.metadata.PackageNotFoundError:
        pytest.skip('the package is not installed')
    points = {(point.group, point.name): point.value for point in found}
    assert points['vllm.general_plugins', 'tessera'] == 'tessera.vllm:register'
    assert points['sglang.serve_backends', 'tessera'] == 'tessera.sglang:create_backend'
    assert points['sglang.srt.plugins', 'tessera'] == 'tessera.sglang_quantization:register'
