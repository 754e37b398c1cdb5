# SPDX-License-Identifier: Apache-2.0
"""Structs of tessera.h for Python's ctypes, for those who call libtessera.so from there."""
import ctypes as c


class Weight(c.Structure):
    _fields_ = [('format', c.c_int32), ('rows', c.c_int64), ('cols', c.c_int64), ('data', c.c_void_p),
                ('block_scales', c.c_void_p), ('tensor_scale', c.c_float)]


class LinearDesc(c.Structure):
    _fields_ = [('inputs', c.c_int64), ('out', c.c_int64), ('groups', c.c_int64), ('input', c.c_int32),
                ('activation', c.c_int32), ('output', c.c_int32)]


class MoeDesc(c.Structure):
    _fields_ = [(n, c.c_int64) for n in ('hidden', 'inner', 'num_experts', 'first_expert', 'num_local', 'top_k')] + [
        ('input', c.c_int32), ('shared_input', c.c_int32), ('activation', c.c_int32), ('swiglu_limit', c.c_float),
        ('routing_scale', c.c_float), ('is_normalized', c.c_int32)]


class MoeWeights(c.Structure):
    _fields_ = [('w1', c.POINTER(Weight)), ('w3', c.POINTER(Weight)), ('w2', c.POINTER(Weight)), ('router', c.POINTER(Weight)),
                ('router_bias', c.c_void_p), ('hash_table', c.c_void_p), ('shared_w1', c.POINTER(Weight)),
                ('shared_w3', c.POINTER(Weight)), ('shared_w2', c.POINTER(Weight))]
