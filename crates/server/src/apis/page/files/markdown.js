// Markdown as elements. Text of a model becomes text nodes only, so that nothing in it is executed.
// All work per update is bounded, however long an answer or a line is.

import { element } from "./dom.js";

// Characters from which a blank line ends a block, and at which it is divided in any case.
const BLOCK = 1 << 10;
const MAX_BLOCK = 8 << 10;
// Characters that are rendered before a button asks for more.
const SHOWN = 128 << 10;
// Levels of lists, quotes and spans within each other.
const DEPTH = 6;
// Characters in which a span must end.
const SPAN = 1000;

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const ITEM = /^( {0,12})(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])\s*(?:\1\s*){2,100}$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const URL_START = /^(https?:\/\/|mailto:)/i;

// Text that grows, rendered block by block: only the last block is rendered again.
export class MarkdownView {
  constructor(root) {
    this.root = root;
    // Text behind the blocks that are final, and the length of these.
    this.open = "";
    this.final = 0;
    this.limit = SHOWN;
    // Opening of the code block in which `open` begins.
    this.fence = null;
    // Element of the unfinished block, and the length of its text.
    this.last = null;
    this.rendered = 0;
    this.isWaiting = false;
    this.more = element("button", { type: "button", className: "more" });
    this.more.onclick = () => {
      this.limit += SHOWN;
      this.render();
    };
  }

  append(text) {
    this.open += text;
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      this.render();
    });
  }

  render() {
    for (let block; (block = this.nextBlock()); ) {
      this.show(block.source);
      this.open = this.open.slice(block.end);
      this.final += block.end;
      [this.fence, this.last, this.rendered] = [block.fence, null, 0];
    }
    const end = this.end();
    if (end > this.rendered) {
      this.show(this.open.slice(0, end));
      this.rendered = end;
    }
    const hidden = this.open.length - end;
    if (hidden > 0) {
      this.more.textContent = `Show more (${hidden.toLocaleString("en")} characters)`;
      this.root.append(this.more);
    } else {
      this.more.remove();
    }
  }

  // Characters of `open` that may be shown.
  end() {
    return Math.min(this.open.length, this.limit - this.final);
  }

  // Renders a block in place of the unfinished one.
  show(source) {
    if (!this.fence && !source.trim()) return;
    const node = this.fence ? code(source, this.fence) : blocks(source);
    if (this.last) this.last.replaceWith(node);
    else this.root.insertBefore(node, this.more.parentNode === this.root ? this.more : null);
    this.last = node;
  }

  // The next block that more text cannot change: its source and end, and the code block in which
  // the following one begins.
  nextBlock() {
    const text = this.open.slice(0, Math.min(this.end(), MAX_BLOCK + 1));
    for (let start = 0, newline; (newline = text.indexOf("\n", start)) >= 0; ) {
      const line = text.slice(start, newline);
      const [source, end] = [text.slice(0, start), newline + 1];
      const mark = FENCE.exec(line)?.[1];
      const language = mark && line.slice(line.indexOf(mark) + mark.length).trim();
      if (this.fence) {
        if (mark?.startsWith(this.fence.mark) && !language) return { source, end, fence: null };
      } else if (mark && !language.includes("`")) {
        return { source, end, fence: { mark, language: language.slice(0, 40) } };
      } else if (!line.trim() && start > BLOCK) {
        return { source, end, fence: null };
      }
      start = end;
    }
    if (text.length <= MAX_BLOCK) return null;
    // At the end of a line if there is one, and not between the halves of a character.
    let end = text.lastIndexOf("\n") + 1 || MAX_BLOCK;
    if (/[\ud800-\udbff]/.test(text[end - 1])) end--;
    return { source: text.slice(0, end), end, fence: this.fence };
  }
}

function code(source, { language }) {
  const text = element("code", {}, source.replace(/\n$/, ""));
  const node = element("pre", {}, text);
  if (language) node.dataset.language = language;
  return node;
}

// Elements of lines without code blocks.
function blocks(source) {
  const node = element("div", { className: "block" });
  addLines(node, source.split("\n"), DEPTH);
  return node;
}

function addLines(parent, lines, depth) {
  for (let i = 0; i < lines.length; ) {
    const line = lines[i];
    const heading = HEADING.exec(line);
    if (!line.trim()) {
      i++;
    } else if (heading) {
      const level = Math.min(heading[1].length + 2, 6);
      parent.append(spans(element(`h${level}`), heading[2], depth));
      i++;
    } else if (RULE.test(line)) {
      parent.append(element("hr"));
      i++;
    } else if (depth > 0 && QUOTE.test(line)) {
      const inner = [];
      for (let quote; (quote = QUOTE.exec(lines[i] ?? "")); i++) inner.push(quote[1]);
      const quote = element("blockquote");
      addLines(quote, inner, depth - 1);
      parent.append(quote);
    } else if (depth > 0 && ITEM.test(line)) {
      i = addList(parent, lines, i, depth);
    } else if (line.includes("|") && isDivider(lines[i + 1] ?? "")) {
      i = addTable(parent, lines, i, depth);
    } else {
      const paragraph = [line];
      for (i++; i < lines.length && isPlain(lines[i]); i++) paragraph.push(lines[i]);
      parent.append(spans(element("p"), paragraph.join("\n"), depth));
    }
  }
}

