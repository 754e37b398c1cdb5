# SPDX-License-Identifier: Apache-2.0
"""Tessera's experts and attention inside Hugging Face's DeepSeek-V4 classes. Importing it needs torch and transformers.

    model = tessera.transformers.load("DIR", "cuda:0")   # of an NVFP4 checkpoint: experts ours, the rest dequantised BF16
    tessera.transformers.use_experts(model)              # or: quantises the experts of a model that there is
    tessera.transformers.use_attention(model)            # the softmax over window and compressed entries is ours too

The functions are registered as "tessera" in ALL_EXPERTS_FUNCTIONS and ALL_ATTENTION_FUNCTIONS, which transformers asks at every
forward; no class is patched."""
import os
import pathlib
from typing import Any, Iterator, Optional, Union

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, GenerationConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RMSNorm

from . import torch as tessera_torch
from ._checkpoint import Checkpoint, first_line, read_object
from ._errors import DataLoss, InvalidArgument, NotFound, Unsupported

NAME = 'tessera'
_MATRICES = ('gate_proj', 'up_proj', 'down_proj')  # w1, w3, w2


def experts_forward(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """hidden_states [tokens, hidden], top_k_index and top_k_weights [tokens, top_k] to [tokens, hidden]. An index equal to
    the number of experts is skipped. Values are rounded to BF16 on their way in."""
    module = getattr(self, 'tessera_experts', None)
    if module is None:
        raise InvalidArgument('experts: expected NVFP4 weights, found none; call tessera.transformers.use_experts(model)')
    return module(hidden_states.to(torch.bfloat16), top_k_index, top_k_weights).to(hidden_states.dtype)


def _experts_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    return ((name, part) for name, part in list(model.named_modules()) if type(part).__name__ == 'DeepseekV4Experts')


def _place(part: Any, weights: list[Any], top_k: int, max_tokens: int) -> None:
    part.tessera_experts = tessera_torch.Experts(*weights, top_k=top_k, swiglu_limit=float(part.limit), max_tokens=max_tokens)


def _switch(model: Any, name: str) -> None:
    if name == NAME:
        ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    model.set_experts_implementation(name)


def _num_window_keys(num_keys: int, num_tokens: int, window: int, rate: Optional[int]) -> int:
    """How many of a call's keys are positions: the tokens' own and the window - 1 before them that the class keeps. The others
    are compressed entries, one for each `rate` tokens since the start (None: the layer has none)."""
    if rate is None:
        return num_keys
    for past in range(window - 1):
        if past + num_tokens + (past + num_tokens) // rate == num_keys:
            return past + num_tokens
    return window - 1 + num_tokens


def _check_window(seen: torch.Tensor, first: torch.Tensor, window: int) -> None:
    """seen [tokens, window keys], first: the key that comes after the padding. What is padding itself may see anything."""
    num_tokens, num_keys = seen.shape
    own = torch.arange(num_keys - num_tokens, num_keys, device=seen.device)[:, None]
    keys = torch.arange(num_keys, device=seen.device)
    expected = (keys >= first) & (keys <= own) & (keys > own - window)
    if ((seen != expected) & seen.gather(1, own)).any():
        raise Unsupported(f'attention_mask: expected the last {window} tokens of each, but for padding, found another mask')


def _listed(seen: torch.Tensor, limit: int) -> torch.Tensor:
    """seen bool [tokens, entries], at most `limit` in a row: their indices int32 [tokens, limit], ascending, then 0."""
    places = torch.where(seen, seen.cumsum(-1) - 1, limit)
    lists = torch.zeros((seen.shape[0], limit + 1), dtype=torch.int64, device=seen.device)
    lists.scatter_(-1, places, torch.arange(seen.shape[1], device=seen.device).expand_as(places))
    return lists[:, :limit].to(torch.int32).contiguous()


def attention_forward(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                      attention_mask: Optional[torch.Tensor], dropout: float = 0.0, **_: Any) -> tuple[torch.Tensor, None]:
    """query [batch, heads, tokens, head_dim]; key [batch, 1, keys, head_dim]: positions, then compressed entries, each its own
    value; attention_mask [batch, 1, tokens, keys], 0 for what a token sees, as the class makes it. Returns [batch, tokens,
    heads, head_dim]. Of a mask the padding and the choice of entries are read; another window than the model's raises
    Unsupported on a CPU and is not noticed on a GPU."""
    module = getattr(self, 'tessera_attention', None)
    if module is None:
        raise InvalidArgument('attention: expected a module of ours, found none; call tessera.transformers.use_attention(model)')
    if dropout:
        raise Unsupported(f'dropout: expected 0, found {dropout}')
    if not isinstance(attention_mask, torch.Tensor):
        raise InvalidArgument(f'attention_mask: expected a tensor, found {type(attention_mask).__name__}')
    batch, _, num_tokens, _ = query.shape
    window, max_tokens = module.options['window'], module.max_tokens
    rate = None if self.compressor is None else self.compressor.compress_rate
    num_window = _num_window_keys(key.shape[2], num_tokens, window, rate)
    num_entries = key.shape[2] - num_window
    indexer = getattr(self.compressor, 'indexer', None)
    dtype = torch.float32 if module.options['cache'] == 'f32' else torch.bfloat16
    queries, keys, sinks = query.transpose(1, 2).to(dtype).contiguous(), key[:, 0].to(dtype), self.sinks.float()
    steps = torch.arange(num_window, device=query.device)
    out = torch.empty_like(queries)
    for b in range(batch):
        seen = attention_mask[b, 0] == 0
        first = seen[:, :num_window].any(0).to(torch.int32).argmax()
        if seen.device.type == 'cpu':
            _check_window(seen[:, :num_window], first, window)
        ring = module.new_cache(max(num_window, window - 1 + min(num_tokens, max_tokens)), query.device)
        module.store(keys[b, :num_window], (steps - first).clamp(min=-1), ring)
        entries: list[Optional[torch.Tensor]] = [None, None, None]
        if num_entries:
            entries[0] = module.new_cache(num_entries, query.device)
            module.store(keys[b, num_window:], torch.arange(num_entries, device=query.device), entries[0])
            entries[1] = seen[:, num_window:].sum(-1, dtype=torch.int32)
            if indexer is not None:
                entries[2] = _listed(seen[:, num_window:], min(indexer.index_topk, num_entries))
        positions = (steps[num_window - num_tokens:] - first).clamp(min=0)
        for i in range(0, num_tokens, max_tokens):
            chunk = slice(i, i + max_tokens)
            counts, lists = (None if e is None else e[chunk] for e in entries[1:])
            out[b, chunk] = module(queries[b, chunk], positions[chunk], ring, sinks, entries[0], counts, lists)
    return out.to(query.dtype), None


def use_attention(model: torch.nn.Module, *, max_tokens: int = 256) -> int:
    """Switches every DeepseekV4Attention of the model to attention_forward: the scores, the softmax with its sink and the sum
    over the window and the compressed entries; maps, norms, rotation, compressors and indexer stay Hugging Face's. Sequences
    of a batch run one by one, max_tokens of a sequence at a time. Returns the number of layers. Raises Unsupported for a model
    that has none, or whose layers differ, and leaves it as it was."""
    shared: Optional[tessera_torch.Attention] = None
    first: Optional[dict[str, Any]] = None
    found = []
    for part in list(model.modules()):
        if type(part).__name__ != 'DeepseekV4Attention':
            continue
        options = {name: getattr(part, name) for name in ('num_heads', 'head_dim', 'sliding_window', 'scaling')}
        if first is not None and options != first:
            name = next(name for name in options if options[name] != first[name])
            raise Unsupported(f'{name}: expected {first[name]} in all layers, found {options[name]}')
        if shared is None:  # layers run one after another
            first = options
            is_f32 = part.kv_proj.weight.dtype == torch.float32
            shared = tessera_torch.Attention(heads=part.num_heads, head_dim=part.head_dim, window=part.sliding_window,
                                             scale=part.scaling, cache='f32' if is_f32 else 'bf16', max_tokens=max_tokens)
        found.append(part)
    if shared is None:
        raise Unsupported(f'model: expected layers of DeepseekV4Attention, found none in {type(model).__name__}')
    for part in found:
        part.tessera_attention = shared
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask)
    model.set_attn_implementation(NAME)
    return len(found)


