// Drives the server's page in a browser, for scripts/test-page.sh.
//
// usage: node test-page.mjs BINARY CHROMIUM [PICTURES]     PICTURES is a folder for pictures
//
// Run in the folder in which npm has installed puppeteer-core.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { cpSync, existsSync, readdirSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const puppeteer = createRequire(join(process.cwd(), "x.js"))("puppeteer-core");

const [binary, chromium, pictures] = process.argv.slice(2);
const PATIENCE = 60_000;
const PROMPT = "Tell me the fable of The Fox and the Crow.";

// Starts a server of the built-in model, some of whose experts have no slot.
async function serve(port, ...args) {
  const all = ["serve", "--port", String(port), "--slots", "128", ...args];
  const server = spawn(binary, all, { stdio: ["ignore", "pipe", "ignore"] });
  process.on("exit", () => server.kill());
  let text = "";
  for await (const bytes of server.stdout.iterator({ destroyOnReturn: false })) {
    text += bytes;
    const port = /http:\/\/127\.0\.0\.1:(\d+)/.exec(text)?.[1];
    if (port) return { port, url: `http://127.0.0.1:${port}/`, process: server };
  }
  throw new Error("the server has not started");
}

async function end(server) {
  const ended = new Promise((resolve) => server.process.on("exit", resolve));
  server.process.kill();
  await ended;
}

let { url, ...server } = await serve(0);

const browser = await puppeteer.launch({
  executablePath: chromium,
  args: ["--no-sandbox", "--disable-gpu", "--force-color-profile=srgb"],
  protocolTimeout: 2 * PATIENCE,
});
const page = await browser.newPage();
page.setDefaultTimeout(PATIENCE);
const WIDE = { width: 1000, height: 640 };
await page.setViewport(WIDE);

// Nothing may fail, break the policy, or ask another server.
const faults = [];
let isFailing = false;
page.on("pageerror", (error) => faults.push(`error: ${error.message}`));
page.on("console", (line) => {
  if (line.type() === "error" && !isFailing) faults.push(`console: ${line.text()}`);
});
page.on("dialog", (dialog) => {
  if (dialog.type() !== "confirm") faults.push(`dialog: ${dialog.message()}`);
  dialog.accept();
});
page.on("request", (request) => {
  if (!request.url().startsWith(url)) faults.push(`request: ${request.url()}`);
});

const step = (name) => console.log(`- ${name}`);
const textOf = (selector) => page.$eval(selector, (node) => node.textContent);
const answers = () =>
  page.$$eval("article.assistant .text", (nodes) => nodes.map((node) => node.textContent));
const isIdle = () => page.waitForFunction(() => document.getElementById("stop").hidden);
const heat = () => page.$eval("#heat", (canvas) => canvas.toDataURL());

async function send(text) {
  await page.focus("#prompt");
  await page.evaluate((value) => { document.getElementById("prompt").value = value; }, text);
  await page.keyboard.press("Enter");
}

async function set(name, value) {
  await page.click("#show-settings");
  await page.$eval(`#set-${name}`, (input, text) => {
    input.value = text;
    input.dispatchEvent(new Event("change"));
  }, value);
  await page.click("#settings button");
}

// Answers chat completions with `chunks` of a stream instead of the server, once `gate` is open.
let chunks = null;
let gate = null;
// Messages of the last of these requests.
let sent = null;
// Answers the list of models with these instead of the server.
let models = null;
await page.setRequestInterception(true);
page.on("request", async (request) => {
  if (models && request.url().endsWith("/v1/models")) {
    return request.respond({ status: 200, body: JSON.stringify({ data: models }) });
  }
  if (!chunks || !request.url().endsWith("/chat/completions")) return request.continue();
  sent = JSON.parse(request.postData()).messages;
  await gate;
  const events = chunks.map((chunk) => `data: ${JSON.stringify(chunk)}\n\n`);
  const headers = { "content-type": "text/event-stream" };
  request.respond({ status: 200, headers, body: `${events.join("")}data: [DONE]\n\n` });
});
const delta = (delta, finish_reason = null) => ({ choices: [{ index: 0, delta, finish_reason }] });

