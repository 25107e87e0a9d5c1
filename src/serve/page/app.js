// The page of `gka serve`: a chat with streaming, certainty and memories. No dependencies, nothing from elsewhere.
"use strict";

const $ = (id) => document.getElementById(id);
const state = {
  chat: { id: fresh(), revision: null },  // of this tab, as it was last written
  messages: [],
  running: null,     // what aborts the answer that comes
  editing: null,     // which message is being changed
  draft: "",         // what stood in the input before that
  iterations: null,  // null: the model's own
  memories: [],
  props: null,
  wanted: {},        // model and memory to choose once the server has named them
};

function fresh() {
  return `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
}

// --- the server

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** What a promise of the network gives; where the network fails, an error that says so in words. */
async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw Object.assign(new Error("the server does not answer"), { lost: true });
  }
}

/** An answer that is no success, as an error with a sentence: the server's, or our own where a stranger answered. */
async function failure(response) {
  let told = {};
  try { told = (await response.json()).error ?? {}; } catch { /* not JSON, so not ours */ }
  return Object.assign(new Error(told.message || `the server answers ${response.status} ${response.statusText}`),
                       { status: response.status, code: told.code, param: told.param });
}

async function call(path, options = {}) {
  const response = await reached(fetch(path, { ...options, headers: headers() }));
  if (!response.ok) throw await failure(response);
  return reached(response.json());
}

/** Looks every two seconds whether the server is there (again), and opens it then. */
function watch() {
  state.watching ??= setInterval(async () => {
    try { if (!(await fetch("/health")).ok) return; } catch { return; }
    clearInterval(state.watching);
    state.watching = null;
    if (await open()) say("the server is back");
  }, 2000);
}

/** Asks for an answer. Where less room is left than the longest answer may take, it may take what is left. */
async function ask(body, signal) {
  const response = await reached(
    fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal }));
  if (response.ok) return response;
  const problem = await failure(response);
  if (problem.code !== "context_length_exceeded") throw problem;
  if (problem.param === "max_tokens") return ask({ ...body, max_tokens: undefined }, signal);
  problem.message += "; start a new chat, or change an earlier message";
  throw problem;
}

/** The events of a stream, one parsed object each. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reached(reader.read());
    if (done) throw Object.assign(new Error("the server broke the answer off"), { lost: true });
    held += value;
    for (let end = held.indexOf("\n\n"); end >= 0; end = held.indexOf("\n\n")) {
      const line = held.slice(0, end);
      held = held.slice(end + 2);
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}

function request(messages, further) {
  const number = (id) => Number($(id).value);
  const own = maxIterations();
  const body = {
    model: $("model").value,
    messages: [...($("system").value ? [{ role: "system", content: $("system").value }] : []),
               ...messages.map(({ role, content }) => ({ role, content }))],
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    top_p: number("top_p"),
    top_k: number("top_k"),
    max_tokens: number("max_tokens"),
    certainty: own > 0,
  };
  if (further) body.continue_final_message = true;
  if ($("seed").value !== "") body.seed = number("seed");
  if ($("memory").value) body.memory = $("memory").value;
  if (own > 0) body.iterations = $("auto-iterations").checked ? "auto" : Math.min(number("iterations"), own);
  return body;
}

// --- the conversation

/** Takes one event of a stream into a message. */
function take(message, event) {
  if (event.error) throw new Error(event.error.message);
  for (const choice of event.choices) {
    const delta = choice.delta || {};
    if (delta.reasoning_content) message.reasoning += delta.reasoning_content;
    const calls = (delta.tool_calls || []).map(({ function: { name, arguments: more } }) =>
      (name ? `${message.content ? "\n" : ""}${name} ` : "") + (more || ""));  // the name first, arguments as they come
    const text = [delta.content || "", ...calls].join("");
    if (text) {
      const own = event.gka || {};
      message.content += text;
      message.tokens.push({ text, certainty: own.certainty?.[0] ?? null, layers: own.layer_certainty?.[0] ?? [] });
    }
    if (choice.finish_reason) message.ended = choice.finish_reason;
  }
}

/** Has the last message answered, or goes on with an answer that broke off. */
async function answer(message = null) {
  const further = message !== null;
  message ??= { role: "assistant", content: "", reasoning: "", tokens: [], model: $("model").value };
  const sent = request(state.messages, further);
  if (!further) state.messages.push(message);
  message.ended = null;
  const control = new AbortController();
  state.running = control;
  busy(true);
  say("");
  follow(true);
  draw();
  save();
  const item = $("log").lastElementChild;
  const start = performance.now();
  let first = 0, saved = start, paused = start, usage = null, own = {};
  try {
    for await (const event of events(await ask(sent, control.signal))) {
      take(message, event);
      if (message.content) first ||= performance.now() - start;
      if (event.usage) usage = event.usage;
      own = { ...own, ...event.gka };
      show(item, message);
      scroll();
      if (performance.now() - saved > 2000) { save(); saved = performance.now(); }
      if (performance.now() - paused > 40) {  // a stream that never pauses would leave clicks and keys no turn
        await new Promise((done) => setTimeout(done));
        paused = performance.now();
      }
    }
    if (usage) {
      const seconds = (performance.now() - start) / 1000;
      const memory = state.memories.find((one) => one.id === sent.memory);
      say(`${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s, the first after ${(first / 1000).toFixed(2)} s; ` +
          `prompt ${usage.prompt_tokens}, of which remembered ${own.remembered_tokens ?? 0}` + (own.why_not_more ? ` (${own.why_not_more})` : "") +
          (own.kept_tokens < memory?.tokens ? `; of the memory attention sees the last ${own.kept_tokens} tokens` : ""));
    }
  } catch (error) {
    if (state.running !== control) return;  // another chat was opened, and this one is put away
    if (error.name === "AbortError") {
      message.ended = "stopped";
      say("stopped");
    } else {
      message.ended = "broke";
      fail(error);
    }
  }
  state.running = null;
  if (empty(message)) state.messages.pop();
  save();
  draw();
  busy(false);
}

const empty = (message) => !message.content && !message.reasoning;

/** Says what went wrong, and does what can be done about it. */
function fail(error) {
  say(error.lost ? `${error.message}; this page keeps trying` : error.message, true);
  if (error.lost || error.code === "loading") watch();
  if (error.status === 401) {
    togglePanel(true);
    $("key").focus();
  }
}

function send(text) {
  if (state.running || !text.trim()) return;
  if (!$("model").value) return say("the server has not answered yet, so there is no model to ask", true);
  if (state.editing !== null) cut(state.editing);
  cancelEdit();
  state.messages.push({ role: "user", content: text });
  $("input").value = "";
  answer();
}

/** Drops what follows; where that is more than one turn, the chat as it was stays among the chats. */
function cut(at) {
  if (state.messages.slice(at + 1).some((message) => message.role === "user")) state.chat = { id: fresh(), revision: null };
  state.messages.length = at;
}

/** A message's text goes to the input; it and what follows it stay until the change is sent. */
function edit(at) {
  if (state.running) return;
  if (state.editing === null) state.draft = $("input").value;
  state.editing = at;
  $("input").value = state.messages[at].content;
  $("editing").hidden = false;
  mark();
  $("input").focus();
}

function cancelEdit() {
  if (state.editing === null) return;
  state.editing = null;
  $("input").value = state.draft;
  $("editing").hidden = true;
  mark();
}

function mark() {
  [...$("log").children].forEach((item, at) => item.classList.toggle("edited", at === state.editing));
}

function regenerate(at) {
  if (state.running) return;
  cancelEdit();
  cut(at);
  answer();
}

// --- drawing

/** Red for what the past does not explain, green for what it does. */
function colour(value) {
  if (value === null || value === undefined) return "";
  const share = Math.max(0, Math.min(1, value));
  return `hsl(${10 + 130 * share} 75% 55% / ${0.5 - 0.25 * share})`;
}

function element(name, values = {}, ...children) {
  const made = Object.assign(document.createElement(name), values);
  made.append(...children);
  return made;
}

function span(text, value) {
  const made = element("span", { className: "token", textContent: text });
  made.style.backgroundColor = colour(value);
  if (value !== null && value !== undefined) made.title = `certainty ${value.toFixed(3)}`;
  return made;
}

/** What a line of an answer is, in the little of Markdown that models write: its kind, and how many characters only say so. */
function lineKind(line) {
  if (!line.trim()) return { kind: "gap" };
  const heading = /^(#{1,6}) +(?=\S)/.exec(line), item = /^( *)([-*+]|\d{1,3}[.)]) +(?=\S)/.exec(line), quote = /^> ?/.exec(line);
  if (heading) return { kind: `h${Math.min(heading[1].length + 2, 6)}`, hidden: heading[0].length };
  if (/^ *([-*_])( *\1){2,} *$/.test(line)) return { kind: "rule", hidden: line.length };
  if (item) return { kind: "item", hidden: item[0].length, label: /\d/.test(item[2]) ? item[2] : "•", depth: Math.min(Math.floor(item[1].length / 2), 6) };
  if (quote) return { kind: "quote", hidden: quote[0].length };
  return { kind: /^ *\|.*\| *$/.test(line) ? "table" : "prose" };
}

/** The lines from one place to another as blocks; plain lines stay together, and so do a table's. */
function lineBlocks(text, start, end) {
  const found = [];
  for (let at = start; at < end;) {
    const stop = text.indexOf("\n", at), next = stop < 0 || stop >= end ? end : stop + 1, open = found.at(-1);
    const line = lineKind(text.slice(at, next).replace("\n", ""));
    if (open?.kind === line.kind && (line.kind === "prose" || line.kind === "table")) open.end = next;
    else found.push({ ...line, start: at, end: next });
    at = next;
  }
  return found;
}

/** A text as blocks: prose, and code between lines of ```; where it is rich, headings, lists, quotes and tables too. */
function blocks(text, rich) {
  const open = /\n*^ *```([^`\n]*)\n/gm, close = /^ *``` *$\n*/gm, found = [];
  const prose = (start, end) => { if (end > start) found.push(...(rich ? lineBlocks(text, start, end) : [{ kind: "prose", start, end }])); };
  let at = 0;
  for (let opened; open.lastIndex = at, (opened = open.exec(text));) {
    prose(at, opened.index);
    close.lastIndex = opened.index + opened[0].length;
    const closed = close.exec(text);
    found.push({ kind: "code", language: opened[1].trim(), start: opened.index + opened[0].length, end: closed ? closed.index : text.length });
    at = closed ? closed.index + closed[0].length : text.length;
  }
  prose(at, text.length);
  return found;
}

/** Bold, slanted and code within a line: the parts of a text, each with its element's name where it has one. */
function inlineParts(text) {
  const marks = /(`+)([^`\n]+)\1|(\*\*)(?=[^\s*])[^\n]*?[^\s*]\*\*|(\*)(?=[^\s*])[^*\n]*?[^\s*]\*(?!\w)/g, parts = [];
  let at = 0;
  for (const found of text.matchAll(marks)) {
    if (found[4] && /\w/.test(text[found.index - 1] ?? "")) continue;  // a product, not a word that is stressed
    const width = (found[1] ?? found[3] ?? found[4]).length, end = found.index + found[0].length;
    parts.push({ start: at, end: found.index }, { name: found[1] ? "code" : found[3] ? "strong" : "em", start: found.index + width, end: end - width });
    at = end;
  }
  return [...parts, { start: at, end: text.length }].filter((part) => part.end > part.start);
}

function blockElement(block) {
  if (block.kind === "code") {
    const inside = element("pre", { tabIndex: 0, dir: "ltr" });
    const made = element("div", { className: "code" }, element("div", {}, element("span", { textContent: block.language || "code" }), button("Copy", (event) => copy(inside.textContent, event.target), "Copy this code")), inside);
    return { made, inside };
  }
  if (block.kind === "item") {
    const inside = element("div", { className: "prose" });
    const made = element("div", { className: "item" }, element("span", { textContent: block.label }), inside);
    made.style.setProperty("--depth", block.depth);
    return { made, inside };
  }
  const names = { rule: "hr", quote: "blockquote" };
  const made = element(/^h\d$/.test(block.kind) ? block.kind : names[block.kind] ?? "div", { className: `prose ${block.kind}` });
  if (block.kind === "table") made.tabIndex = 0;
  return { made, inside: made };
}

/** Writes a text that grows. What is there already stays, so that a long answer costs no more per token than a short one. */
class Writer {
  constructor(place, rich) {
    this.place = place;
    this.rich = rich;
    this.drawn = [];   // one for each block that is on the page
    this.pieces = [];  // what has come so far: text, where it starts, its value
    this.text = "";
  }

  add(pieces) {
    for (const { text, value } of pieces) {
      this.pieces.push({ text, value, start: this.text.length });
      this.text += text;
    }
    const now = blocks(this.text, this.rich);
    const stays = (old, block) => ["kind", "start", "hidden", "label", "depth"].every((key) => old[key] === block[key]) && old.end <= block.end;
    let same = 0;
    while (same < now.length && same < this.drawn.length && stays(this.drawn[same], now[same])) ++same;
    for (const gone of this.drawn.splice(same)) gone.made.remove();
    now.forEach((block, at) => {
      const from = block.start + (block.hidden ?? 0);
      if (at >= this.drawn.length) {
        this.drawn.push({ ...block, ...blockElement(block), end: from });
        this.place.append(this.drawn[at].made);
      }
      this.write(this.drawn[at], from, block.end);
    });
  }

  /** What a block lacks up to `end`. Where words in it may be stressed, all of it: a mark changes what came before it. */
  write(block, from, end) {
    if (end <= block.end) return;
    const text = this.text.slice(from, end);
    if (!this.rich || block.kind === "code" || block.kind === "table" || !/[*`]/.test(text)) {
      this.append(block.inside, block.end, end);
    } else {
      block.inside.replaceChildren();
      for (const part of inlineParts(text)) {
        const inside = part.name ? element(part.name) : block.inside;
        this.append(inside, from + part.start, from + part.end);
        if (part.name) block.inside.append(inside);
      }
    }
    block.end = end;
  }

  /** The characters from one place to another, each in the colour of the piece it came in. */
  append(inside, start, end) {
    let at = this.pieces.length;
    while (at > 0 && this.pieces[at - 1].start + this.pieces[at - 1].text.length > start) --at;
    for (; at < this.pieces.length && this.pieces[at].start < end; ++at) {
      const piece = this.pieces[at];
      const text = piece.text.slice(Math.max(start - piece.start, 0), end - piece.start);
      inside.append(piece.value === undefined ? text : span(text, piece.value));
    }
  }
}

