// The conversation that is shown: its messages, and the answer that is generated.

import { complete } from "./api.js";
import { button, byId, element } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import * as pictures from "./pictures.js";
import * as store from "./store.js";

// Characters of a conversation up to which it is also kept while an answer grows.
const SAVED_LIVE = 1 << 20;
const SAVE_PERIOD = 3000;
// Characters of a call's arguments that are shown.
const SHOWN_ARGUMENTS = 20_000;

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];

let conversation = null;
let running = null;
let onChange = () => {};
// Whether the list stays at its end while it grows.
let follows = true;

// `changed` is called when titles, or whether an answer is generated, change.
export function init(changed) {
  onChange = changed;
  const list = byId("messages");
  let top = 0;
  list.onscroll = () => {
    const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
    // Growth moves the end away, and only users scroll up.
    follows = isAtEnd || (follows && list.scrollTop >= top);
    top = list.scrollTop;
  };
}

// Scrolls to the end after the next rendering, unless the user has scrolled away.
function follow() {
  requestAnimationFrame(() => {
    const list = byId("messages");
    if (follows) list.scrollTop = list.scrollHeight;
  });
}

export const current = () => conversation;
export const isRunning = () => Boolean(running);

// Shows a conversation. An answer that is being generated ends.
export function show(shown) {
  stop();
  conversation = shown;
  const list = byId("messages");
  list.replaceChildren(...shown.messages.map((message) => messageNode(message)));
  if (!shown.messages.length) {
    list.append(element("p", { className: "empty" }, "Ask the model something."));
  }
  follows = true;
  follow();
}

export function stop() {
  running?.abort();
}

// Appends the user's message and generates the answer.
export function send(text, shown = []) {
  const message = { role: "user", content: text };
  if (shown.length) message.pictures = shown;
  add(message);
  conversation.title ||= (text.trim() || shown[0].name).slice(0, 60);
  return generate();
}

// Pictures of the messages so far, which each request has.
export const sentPictures = () =>
  conversation.messages.flatMap((message) => message.pictures ?? []);

function add(message) {
  byId("messages").querySelector(".empty")?.remove();
  conversation.messages.push(message);
  const node = messageNode(message);
  byId("messages").append(node);
  follows = true;
  follow();
  return node;
}

// Drops the messages from `message` on.
function cut(message) {
  stop();
  const index = conversation.messages.indexOf(message);
  conversation.messages.length = index;
  [...byId("messages").children].slice(index).forEach((node) => node.remove());
}

async function generate() {
  // An answer that was stopped ends before the next one begins.
  const shown = conversation;
  await running?.ended;
  if (shown !== conversation) return;
  const abort = new AbortController();
  let end;
  abort.ended = new Promise((resolve) => { end = resolve; });
  running = abort;
  // Pictures may delay the answer by minutes, in which the page may be left.
  store.save(shown);
  const messages = [...shown.messages];
  const message = { role: "assistant", content: "" };
  const node = add(message);
  const view = node.view;
  view.busy(true);
  view.wait(messages.at(-1).pictures);
  onChange();
  let saved = performance.now();
  let length = sentPictures().reduce((sum, { size }) => sum + size, JSON.stringify(shown).length);
  try {
    const body = await requestBody(messages);
    for await (const chunk of complete(body, abort.signal)) {
      if (chunk.usage) message.usage = chunk.usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      if (choice.finish_reason) message.finish = choice.finish_reason;
      length += view.take(choice.delta ?? {});
      if (length < SAVED_LIVE && performance.now() - saved > SAVE_PERIOD) {
        saved = performance.now();
        store.save(shown);
      }
    }
  } catch (error) {
    if (abort.signal.aborted) message.finish = "stopped";
    else message.error = error.message;
  }
  view.busy(false);
  shown.used = Date.now();
  if (running === abort) running = null;
  end();
  await store.save(shown);
  onChange();
}

// A message's text, after its pictures.
async function contentOf({ content, pictures: shown }) {
  if (!shown) return content;
  const parts = await Promise.all(shown.map(pictures.part));
  return content.trim() ? [...parts, { type: "text", text: content }] : parts;
}

