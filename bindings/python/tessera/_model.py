# SPDX-License-Identifier: Apache-2.0
"""tessera.Model: a checkpoint that answers."""
import dataclasses
import json
import operator
import os
from typing import Any, Iterator, Mapping, Optional, Sequence, Union

from . import _program, _tessera
from ._errors import Error, InvalidArgument

Message = Mapping[str, Any]
# A user's turn; a conversation of messages as OpenAI's chat completions have them; or token ids as they are.
Prompt = Union[str, Sequence[Message], Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Delta:
    """A token as it was drawn. `text` is what it completes: it may be empty (an end token, part of a character, what may
    begin a stop string). Of the last one, which brings held-back text, `id` may be None."""

    id: Optional[int]
    text: str
    logprob: Optional[float] = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool. `arguments` is JSON of an object where the call is complete."""

    name: str
    arguments: str
    is_complete: bool


@dataclasses.dataclass(frozen=True)
class Completion:
    """An answer. `text` leaves out special tokens; `reasoning`, `content` and `tool_calls` are how the chat format reads
    it, `fault` where it departs from the format. `finish_reason` is "stop" (the model ended, or a stop string came),
    "length" or "cancelled". `seed` repeats it. `logprobs` is per token where it was asked for."""

    text: str
    ids: list[int]
    finish_reason: str
    num_prompt_tokens: int
    seed: Optional[int]
    reasoning: str
    content: str
    tool_calls: list[ToolCall]
    fault: str
    logprobs: Optional[list[tuple[float, tuple[tuple[int, float], ...]]]]


@dataclasses.dataclass(frozen=True)
class Score:
    """How well the model foretells a text: natural logarithms of the probability of ids[1:], each given those before.
    `top_logprobs[i]` are the likeliest tokens in the place of ids[i + 1]."""

    ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]

    @property
    def nats(self) -> float:
        """Minus the sum of the logprobs."""
        return -sum(self.logprobs)


class Stream:
    """Tokens of one request as they come: an iterator of Delta. Closing it, leaving its `with` block, or dropping it aborts
    the request; what came until then stays in `text` and `ids`. One thread at a time iterates."""

    def __init__(self, model: 'Model', core: _tessera.Stream, prompt: '_Encoded', seed: Optional[int], wants_logprobs: bool):
        self._model, self._core, self._prompt, self._seed = model, core, prompt, seed
        self._is_closed = False
        self.text = ''
        self.ids: list[int] = []
        self._logprobs: Optional[list[tuple[float, tuple[tuple[int, float], ...]]]] = [] if wants_logprobs else None

    @property
    def request_id(self) -> int:
        """For Model.abort, from any thread."""
        return self._core.id

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        if self._is_closed:
            raise StopIteration
        got = self._core.next()
        if got is None:
            raise StopIteration
        delta = Delta(got[0], got[1], got[2], tuple(got[3]))
        self.text += delta.text
        if delta.id is not None:
            self.ids.append(delta.id)
        if self._logprobs is not None and delta.logprob is not None:
            self._logprobs.append((delta.logprob, delta.top_logprobs))
        return delta

    def abort(self) -> None:
        """Ends the request before the model's next step; tokens that came already can still be read."""
        self._core.abort()

    def close(self) -> None:
        """Aborts, and ends the iteration. Closing twice is no fault."""
        self._is_closed = True
        self._core.abort()

    def __enter__(self) -> 'Stream':
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def finish_reason(self) -> Optional[str]:
        """None while the answer is being made."""
        if self._core.is_finished:
            return self._core.finish_reason
        return 'cancelled' if self._is_closed else None

    def result(self) -> Completion:
        """The whole answer; reads what has not been read yet."""
        for _ in self:
            pass
        reason = self.finish_reason or 'cancelled'
        reasoning, content, calls, fault = '', self.text, [], ''
        if self._prompt.is_chat:
            # Markers of reasoning and calls are special tokens, which `text` lacks; what follows a stop text is no answer.
            whole = self.text if self._core.has_met_stop else self._model.detokenize(self.ids)
            reasoning, content, calls, fault = _tessera.parse_answer(whole, self._prompt.starts_in_reasoning, reason != 'stop')
        return Completion(self.text, list(self.ids), reason, self._core.num_prompt_tokens, self._seed, reasoning, content,
                          [ToolCall(*call) for call in calls], fault, self._logprobs)


@dataclasses.dataclass(frozen=True)
class _Encoded:
    ids: list[int]
    is_chat: bool
    starts_in_reasoning: bool = False


class Model:
    """A checkpoint that is loaded: any format that `tessera` reads. Requests of all threads run together, each as if it
    were alone (a sequence's tokens do not depend on what runs beside it). Ctrl-C ends what waits for it.

    directory      folder with config.json, tokenizer.json, *.safetensors; None: the bundled tiny model
    device         "cpu", "cuda:N", or "auto": the first GPU that this build computes on, else the CPU
    mode           inputs of linear maps: "a16" (BF16), "f32" (nothing is rounded), "a8" (E4M3), "a4" (NVFP4)
    cache          "fp8", as the model was trained, or "exact"
    threads        of the CPU; 0: one per processor. Results do not depend on it
    max_model_len  most tokens of prompt and answer together; None: the model's, at most 131072
    max_running    most answers that are made at once; more wait; None: 16, on a GPU 256
    max_step_tokens  most tokens of one step, of answers and pieces of prompts; None: 64; on a GPU 512 to 4096, as
                   memory allows, and 512 while answers are made
    allow_inexact  round MXFP4 blocks that NVFP4 can't hold exactly, instead of refusing the model

    Raises NotFound, DataLoss, Unsupported for what is wrong with the folder, OutOfMemory where it does not fit."""

    def __init__(self, directory: Union[str, 'os.PathLike[str]', None] = None, device: str = 'auto', *, mode: str = 'a16',
                 cache: str = 'fp8', threads: int = 0, max_model_len: Optional[int] = None, max_running: Optional[int] = None,
                 max_step_tokens: Optional[int] = None, allow_inexact: bool = False):
        if device == 'auto':
            device = _program.usable_gpu() or 'cpu'
        self.device = device
        self._core = _tessera.open_model(os.fspath(directory or _program.bundled_model()), device, mode, cache, threads,
                                         max_model_len or 0, max_running, max_step_tokens, allow_inexact)
        (self.vocab_size, self.max_positions, self.bos_id, self.eos_ids, self.precision, self.weight_bytes) = self._core.facts
        self.max_model_len = self._core.max_model_len

    def __repr__(self) -> str:
        state = ', closed' if self._core.is_closed else ''
        return f'tessera.Model({self._core.directory!r}, device={self.device!r}, {self.precision}{state})'

    # Requests.

    def stream(self, prompt: Prompt, *, max_tokens: int = 256, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0,
               min_p: float = 0.0, repetition_penalty: float = 1.0, frequency_penalty: float = 0.0,
               presence_penalty: float = 0.0, seed: Optional[int] = None, logit_bias: Optional[Mapping[int, float]] = None,
               stop: Union[str, Sequence[str]] = (), stop_ids: Sequence[int] = (), ignore_eos: bool = False,
               logprobs: Optional[int] = None, raw: bool = False, think: bool = False, effort: str = 'default',
               tools: Optional[Sequence[Message]] = None) -> Stream:
        """Starts a request and returns its tokens as they come.

        prompt       text: one user turn of a chat (with raw=True the whole text, special tokens parsed); a list of messages
                     {"role", "content", ...}; or token ids
        max_tokens   most tokens to make; cut to what max_model_len leaves
        temperature  0 takes the likeliest token; else top_p, top_k (0: all), min_p narrow the draw, and `seed` repeats it
        stop         texts before which the answer ends; stop_ids: token ids that end it
        logprobs     also logprobs of the tokens, with so many of the likeliest, 0 to 20
        think        let the model reason first; effort: default, minimal, low, medium, high, xhigh, max or ultra
        tools        functions as OpenAI's chat completions have them

        Raises InvalidArgument for what can never run, OutOfMemory where too many requests wait."""
        encoded = self._encode(prompt, raw=raw, think=think, effort=effort, tools=tools)
        if seed is None and temperature > 0:
            seed = int.from_bytes(os.urandom(8), 'little')
        core = self._core.submit(
            encoded.ids, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
            repetition_penalty=repetition_penalty, frequency_penalty=frequency_penalty, presence_penalty=presence_penalty,
            seed=_seed(seed), logit_bias=dict(logit_bias or {}), stop=[stop] if isinstance(stop, str) else list(stop),
            stop_ids=_ids(stop_ids, 'stop_ids'), ignore_eos=ignore_eos, logprobs=logprobs, prompt_logprobs=None)
        return Stream(self, core, encoded, seed if temperature > 0 else None, logprobs is not None)

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """The whole answer; options as those of stream()."""
        return self.stream(prompt, **options).result()

    def generate_many(self, prompts: Sequence[Prompt], **options: Any) -> list[Completion]:
        """Answers of several prompts, made together; options as those of stream(), the same for all. An exception aborts
        them all."""
        streams: list[Stream] = []
        try:
            for prompt in prompts:
                streams.append(self.stream(prompt, **options))
            return [stream.result() for stream in streams]
        finally:
            for stream in streams:
                stream.abort()

    def abort(self, request_id: int) -> None:
        """Ends a request (Stream.request_id) from any thread. Unknown and ended ones are ignored."""
        self._core.abort(request_id)

    def score(self, text: Union[str, Sequence[int]], *, top_logprobs: int = 0) -> Score:
        """Logprobs of a text's tokens under the model, each given those before; text is taken as it is, special tokens
        parsed, and no token is added. `top_logprobs`: with so many of the likeliest, 0 to 20."""
        ids = self.tokenize(text) if isinstance(text, str) else _ids(text, 'text')
        core = self._core.submit(ids, max_tokens=0, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0,
                                 frequency_penalty=0.0, presence_penalty=0.0, seed=0, logit_bias={}, stop=[], stop_ids=[],
                                 ignore_eos=False, logprobs=None, prompt_logprobs=top_logprobs)
        while core.next() is not None:
            pass
        rows = core.prompt_logprobs
        if len(rows) < len(ids) - 1:  # the first token has none
            raise Error(f'score: expected {len(ids) - 1} log probabilities, found {len(rows)}: the model was closed')
        return Score(ids, [row[0] for row in rows], [row[1] for row in rows])

    # Text.

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; none is added. special=False: text such as "<|User|>" stays text."""
        return self._core.tokenize(text, special)

    def detokenize(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of token ids; bytes that are no whole character become U+FFFD."""
        return self._core.detokenize(_ids(ids, 'ids'), skip_special)

    def render_chat(self, messages: Union[str, Sequence[Message]], *, tools: Optional[Sequence[Message]] = None,
                    think: bool = False, effort: str = 'default', keep_reasoning: bool = False) -> str:
        """A conversation as the prompt's text, byte for byte as DeepSeek's own encoder writes it (docs/formats/chat.md)."""
        return self._render(messages, tools, think, effort, keep_reasoning)[0]

    def encode_chat(self, messages: Union[str, Sequence[Message]], **options: Any) -> list[int]:
        """The same as token ids; options as those of render_chat()."""
        self._core.check_chat()
        return self.tokenize(self.render_chat(messages, **options))

    def _render(self, messages: Union[str, Sequence[Message]], tools: Optional[Sequence[Message]], think: bool, effort: str,
                keep_reasoning: bool = False) -> tuple[str, bool]:
        turns = [{'role': 'user', 'content': messages}] if isinstance(messages, str) else list(messages)
        return self._core.render_chat(_json(turns, 'messages'), None if tools is None else _json(list(tools), 'tools'), think,
                                      effort, keep_reasoning)

    def _encode(self, prompt: Prompt, *, raw: bool, think: bool, effort: str, tools: Optional[Sequence[Message]]) -> _Encoded:
        if isinstance(prompt, (bytes, bytearray)):
            raise TypeError('prompt: expected str, messages or token ids, found bytes')
        is_text = isinstance(prompt, str)
        if not is_text and (len(prompt) == 0 or not isinstance(prompt[0], Mapping)):
            return _Encoded(_ids(prompt, 'prompt'), False)
        if is_text and not prompt:
            raise InvalidArgument('prompt: expected text, found none')
        if is_text and raw:
            return _Encoded(self.tokenize(str(prompt)), False)
        self._core.check_chat()
        text, starts_in_reasoning = self._render(prompt, tools, think, effort)  # type: ignore[arg-type]
        return _Encoded(self.tokenize(text), True, starts_in_reasoning)

    # End.

    def close(self) -> None:
        """Ends every request as cancelled and gives the memory back. Text functions still work, requests raise."""
        self._core.close()

    def __enter__(self) -> 'Model':
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _ids(values: Any, name: str) -> list[int]:
    try:
        ids = [operator.index(value) for value in values]
    except TypeError as error:
        raise TypeError(f'{name}: expected token ids: {error}') from None
    for i, value in enumerate(ids):
        if not 0 <= value < 2**31:
            raise InvalidArgument(f'{name}[{i}]: expected a token id, found {value}')
    return ids


def _seed(seed: Optional[int]) -> int:
    if seed is None:
        return 0  # the likeliest token is taken
    if not 0 <= seed < 2**64:
        raise InvalidArgument(f'seed: expected 0 to 2^64 - 1, found {seed}')
    return seed


def _json(value: Any, name: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f'{name}: expected what JSON can hold: {error}') from None