// Whether a line divides a table's head from its body.
const isDivider = (line) => /^[\s|:-]+$/.test(line) && line.includes("-");

// Whether a line continues a paragraph.
const isPlain = (line) =>
  line.trim() && ![HEADING, RULE, QUOTE, ITEM].some((form) => form.test(line));

// Adds the list that begins at line `i`. Returns the line behind it.
function addList(parent, lines, i, depth) {
  const [, indent, bullet, number] = ITEM.exec(lines[i]);
  const list = element(bullet ? "ul" : "ol");
  if (number) list.start = Number(number);
  while (i < lines.length) {
    const item = ITEM.exec(lines[i]);
    if (!item || item[1].length !== indent.length || Boolean(item[2]) !== Boolean(bullet)) break;
    const inner = [item[4]];
    const isInner = (line) =>
      line.trim() && (/^\s/.test(line) || isPlain(line)) &&
      (ITEM.exec(line)?.[1].length ?? Infinity) > indent.length;
    const width = lines[i].length - item[4].length;
    for (i++; i < lines.length && isInner(lines[i]); i++) {
      const spaces = /^\s*/.exec(lines[i])[0].length;
      inner.push(lines[i].slice(Math.min(spaces, width)));
    }
    const node = element("li");
    if (inner.length === 1) spans(node, inner[0], depth);
    else addLines(node, inner, depth - 1);
    list.append(node);
  }
  parent.append(list);
  return i;
}

function addTable(parent, lines, i, depth) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").slice(0, 50);
  const row = (line, name) =>
    element("tr", {}, ...cells(line).map((text) => spans(element(name), text.trim(), depth)));
  const table = element("table", {}, element("thead", {}, row(lines[i], "th")));
  const body = element("tbody");
  for (i += 2; i < lines.length && lines[i].includes("|"); i++) body.append(row(lines[i], "td"));
  table.append(body);
  parent.append(element("div", { className: "wide" }, table));
  return i;
}

// Adds text with its spans to an element.
function spans(parent, text, depth) {
  let plain = 0;
  for (let i = 0; i < text.length; ) {
    const span = depth > 0 ? spanAt(text, i, depth - 1) : null;
    if (!span) {
      i++;
      continue;
    }
    if (i > plain) parent.append(text.slice(plain, i));
    parent.append(span.node);
    i = plain = span.end;
  }
  if (plain < text.length) parent.append(text.slice(plain));
  return parent;
}

// The span that begins at `i`: its element and end.
function spanAt(text, i, depth) {
  switch (text[i]) {
    case "\\":
      return /[!-/:-@[-`{-~]/.test(text[i + 1] ?? "") ? { node: text[i + 1], end: i + 2 } : null;
    case "`": {
      const mark = /^`{1,8}/.exec(text.slice(i, i + 8))[0];
      const end = find(text, mark, i + mark.length);
      const node = () => element("code", {}, text.slice(i + mark.length, end).trim());
      return end < 0 ? null : { node: node(), end: end + mark.length };
    }
    case "*":
      return marked(text, i, "**", "strong", depth) ?? marked(text, i, "*", "em", depth);
    case "_":
      if (/\w/.test(text[i - 1] ?? "")) return null;
      return marked(text, i, "__", "strong", depth) ?? marked(text, i, "_", "em", depth);
    case "~":
      return marked(text, i, "~~", "del", depth);
    case "[": {
      const link = /^\[([^\[\]]{1,500})\]\(([^()\s]{1,900})\)/.exec(text.slice(i, i + 1500));
      if (!link || !URL_START.test(link[2])) return null;
      const node = anchor(link[2], spans(element("span"), link[1], depth));
      return { node, end: i + link[0].length };
    }
    case "h": {
      if (/\w/.test(text[i - 1] ?? "")) return null;
      const url = /^https?:\/\/[^\s<>"'`)\]]{1,900}/.exec(text.slice(i, i + 910))?.[0];
      if (!url) return null;
      const end = url.replace(/[.,;:!?*]+$/, "");
      return { node: anchor(end, end), end: i + end.length };
    }
    default:
      return null;
  }
}

function find(text, mark, from) {
  const end = text.slice(from, from + SPAN).indexOf(mark);
  return end < 0 ? -1 : from + end;
}

function marked(text, i, mark, name, depth) {
  const from = i + mark.length;
  if (!text.startsWith(mark, i) || /\s/.test(text[from] ?? " ")) return null;
  const end = find(text, mark, from + 1);
  if (end < 0 || /\s/.test(text[end - 1])) return null;
  return { node: spans(element(name), text.slice(from, end), depth), end: end + mark.length };
}

const anchor = (href, label) =>
  element("a", { href, target: "_blank", rel: "noopener noreferrer" }, label);
