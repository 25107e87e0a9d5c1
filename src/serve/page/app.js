// The page of `gka serve`: a chat with streaming, certainty and memories. No dependencies, nothing from elsewhere.
"use strict";

const $ = (id) => document.getElementById(id);
const state = { messages: [], running: null, memories: [], props: null };

// --- the server

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function call(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers() });
  const body = await response.json();
  if (!response.ok) throw new Error(body.error ? body.error.message : `${response.status}`);
  return body;
}

/** The events of a stream, one parsed object each. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
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

function request() {
  const number = (id) => Number($(id).value);
  const own = maxIterations();
  const body = {
    model: $("model").value,
    messages: [...($("system").value ? [{ role: "system", content: $("system").value }] : []),
               ...state.messages.map(({ role, content }) => ({ role, content }))],
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    top_p: number("top_p"),
    top_k: number("top_k"),
    max_tokens: number("max_tokens"),
    certainty: own > 0,
  };
  if ($("seed").value !== "") body.seed = number("seed");
  if ($("memory").value) body.memory = $("memory").value;
  if (own > 0) body.iterations = $("auto-iterations").checked ? "auto" : Math.min(number("iterations"), own);
  return body;
}

// --- the conversation

async function answer() {
  const message = { role: "assistant", content: "", reasoning: "", tokens: [] };
  state.messages.push(message);
  const control = new AbortController();
  state.running = control;
  busy(true);
  draw();
  const item = $("log").lastElementChild;
  const start = performance.now();
  let first = 0;
  try {
    const sent = request();
    sent.messages.pop();
    const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(sent), signal: control.signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) message.usage = { ...event.usage, gka: event.gka };
      for (const choice of event.choices) {
        const delta = choice.delta || {};
        if (delta.reasoning_content) message.reasoning += delta.reasoning_content;
        if (delta.tool_calls) delta.content = (delta.content || "") + delta.tool_calls.map((c) => `${c.function.name}(${c.function.arguments})`).join("\n");
        if (delta.content) {
          first ||= performance.now() - start;
          message.content += delta.content;
          const own = event.gka || {};
          message.tokens.push({ text: delta.content, certainty: own.certainty?.[0] ?? null, layers: own.layer_certainty?.[0] ?? [] });
        }
      }
      show(item, message);
    }
    const usage = message.usage;
    if (usage) {
      const seconds = (performance.now() - start) / 1000;
      const remembered = usage.gka?.remembered_tokens ?? 0;
      const memory = state.memories.find((one) => one.id === sent.memory);
      say(`${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s, the first after ${(first / 1000).toFixed(2)} s; ` +
          `prompt ${usage.prompt_tokens}, of which remembered ${remembered}` + (usage.gka?.why_not_more ? ` (${usage.gka.why_not_more})` : "") +
          (usage.gka?.kept_tokens < memory?.tokens ? `; of the memory attention sees the last ${usage.gka.kept_tokens} tokens` : ""));
    }
  } catch (error) {
    if (error.name === "AbortError") say("stopped");
    else say(error.message, true);
    if (!message.content && !message.reasoning) state.messages.splice(state.messages.indexOf(message), 1);
  }
  state.running = null;
  busy(false);
  save();
  draw();
  $("input").focus();
}

function send(text) {
  if (state.running || !text.trim()) return;
  state.messages.push({ role: "user", content: text });
  $("input").value = "";
  answer();
}

/** Everything from a message on goes; its text comes back to be changed. */
function edit(at) {
  if (state.running) return;
  $("input").value = state.messages[at].content;
  state.messages.length = at;
  draw();
  $("input").focus();
}

function regenerate(at) {
  if (state.running) return;
  state.messages.length = at;
  answer();
}

// --- drawing

/** Red for what the past does not explain, green for what it does. */
function colour(value) {
  if (value === null || value === undefined) return "";
  const share = Math.max(0, Math.min(1, value));
  return `hsl(${10 + 130 * share} 75% 55% / ${0.5 - 0.25 * share})`;
}

