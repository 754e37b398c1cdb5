#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the plug-ins for vLLM and SGLang where they and the package are installed. It tells what it looked at, and what is not
installed; exit code 1 where something is not as the plug-ins expect it, 3 where neither is installed.

usage: tools/verify_plugins.py [--model DIR]

--model DIR  also loads an NVFP4 checkpoint into vLLM and SGLang with quantization "tessera", generates, and sees that our kernels ran"""
import argparse
import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys


def check(what, is_right, found=''):
    print(f'{"ok  " if is_right else "FAIL"} {what}{f": found {found}" if not is_right and found != "" else ""}')
    return 0 if is_right else 1


def entry_point(group):
    found = [point for point in importlib.metadata.entry_points(group=group) if point.name == 'tessera']
    return check(f'one entry point "tessera" in {group}', len(found) == 1, len(found))


def parameters(function):
    return list(inspect.signature(function).parameters)


def signatures(engine, pairs):
    """Of pairs (class of ours, its base): nothing is left abstract, and every method that the base has takes what the base's does."""
    faults = 0
    for cls, base in pairs:
        abstract = getattr(cls, '__abstractmethods__', frozenset())
        faults += check(f'{cls.__name__} leaves nothing abstract', not abstract, ', '.join(abstract))
        for name, function in inspect.getmembers(cls, inspect.isfunction):
            of_base = getattr(base, name, None)
            if name.startswith('_') or function is of_base or not inspect.isfunction(of_base):
                continue
            theirs, mine = parameters(of_base), parameters(function)
            takes_all = any(p.kind == p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
            lacking = [p for p in theirs if p not in mine and p not in ('args', 'kwargs', 'weight_args') and not takes_all]
            faults += check(f'{cls.__name__}.{name} takes what {engine} gives', not lacking, f'no {", ".join(lacking)}')
    return faults


def has_methods(engine, get_quantization_config, names):
    faults = 0
    for name in names:
        try:
            get_quantization_config(name)
            faults += check(f'{engine} has {name} for the rest', True)
        except (ValueError, KeyError) as error:
            faults += check(f'{engine} has {name} for the rest', False, error)
    return faults


def our_kernels_ran():
    import tessera.torch as tessera_torch
    return sum(len(handle._made) for handle in tessera_torch._handles.values()) > 0


def verify_vllm(model):
    print(f'vLLM {importlib.metadata.version("vllm")}')
    faults = entry_point('vllm.general_plugins')
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    import tessera.vllm as ours
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
    from vllm.model_executor.layers.linear import WEIGHT_LOADER_V2_SUPPORTED, LinearMethodBase
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    faults += check('quantization "tessera" is registered', get_quantization_config('tessera') is ours.TesseraConfig)
    faults += check('its linear method loads by the second loader', 'TesseraLinearMethod' in WEIGHT_LOADER_V2_SUPPORTED)
    faults += signatures('vLLM', ((ours.TesseraConfig, QuantizationConfig), (ours.TesseraLinearMethod, LinearMethodBase),
                                  (ours.TesseraMoEMethod, FusedMoEMethodBase)))
    faults += has_methods('vLLM', get_quantization_config, ('modelopt_fp4', 'modelopt_mixed', 'deepseek_v4_fp8'))
    if model is not None:
        from vllm import LLM, SamplingParams
        llm = LLM(model=model, quantization='tessera', enforce_eager=True, max_model_len=512)
        text = llm.generate(['Compute 257-7.'], SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].text
        print(f'     it said {text!r}')
        # In this process where VLLM_ENABLE_V1_MULTIPROCESSING=0; else the worker's handles are out of sight.
        faults += check('our kernels ran (set VLLM_ENABLE_V1_MULTIPROCESSING=0)', our_kernels_ran())
    return faults


def verify_sglang(model):
    print(f'SGLang {importlib.metadata.version("sglang")}')
    faults = entry_point('sglang.serve_backends') + entry_point('sglang.srt.plugins')
    from sglang.cli.serve_backends import SERVE_BACKEND_API_VERSION, ServeBackendRegistry
    faults += check('the interface has version 1', SERVE_BACKEND_API_VERSION == 1, SERVE_BACKEND_API_VERSION)
    backend = ServeBackendRegistry({}).get('tessera').backend
    faults += check('it is explicit', backend.detect is None)
    done = subprocess.run(['sglang', 'serve', '--model-type', 'tessera', '--help'], capture_output=True, text=True)
    faults += check('sglang serve --model-type tessera --help is ours', 'Answer requests over HTTP' in done.stdout, done.stderr[-200:])

    from sglang.srt.plugins import load_plugins
    load_plugins()
    import tessera.sglang_quantization as ours
    from sglang.srt import server_args
    from sglang.srt.layers.linear import WEIGHT_LOADER_V2_SUPPORTED
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
    from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, LinearMethodBase, QuantizationConfig
    faults += check('quantization "tessera" is registered', get_quantization_config('tessera') is ours.TesseraConfig)
    faults += check('it is asked first', next(iter(QUANTIZATION_METHODS)) == 'tessera', list(QUANTIZATION_METHODS)[:2])
    faults += check('--quantization takes it', 'tessera' in server_args.QUANTIZATION_CHOICES)
    faults += check('its linear method loads by the second loader', 'TesseraLinearMethod' in WEIGHT_LOADER_V2_SUPPORTED)
    faults += signatures('SGLang', ((ours.TesseraConfig, QuantizationConfig), (ours.TesseraLinearMethod, LinearMethodBase),
                                    (ours.TesseraMoEMethod, FusedMoEMethodBase)))
    faults += has_methods('SGLang', get_quantization_config, ('modelopt_fp4', 'modelopt_mixed', 'fp8'))
    if model is not None:
        import sglang
        engine = sglang.Engine(model_path=model, quantization='tessera', disable_cuda_graph=True, context_length=512,
                               disable_shared_experts_fusion=True)
        text = engine.generate('Compute 257-7.', {'max_new_tokens': 8, 'temperature': 0})['text']
        print(f'     it said {text!r}; its processes are out of sight: look for tessera in what it logs')
        faults += check('it said something', bool(text))
        engine.shutdown()
    return faults


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument('--model', metavar='DIR')
    model = options.parse_args().model
    if importlib.util.find_spec('tessera') is None:
        sys.exit('verify_plugins: tessera: not installed; pip install . or a wheel of tools/make_wheel')
    there = [name for name in ('vllm', 'sglang') if importlib.util.find_spec(name) is not None]
    for name in ('vllm', 'sglang'):
        if name not in there:
            print(f'     {name}: not installed, not looked at')
    faults = (verify_vllm(model) if 'vllm' in there else 0) + (verify_sglang(model) if 'sglang' in there else 0)
    sys.exit(3 if not there else min(faults, 1))


if __name__ == '__main__':
    main()
