// The page: a chat that shows who guessed each token, beside the engine's pulse.

import { Answer, make, verdict } from "./answers.js";
import { redraw } from "./charts.js";
import { poll } from "./pulse.js";
import { ask, KeyNeeded } from "./server.js";

const $ = (id) => document.getElementById(id);
const LABELS = { auto: "speculation on", off: "speculation off" };
const messages = []; // the conversation so far
let running = null; // AbortController of the answer being written

// --- the conversation ---------------------------------------------------------------------------

function request(history, mode) {
  return {
    messages: history,
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
  $("log").replaceChildren(hello);
  prompt.focus();
});

poll();
setInterval(poll, 1000);
