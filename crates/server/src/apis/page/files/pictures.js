// Pictures that a message is sent with: chosen, pasted or dropped, and shown small.

import { button, byId, bytes, element } from "./dom.js";

// Limits of the server, for a request. Its body has at most 64 MiB, and base64 takes a third more.
const MAX_COUNT = 32;
const MAX_BYTES = 20 << 20;
const MAX_TOTAL = 45 << 20;

export const TEXT_ONLY = "this model reads text only";

let pending = [];

const total = (pictures) => pictures.reduce((sum, { size }) => sum + size, 0);

// Why a file cannot be sent beside `others`, if so.
function fault(file, others) {
  const kinds = byId("files").accept.split(",");
  if (!kinds.includes(file.type)) return "it is no PNG, JPEG, WebP, GIF, BMP or TIFF";
  if (file.size > MAX_BYTES) return `a picture has at most ${bytes(MAX_BYTES)}`;
  if (others.length >= MAX_COUNT) return `a conversation has at most ${MAX_COUNT} pictures`;
  const isLarge = total(others) + file.size > MAX_TOTAL;
  return isLarge ? `the pictures of a conversation have at most ${bytes(MAX_TOTAL)}` : "";
}

// Adds files to the next message of a conversation with the pictures `sent`. Returns a line for
// each file that is refused.
export async function add(files, sent) {
  const lines = [];
  for (const file of files) {
    const { name, type } = file;
    try {
      const problem = fault(file, [...sent, ...pending]);
      if (problem) throw new Error(problem);
      // A copy, as the file may change before it is sent again.
      const copy = await file.arrayBuffer();
      pending.push(new File([copy], name, { type }));
    } catch (error) {
      lines.push(`“${name}” is not added: ${error.message}`);
    }
  }
  showPending();
  return lines;
}

export const isEmpty = () => !pending.length;

// The pictures of the next message, which it takes.
export function take() {
  const taken = pending;
  pending = [];
  showPending();
  return taken;
}

function showPending() {
  const items = pending.map((picture) => {
    const remove = button("×", () => {
      pending = pending.filter((other) => other !== picture);
      showPending();
      byId("prompt").focus();
    });
    remove.setAttribute("aria-label", `Remove ${picture.name}`);
    return element("li", {}, thumbnail(picture), remove);
  });
  byId("pending").hidden = !items.length;
  byId("pending").replaceChildren(...items);
}

// A small picture that opens the whole one.
export function thumbnail(picture) {
  const open = button("", () => show(picture));
  open.className = "thumbnail";
  open.setAttribute("aria-label", `Show ${picture.name}`);
  open.append(image(picture));
  return open;
}

// The browser shows the name in place of a kind that it cannot show, such as TIFF.
function image(picture) {
  const url = URL.createObjectURL(picture);
  const release = () => URL.revokeObjectURL(url);
  return element("img", { alt: picture.name, onload: release, onerror: release, src: url });
}

function show(picture) {
  const dialog = byId("picture");
  byId("picture-place").replaceChildren(image(picture));
  dialog.onclick = () => dialog.close();
  dialog.showModal();
}

// A picture as a part of a message.
export function part(picture) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ type: "image_url", image_url: { url: reader.result } });
    reader.onerror = () => reject(new Error(`“${picture.name}” cannot be read`));
    reader.readAsDataURL(picture);
  });
}
