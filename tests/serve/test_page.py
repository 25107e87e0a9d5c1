"""The page in a browser: it chats, stops, edits, regenerates, colours, and opens a memory again; nobody is scrolled
away or loses a chat, whether to a reload, a second tab or a server that went away."""

import json
import signal

import pytest
from browser import chromium
from servers import fake


@pytest.fixture(scope="module")
def server():
    with fake(slots=4, step_us=3000) as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory, server):
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        opened.look(1100, 800)
        opened.open(server.address)
        yield opened


@pytest.fixture
def page(browser):
    browser.run("newChat(); document.getElementById('max_tokens').value = 256")
    return browser


def click(page, where, text):
    page.run(f"[...document.querySelectorAll('{where} button')].find((b) => b.textContent === '{text}').click()")


def fill(page, **values):
    for name, value in values.items():
        page.run(f"document.getElementById('{name.replace('_', '-')}').value = {json.dumps(value)}")


def send(page, text):
    fill(page, input=text)
    page.run("document.getElementById('composer').requestSubmit()")


def shown(page, where):
    return page.run(f"document.querySelector('{where}').textContent")


IDLE = "state.running === null && state.messages.length"
LAST = "state.messages[state.messages.length - 1]"
LOG = "document.getElementById('log')"


def test_it_chats_and_colours_every_token(page):
    send(page, "SAY:Hello there")
    page.wait(f"{IDLE} && {LAST}.content === 'Hello there'")
    assert page.run("document.querySelectorAll('.assistant .token').length") == len("Hello there")
    assert page.run("document.querySelector('.assistant .token').style.backgroundColor") != ""
    page.run("document.getElementById('layers').click()")
    assert page.run("document.querySelectorAll('.layered figure').length") == 2
    assert shown(page, ".layered .bubble") == "Hello there"
    page.run("document.getElementById('layers').click(); document.getElementById('certainty').click()")
    assert page.run("document.querySelectorAll('.assistant .token').length") == 0
    assert shown(page, ".assistant .bubble") == "Hello there"
    page.run("document.getElementById('certainty').click()")


def test_it_stops_goes_on_and_regenerates(page, server):
    page.run("document.getElementById('max_tokens').value = 2048")
    send(page, "count")
    page.wait("state.running && state.messages.length === 2 && state.messages[1].content.length > 5")
    page.run("document.getElementById('stop').click()")
    page.wait(IDLE)
    server.wait_until_idle()
    before = page.run(f"{LAST}.content")
    page.run("document.getElementById('max_tokens').value = 16")
    click(page, ".assistant", "Go on")
    page.wait(f"{IDLE} && {LAST}.ended === 'length'")
    after = page.run(f"{LAST}.content")
    assert after.startswith(before)
    assert len(after) == len(before) + 16
    assert shown(page, ".assistant .bubble") == after
    assert "cut off" in shown(page, ".assistant .tools")
    click(page, ".assistant", "Regenerate")
    page.wait(f"{IDLE} && {LAST}.content.length === 16")


def test_a_change_of_a_message_takes_effect_when_it_is_sent_and_not_before(page):
    send(page, "SAY:one")
    page.wait(f"{IDLE} && {LAST}.content === 'one'")
    fill(page, input="a draft")
    click(page, ".user", "Edit")
    assert page.run("document.getElementById('input').value") == "SAY:one"
    page.press("Escape")
    assert page.run("document.getElementById('input').value") == "a draft"
    assert page.run("state.messages.length") == 2
    send(page, "SAY:two")
    page.wait(f"{IDLE} && {LAST}.content === 'two'")
    click(page, ".user", "Edit")  # the first of two turns: the chat as it was stays among the chats
    send(page, "SAY:three")
    page.wait(f"{IDLE} && {LAST}.content === 'three'")
    assert page.run("state.messages.length") == 2
    assert page.run("chats()[1].messages.map((message) => message.content)") == ["SAY:one", "one", "SAY:two", "two"]


def test_code_is_set_apart_and_every_script_runs_its_own_way(page):
    code = "def f():\n    return '``'\n"
    send(page, f"SAY:See:\n```python\n{code}```\nשלום 👩‍👩‍👧\n```\nopen")
    page.wait(f"{IDLE} && {LAST}.content.endsWith('open')")
    assert page.run("[...document.querySelectorAll('.assistant pre')].map((p) => p.textContent)") == [code, "open"]
    assert shown(page, ".assistant .code span") == "python"
    prose = page.run("[...document.querySelectorAll('.assistant .prose')].map((p) => p.textContent)")
    assert prose == ["See:", "שלום 👩‍👩‍👧"]
    assert page.run("getComputedStyle(document.querySelector('.prose')).unicodeBidi") == "plaintext"


def test_what_models_write_in_markdown_is_shown_as_they_mean_it(page):
    text = "# Title\n\nSome **bold** and *slanted* `co*de*`, 2*3*4.\n\n- one\n  - **two**\n1. three\n> said\n---\n"
    text += "| a | b |\n| c | d |\nend"
    send(page, "SAY:" + text)
    page.wait(f"{IDLE} && {LAST}.content.endsWith('end')")
    assert shown(page, ".user .bubble") == "SAY:" + text  # what a person typed stays as it is
    parts = {
        "h3": ["Title"],
        "strong": ["bold", "two"],
        "em": ["slanted"],
        ".prose code": ["co*de*"],
        "blockquote": ["said"],
    }
    parts |= {
        ".item .prose": ["one", "two", "three"],
        ".item > span": ["•", "•", "1."],
        ".table": ["| a | b |\n| c | d |"],
    }
    for where, texts in parts.items():
        got = page.run(f"[...document.querySelectorAll('.assistant {where}')].map((part) => part.textContent.trim())")
        assert got == texts, where
    assert "2*3*4" in shown(page, ".assistant .bubble")
    assert page.run("document.querySelectorAll('.assistant strong .token').length") == len("boldtwo")
    assert page.run("document.querySelectorAll('.assistant hr').length") == 1
    grown = shown(page, ".assistant .bubble")
    page.run(
        "const written = new Writer(document.createElement('div'), true);"
        "written.add([{ text: state.messages[1].content }]); window.whole = written.place.textContent"
    )
    assert page.run("window.whole") == grown  # however it came


