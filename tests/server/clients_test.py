#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Our request parsing and our answers against the openai and anthropic packages, with their strict validation.

    clients_test.py ANSWER_ONCE

The packages' own transport is replaced by one that hands each request to the program ANSWER_ONCE, so no socket is opened.
"""
import subprocess
import sys
import unittest

import anthropic
import httpx2
import openai
import pydantic

PROGRAM = None
TOOL = {'name': 'weather', 'description': 'Weather of a city',
        'parameters': {'type': 'object', 'properties': {'city': {'type': 'string'}}, 'required': ['city']}}
QUESTION = [{'role': 'user', 'content': 'What is 2 + 3?'}]


def transport(request):
    result = subprocess.run([PROGRAM, request.url.path], input=request.read(), capture_output=True, check=True)
    head, body = result.stdout.split(b'\n', 1)
    status, content_type = head.decode().split(' ')
    return httpx2.Response(int(status), headers={'content-type': content_type}, content=body)


def openai_client(is_strict=True):
    return openai.OpenAI(api_key='k', base_url='http://host/v1', max_retries=0, _strict_response_validation=is_strict,
                         http_client=httpx2.Client(transport=httpx2.MockTransport(transport)))


def anthropic_client():
    return anthropic.Anthropic(api_key='k', base_url='http://host', max_retries=0, _strict_response_validation=True,
                               http_client=httpx2.Client(transport=httpx2.MockTransport(transport)))


class OpenAi(unittest.TestCase):
    def test_chat(self):
        answer = openai_client().chat.completions.create(model='tiny', messages=QUESTION, n=2, logprobs=True,
                                                         top_logprobs=2, reasoning_effort='high')
        self.assertEqual(len(answer.choices), 2)
        self.assertEqual(answer.choices[1].message.content, 'It is 5, 世界.')
        self.assertEqual(answer.choices[0].message.reasoning_content, 'Let me see…')
        self.assertEqual(answer.choices[0].finish_reason, 'stop')
        self.assertEqual(len(answer.choices[0].logprobs.content[0].top_logprobs), 2)
        self.assertEqual(answer.usage.prompt_tokens_details.cached_tokens, 30)
        self.assertGreater(answer.usage.completion_tokens_details.reasoning_tokens, 0)

    def test_chat_stream_with_tools(self):
        with openai_client().chat.completions.stream(
                model='tiny', messages=QUESTION, tools=[{'type': 'function', 'function': TOOL}],
                stream_options={'include_usage': True}) as stream:
            for _ in stream:
                pass
            answer = stream.get_final_completion()
        calls = answer.choices[0].message.tool_calls
        self.assertEqual(answer.choices[0].finish_reason, 'tool_calls')
        self.assertEqual([call.function.arguments for call in calls],
                         ['{"city": "Köln"}', '{"city": "Rome \\"old\\""}'])
        self.assertNotEqual(calls[0].id, calls[1].id)
        self.assertEqual(answer.usage.prompt_tokens, 40)
        # The loop goes on with results, as the client itself writes the answer back.
        messages = QUESTION + [answer.choices[0].message.model_dump(exclude_none=True)]
        messages += [{'role': 'tool', 'tool_call_id': call.id, 'content': 'rain'} for call in calls]
        again = openai_client().chat.completions.create(model='tiny', messages=messages,
                                                        tools=[{'type': 'function', 'function': TOOL}])
        self.assertEqual(again.choices[0].message.content, 'It is 5, 世界.')

    def test_parse_asks_for_a_schema(self):
        class Sum(pydantic.BaseModel):
            total: int

        with self.assertRaises(pydantic.ValidationError):  # the program's words are no JSON, but the request is taken
            openai_client().chat.completions.parse(model='tiny', messages=QUESTION, response_format=Sum)

    def test_completions(self):
        answer = openai_client().completions.create(model='tiny', prompt=[[1, 2]], echo=False, logprobs=2, max_tokens=4)
        self.assertEqual(answer.choices[0].text, ' and so on')
        self.assertEqual(len(answer.choices[0].logprobs.tokens), len(answer.choices[0].logprobs.text_offset))
        # Its type wants a finish_reason in every chunk; OpenAI's own service sends null before the last one, as we do.
        stream = openai_client(is_strict=False).completions.create(model='tiny', prompt='a', stream=True, stop=['so'])
        self.assertEqual(''.join(chunk.choices[0].text for chunk in stream), ' and ')

    def test_responses(self):
        tool = dict(TOOL, type='function', strict=False)
        answer = openai_client().responses.create(model='tiny', input='What is 2 + 3?', store=False, tools=[tool],
                                                  reasoning={'effort': 'high'}, instructions='Be brief.')
        self.assertEqual([item.type for item in answer.output],
                         ['reasoning', 'message', 'function_call', 'function_call'])
        self.assertEqual(answer.output_text, 'It is 5, 世界.')
        with openai_client().responses.stream(model='tiny', input='What is 2 + 3?', tools=[tool],
                                              reasoning={'effort': 'high'}) as stream:
            types = [event.type for event in stream]
            final = stream.get_final_response()
        self.assertEqual(types[0], 'response.created')
        self.assertEqual(types[-1], 'response.completed')
        self.assertEqual([item.type for item in final.output], [item.type for item in answer.output])
        items = [item.model_dump(exclude_none=True, exclude={'parsed_arguments', 'parsed'}) for item in answer.output]
        items += [{'type': 'function_call_output', 'call_id': item.call_id, 'output': 'rain'}
                  for item in answer.output if item.type == 'function_call']
        again = openai_client().responses.create(model='tiny', input=items, tools=[tool])
        self.assertEqual(again.output_text, 'It is 5, 世界.')

    def test_errors(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            openai_client().chat.completions.create(model='tiny', messages=QUESTION, temperature=3)
        self.assertEqual(caught.exception.param, 'temperature')
        with self.assertRaises(openai.NotFoundError) as caught:
            openai_client().chat.completions.create(model='other', messages=QUESTION)
        self.assertEqual(caught.exception.code, 'model_not_found')

    def test_models(self):
        self.assertEqual([model.id for model in openai_client().models.list()], ['tiny'])


class Anthropic(unittest.TestCase):
    tools = [{'name': 'weather', 'description': 'd', 'input_schema': TOOL['parameters']}]

    def test_message(self):
        answer = anthropic_client().messages.create(model='tiny', max_tokens=3000, messages=QUESTION, system='Be brief.',
                                                    thinking={'type': 'enabled', 'budget_tokens': 2000})
        self.assertEqual([block.type for block in answer.content], ['thinking', 'text'])
        self.assertEqual(answer.stop_reason, 'end_turn')
        self.assertEqual(answer.usage.cache_read_input_tokens, 30)

    def test_stream_with_tools(self):
        with anthropic_client().messages.stream(model='tiny', max_tokens=50, messages=QUESTION,
                                                tools=self.tools) as stream:
            for _ in stream:
                pass
            answer = stream.get_final_message()
        self.assertEqual([block.type for block in answer.content], ['text', 'tool_use', 'tool_use'])
        self.assertEqual([block.input for block in answer.content[1:]], [{'city': 'Köln'}, {'city': 'Rome "old"'}])
        self.assertEqual(answer.stop_reason, 'tool_use')
        results = [{'type': 'tool_result', 'tool_use_id': block.id, 'content': 'rain'} for block in answer.content[1:]]
        again = anthropic_client().messages.create(
            model='tiny', max_tokens=50, tools=self.tools,
            messages=QUESTION + [answer.to_param(), {'role': 'user', 'content': results}])
        self.assertEqual(again.content[0].text, 'It is 5, 世界.')

    def test_stops_counts_errors(self):
        answer = anthropic_client().messages.create(model='tiny', max_tokens=50, messages=QUESTION, stop_sequences=['5'])
        self.assertEqual((answer.stop_reason, answer.stop_sequence), ('stop_sequence', '5'))
        self.assertEqual(anthropic_client().messages.count_tokens(model='tiny', messages=QUESTION).input_tokens, 11)
        with self.assertRaises(anthropic.BadRequestError) as caught:
            anthropic_client().messages.create(model='tiny', max_tokens=-1, messages=QUESTION)
        self.assertIn('max_tokens', str(caught.exception))


if __name__ == '__main__':
    PROGRAM = sys.argv.pop(1)
    unittest.main()
