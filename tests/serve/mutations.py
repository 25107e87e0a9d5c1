"""Requests with something wrong in them: bodies, headers, UTF-8, numbers, nesting, sizes, and senders that are slow.

    python tests/serve/mutations.py --count 100000 [--program build/asan/bin/gka_fake_server]

Each goes to the server on a connection of its own. None may be answered with 500 or not at all, the server stays up,
and its memory stays level.
"""

import argparse
import asyncio
import collections
import json
import random
import time

from load import resident
from servers import fake

VALUES = [
    *["null", "true", "-1", "0", "-0", "1e308", "1e999", "-1e999", "5.9", "0.1e1", '""', '"x"', "[]", "{}", "[[]]"],
    *[
        "4294967301",
        "9223372036854775807",
        "9223372036854775808",
        "18446744073709551616",
        "1" + "0" * 400,
        "NaN",
        "0x1",
    ],
    *['"\\u0000"', '"\\ud800"', '"\\udc00\\ud800"', '"\U0001f600"', '"auto"', '{"a": {}}', "[null]", "[[1], [2]]"],
    *[
        '{"type": "json_object"}',
        '{"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}',
        "3.141592653589793",
    ],
    *['{"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array", "minItems": 1e18}}}'],
]
NAMES = [
    *["prompt", "messages", "max_tokens", "stop", "n", "logprobs", "stream", "echo", "iterations", "memory", "tools"],
    *["response_format", "logit_bias", "seed", "temperature", "certainty", "stream_options", "chat_template_kwargs"],
    *["input", "keep_tokens", "content", "tokens", "top_logprobs", "min_tokens", "stop_token_ids", "model"],
    *["instructions", "text", "include", "store", "previous_response_id", "reasoning", "metadata", "truncation"],
    *["prompt\\u0000"],
]
PATHS = [
    *["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/memories", "/apply-template"],
    *["/v1/responses", "/v1/responses/x", "/v1/responses/x/input_items?limit=%00&order=1e9"],
    *[
        "/v1/memories/x/fork",
        "/v1/models/x",
        "/slots",
        "/v1/completions?a=%00%zz",
        "//",
        "/%2e%2e/etc",
        "/" + "a" * 9000,
    ],
]
INPUTS = [
    '"x"',
    '[{"role": "user", "content": [{"type": "input_text", "text": "x"}]}, {"type": "reasoning", "summary": []}]',
    '[{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}, '
    '{"type": "function_call_output", "call_id": "c", "output": "x"}, {"role": "user", "content": "x"}]',
]
BYTES = [
    b"\xff",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"\xf5\x80\x80\x80",
    b"\x00",
    b"\xef\xbb\xbf",
    b"\r",
    b"\n",
    b"\r\n\r\n",
]
HEADERS = [
    *["Content-Length: 3", "Content-Length: -1", "Content-Length: 0x10", "Content-Length: 99999999999999999999"],
    *[
        "Transfer-Encoding: chunked",
        "Transfer-Encoding: gzip, chunked",
        "Expect: 100-continue",
        "Connection: keep-alive",
    ],
    *["Authorization: Bearer \xff", "Origin: https://evil.example", "Host: [::1", "X: " + "y" * 40_000, ": no name"],
    *[" folded: x", "No-Colon", "A: b\rc", "Accept-Encoding: gzip;q=1e999", "X-Request-Id: ../../x", "Upgrade: h2c"],
    *["\r\n".join(f"H{i}: x" for i in range(200))],
]


def body_of(rng, path):
    chat = "chat" in path or "apply" in path
    fields = ['"messages": [{"role": "user", "content": "x"}]' if chat else '"prompt": "x"', '"max_tokens": 3']
    if "responses" in path:
        fields = [f'"input": {rng.choice(INPUTS)}', '"max_output_tokens": 3']
    for _ in range(rng.randrange(3)):
        fields.insert(rng.randrange(len(fields) + 1), f'"{rng.choice(NAMES)}": {rng.choice(VALUES)}')
    kind = rng.random()
    if kind < 0.03:  # nested
        opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
        depth = rng.choice([10, 63, 65, 1000, 50_000])
        fields.append('"tools": ' + opening * depth + ("1" + closing * depth if rng.random() < 0.5 else ""))
    elif kind < 0.05:  # large
        fields.append(
            f'"{rng.choice(NAMES)}": "' + rng.choice(["x", "\U0001f600", "\\n"]) * rng.choice([1000, 60_000]) + '"'
        )
    elif kind < 0.06:  # many
        fields += [f'"k{i}": {i}' for i in range(rng.choice([100, 5000]))]
    return ("{" + ", ".join(fields) + "}").encode()


