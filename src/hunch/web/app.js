// The page: a chat that shows who guessed each token, and the engine's pulse.

import { Bars, Lines } from "./charts.js";

const $ = (id) => document.getElementById(id);
const messages = []; // the conversation so far
let running = null; // AbortController of the answer being written
let modelName = null;

// --- the server ---------------------------------------------------------------------------------

function headers() {
  const key = sessionStorage.getItem("hunch-key");
  const base = { "Content-Type": "application/json" };
  return key ? { ...base, Authorization: `Bearer ${key}` } : base;
}

async function* readEvents(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += decoder.decode(value, { stream: true });
    const events = buffer.split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function ask(history, mode, signal, onPieces) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers(),
    signal,
    body: JSON.stringify({
      messages: history,
      temperature: Number($("temperature").value),
      max_tokens: Number($("max-tokens").value),
      seed: Number($("seed").value),
      stream: true,
      stream_options: { include_usage: true },
      speculation: { mode, origins: true },
    }),
  });
  if (response.status === 401) $("key-dialog").showModal();
  if (!response.ok) throw new Error((await response.json()).error.message);
  let last = null;
  for await (const chunk of readEvents(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.hunch?.pieces) onPieces(chunk.hunch.pieces);
    last = chunk;
  }
  return { stats: last.hunch.stats, usage: last.usage };
}

// --- answers ------------------------------------------------------------------------------------

function make(tag, className, text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return node;
}

class Answer {
  constructor(parent, label) {
    this.node = make("article", "answer live");
    const top = make("div", "top");
    this.speed = make("span", "speed");
    top.append(make("span", "label", label), this.speed);
    this.body = make("div", "text");
    this.facts = make("div", "facts");
    this.node.append(top, this.body, this.facts);
    parent.append(this.node);
    this.text = "";
    this.count = 0;
    this.start = null;
  }

  add(pieces) {
    const now = performance.now();
    this.start ??= now;
    for (const [text, origin] of pieces) {
      const isTarget = origin === "target";
      const piece = make("span", isTarget ? "piece target" : "piece drafter", text);
      piece.title = isTarget ? "written by the model" : `guessed by ${origin}`;
      this.body.append(piece);
      this.text += text;
      this.count += 1;
    }
    const seconds = (now - this.start) / 1000;
    if (seconds > 0.2) this.speed.textContent = `${(this.count / seconds).toFixed(1)} tokens/s`;
  }

  finish({ stats, usage }) {
    this.rate = stats.tokens_per_second;
    this.speed.textContent = `${(this.rate ?? 0).toFixed(1)} tokens/s`;
    const facts = [`${usage.completion_tokens} tokens in ${stats.steps} passes`];
    if (stats.drafted) {
      facts.push(`${stats.tokens_per_pass.toFixed(2)} per pass`);
      const guesses = Object.entries(stats.drafters ?? {}).map(
        ([name, counts]) => `${counts.accepted} of ${counts.drafted} by ${name}`,
      );
      facts.push(`guesses right: ${guesses.join(", ")}`);
    }
    this.facts.textContent = facts.join(" · ");
    this.node.classList.remove("live");
  }

  fail(error) {
    this.node.classList.remove("live");
    const isStopped = error.name === "AbortError";
    this.facts.className = isStopped ? "facts" : "facts error";
    this.facts.textContent = isStopped ? "stopped" : error.message;
  }
}

const LABELS = { auto: "speculation on", off: "speculation off" };

async function converse(question) {
  const choice = document.querySelector("input[name=mode]:checked").value;
  const modes = choice === "both" ? ["auto", "off"] : [choice];
  $("hello")?.remove();
  const turn = make("section", modes.length > 1 ? "turn wide" : "turn");
  const answers = make("div", "answers");
  turn.append(make("p", "question", question), answers);
  $("log").append(turn);
  const cards = modes.map((mode) => new Answer(answers, LABELS[mode]));
  const history = [...messages, { role: "user", content: question }];
  running = new AbortController();
  $("send").textContent = "stop";
  let current = cards[0];
  try {
    // One after the other: each has the machine to itself, so that the two speeds compare.
    for (const [i, mode] of modes.entries()) {
      current = cards[i];
      const done = await ask(history, mode, running.signal, (pieces) => {
        current.add(pieces);
        follow();
      });
      current.finish(done);
    }
    messages.push(history.at(-1), { role: "assistant", content: cards[0].text });
    if (cards.length > 1) turn.append(verdict(...cards));
  } catch (error) {
    for (const card of cards.slice(cards.indexOf(current))) card.fail(error);
  }
  running = null;
  $("send").textContent = "send";
  follow();
}

