#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The chat page in headless Chromium, through chromedriver's own protocol (W3C WebDriver): types, streams, stops, reloads.
Where Debian's chromium and chromium-driver are not installed it ends with 77, which ctest shows as skipped.

    chat_page_test.py PROGRAM MODEL_FOLDER [TEST...]      PICTURE=FILE.png keeps a picture of the page
"""
import base64
import http.client
import json
import os
import shutil
import subprocess
import sys
import time
import unittest

from program import MODEL, ProgramTest, end_as_skipped
from served import Server

ELEMENT = 'element-6066-11e4-a52e-4f735466cecf'


class Browser:
    def __init__(self, folder):
        self.process = subprocess.Popen(['chromedriver', '--port=0'], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                        env={**os.environ, 'HOME': str(folder)}, text=True)
        self.session = ''
        for line in self.process.stdout:
            if 'on port ' in line and 'success' in line:
                self.port = int(line.rsplit('port ', 1)[1].strip().rstrip('.'))
                break
        flags = ['--headless=new', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--window-size=900,760',
                 f'--user-data-dir={folder}/profile', '--disable-background-networking', '--disable-sync',
                 '--no-first-run', '--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1']
        made = self.call('POST', '/session', {'capabilities': {'alwaysMatch': {
            'browserName': 'chrome', 'goog:chromeOptions': {'args': flags}, 'goog:loggingPrefs': {'browser': 'ALL'}}}})
        self.session = '/session/' + made['sessionId']

    def call(self, method, path, body=None):
        connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=120)
        try:
            connection.request(method, self.session + path, None if body is None else json.dumps(body),
                               {'Content-Type': 'application/json'})
            value = json.loads(connection.getresponse().read())['value']
        finally:
            connection.close()
        if isinstance(value, dict) and 'error' in value:
            raise RuntimeError(value['message'])
        return value

    def close(self):
        try:
            if self.session:
                self.call('DELETE', '')
        finally:
            self.process.terminate()
            self.process.wait(30)
            self.process.stdout.close()

    def run(self, script):
        return self.call('POST', '/execute/sync', {'script': script, 'args': []})

    def element(self, selector):
        found = self.call('POST', '/element', {'using': 'css selector', 'value': selector})
        return '/element/' + found[ELEMENT]

    def click(self, selector):
        self.call('POST', self.element(selector) + '/click', {})

    def type(self, selector, text):
        self.call('POST', self.element(selector) + '/value', {'text': text})

    def until(self, script, seconds=60):
        """Waits until the script says something that is true; that."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.run(script)
            if value:
                return value
            time.sleep(0.02)
        raise AssertionError('never: ' + script)

    def articles(self):
        return self.run('return [...document.querySelectorAll("article")].map(a => [a.className, a.lastChild.textContent])')

    def idle(self):
        self.until('return document.getElementById("stop").disabled')


