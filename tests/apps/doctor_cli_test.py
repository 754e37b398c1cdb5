# SPDX-License-Identifier: Apache-2.0
"""`tessera inspect` and `tessera check` from outside: exit codes, JSON, hashes, and a verdict in words."""
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

PROGRAM, MODEL = sys.argv[1], pathlib.Path(sys.argv[2])


def run(*arguments, code=0):
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=600)
    assert done.returncode == code, (arguments, done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    return done


def damage(path, offset_from_end):
    data = bytearray(path.read_bytes())
    data[-offset_from_end] ^= 0x11
    path.write_bytes(data)


def main():
    found = json.loads(run("inspect", MODEL, "--json").stdout)
    assert found["tensors"] == 1124 and found["problems"] == []
    assert sum(part["bytes"] for part in found["parts"]) == found["bytes"]
    assert "nvfp4" in run("inspect", MODEL).stdout
    run("inspect", MODEL / "nowhere", code=3)
    run("check", MODEL / "nowhere", code=3)
    assert "No fault found" in run("check", MODEL).stdout

    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "model"
        shutil.copytree(MODEL, copy)
        run("check", copy, "--write-hashes", "--quiet")
        hashes = json.loads((copy / "hashes.json").read_text())
        assert hashes["algorithm"] == "xxh3-128" and len(hashes["tensors"]) == 1124
        assert json.loads(run("check", copy, "--json", "--quiet").stdout)["tensors_hashed"] == 1124
        run("check", copy, "--write-hashes", "--quiet")  # the same again
        damage(copy / "model.safetensors", 100)
        out = json.loads(run("check", copy, "--json", "--quiet", code=7).stdout)
        assert not out["is_sound"] and out["findings"][0]["kind"] == "hash", out
        refused = run("check", copy, "--write-hashes", "--quiet", code=7).stdout
        assert "--force" in refused, refused
        assert json.loads((copy / "hashes.json").read_text()) == hashes, "the evidence is kept"
        run("check", copy, "--write-hashes", "--force", "--quiet")
        assert json.loads((copy / "hashes.json").read_text()) != hashes
        assert run("check", copy, "--quiet").stdout.startswith("1124 tensors compared")

        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "num_hash_layers": 2}))
        done = run("inspect", copy, code=3)
        assert "layers.1.ffn.gate.tid2eid" in done.stderr and "problem" in done.stdout, done.stderr

    deep = ("check", MODEL, "--deep", "--tokens", 24, "--mode", "f32", "--cache", "exact", "--quiet")
    out = json.loads(run(*deep, "--json").stdout)
    assert out["is_sound"] and out["verdict"].startswith("Healthy as far as was tested"), out
    assert "Not tested" in out["verdict"] and out["mistakes_tried"] == out["mistakes_to_try"] > 0, out
    assert out["nats_per_token_expected"] > 0
    run(*deep, "--device", "tpu", code=2)
    run("check", MODEL, "--device", "tpu", "--quiet")  # only --deep computes
    assert len(out["layers"]) == 6 and out["nats_per_token"] < out["nats_per_token_guessing"]


main()
