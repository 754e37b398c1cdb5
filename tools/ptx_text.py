# SPDX-License-Identifier: Apache-2.0
"""Reads the PTX that nvcc writes, inline assembly with it: the instructions of each kernel, and what may follow what."""
import collections
import re

# Its line in the file, its text without guard and semicolon, the first word of that, and its guard ("@p", "@!p" or "").
Instruction = collections.namedtuple("Instruction", "line text opcode guard")


def kernels_of(text):
    """{mangled name: [Instruction or label string]}"""
    kernels, body, depth, name = {}, None, 0, None
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("//")[0].strip()
        start = re.match(r"(?:\.\w+\s+)*\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", line)
        if start and depth == 0:
            name, body = start[1], []
        for part in re.findall(r"[{}]|[^;{}]*(?:\{[^{};]*\}[^;{}]*)*;|[\w$]+:", line) or []:
            part = part.strip()
            if part == "{":
                depth += 1
            elif part == "}":
                depth -= 1
                if depth == 0 and body is not None:
                    kernels[name], body = body, None
            elif depth > 0 and body is not None:
                label = re.match(r"([\w$]+):(.*)$", part)
                if label and not part.startswith("."):
                    body.append(label[1])
                    part = label[2].strip()
                guard = re.match(r"@!?[\w%$]+\s+", part)
                rest = part[guard.end():] if guard else part
                if rest.rstrip("; ") and not rest.startswith("."):
                    opcode = rest.split()[0].rstrip(";")
                    body.append(Instruction(number, rest.rstrip(";"), opcode, guard[0].strip() if guard else ""))
    return kernels


def successors(body):
    """Of each position those that may come next. A label stands for the nearest one of its name: inline assembly repeats them."""
    places = collections.defaultdict(list)
    for at, item in enumerate(body):
        if isinstance(item, str):
            places[item].append(at)
    result = []
    for at, item in enumerate(body):
        following = [at + 1] if at + 1 < len(body) else []
        if isinstance(item, Instruction):
            if item.opcode.startswith("bra"):
                target = item.text.split()[-1]
                if places[target]:
                    jump = [min(places[target], key=lambda place: abs(place - at))]
                    following = jump + following if item.guard else jump
            elif item.opcode.startswith("brx"):
                following = [place for where in places.values() for place in where]
            elif item.opcode in ("ret", "exit", "trap") and not item.guard:
                following = []
        result.append(following)
    return result
