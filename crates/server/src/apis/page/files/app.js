// The page: conversations, settings, theme, keys of the keyboard.

import { request } from "./api.js";
import * as chat from "./chat.js";
import { button, byId, element, notify } from "./dom.js";
import * as live from "./live.js";
import * as pictures from "./pictures.js";
import * as store from "./store.js";

const THEMES = ["auto", "light", "dark"];

// Settings: name, label, properties of the input.
const FIELDS = [
  ["system", "System prompt", { rows: 4 }],
  ["temperature", "Temperature", { type: "number", min: 0, step: "any" }],
  ["top_p", "Top-p", { type: "number", min: 0, max: 1, step: "any" }],
  ["top_k", "Top-k", { type: "number", min: 0, step: 1 }],
  ["min_p", "Min-p", { type: "number", min: 0, max: 1, step: "any" }],
  ["seed", "Seed", { type: "number", min: 0, step: 1 }],
  ["max_tokens", "Most tokens of an answer", { type: "number", min: 0, step: 1 }],
  ["tools", "Tools, as JSON", { rows: 4, spellcheck: false }],
];

let conversations = [];
let models = [];

function newConversation() {
  const empty = conversations.find(({ messages }) => !messages.length);
  const shown = empty ?? { id: crypto.randomUUID?.() ?? String(Math.random()), title: "",
    used: Date.now(), messages: [] };
  if (!empty) conversations.unshift(shown);
  open(shown);
}

function open(conversation) {
  chat.show(conversation);
  store.set("open", conversation.id);
  setOpen("list", false);
  update();
  byId("prompt").focus();
}

function update() {
  const isRunning = chat.isRunning();
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
  byId("state").textContent = isRunning ? "answering" : "";
  const items = conversations.map((conversation) => {
    const title = conversation.title || "New conversation";
    const isShown = conversation === chat.current();
    const link = button(title, () => open(conversation));
    if (isShown) link.setAttribute("aria-current", "true");
    const remove = button("×", () => removeConversation(conversation));
    remove.setAttribute("aria-label", `Delete ${title}`);
    return element("li", {}, link, remove);
  });
  byId("conversations").replaceChildren(...items);
}

async function removeConversation(conversation) {
  if (conversation.messages.length && !confirm(`Delete “${conversation.title}”?`)) return;
  const isShown = conversation === chat.current();
  if (isShown) chat.stop();
  // An answer that ends now does not bring it back.
  conversation.isRemoved = true;
  conversations = conversations.filter((other) => other !== conversation);
  try {
    await store.remove(conversation.id);
  } catch (error) {
    notify(`The conversation is not deleted: ${error.message}`);
  }
  if (!isShown) update();
  else if (conversations.length) open(conversations[0]);
  else newConversation();
}

async function send() {
  const prompt = byId("prompt");
  const text = prompt.value;
  if ((!text.trim() && pictures.isEmpty()) || chat.isRunning()) return;
  if (!pictures.isEmpty() && !seesPictures()) return notify(pictures.TEXT_ONLY);
  prompt.value = "";
  notify("");
  await chat.send(text, pictures.take());
  if (!capabilities()) loadModels();
}

// Capabilities of the chosen model. Only a loaded one has them.
const capabilities = () => models.find(({ id }) => id === byId("choice").value)?.capabilities;
const seesPictures = () => capabilities()?.includes("vision") ?? true;

async function addPictures(files) {
  const lines = seesPictures() ? await pictures.add(files, chat.sentPictures())
    : [pictures.TEXT_ONLY];
  notify(lines.join("\n"));
  byId("prompt").focus();
}

