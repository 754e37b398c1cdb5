# SPDX-License-Identifier: Apache-2.0
"""tessera.torch and tessera.mega_moe on each device that is there: operators hold PyTorch's contract (opcheck), compile without
a break, are captured into CUDA graphs, and compute what the dense weights do.

    python -m pytest -q tests/bindings/python/torch_test.py -k cuda      # what a GPU has to show"""
import copy
import functools
import io
import sys
import threading

import pytest

torch = pytest.importorskip('torch')
pytest.importorskip('torch._dynamo.testing')

import tessera  # noqa: E402
import tessera.mega_moe as mega_moe  # noqa: E402
import tessera.torch as tt  # noqa: E402

DEVICES = ['cpu', pytest.param('cuda', marks=pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU that PyTorch sees'))]
on_each_device = pytest.mark.parametrize('device', DEVICES)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def nvfp4(*shape, seed=0):
    """Codes, scales, tensor scales of a stack of random matrices, and their values, on the CPU."""
    parts = [tt.quantize_nvfp4(normal(*shape[-2:], seed=100 * seed + i), 'tensor') for i in range(shape[0])]
    dense = torch.stack([tt.context().dequantize_nvfp4(*part) for part in parts])
    return (torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]), torch.cat([p[2] for p in parts])), dense


def to(parts, device):
    return tuple(part.to(device) for part in parts)


def relative(found, expected):
    """The contract's measure of a BF16 output (docs/contracts/numerics.md, section 5): at most 4e-3."""
    found = found.cpu().float()
    return ((found - expected).norm() / expected.norm()).item()


EXPERTS, HIDDEN, INNER, TOKENS, LIMIT = 4, 128, 32, 5, 2.0
IDS = torch.tensor([[1, 0], [3, 1], [2, 4], [0, 2], [-1, 3]])  # 4 and -1: no expert