function coloured(tokens, pick) {
  const part = document.createDocumentFragment();
  for (const token of tokens) {
    const span = document.createElement("span");
    span.className = "token";
    span.textContent = token.text;
    const value = pick(token);
    span.style.backgroundColor = colour(value);
    if (value !== null && value !== undefined) span.title = `certainty ${value.toFixed(3)}`;
    part.append(span);
  }
  return part;
}

function show(item, message) {
  const bubble = item.querySelector(".bubble");
  bubble.replaceChildren();
  if (message.reasoning) {
    const thought = document.createElement("div");
    thought.className = "reasoning";
    thought.textContent = message.reasoning;
    bubble.append(thought);
  }
  const known = message.tokens?.some((token) => token.certainty !== null);
  if (known && $("certainty").checked) bubble.append(coloured(message.tokens, (token) => token.certainty));
  else bubble.append(message.content || (state.running ? "…" : ""));
  item.querySelector(".layered")?.remove();
  if (known && $("layers").checked) bubble.after(layered(message.tokens));
  if ($("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 160) $("log").scrollTop = $("log").scrollHeight;
}

/** The answer once for each layer. */
function layered(tokens) {
  const row = document.createElement("div");
  row.className = "layered";
  const count = Math.max(...tokens.map((token) => token.layers.length));
  for (let layer = 0; layer < count; ++layer) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    const values = tokens.map((token) => token.layers[layer]).filter((value) => value !== undefined);
    const mean = values.reduce((a, b) => a + b, 0) / Math.max(values.length, 1);
    caption.textContent = `layer ${layer + 1}, mean ${mean.toFixed(2)}`;
    const text = document.createElement("div");
    text.className = "bubble";
    text.append(coloured(tokens, (token) => token.layers[layer]));
    figure.append(caption, text);
    row.append(figure);
  }
  return row;
}

function button(text, act, title) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.title = title || text;
  made.addEventListener("click", act);
  return made;
}

function draw() {
  $("log").replaceChildren(...state.messages.map((message, at) => {
    const item = document.createElement("li");
    item.className = message.role;
    const role = document.createElement("div"), bubble = document.createElement("div"), tools = document.createElement("div");
    role.className = "role";
    role.textContent = message.role === "user" ? "you" : $("model").value;
    bubble.className = "bubble";
    tools.className = "tools";
    if (message.role === "user") tools.append(button("Edit", () => edit(at), "Change this message and go on from here"));
    else tools.append(button("Regenerate", () => regenerate(at), "Another answer"), button("Copy", () => navigator.clipboard.writeText(message.content)));
    if (message.tokens?.some((token) => token.certainty !== null)) {
      const scale = document.createElement("span");
      scale.className = "scale";
      scale.title = "certainty from 0 to 1";
      tools.append("0 ", scale, " 1");
    }
    item.append(role, bubble, tools);
    show(item, message);
    return item;
  }));
  $("log").scrollTop = $("log").scrollHeight;
}

function say(text, error = false) {
  $("status").textContent = text;
  $("status").classList.toggle("error", error);
}

function busy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
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
    const item = document.createElement("li"), about = document.createElement("div");
    const part = memory.kept_tokens < memory.tokens ? ` (attention keeps the last ${memory.kept_tokens})` : "";
    about.textContent = `${memory.name || memory.id}: ${memory.tokens} tokens${part}, states ${bytes(memory.state_bytes)}, caches ${bytes(memory.cache_bytes)}`;
    item.append(about,
      button("Talk to it", () => { $("memory").value = memory.id; newChat(); }, "A new chat behind this memory"),
      button("Fork", () => remember(memory.id), "This memory and the text above, as a new one"),
      button("Delete", () => forget(memory.id)));
    return item;
  }));
}