async function answer(deltas, finish = "stop") {
  chunks = [...deltas.map((part) => delta(part)), delta({}, finish)];
  const before = (await page.$$("article.assistant")).length;
  await send("Go on.");
  await page.waitForFunction((count) =>
    document.querySelectorAll("article.assistant").length > count, {}, before);
  await isIdle();
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => setTimeout(done))));
  chunks = null;
}

step("the page is small");
const sizes = [];
const measure = async (response) => {
  if (response.url() === url || response.url().includes("/page/")) {
    sizes.push((await response.buffer()).length);
  }
};
page.on("response", measure);
await page.goto(url, { waitUntil: "load" });
await page.waitForFunction(() => document.getElementById("model").textContent);
page.off("response", measure);
const size = sizes.reduce((sum, bytes) => sum + bytes, 0);
assert(sizes.length > 10 && size < 150_000, `${sizes.length} files have ${size} bytes`);
console.log(`  ${sizes.length} files, ${size} bytes`);

step("a prompt brings the fable, and the heat map changes");
await set("temperature", "0");
await page.waitForFunction(() => /layers/.test(document.getElementById("heat-text").textContent));
const cold = await heat();
await send(PROMPT);
await page.waitForFunction(() => document.querySelector("article.assistant .text"));
await page.waitForFunction((old) =>
  document.getElementById("heat").toDataURL() !== old, {}, cold);
await isIdle();
const [fable] = await answers();
assert.match(fable, /[Cc]row/);
assert.match(await textOf("article.assistant .actions"), /tokens; prompt \d+/);
assert.match(await textOf("#plan"), /slots/);
assert.match(await textOf("#figures"), /tokens\/s/);
assert(await page.$("#speed-plot canvas"), "a plot");

if (pictures) {
  const shot = async (name) => {
    await new Promise((done) => setTimeout(done, 600));
    await page.screenshot({ path: join(pictures, `page-${name}.png`) });
  };
  const theme = (value) =>
    page.emulateMediaFeatures([{ name: "prefers-color-scheme", value }]);
  await send("Tell me the fable of The Lion and the Mouse.");
  await isIdle();
  await theme("light");
  await shot("light");
  await theme("dark");
  await shot("dark");
  await theme("light");
  await page.setViewport({ width: 360, height: 640 });
  await page.click("#show-live");
  await shot("phone");
  await page.click("#show-live");
}

step("nothing is wider than a phone");
await page.setViewport({ width: 360, height: 640 });
assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), 360);
await page.setViewport(WIDE);

step("a reload keeps the conversation");
await page.reload({ waitUntil: "load" });
await page.waitForSelector("article.assistant .text");
assert.equal((await answers())[0], fable);

step("retry gives the same answer, an edit another one");
await page.$$eval("article.assistant .actions button", (nodes) => nodes.at(-2).click());
await page.waitForFunction(() => !document.getElementById("stop").hidden);
await isIdle();
if (!pictures) assert.equal((await answers()).at(-1), fable);
await page.$eval("article.user .actions button", (node) => node.click());
await page.$eval("article.user textarea", (area) => { area.value = "The Lion and the Mouse"; });
await page.focus("article.user textarea");
await page.keyboard.press("Enter");
await page.waitForFunction(() => document.querySelectorAll("article").length === 2);
await page.waitForFunction(() => document.querySelector("article.assistant .text"));
await isIdle();
assert.notEqual((await answers())[0], fable);

step("stop ends an answer, by a click and by Escape");
for (const stop of [() => page.click("#stop"), () => page.keyboard.press("Escape")]) {
  await set("temperature", "1.5");
  const before = (await answers()).length;
  await send(PROMPT);
  await page.waitForFunction((count) =>
    document.querySelectorAll("article.assistant .text").length > count, {}, before);
  await stop();
  await isIdle();
  const ends = await page.$$eval("article.assistant .actions", (nodes) => nodes.at(-1).textContent);
  assert.match(ends, /stopped|tokens/);
}
await page.keyboard.down("Alt");
await page.keyboard.press("KeyN");
await page.keyboard.up("Alt");
assert.equal((await page.$$("article")).length, 0);

