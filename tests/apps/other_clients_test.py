#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""LangChain and lm-eval's local-completions against tessera serve. tools/try_clients, which .ci/run calls, installs them and
runs this; it is no part of ./test.

    other_clients_test.py PROGRAM MODEL_FOLDER
"""
import json
import pathlib
import subprocess
import sys
import unittest

from openapi_test import OFFLINE
from program import MODEL, ProgramTest, run
from served import Server

SCRIPTS = pathlib.Path(sys.executable).parent
TASK = """task: tiny_arithmetic_{kind}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: {output}
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
{more}
"""
CHOICE = """doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
"""
GENERATE = """doc_to_target: "{{text}}"
generation_kwargs: {until: ["<｜end▁of▁sentence｜>"], max_gen_toks: 8, do_sample: false}
metric_list:
  - metric: exact_match
"""


class OtherClients(ProgramTest):
    @classmethod
    def setUpClass(cls):
        cls.server = Server('--max-model-len', '2048')

    @classmethod
    def tearDownClass(cls):
        code = cls.server.end()
        cls.server.__exit__()
        assert code == 0, code

    def test_langchain(self):
        from langchain_anthropic import ChatAnthropic
        from langchain_core.messages import HumanMessage, SystemMessage
        from langchain_core.tools import tool
        from langchain_openai import ChatOpenAI, OpenAI

        @tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        chat = ChatOpenAI(model=MODEL.name, base_url=self.server.url + '/v1', api_key='none', temperature=0, max_retries=0,
                          stream_usage=True)
        answer = chat.invoke('Compute 257-7.')
        self.assertEqual(answer.content, '250')
        self.assertGreater(answer.usage_metadata['input_tokens'], 0)
        parts = list(chat.stream([HumanMessage('Compute 257-7.')]))
        self.assertEqual(''.join(part.content for part in parts), '250')
        self.assertEqual(sum(part.usage_metadata['output_tokens'] for part in parts if part.usage_metadata),
                         answer.usage_metadata['output_tokens'])
        self.assertEqual([one.content for one in chat.batch(['Compute 257-7.'] * 5)], ['250'] * 5)
        # The model calls no tools, but the request must be taken and the answer be read.
        self.assertIsInstance(chat.bind_tools([add]).invoke([SystemMessage('Add.'), HumanMessage('1+2?')]).content, str)
        claude = ChatAnthropic(model=MODEL.name, base_url=self.server.url, api_key='none', max_retries=0, max_tokens=20,
                               model_kwargs={'extra_body': {'temperature': 0}})
        self.assertEqual(claude.invoke('Compute 257-7.').content, '250')
        plain = OpenAI(model=MODEL.name, base_url=self.server.url + '/v1', api_key='none', temperature=0, max_tokens=8,
                       max_retries=0)
        self.assertIsInstance(plain.invoke('Compute'), str)

    def test_lm_eval(self):
        """Both kinds of requests: prompt log probabilities of given answers, and answers that are made."""
        questions = []
        for a, b in [(257, 7), (120, 30), (40, 2), (99, 9), (31, 11), (250, 50)]:
            text = json.loads(run('generate', '--model', str(MODEL), '--json', '--quiet', f'Compute {a}-{b}.').stdout)['text']
            right = str(a - b)
            question = f'<｜begin▁of▁sentence｜><｜User｜>Compute {a}-{b}.<｜Assistant｜></think>'
            questions.append({'question': question, 'choices': [right, str(a + b), 'no'], 'answer': 0, 'text': text})
        data = self.folder / 'questions.jsonl'
        data.write_text(''.join(json.dumps(one) + '\n' for one in questions))
        for kind, output, more in [('choice', 'multiple_choice', CHOICE), ('text', 'generate_until', GENERATE)]:
            (self.folder / f'{kind}.yaml').write_text(TASK.format(kind=kind, data=data, output=output, more=more))
        subprocess.run([SCRIPTS / 'lm_eval', 'run', '--model', 'local-completions', '--model_args',
                        f'model={MODEL.name},base_url={self.server.url}/v1/completions,tokenizer={MODEL},num_concurrent=2,'
                        'max_retries=1,add_bos_token=False', '--tasks', 'tiny_arithmetic_choice,tiny_arithmetic_text',
                        '--include_path', self.folder, '--output_path', self.folder / 'out.json'],
                       env={**OFFLINE, 'HF_HOME': str(self.folder / 'hf')}, check=True)
        found = list(self.folder.glob('out*.json'))
        self.assertEqual(len(found), 1, found)
        results = json.loads(found[0].read_text())['results']
        print(json.dumps(results))
        # Every answer equals that of `tessera generate`, and the right one is likelier than the wrong ones.
        self.assertEqual(results['tiny_arithmetic_text']['exact_match,none'], 1.0)
        self.assertEqual(results['tiny_arithmetic_choice']['acc,none'], 1.0)


if __name__ == '__main__':
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
