# SPDX-License-Identifier: Apache-2.0
"""The extension. Model, Stream and the functions are wrapped by the Python beside it; the ops are used as they are."""
from typing import Any, Mapping, Optional, Sequence

__version__: str

# An array of NumPy, PyTorch or any library with DLPack: dense, row-major, aligned to 16 bytes, of the context's device.
Array = Any

class Context:
    """Where ops compute: "cpu" with num_threads (0: one per core), or "cuda:N" on `stream`, a cudaStream_t as a number (0: a
    stream of the context's own; the legacy default stream is 1). Raises InvalidArgument, Unsupported, DeviceError."""

    def __init__(self, device: str = "cpu", stream: int = 0, num_threads: int = 0) -> None: ...
    @property
    def device(self) -> str: ...
    def synchronize(self) -> None:
        """Waits for all that was queued; raises DeviceError where some of it failed."""
    def quantize_nvfp4(self, x: Array, rule: str = "rows",
                       out: Optional[tuple[Array, Array, Array]] = None) -> tuple[Array, Array, Array]:
        """NVFP4 of x [rows, cols], float32 or bfloat16, cols a multiple of 16: codes uint8 [rows, cols/2] (E2M1, even column
        in the low nibble), scales uint8 [rows, cols/16] (E4M3), globals float32. value = code * scale * global. `rule`:
        "rows" for activations (globals [rows]), "tensor" or "four-over-six" for a weight (globals [1])."""
    def dequantize_nvfp4(self, codes: Array, scales: Array, globals: Array) -> Array:
        """The values as float32 [rows, cols], for looking at them: on the CPU, in plain loops."""

class Weight:
    """A matrix [rows, cols] as checkpoints have it, or a stack [count, rows, cols] of them. The dtype of `data` says which:
    uint8 [.., rows, cols/2] with block_scales E4M3 [.., rows, cols/16] (uint8 or float8_e4m3fn) and tensor_scales above 0,
    one or `count`: NVFP4; float8_e4m3fn with block_scales float32 [.., ceil(rows/128), ceil(cols/128)]: FP8; bfloat16;
    float32. The arrays are kept, not copied, and must not change."""

    def __init__(self, context: Context, data: Array, block_scales: Optional[Array] = None,
                 tensor_scales: Sequence[float] = ()) -> None: ...
    @property
    def format(self) -> str:
        """"nvfp4", "fp8", "bf16" or "f32"."""
    @property
    def shape(self) -> tuple[int, int, int]:
        """(count, rows, cols)."""

class Linear:
    """y = W x, or with `groups` the block-diagonal map of as many parts. `input`: "a16" (x bfloat16), "f32" (x float32),
    "a8", "a4" (x bfloat16, rounded inside; a4 with NVFP4 weights only). `output`: "float32", "bfloat16", or None: as x.
    Chooses the kernel, packs the weight where that wants it (a copy) and takes scratch memory for max_tokens."""

    def __init__(self, weight: Weight, *, groups: int = 1, input: str = "a16", output: Optional[str] = None,
                 max_tokens: int = 256) -> None: ...
    def __call__(self, x: Array, out: Optional[Array] = None) -> Array:
        """x [num_tokens, groups * in] to [num_tokens, rows]; num_tokens at most max_tokens. A token's bits do not depend on
        the others."""
    @property
    def kernel(self) -> str:
        """The chosen one, such as "avx512.bf16"."""