def _stack(weights: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    parts = [tessera_torch.quantize_nvfp4(weight, rule) for weight in weights]
    return torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]), torch.cat([p[2] for p in parts])


def use_experts(model: torch.nn.Module, *, rule: str = 'four-over-six', keep_dense: bool = False, max_tokens: int = 1024) -> int:
    """Quantises gate_up_proj [experts, 2 inner, hidden] and down_proj [experts, hidden, inner] of every DeepseekV4Experts in
    the model, drops them unless keep_dense, and switches the model to them. Returns the number of layers; raises Unsupported where
    there are none. `rule` as that of Context.quantize_nvfp4; longer inputs are run max_tokens at a time."""
    count = 0
    for _, part in _experts_of(model):
        gate_up, down = part.gate_up_proj.detach(), part.down_proj.detach()
        inner = gate_up.shape[1] // 2
        weights = [_stack(w, rule) for w in (gate_up[:, :inner], gate_up[:, inner:], down)]
        _place(part, weights, model.config.num_experts_per_tok, max_tokens)
        if not keep_dense:
            del part.gate_up_proj, part.down_proj
        count += 1
    if not count:
        raise Unsupported(f'model: expected layers of DeepseekV4Experts, found none in {type(model).__name__}')
    _switch(model, NAME)
    return count


