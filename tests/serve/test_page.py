"""The page in a browser: it chats, stops, edits, regenerates, colours, and opens a memory again."""

import pytest
from browser import chromium
from servers import fake


@pytest.fixture(scope="module")
def server():
    with fake(slots=4, step_us=3000) as running:
        yield running


@pytest.fixture(scope="module")
def page(tmp_path_factory, server):
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        opened.look(1100, 800)
        opened.open(server.address)
        yield opened


def click(page, where, text):
    page.run(f"[...document.querySelectorAll('{where} button')].find((b) => b.textContent === '{text}').click()")


def fill(page, **values):
    for name, value in values.items():
        page.run(f"document.getElementById('{name.replace('_', '-')}').value = {value!r}")


def send(page, text):
    page.run(f"document.getElementById('input').value = {text!r}; document.getElementById('composer').requestSubmit()")


IDLE = "state.running === null && state.messages.length"
LAST = "state.messages[state.messages.length - 1]"


def test_it_chats_and_colours_every_token(page):
    send(page, "SAY:Hello there")
    page.wait(f"{IDLE} && {LAST}.content === 'Hello there'")
    assert page.run("document.querySelectorAll('.assistant .token').length") == len("Hello there")
    assert page.run("document.querySelector('.assistant .token').style.backgroundColor") != ""
    page.run("document.getElementById('layers').click()")
    assert page.run("document.querySelectorAll('.layered figure').length") == 2
    page.run("document.getElementById('layers').click()")


def test_it_stops_and_regenerates_and_edits(page, server):
    page.run("newChat()")
    page.run("document.getElementById('max_tokens').value = 2048")
    send(page, "count")
    page.wait("state.running && state.messages.length === 2 && state.messages[1].content.length > 5")
    page.run("document.getElementById('stop').click()")
    page.wait(IDLE)
    server.wait_until_idle()
    page.run("document.getElementById('max_tokens').value = 16")
    click(page, ".assistant", "Regenerate")
    page.wait(f"{IDLE} && {LAST}.content.length === 16")
    click(page, ".user", "Edit")
    assert page.run("document.getElementById('input').value") == "count"
    assert page.run("state.messages.length") == 0


def test_a_memory_is_made_talked_to_forked_and_there_after_a_reload(page, server):
    page.run("newChat()")
    fill(page, memory_text="SAY:the ", memory_name="notes")
    page.run("document.getElementById('memory-create').click()")
    page.wait("state.memories.length === 1 && document.getElementById('memory').value")
    fill(page, memory_text="forked ")
    click(page, "#memory-list", "Fork")
    page.wait("JSON.parse(localStorage.getItem('gka')).memory === state.memories[1]?.id")
    page.open(server.address)
    page.wait("state.memories.length === 2 && document.getElementById('memory').value")
    send(page, "end")
    page.wait(f"{IDLE} && {LAST}.role === 'assistant'")
    assert page.run(f"{LAST}.content").startswith("the forked ")
    assert page.run("document.getElementById('status').textContent").find("remembered 15") > 0


def test_a_memory_may_keep_the_last_tokens_only_and_says_so(page):
    page.run("newChat()")
    fill(page, memory_text="SAY:abcdefgh", memory_name="short", memory_keep="3")
    page.run("document.getElementById('memory-create').click()")
    page.wait(
        "state.memories.some((memory) => memory.kept_tokens === 3) && !document.getElementById('memory-keep').value"
    )
    assert "short: 12 tokens (attention keeps the last 3)" in page.run(
        "document.getElementById('memory-list').textContent"
    )
    send(page, "end")
    page.wait(f"{IDLE} && {LAST}.role === 'assistant'")
    assert "of the memory attention sees the last 3 tokens" in page.run("document.getElementById('status').textContent")
    page.run("document.getElementById('memory').value = ''")


def test_it_fits_a_phone_and_works_by_keyboard(page):
    page.look(390, 780, dark=True)
    assert page.run("document.documentElement.scrollWidth") <= 390
    page.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 's', altKey: true}))")
    assert page.run("getComputedStyle(document.getElementById('panel')).display") == "block"
    page.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 's', altKey: true}))")
    page.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'n', altKey: true}))")
    assert page.run("document.activeElement.id") == "input"
    page.look(1100, 800)