const known = (message) => message.tokens?.some((token) => token.certainty !== null) ?? false;

/** Brings a message's item up to what has come. */
function show(item, message) {
  const coloured = known(message) && $("certainty").checked, bubble = item.querySelector(".bubble");
  if (item.writer?.coloured !== coloured) {
    bubble.replaceChildren();
    item.writer = Object.assign(new Writer(bubble, message.role === "assistant"), { coloured });
    item.thought = null;
  }
  if (message.reasoning) {
    if (!item.thought) bubble.prepend(item.thought = element("div", { className: "reasoning" }));
    item.thought.append(message.reasoning.slice(item.thought.textContent.length));
  }
  const writer = item.writer;
  if (coloured) writer.add(message.tokens.slice(writer.pieces.length).map(({ text, certainty }) => ({ text, value: certainty })));
  else writer.add([{ text: message.content.slice(writer.text.length) }]);
  const waiting = state.running !== null && !message.content && !message.reasoning && message.role === "assistant";
  if (waiting && !item.dots) bubble.append(item.dots = element("span", { textContent: "…" }));
  if (!waiting && item.dots) { item.dots.remove(); item.dots = null; }
  showLayers(item, message);
}

/** The answer once for each layer. */
function showLayers(item, message) {
  if (!known(message) || !$("layers").checked) {
    item.querySelector(".layered")?.remove();
    item.layers = null;
    return;
  }
  if (!item.layers) {
    const row = element("div", { className: "layered" });
    const count = Math.max(...message.tokens.map((token) => token.layers.length));
    item.layers = Array.from({ length: count }, () => {
      const caption = element("figcaption"), text = element("div", { className: "bubble" });
      row.append(element("figure", {}, caption, text));
      return { caption, writer: new Writer(text, true), sum: 0, count: 0 };
    });
    item.querySelector(".bubble").after(row);
  }
  item.layers.forEach((layer, at) => {
    const more = message.tokens.slice(layer.writer.pieces.length);
    for (const token of more) if (token.layers[at] !== undefined) { layer.sum += token.layers[at]; ++layer.count; }
    layer.writer.add(more.map((token) => ({ text: token.text, value: token.layers[at] ?? null })));
    layer.caption.textContent = `layer ${at + 1}, mean ${(layer.sum / Math.max(layer.count, 1)).toFixed(2)}`;
  });
}

