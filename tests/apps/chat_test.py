#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tessera chat: through a pipe, and through a pseudo-terminal as a person uses it.

    chat_test.py PROGRAM MODEL_FOLDER
"""
import fcntl
import json
import os
import pty
import re
import select
import subprocess
import termios
import time
import unittest

from program import PROGRAM, ProgramTest, environment, run

BOS, EOS, USER, ASSISTANT = '<｜begin▁of▁sentence｜>', '<｜end▁of▁sentence｜>', '<｜User｜>', '<｜Assistant｜>'
ENDLESS = ('--logit-bias', '72:1000')  # nothing but the letter a


def chat(*lines, arguments=(), **changes):
    return run('chat', *arguments, stdin=''.join(line + '\n' for line in lines).encode(), **changes)


def answers(result):
    return result.stdout.decode().splitlines()


class Terminal:
    """The program on a pseudo-terminal; what it shows is kept as a transcript."""

    def __init__(self, folder, *arguments, **changes):
        master, slave = pty.openpty()
        env = environment(**{'XDG_STATE_HOME': str(folder), 'TERM': 'xterm', 'HOME': str(folder), **changes})
        if 'NO_COLOR' not in changes:
            env.pop('NO_COLOR', None)
        self.process = subprocess.Popen([PROGRAM, 'chat', *arguments], stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True,
                                        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        os.close(slave)
        self.master, self.transcript, self.read_to = master, '', 0
        self.bytes = b''

    def send(self, text):
        os.write(self.master, text.encode())

    def ask(self, text):
        """Types once the prompt is shown: before that the terminal is not in libedit's hands."""
        self.wait_for('> ')
        time.sleep(0.3)  # the prompt is shown a moment before the terminal is in raw mode
        self.send(text)

    def wait_for(self, pattern, seconds=60):
        """What was shown from the last match to the end of this one."""
        end = time.monotonic() + seconds
        while True:
            found = re.compile(pattern, re.S).search(self.transcript, self.read_to)
            if found:
                shown, self.read_to = self.transcript[self.read_to:found.end()], found.end()
                return shown
            if not self.pump(end - time.monotonic()):
                raise AssertionError(f'no {pattern!r} in {self.transcript[self.read_to:]!r}')

    def pump(self, seconds):
        if seconds <= 0 or not select.select([self.master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self.master, 65536)
        except OSError:
            return False
        self.bytes += data
        self.transcript = self.bytes.decode(errors='replace')
        return bool(data)

    def end(self, seconds=60):
        while self.pump(seconds):
            pass
        code = self.process.wait(seconds)  # before closing: that would hang it up
        os.close(self.master)
        return code


class Chat(ProgramTest):
    def terminal(self, *arguments, **changes):
        terminal = Terminal(self.folder, *arguments, **changes)
        self.addCleanup(terminal.process.kill)
        return terminal

    # ---- through a pipe

    def test_every_line_is_a_question(self):
        result = chat('Compute 257-7.', '', 'Spell mire.')
        self.assertEqual((result.returncode, answers(result)[0]), (0, '250'), result.stderr)
        self.assertEqual(len(answers(result)), 2)
        self.assertEqual(result.stderr.decode().count(' tokens at '), 2)
        self.assertNotIn(b'> ', result.stdout)
        self.assertEqual(run('chat', stdin=b'Compute 257-7.').stdout, b'250\n', 'no end of line')
        self.assertEqual((run('chat', stdin=b'').returncode, run('chat', stdin=b'').stdout), (0, b''))

    # The prompt of a turn, written out here, gives the same answer; and the turn ran little more than what was new.
    def test_turns_are_those_of_the_whole_prompt(self):
        questions = ['Compute 257-7.', 'Spell mire.', 'Sort 58769.', 'Compute 12+30.']
        result = chat(*questions, arguments=('--system', 'Be short.'))
        prompt = BOS + 'Be short.'
        for question, answer in zip(questions, answers(result)):
            prompt += USER + question + ASSISTANT + '</think>'
            whole = json.loads(run('generate', '--raw', '-', '--json', stdin=prompt.encode()).stdout)
            self.assertEqual(answer, whole['text'])
            prompt += answer + EOS
        stats = re.findall(r'prompt (\d+), (\d+) of them kept', result.stderr.decode())
        self.assertEqual(len(stats), 4)
        lengths = [(int(a), int(b)) for a, b in stats]
        for (previous, _), (_, kept) in zip(lengths, lengths[1:]):
            self.assertGreaterEqual(kept, previous - 1, stats)

    def test_old_reasoning_is_dropped_and_the_rest_kept(self):
        questions = ['What is 82*0?', 'Compute 71*7.']
        result = chat(*questions, arguments=('--think',))
        first = json.loads(run('generate', '--think', '--json', questions[0]).stdout)
        reasoning, content = result.stderr.decode().split('\n')[0], answers(result)[0]
        self.assertEqual(first['text'].replace('</think>', ''), reasoning + content)
        prompt = f'{BOS}{USER}{questions[0]}{ASSISTANT}</think>{content}{EOS}{USER}{questions[1]}{ASSISTANT}<think>'
        second = json.loads(run('generate', '--raw', '-', '--json', stdin=prompt.encode()).stdout)
        self.assertTrue(second['text'].replace('</think>', '').endswith(answers(result)[1]), (second, result))
        stats = re.findall(r'prompt (\d+), (\d+) of them kept', result.stderr.decode())
        self.assertEqual(int(stats[1][1]), int(stats[0][0]) - 1, 'up to the <think> of the first turn')

    def test_commands(self):
        path = self.folder / 'saved.json'
        result = chat('/system Be kind.', 'Compute 257-7.', f'/save {path}', '/clear', '/tokens', f'/load {path}', '/retry', '/undo', '/undo', '/temp 0.5', '/max 7',
                      '/think low', '/think off', '/think', '/system -', '/help', '/quit', 'Spell mire.')
        self.assertEqual(result.returncode, 1, 'the preview table has no low')
        self.assertEqual(answers(result)[:1] * 2, answers(result), 'asked again after loading, and nothing after /quit')
        notes = result.stderr.decode()
        for part in ('[system: Be kind.]', '[3 messages saved', '0 of 4096 tokens held', '[3 messages loaded', '[last question taken back]', '[nothing to take back]',
                     '[temperature 0.5]', '[at most 7 tokens an answer]', 'low', '[thinking off]', '[no system text]', '/retry'):
            self.assertIn(part, notes)
        saved = json.loads(path.read_text())
        self.assertEqual([message['role'] for message in saved['messages']], ['system', 'user', 'assistant'])
        self.assertEqual(saved['messages'][2]['content'], answers(result)[0])

    def test_mistakes_do_not_end_it(self):
        (self.folder / 'bad.json').write_text('{"messages": [{"role": "nobody", "content": "a"}]}')
        (self.folder / 'tools.json').write_text('{"messages": [{"role": "system", "content": "a", "tools": [{"type": "function", "function": '
                                                '{"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}}]}]}')
        lines = ['/nothing', '/temp hot', '/temp 101', '/max 0', '/think hard', '/save', '/save /no/such/folder/x', f'/load {self.folder}/none.json',
                 f'/load {self.folder}/bad.json', f'/load {self.folder}/tools.json', '/retry', '/clear now', 'word ' * 6000]
        result = chat(*lines, 'Compute 257-7.')
        self.assertEqual((result.returncode, answers(result)), (1, ['250']))
        errors = [line for line in result.stderr.decode().splitlines() if line.startswith('tessera: ')]
        self.assertEqual(len(errors), len(lines), errors)
        for error, part in zip(errors, ('/nothing', '/temp', '/temp', '/max', '/think', '/save', 'no message yet', 'none.json', 'messages[0].role', 'tools', 'no question', '/clear',
                                        '4096')):
            self.assertIn(part, error)
        self.assertEqual(run('chat', stdin=b'a\xff\nCompute 257-7.\n').stdout, b'250\n')

    def test_a_conversation_that_cannot_be_saved_goes_on(self):
        result = chat('Compute 257-7.', '/save /no/such/folder/x', 'Compute 257-7.')
        self.assertEqual(answers(result), ['250', '250'])
        self.assertIn('tessera: /no/such/folder', result.stderr.decode())

    def test_usage(self):
        for arguments, part in ((['--max-tokens', '0'], '--max-tokens'), (['--context', '0'], '--context'), (['--context', '4097'], '--context'), (['--effort', 'x'], '--effort'),
                                (['--effort', 'low'], 'low'), (['--effort-table', 'x'], '--effort-table'), (['--stop', ''], '--stop'), (['--top-p', '0'], 'top-p'),
                                (['--seed', 'x'], '--seed')):
            with self.subTest(arguments=arguments):
                self.check_error(run('chat', *arguments, stdin=b''), 2, part)

    def test_a_full_context_says_so(self):
        result = chat('Count.', arguments=(*ENDLESS, '--context', '40'))
        self.assertIn('the context is full', result.stderr.decode())
        result = chat('Count.', arguments=(*ENDLESS, '--max-tokens', '5'))
        self.assertIn('cut at --max-tokens', result.stderr.decode())

    def test_lines_go_on_and_slashes_are_doubled(self):
        result = chat('Compute 257\\', '-7.', '//x', '/save ' + str(self.folder / 's.json'))
        messages = json.loads((self.folder / 's.json').read_text())['messages']
        self.assertEqual([m['content'] for m in messages if m['role'] == 'user'], ['Compute 257\n-7.', '/x'], result.stderr)

    def test_a_seed_repeats_and_each_answer_is_drawn_anew(self):
        runs = [answers(chat('And', '/retry', arguments=('--temperature', '2', '--max-tokens', '20', '--seed', '5'))) for _ in range(2)]
        self.assertEqual(runs[0], runs[1])
        self.assertGreater(len(set(runs[0])), 1)

    # ---- through a pseudo-terminal

    def test_transcript(self):
        terminal = self.terminal()
        terminal.ask('Compute 257-7.\r')
        shown = terminal.wait_for(r'tokens at \d+/s[^\n]*\n')
        self.assertIn('\n250\r\n', shown)
        terminal.ask('Spell mire.\r')
        self.assertRegex(terminal.wait_for(r'tokens at \d+/s[^\n]*\n'), r'prompt \d+, [1-9]\d* of them kept')
        terminal.ask('\x1b[A\x1b[A\r')  # up twice: the first question again
        self.assertIn('Compute 257-7.', terminal.wait_for(r'tokens at \d+/s'))
        terminal.ask('/think on\r')
        terminal.wait_for('thinking on')
        terminal.ask('What is 82*0?\r')
        shown = terminal.wait_for(r'tokens at \d+/s')
        self.assertRegex(shown, r'(?s)\x1b\[2m.+\x1b\[0m\r\n\r\n\d+', 'reasoning is dimmed, the answer is not')
        terminal.ask('\x04')
        self.assertEqual(terminal.end(), 0)
        history = (self.folder / 'tessera' / 'history').read_text()
        self.assertIn('mire', history)
        self.assertEqual((self.folder / 'tessera' / 'history').stat().st_mode & 0o077, 0)

    def test_ctrl_c_stops_the_answer_and_not_the_program(self):
        terminal = self.terminal(*ENDLESS)
        terminal.ask('Tell me everything.\r')
        terminal.wait_for(r'everything\.\r\n.{40}')
        terminal.send('\x03')
        self.assertIn('stopped', terminal.wait_for(r'tokens at [^\n]*\n'))
        terminal.ask('half a quest\x03')  # at the prompt it drops the line
        terminal.wait_for(r'\^C\r\n')
        terminal.ask('/tokens\r')
        self.assertIn('[2 messages', terminal.wait_for('again]'))
        terminal.ask('/max 5\r')
        terminal.wait_for('at most 5')
        terminal.ask('And now?\r')
        self.assertRegex(terminal.wait_for(r'tokens at [^\n]*\n'), r'\[5 tokens at .* [1-9]\d* of them kept')
        terminal.ask('/quit\r')
        self.assertEqual(terminal.end(), 0)

    def test_history_is_read_back_and_utf8_is_edited(self):
        terminal = self.terminal()
        terminal.ask('Größe 字x\x7f\r')
        terminal.wait_for(r'tokens at ')
        terminal.ask('\x04')
        self.assertEqual(terminal.end(), 0)
        terminal = self.terminal()
        terminal.ask('\x1b[A\r')
        self.assertIn('Größe 字', terminal.wait_for(r'tokens at '))
        terminal.ask(f'/save {self.folder}/s.json\r')
        terminal.wait_for('saved')
        terminal.ask('\x04')
        self.assertEqual(terminal.end(), 0)
        self.assertEqual(json.loads((self.folder / 's.json').read_text())['messages'][0]['content'], 'Größe 字')

    def test_no_history_and_no_color(self):
        terminal = self.terminal('--no-history', '--think', NO_COLOR='1')
        terminal.ask('What is 82*0?\r')
        shown = terminal.wait_for(r'tokens at [^\n]*\n')
        self.assertRegex(shown, r'(?s)<think>.+</think>')
        self.assertNotIn('\x1b[2m', shown)
        terminal.ask('\x04')
        self.assertEqual(terminal.end(), 0)
        self.assertFalse((self.folder / 'tessera' / 'history').exists())


if __name__ == '__main__':
    unittest.main(argv=['chat_test'])