class Moe:
    """Routed experts, grouped on the device, and with `router` the whole mixture. w1 (gate), w3 (up): stacks
    [num_local, inner, hidden]; w2 (down) [num_local, hidden, inner]; experts first_expert ... first_expert + num_local of
    num_experts (None: num_local). swiglu_limit 0: no clamp. router [num_experts, hidden] float32 or bfloat16, with
    router_bias float32 [num_experts] or hash_table int32 [vocabulary, top_k]; shared_w1, shared_w3, shared_w2: the shared
    expert, or None."""

    def __init__(self, w1: Weight, w3: Weight, w2: Weight, *, top_k: int, num_experts: Optional[int] = None,
                 first_expert: int = 0, input: str = "a16", shared_input: str = "a16", swiglu_limit: float = 0.0,
                 routing_scale: float = 1.0, normalized: bool = True, router: Optional[Weight] = None,
                 router_bias: Optional[Array] = None, hash_table: Optional[Array] = None, shared_w1: Optional[Weight] = None,
                 shared_w3: Optional[Weight] = None, shared_w2: Optional[Weight] = None, max_tokens: int = 256) -> None: ...
    def experts(self, x: Array, experts: Array, routing: Array, out: Optional[Array] = None) -> Array:
        """The routed experts alone: x [num_tokens, hidden], experts int32 [num_tokens, top_k] ascending in a row, routing
        float32 [num_tokens, top_k] to [num_tokens, top_k, hidden]; 0 for experts that are not here."""
    def combine(self, routed: Array, out: Optional[Array] = None) -> Array:
        """The sum of what experts() gave, in ascending slot: [num_tokens, top_k, hidden] to [num_tokens, hidden]."""
    def __call__(self, x: Array, token_ids: Optional[Array] = None, out: Optional[Array] = None) -> Array:
        """Router, experts, shared expert and their sum: x [num_tokens, hidden] to the same shape. token_ids int32
        [num_tokens], with a hash table."""
    @property
    def kernel(self) -> str: ...

class RankListener:
    """Where rank 0 of an ExpertGroup is found: a socket of the loopback. It serves one group."""

    def __init__(self) -> None: ...
    @property
    def port(self) -> int: ...

class ExpertGroup:
    """Ranks, processes of one machine with a GPU each, that exchange rows of up to max_tokens tokens through their GPUs' memory.
    All make it together: rank 0 with its listener, whose port it tells the others with a secret of 16 characters or more. Waits
    up to a minute for them. Raises DeviceError where ranks are missing or lost."""

    def __init__(self, context: Context, *, rank: int, ranks: int, port: int, secret: str, listener: Optional[RankListener] = None,
                 max_tokens: int, top_k: int, hidden: int) -> None: ...
    @property
    def why_not(self) -> str:
        """Why they don't reach each other's memory, the same on all ranks; "": they do."""
    def check(self) -> None:
        """Raises DeviceError, naming it, where a rank is lost: from then on the GPU waits for nobody, and outputs mean nothing."""
    def close(self, seconds: Optional[float] = None) -> None:
        """All ranks close together, each once it has queued its last call; waits for those. Where a rank does not come within so
        many seconds (None: a minute; at most a day), the others' calls end, and they raise DeviceError from then on. A rank
        other than 0 that misses rank 0 waits half as long again. A group that is dropped waits ten seconds."""
    def fail(self, why: str) -> None:
        """Ends this rank's calls, and those of the others, which raise DeviceError with `why`. Waits for none of them. Groups
        that live when the process ends do so."""

class RankExperts:
    """Routed experts of a group of ranks and their sum, as experts() and combine() of Moe give it where one rank has all (the
    same bits): this rank has those from rank * count on, NVFP4 w1, w3 [count, inner, hidden] and w2 [count, hidden, inner].
    Raises Unsupported where no kernel here does it."""

    def __init__(self, w1: Weight, w3: Weight, w2: Weight, *, top_k: int, rank: int, ranks: int, swiglu_limit: float = 0.0,
                 max_tokens: int = 256) -> None: ...
    def __call__(self, group: ExpertGroup, x: Array, experts: Array, routing: Array, out: Optional[Array] = None,
                 most_tokens: Optional[int] = None) -> Array:
        """Of this rank's tokens, 0 too: x bfloat16 [num_tokens, hidden], experts int32 [num_tokens, top_k] ascending in a row (an
        id that no rank has gives 0), routing float32 [num_tokens, top_k] to [num_tokens, hidden]. All ranks call it, in the
        same order of calls; none has more than most_tokens (None: max_tokens) tokens in this call, of which all say the same."""
    @property
    def kernel(self) -> str: ...
    @staticmethod
    def why_not(context: Context, *, hidden: int, inner: int, num_local: int, top_k: int, rank: int, ranks: int) -> str:
        """Why no kernel of the context computes such a share; "": one does."""

