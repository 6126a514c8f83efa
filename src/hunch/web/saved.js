// Conversations of this browser, newest first; nothing of them leaves it.

const KEY = "hunch-chats";
const MOST = 50;

export function all() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? [];
  } catch {
    return []; // somebody else's, or damaged
  }
}

export function save(chat) {
  const rest = all().filter(({ id }) => id !== chat.id);
  const kept = chat.messages.length ? [chat, ...rest].slice(0, MOST) : rest;
  for (;;) {
    try {
      localStorage.setItem(KEY, JSON.stringify(kept));
      return;
    } catch (error) {
      if (kept.length < 2) throw error;
      kept.pop(); // the browser's room is used up: the oldest goes
    }
  }
}

export function remove(id) {
  localStorage.setItem(KEY, JSON.stringify(all().filter((chat) => chat.id !== id)));
}

export function asMarkdown(messages) {
  return messages.map(({ role, content, tool_calls: calls = [] }) => {
    const called = calls.map((call) => `\n\`${call.function.name}(${call.function.arguments})\`\n`);
    return `## ${role}\n\n${content}\n${called.join("")}`;
  }).join("\n");
}

export function download(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