@functools.cache
def mixture():
    """Weights, inputs and the sum that they give."""
    (w1, d1), (w3, d3), (w2, d2) = (nvfp4(EXPERTS, *shape, seed=s) for s, shape in
                                    ((1, (INNER, HIDDEN)), (2, (INNER, HIDDEN)), (3, (HIDDEN, INNER))))
    # By powers of two, so that E4M3 by 32 holds some of it and BF16 all.
    x = normal(TOKENS, HIDDEN, seed=4).to(torch.float8_e4m3fn).float() * 2.0 ** (torch.arange(HIDDEN) // 32 - 2)
    routing = torch.rand(TOKENS, 2, generator=torch.Generator().manual_seed(5))
    expected = torch.zeros(TOKENS, HIDDEN)
    for t in range(TOKENS):
        for s, e in enumerate(IDS[t].tolist()):
            if not 0 <= e < EXPERTS:
                continue
            gate, up = (d1[e] @ x[t]).clamp(max=LIMIT), (d3[e] @ x[t]).clamp(-LIMIT, LIMIT)
            expected[t] += d2[e] @ (torch.nn.functional.silu(gate) * up * routing[t, s])
    return w1, w3, w2, x, routing, expected


def linear_case(device):
    (codes, scales, tensor_scales), dense = nvfp4(1, 48, 64)
    module = tt.Linear(codes[0].to(device), scales[0].to(device), float(tensor_scales[0]))
    x = normal(6, 64, seed=9).bfloat16()
    inputs = [x.to(device)]
    return module, inputs, x.float() @ dense[0].T, torch.ops.tessera.linear, (*inputs, module.tessera_handle, 48)


def experts_case(device):
    w1, w3, w2, x, routing, expected = mixture()
    module = tt.Experts(*(to(w, device) for w in (w1, w3, w2)), top_k=2, swiglu_limit=LIMIT)
    inputs = list(to((x.bfloat16(), IDS, routing), device))
    return module, inputs, expected, torch.ops.tessera.experts, (*inputs, module.tessera_handle)


def attention_case(device):
    heads, width, window, slots, entries = 3, 128, 4, 8, 6
    module = tt.Attention(heads=heads, head_dim=width, window=window, rope_dim=64, max_tokens=2)
    keys, more = normal(slots, width, seed=1).bfloat16(), normal(entries, width, seed=2).bfloat16()
    caches = [module.new_cache(rows.shape[0], device) for rows in (keys, more)]
    for rows, cache in zip((keys, more), caches):
        module.store(rows.to(device), torch.arange(rows.shape[0], device=device), cache)
    q, sink = normal(2, heads, width, seed=3).bfloat16(), normal(heads, seed=4)
    positions, counts = torch.tensor([5, 6]), torch.tensor([2, 3], dtype=torch.int32)
    selected = torch.tensor([[0, 4, 0], [1, 2, 5]], dtype=torch.int32)
    expected = torch.empty(2, heads, width)
    for t in range(2):
        seen = torch.cat([keys[positions[t] - window + 1:positions[t] + 1], more[selected[t, :counts[t]].long()]]).float()
        weights = torch.softmax(torch.cat([q[t].float() @ seen.T * width**-0.5, sink[:, None]], 1), 1)[:, :-1]
        expected[t] = weights @ seen
    inputs = [*to((q, positions), device), caches[0], sink.to(device), caches[1], *to((counts, selected), device)]
    return module, inputs, expected, torch.ops.tessera.attention, (*inputs[:4], module.tessera_handle, *inputs[4:])


def store_case(device):
    module = tt.Attention(heads=1, head_dim=64, window=4, max_tokens=2)
    rows, slots = normal(3, 64, seed=6).bfloat16(), torch.tensor([4, -1, 0])
    inputs = [rows.to(device), slots.to(device), module.new_cache(5, device)]

    def call(rows, slots, cache):
        module.store(rows, slots, cache)
        return cache.view(torch.bfloat16)

    expected = torch.zeros(5, 64)
    expected[4], expected[0] = rows[0].float(), rows[2].float()
    return call, inputs, expected, torch.ops.tessera.attention_store, (*inputs, module.tessera_handle)


def quantize_case(device):
    x = normal(4, 64, seed=7)
    codes, scales, globals_ = tt.quantize_nvfp4(x, 'rows')
    return (lambda x: torch.ops.tessera.quantize_nvfp4(x, 'rows')[0]), [x.to(device)], codes.float(), \
        torch.ops.tessera.quantize_nvfp4, (x.to(device), 'rows')


def mega_case(device, mma_type='bf16xnvfp4'):
    w1, w3, w2, x, routing, expected = mixture()
    gate_up = (torch.cat([w1[0], w3[0]], 1), torch.cat([w1[1], w3[1]], 1), torch.stack([w1[2], w3[2]], 1))
    l1, l2 = mega_moe.transform_weights(to(gate_up, device), to(w2, device))
    buffer = mega_moe.get_symmetric_buffer(None, EXPERTS, 8, 2, HIDDEN, INNER, mma_type, device=device)
    if buffer.x_sf is None:
        x = x.bfloat16()
    else:
        exponents = (torch.arange(HIDDEN // 32) - 2 + 127).to(torch.uint8).expand(TOKENS, -1).contiguous()
        x = (x / 2.0 ** (torch.arange(HIDDEN) // 32 - 2)).to(torch.float8_e4m3fn)
        buffer.x_sf[:TOKENS].copy_(exponents.view(torch.int32))

    def call(x, ids, routing):
        buffer.x[:TOKENS].copy_(x)
        buffer.topk_idx[:TOKENS].copy_(ids)
        buffer.topk_weights[:TOKENS].copy_(routing)
        y = torch.empty((TOKENS, HIDDEN), dtype=torch.bfloat16, device=device)
        mega_moe.run(y, l1, l2, buffer, activation_clamp=LIMIT)
        return y

    inputs = list(to((x, IDS, routing), device))
    call(*inputs)  # fills the buffer for opcheck
    y = torch.empty((TOKENS, HIDDEN), dtype=torch.bfloat16, device=device)
    is_fp8 = buffer.x_sf is not None
    arguments = (y, buffer.x[:TOKENS].view(torch.uint8) if is_fp8 else buffer.x[:TOKENS], buffer.x_sf[:TOKENS] if is_fp8 else None,
                 buffer.topk_idx[:TOKENS], buffer.topk_weights[:TOKENS], l1.handle, 8, LIMIT)
    return call, inputs, expected, torch.ops.tessera.mega_moe, arguments


CASES = {'linear': linear_case, 'experts': experts_case, 'attention': attention_case, 'attention_store': store_case,
         'quantize_nvfp4': quantize_case, 'mega_moe': mega_case, 'mega_moe_fp8': functools.partial(mega_case, mma_type='fp8xnvfp4')}
for_each_op = pytest.mark.parametrize('name', CASES)


@on_each_device
@for_each_op
def test_values(name, device):
    call, inputs, expected, _, _ = CASES[name](device)
    found = call(*inputs)
    assert found.device.type == device and relative(found, expected) <= 4e-3
    assert torch.equal(call(*inputs), found)


@on_each_device
@for_each_op
def test_opcheck(name, device):
    *_, op, arguments = CASES[name](device)
    torch.library.opcheck(op, arguments)


@on_each_device
@for_each_op
def test_compiles_whole(name, device):
    call, inputs, *_ = CASES[name](device)
    expected = call(*inputs)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(call, fullgraph=True, backend='aot_eager')(*inputs), expected)


@on_each_device
def test_the_inductor_compiles_too(device):
    """One op, since the inductor starts a C++ or Triton compiler."""
    call, inputs, *_ = mega_case(device)
    expected = call(*inputs)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(call, fullgraph=True)(*inputs), expected)


@pytest.mark.parametrize('device', DEVICES[1:])
@for_each_op
def test_a_graph_replays_on_new_inputs(name, device):
    call, inputs, *_ = CASES[name](device)
    changed = [inputs[0].view(torch.uint8).flip(0).view(inputs[0].dtype), *inputs[1:]]
    first, second = call(*inputs).clone(), call(*changed).clone()
    held = [tensor.clone() for tensor in inputs]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = call(*held)
    for new, expected in ((changed, second), (inputs, first), (changed, second)):
        held[0].copy_(new[0])
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


@pytest.mark.parametrize('device', DEVICES[1:])
def test_a_handles_first_call_is_not_captured(device):
    module, inputs, *_ = linear_case(device)
    with pytest.raises(tessera.InvalidArgument, match='before the graph is captured'):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            module(*inputs)


@pytest.mark.parametrize('device', DEVICES[1:])
def test_streams_are_waited_for(device):
    module, (x,), expected, *_ = linear_case(device)
    module(x)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        late = torch.zeros_like(x)
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        y = module(late)
        late.zero_()
    side.synchronize()
    assert relative(y, expected) <= 4e-3


@on_each_device
def test_a_tokens_bits_do_not_depend_on_the_others(device):
    module, (x, ids, routing), *_ = experts_case(device)
    whole = module(x, ids, routing)
    for t in range(TOKENS):
        assert torch.equal(module(x[t:t + 1], ids[t:t + 1].flip(1), routing[t:t + 1].flip(1)), whole[t:t + 1])


@on_each_device
def test_longer_inputs_run_in_parts_to_the_same_bits(device):
    (codes, scales, tensor_scales), _ = nvfp4(1, 48, 64)
    w1, w3, w2, *_ = mixture()
    linears = [tt.Linear(codes[0].to(device), scales[0].to(device), float(tensor_scales[0]), max_tokens=n) for n in (8, 64)]
    x = normal(21, 64, seed=11).bfloat16().to(device)
    assert torch.equal(linears[0](x), linears[1](x))
    moes = [tt.Experts(*(to(w, device) for w in (w1, w3, w2)), top_k=2, max_tokens=n) for n in (8, 64)]
    x, ids = normal(21, HIDDEN, seed=12).bfloat16().to(device), torch.arange(42, device=device).view(21, 2) * 3 % 5
    routing = torch.rand(21, 2, generator=torch.Generator().manual_seed(13)).to(device)
    assert torch.equal(moes[0](x, ids, routing), moes[1](x, ids, routing))


def test_mega_moe_counts_tokens():
    w1, w3, w2, *_ = mixture()
    l1, l2 = mega_moe.transform_weights((torch.cat([w1[0], w3[0]], 1), torch.cat([w1[1], w3[1]], 1), 1.0), w2)
    buffer = mega_moe.get_symmetric_buffer(None, EXPERTS, 8, 2, HIDDEN, INNER, device='cpu')
    buffer.topk_idx[:TOKENS].copy_(IDS)
    stats = torch.tensor([10, 0, 0, 0], dtype=torch.int32)
    mega_moe.run(torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16), l1, l2, buffer, stats)
    assert stats.tolist() == [12, 2, 2, 2]


def test_arguments_that_are_refused():
    linear, (x,), *_ = linear_case('cpu')
    experts, (tokens, ids, routing), *_ = experts_case('cpu')
    attention, inputs, *_ = attention_case('cpu')
    w1, w3, w2, *_ = mixture()
    l1, l2 = mega_moe.transform_weights((torch.cat([w1[0], w3[0]], 1), torch.cat([w1[1], w3[1]], 1), 1.0), w2)
    others = mega_moe.transform_weights((torch.cat([w1[0], w3[0]], 1), torch.cat([w1[1], w3[1]], 1), 1.0), w2)
    buffer = mega_moe.get_symmetric_buffer(None, EXPERTS, 8, 2, HIDDEN, INNER, device='cpu')
    y, untouched = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16), torch.full((TOKENS, HIDDEN), 7.0).bfloat16()
    destroyed = mega_moe.get_symmetric_buffer(None, EXPERTS, 8, 2, HIDDEN, INNER, device='cpu')
    destroyed.destroy()

    for call, words in (
        (lambda: torch.ops.tessera.linear(x, 10**9, 48), 'handle: expected one whose module lives, found 1000000000'),
        (lambda: linear(x.float()), 'x: expected bfloat16.*found float32'),
        (lambda: torch.ops.tessera.linear(x[0], linear.tessera_handle, 48), r'x: expected shape \[any, any\], found \[64\]'),
        (lambda: experts(tokens, ids[:3], routing), r'experts: expected shape \[5, any\], found \[3, 2\]'),
        (lambda: experts(tokens, ids, routing[:, :1]), r'routing: expected shape \[5, 2\], found \[5, 1\]'),
        (lambda: experts(tokens, ids.float(), routing), 'experts: expected integers, found torch.float32'),
        (lambda: attention(*inputs[:4], None, inputs[5]), 'entry_cache: expected an array beside num_entries'),
        (lambda: attention(*inputs[:5], inputs[5] + 9, inputs[6]), r'num_entries\[0\]: expected 0 to 3, found 11'),
        (lambda: attention(*inputs[:6], inputs[6] + 4), r'selected\[0\]\[1\]: expected 0 to 5, found 8'),
        (lambda: tt.quantize_nvfp4(normal(2, 24), 'rows'), 'x: expected columns in multiples of 16, found 24'),
        (lambda: tt.quantize_nvfp4(normal(2, 32), 'row'), "rule: expected rows, tensor or four-over-six, found 'row'"),
        (lambda: tt.quantize_nvfp4(torch.empty(2, 24, device='meta'), 'rows'), 'x: expected columns in multiples of 16, found 24'),
        (lambda: linear(torch.tensor(1.0)), r'x: expected shape \[..., in\], found \[\]'),
        (lambda: torch.ops.tessera.experts(tokens, ids, routing, linear.tessera_handle), r'handle: expected one for tessera::experts.*tessera::linear'),
        (lambda: torch.ops.tessera.linear(x, l1.handle, 48), r'handle: expected one for tessera::linear.*tessera::mega_moe'),
        (lambda: tt.Linear(linear.codes.float(), linear.block_scales, 1.0), 'codes: expected NVFP4 codes.*found torch.float32'),
        (lambda: tt.Linear(linear.codes, linear.block_scales[:3], 1.0), r'block_scales: expected shape \[48, 4\], found \[3, 4\]'),
        (lambda: tt.Experts(w1, w3, (w2[0].float(), *w2[1:]), top_k=2), r'w2\[0\]: expected NVFP4 codes.*found torch.float32'),
        (lambda: tt.Experts(w1, w3, w2, top_k=2, max_tokens=0), 'max_tokens: expected at least 1, found 0'),
        (lambda: attention(inputs[0], inputs[1].int(), *inputs[2:]), 'positions: expected int64, found int32'),
        (lambda: tt.context('meta'), 'device: expected cpu or cuda, found meta'),
        (lambda: mega_moe.get_symmetric_buffer(None, 4, 8, 2, 128, 32, 'fp8xfp4'), "mma_type: expected one of .*found 'fp8xfp4'"),
        (lambda: mega_moe.get_symmetric_buffer(None, 4, 8, 5, 128, 32), 'num_topk: expected 1 to 4, found 5'),
        (lambda: mega_moe.get_symmetric_buffer(None, 4, 8, 2, 120, 32), 'hidden: expected a multiple of 16, found 120'),
        (lambda: mega_moe.get_symmetric_buffer(None, 4, 8, 2, 64, 32, 'fp8xnvfp4'), 'hidden: expected a multiple of 128, found 64'),
        (lambda: mega_moe.transform_weights(w1[0], w2), r'l1_weights: expected NVFP4 .*, found Tensor'),
        (lambda: mega_moe.transform_weights((w1[0], w1[1].float(), 1.0), w2), r'l1_weights\[1\]: expected E4M3.*found torch.float32'),
        (lambda: mega_moe.transform_weights(w1, w2), r'l2_weights\[0\]: expected shape \[4, 128, 8\], found \[4, 128, 16\]'),
        (lambda: mega_moe.run(y, l1, others[1], buffer), 'l2_weights: expected what transform_weights returned with l1_weights'),
        (lambda: mega_moe.run(y, l2, l1, buffer), 'l1_weights: expected those of transform_weights, in its order, found l2_weights'),
        (lambda: mega_moe.run(y, l1, l2, destroyed), 'sym_buffer: expected one that lives, found a destroyed one'),
        (lambda: mega_moe.run(y, l1, l2, buffer, activation_clamp=float('nan')), 'activation_clamp: expected None or.*found nan'),
        (lambda: mega_moe.run(y, l1, l2, buffer, activation_clamp=-1.0), 'activation_clamp: expected None or.*found -1.0'),
        (lambda: mega_moe.run(untouched, l1, l2, buffer, torch.zeros(3).int()), r'recv_stats: expected shape \[4\], found \[3\]'),
        (lambda: mega_moe.run(untouched, l1, l2, buffer, torch.zeros(4)), r'recv_stats: expected torch.int32, found torch.float32'),
        (lambda: mega_moe.transform_weights((w1[0][:, 1:], w1[1][:, 1:], 1.0), w2), r'l1_weights\[0\]: expected an even number of rows.*31'),
        (lambda: mega_moe.run(y.float(), l1, l2, buffer), 'y: expected torch.bfloat16, found torch.float32'),
        (lambda: mega_moe.run(y.to('meta'), l1, l2, buffer), 'y: expected cpu, found meta'),
        (lambda: mega_moe.run(y.repeat(1, 2)[:, ::2], l1, l2, buffer), r'y: expected a dense tensor .*found strides \(256, 2\)'),
        (lambda: mega_moe.run(odd(y), l1, l2, buffer), 'y: expected a dense tensor aligned to 16 bytes'),
        (lambda: mega_moe.run(y[:, :64], l1, l2, buffer), r'y: expected shape \[any, 128\], found \[5, 64\]'),
        (lambda: mega_moe.run(torch.cat([y, y]), l1, l2, buffer), 'y: expected at most 8 tokens, found 10'),
        (lambda: mega_moe.run(y, l1, l2, buffer, activation='gelu'), "activation: expected 'swiglu', found 'gelu'"),
    ):
        with pytest.raises(tessera.Error, match=words) as caught:
            call()
        assert '\n' not in str(caught.value)
    assert (untouched == 7).all()


@on_each_device
def test_an_id_that_does_not_fit_is_no_expert(device):
    module, (x, ids, routing), *_ = experts_case(device)
    skipped = torch.where(ids == 0, EXPERTS, ids)
    for far in (2**32, 2**31, -2**31 - 1, 2**63 - 1, -2**32):
        assert torch.equal(module(x, torch.where(ids == 0, far, ids), routing), module(x, skipped, routing))
    call, (x, ids, routing), *_ = mega_case(device)
    assert torch.equal(call(x, torch.where(ids == 0, 2**32, ids), routing), call(x, torch.where(ids == 0, -1, ids), routing))


@on_each_device
def test_new_weights_are_packed_anew(device):
    (codes, scales, globals_), _ = nvfp4(2, 48, 64)
    old, new = (tt.Linear(codes[i].to(device, copy=True), scales[i].to(device, copy=True), float(globals_[0])) for i in range(2))
    x = normal(3, 64, seed=5).bfloat16().to(device)
    first, second = old(x), new(x)
    before = codes[0].clone(), scales[0].clone()
    assert not torch.equal(first, second)
    old.load_state_dict(new.state_dict())
    assert torch.equal(old(x), second)
    old.codes, old.block_scales = codes[0].to(device), scales[0].to(device)
    assert torch.equal(old(x), first)
    old.codes.copy_(new.codes)
    old.block_scales.copy_(new.block_scales)
    assert torch.equal(old(x), second)
    old.codes.data.copy_(before[0])  # PyTorch does not count it
    old.block_scales.data.copy_(before[1])
    old.repack()
    assert torch.equal(old(x), first)


def test_what_was_made_on_a_device_that_weights_left_goes():
    class Context:
        def __init__(self, device):
            self.device = device

    weights, made = [torch.zeros(4)], []
    handle = tt.Handle('linear', lambda context: made.append(context.device) or context.device, 8, weights=lambda: weights)
    assert handle.at(Context('cpu')) == handle.at(Context('cpu')) == 'cpu' and made == ['cpu']
    weights[0] = torch.ones(4)
    assert handle.at(Context('cpu')) == 'cpu' and made == ['cpu', 'cpu'] and list(handle._made) == ['cpu']
    handle._made['elsewhere'] = handle._made.pop('cpu')
    assert handle.at(Context('cpu')) == 'cpu' and list(handle._made) == ['cpu']


def odd(x):
    """The same values at an address that no alignment holds for but the element's own."""
    base = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    base[1:] = x.reshape(-1)
    assert base[1:].data_ptr() % 16
    return base[1:].view(x.shape)


@on_each_device
@pytest.mark.parametrize('name', ['linear', 'experts', 'attention'])
def test_tensors_at_odd_addresses(name, device):
    module, inputs, *_ = CASES[name](device)
    expected = module(*inputs)
    assert torch.equal(module(*(odd(x) for x in inputs)), expected)
    for key, buffer in list(module.named_buffers()):
        setattr(module, key, odd(buffer))
    assert torch.equal(module(*inputs), expected)
    codes, *_ = tt.quantize_nvfp4(odd(normal(4, 64, seed=7).to(device)), 'rows')
    assert torch.equal(codes, tt.quantize_nvfp4(normal(4, 64, seed=7).to(device), 'rows')[0])


@pytest.mark.parametrize('is_used', [False, True])
@pytest.mark.parametrize('name', ['linear', 'experts', 'attention'])
def test_copies_stand_alone(name, is_used):
    module, inputs, *_ = CASES[name]('cpu')
    y = module(*inputs) if is_used else None
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    copies = [copy.deepcopy(module), torch.load(saved, weights_only=False)]
    assert len({m.tessera_handle for m in (module, *copies)}) == 3
    y = module(*inputs) if y is None else y
    for copied in copies:
        assert torch.equal(copied(*inputs), y)
    for buffer in copies[0].buffers():
        buffer.zero_()
    assert name == 'attention' or not copies[0](*inputs).any()
    assert torch.equal(module(*inputs), y)


def test_one_set_of_packed_weights_is_kept():
    w1, w3, w2, *_ = mixture()
    l1, l2 = mega_moe.transform_weights((torch.cat([w1[0], w3[0]], 1), torch.cat([w1[1], w3[1]], 1), 1.0), w2)
    y = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    for tokens, clamp in ((8, None), (8, 1.0), (16, 1.0)):
        mega_moe.run(y, l1, l2, mega_moe.get_symmetric_buffer(None, EXPERTS, tokens, 2, HIDDEN, INNER, device='cpu'),
                     activation_clamp=clamp)
    assert len(l1._handle._made) == 1


def test_threads_share_what_is_made(monkeypatch):
    monkeypatch.setattr(tt, '_contexts', {})
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    made, contexts, barrier = [], [], threading.Barrier(8)
    handle = tt.Handle('linear', lambda context: made.append(context) or object(), 8)

    def work():
        barrier.wait()
        contexts.append(tt.context('cpu'))
        handle.at(contexts[-1])

    threads = [threading.Thread(target=work) for _ in range(8)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(contexts) == 8 and len({id(c) for c in contexts}) == 1 and len(made) == 1


@on_each_device
@pytest.mark.parametrize('name', ['linear', 'experts'])
def test_many_modules_and_numbers_of_tokens_recompile_little(name, device):
    """TorchDynamo stops at the eighth time that it compiles the same code: neither handles nor sizes may make it do so."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend('aot_eager')
    for _ in range(12):  # as a model's layers, compiled one by one
        module, inputs, *_ = CASES[name](device)
        assert torch.equal(torch.compile(module, backend=counter, fullgraph=True)(*inputs), module(*inputs))
    assert counter.frame_count <= 2
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for num_tokens in range(2, 14):
        more = [torch.cat([x] * 5)[:num_tokens] for x in inputs]
        assert torch.equal(compiled(*more), module(*more))
    assert counter.frame_count <= 4
