#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Predicted tokens per second against the batch, of plans on H200s: the picture of docs/performance/several_gpus.md.

tools/plot_plans.py build/release/apps/tessera/tessera FILE.svg"""
import argparse
import json
import math
import os
import subprocess
import sys
import tempfile

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
LINES = (("flash", "2xh200", "fp8", "#3060c0"), ("flash", "2xh200", "nvfp4", "#40a0e0"),
         ("pro", "8xh200", "fp8", "#c03030"), ("pro", "8xh200", "nvfp4", "#e08040"))
SIZE, MARGIN, LOW, HIGH = 480, 70, 50.0, 20000.0


def rates(program, model, gpus, dense):
    """Tokens per second of the chosen plan and of its limit, for each batch at 8K of context."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "plan.json")
        for batch in BATCHES:
            subprocess.run([program, "plan", "--model", model, "--gpus", gpus, "--dense", dense, "--context", "8k",
                            "--batch", str(batch), "--json", path], check=True, stdout=subprocess.DEVNULL)
            with open(path) as file:
                plan = json.load(file)
            decode = plan["candidates"][plan["chosen"]]["decode"]
            yield batch, batch / decode["us"] * 1e6, batch / decode["limit_us"] * 1e6


def place(batch, rate):
    x = MARGIN + math.log2(batch) / math.log2(BATCHES[-1]) * SIZE
    y = MARGIN + SIZE - (math.log(rate) - math.log(LOW)) / (math.log(HIGH) - math.log(LOW)) * SIZE
    return f"{x:.1f},{y:.1f}"


def picture(lines):
    side = SIZE + 2 * MARGIN
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side} {side}" font-family="sans-serif" font-size="12">',
           f'<rect width="{side}" height="{side}" fill="white"/>']
    for rate in (50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000):
        x, y = place(1, rate).split(",")
        out.append(f'<line x1="{x}" y1="{y}" x2="{MARGIN + SIZE}" y2="{y}" stroke="#ddd"/>'
                   f'<text x="{MARGIN - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{rate:,}</text>')
    for batch in BATCHES:
        x = place(batch, LOW).split(",")[0]
        out.append(f'<text x="{x}" y="{MARGIN + SIZE + 18}" text-anchor="middle">{batch}</text>')
    for row, ((model, gpus, dense, colour), points) in enumerate(zip(LINES, lines)):
        for index, dash in ((1, ""), (2, ' stroke-dasharray="4"')):
            path = " ".join(place(point[0], point[index]) for point in points)
            out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        out.append(f'<text x="{MARGIN + 12}" y="{MARGIN + 16 + 16 * row}" fill="{colour}">{model}, {gpus}, dense maps {dense}</text>')
    out.append(f'<text x="{MARGIN}" y="30">Decode, predicted tokens/s of all sequences at 8K of context; dashed: limit</text>'
               f'<text x="{MARGIN + SIZE / 2}" y="{MARGIN + SIZE + 42}" text-anchor="middle">batch</text></svg>')
    return "\n".join(out) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("file")
    arguments = parser.parse_args()
    lines = [list(rates(arguments.program, *line[:3])) for line in LINES]
    with open(arguments.file, "w") as file:
        file.write(picture(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