step("hostile text is shown and not executed");
const hostile = [
  "<script>window.hit = 1</script>",
  "<img src=x onerror=\"window.hit = 1\">",
  "[link](javascript:window.hit=1) [x](data:text/html,<script>window.hit=1</script>)",
  "<svg onload=window.hit=1></svg> <iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
  "```html\"><script>window.hit=1</script>\n<script>window.hit = 1</script>\n```",
  "| <b onclick=window.hit=1>a</b> | b |\n|---|---|\n| <style>*{display:none}</style> | 1 |",
  "https://example.org/\"onmouseover=\"window.hit=1",
];
for (const text of hostile) await answer([{ content: text }]);
await answer([{ reasoning_content: hostile[0] }, { content: hostile[1] }, {
  tool_calls: [{ index: 0, id: "call_1", type: "function",
    function: { name: hostile[1], arguments: JSON.stringify({ a: hostile[0] }) } }],
}], "tool_calls");
const found = await page.evaluate(() => ({
  hit: window.hit,
  nodes: document.querySelectorAll("#messages :is(script, img, svg, iframe, style, b)").length,
  links: [...document.querySelectorAll("#messages a")].map((link) => link.protocol),
  text: document.getElementById("messages").textContent,
}));
assert.equal(found.hit, undefined);
assert.equal(found.nodes, 0);
assert(found.links.every((protocol) => protocol === "https:"), String(found.links));
for (const text of hostile.slice(0, 2)) assert(found.text.includes(text), text);

step("thoughts are folded, calls take results");
const folded = await page.$$eval("details.thoughts", (nodes) => nodes.map((node) => node.open));
assert.deepEqual(folded, [false]);
chunks = [delta({ content: "It is sunny." }, "stop")];
await page.type(".results textarea", "sun");
await page.click(".results button");
await page.waitForFunction(() =>
  [...document.querySelectorAll("article.assistant")].at(-1).textContent.includes("sunny"));
await isIdle();
assert.equal((await page.$$("article.tool")).length, 1);

step("markdown becomes elements");
await answer(["# Ti", "tle\n\nA **bo", "ld** `co<d>e` [a](https://example.org/)\n\n- x\n  - y\n",
  "- z\n\n1. one\n2. two\n\n> quo", "te\n\n```rs\nfn main() {}\n``", "`\n\n|a|b|\n|-|-|\n|1|2|\n\nend"]
  .map((content) => ({ content })));
const kinds = await page.$$eval("article.assistant", (nodes) =>
  ["h3", "strong", "p code", "a", "ul ul li", "ol li", "blockquote p", "pre[data-language=rs]", "td"]
    .map((kind) => nodes.at(-1).querySelector(`.text ${kind}`)?.textContent));
assert.deepEqual(kinds, ["Title", "bold", "co<d>e", "a", "y", "one", "quote", "fn main() {}", "1"]);

step("10 MB answers keep the page usable");
const MB = 1 << 20;
for (const [name, part] of Object.entries({
  "one line": "x".repeat(1024),
  "words": "<b>word</b> *a* ".repeat(64),
  "code": `\`\`\`\n${"y = [[1, 2], \"`\"];\n".repeat(50)}`,
  "marks": "[*`_~#|>-h".repeat(100),
  "lines": "\n- a\n\n> b\n".repeat(100),
})) {
  const since = performance.now();
  await answer(Array(Math.ceil((10 * MB) / part.length)).fill({ content: part }));
  const seconds = (performance.now() - since) / 1000;
  const clicked = performance.now();
  await page.$$eval(".more", (nodes) => nodes.at(-1).click());
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => setTimeout(done))));
  const click = (performance.now() - clicked) / 1000;
  console.log(`  ${name}: ${seconds.toFixed(1)} s, a click ${click.toFixed(2)} s`);
  assert(seconds < 40 && click < 3, name);
  const characters = await page.$$eval("article.assistant", (nodes) => nodes.at(-1).textContent.length);
  assert(characters < MB, `${name}: ${characters} characters are rendered`);
  await page.keyboard.down("Alt");
  await page.keyboard.press("KeyN");
  await page.keyboard.up("Alt");
}