function button(text, act, title) {
  const made = element("button", { type: "button", textContent: text, title: title || text });
  made.addEventListener("click", act);
  return made;
}

/** A button whose first click only asks; leaving it takes the question back. */
function sureButton(text, act, title) {
  const made = button(text, () => {
    if (made.classList.contains("sure")) return act();
    made.classList.add("sure");
    made.textContent = `Really ${text.toLowerCase()}?`;
  }, title);
  made.addEventListener("blur", () => { made.classList.remove("sure"); made.textContent = text; });
  return made;
}

async function copy(text, from) {
  try {
    await navigator.clipboard.writeText(text);
    from.textContent = "Copied";
    from.addEventListener("blur", () => { from.textContent = "Copy"; }, { once: true });
  } catch { say("the browser lets this page copy over https or on this machine only", true); }
}

const ends = { length: "cut off at the longest answer", stopped: "stopped", broke: "broke off" };

function tools(message, at) {
  const made = element("div", { className: "tools" }), last = at === state.messages.length - 1;
  if (message.role === "user") {
    made.append(button("Edit", () => edit(at), "Change this message and go on from here"));
    if (last) made.append(button("Answer", () => { if (!state.running) answer(); }, "Have this message answered"));
    return made;
  }
  made.append(button("Regenerate", () => regenerate(at), "Another answer"), button("Copy", (event) => copy(message.content, event.target)));
  if (ends[message.ended]) {
    if (last && message.content) made.append(button("Go on", () => { if (!state.running) answer(message); }, "Go on from where it ended"));
    made.append(element("span", { textContent: ends[message.ended] }));
  }
  if (known(message)) made.append(element("span", { title: "certainty from 0 to 1" }, "0 ", element("span", { className: "scale" }), " 1"));
  return made;
}

