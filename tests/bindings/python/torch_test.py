# SPDX-License-Identifier: Apache-2.0
"""tessera.torch on the CPU: operators hold PyTorch's contract (opcheck), compile without a break, and compute what the
dense weights do."""
import pytest

torch = pytest.importorskip('torch')

import tessera.torch as tt  # noqa: E402


def nvfp4(*shape, seed=0):
    """Codes, scales, tensor scales of a stack of random matrices, and their values."""
    generator = torch.Generator().manual_seed(seed)
    parts = [tt.quantize_nvfp4(torch.randn(shape[-2:], generator=generator), 'tensor') for _ in range(shape[0])]
    dense = torch.stack([tt.context().dequantize_nvfp4(*part) for part in parts])
    return (torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]), torch.cat([p[2] for p in parts])), dense


def relative(found, expected):
    return ((found.float() - expected).abs().max() / expected.abs().max()).item()


def test_linear():
    (codes, scales, tensor_scales), dense = nvfp4(1, 48, 64)
    module = tt.Linear(codes[0], scales[0], float(tensor_scales[0]))
    x = torch.randn(2, 3, 64).bfloat16()
    y = module(x)
    assert y.dtype == torch.bfloat16 and relative(y, x.float() @ dense[0].T) < 0.01
    assert torch.equal(torch.compile(module, fullgraph=True, backend='aot_eager')(x), y)
    torch.library.opcheck(torch.ops.tessera.linear, (x.reshape(6, 64), module.handle, 48))
    with pytest.raises(ValueError, match='handle'):
        torch.ops.tessera.linear(x.reshape(6, 64), 10**9, 48)
    with pytest.raises(ValueError, match='x: expected bfloat16'):
        torch.ops.tessera.linear(x.reshape(6, 64).float(), module.handle, 48)


def test_experts_in_any_order_and_skipped():
    experts, hidden, inner, tokens = 4, 64, 32, 5
    (w1, d1), (w3, d3), (w2, d2) = (nvfp4(experts, *shape, seed=s) for s, shape in
                                    ((1, (inner, hidden)), (2, (inner, hidden)), (3, (hidden, inner))))
    module = tt.Experts(w1, w3, w2, top_k=2, swiglu_limit=2.0)
    x = torch.randn(tokens, hidden).bfloat16()
    ids = torch.tensor([[1, 0], [3, 1], [2, 4], [0, 2], [4, 3]])  # 4: skip
    routing = torch.rand(tokens, 2)
    expected = torch.zeros(tokens, hidden)
    for t in range(tokens):
        for s, e in enumerate(ids[t].tolist()):
            if e == experts:
                continue
            gate, up = (d1[e] @ x[t].float()).clamp(max=2), (d3[e] @ x[t].float()).clamp(-2, 2)
            expected[t] += d2[e] @ (torch.nn.functional.silu(gate) * up * routing[t, s])
    out = module(x, ids, routing)
    assert relative(out, expected) < 0.02
    assert torch.equal(torch.compile(module, fullgraph=True, backend='aot_eager')(x, ids, routing), out)
    torch.library.opcheck(torch.ops.tessera.experts, (x, ids, routing, module.handle))


def test_quantisation():
    x = torch.randn(4, 64)
    for rule in ('rows', 'tensor'):
        torch.library.opcheck(torch.ops.tessera.quantize_nvfp4, (x, rule))
        codes, scales, globals_ = torch.ops.tessera.quantize_nvfp4(x, rule)
        assert relative(tt.context().dequantize_nvfp4(codes, scales, globals_), x) < 0.17
