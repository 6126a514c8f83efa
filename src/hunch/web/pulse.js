// The engine's pulse: charts and totals, from a report every second.

import { hueOf, make } from "./answers.js";
import { Bars, Lines } from "./charts.js";
import { headers } from "./server.js";

const $ = (id) => document.getElementById(id);
const speed = new Lines($("speed"), ["--mark-edge"], 10);
const queue = new Lines($("queue"), ["--mark-edge", "--second"], 4);
const kv = new Lines($("kv"), ["--mark-edge"], 0.1, (value) => `${Math.round(100 * value)} %`);
const accept = new Bars($("accept"), "--mark-edge");
let before = null;
let isAsking = false; // a server that is slow to answer is not asked again meanwhile

const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
const ms = (value) => (value == null ? "–" : `${value.toFixed(value < 10 ? 1 : 0)} ms`);

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
  $("accept-now").textContent = percent(engine.accepted, engine.drafted);
  showDrafters(engine.drafters ?? {});
  const rows = [
    ["tokens so far", tokens.toLocaleString("en")],
    ["tokens per pass", engine.tokens_per_pass ? engine.tokens_per_pass.toFixed(2) : "–"],
    ["seconds saved", (engine.time_saved_seconds ?? 0).toFixed(1)],
    ["first token, median", ms(engine.ttft_ms?.p50)],
    ["between tokens, median", ms(engine.latency_ms?.p50)],
  ];
  if (engine.is_synthetic) rows.unshift(["drafter", "SYNTHETIC: made up for a benchmark"]);
  if (engine.is_lossy) rows.unshift(["verifier", "LOSSY: the text may differ"]);
  $("totals").replaceChildren(
    ...rows.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]),
  );
}

// One meter per method: how many of its guesses were right.
function showDrafters(drafters) {
  const meters = Object.entries(drafters).map(([name, counts]) => {
    const meter = make("div", `meter g${hueOf(name)}`);
    const bar = make("i", "");
    bar.style.width = `${(100 * counts.accepted) / Math.max(1, counts.drafted)}%`;
    const share = make("output", "", percent(counts.accepted, counts.drafted));
    meter.append(make("span", "", name), make("div", "", bar), share);
    meter.title = `${counts.accepted} of ${counts.drafted} guesses of ${name} were right`;
    return meter;
  });
  $("drafters").replaceChildren(...meters);
}

export async function poll() {
  if (document.hidden || isAsking) return;
  const health = $("health");
  isAsking = true;
  try {
    const response = await fetch("stats", { headers: headers() });
    if (response.ok) {
      const stats = await response.json();
      $("model").textContent = stats.model;
      show(stats);
    }
    health.className = response.ok ? "dot ok" : "dot bad";
    health.title = response.ok ? "serving" : `the server answers ${response.status}`;
  } catch {
    health.className = "dot bad";
    health.title = "the server does not answer";
  } finally {
    isAsking = false;
  }
  health.setAttribute("aria-label", health.title);
}