function itemOf(message) {
  return Object.assign(element("li", { className: message.role },
    element("div", { className: "role", textContent: message.role === "user" ? "you" : message.model }),
    element("div", { className: "bubble" }), element("div", { className: "tools" })), { message });
}

/** Brings the page up to the messages. What is right already is left alone, with whatever is selected or focused in it. */
function draw() {
  const log = $("log");
  state.messages.forEach((message, at) => {
    if (log.children[at]?.message !== message) {
      while (log.children.length > at) log.lastElementChild.remove();
      log.append(itemOf(message));
    }
    const item = log.children[at], about = [at === state.messages.length - 1, message.ended, known(message)].join();
    show(item, message);
    if (item.about !== about) {
      item.about = about;
      item.lastElementChild.replaceWith(tools(message, at));
    }
  });
  while (log.children.length > state.messages.length) log.lastElementChild.remove();
  mark();
  scroll();
}

// Whoever reads further up stays there; whoever is at the end stays at the end.
let following = true, place = 0;

function follow(on) {
  following = on;
  place = 0;
  scroll();
}

/** After the reader moved, or something came: up is away from the end, and the end is the end. */
function moved() {
  const log = $("log");
  const end = log.scrollHeight - log.scrollTop - log.clientHeight < 5;
  following = following ? end || log.scrollTop >= place : end;
  place = log.scrollTop;
  $("newest").hidden = following || !state.running;
}

