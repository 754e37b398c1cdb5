# SPDX-License-Identifier: Apache-2.0
"""What goes wrong. Each is a tessera.Error, and what Python users expect besides."""


class Error(Exception):
    """One line: what was wrong, where, what was expected, what was found. `code` is the kind as a word:
    "invalid argument", "not found", "bad data", "unsupported", "does not fit", "cancelled", "device error", "not finite"
    or "internal error"."""

    code: str = 'internal error'


class InvalidArgument(Error, ValueError):
    """The caller asked for something impossible."""

    code = 'invalid argument'


class NotFound(Error, FileNotFoundError):
    """A file, tensor or field is missing."""

    code = 'not found'


class DataLoss(Error, ValueError):
    """A file says something that it must not say: truncated, malformed, inconsistent."""

    code = 'bad data'


class OutOfMemory(Error, MemoryError):
    """It does not fit, or too much waits; the message says how much is missing."""

    code = 'does not fit'


class DeviceError(Error, RuntimeError):
    """A GPU or its driver failed, perhaps in work that was queued earlier."""

    code = 'device error'


class Unsupported(Error, NotImplementedError):
    """Well-formed, but nothing here does it; the message lists why."""

    code = 'unsupported'


class NotFinite(Error, ArithmeticError):
    """NaN or infinity where numbers are due."""

    code = 'not finite'


_CLASSES = {c.code: c for c in (InvalidArgument, NotFound, DataLoss, OutOfMemory, DeviceError, Unsupported, NotFinite)}


def make(code: str, message: str) -> Error:
    """The exception of a code. The extension calls it."""
    error = _CLASSES.get(code, Error)(message)
    error.code = code
    return error
