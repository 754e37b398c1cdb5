# SPDX-License-Identifier: Apache-2.0
"""Tessera as a runtime of `sglang serve`. Importing it needs nothing; create_backend() needs SGLang.

    sglang serve DIR --model-type tessera --device cuda:0 --port 30000

starts `tessera serve` with SGLang's command line: the model's folder, and behind it whatever `tessera serve` knows
(`sglang serve --model-type tessera --help`). SGLang finds it by the entry point "tessera" of sglang.serve_backends, version 1
of that interface (sglang/cli/serve_backends.py at 18a0401). **Tested by import against a stand-in; it has not run inside
SGLang.** tools/verify_plugins.py checks it where both are installed."""
from typing import Any, NoReturn, Sequence

from . import _program

API_VERSION = 1


def arguments(argv: Sequence[str]) -> list[str]:
    """SGLang's arguments as those of `tessera serve`: --model-path is --model there; all others go as they are."""
    found = ['--model' + a[len('--model-path'):] if a == '--model-path' or a.startswith('--model-path=') else a for a in argv]
    return ['serve', *found]


def run(request: Any) -> NoReturn:
    """This process becomes `tessera serve`: its signals, its exit code."""
    _program.become(arguments(request.argv))


def create_backend() -> Any:
    """The factory that SGLang calls. There is no detector: the runtime is used where --model-type asks for it."""
    from sglang.cli.serve_backends import ServeBackend
    return ServeBackend(api_version=API_VERSION, run=run)