def shaken(rng, data):
    data = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(data) + 1)
        change = rng.randrange(5)
        if change == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif change == 1:
            del data[at : at + rng.randrange(1, 16)]
        elif change == 2:
            data[at:at] = data[rng.randrange(len(data) + 1) :][: rng.randrange(64)]
        elif change == 3:
            data[at:at] = rng.choice(BYTES)
        else:
            data[at:at] = rng.choice(VALUES).encode()
    return bytes(data)


def chunked(rng, data):
    out = b""
    while data:
        size = rng.randrange(1, 200)
        written = f"{len(data[:size]) + (rng.randrange(-1, 2) if rng.random() < 0.05 else 0):x}".encode()
        out += written + rng.choice([b"\r\n"] * 20 + [b"\n", b";a=b\r\n", b" \r\n"]) + data[:size] + b"\r\n"
        data = data[size:]
    return out + b"0\r\n\r\n"


def mutation(rng):
    """The bytes of a request, most of them wrong somewhere."""
    path = rng.choice(PATHS)
    body = body_of(rng, path)
    if rng.random() < 0.4:
        body = shaken(rng, body)
    lines = [
        f"{rng.choice(['POST', 'POST', 'POST', 'GET', 'DELETE', 'HEAD', 'OPTIONS', 'X'])} {path} HTTP/1.1",
        "Host: x",
    ]
    if rng.random() < 0.1:
        lines.append("Transfer-Encoding: chunked")
        body = chunked(rng, body)
    else:
        lines.append(f"Content-Length: {len(body) + (rng.choice([-3, 5, 10**12]) if rng.random() < 0.05 else 0)}")
    if rng.random() < 0.2:
        lines.insert(rng.randrange(1, len(lines) + 1), rng.choice(HEADERS))
    lines += ["Connection: close", "", ""]
    head = "\r\n".join(lines).encode("latin-1")
    if rng.random() < 0.15:
        head = shaken(rng, head)
    return head + body


async def send(server, rng, slow):
    """The status that came back; "closed" or "reset" where none did; "hang" where nothing happened for long."""
    reader, writer = await asyncio.open_connection(server.host, int(server.port))
    try:
        data = mutation(rng)
        if slow:  # in pieces, and the last of them too late
            for at in range(0, len(data), len(data) // 6 + 1):
                writer.write(data[at : at + len(data) // 6 + 1])
                await writer.drain()
                await asyncio.sleep(0.08)
        else:
            writer.write(data)
        # What was not sent yet is nobody's concern: a server may answer, and close, before it has read all.
        answer = await asyncio.wait_for(reader.read(65536), 60)
        return answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.") else "closed"
    except (TimeoutError, asyncio.TimeoutError):
        return "hang"
    except ConnectionError:
        return "reset"
    finally:
        writer.close()


def shake(server, count, seed=0, at_once=16, say=lambda line: None):
    """So many mutations; how often each status came."""
    outcomes, sizes, begun = collections.Counter(), [], time.monotonic()

    async def worker(number):
        rng = random.Random(f"{seed} {number}")
        for i in range(count // at_once):
            outcomes[await send(server, rng, slow=rng.random() < 0.002)] += 1
            if number == 0 and (i + 1) % max(1, count // at_once // 10) == 0:
                sizes.append(resident(server))
                say(f"{outcomes.total()} in {time.monotonic() - begun:.0f} s: {dict(outcomes)}, {sizes[-1]:.1f} MiB")

    async def all_of_them():
        await asyncio.gather(*(worker(number) for number in range(at_once)))

    asyncio.run(all_of_them())
    assert server.process.poll() is None, "the server is gone"
    assert not outcomes["500"] and not outcomes["hang"], outcomes
    server.wait_until_idle()
    assert server.post("/v1/completions", {"prompt": "SAY:fine"})["choices"][0]["text"] == "fine"
    # What a first thousand leaves behind is the allocator's; after it, every tenth looks like the one before.
    assert sizes[-1] < 1.15 * sizes[len(sizes) // 5] + 4, sizes
    return outcomes


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--program", help="another gka_fake_server, one with sanitizers say")
    arguments = options.parse_args()
    with fake(arguments.program, slots=4, head_ms=300, body_ms=300) as server:
        outcomes = shake(server, arguments.count, arguments.seed, say=lambda line: print(line, flush=True))
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
