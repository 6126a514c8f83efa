// Tools: which ones the model may call, the calls it makes, and what they gave.

import { make } from "./answers.js";

// The functions a user wrote down, as OpenAI's tools; each may be given without its wrapping.
export function readTools(text) {
  if (!text.trim()) return undefined;
  let given;
  try {
    given = JSON.parse(text);
  } catch (error) {
    throw new Error(`tools: not JSON (${error.message})`);
  }
  const list = Array.isArray(given) ? given : [given];
  return list.map((tool) => (tool.type === "function" ? tool : { type: "function", function: tool }));
}

// Take in what a chunk says of calls: the first names one, the others go on with its arguments.
export function addCalls(calls, deltas) {
  for (const { index, id, function: part } of deltas ?? []) {
    calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
    calls[index].function.name += part?.name ?? "";
    calls[index].function.arguments += part?.arguments ?? "";
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it was cut
  }
}

// The calls of an answer, each with room for what the tool gives; `onResults` gets the messages.
export function showCalls(calls, results, onResults) {
  const inputs = calls.map(({ function: { name } }, i) => {
    const input = make("input", "result");
    input.placeholder = "what it gives";
    input.setAttribute("aria-label", `result of ${name}`);
    input.value = results[i]?.content ?? "";
    input.disabled = Boolean(results.length);
    return input;
  });
  const cards = calls.map(({ function: call }, i) => {
    const head = make("div", "call-name", `calls ${call.name}`);
    return make("div", "call", head, make("pre", "", pretty(call.arguments)), inputs[i]);
  });
  const form = make("form", "calls", ...cards);
  if (results.length) return form;
  const send = make("button", "plain", calls.length > 1 ? "send results" : "send result");
  form.append(send);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const told = calls.map(({ id }, i) => ({ role: "tool", tool_call_id: id, content: inputs[i].value }));
    if (!onResults(told)) return;
    for (const input of inputs) input.disabled = true;
    send.remove();
  });
  return form;
}
