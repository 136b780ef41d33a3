// Elements. Text is always set as text, never parsed as HTML.

export const byId = (id) => document.getElementById(id);

// An element with properties and children.
export function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("aria-") || key === "role") node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children);
  return node;
}

export const button = (label, onclick) =>
  element("button", { type: "button", textContent: label, onclick });

// Shows a message above the page until it is dismissed; none without a text.
export function notify(text) {
  const notice = byId("notice");
  notice.hidden = !text;
  notice.replaceChildren();
  if (text) notice.append(text, " ", button("Dismiss", () => notify("")));
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let unit = 0;
  for (; count >= 1024 && unit < UNITS.length - 1; unit++) count /= 1024;
  return `${count.toFixed(unit && count < 100 ? 1 : 0)} ${UNITS[unit]}`;
}

export const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

// A bar of parts: `{ name, share, kind }`. Its text names the parts for those who do not see it.
export function fillBar(bar, parts) {
  const children = parts.map(({ name, share, kind }) => {
    const part = element("span", { className: kind, title: `${name}: ${percent(share)}` });
    part.style.width = `${100 * Math.max(0, Math.min(1, share))}%`;
    return part;
  });
  bar.replaceChildren(...children);
  const text = parts.map(({ name, share }) => `${name} ${percent(share)}`).join(", ");
  bar.setAttribute("aria-label", text);
}