function verdict(on, off) {
  const isSame = on.text === off.text;
  const node = make("p", isSame ? "verdict" : "verdict differs", "same text: ");
  node.append(make("b", "", isSame ? "yes" : "no"));
  if (on.rate && off.rate) node.append(` · ${(on.rate / off.rate).toFixed(2)} times the speed`);
  return node;
}

function follow() {
  const log = $("log");
  const isPhone = getComputedStyle(log).overflowY === "visible";
  const box = isPhone ? document.documentElement : log;
  if (!isPhone) box.scrollTop = box.scrollHeight;
}

// --- the engine's pulse -------------------------------------------------------------------------

const speed = new Lines($("speed"), ["--mark-edge"], 10);
const queue = new Lines($("queue"), ["--mark-edge", "--second"], 4);
const kv = new Lines($("kv"), ["--mark-edge"], 0.1);
const accept = new Bars($("accept"), "--mark-edge");
let before = null;

function show(stats) {
  const engine = stats.engine;
  const tokens = engine.generation_tokens ?? 0;
  if (before) {
    const rate = Math.max(0, (tokens - before.tokens) / (stats.time - before.time));
    speed.push(rate);
    $("speed-now").textContent = rate.toFixed(1);
  }
  before = { tokens, time: stats.time };
  queue.push(engine.num_running ?? 0, engine.num_waiting ?? 0);
  $("queue-now").textContent = `${engine.num_running ?? 0} · ${engine.num_waiting ?? 0}`;
  kv.push(engine.kv_usage ?? 0);
  $("kv-now").textContent = `${(100 * (engine.kv_usage ?? 0)).toFixed(1)} %`;
  accept.set(engine.per_position ?? []);
  const rate = engine.drafted ? `${Math.round((100 * engine.accepted) / engine.drafted)} %` : "–";
  $("accept-now").textContent = rate;
  const rows = [
    ["tokens so far", tokens.toLocaleString("en")],
    ["tokens per pass", engine.tokens_per_pass ? engine.tokens_per_pass.toFixed(2) : "–"],
    ...Object.entries(engine.drafters ?? {}).map(([name, counts]) => [
      `guessed right by ${name}`,
      `${Math.round((100 * counts.accepted) / counts.drafted)} %`,
    ]),
    ["seconds saved", (engine.time_saved_seconds ?? 0).toFixed(1)],
    ["first token, median", ms(engine.ttft_ms?.p50)],
    ["between tokens, median", ms(engine.latency_ms?.p50)],
  ];
  $("totals").replaceChildren(
    ...rows.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]),
  );
}

const ms = (value) => (value == null ? "–" : `${value.toFixed(value < 10 ? 1 : 0)} ms`);

async function poll() {
  if (document.hidden) return;
  const health = $("health");
  try {
    const response = await fetch("/stats", { headers: headers() });
    if (response.ok) {
      const stats = await response.json();
      modelName ??= stats.model;
      $("model").textContent = modelName;
      show(stats);
    }
    health.className = response.ok ? "dot ok" : "dot bad";
    health.title = response.ok ? "serving" : `the server answers ${response.status}`;
  } catch {
    health.className = "dot bad";
    health.title = "the server does not answer";
  }
  health.setAttribute("aria-label", health.title);
}

// --- controls -----------------------------------------------------------------------------------

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  for (const chart of [speed, queue, kv, accept]) chart.draw();
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(localStorage.getItem("hunch-theme") ?? (prefersDark.matches ? "dark" : "light"));
$("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("hunch-theme", theme);
  setTheme(theme);
});

$("key").addEventListener("click", () => $("key-dialog").showModal());
$("key-dialog").addEventListener("close", () => {
  const key = $("key-input").value.trim();
  if (key) sessionStorage.setItem("hunch-key", key);
  poll();
});

const prompt = $("prompt");
function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const question = prompt.value.trim();
  if (!question) return undefined;
  prompt.value = "";
  fit();
  return converse(question);
});
$("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  $("log").replaceChildren();
  prompt.focus();
});
for (const sample of document.querySelectorAll(".sample")) {
  sample.addEventListener("click", () => {
    prompt.value = sample.textContent;
    $("ask").requestSubmit();
  });
}
addEventListener("resize", () => setTheme(document.documentElement.dataset.theme));

poll();
setInterval(poll, 1000);