// Fields of the request. Throws an error in the settings.
async function requestBody(messages) {
  const body = { messages: [] };
  const model = byId("choice").value;
  if (model) body.model = model;
  const system = store.setting("system").trim();
  if (system) body.messages.push({ role: "system", content: system });
  for (const message of messages) {
    const { role, content, reasoning, calls, id, error } = message;
    if (role === "assistant" && error && !content && !calls) continue;
    const sent = { role, content: await contentOf(message) };
    if (reasoning) sent.reasoning_content = reasoning;
    if (calls) {
      sent.tool_calls = calls.map(({ id, name, arguments: text }) =>
        ({ id, type: "function", function: { name, arguments: text } }));
    }
    if (id) sent.tool_call_id = id;
    body.messages.push(sent);
  }
  for (const name of NUMBERS) {
    const text = store.setting(name).trim();
    if (!text) continue;
    body[name] = Number(text);
    if (!Number.isFinite(body[name])) throw new Error(`${name} in the settings is not a number`);
  }
  const tools = store.setting("tools").trim();
  try {
    if (tools) body.tools = JSON.parse(tools);
  } catch (error) {
    throw new Error(`the tools in the settings are not JSON: ${error.message}`);
  }
  return body;
}

const ROLES = { user: "You", assistant: "Model", tool: "Result" };

function messageNode(message) {
  const body = element("div", { className: "body" });
  const tools = element("div", { className: "actions" });
  const label = ROLES[message.role] ?? message.role;
  const node = element("article", { className: message.role, "aria-label": label },
    element("h3", {}, label), body, tools);
  node.view = message.role === "assistant"
    ? new AnswerView(message, body, tools)
    : new TextView(message, body, tools);
  return node;
}

const copyButton = (text) => button("Copy", async ({ target }) => {
  try {
    await navigator.clipboard.writeText(text());
    target.textContent = "Copied";
  } catch {
    target.textContent = "Not allowed";
  }
  setTimeout(() => { target.textContent = "Copy"; }, 1500);
});

// A message of the user, or a result.
class TextView {
  constructor(message, body, tools) {
    const text = element("div", { className: "plain" });
    // Long texts in parts, as in answers.
    const view = new MarkdownView(text);
    view.fence = { mark: "\0", language: "" };
    view.append(message.content);
    this.pictures = element("div", { className: "pictures" });
    this.pictures.append(...(message.pictures ?? []).map(pictures.thumbnail));
    body.append(this.pictures, text);
    if (message.role !== "user") return;
    tools.append(button("Edit", () => this.edit(message, body, tools)));
    tools.append(copyButton(() => message.content));
  }

  edit(message, body, tools) {
    const area = element("textarea", {
      value: message.content, rows: Math.min(12, message.content.split("\n").length + 1),
      "aria-label": "Edited message",
    });
    const old = [...body.childNodes];
    const cancel = () => {
      body.replaceChildren(...old);
      tools.hidden = false;
    };
    const sendEdited = () => {
      cut(message);
      send(area.value, message.pictures);
    };
    area.onkeydown = (event) => {
      if (event.key === "Escape") cancel();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        sendEdited();
      }
      event.stopPropagation();
    };
    tools.hidden = true;
    body.replaceChildren(this.pictures, area, button("Send", sendEdited), button("Cancel", cancel));
    area.focus();
  }
}

// An answer: thoughts, text, calls, errors.
class AnswerView {
  constructor(message, body, tools) {
    this.message = message;
    this.body = body;
    this.tools = tools;
    this.thoughts = null;
    this.text = null;
    this.calls = [];
    if (message.reasoning) this.addThoughts(message.reasoning);
    if (message.content) this.addText(message.content);
    message.calls?.forEach((call) => this.addCall(call));
    this.busy(false);
  }