step("a model that reads text only gets no picture");
const PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mP4z8AAAAMBAQ" +
  "D3A0FDAAAAAElFTkSuQmCC";
const PICTURE = `data:image/png;base64,${PIXEL}`;
// Pastes or drops files, each a name, a kind and a size; without a size it is a red pixel.
const bring = (event, ...files) => page.evaluate((event, files, pixel) => {
  const data = new DataTransfer();
  for (const [name, type, size] of files) {
    const bytes = size ? new Uint8Array(size) : Uint8Array.from(atob(pixel), (c) => c.charCodeAt());
    data.items.add(new File([bytes], name, { type }));
  }
  const options = { bubbles: true, cancelable: true };
  document.getElementById("prompt").dispatchEvent(event === "paste"
    ? new ClipboardEvent(event, { ...options, clipboardData: data })
    : new DragEvent(event, { ...options, dataTransfer: data }));
}, event, files, PIXEL);
const noticeMatches = (pattern) => page.waitForFunction((source) =>
  new RegExp(source).test(document.getElementById("notice").textContent), {}, pattern);
const isSeen = (selector) => page.$eval(selector, (node) => node.checkVisibility());
const images = (selector) => page.waitForFunction((selector) => {
  const nodes = [...document.querySelectorAll(`${selector} img`)];
  return nodes.every((image) => image.complete) && nodes.map((image) => image.naturalWidth);
}, {}, selector).then((handle) => handle.jsonValue());
const pending = (count) => page.waitForFunction((count) =>
  document.querySelectorAll("#pending li").length === count, {}, count);
assert.equal(await isSeen("#attach"), false);
await bring("paste", ["a.png", "image/png"]);
await noticeMatches("reads text only");
await pending(0);

step("pictures are pasted, dropped and chosen, and wrong ones refused");
models = [{ id: "seer", capabilities: ["completion", "vision"] }];
await page.reload({ waitUntil: "load" });
await page.waitForSelector("#attach:not([hidden])");
await bring("paste", ["pasted.png", "image/png"]);
await pending(1);
await bring("drop", ["dropped.png", "image/png"], ["text.pdf", "application/pdf"],
  ["large.png", "image/png", (20 << 20) + 1]);
await pending(2);
await noticeMatches("text.pdf.*no PNG");
await noticeMatches("large.png.*at most 20.0 MiB");
writeFileSync("chosen.png", Buffer.from(PIXEL, "base64"));
await (await page.$("#files")).uploadFile(join(process.cwd(), "chosen.png"));
await pending(3);
assert.deepEqual(await images("#pending"), [1, 1, 1]);
await page.focus("#pending [aria-label='Remove dropped.png']");
await page.keyboard.press("Enter");
await pending(2);
await bring("drop", ...Array(32).fill(["more.png", "image/png"]));
await pending(32);
await noticeMatches("at most 32 pictures");
for (let left = 32; left > 2; left--) {
  await page.$$eval("#pending [aria-label='Remove more.png']", (nodes) => nodes.at(-1).click());
}

step("pictures are sent before the text, shown and kept");
chunks = [delta({ content: "Red." }, "stop")];
let openGate;
gate = new Promise((resolve) => { openGate = resolve; });
await send("Which colour?");
await page.waitForFunction(() =>
  document.querySelector("article.assistant .body")?.textContent === "looking at the pictures");
openGate();
await page.waitForFunction(() =>
  document.querySelector("article.assistant .body").textContent === "Red.");
await isIdle();
await pending(0);
const picture = { type: "image_url", image_url: { url: PICTURE } };
const asked = { role: "user",
  content: [picture, picture, { type: "text", text: "Which colour?" }] };
