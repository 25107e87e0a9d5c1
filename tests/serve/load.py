"""Very many clients of one server, half of whom leave in the middle of their answer.

    python tests/serve/load.py --clients 1000 --seconds 300 [--model FOLDER [options of gka serve]]

Every client asks again and again for a stream. Whoever stays reads it to [DONE]; whoever leaves closes the connection
after a few events, some of them rudely. At the end nobody may have gone without an answer, and slots, caches, open
files and connections are where they were before.
"""

import argparse
import asyncio
import collections
import json
import os
import random
import re
import socket
import struct
import sys
import time
from pathlib import Path

from servers import fake, started

PATIENCE = 120  # seconds without a byte, for those who wait in the queue; on a busy machine
LEVELS = ["gka_requests_running", "gka_requests_waiting", "gka_states_in_use", "gka_cache_bytes_in_use"]
LEVELS += ["gka_snapshots"]


LONGEST = 59  # letters of a prompt


def request(rng):
    chat = rng.random() < 0.3
    prompt = "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(1, LONGEST + 1)))
    body = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body |= {"max_tokens": rng.randrange(1, 60), "stream": True, "ignore_eos": True, "seed": rng.randrange(1000)}
    data = json.dumps(body).encode()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def ask(server, rng, leaves):
    """How one request went: done, left, or the status it was refused with; anything else is a fault."""
    reader, writer = await asyncio.open_connection(server.host, int(server.port))
    begun = False
    try:
        writer.write(request(rng))
        await writer.drain()
        status = (await asyncio.wait_for(reader.readline(), PATIENCE)).split()[1:2]
        if status != [b"200"]:
            return f"refused {status[0].decode()}" if status else "closed without an answer"
        begun, patience = True, rng.randrange(1, 20)  # events
        while line := await asyncio.wait_for(reader.readline(), PATIENCE):
            if line.startswith(b"data: [DONE]"):
                return "done"
            patience -= line.startswith(b"data: ")
            if leaves and patience <= 0:
                if rng.random() < 0.5:  # a reset in the place of a goodbye
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                return "left"
        return "cut off"
    except (TimeoutError, asyncio.TimeoutError):
        return "silent in the middle" if begun else "unanswered"
    finally:
        writer.close()


async def client(server, number, until, outcomes):
    rng = random.Random(number)
    while time.monotonic() < until:
        try:
            outcome = await ask(server, rng, leaves=number % 2 == 1)
        except OSError as error:
            outcome = f"{type(error).__name__}: {error}"
        outcomes[outcome] += 1
        if outcome.startswith("refused"):
            await asyncio.sleep(0.2 * rng.random())  # as Retry-After asks, though less patiently


def levels(server):
    text = server.get("/metrics")
    found = {name: float(re.search(rf"^{name}{{[^}}]*}} (\S+)", text, re.MULTILINE)[1]) for name in LEVELS}
    # This connection counts too.
    found["connections"] = float(re.search(r"^gka_http_connections (\S+)", text, re.MULTILINE)[1]) - 1
    found["files"] = len(os.listdir(f"/proc/{server.process.pid}/fd"))
    return found


def resident(server):
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def bytes_per_prefix(server):
    """What a remembered prefix of a prompt of ours keeps of attention's caches, at the most: as many pages of 64 tokens
    as the longest one fills, a token for each letter and those of the chat's template."""
    before = levels(server)
    server.post("/v1/completions", {"prompt": [1] * 64, "max_tokens": 1})
    server.wait_until_idle()
    page = levels(server)["gka_cache_bytes_in_use"] - before["gka_cache_bytes_in_use"]
    told = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})
    server.wait_until_idle()
    return page * ((told["usage"]["prompt_tokens"] + LONGEST) // 64)


def settled(server, wanted, each):
    """The levels, once they are what is wanted, or what they were after a while. Prefixes that are remembered may have
    come, and each keeps so many bytes of attention's caches at the most."""
    for _ in range(200):
        found = levels(server)
        came = found["gka_snapshots"] - wanted["gka_snapshots"]
        more = found["gka_cache_bytes_in_use"] - wanted["gka_cache_bytes_in_use"]
        others = wanted.keys() - {"gka_snapshots", "gka_cache_bytes_in_use"}
        if came >= 0 and 0 <= more <= came * each and all(found[name] == wanted[name] for name in others):
            return found, True
        time.sleep(0.05)
    return found, False


def storm(server, clients, seconds, say=lambda line: None):
    """What became of the requests. The server has to be idle, and is again afterwards."""
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    server.wait_until_idle()
    each = bytes_per_prefix(server)
    before, outcomes = levels(server), collections.Counter()
    say(f"before: {before}, {resident(server):.0f} MiB")

    async def all_of_them():
        until = time.monotonic() + seconds
        crowd = [asyncio.create_task(client(server, number, until, outcomes)) for number in range(clients)]
        while time.monotonic() < until:
            await asyncio.sleep(min(seconds / 10, max(0.0, until - time.monotonic())))
            say(f"{until - time.monotonic():.0f} s left: {dict(outcomes)}, {resident(server):.0f} MiB")
        await asyncio.gather(*crowd)

    asyncio.run(all_of_them())
    after, level = settled(server, before, each)
    say(f"after: {after}, {resident(server):.0f} MiB; {dict(outcomes)}")
    assert level, (before, after, each)
    wrong = [name for name in outcomes if name not in ("done", "left", "refused 429", "refused 503")]
    assert not wrong, outcomes
    return outcomes


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--clients", type=int, default=1000)
    options.add_argument("--seconds", type=float, default=300)
    options.add_argument("--model", help="a model's folder; without one, the engine without a model answers")
    arguments, more = options.parse_known_args()
    if arguments.model:
        program = os.environ.get("GKA_PROGRAM") or Path(sys.executable).parent / "gka"
        server = started(program, "serve", arguments.model, "--port", "0", "--device", "cpu", *more)
    else:
        server = fake(slots=64, queue=4096, step_us=2000)
    with server as running:
        storm(running, arguments.clients, arguments.seconds, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
