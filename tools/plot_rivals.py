#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Flash's routed experts and attention beside other kernels on one H200: the picture of README and
docs/performance/hopper.md, from the records of both runs.

tools/plot_rivals.py RIVALS.json TARGETS.json FILE.svg"""
import argparse
import json
import math
import sys

SIZE, MARGIN, GAP = 420, 70, 110
OURS = "#c03030"
# Name in the picture, part of the name in the record, colour.
EXPERTS = (("Marlin-MoE, NVFP4", "Marlin-MoE", "#3060c0"), ("humming, NVFP4", "humming", "#40a0e0"),
           ("DeepGEMM, FP8", "DeepGEMM FP8 masked", "#309060"), ("PyTorch, BF16", "_grouped_mm bf16", "#808080"))
ATTENTION = (("64 heads, 128 + 512 keys", "64 heads", ""), ("128 heads, 128 + 1,024 keys", "128 heads", ' stroke-dasharray="5"'))


class Panel:
    """A square of the picture; x is logarithmic, and y too if `low` is given."""

    def __init__(self, left, title, tokens, high, low=None):
        self.left, self.tokens, self.high, self.low, self.num_names = left, tokens, high, low, 0
        self.out = [f'<text x="{left}" y="30" font-size="14">{title}</text>',
                    f'<text x="{left + SIZE / 2}" y="{MARGIN + SIZE + 42}" text-anchor="middle">tokens</text>']
        for count in tokens:
            self.out.append(f'<text x="{self.x(count):.1f}" y="{MARGIN + SIZE + 18}" text-anchor="middle">{count}</text>')

    def x(self, count):
        first, last = math.log2(self.tokens[0]), math.log2(self.tokens[-1])
        return self.left + (math.log2(count) - first) / (last - first) * SIZE

    def y(self, value):
        share = value / self.high if self.low is None else math.log(value / self.low) / math.log(self.high / self.low)
        return MARGIN + SIZE * (1 - share)

    def rule(self, value, text):
        self.out.append(f'<line x1="{self.left}" y1="{self.y(value):.1f}" x2="{self.left + SIZE}" y2="{self.y(value):.1f}" '
                        f'stroke="#ddd"/><text x="{self.left - 8}" y="{self.y(value) + 4:.1f}" text-anchor="end">{text}</text>')

    def line(self, name, points, colour, dash=""):
        path = " ".join(f"{self.x(count):.1f},{self.y(value):.1f}" for count, value in sorted(points.items()))
        at = MARGIN + 14 + 17 * self.num_names
        self.num_names += 1
        self.out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
                        f'<line x1="{self.left + 10}" y1="{at - 4}" x2="{self.left + 34}" y2="{at - 4}" stroke="{colour}" '
                        f'stroke-width="2"{dash}/><text x="{self.left + 40}" y="{at}" fill="{colour}">{name}</text>')


def fastest(rows, what, part):
    """Microseconds by tokens, of the fastest row of each number."""
    times = {}
    for row in rows:
        if what in row["what"] and part in (row.get("rival") or row["operator"]):
            times[row["tokens"]] = min(row["median_us"], times.get(row["tokens"], math.inf))
    return times


def ours(rows, name):
    return {row["tokens"]: row for row in rows if name in row["name"]}


def experts(rivals, targets):
    panel = Panel(MARGIN, "Flash's routed experts: reading their NVFP4 weights, share of the time", (1, 4, 16, 64, 256), 1)
    for percent in (0, 20, 40, 60, 80, 100):
        panel.rule(percent / 100, f"{percent} %")
    rows = ours(targets, "moe_experts flash")
    rows = {tokens: row for tokens, row in rows.items() if tokens in panel.tokens}
    panel.line("Tessera, NVFP4, exact", {tokens: row["share_of_read"] for tokens, row in rows.items()}, OURS)
    for name, part, colour in EXPERTS:
        times = fastest(rivals, "experts flash", part)
        shares = {tokens: row["read_median_us"] / times[tokens] for tokens, row in rows.items() if tokens in times}
        panel.line(name, shares, colour)
    return panel.out


def attention(rivals, targets):
    panel = Panel(MARGIN + SIZE + GAP, "Attention of one step, µs", (1, 8, 32, 128), 300, 10)
    for us in (10, 20, 50, 100, 200):
        panel.rule(us, us)
    for name, heads, dash in ATTENTION:
        # "64 heads" must not find 128 heads: names of ours have a blank before, those of rivals begin a word too.
        times = {tokens: row["median_us"] for tokens, row in ours(targets, f" {heads} of 512").items()}
        panel.line(f"Tessera, {name}", times, OURS, dash)
        rows = [row for row in rivals if row["what"].startswith(f"attention {heads}") and "as tessera" in row["what"]]
        panel.line(f"FlashMLA, {name}", fastest(rows, "attention", "FlashMLA"), "#3060c0", dash)
    return panel.out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("rivals", "targets", "file"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    with open(arguments.rivals) as file:
        record = json.load(file)
    rivals = [row for part in ("rival_rows", "torch_rows") for row in record[part] if "median_us" in row]
    with open(arguments.targets) as file:
        targets = json.load(file)["rows"]
    width, height = 2 * MARGIN + 2 * SIZE + GAP, SIZE + 2 * MARGIN
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
             f'<rect width="{width}" height="{height}" fill="white"/>']
    lines += experts(rivals, targets) + attention(rivals, targets) + ["</svg>"]
    with open(arguments.file, "w") as file:
        file.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
