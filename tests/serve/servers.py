"""Starting servers, and talking to them without any library's help."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("GKA_BUILD_DIR", "build/cpu")


class Server:
    def __init__(self, process, address, key=None, log_file=None):
        self.process, self.address, self.key, self.log_file = process, address, key, log_file
        self.host, self.port = address.split("//")[1].rsplit(":", 1)

    def connect(self, timeout=30):
        return http.client.HTTPConnection(self.host, int(self.port), timeout=timeout)

    def ask(self, method, path, body=None, **headers):
        """(status, headers, body as JSON or text)."""
        connection = self.connect()
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.key:
            headers.setdefault("Authorization", f"Bearer {self.key}")
        connection.request(
            method, path, body if isinstance(body, (bytes, str, type(None))) else json.dumps(body), headers
        )
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        is_json = response.headers.get("Content-Type", "").startswith("application/json")
        return response.status, response.headers, json.loads(text) if is_json else text

    def post(self, path, body, status=200):
        got, _, answer = self.ask("POST", path, body)
        assert got == status, answer
        return answer

    def get(self, path):
        status, _, answer = self.ask("GET", path)
        assert status == 200, answer
        return answer

    def stream(self, path, body):
        """The events of a stream, [DONE] among them."""
        connection = self.connect()
        connection.request("POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        events = response.read().decode().split("\n\n")
        connection.close()
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def log(self):
        """What it has logged so far."""
        self.log_file.seek(0)
        return self.log_file.read()

    def running(self):
        return sum(slot["is_processing"] for slot in self.get("/slots"))

    def wait_until_idle(self):
        for _ in range(500):
            busy = [line for line in self.get("/metrics").splitlines() if line.startswith("gka_requests_running{")]
            if self.running() == 0 and all(line.endswith(" 0.0") for line in busy):
                return
            time.sleep(0.02)
        pytest.fail("slots stay in use")


@contextlib.contextmanager
def started(*command, key=None):
    # The log goes to a file: a pipe that nobody reads would fill up, and the server wait for it.
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            address = process.stdout.readline().strip()
            if not address.startswith("http"):
                process.kill()
                process.wait()
                log.seek(0)
                pytest.fail(f"{command} did not start: {log.read()}")
            yield Server(process, address, key, log)
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()


def fake(program=None, **options):
    """The server over an engine without a model; see tool/fake_server.cpp."""
    program = Path(program or BUILD / "bin/gka_fake_server")
    if not program.exists():
        pytest.skip(f"there is no {program}: this build has no C++ tests")
    key = options.get("keys", "").split(",")[0] or None
    return started(program, *(f"{name}={value}" for name, value in options.items()), key=key)
