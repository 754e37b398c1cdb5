#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint of random NVFP4 weights in the widths of a published model, with few layers.

    tools/make_random_checkpoint.py FOLDER --tokenizer tokenizer.json [--shape flash|pro] [--layers 3]

For whoever wants to serve and measure real widths without the weights: what it answers is noise. Three layers have each
kind of attention (window, ratio 4, ratio 128); a layer of Flash takes 3.6 GiB. Needs Python's standard library alone.
"""
import argparse
import json
import math
import pathlib
import random
import shutil
import struct
import sys

SHAPES = {
    'flash': dict(hidden_size=4096, num_attention_heads=64, q_lora_rank=1024, o_groups=8, o_lora_rank=1024,
                  index_n_heads=64, index_topk=512, n_routed_experts=256, num_experts_per_tok=6,
                  moe_intermediate_size=2048, routed_scaling_factor=1.5),
    'pro': dict(hidden_size=7168, num_attention_heads=128, q_lora_rank=1536, o_groups=16, o_lora_rank=1024,
                index_n_heads=64, index_topk=1024, n_routed_experts=384, num_experts_per_tok=6,
                moe_intermediate_size=3072, routed_scaling_factor=2.5),
}
RATIOS = [0, 4, 128]
# Values of each kind, which tensors repeat from somewhere on. A prime number: rows that repeat would have equal outputs.
POOL = 1000003


def config_of(shape, num_layers, vocab_size, num_hash_layers):
    ratios = [RATIOS[n % 3] if n < 3 else [4, 128][(n - 3) % 2] for n in range(num_layers)]
    return dict(
        SHAPES[shape], architectures=['DeepseekV4ForCausalLM'], model_type='deepseek_v4', vocab_size=vocab_size,
        num_hidden_layers=num_layers, num_key_value_heads=1, head_dim=512, qk_rope_head_dim=64, sliding_window=128,
        compress_ratios=ratios, index_head_dim=128, n_shared_experts=1, num_hash_layers=num_hash_layers,
        scoring_func='sqrtsoftplus', norm_topk_prob=True, topk_method='noaux_tc', swiglu_limit=10.0, hidden_act='silu',
        hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6, rope_theta=10000, compress_rope_theta=160000,
        rope_scaling=dict(type='yarn', factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536),
        max_position_embeddings=1 << 20, num_nextn_predict_layers=0, tie_word_embeddings=False, attention_bias=False,
        bos_token_id=0, eos_token_id=1, torch_dtype='bfloat16',
        quantization_config=dict(quant_method='modelopt', quant_algo='NVFP4', group_size=16))


class Tensors:
    """Names in the order of their bytes, and what fills them."""

    def __init__(self):
        self.all = []

    def add(self, name, dtype, shape, fill):
        self.all.append((name, dtype, shape, fill))

    def nvfp4(self, name, rows, columns):
        # Codes and scales below have a mean square near 11 and 1.3.
        self.add(name + '.weight', 'U8', [rows, columns // 2], 'codes')
        self.add(name + '.weight_scale', 'F8_E4M3', [rows, columns // 16], 'scales')
        self.add(name + '.weight_scale_2', 'F32', [], 1 / math.sqrt(14 * columns))

    def bf16(self, name, rows, columns):
        self.add(name, 'BF16', [rows, columns], 'bf16')

    def compressor(self, name, ratio, head_dim, hidden):
        width = (2 if ratio == 4 else 1) * head_dim
        self.add(name + '.ape', 'F32', [ratio, width], 0.0)
        self.add(name + '.norm.weight', 'F32', [head_dim], 1.0)
        self.bf16(name + '.wgate.weight', width, hidden)
        self.bf16(name + '.wkv.weight', width, hidden)


def add_attention(tensors, at, c, ratio):
    hidden, heads, rank = c['hidden_size'], c['num_attention_heads'], c['q_lora_rank']
    tensors.add(at + 'attn_sink', 'F32', [heads], 0.0)
    tensors.add(at + 'kv_norm.weight', 'F32', [512], 1.0)
    tensors.add(at + 'q_norm.weight', 'F32', [rank], 1.0)
    tensors.nvfp4(at + 'wq_a', rank, hidden)
    tensors.nvfp4(at + 'wq_b', heads * 512, rank)
    tensors.nvfp4(at + 'wkv', 512, hidden)
    tensors.nvfp4(at + 'wo_a', c['o_groups'] * c['o_lora_rank'], heads * 512 // c['o_groups'])
    tensors.nvfp4(at + 'wo_b', hidden, c['o_groups'] * c['o_lora_rank'])
    if ratio == 0:
        return
    tensors.compressor(at + 'compressor', ratio, 512, hidden)
    if ratio == 4:
        tensors.compressor(at + 'indexer.compressor', ratio, 128, hidden)
        tensors.bf16(at + 'indexer.weights_proj.weight', c['index_n_heads'], hidden)
        tensors.nvfp4(at + 'indexer.wq_b', c['index_n_heads'] * 128, rank)


def tensors_of(c):
    tensors = Tensors()
    hidden, inner, vocab = c['hidden_size'], c['moe_intermediate_size'], c['vocab_size']
    mixed = c['hc_mult'] * hidden
    tensors.bf16('embed.weight', vocab, hidden)
    tensors.bf16('head.weight', vocab, hidden)
    tensors.add('norm.weight', 'F32', [hidden], 1.0)
    for part, count, scales in [('hc_head', 4, 1)]:
        tensors.add(part + '_fn', 'F32', [count, mixed], 'small')
        tensors.add(part + '_base', 'F32', [count], 0.0)
        tensors.add(part + '_scale', 'F32', [scales], 1.0)
    for layer, ratio in enumerate(c['compress_ratios']):
        at = f'layers.{layer}.'
        for part in ('attn', 'ffn'):
            tensors.add(at + part + '_norm.weight', 'F32', [hidden], 1.0)
            tensors.add(at + f'hc_{part}_fn', 'F32', [24, mixed], 'small')
            tensors.add(at + f'hc_{part}_base', 'F32', [24], 0.0)
            tensors.add(at + f'hc_{part}_scale', 'F32', [3], 1.0)
        add_attention(tensors, at + 'attn.', c, ratio)
        tensors.bf16(at + 'ffn.gate.weight', c['n_routed_experts'], hidden)
        if layer < c['num_hash_layers']:
            tensors.add(at + 'ffn.gate.tid2eid', 'I64', [vocab, c['num_experts_per_tok']], 'experts')
        else:
            tensors.add(at + 'ffn.gate.bias', 'F32', [c['n_routed_experts']], 0.0)
        experts = [f'experts.{n}' for n in range(c['n_routed_experts'])] + ['shared_experts']
        for expert in experts:
            tensors.nvfp4(f'{at}ffn.{expert}.w1', inner, hidden)
            tensors.nvfp4(f'{at}ffn.{expert}.w3', inner, hidden)
            tensors.nvfp4(f'{at}ffn.{expert}.w2', hidden, inner)
    return tensors.all


SIZES = {'U8': 1, 'F8_E4M3': 1, 'BF16': 2, 'F32': 4, 'I64': 8}


def pools(rng, c):
    """Bytes from which tensors are filled, by kind."""
    def bf16(value):
        return struct.pack('<f', value)[2:]
    normal = [rng.gauss(0, 1) for _ in range(POOL)]
    spread = 1 / math.sqrt(c['hidden_size'])
    return {
        'codes': rng.randbytes(POOL),
        # 0.5 to 2: exponents 6 to 8 of E4M3, any mantissa.
        'scales': bytes(rng.randrange(6 << 3, 8 << 3) for _ in range(POOL)),
        'bf16': b''.join(bf16(value * spread) for value in normal),
        'small': b''.join(struct.pack('<f', value * 0.1 * spread) for value in normal),
    }


def write_tensor(file, kind, count, size, rng, pool, c):
    if isinstance(kind, float):
        file.write(struct.pack('<f', kind) * count)
    elif kind == 'experts':
        each = c['num_experts_per_tok']
        for _ in range(count // each):
            file.write(struct.pack(f'<{each}q', *rng.sample(range(c['n_routed_experts']), each)))
    else:
        block, left = pool[kind], count * size
        begin = rng.randrange(len(block) // size) * size
        while left > 0:
            taken = min(left, len(block) - begin)
            file.write(memoryview(block)[begin:begin + taken])
            left, begin = left - taken, 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=pathlib.Path)
    parser.add_argument('--tokenizer', type=pathlib.Path, required=True, help='tokenizer.json to put beside the weights')
    parser.add_argument('--shape', choices=SHAPES, default='flash')
    parser.add_argument('--layers', type=int, default=3)
    parser.add_argument('--vocab', type=int, default=129280)
    parser.add_argument('--seed', type=int, default=1)
    arguments = parser.parse_args()
    if arguments.folder.exists():
        sys.exit(f'{arguments.folder}: is there already')
    if not 1 <= arguments.layers <= 61:
        sys.exit(f'--layers: expected 1 to 61, found {arguments.layers}')
    c = config_of(arguments.shape, arguments.layers, arguments.vocab, num_hash_layers=min(arguments.layers - 1, 1))
    rng = random.Random(arguments.seed)
    pool = pools(rng, c)
    arguments.folder.mkdir(parents=True)
    (arguments.folder / 'config.json').write_text(json.dumps(c, indent=1) + '\n')
    shutil.copy(arguments.tokenizer, arguments.folder / 'tokenizer.json')
    # A file a layer, and one of what no layer has.
    files, index, total = {}, {}, 0
    for tensor in tensors_of(c):
        name = tensor[0]
        layer = name.split('.')[1] if name.startswith('layers.') else 'rest'
        files.setdefault(f'model-{layer}.safetensors', []).append(tensor)
    for file_name, tensors in files.items():
        header, at = {}, 0
        for name, dtype, shape, _ in tensors:
            size = math.prod(shape) * SIZES[dtype]
            header[name] = dict(dtype=dtype, shape=shape, data_offsets=[at, at + size])
            index[name] = file_name
            at += size
        total += at
        text = json.dumps(header).encode()
        text += b' ' * (-len(text) % 8)
        with open(arguments.folder / file_name, 'wb', buffering=1 << 24) as file:
            file.write(struct.pack('<Q', len(text)) + text)
            for _, dtype, shape, kind in tensors:
                write_tensor(file, kind, math.prod(shape), SIZES[dtype], rng, pool, c)
        print(f'{file_name}: {at / 2**30:.2f} GiB', file=sys.stderr)
    (arguments.folder / 'model.safetensors.index.json').write_text(
        json.dumps({'metadata': {'total_size': total}, 'weight_map': index}) + '\n')


if __name__ == '__main__':
    main()
