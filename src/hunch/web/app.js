// The page: a chat that shows who guessed each token, beside the engine's pulse.

import { Answer, make, verdict } from "./answers.js";
import { redraw } from "./charts.js";
import { readTools, showCalls } from "./calls.js";
import { copyButton, format } from "./format.js";
import { poll } from "./pulse.js";
import * as saved from "./saved.js";
import { ask, KeyNeeded } from "./server.js";

const $ = (id) => document.getElementById(id);
const LABELS = { auto: "speculation on", off: "speculation off" };
const messages = []; // the conversation so far
let chatId = crypto.randomUUID?.() ?? String(Date.now());
let running = null; // AbortController of the answer being written

// --- the conversation ---------------------------------------------------------------------------

function request(history, mode) {
  const system = $("system").value.trim();
  return {
    messages: system ? [{ role: "system", content: system }, ...history] : history,
    top_p: Number($("top-p").value) || 1,
    temperature: Number($("temperature").value),
    max_tokens: Number($("max-tokens").value),
    seed: Number($("seed").value),
    speculation: { mode, origins: true },
    tools: readTools($("tools").value),
  };
}

// Asks `told` (a question, or what tools gave) and shows the answer.
async function converse(told) {
  const choice = document.querySelector("input[name=mode]:checked").value;
  const modes = choice === "both" ? ["auto", "off"] : [choice];
  $("hello")?.remove();
  const answers = make("div", "answers");
  const turn = make("section", modes.length > 1 ? "turn wide" : "turn");
  turn.append(questionOf(told), answers);
  $("log").append(turn);
  const cards = [];
  for (const mode of modes) new Answer(answers, LABELS[mode], cards);
  const history = [...messages, ...told];
  turn.first = messages.length; // where the conversation stands if this turn is forgotten
  running = new AbortController();
  $("send").textContent = "stop";
  followed = null;
  follow(turn);
  let current = cards[0];
  try {
    // One after the other: each has the machine to itself, so that the two speeds compare.
    const ends = [];
    for (const [i, mode] of modes.entries()) {
      current = cards[i];
      const done = await ask(request(history, mode), running.signal, (pieces) => {
        cards[i].add(pieces);
        beforeNextPicture(() => {
          cards[i].draw();
          follow(cards[i].node);
        });
      });
      current.finish(done);
      ends.push(done);
    }
    const [{ content, calls }] = ends;
    const answer = { role: "assistant", content: calls.length ? content : cards[0].text };
    if (calls.length) answer.tool_calls = calls;
    messages.push(...told, answer);
    if (cards.length > 1) turn.append(verdict(...cards));
    for (const card of cards) complete(card.node, card.body, card.text);
    if (calls.length) turn.append(showCalls(calls, [], answerCalls));
    turn.append(tools(turn, told));
    keepChat();
  } catch (error) {
    for (const card of cards.slice(cards.indexOf(current))) card.fail(error);
    if (error instanceof KeyNeeded) {
      turn.remove();
      if (told[0].role === "user") prompt.value = told[0].content; // asked again once there is a key
      $("key-dialog").showModal();
    }
  }
  running = null;
  $("send").textContent = "send";
  follow(turn);
}

function questionOf(told) {
  const [{ role, content }] = told;
  return make("p", role === "user" ? "question" : "question given", role === "user" ? content : "results");
}

// What tools gave is the next thing the model hears.
function answerCalls(told) {
  if (running) return false;
  converse(told);
  return true;
}

// The finished text beside the coloured one, and a way to take it along.
function complete(node, body, text) {
  body.after(format(text));
  node.querySelector(".top").append(copyButton(() => text));
}

// What can be done with a turn: ask again, or ask something else instead; what followed is dropped.
function tools(turn, told) {
  const again = make("button", "plain", "again");
  again.title = "Another answer, with the next seed";
  again.addEventListener("click", () => {
    if (!forget(turn)) return;
    $("seed").value = Number($("seed").value) + 1;
    converse(told);
  });
  const edit = make("button", "plain", "edit");
  edit.title = "Change the question";
  edit.addEventListener("click", () => {
    if (!forget(turn)) return;
    prompt.value = told[0].content;
    fit();
    prompt.focus();
  });
  return make("div", "tools", again, ...(told[0].role === "user" ? [edit] : []));
}

function forget(turn) {
  if (running) return false;
  const turns = [...$("log").querySelectorAll(".turn")];
  const place = turns.indexOf(turn);
  for (const later of turns.slice(place)) later.remove();
  messages.length = turn.first;
  return true;
}

// --- saved chats --------------------------------------------------------------------------------

function keepChat() {
  saved.save({ id: chatId, title: messages[0]?.content.slice(0, 80), messages });
}

