# SPDX-License-Identifier: Apache-2.0
"""The `tessera` program that comes with the package."""
import json
import os
import pathlib
import subprocess
import sys
from typing import Any, NoReturn, Optional, Sequence

from . import _errors

_PACKAGE = pathlib.Path(__file__).parent
_CODES = {2: 'invalid argument', 3: 'bad data', 4: 'does not fit', 5: 'device error', 7: 'not finite'}


def path() -> str:
    """The program: TESSERA_PROGRAM, or the one of this package."""
    return os.environ.get('TESSERA_PROGRAM') or str(_PACKAGE / 'bin' / 'tessera')


def bundled_model() -> str:
    """The folder of the small model that comes with the package; TESSERA_MODEL names another one."""
    return os.environ.get('TESSERA_MODEL') or str(_PACKAGE / 'share' / 'tessera' / 'models' / 'tiny-v4')


def devices() -> dict[str, Any]:
    """This machine, what each backend can do on it, and what keeps its GPUs from working, as `tessera devices --json`
    prints it: cpu, cores, memory_available_bytes, backends (name, available, why_not, verified), gpus, diagnoses. A
    process of its own looks, so that CUDA is not begun in this one."""
    done = subprocess.run([path(), 'devices', '--json'], capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise _errors.make(_CODES.get(done.returncode, 'internal error'),
                           lines[-1] if lines else f'exit code {done.returncode}')
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def usable_gpu() -> Optional[str]:
    """"cuda:0" where this build computes on it, else None."""
    found = devices()
    gpu_backends = {b['name'] for b in found['backends'] if b['available'] and b['name'] in _GPU_BACKENDS}
    return 'cuda:0' if found['gpus'] and gpu_backends else None


_GPU_BACKENDS = {'cuda', 'sm90', 'sm100', 'sm120'}


def become(arguments: Sequence[str]) -> NoReturn:
    """This process becomes the program."""
    program = path()
    try:
        os.execv(program, [program, *arguments])
    except OSError as error:
        sys.exit(f'tessera: {program}: {error.strerror}')


def main() -> NoReturn:
    """The console command."""
    become(sys.argv[1:])