assert.deepEqual(sent, [asked]);
await page.click("article.user .thumbnail");
assert.deepEqual(await images("#picture[open]"), [1]);
await page.keyboard.press("Escape");
await page.waitForSelector("#picture:not([open])");
await page.reload({ waitUntil: "load" });
await page.waitForSelector("article.user .thumbnail");
assert.deepEqual(await images("article.user"), [1, 1]);
await send("And now?");
await page.waitForFunction(() => document.querySelectorAll("article").length === 4);
await isIdle();
assert.deepEqual(sent, [asked, { role: "assistant", content: "Red." },
  { role: "user", content: "And now?" }]);
await page.$eval("article.user .actions button", (node) => node.click());
await page.waitForSelector("article.user textarea");
await page.focus("article.user textarea");
await page.keyboard.press("Enter");
await page.waitForFunction(() => document.querySelectorAll("article").length === 2);
await isIdle();
assert.deepEqual(sent, [asked]);
await bring("paste", ["alone.png", "image/png"]);
await pending(1);
await send("");
await page.waitForFunction(() => document.querySelectorAll("article").length === 4);
await isIdle();
assert.deepEqual(sent.at(-1), { role: "user", content: [picture] });
await page.click("#new");
chunks = models = gate = null;
await page.reload({ waitUntil: "load" });
await page.waitForFunction(() => document.getElementById("model").textContent);

step("errors are shown");
isFailing = true;
chunks = [{ error: { message: "the disk is full" } }];
await send("Hello");
await page.waitForFunction(() => document.querySelector(".error"));
assert.match(await textOf(".error"), /disk is full/);
chunks = null;
await isIdle();

step("a server that is gone is said, and the feed connects again");
const stateMatches = (pattern) => page.waitForFunction((text) =>
  new RegExp(text).test(document.getElementById("live-state").textContent), {}, pattern);
await page.waitForFunction(() => document.getElementById("live-state").textContent === "");
const since = performance.now();
await end(server);
assert(performance.now() - since < 5000, "a feed does not hold the server up");
await stateMatches("next attempt");
await send("Hello");
await page.waitForFunction(() => [...document.querySelectorAll(".error")].at(-1)
  .textContent.includes("cannot be reached"));
server = await serve(server.port);
await stateMatches("^$");
await end(server);

step("a key is asked for once, and kept for the tab");
writeFileSync("keys", "secret\n");
server = await serve(server.port, "--api-key-file", "keys");
await page.goto(url, { waitUntil: "load" });
await page.waitForSelector("#key[open]");
await page.type("#key-text", "secret");
await page.keyboard.press("Enter");
await page.waitForFunction(() => document.getElementById("model").textContent);
isFailing = false;
await page.reload({ waitUntil: "load" });
await page.waitForFunction(() => document.getElementById("model").textContent);
await page.waitForFunction(() => /layers/.test(document.getElementById("heat-text").textContent));
assert.equal(await page.$("#key[open]"), null);

step("one of several models is chosen, and loaded by a message");
await end(server);
const cache = join(process.env.XDG_CACHE_HOME, "moeflux");
const builtIn = readdirSync(cache).find((name) => existsSync(join(cache, name, "config.json")));
for (const name of ["one", "two"]) {
  cpSync(join(cache, builtIn), join("models", name), { recursive: true });
}
const planMatches = (pattern) => page.waitForFunction((source) =>
  new RegExp(source).test(document.getElementById("plan").textContent), {}, pattern);
isFailing = true;
server = await serve(server.port, "--models", "models");
await page.reload({ waitUntil: "load" });
isFailing = false;
await page.waitForSelector("#choice:not([hidden])");
await planMatches("no model is loaded");
await page.select("#choice", "two");
await send(PROMPT);
await planMatches("sessions of");
await isIdle();
assert((await answers()).at(-1).length > 0);
const loaded = await (await fetch(`${url}api/ps`)).json();
assert.deepEqual(loaded.models.map(({ name }) => name), ["two"]);

assert.deepEqual(faults, []);
await browser.close();
await end(server);
console.log("the page works");
