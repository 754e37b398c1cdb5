#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Predicted beside measured times on an H200: a table for docs/performance/prediction.md, and a picture.

tools/compare_prediction.py build/cpu/apps/tessera/tessera [--picture FILE.svg] [--all]
Measured: linear maps and experts of the records named below. Rows that set a constant of the
model are marked, and counted apart from those held out."""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Maps of few tokens, experts of few, kernels of many, which are others since e160f5f, and the ring of one token: of each
# record the rows of today's kernels.
FEW = "bench/results/2026-11-23-h200-nvfp4-ops.json"
FEW_EXPERTS = "bench/results/2026-11-26-h200-few-experts.json"
FEW_TILES = "bench/results/2026-11-26-h200-few-tiles.json"  # of two tokens, since when they have that kernel
MANY = "bench/results/2026-11-23-h200-many-tokens.json"
RING = "bench/results/2026-11-24-h200-one-token.json"
MOST_MAP_TOKENS, MOST_EXPERT_TOKENS = 8, 256


def sets_a_constant(shape, tokens):
    """Rows that set the model's constants (docs/performance/prediction.md); all others are held out."""
    if not shape.startswith("flash"):
        return False
    if "experts" in shape:
        return tokens in (1, 2, 4, 16)
    if "shared w1" in shape:
        return tokens == 1
    return "wo_b" in shape or "wq_b" in shape and (tokens == 1 or tokens > MOST_MAP_TOKENS)


def read(record):
    with open(os.path.join(ROOT, record)) as file:
        return json.load(file)


def named(rows):
    for row in rows:
        op = row["op"] if "op" in row else row["name"]
        if " nvfp4 " in op and "zipf" not in op:
            yield op.split(" ", 1)[1].replace(" nvfp4", "").replace(" a16", ""), row["tokens"], row


def measured_rows(model):
    """(shape, tokens, us, whether the ring was measured)."""
    few = [(name, tokens, row["median_us"], False) for name, tokens, row in named(read(FEW)["rows"])
           if "experts" not in name and tokens <= MOST_MAP_TOKENS]
    few += [(name, tokens, row["median_us"], False)
            for name, tokens, row in named(read(FEW_EXPERTS)["reports"]["one_kernel_ops"]["rows"])
            if 2 < tokens <= MOST_EXPERT_TOKENS]
    few += [(name, tokens, row["median_us"], False) for name, tokens, row in named(read(FEW_TILES)["rows"])
            if tokens == 2 and row["tiles_to_a_team"] == 0.9]
    many = [(name, tokens, statistics.mean(row["now_us"]), False) for name, tokens, row in named(read(MANY)["rows"])
            if "experts" not in name or tokens > MOST_EXPERT_TOKENS]
    record = read(RING)["first run, both forms by one program"]
    ring = [(name, tokens, row["median_us"], True)
            for rows, most in ((record["maps"]["ring 1"], 1), (record["experts"]["ring 8"], 2))
            for name, tokens, row in named(rows) if tokens <= most]
    return [row for row in few + many + ring if row[0].startswith(model)]


def predictions(program, model, tokens):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "plan.json")
        subprocess.run([program, "plan", "kernels", "--target", "h200", "--model", model, "--tokens",
                        ",".join(map(str, tokens)), "--json", path], check=True, stdout=subprocess.DEVNULL)
        with open(path) as file:
            rows = json.load(file)["rows"]
    return {(row["shape"], row["tokens"]): row for row in rows}