function scroll() {
  moved();  // whose event may still be on its way
  if (following) $("log").scrollTop = $("log").scrollHeight;
  place = $("log").scrollTop;
}

function say(text, error = false) {
  $("status").textContent = text;
  $("status").classList.toggle("error", error);
}

function busy(on) {
  const held = document.activeElement;
  $("log").setAttribute("aria-busy", String(on));  // read out once the answer is whole, not token by token
  $("send").hidden = on;
  $("stop").hidden = !on;
  if (on && held === $("send")) $("stop").focus();
  if (!on && (held === $("stop") || held === document.body) && !matchMedia("(pointer: coarse)").matches) $("input").focus();
}

// --- memories

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let at = 0;
  while (count >= 1024 && at < 3) { count /= 1024; ++at; }
  return `${count.toFixed(at ? 1 : 0)} ${units[at]}`;
}

async function loadMemories(choose) {
  state.memories = (await call("/v1/memories")).data.filter((memory) => memory.model === $("model").value);
  const before = choose ?? $("memory").value;
  $("memory").replaceChildren(new Option("none", ""), ...state.memories.map((memory) => new Option(memory.name || memory.id, memory.id)));
  $("memory").value = state.memories.some((memory) => memory.id === before) ? before : "";
  $("memory-list").replaceChildren(...state.memories.map((memory) => {
    const part = memory.kept_tokens < memory.tokens ? ` (attention keeps the last ${memory.kept_tokens})` : "";
    const about = `${memory.name || memory.id}: ${memory.tokens} tokens${part}, states ${bytes(memory.state_bytes)}, caches ${bytes(memory.cache_bytes)}`;
    return element("li", {}, element("div", { textContent: about }),
      button("Talk to it", () => { $("memory").value = memory.id; newChat(); uncover(); }, "A new chat behind this memory"),
      button("Fork", () => remember(memory.id), "This memory and the text above, as a new one"),
      sureButton("Delete", () => forget(memory.id), "Forget it for good"));
  }));
  return before && !$("memory").value;
}

