# SPDX-License-Identifier: Apache-2.0
"""check and convert."""
import json
import os
from typing import Any, Sequence, Union

from . import _program, _tessera

PathLike = Union[str, 'os.PathLike[str]']


def check(directory: Union[PathLike, None] = None, *, deep: bool = False, device: str = 'cpu', threads: int = 0) -> dict[str, Any]:
    """Checks a checkpoint as `tessera check --json` does, and returns what that prints: `is_sound`, `findings` (severity,
    kind, where, evidence, advice), `tensors_hashed`; with `deep`, which runs the model on sample text and tries repairs
    in memory, also `verdict`, `layers` and more (docs/doctor.md). Without a folder: the bundled model. What is wrong
    with the checkpoint is a finding, not an exception; a folder that is not there raises NotFound."""
    found: dict[str, Any] = json.loads(
        _tessera.check(os.fspath(directory or _program.bundled_model()), deep, device, threads))
    return found


def convert(source: PathLike, target: PathLike, *, families: Union[str, Sequence[str]] = 'experts', method: str = 'amax',
            max_shard_bytes: int = 5_000_000_000, allow_inexact: bool = False, resume: bool = False, force: bool = False,
            trial: bool = False, threads: int = 0) -> dict[str, Any]:
    """Converts a checkpoint to NVFP4 as `tessera convert` does (docs/formats/conversion.md) and returns its report.
    `families`: linear maps that become NVFP4, of experts, shared, attention, compressor, indexer, head, or "all".
    Ctrl-C stops it so that `resume=True` continues."""
    names = families if isinstance(families, str) else ','.join(families)
    report: dict[str, Any] = json.loads(
        _tessera.convert(os.fspath(source), os.fspath(target), names, method, max_shard_bytes, allow_inexact, resume,
                         force, trial, threads))
    return report