class Attention:
    """A step of DeepSeek-V4's attention: one vector of head_dim serves as key and as value of every head. `cache`: "f32" (x
    float32), "bf16" or "fp8" (the last rope_dim values are never quantised). `scale` None: head_dim ** -0.5."""

    def __init__(self, context: Context, *, heads: int, head_dim: int, window: int, rope_dim: int = 0,
                 scale: Optional[float] = None, cache: str = "bf16", max_tokens: int = 256) -> None: ...
    @property
    def entry_bytes(self) -> int:
        """Of one entry of a cache: caches are uint8 [slots, entry_bytes]."""
    def store(self, rows: Array, slots: Array, cache: Array) -> None:
        """Encodes rows [num_rows, head_dim] into entries slots int64 [num_rows] of the cache; -1 leaves a row out."""
    def __call__(self, q: Array, positions: Array, window_cache: Array, sink: Array, entry_cache: Optional[Array] = None,
                 num_entries: Optional[Array] = None, selected: Optional[Array] = None, out: Optional[Array] = None) -> Array:
        """q [num_tokens, heads, head_dim], positions int64 [num_tokens] of one sequence; window_cache a ring (position p is
        entry p mod slots, slots at least window - 1 + num_tokens) that holds the tokens themselves; sink float32 [heads].
        entry_cache: compressed entries; num_entries int32 [num_tokens] of them are visible, or are the lengths of the lists
        `selected` int32 [num_tokens, n]. Returns [num_tokens, heads, head_dim]. Values of positions, num_entries and
        selected are checked on a CPU, and not on a GPU."""
    @property
    def kernel(self) -> str: ...

class Stream:
    id: int
    is_finished: bool
    has_met_stop: bool
    finish_reason: str
    num_prompt_tokens: int
    num_tokens: int
    prompt_logprobs: list[tuple[float, list[tuple[int, float]]]]
    seconds: tuple[float, float, float]
    def next(self) -> Optional[tuple[Optional[int], str, Optional[float], list[tuple[int, float]]]]: ...
    def abort(self) -> None: ...

class Model:
    directory: str
    is_closed: bool
    max_model_len: int
    facts: tuple[int, int, int, list[int], str, int]
    def submit(self, prompt: Sequence[int], *, max_tokens: int, temperature: float, top_p: float, top_k: int, min_p: float,
               repetition_penalty: float, frequency_penalty: float, presence_penalty: float, seed: Optional[int],
               logit_bias: Mapping[int, float], stop: Sequence[str], stop_ids: Sequence[int], ignore_eos: bool,
               logprobs: Optional[int], prompt_logprobs: Optional[int]) -> Stream: ...
    def abort(self, request_id: int) -> None: ...
    def close(self) -> None: ...
    def tokenize(self, text: str, special: bool) -> list[int]: ...
    def detokenize(self, ids: Sequence[int], skip_special: bool) -> str: ...
    def check_chat(self) -> None: ...
    def render_chat(self, messages: str, tools: Optional[str], think: bool, effort: str,
                    keep_reasoning: bool) -> tuple[str, bool]: ...

def open_model(directory: str, device: str, mode: str, cache: str, threads: int, max_model_len: int, max_running: Optional[int],
               max_step_tokens: Optional[int], allow_inexact: bool) -> Model: ...
def parse_answer(text: str, starts_in_reasoning: bool,
                 is_cut_off: bool) -> tuple[str, str, list[tuple[str, str, bool]], str]: ...
def check(directory: str, deep: bool, device: str, threads: int) -> str: ...
def convert(source: str, target: str, families: str, method: str, max_shard_bytes: int, allow_inexact: bool, resume: bool,
            force: bool, trial: bool, threads: int) -> str: ...
def hf_name(official: str) -> str:
    """Hugging Face's name of a tensor or linear map that has an official name; "" for others."""