async function remember(from) {
  try {
    const file = $("memory-file").files[0];
    const text = $("memory-text").value || (file ? await file.text() : "");
    const name = $("memory-name").value || (file ? file.name : "");
    if (!from && !text) return say("a memory needs a text or a file", true);
    say("reading…");
    $("memory-create").disabled = true;
    const keep = $("memory-keep").value;
    const body = { ...(text ? { input: text } : {}), name, ...(keep ? { keep_tokens: Number(keep) } : {}) };
    if (!from) body.model = $("model").value;
    const made = await call(from ? `/v1/memories/${from}/fork` : "/v1/memories", { method: "POST", body: JSON.stringify(body) });
    say(`remembered ${made.tokens} tokens as ${made.name || made.id}`);
    $("memory-text").value = $("memory-name").value = $("memory-file").value = $("memory-keep").value = "";
    await loadMemories(made.id);
    save();
  } catch (error) { fail(error); }
  $("memory-create").disabled = false;
}

async function forget(id) {
  try {
    await call(`/v1/memories/${id}`, { method: "DELETE" });
    if (await loadMemories()) say("this chat goes on without the memory");
    save();
  } catch (error) { fail(error); }
}

// --- what the browser keeps: settings for all tabs, and chats, of which each tab has one open

const kept = ["system", "temperature", "top_p", "top_k", "max_tokens", "auto-iterations", "certainty", "layers", "model"];
const mostChats = 50, chatKey = "gka.chat.";

function stored(name, store = "localStorage") {
  try { return JSON.parse(window[store].getItem(name)); } catch { return null; }
}

/** The chats that are kept, newest first. */
function chats() {
  const keys = Array.from({ length: localStorage.length }, (_, at) => localStorage.key(at));
  return keys.filter((key) => key.startsWith(chatKey)).map((key) => stored(key)).filter(Boolean).sort((a, b) => b.saved - a.saved);
}

const rounded = (value) => (value === null ? null : Math.round(value * 1000) / 1000);

/** A message as it is kept: certainties with three digits, which is what the page shows. */
function packed(message, colours) {
  const { tokens, ...rest } = message;
  return colours && known(message) ? { ...rest, tokens: tokens.map((token) => [token.text, rounded(token.certainty), ...token.layers.map(rounded)]) } : rest;
}

function unpacked(message) {
  if (message.role !== "assistant") return message;
  const tokens = message.tokens?.map(([text, certainty, ...layers]) => ({ text, certainty, layers })) ??
                 (message.content ? [{ text: message.content, certainty: null, layers: [] }] : []);
  return { ...message, tokens, ended: message.ended ?? "broke" };  // without an end: the page was left meanwhile
}

