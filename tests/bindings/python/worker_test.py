# SPDX-License-Identifier: Apache-2.0
"""examples/dynamo/worker.py on the bundled model."""
import asyncio
import importlib.util
import pathlib

import pytest
import tessera

PATH = pathlib.Path(__file__).resolve().parents[3] / 'examples/dynamo/worker.py'
spec = importlib.util.spec_from_file_location('worker', PATH)
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)

ENDLESS = {'max_tokens': 100000, 'ignore_eos': True}


def run(steps):
    """Runs steps(worker) on a worker that is loaded."""
    async def whole():
        one = worker.Worker()
        await one.start(device='cpu', threads=2, max_model_len=4096)
        try:
            return await asyncio.wait_for(steps(one), 120)
        finally:
            await one.cleanup()
    return asyncio.run(whole())


async def answer(one, request, request_id='a'):
    chunks = [chunk async for chunk in one.generate(request, request_id)]
    return [token for chunk in chunks for token in chunk['token_ids']], chunks[-1].get('finish_reason')


def test_answers_are_the_models(model):
    prompts = [model.encode_chat(text) for text in ('Compute 257-7.', 'Spell mire.', 'Reverse abc.')]
    expected = [model.generate(prompt) for prompt in prompts]

    async def steps(one):
        return await asyncio.gather(*(answer(one, {'token_ids': prompt}, str(i)) for i, prompt in enumerate(prompts)))

    assert run(steps) == [(one.ids, one.finish_reason) for one in expected]


def test_options(model):
    prompt = model.encode_chat('Spell mire.')
    drawn = {'temperature': 1.5, 'seed': 7, 'top_k': None}

    async def steps(one):
        short = await answer(one, {'token_ids': prompt, 'sampling_options': drawn, 'stop_conditions': {'max_tokens': 3, 'ignore_eos': True}})
        with pytest.raises(tessera.InvalidArgument, match='stop_conditions.min_tokens'):
            await answer(one, {'token_ids': prompt, 'stop_conditions': {'min_tokens': 3}})
        for absent in ({}, {'token_ids': None}):
            with pytest.raises(tessera.InvalidArgument, match='token_ids: expected token ids, found none'):
                await answer(one, absent)
        with pytest.raises(tessera.InvalidArgument, match='token id'):
            await answer(one, {'token_ids': [-1]})
        return short

    ids, reason = run(steps)
    assert reason == 'length'
    assert ids == model.generate(prompt, temperature=1.5, seed=7, max_tokens=3, ignore_eos=True).ids


def test_a_request_as_the_preprocessor_makes_it(model):
    prompt = model.encode_chat('Compute 257-7.')
    sampling = {'n': 1, 'best_of': 1, 'temperature': 0.0, 'top_p': 1.0, 'top_k': -1, 'min_p': None, 'use_beam_search': False,
                'length_penalty': None, 'seed': None}
    stopping = {'max_tokens': 50, 'min_tokens': 0, 'stop': None, 'stop_token_ids': None, 'ignore_eos': False}
    endless = {'max_tokens': 30, 'min_tokens': 30, 'stop': None, 'ignore_eos': True}
    first = model.generate(prompt).ids[0]

    async def steps(one):
        async def ask(**stops):
            return await answer(one, {'token_ids': prompt, 'sampling_options': sampling, 'stop_conditions': {**stopping, **stops}})

        with pytest.raises(tessera.InvalidArgument, match='sampling_options.n'):
            await answer(one, {'token_ids': prompt, 'sampling_options': {'n': 2}})
        return [await ask(stop_token_ids_hidden=model.eos_ids), await ask(stop_token_ids=[first], stop_token_ids_hidden=model.eos_ids),
                await ask(**endless, stop_token_ids_hidden=model.eos_ids)]

    whole, stopped, long = run(steps)
    assert model.detokenize(whole[0], skip_special=True) == '250' and whole[1] == 'stop'
    assert stopped == (model.generate(prompt, stop_ids=[first]).ids, 'stop')
    assert (len(long[0]), long[1]) == (30, 'length')


def test_abort(model):
    request = {'token_ids': model.encode_chat('Spell mire.'), 'stop_conditions': ENDLESS}

    async def steps(one):
        one.abort('unknown')
        generator = one.generate(request, 'a')
        await anext(generator)
        with pytest.raises(tessera.InvalidArgument, match='new id'):
            await answer(one, request, 'a')
        one.abort('a')
        assert [chunk async for chunk in generator][-1] == {'token_ids': [], 'finish_reason': 'cancelled'}
        # Who goes away ends it too; its name is free again.
        generator = one.generate(request, 'a')
        await anext(generator)
        await generator.aclose()
        return await answer(one, {**request, 'stop_conditions': {'max_tokens': 1}})

    assert run(steps)[1] == 'length'


def test_drain(model):
    request = {'token_ids': model.encode_chat('Spell mire.'), 'stop_conditions': ENDLESS}

    async def steps(one):
        assert await answer(one, {**request, 'stop_conditions': {'max_tokens': 2}}) != ([], 'cancelled')
        running = [asyncio.ensure_future(answer(one, request, name)) for name in 'ab']
        while len(one._streams) < 2:
            await asyncio.sleep(0)
        assert await one.drain(0.01) == 2
        with pytest.raises(worker.Draining):
            await answer(one, request, 'c')
        return [reason for _, reason in await asyncio.gather(*running)]

    assert run(steps) == ['cancelled', 'cancelled']


def test_drain_waits(model):
    request = {'token_ids': model.encode_chat('Spell mire.'), 'stop_conditions': {'max_tokens': 20, 'ignore_eos': True}}

    async def steps(one):
        running = asyncio.ensure_future(answer(one, request))
        while not one._streams:
            await asyncio.sleep(0)
        assert await one.drain(100) == 0
        return await running

    ids, reason = run(steps)
    assert (len(ids), reason) == (20, 'length')


def test_drain_does_not_wait_for_who_reads_no_more(model):
    request = {'token_ids': model.encode_chat('Spell mire.'), 'stop_conditions': ENDLESS}

    async def steps(one):
        generator = one.generate(request, 'a')
        await anext(generator)
        assert await one.drain(0.01) == 1
        return [chunk async for chunk in generator][-1]

    assert run(steps) == {'token_ids': [], 'finish_reason': 'cancelled'}


def test_tokens_outlive_drain_and_cleanup(model):
    request = {'token_ids': model.encode_chat('Spell mire.'), 'stop_conditions': {'max_tokens': 20, 'ignore_eos': True}}

    async def steps(one):
        generator = one.generate(request, 'a')
        await anext(generator)
        assert await one.drain(100) == 0
        await one.cleanup()
        return [chunk async for chunk in generator]

    *tokens, end = run(steps)
    assert (len(tokens), end['finish_reason']) == (19, 'length')
