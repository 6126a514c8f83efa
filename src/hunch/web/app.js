// The page: a chat that shows who guessed each token, beside the engine's pulse.

import { Answer, make, verdict } from "./answers.js";
import { redraw } from "./charts.js";
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
  };
}

async function converse(question) {
  const choice = document.querySelector("input[name=mode]:checked").value;
  const modes = choice === "both" ? ["auto", "off"] : [choice];
  $("hello")?.remove();
  const answers = make("div", "answers");
  const turn = make("section", modes.length > 1 ? "turn wide" : "turn");
  turn.append(make("p", "question", question), answers);
  $("log").append(turn);
  const cards = [];
  for (const mode of modes) new Answer(answers, LABELS[mode], cards);
  const history = [...messages, { role: "user", content: question }];
  running = new AbortController();
  $("send").textContent = "stop";
  followed = null;
  follow(turn);
  let current = cards[0];
  try {
    // One after the other: each has the machine to itself, so that the two speeds compare.
    for (const [i, mode] of modes.entries()) {
      current = cards[i];
      const done = await ask(request(history, mode), running.signal, (pieces) => {
        current.add(pieces);
        follow(current.node);
      });
      current.finish(done);
    }
    messages.push(history.at(-1), { role: "assistant", content: cards[0].text });
    if (cards.length > 1) turn.append(verdict(...cards));
    for (const card of cards) complete(card.node, card.body, card.text);
    turn.append(tools(turn, question));
    keepChat();
  } catch (error) {
    for (const card of cards.slice(cards.indexOf(current))) card.fail(error);
    if (error instanceof KeyNeeded) {
      turn.remove();
      prompt.value = question; // asked again once there is a key
      $("key-dialog").showModal();
    }
  }
  running = null;
  $("send").textContent = "send";
  follow(turn);
}

// The finished text beside the coloured one, and a way to take it along.
function complete(node, body, text) {
  body.after(format(text));
  node.querySelector(".top").append(copyButton(() => text));
}

// What can be done with a turn: ask again, or ask something else instead; what followed is dropped.
function tools(turn, question) {
  const again = make("button", "plain", "again");
  again.title = "Another answer, with the next seed";
  again.addEventListener("click", () => {
    if (!forget(turn)) return;
    $("seed").value = Number($("seed").value) + 1;
    converse(question);
  });
  const edit = make("button", "plain", "edit");
  edit.title = "Change the question";
  edit.addEventListener("click", () => {
    if (!forget(turn)) return;
    prompt.value = question;
    fit();
    prompt.focus();
  });
  return make("div", "tools", again, edit);
}

function forget(turn) {
  if (running) return false;
  const turns = [...$("log").querySelectorAll(".turn")];
  const place = turns.indexOf(turn);
  for (const later of turns.slice(place)) later.remove();
  messages.length = 2 * place;
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
  for (let i = 0; i + 1 < messages.length; i += 2) {
    const [question, text] = [messages[i].content, messages[i + 1].content];
    const body = make("div", "text", text);
    const top = make("div", "top", make("span", "label", "saved"));
    const card = make("article", "answer", top, body);
    complete(card, body, text);
    const turn = make("section", "turn", make("p", "question", question), make("div", "answers", card));
    turn.append(tools(turn, question));
    $("log").append(turn);
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
  return converse(question);
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
