# SPDX-License-Identifier: Apache-2.0
"""tessera.Model: answers are the program's, however they are asked for; bad input raises one line that names it."""
import _thread
import json
import math
import signal
import subprocess
import threading
import time

import pytest
import tessera
from tessera import _program


def program(*arguments):
    done = subprocess.run([_program.path(), *arguments, '--model', tessera.bundled_model()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_answers_are_the_programs(model):
    expected = program('generate', '--json', 'Compute 257-7.')
    answer = model.generate('Compute 257-7.')
    assert (answer.text, answer.ids, answer.finish_reason) == (expected['text'], expected['ids'], expected['finish_reason'])
    assert answer.num_prompt_tokens == expected['usage']['prompt_tokens']
    assert answer.content == answer.text and not answer.fault and answer.seed is None
    sampled = program('generate', '--json', '--temperature', '1', '--seed', '5', '--max-tokens', '20', 'Spell mire.')
    assert model.generate('Spell mire.', temperature=1, seed=5, max_tokens=20).ids == sampled['ids']


def test_a_stream_brings_the_whole_answer_in_parts(model):
    whole = model.generate('Spell mire.', logprobs=2)
    stream = model.stream('Spell mire.', logprobs=2)
    deltas = list(stream)
    assert ''.join(delta.text for delta in deltas) == whole.text
    assert [delta.id for delta in deltas if delta.id is not None] == whole.ids
    assert stream.finish_reason == 'stop' and stream.result() == whole
    for logprob, top in whole.logprobs:
        assert logprob <= 0 and len(top) == 2 and top[0][1] >= top[1][1] and math.exp(top[0][1]) <= 1


def test_messages_ids_and_raw_text_lead_to_one_prompt(model):
    messages = [{'role': 'user', 'content': 'Compute 1+2.'}]
    answer = model.generate('Compute 1+2.')
    text, ids = model.render_chat(messages), model.encode_chat('Compute 1+2.')
    assert model.generate(messages) == answer
    assert model.generate(ids).ids == answer.ids
    assert model.generate(text, raw=True).text == answer.text
    assert model.detokenize(ids) == text and model.tokenize(text) == ids
    assert '<think>' in model.render_chat(messages, think=True).split('Compute')[1]
    assert model.tokenize('<|User|>', special=False) != model.tokenize('<|User|>') or len(model.tokenize('<|User|>')) > 1


def test_stop_texts_end_an_answer_before_them(model):
    whole = model.generate('Spell mire.').text
    middle = whole[len(whole) // 2]
    cut = model.generate('Spell mire.', stop=middle)
    assert cut.text == whole[:whole.index(middle)] and cut.finish_reason == 'stop'
    assert model.generate('Spell mire.', max_tokens=2).finish_reason == 'length'


def test_closing_or_dropping_a_stream_aborts_its_request(model):
    options = dict(max_tokens=4000, ignore_eos=True)
    stream = model.stream('Spell mire.', **options)
    next(stream)
    stream.close()
    stream.close()
    assert list(stream) == [] and stream.finish_reason == 'cancelled' and stream.result().finish_reason == 'cancelled'
    with model.stream('Spell mire.', **options) as other:
        next(other)
    assert list(other) == []
    third = model.stream('Spell mire.', **options)
    model.abort(third.request_id)
    assert third.result().finish_reason == 'cancelled' and len(third.ids) < 4000
    for _ in range(20):  # would fill the model's places if they went on
        next(model.stream('Spell mire.', **options))
    assert model.generate('Compute 257-7.').text == '250'


def test_threads_share_a_model(model):
    prompts = [f'Compute {a}+{a + 3}.' for a in range(10, 18)]
    expected = [model.generate(prompt) for prompt in prompts]
    found = [None] * len(prompts)

    def ask(i):
        found[i] = model.generate(prompts[i])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
    assert model.generate_many(prompts) == expected


def test_ctrl_c_ends_generate(model):
    # Where the tests were started in the background, SIGINT is ignored and Python leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.3, _thread.interrupt_main).start()
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                model.generate('Spell mire.', max_tokens=4000, ignore_eos=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert model.generate('Compute 257-7.').text == '250'


def test_scores_are_logprobs_of_the_text(model):
    score = model.score('Compute 257-7.', top_logprobs=1)
    assert len(score.logprobs) == len(score.ids) - 1 == len(score.top_logprobs)
    assert score.nats == pytest.approx(-sum(score.logprobs))
    for logprob, top in zip(score.logprobs, score.top_logprobs):
        assert logprob <= top[0][1] <= 0
    greedy = model.generate(model.encode_chat('Compute 257-7.'), logprobs=0)
    prompt = model.encode_chat('Compute 257-7.')
    scored = model.score(prompt + greedy.ids)
    assert scored.logprobs[len(prompt) - 1:] == [logprob for logprob, _ in greedy.logprobs]  # decode = prefill, to the bit


@pytest.mark.parametrize('options, words', [
    (dict(temperature=-1), 'temperature'), (dict(top_p=2, temperature=1), 'top.p'), (dict(max_tokens=-1), 'max.tokens'),
    (dict(stop=''), 'stop'), (dict(stop_ids=[-1]), 'stop_ids|stop.ids'), (dict(seed=-1), 'seed'), (dict(logprobs=21), 'logprobs'),
    (dict(effort='huge', think=True), 'effort'), (dict(logit_bias={10**6: 1.0}), 'logit.bias'),
])
def test_options_that_are_wrong(model, options, words):
    with pytest.raises(tessera.InvalidArgument, match=words) as caught:
        model.generate('Compute 1+2.', **options)
    assert isinstance(caught.value, ValueError) and caught.value.code == 'invalid argument' and '\n' not in str(caught.value)


@pytest.mark.parametrize('prompt, error, words', [
    ('', ValueError, 'prompt'), ([], ValueError, 'prompt'), ([-1], ValueError, r'prompt\[0\]'), ([10**9], ValueError, '1000000000'),
    ([1.5], TypeError, 'prompt'), (b'x', TypeError, 'bytes'), ([{'role': 'nobody', 'content': ''}], ValueError, r'messages\[0\]\.role|\[0\]\.role'),
    ([{'role': 'user'}], ValueError, 'content'), ([{'role': 'user', 'content': {1}}], ValueError, 'JSON'), ([1] * 5000, ValueError, '4096'),
])
def test_prompts_that_are_wrong(model, prompt, error, words):
    with pytest.raises(error, match=words):
        model.generate(prompt)


def test_models_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match='no such folder') as caught:
        tessera.Model(tmp_path / 'none', 'cpu')
    assert isinstance(caught.value, tessera.Error)
    with pytest.raises(FileNotFoundError, match='config.json'):
        tessera.Model(tmp_path, 'cpu')
    (tmp_path / 'config.json').write_text('{')
    with pytest.raises(tessera.DataLoss, match='config.json'):
        tessera.Model(tmp_path, 'cpu')
    for options, words in ((dict(mode='a3'), 'mode'), (dict(cache='none'), 'cache'), (dict(max_model_len=10**9), 'max_model_len'),
                           (dict(device='tpu'), 'tpu')):
        with pytest.raises(ValueError, match=words):
            tessera.Model(**{'device': 'cpu', **options})


def test_a_closed_model_refuses_requests_and_ends_streams():
    model = tessera.Model(device='cpu', threads=1, max_model_len=2048)
    stream = model.stream('Spell mire.', max_tokens=2000, ignore_eos=True)
    model.close()
    model.close()
    assert stream.result().finish_reason == 'cancelled'
    with pytest.raises(tessera.InvalidArgument, match='closed'):
        model.generate('Compute 1+2.')
    assert model.tokenize('Compute') and 'closed' in repr(model)


def test_check_convert_and_devices(tmp_path):
    assert tessera.check()['is_sound']
    with pytest.raises(tessera.Error):
        tessera.check(tmp_path / 'none')
    report = tessera.convert(tessera.bundled_model(), tmp_path / 'out', families=['experts', 'shared'])
    assert set(report['families']) >= {'experts'}
    assert tessera.check(tmp_path / 'out')['is_sound']
    with pytest.raises(ValueError, match='families|unknown|expected'):
        tessera.convert(tessera.bundled_model(), tmp_path / 'other', families='everything')
    with pytest.raises(ValueError, match='method'):
        tessera.convert(tessera.bundled_model(), tmp_path / 'other', method='guess')
    assert any(backend['available'] for backend in tessera.devices()['backends'])