function saveChat(colours) {
  const { chat } = state;
  const there = stored(chatKey + chat.id);
  if (there && there.revision !== chat.revision) {
    chat.id = fresh();
    say("this chat went on in another tab; from here on it is a chat of its own");
  }
  chat.revision = fresh();
  sessionStorage.setItem("gka.chat", JSON.stringify(chat.id));
  localStorage.setItem(chatKey + chat.id, JSON.stringify({
    ...chat, saved: Date.now(), model: $("model").value, memory: $("memory").value,
    messages: state.messages.filter((message) => !empty(message)).map((message) => packed(message, colours)) }));
  for (const old of chats().slice(mostChats)) localStorage.removeItem(chatKey + old.id);
}

function save() {
  const values = Object.fromEntries(kept.map((id) => [id, $(id).type === "checkbox" ? $(id).checked : $(id).value]));
  if (!values.model) values.model = state.wanted.model;
  try {
    localStorage.setItem("gka", JSON.stringify({ values, iterations: state.iterations, memory: $("memory").value }));
    if (!state.messages.length) sessionStorage.setItem("gka.chat", JSON.stringify(state.chat.id));
    else try { saveChat(true); } catch { saveChat(false); }
  } catch {
    $("chats-hint").textContent = "The browser has no room (or no leave) to keep this chat: it ends with this page.";
  }
  drawChats();
}

function drawChats() {
  let all = [];
  try { all = chats(); } catch { /* no leave to read: none */ }
  $("chat-list").replaceChildren(...all.map((chat) => {
    const first = chat.messages.find((message) => message.role === "user")?.content.trim().slice(0, 80) || "(empty)";
    const title = button(first, () => openChat(chat.id), `Open this chat of ${new Date(chat.saved).toLocaleString()}`);
    title.className = "title";
    title.dir = "auto";
    title.setAttribute("aria-current", String(chat.id === state.chat.id));
    const remove = sureButton("Delete", () => { localStorage.removeItem(chatKey + chat.id); if (chat.id === state.chat.id) newChat(); else drawChats(); }, "Delete this chat");
    remove.classList.add("small");
    return element("li", {}, title, remove);
  }));
}

/** The chat of an id, or an empty one. */
function readChat(id) {
  const chat = id ? stored(chatKey + id) : null;
  state.chat = { id: id ?? fresh(), revision: chat?.revision ?? null };
  state.messages = (chat?.messages ?? []).map(unpacked);
  return chat;
}

/** Lets go of the running answer: what has come of it stays in its chat. */
function leave() {
  const { running } = state;
  state.running = null;
  if (running) {
    state.messages.at(-1).ended = "stopped";
    if (empty(state.messages.at(-1))) state.messages.pop();
    running.abort();
    save();
    busy(false);
  }
  cancelEdit();
}

async function openChat(id) {
  leave();
  const chat = readChat(id);
  sessionStorage.setItem("gka.chat", JSON.stringify(id));
  say("");
  follow(true);
  draw();
  drawChats();
  uncover();
  if (chat && has($("model"), chat.model) && chat.model !== $("model").value) $("model").value = chat.model;
  await chooseModel(chat?.memory ?? "");
}

function restore() {
  const settings = stored("gka") ?? {};
  for (const [id, value] of Object.entries(settings.values || {})) {
    if (!$(id) || id === "model") continue;
    if ($(id).type === "checkbox") $(id).checked = value;
    else $(id).value = value;
  }
  state.iterations = settings.iterations ?? null;
  let newest = null;
  try { newest = stored("gka.chat", "sessionStorage") ?? chats()[0]?.id; } catch { /* no leave to read: an empty chat */ }
  const chat = readChat(newest);
  $("input").value = stored("gka.draft", "sessionStorage") ?? "";
  $("key").value = stored("gka.key", "sessionStorage") ?? "";  // this tab's, and gone with it
  state.wanted = { model: chat?.model ?? settings.values?.model, memory: chat?.memory ?? settings.memory };
}

// --- settings

const has = (select, value) => [...select.options].some((option) => option.value === value);

function maxIterations() {
  const model = state.props?.models.find((entry) => entry.id === $("model").value);
  return model?.gka?.iterations ?? 0;
}

