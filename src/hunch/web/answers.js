// Answers: text coloured by who guessed it, a ribbon of passes, and what it came to.

import { Ribbon } from "./charts.js";

const HUES = ["suffix", "ngram", "prediction", "recycling"]; // methods with a colour of their own

export function hueOf(origin) {
  const known = HUES.indexOf(origin);
  return known < 0 ? 0 : known;
}

export function make(tag, className, ...children) {
  const node = document.createElement(tag);
  node.className = className;
  node.append(...children);
  return node;
}

// On one line, and no longer than worth reading.
function shorten(text) {
  const line = text.replace(/\s*\n\s*/g, "↵");
  return line.length > 28 ? `${line.slice(0, 27)}…` : line;
}

export class Answer {
  constructor(parent, label, turn) {
    this.node = make("article", "answer live waits");
    this.speed = make("span", "speed");
    this.body = make("div", "text");
    this.ribbon = new Ribbon(make("canvas", "ribbon"));
    this.ribbon.canvas.title = "One bar per pass of the model; the taller, the more tokens it gave";
    this.facts = make("div", "facts");
    const top = make("div", "top", make("span", "label", label), this.speed);
    this.node.append(top, this.ribbon.canvas, this.body, this.facts);
    parent.append(this.node);
    turn.push(this);
    this.turn = turn; // the answers to one question, whose ribbons share a scale
    this.text = "";
    this.count = 0;
    this.start = null;
    this.isCode = false;
    this.run = 0; // guesses since the last token of the model's own
  }

  add(pieces) {
    const now = performance.now();
    this.start ??= now;
    this.node.classList.remove("waits");
    for (const [text, origin, missed] of pieces) this.addPiece(text, origin, missed);
    const seconds = (now - this.start) / 1000;
    if (seconds > 0.2) this.speed.textContent = `${(this.count / seconds).toFixed(1)} tokens/s`;
  }

  // Once per picture, not per token: it makes the browser lay out the page.
  draw() {
    const longest = Math.max(...this.turn.map((answer) => answer.ribbon.length));
    for (const answer of this.turn) answer.ribbon.draw(longest);
  }

  addPiece(text, origin, missed) {
    const isTarget = origin === "target";
    const piece = make("span", isTarget ? "piece target" : `piece drafter g${hueOf(origin)}`, text);
    piece.title = isTarget ? "written by the model" : `guessed by ${origin}`;
    if (missed) {
      piece.dataset.missed = shorten(missed);
      piece.title += `; the guess was “${missed}”`;
    }
    this.text += text;
    const fences = this.text.split("```").length - 1;
    if (this.isCode || fences % 2) piece.classList.add("code");
    this.isCode = fences % 2 === 1;
    this.body.append(piece);
    this.count += 1;
    this.run += 1;
    if (isTarget) {
      this.ribbon.push(this.run);
      this.run = 0;
    }
  }

  finish({ stats, usage, ending }) {
    this.stats = stats;
    this.draw();
    if (ending === "length") {
      this.facts.append(make("span", "cut", `cut at ${usage.completion_tokens} tokens`));
    }
    this.seconds = this.start === null ? 0 : (performance.now() - this.start) / 1000;
    this.speed.textContent = `${(stats.tokens_per_second ?? 0).toFixed(1)} tokens/s`;
    const summary = `${usage.completion_tokens} tokens in ${stats.steps} passes`;
    this.facts.append(make("span", "", summary));
    if (stats.drafted) {
      this.facts.append(make("span", "", `${stats.tokens_per_pass.toFixed(2)} per pass`));
      const counts = make("span", "", "guesses right: ");
      Object.entries(stats.drafters ?? {}).forEach(([name, count], i) => {
        counts.append(i ? ", " : "", `${count.accepted} of ${count.drafted} by `);
        counts.append(make("mark", `drafter g${hueOf(name)}`, name));
      });
      this.facts.append(counts);
    }
    this.node.classList.remove("live", "waits");
  }

  fail(error) {
    this.node.classList.remove("live", "waits");
    const isStopped = error.name === "AbortError";
    this.facts.className = isStopped ? "facts" : "facts error";
    this.facts.textContent = isStopped ? "stopped" : error.message;
  }
}

// What a comparison showed.
export function verdict(on, off) {
  const isSame = on.text === off.text;
  const node = make("p", isSame ? "verdict" : "verdict differs", "same text: ");
  node.append(make("b", "", isSame ? "yes" : "no"));
  const rates = [on.stats.tokens_per_second, off.stats.tokens_per_second];
  if (rates.every(Boolean)) node.append(` · ${(rates[0] / rates[1]).toFixed(2)} times the speed`);
  node.append(` · ${on.stats.steps} passes instead of ${off.stats.steps}`);
  return node;
}