def test_whoever_reads_further_up_stays_there(page):
    page.run("document.getElementById('max_tokens').value = 400")
    send(page, "\n".join(["a long message"] * 100))
    below, button_hidden = page.run(
        f"""(async () => {{
          const come = async (count) => {{
            while (!(state.messages[1]?.content.length > count)) await new Promise((done) => setTimeout(done, 1));
          }};
          await come(3);
          const below = {LOG}.scrollHeight - {LOG}.scrollTop - {LOG}.clientHeight;
          {LOG}.scrollTop = 300;
          await come(state.messages[1].content.length);
          return [below, document.getElementById("newest").hidden];
        }})()"""
    )
    assert below < 5
    assert not button_hidden
    page.wait(f"{IDLE} && {LAST}.content.length === 400")
    page.run("document.getElementById('layers').click(); document.getElementById('layers').click()")
    assert page.run(f"{LOG}.scrollTop") == 300


def test_a_reload_in_mid_answer_keeps_what_was_said(page, server):
    page.run("document.getElementById('max_tokens').value = 2048")
    send(page, "count")
    page.wait("state.running && state.messages[1].content.length > 5")
    fill(page, input="typed meanwhile")
    page.open(server.address)
    page.wait("state.messages.length === 2")
    assert page.run("state.messages[0].content") == "count"
    assert page.run("state.messages[1].content.length") > 5
    assert "broke off" in shown(page, ".assistant .tools")
    assert page.run("document.getElementById('input').value") == "typed meanwhile"
    server.wait_until_idle()


def test_two_tabs_with_one_chat_keep_both_ways_it_went_on(page, server):
    send(page, "SAY:root")
    page.wait(f"{IDLE} && {LAST}.content === 'root'")
    other = page.another(server.address)
    other.wait("state.messages.length === 2")
    for tab, text in [(page, "left"), (other, "right")]:
        send(tab, f"SAY:{text}")
        tab.wait(f"{IDLE} && {LAST}.content === '{text}'")
    kept = page.run("chats().slice(0, 2).map((chat) => chat.messages.at(-1).content)")
    assert sorted(kept) == ["left", "right"]
    page.open(server.address)
    assert page.run(f"{LAST}.content") == "left"
    other.call("Page.close")


def test_a_server_that_goes_away_in_mid_answer_is_found_again(page, server):
    with fake(step_us=3000) as first:
        tab = page.another(first.address)
        tab.run("newChat(); document.getElementById('max_tokens').value = 2048")
        send(tab, "count")
        tab.wait("state.running && state.messages[1].content.length > 5")
        first.process.send_signal(signal.SIGKILL)
        tab.wait(IDLE)
        assert "this page keeps trying" in shown(tab, "#status")
        assert "broke off" in shown(tab, ".assistant .tools")
        send(tab, "SAY:still there?")
        tab.wait(f"{IDLE} && {LAST}.role === 'user'")
    with fake(port=first.port):
        tab.wait("document.getElementById('status').textContent === 'the server is back'")
        click(tab, ".user:last-child", "Answer")
        tab.wait(f"{IDLE} && {LAST}.content === 'still there?'")
        tab.call("Page.close")


def test_a_key_is_asked_for_once_in_a_tab(browser, server):
    with fake(keys="secret") as locked:
        tab = browser.another(server.address)
        tab.call("Page.navigate", url=locked.address)
        tab.wait(
            "document.activeElement?.id === 'key' && document.getElementById('status').textContent.includes('key')"
        )
        tab.run("document.activeElement.value = 'secret'; document.activeElement.dispatchEvent(new Event('change'))")
        tab.wait("document.querySelector('#model option')")
        tab.call("Page.reload")
        tab.wait("document.readyState === 'complete' && document.querySelector('#model option')")
        tab.call("Page.close")


def test_an_answer_takes_the_room_that_is_left(page):
    page.run("document.getElementById('max_tokens').value = 2048")
    send(page, "x" * 3000 + "SAY:ok")
    page.wait(f"{IDLE} && {LAST}.content === 'ok'")
    send(page, "x" * 3000)
    page.wait(f"{IDLE} && {LAST}.role === 'user'")
    assert "start a new chat" in shown(page, "#status")


def test_a_memory_is_made_talked_to_forked_deleted_and_there_after_a_reload(page, server):
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
    click(page, "#memory-list", "Delete")
    assert page.run("state.memories.length") == 2
    click(page, "#memory-list", "Really delete?")
    page.wait("state.memories.length === 1")


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
    assert page.run("document.getElementById('chat').inert")
    page.press("Escape")
    assert page.run("getComputedStyle(document.getElementById('panel')).display") == "none"
    page.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'n', altKey: true}))")
    assert page.run("document.activeElement.id") == "input"
    page.look(1100, 800)
    page.call("Input.insertText", text="SAY:typed")
    page.press("Enter", text="\r")
    page.wait(f"{IDLE} && {LAST}.content === 'typed'")
    seen = []
    for _ in range(4):
        page.press("Tab")
        seen.append(page.run("document.activeElement.id || document.activeElement.textContent"))
    assert seen[0] == "send"
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