class ChatPage(ProgramTest):
    def setUp(self):
        super().setUp()
        self.server = Server()
        self.addCleanup(self.server.__exit__)
        self.browser = Browser(self.folder)
        self.addCleanup(self.browser.close)
        self.browser.call('POST', '/url', {'url': self.server.url + '/'})
        self.browser.until('return document.getElementById("model").textContent')

    def ask(self, question):
        self.browser.type('#text', question + '\ue007')

    def watch_requests(self, held):
        """Keeps the messages of each request in `sent`; where `held`, none gets an answer."""
        self.browser.run('window.sent = []; const real = window.fetch; window.fetch = (url, options) => {'
                         'window.sent.push(JSON.parse(options.body).messages);'
                         f'if (!{str(held).lower()}) return real(url, options);'
                         'return new Promise((_, fail) => options.signal.addEventListener("abort", () => '
                         'fail(new DOMException("stopped", "AbortError")))); }')

    def click_in_an_answer(self, button):
        """Asks until an answer has grown several times to more than 40 characters and goes on, and clicks there: in the
        page itself, since the model may be done before a test looks."""
        for _ in range(40):
            self.browser.run(
                'window.caught = false; const sizes = new Set(), stop = document.getElementById("stop");'
                'window.watch?.disconnect();'
                'window.watch = new MutationObserver(() => {'
                'sizes.add(document.querySelector("article.assistant")?.textContent.length ?? 0);'
                'if (window.caught || stop.disabled || sizes.size < 3 || Math.max(...sizes) <= 40) return;'
                f'window.caught = true; document.getElementById("{button}").click(); }});'
                'window.watch.observe(document.getElementById("log"), {childList: true, subtree: true, characterData: true})')
            self.ask('Tell me a long story.')
            self.browser.idle()
            if self.browser.run('return window.caught'):
                return
            self.browser.click('#clear')
        self.fail(f'no answer was long enough to click {button} in it')

    def test_a_question_without_an_answer_is_shown_as_such(self):
        page = self.browser
        self.watch_requests(held=True)
        self.ask('Spell mire.')
        page.until('return window.sent.length')
        page.click('#stop')
        page.idle()
        for _ in range(2):  # the second time after a reload
            self.assertEqual(page.articles(), [['user unanswered', 'Spell mire.']])
            page.call('POST', '/refresh', {})
            page.until('return document.getElementById("model").textContent')
        self.watch_requests(held=False)
        first, second = ({'role': 'user', 'content': text} for text in ('Compute 257-7.', 'Compute 12+30.'))
        for question in (first, second):
            self.ask(question['content'])
            page.idle()
        self.assertEqual(page.articles()[:3], [['user unanswered', 'Spell mire.'], ['user', 'Compute 257-7.'], ['assistant', '250']])
        answer = {'role': 'assistant', 'content': '250', 'reasoning_content': ''}
        self.assertEqual(page.run('return window.sent'), [[first], [first, answer, second]])
        # Nor does an error answer it.
        page.run('document.getElementById("temperature").value = "9"')
        self.ask('Reverse it.')
        page.idle()
        self.assertEqual([kind for kind, _ in page.articles()[-2:]], ['user unanswered', 'error'])
        self.assertEqual(self.server.end(), 0)

    def test_types_streams_stops_and_reloads(self):
        page = self.browser
        self.assertEqual(page.run('return document.getElementById("model").textContent'), MODEL.name)
        # A question, typed and sent with Enter; Shift+Enter only begins a line.
        page.type('#text', 'Compute\ue008\ue007\ue008')
        self.assertEqual(page.run('return document.getElementById("text").value'), 'Compute\n')
        self.assertEqual(page.articles(), [])
        page.run('document.getElementById("text").value = ""')
        self.ask('Compute 257-7.')
        page.idle()
        self.assertEqual(page.articles(), [['user', 'Compute 257-7.'], ['assistant', '250']])
        self.assertRegex(page.run('return document.getElementById("speed").textContent'), r'^\d+ tokens · .* tokens/s')
        # Text of a question is never read as HTML.
        self.ask('<img src=x onerror="document.title=1"> Spell mire.')
        page.idle()
        self.assertEqual(page.run('return document.querySelectorAll("#log img").length'), 0)
        self.assertEqual(page.run('return document.title'), 'Tessera')
        # A long answer: text comes bit by bit, and Stop ends it, also for the server.
        page.click('#clear')
        self.assertEqual(page.articles(), [])
        page.click('#think')
        page.run('document.getElementById("temperature").value = "2"')
        self.click_in_an_answer('stop')
        page.idle()
        for _ in range(500):
            if self.server.metric('tessera_requests_running') == 0:
                break
            time.sleep(0.01)
        self.assertEqual(self.server.metric('tessera_requests_running'), 0)
        self.assertFalse(page.run('return document.getElementById("send").disabled'))
        stopped = page.run('return document.getElementById("log").textContent')
        self.assertGreater(len(stopped), 20)
        self.assertTrue(page.run('return !document.querySelector("article.assistant details").hidden'))
        # The conversation outlives a reload, and goes on.
        page.call('POST', '/refresh', {})
        page.until('return document.getElementById("model").textContent')
        self.assertEqual(page.run('return document.getElementById("log").textContent'), stopped)
        # A new conversation, begun in the middle of an answer, knows nothing of that answer.
        page.run('document.getElementById("temperature").value = "2"')
        page.click('#clear')
        self.click_in_an_answer('clear')
        page.idle()
        self.assertEqual(page.run('return sessionStorage.getItem("tessera-conversation")'), '[]')
        self.assertEqual(page.articles(), [])
        # A server's error is shown, and the next question works.
        page.run('document.getElementById("temperature").value = "9"')
        self.ask('Compute 12+30.')
        page.idle()
        self.assertIn('temperature', page.run('return document.querySelector("article.error").textContent'))
        page.click('#clear')
        page.run('document.getElementById("temperature").value = "0"')
        for question in ('Compute 257-7.', 'Spell mire.'):
            self.ask(question)
            page.idle()
        self.assertEqual([text for kind, text in page.articles() if kind == 'assistant'][0], '250')
        faults = [one['message'] for one in page.call('POST', '/se/log', {'type': 'browser'})
                  if one['level'] == 'SEVERE' and ' 400 ' not in one['message'] and 'favicon' not in one['message']]
        self.assertEqual(faults, [])
        if os.environ.get('PICTURE'):
            with open(os.environ['PICTURE'], 'wb') as file:
                file.write(base64.b64decode(page.call('GET', '/screenshot')))
        self.assertEqual(self.server.end(), 0)


if __name__ == '__main__':
    if not (shutil.which('chromedriver') and shutil.which('chromium')):
        end_as_skipped('no chromium or no chromedriver; ./setup --no-run --dev installs them (apt install chromium chromium-driver)')
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
