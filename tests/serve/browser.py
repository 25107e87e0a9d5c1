"""A headless Chromium, driven over its own protocol; as much of WebSocket as that takes."""

import base64
import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import time
import urllib.request

import pytest


class Page:
    def __init__(self, address):
        host, path = address.removeprefix("ws://").split("/", 1)
        self.host = host
        name, port = host.split(":")
        self.socket = socket.create_connection((name, int(port)), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self.held = b""
        while b"\r\n\r\n" not in self.held:
            self.held += self.socket.recv(4096)
        self.held = self.held.split(b"\r\n\r\n", 1)[1]
        self.last = 0

    def take(self, count):
        while len(self.held) < count:
            part = self.socket.recv(1 << 16)
            if not part:
                pytest.fail("Chromium went away")
            self.held += part
        taken, self.held = self.held[:count], self.held[count:]
        return taken

    def receive(self):
        text = b""
        while True:
            first, length = self.take(2)
            length &= 127
            if length == 126:
                length = struct.unpack(">H", self.take(2))[0]
            elif length == 127:
                length = struct.unpack(">Q", self.take(8))[0]
            text += self.take(length)
            if first & 128:
                return json.loads(text)

    def press(self, key, **more):
        """A key as the keyboard sends it; `text` is what it types."""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def call(self, method, **parameters):
        self.last += 1
        data = json.dumps({"id": self.last, "method": method, "params": parameters}).encode()
        mask = os.urandom(4)
        size = struct.pack(">B", 128 | len(data)) if len(data) < 126 else struct.pack(">BH", 254, len(data))
        self.socket.sendall(b"\x81" + size + mask + bytes(c ^ mask[i % 4] for i, c in enumerate(data)))
        while True:
            message = self.receive()
            if message.get("id") == self.last:
                assert "error" not in message, message
                return message["result"]

    def run(self, script):
        """The value of a JavaScript expression, which may be a promise."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait(self, condition, seconds=30):
        for _ in range(seconds * 20):
            if self.run(f"Boolean({condition})"):
                return
            time.sleep(0.05)
        pytest.fail(f"never true in the page: {condition}; it shows {self.run('document.body.innerText')}")

    def open(self, address):
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && document.querySelector('#model option')")

    def look(self, width, height, dark=False):
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def another(self, address):
        """One more tab of the same browser."""
        with urllib.request.urlopen(urllib.request.Request(f"http://{self.host}/json/new", method="PUT")) as made:
            page = Page(json.load(made)["webSocketDebuggerUrl"])
        page.open(address)
        return page

    def picture(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def chromium(folder):
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium here (apt-get install chromium)")
    command = [
        program,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-features=BackForwardCache",  # a page that was left is gone, and does not wait frozen for a debugger
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "about:blank",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            port = None
            for line in process.stderr:
                if "DevTools listening on" in line:
                    port = line.split("ws://")[1].split("/")[0]
                    break
            if port is None:
                pytest.skip("Chromium does not start here")
            with urllib.request.urlopen(f"http://{port}/json") as listed:
                pages = [page for page in json.load(listed) if page["type"] == "page"]
            yield Page(pages[0]["webSocketDebuggerUrl"])
        finally:
            process.kill()