// Takes pictures from the clipboard, the button, and files dropped on the page.
function takePictures() {
  const files = byId("files");
  byId("attach").onclick = () => files.click();
  files.onchange = () => {
    addPictures([...files.files]);
    files.value = "";
  };
  byId("prompt").onpaste = (event) => {
    const { types, files } = event.clipboardData;
    // Office programs add a picture of the text.
    const isText = types.includes("text/plain") && types.includes("text/html");
    if (!files.length || isText) return;
    event.preventDefault();
    addPictures([...files]);
  };
  const onDrag = (event) => {
    // From one element of the page to another.
    if (event.relatedTarget) return;
    const hasFiles = event.dataTransfer.types.includes("Files");
    if (hasFiles) event.preventDefault();
    document.body.classList.toggle("dropping", hasFiles && event.type === "dragover");
    if (hasFiles && event.type === "drop") addPictures([...event.dataTransfer.files]);
  };
  for (const kind of ["dragover", "dragleave", "drop"]) document.addEventListener(kind, onDrag);
}

// Opens or closes a column.
function setOpen(name, isOpen) {
  byId(name).classList.toggle("open", isOpen);
  byId(`show-${name}`).setAttribute("aria-expanded", isOpen);
  if (name !== "live") return;
  store.set("live", isOpen ? "open" : "closed");
  live.watch(isOpen);
}

const isOpen = (name) => byId(name).classList.contains("open");

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  store.set("theme", theme);
}

function addSettings() {
  const fields = FIELDS.map(([name, label, properties]) => {
    const kind = properties.type ? "input" : "textarea";
    const input = element(kind, { id: `set-${name}`, value: store.setting(name), ...properties });
    input.onchange = () => store.set(name, input.value);
    return element("p", {}, element("label", { htmlFor: input.id }, label), input);
  });
  byId("fields").append(...fields);
}

function onKey(event) {
  if (event.key === "Escape" && chat.isRunning() && !document.querySelector("dialog[open]")) {
    chat.stop();
  } else if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    newConversation();
  }
}

// Shows the model, or lets the user choose one of several.
function showModels() {
  const names = models.map(({ id }) => id);
  const isOne = names.length < 2;
  const choice = byId("choice");
  byId("model").textContent = names.join(", ");
  byId("model").hidden = !isOne;
  choice.hidden = isOne;
  const chosen = choice.value;
  choice.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  const loaded = models.find(({ status }) => status?.value === "loaded")?.id;
  choice.value = [store.setting("model"), chosen, loaded, names[0]]
    .find((name) => names.includes(name));
  const showAttach = () => { byId("attach").hidden = !seesPictures(); };
  choice.onchange = () => {
    store.set("model", choice.value);
    showAttach();
  };
  showAttach();
}

async function loadModels() {
  try {
    models = (await (await request("/v1/models")).json()).data;
    showModels();
  } catch (error) {
    notify(error.message);
  }
}

async function start() {
  chat.init(update);
  addSettings();
  setTheme(THEMES.find((theme) => theme === store.setting("theme")) ?? "auto");
  byId("theme").onclick = () => {
    const next = THEMES.indexOf(store.setting("theme")) + 1;
    setTheme(THEMES[next % THEMES.length]);
  };
  byId("new").onclick = newConversation;
  byId("show-list").onclick = () => setOpen("list", !isOpen("list"));
  byId("show-live").onclick = () => setOpen("live", !isOpen("live"));
  byId("show-settings").onclick = () => byId("settings").showModal();
  byId("stop").onclick = chat.stop;
  byId("composer").onsubmit = (event) => {
    event.preventDefault();
    send();
  };
  byId("prompt").onkeydown = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  takePictures();
  document.addEventListener("keydown", onKey);
  document.addEventListener("visibilitychange", () => live.watch(isOpen("live")));
  await store.open();
  try {
    conversations = await store.load();
  } catch (error) {
    notify(`Earlier conversations cannot be read: ${error.message}`);
  }
  const last = conversations.find(({ id }) => id === store.setting("open"));
  if (last) open(last);
  else newConversation();
  const isWide = matchMedia("(min-width: 60rem)").matches;
  setOpen("live", isWide && store.setting("live") !== "closed");
  loadModels();
}

start();
