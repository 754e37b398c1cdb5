# SPDX-License-Identifier: Apache-2.0
"""A worker in the shape that NVIDIA Dynamo wants of an engine: start, generate, abort, drain, cleanup; token ids in, token
ids out, on asyncio. It needs the package `tessera` alone; nothing of Dynamo is imported (docs/packages.md).

    python worker.py [MODEL_FOLDER] [DEVICE]      shows each step on the bundled model
"""
import asyncio
import dataclasses
import sys
import threading
from typing import Any, AsyncIterator, Mapping, Optional

import tessera

# Requests name options as Dynamo's preprocessor does; None is as good as absent.
SAMPLING = {name: name for name in ('temperature', 'top_p', 'top_k', 'min_p', 'seed', 'repetition_penalty', 'frequency_penalty',
                                    'presence_penalty')}
# The hidden ids are those whose tokens the frontend leaves out of the text, the end of a turn among them.
STOPPING = {'max_tokens': 'max_tokens', 'ignore_eos': 'ignore_eos', 'stop': 'stop', 'stop_token_ids': 'stop_ids',
            'stop_token_ids_hidden': 'stop_ids'}
# Values that ask for nothing, of options that it may send and that are not there.
NEUTRAL = {'n': 1, 'best_of': 1, 'use_beam_search': False, 'length_penalty': 1, 'min_tokens': 0,
           'include_stop_str_in_output': False}


class Draining(RuntimeError):
    """The worker takes no more requests: the router should ask another one."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a frontend and a router need to know of a worker."""

    vocab_size: int
    max_model_len: int
    eos_ids: list[int]
    precision: str


def options_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of tessera.Model.stream. Raises InvalidArgument for an option that is set and would be ignored."""
    options: dict[str, Any] = {}
    stopping = dict(request.get('stop_conditions') or {})
    if stopping.get('ignore_eos'):
        stopping.pop('stop_token_ids_hidden', None)
        if not stopping.get('stop') and not stopping.get('stop_token_ids'):
            stopping.pop('min_tokens', None)  # it is set to max_tokens then, and nothing ends earlier
    for part, names, found in (('sampling_options', SAMPLING, request.get('sampling_options') or {}),
                               ('stop_conditions', STOPPING, stopping)):
        for name, value in found.items():
            if value is None or (name in NEUTRAL and value == NEUTRAL[name]):
                continue
            if name not in names:
                raise tessera.InvalidArgument(f'{part}.{name}: expected one of {", ".join(names)}, found {value!r}')
            if names[name] == 'stop_ids':
                value = sorted({*options.get('stop_ids', ()), *value})
            options[names[name]] = 0 if name == 'top_k' and value == -1 else value
    return options


class Worker:
    """One model. Methods are called from one event loop; a thread for each request waits for its tokens."""

    def __init__(self) -> None:
        self._model: Optional[tessera.Model] = None
        self._streams: dict[str, tessera.Stream] = {}
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def start(self, directory: Optional[str] = None, device: str = 'auto', **options: Any) -> Facts:
        """Loads; options as those of tessera.Model."""
        self._model = await asyncio.to_thread(tessera.Model, directory, device, **options)
        return Facts(self._model.vocab_size, self._model.max_model_len, self._model.eos_ids, self._model.precision)

    async def generate(self, request: Mapping[str, Any], request_id: str) -> AsyncIterator[dict[str, Any]]:
        """Yields {"token_ids": [id]} for each token, then {"token_ids": [], "finish_reason": "stop", "length" or
        "cancelled"}. Who stops iterating, or cancels the task, ends the request."""
        if self._model is None or self._is_draining:
            raise Draining(f'request {request_id}: this worker takes no requests')
        if request_id in self._streams:
            raise tessera.InvalidArgument(f'request {request_id}: expected a new id, found one that runs')
        if request.get('token_ids') is None:
            raise tessera.InvalidArgument(f'request {request_id}: token_ids: expected token ids, found none')
        stream = self._model.stream(request['token_ids'], **options_of(request))
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def finish(end: Any) -> None:
            # Here and not where `generate` ends: a consumer that reads slowly or no more must not hold up `drain`.
            del self._streams[request_id]
            if not self._streams:
                self._is_idle.set()
            arrived.put_nowait(end)

        def read() -> None:
            try:
                for delta in stream:
                    if delta.id is not None:
                        loop.call_soon_threadsafe(arrived.put_nowait, delta.id)
                end: Any = {'token_ids': [], 'finish_reason': stream.finish_reason}
            except Exception as error:  # goes to who reads
                end = error
            loop.call_soon_threadsafe(finish, end)

        reader = threading.Thread(target=read)
        reader.start()
        self._streams[request_id] = stream
        self._is_idle.clear()
        try:
            while isinstance(item := await arrived.get(), int):
                yield {'token_ids': [item]}
            if isinstance(item, Exception):
                raise item
            yield item
        finally:
            stream.abort()  # nothing, where it has ended
            await asyncio.to_thread(reader.join)  # an aborted request ends with the model's step

    def abort(self, request_id: str) -> None:
        """Ends a request before the model's next step. Unknown and ended ones are ignored."""
        if request_id in self._streams:
            self._streams[request_id].abort()

    async def drain(self, seconds: float) -> int:
        """Takes no more requests and lets those that run end; returns how many were aborted after `seconds`. Those end with
        the model's step, whether or not somebody reads them; what came until then can still be read."""
        self._is_draining = True
        try:
            await asyncio.wait_for(self._is_idle.wait(), seconds)
            return 0
        except asyncio.TimeoutError:
            late = list(self._streams)
            for request_id in late:
                self.abort(request_id)
            await self._is_idle.wait()
            return len(late)

    async def cleanup(self) -> None:
        """Gives the memory back."""
        if self._model is not None:
            model, self._model = self._model, None
            await asyncio.to_thread(model.close)


async def show(directory: Optional[str], device: str) -> None:
    worker = Worker()
    print('start:', await worker.start(directory, device))
    with tessera.Model(directory, device) as text:  # a frontend has the tokenizer
        prompt = text.encode_chat('Compute 257-7.')
        ids = [token async for chunk in worker.generate({'token_ids': prompt}, 'a') for token in chunk['token_ids']]
        print('generate:', text.detokenize(ids, skip_special=True))
    request = {'token_ids': prompt, 'stop_conditions': {'max_tokens': 1000, 'ignore_eos': True}}
    async for chunk in worker.generate(request, 'b'):
        worker.abort('b')
        last = chunk
    print('abort:', last)
    print('drain: aborted', await worker.drain(30))
    await worker.cleanup()


if __name__ == '__main__':
    asyncio.run(show(sys.argv[1] if len(sys.argv) > 1 else None, sys.argv[2] if len(sys.argv) > 2 else 'auto'))
