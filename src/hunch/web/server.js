// The server, as the page sees it: a key, one streamed answer, one report.

import { addCalls } from "./calls.js";

export function headers() {
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

export class KeyNeeded extends Error {}

// Streams one answer; `onPieces` gets [text, origin, what a wrong guess said instead] as they come.
export async function ask(body, signal, onPieces) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(),
    signal,
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  if (!response.ok) {
    const { message } = (await response.json()).error;
    throw response.status === 401 ? new KeyNeeded(message) : new Error(message);
  }
  let last = null;
  let ending = null;
  let content = "";
  const calls = [];
  for await (const chunk of readEvents(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.hunch?.pieces) onPieces(chunk.hunch.pieces);
    const choice = chunk.choices?.[0];
    ending = choice?.finish_reason ?? ending;
    content += choice?.delta?.content ?? "";
    addCalls(calls, choice?.delta?.tool_calls);
    last = chunk;
  }
  if (!last?.hunch) throw new Error("the server ended the stream early");
  return { stats: last.hunch.stats, usage: last.usage, ending, content, calls };
}
