// An answer as it is meant to be read: Markdown, highlighted code, reasoning folded away.

import hljs from "./vendor/highlight.js";
import { marked } from "./vendor/marked.js";
import DOMPurify from "./vendor/purify.js";
import { make } from "./answers.js";

const THOUGHT = /^\s*<think>([\s\S]*?)(<\/think>|$)/;
const CALL = /<tool_call>\s*([\s\S]*?)\s*(<\/tool_call>|$)/g;

// Nothing in an answer may load or run anything.
const RULES = {
  ALLOWED_URI_REGEXP: /^(https?|mailto):/i,
  FORBID_TAGS: ["img", "style", "form", "input", "audio", "video", "svg", "math"],
  FORBID_ATTR: ["style", "class", "id"],
};

export function format(text) {
  const node = make("div", "formatted");
  const thought = text.match(THOUGHT);
  if (thought) {
    const words = make("div", "", thought[1].trim());
    node.append(make("details", "thought", make("summary", "", "reasoning"), words));
    text = text.slice(thought[0].length);
  }
  text = text.replace(CALL, (_, call) => `\n\`\`\`json\n${call}\n\`\`\`\n`);
  const body = make("div", "");
  body.innerHTML = DOMPurify.sanitize(marked.parse(text), RULES);
  for (const link of body.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const block of body.querySelectorAll("pre > code")) decorate(block);
  node.append(body);
  return node;
}

function decorate(block) {
  const source = block.textContent;
  block.innerHTML = hljs.highlightAuto(source).value; // it escapes what it does not colour
  block.parentElement.prepend(copyButton(() => source));
}

export function copyButton(text) {
  const button = make("button", "copy plain", "copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text());
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), 1500);
  });
  return button;
}