function showChat(chat) {
  running?.abort();
  chatId = chat.id;
  messages.splice(0, messages.length, ...chat.messages);
  $("log").replaceChildren();
  let told = [];
  for (const [place, message] of messages.entries()) {
    if (message.role !== "assistant") {
      told.push(message);
      continue;
    }
    const text = message.content;
    const body = make("div", "text", text);
    const top = make("div", "top", make("span", "label", "saved"));
    const card = make("article", "answer", top, body);
    complete(card, body, text);
    const turn = make("section", "turn", questionOf(told), make("div", "answers", card));
    turn.first = place - told.length;
    if (message.tool_calls) {
      const after = messages.slice(place + 1);
      const results = after.slice(0, message.tool_calls.length).filter(({ role }) => role === "tool");
      turn.append(showCalls(message.tool_calls, results, answerCalls));
    }
    turn.append(tools(turn, told));
    $("log").append(turn);
    told = [];
  }
}

function listChats() {
  const rows = saved.all().map((chat) => {
    const open = make("button", "plain open", chat.title || "untitled");
    open.addEventListener("click", () => {
      showChat(chat);
      $("chats-dialog").close();
    });
    const remove = make("button", "plain", "delete");
    remove.addEventListener("click", () => {
      saved.remove(chat.id);
      listChats();
    });
    return make("li", "", open, remove);
  });
  $("chat-list").replaceChildren(...(rows.length ? rows : [make("li", "quiet", "none yet")]));
}

$("chats").addEventListener("click", () => {
  listChats();
  $("chats-dialog").showModal();
});
$("export").addEventListener("click", () => saved.download("chat.md", saved.asMarkdown(messages)));

let followed = null; // where the log was last scrolled to; a reader who scrolls away is left alone

// Keep the end of what is being written in view.
function follow(node) {
  const log = $("log");
  if (followed !== null && Math.abs(log.scrollTop - followed) > 40) return;
  const end = node.getBoundingClientRect().bottom - log.getBoundingClientRect().bottom;
  log.scrollTop += end + 16;
  followed = log.scrollTop;
}

let isDrawing = false; // in the next picture, whatever comes until then

function beforeNextPicture(draw) {
  if (isDrawing) return;
  isDrawing = true;
  requestAnimationFrame(() => {
    isDrawing = false;
    draw();
  });
}

// --- controls -----------------------------------------------------------------------------------

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  redraw();
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(localStorage.getItem("hunch-theme") ?? (prefersDark.matches ? "dark" : "light"));
$("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("hunch-theme", theme);
  setTheme(theme);
});
addEventListener("resize", () => setTheme(document.documentElement.dataset.theme));

// On a phone the charts and the settings are one tap away.
function unfolds(button, className) {
  $(button).addEventListener("click", () => {
    const isOpen = document.body.classList.toggle(className);
    $(button).setAttribute("aria-expanded", isOpen);
    redraw();
  });
}
unfolds("pulse", "shows-engine");
unfolds("settings", "shows-settings");

$("tools").value = localStorage.getItem("hunch-tools") ?? "";
$("tools").addEventListener("change", () => localStorage.setItem("hunch-tools", $("tools").value));
$("misses").addEventListener("change", () => {
  $("log").classList.toggle("shows-misses", $("misses").checked);
});
function showFormatted() {
  $("log").classList.toggle("shows-formatted", $("formats").checked);
  localStorage.setItem("hunch-formatted", $("formats").checked ? "1" : "");
}
$("formats").checked = Boolean(localStorage.getItem("hunch-formatted"));
$("formats").addEventListener("change", showFormatted);
showFormatted();
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  const [file] = $("file").files;
  $("file").value = "";
  if (!file) return;
  const text = await file.text();
  prompt.value += `${prompt.value ? "\n" : ""}${file.name}:\n\`\`\`\n${text}\n\`\`\`\n`;
  fit();
  prompt.focus();
});
$("key").addEventListener("click", () => $("key-dialog").showModal());
// Esc leaves everything as it was.
$("key-dialog").addEventListener("cancel", () => ($("key-input").value = ""));
$("key-dialog").addEventListener("close", () => {
  const key = $("key-input").value.trim();
  if (key) sessionStorage.setItem("hunch-key", key);
  poll();
  if (key && prompt.value && !running) $("ask").requestSubmit();
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
  return converse([{ role: "user", content: question }]);
});

const hello = $("hello");
hello.addEventListener("click", ({ target }) => {
  if (!target.classList.contains("sample")) return;
  const mode = target.dataset.mode ?? "auto";
  document.querySelector(`input[name=mode][value=${mode}]`).checked = true;
  prompt.value = target.textContent.replace(/^Side by side: /, "");
  $("ask").requestSubmit();
});
$("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  chatId = crypto.randomUUID?.() ?? String(Date.now());
  $("log").replaceChildren(hello);
  prompt.focus();
});

poll();
setInterval(poll, 1000);