def _read_experts(checkpoint: Checkpoint, name: str, part: Any, device: torch.device) -> list[Any]:
    """w1, w3, w2 as tessera.torch.Experts takes them."""
    shapes = ((part.intermediate_dim, part.hidden_dim),) * 2 + ((part.hidden_dim, part.intermediate_dim),)
    if f'{name}.gate_up_proj' in checkpoint:
        raise Unsupported(f'{name}.gate_up_proj: expected NVFP4 experts one by one, found fused ones; `tessera convert` makes them')
    weights = []
    for matrix, (rows, cols) in zip(_MATRICES, shapes):
        parts = []
        for e in range(part.num_experts):
            found = checkpoint.nvfp4(f'{name}.{e}.{matrix}')
            if found is None:
                raise Unsupported(f'{name}.{e}.{matrix}: expected NVFP4, found another format; `tessera convert` makes it')
            tessera_torch.check_shape(f'{name}.{e}.{matrix}', found[0], (rows, cols // 2))
            parts.append(found)
        weights.append((torch.stack([p[0] for p in parts]).to(device), torch.stack([p[1] for p in parts]).to(device),
                        [p[2] for p in parts]))
    return weights


def _read_dense_experts(checkpoint: Checkpoint, name: str, part: Any, device: torch.device, dtype: torch.dtype) -> None:
    if f'{name}.gate_up_proj' in checkpoint:
        return  # as they are

    def stack(matrix: str) -> torch.Tensor:
        return torch.stack([checkpoint.dense(f'{name}.{e}.{matrix}').to(dtype) for e in range(part.num_experts)]).to(device)

    part.gate_up_proj = torch.nn.Parameter(torch.cat([stack('gate_proj'), stack('up_proj')], 1), requires_grad=False)
    part.down_proj = torch.nn.Parameter(stack('down_proj'), requires_grad=False)


def _fill(model: Any, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
    """All parameters and buffers that are on no device yet."""
    in_fp32 = set(getattr(model, '_keep_in_fp32_modules_strict', None) or ())
    # transformers 5.17's class keeps norms' weights in float32 and leaves their outputs so, which its maps then refuse.
    norms_round = DeepseekV4RMSNorm(1)(torch.zeros(1, 1, dtype=torch.bfloat16)).dtype == torch.bfloat16
    for owner_name, owner in model.named_modules():
        for key, old in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
            name = f'{owner_name}.{key}' if owner_name else key
            if not old.is_meta or key in owner._non_persistent_buffers_set:
                continue
            value = checkpoint.tensor(name)
            tessera_torch.check_shape(name, value, old.shape)
            if value.is_floating_point():
                keeps = in_fp32 & set(name.split('.')) and (norms_round or not isinstance(owner, DeepseekV4RMSNorm))
                value = value.to(torch.float32 if keeps else dtype)
            value = value.to(device)
            setattr(owner, key, torch.nn.Parameter(value, requires_grad=False) if isinstance(old, torch.nn.Parameter) else value)
        # Its buffers are computed, not stored.
        for key, child in owner.named_children():
            if type(child).__name__ == 'DeepseekV4RotaryEmbedding':
                setattr(owner, key, type(child)(model.config, device=device))


def _read_config(folder: pathlib.Path) -> DeepseekV4Config:
    path = folder / 'config.json'
    if not path.exists():
        raise NotFound(f'{folder}: expected config.json, found no such file')
    model_type = read_object(path).get('model_type')
    if model_type != DeepseekV4Config.model_type:
        raise Unsupported(f'{path}: expected model_type {DeepseekV4Config.model_type!r}, found {model_type!r}')
    try:
        return DeepseekV4Config.from_pretrained(folder)
    except Exception as error:  # of many kinds: what a field's value leads to in the class
        raise DataLoss(f'{path}: expected the settings of {DeepseekV4Config.__name__}, found {first_line(error)}') from error


def load(directory: Union[str, 'os.PathLike[str]'], device: Union[str, torch.device] = 'cpu', *, experts: str = NAME,
         attention: str = 'eager', dtype: torch.dtype = torch.bfloat16, max_tokens: int = 1024) -> DeepseekV4ForCausalLM:
    """A checkpoint in Hugging Face's own class: routed experts NVFP4 and ours, all else dequantised to `dtype` (but for what
    the class keeps in float32). No dense experts are ever made.

    directory   config.json and *.safetensors with the official names or Hugging Face's; experts NVFP4, one by one
    experts     "tessera"; or another of transformers' implementations ("eager", "grouped_mm"), on dequantised experts
    attention   "eager", the class's own, or "tessera": as use_attention
    max_tokens  longer inputs run through the experts so many at a time

    Raises InvalidArgument for other arguments, and NotFound, DataLoss, Unsupported for what is wrong with the folder. Draft
    blocks (mtp.*) are left out, as the class does."""
    if attention not in ('eager', NAME):
        raise InvalidArgument(f'attention: expected eager or {NAME}, found {attention!r}')
    if experts not in (NAME, 'eager') and experts not in ALL_EXPERTS_FUNCTIONS.valid_keys():
        raise InvalidArgument(f'experts: expected {NAME}, eager or another that transformers has, found {experts!r}')
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise InvalidArgument(f'dtype: expected a floating-point torch.dtype of at least 16 bits, found {dtype!r}')
    if max_tokens < 1:
        raise InvalidArgument(f'max_tokens: expected at least 1, found {max_tokens}')
    folder = pathlib.Path(directory)
    config = _read_config(folder)
    if getattr(config, 'quantization_config', None) is not None:
        del config.quantization_config  # the tensors say what they are
    config.dtype = dtype
    checkpoint, place = Checkpoint(folder), torch.device(device)
    with torch.device('meta'):
        model = DeepseekV4ForCausalLM(config)
    for name, part in _experts_of(model):
        if experts == NAME:
            del part.gate_up_proj, part.down_proj
            _place(part, _read_experts(checkpoint, name, part, place), config.num_experts_per_tok, max_tokens)
        else:
            _read_dense_experts(checkpoint, name, part, place, dtype)
    _fill(model, checkpoint, place, dtype)
    _switch(model, experts)
    if attention == NAME:
        use_attention(model)
    if (folder / 'generation_config.json').exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()