  // Takes a delta of the stream. Returns its length.
  take(delta) {
    const { message } = this;
    const [thoughts, text] = [delta.reasoning_content ?? "", delta.content ?? ""];
    if (thoughts) {
      message.reasoning = (message.reasoning ?? "") + thoughts;
      this.addThoughts(thoughts);
    }
    if (text) {
      message.content += text;
      this.addText(text);
    }
    let length = thoughts.length + text.length;
    for (const { index, id, function: part } of delta.tool_calls ?? []) {
      message.calls ??= [];
      const call = message.calls[index] ??= { id, name: part.name, arguments: "" };
      call.arguments += part.arguments ?? "";
      length += part.arguments?.length ?? 0;
      if (this.calls[index]) this.showArguments(index);
      else this.addCall(call);
    }
    if (length) this.waiting?.remove();
    follow();
    return length;
  }

  // Says what the model does before it answers to pictures.
  wait(shown) {
    if (!shown) return;
    const text = shown.length > 1 ? "looking at the pictures" : "looking at the picture";
    this.waiting = element("span", { className: "small", role: "status" }, text);
    this.body.append(this.waiting);
  }

  addThoughts(text) {
    if (!this.thoughts) {
      const inner = element("div");
      this.thoughts = new MarkdownView(inner);
      const title = element("summary", {}, "Thoughts");
      this.body.append(element("details", { className: "thoughts" }, title, inner));
    }
    this.thoughts.append(text);
  }

  addText(text) {
    if (!this.text) {
      const inner = element("div", { className: "text" });
      this.text = new MarkdownView(inner);
      this.body.append(inner);
    }
    this.text.append(text);
  }

  addCall(call) {
    const inner = element("code");
    const title = element("summary", {}, `Call of ${call.name}`);
    const pre = element("pre", {}, inner);
    this.body.append(element("details", { className: "call", open: true }, title, pre));
    this.calls.push({ call, inner });
    this.showArguments(this.calls.length - 1);
  }

  showArguments(index) {
    const { call, inner } = this.calls[index];
    const isCut = call.arguments.length > SHOWN_ARGUMENTS;
    inner.textContent = call.arguments.slice(0, SHOWN_ARGUMENTS) + (isCut ? " …" : "");
  }

  // Shows whether the answer is being generated, and its end.
  busy(isBusy) {
    this.body.setAttribute("aria-busy", isBusy);
    this.tools.replaceChildren();
    if (isBusy) return;
    this.waiting?.remove();
    const { message } = this;
    if (message.error) {
      this.body.append(element("p", { className: "error", role: "alert" }, message.error));
    }
    this.tools.append(
      button("Retry", () => {
        cut(message);
        generate();
      }),
      copyButton(() => message.content),
      element("span", { className: "small" }, endText(message)),
    );
    if (message.finish === "tool_calls") this.askResults();
    follow();
  }

  // A form for the results of the calls, unless they are there.
  askResults() {
    const { messages } = conversation ?? { messages: [] };
    const index = messages.indexOf(this.message);
    if (index >= 0 && index < messages.length - 1) return;
    const areas = this.message.calls.map(({ name }) => {
      const label = `Result of ${name}`;
      return element("textarea", { rows: 2, placeholder: label, "aria-label": label });
    });
    const sending = element("button", {}, "Send results");
    const form = element("form", { className: "results" }, ...areas, sending);
    form.onsubmit = (event) => {
      event.preventDefault();
      form.remove();
      areas.forEach((area, i) =>
        add({ role: "tool", id: this.message.calls[i].id, content: area.value }));
      generate();
    };
    this.body.append(form);
  }
}

function endText({ finish, usage }) {
  const ends = {
    length: "cut at the limit of tokens", stopped: "stopped", tool_calls: "called tools",
  };
  const parts = ends[finish] ? [ends[finish]] : [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${usage.completion_tokens} tokens`);
    parts.push(`prompt ${usage.prompt_tokens}, cached ${cached}`);
    const answer = usage.completion_tokens_details ?? {};
    const [right, wrong] = [answer.accepted_prediction_tokens, answer.rejected_prediction_tokens];
    if (right + wrong > 0) parts.push(`${right} of ${right + wrong} drafts right`);
  }
  return parts.join("; ");
}