function settings() {
  const own = maxIterations(), auto = $("auto-iterations").checked;
  if (own) {
    $("iterations").max = own;
    $("iterations").value = state.iterations ?? own;
  }
  for (const id of ["iterations", "auto-iterations", "certainty", "layers"]) $(id).disabled = own === 0;
  $("iterations").disabled ||= auto;
  $("no-certainty").hidden = own > 0 || !state.props;
  document.querySelectorAll(".slider output").forEach((output) => { output.textContent = $(output.htmlFor).value; });
  if (auto || !own) document.querySelector("output[for=iterations]").textContent = own ? "auto" : "none";
}

async function chooseModel(memory) {
  settings();
  try {
    if (await loadMemories(memory)) say("the memory belongs to another model (or is gone); this chat goes on without it");
  } catch (error) { fail(error); }
  save();
}

function newChat() {
  leave();
  state.chat = { id: fresh(), revision: null };
  state.messages = [];
  say("");
  save();
  follow(true);
  draw();
  $("input").focus();
}

const narrow = matchMedia("(max-width: 44rem)");
const panelShown = () => (narrow.matches ? $("panel").classList.contains("open") : !$("panel").classList.contains("closed"));

/** Opens or closes the panel. On a narrow screen it lies over the chat, which cannot be reached then. */
function togglePanel(on = !panelShown()) {
  $("panel").classList.toggle(narrow.matches ? "open" : "closed", narrow.matches === on);
  if (!on && $("panel").contains(document.activeElement)) $("panel-button").focus();
  aboutPanel();
}

function aboutPanel() {
  $("panel-button").setAttribute("aria-expanded", String(panelShown()));
  $("chat").inert = narrow.matches && panelShown();
}

/** Beside the chat the panel is in nobody's way. */
function uncover() {
  if (narrow.matches) togglePanel(false);
}

/** Asks the server what it has, which may have changed; whether it answered. */
async function open() {
  try {
    state.props = await call("/props");
    const wanted = $("model").value || state.wanted.model;
    $("model").replaceChildren(...state.props.models.map((model) => new Option(model.id, model.id)));
    if (has($("model"), wanted)) $("model").value = wanted;
    settings();
    await loadMemories($("memory").value || state.wanted.memory);
    state.wanted = {};
    if ($("status").classList.contains("error")) say("");
    return true;
  } catch (error) {
    fail(error);
    return false;
  }
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send($("input").value); });
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send($("input").value); }
});
$("stop").addEventListener("click", () => state.running?.abort());
$("cancel-edit").addEventListener("click", () => { cancelEdit(); $("input").focus(); });
$("new-chat").addEventListener("click", () => { newChat(); uncover(); });
$("newest").addEventListener("click", () => follow(true));
$("memory-create").addEventListener("click", () => remember(null));
$("model").addEventListener("change", () => chooseModel());
$("memory").addEventListener("change", save);
$("key").addEventListener("change", () => {
  try { sessionStorage.setItem("gka.key", JSON.stringify($("key").value)); } catch { /* asked again after a reload */ }
  open();
});
$("panel-button").addEventListener("click", () => togglePanel());
$("iterations").addEventListener("input", () => {
  const value = Number($("iterations").value);
  state.iterations = value === maxIterations() ? null : value;
  settings();
  save();
});
for (const id of kept) $(id).addEventListener("input", () => { settings(); save(); if (id === "certainty" || id === "layers") draw(); });
$("log").addEventListener("scroll", moved);
new ResizeObserver(scroll).observe($("log"));  // what stands below it grows and shrinks
$("log").addEventListener("wheel", (event) => { if (event.deltaY < 0) following = false; }, { passive: true });
$("log").addEventListener("click", (event) => { if (event.target.title && event.target.className === "token") say(`“${event.target.textContent}”: ${event.target.title}`); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    if (narrow.matches && panelShown()) togglePanel(false);
    else if (state.running) state.running.abort();
    else cancelEdit();
  }
  if (event.altKey && event.key === "n") { event.preventDefault(); newChat(); }
  if (event.altKey && event.key === "s") { event.preventDefault(); $("panel-button").click(); }
});
addEventListener("storage", drawChats);
addEventListener("pagehide", () => {
  try { sessionStorage.setItem("gka.draft", JSON.stringify(state.editing === null ? $("input").value : state.draft)); } catch { /* no room: the draft goes */ }
  save();
});
narrow.addEventListener("change", aboutPanel);

restore();
draw();
drawChats();
aboutPanel();
open();
