"""kill -9 while a server writes memories: each is there whole or not at all, and what was promised is there.

python tests/serve/kills.py --kills 30 [--model FOLDER]
"""

import argparse
import contextlib
import ctypes
import http.client
import json
import os
import random
import select
import sys
import tempfile
import threading
import time
from pathlib import Path

from safetensors import safe_open
from servers import started

PROGRAM = Path(sys.executable).parent / "gka"
MODEL = Path(__file__).resolve().parents[1] / "goldens/tiny-hqwen3-gka"


def serve(model, folder):
    arguments = ["--tokenizer", "bytes", "--port", "0", "--device", "cpu", "--memories", folder]
    return started(PROGRAM, "serve", model, *arguments)


def write_memories(server, rng, promised):
    """One after the other until the server is gone; those it has answered for are promised."""
    try:
        while True:
            tokens = [rng.randrange(200) for _ in range(rng.randrange(100, 1500))]
            promised[server.post("/v1/memories", {"input": tokens})["id"]] = len(tokens)
    except (OSError, http.client.HTTPException):
        pass


def kill_in_a_write(server, folder, rng, patience=30):
    """Kills the server as soon as a file begins to be written, or a moment later. Whether it was caught at it."""
    libc, created = ctypes.CDLL(None), 0x100
    watch = libc.inotify_init()
    libc.inotify_add_watch(watch, os.fsencode(folder), created)
    for _ in range(rng.randrange(1, 4)):  # the first of them, or one of the next
        select.select([watch], [], [], patience)
        os.set_blocking(watch, False)
        with contextlib.suppress(BlockingIOError):
            os.read(watch, 4096)
    time.sleep(rng.choice([0, 0, 0.0005, 0.002]))
    server.process.kill()
    server.process.wait()
    os.close(watch)
    return any(".writing-" in name for name in os.listdir(folder))


def tokens_of(folder):
    """The memories in a folder and how many tokens each has. A file that is not whole raises."""
    found = {}
    for path in Path(folder).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                assert file.get_tensor(name).isfinite().all(), (path, name)
            found[file.metadata()["id"]] = len(file.get_tensor("tokens"))
    return found


def kill_and_look(model, folder, rng):
    promised = {}
    with serve(model, folder) as server:
        writer = threading.Thread(target=write_memories, args=[server, rng, promised])
        writer.start()
        caught = kill_in_a_write(server, folder, rng)
        writer.join()
    found = tokens_of(folder)
    assert promised.items() <= found.items(), (promised, found)
    with serve(model, folder) as server:
        listed = {memory["id"]: memory["tokens"] for memory in server.get("/v1/memories")["data"]}
        assert listed == found, (listed, found)
        assert sorted(os.listdir(folder)) == sorted(f"{name}.safetensors" for name in found)
        for name in promised:
            server.post("/v1/completions", {"prompt": "x", "memory": name, "max_tokens": 1})
            assert server.ask("DELETE", f"/v1/memories/{name}")[0] == 200
    return {"caught writing": caught, "promised": len(promised), "found": len(found)}


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=30)
    options.add_argument("--model", default=MODEL)
    arguments = options.parse_args()
    for i in range(arguments.kills):
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(kill_and_look(arguments.model, folder, random.Random(i))), flush=True)


if __name__ == "__main__":
    main()