def picture(rows):
    """Predicted over measured, both logarithmic: on the line they agree, between the dashed ones within 10 %."""
    size, margin, low, high = 480, 60, 2.0, 12000.0

    def at(value):
        return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low)) * size

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size + 2 * margin} {size + 2 * margin}" '
           'font-family="sans-serif" font-size="12">',
           f'<rect width="{size + 2 * margin}" height="{size + 2 * margin}" fill="white"/>']

    def point(x, y):
        return f"{margin + x:.1f}", f"{margin + size - y:.1f}"

    for factor, dash in ((1, ""), (1.1, ' stroke-dasharray="4"'), (1 / 1.1, ' stroke-dasharray="4"')):
        (x1, y1), (x2, y2) = point(at(low), at(low * factor)), point(at(high), at(high * factor))
        out.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#888"{dash}/>')
    for tick in (2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000):
        x, y = point(at(tick), 0)
        out.append(f'<text x="{x}" y="{margin + size + 18}" text-anchor="middle">{tick}</text>')
        x, y = point(0, at(tick))
        out.append(f'<text x="{margin - 8}" y="{y}" text-anchor="end">{tick}</text>')
    for shape, tokens, us, row in rows:
        x, y = point(at(us), at(row["pessimistic"]["us"]))
        colour = "#c03030" if "experts" in shape else "#3060c0"
        fill = "none" if sets_a_constant(shape, tokens) else colour
        out.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{fill}" stroke="{colour}" fill-opacity="0.7"><title>{shape}, '
                   f"{tokens} tokens</title></circle>")
    out.append(f'<text x="{margin + size / 2}" y="{margin + size + 42}" text-anchor="middle">measured, us</text>')
    out.append(f'<text x="18" y="{margin + size / 2}" transform="rotate(-90 18 {margin + size / 2})" '
               'text-anchor="middle">predicted, us</text>')
    out.append(f'<text x="{margin}" y="30">H200: linear maps (blue), routed experts (red), rows that set a constant '
               'hollow; dashed: 10 % off</text></svg>')
    return "\n".join(out) + "\n"


def summary(name, off):
    if off:
        within = sum(abs(x) <= 0.1 for x in off)
        print(f"{name}: {within} of {len(off)} within 10 %, the median {statistics.median(map(abs, off)) * 100:.1f} % "
              f"off, {min(off) * 100:+.0f} to {max(off) * 100:+.0f} %.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--picture")
    parser.add_argument("--all", action="store_true", help="every row, not those alone that the page shows")
    arguments = parser.parse_args()
    rows, missing = [], []
    for model in ("flash", "pro"):
        measured = measured_rows(model)
        predicted = predictions(arguments.program, model, sorted({tokens for _, tokens, _, _ in measured}))
        for shape, tokens, us, is_ring in measured:
            row = predicted.get((shape, tokens))
            if (row is not None and row["pessimistic"]["kernels"][0]["name"].endswith("_ring")) != is_ring:
                continue
            (missing if row is None else rows).append((shape, tokens, us, row))
    print("| shape | tokens | measured, µs | predicted | off | limit |\n| --- | --- | --- | --- | --- | --- |")
    off = {}
    for shape, tokens, us, row in rows:
        guess = row["pessimistic"]
        error = guess["us"] / us - 1
        off[shape, tokens] = error
        if arguments.all or abs(error) > 0.1:
            mark = ", set by it" if sets_a_constant(shape, tokens) else ""
            print(f"| {shape} | {tokens:,} | {us:,.1f} | {guess['us']:,.1f} | {error * 100:+.0f} %{mark} | "
                  f"{guess['limit']} |")
    print()
    held_out = {key: error for key, error in off.items() if not sets_a_constant(*key)}
    summary("All", list(off.values()))
    summary("Held out", list(held_out.values()))
    summary("Rows that set constants", [error for key, error in off.items() if sets_a_constant(*key)])
    for name, choose in (("held out, maps of up to 8 tokens", lambda s, n: "experts" not in s and n <= 8),
                         ("held out, maps of more", lambda s, n: "experts" not in s and n > 8),
                         ("held out, experts", lambda s, n: "experts" in s),
                         ("held out, Flash", lambda s, n: s.startswith("flash")),
                         ("held out, Pro", lambda s, n: s.startswith("pro"))):
        summary(name, [error for key, error in held_out.items() if choose(*key)])
    print(f"Measured, not described: {len(missing)}.")
    if arguments.picture:
        with open(arguments.picture, "w") as file:
            file.write(picture(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