async function remember(from) {
  try {
    const file = $("memory-file").files[0];
    const text = $("memory-text").value || (file ? await file.text() : "");
    const name = $("memory-name").value || (file ? file.name : "");
    if (!from && !text) return say("a memory needs a text or a file", true);
    say("reading…");
    const keep = $("memory-keep").value;
    const body = { ...(text ? { input: text } : {}), name, ...(keep ? { keep_tokens: Number(keep) } : {}) };
    if (!from) body.model = $("model").value;
    const made = await call(from ? `/v1/memories/${from}/fork` : "/v1/memories", { method: "POST", body: JSON.stringify(body) });
    say(`remembered ${made.tokens} tokens as ${made.name || made.id}`);
    $("memory-text").value = $("memory-name").value = $("memory-file").value = $("memory-keep").value = "";
    await loadMemories(made.id);
    save();
  } catch (error) { say(error.message, true); }
}

async function forget(id) {
  try {
    await call(`/v1/memories/${id}`, { method: "DELETE" });
    await loadMemories();
  } catch (error) { say(error.message, true); }
}

// --- settings

const kept = ["system", "temperature", "top_p", "top_k", "max_tokens", "iterations", "auto-iterations", "certainty", "layers", "model"];

function save() {
  const values = Object.fromEntries(kept.map((id) => [id, $(id).type === "checkbox" ? $(id).checked : $(id).value]));
  try {
    localStorage.setItem("gka", JSON.stringify({ values, messages: state.messages, memory: $("memory").value }));
  } catch { /* a full or forbidden store: the chat goes on without */ }
}

function restore() {
  let stored = {};
  try { stored = JSON.parse(localStorage.getItem("gka") || "{}"); } catch { /* nothing to restore */ }
  for (const [id, value] of Object.entries(stored.values || {})) {
    if (!$(id) || (id === "model" && ![...$("model").options].some((option) => option.value === value))) continue;
    if ($(id).type === "checkbox") $(id).checked = value;
    else $(id).value = value;
  }
  state.messages = stored.messages || [];
  return stored.memory;
}

function maxIterations() {
  const model = state.props?.models.find((entry) => entry.id === $("model").value);
  return model?.gka?.iterations ?? 0;
}

function settings() {
  const own = maxIterations();
  $("iterations").max = own || 1;
  for (const id of ["iterations", "auto-iterations", "certainty", "layers"]) $(id).disabled = own === 0;
  $("iterations").disabled ||= $("auto-iterations").checked;
  document.querySelectorAll(".slider output").forEach((output) => { output.textContent = $(output.htmlFor).value; });
  if (own && $("auto-iterations").checked) document.querySelector("output[for=iterations]").textContent = "auto";
}

function newChat() {
  if (state.running) state.running.abort();
  state.messages = [];
  say("");
  save();
  draw();
  $("input").focus();
}

async function open() {
  try {
    state.props = await call("/props");
  } catch (error) {
    return say(`the server does not answer: ${error.message}`, true);
  }
  const chosen = $("model").value;
  $("model").replaceChildren(...state.props.models.map((model) => new Option(model.id, model.id)));
  if (chosen) $("model").value = chosen;
  if (!maxIterationsSet) { $("iterations").max = maxIterations() || 1; $("iterations").value = maxIterations(); maxIterationsSet = true; }
  const memory = restore();
  settings();
  await loadMemories(memory);
  draw();
}
let maxIterationsSet = false;

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send($("input").value); });
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send($("input").value); }
});
$("stop").addEventListener("click", () => state.running?.abort());
$("new-chat").addEventListener("click", newChat);
$("memory-create").addEventListener("click", () => remember(null));
$("model").addEventListener("change", () => { settings(); loadMemories(); save(); });
$("memory").addEventListener("change", save);
$("key").addEventListener("change", open);
$("panel-button").addEventListener("click", () => {
  $("panel-button").setAttribute("aria-expanded", String($("panel").classList.toggle("open")));
});
for (const id of kept) $(id).addEventListener("input", () => { settings(); save(); if (id === "certainty" || id === "layers") draw(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") state.running?.abort();
  if (event.altKey && event.key === "n") { event.preventDefault(); newChat(); }
  if (event.altKey && event.key === "s") { event.preventDefault(); $("panel-button").click(); }
});
open();
