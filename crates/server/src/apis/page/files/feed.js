// Live feed: frames of totals, as crates/server/src/page/feed.rs writes them.

import { chunks, request } from "./api.js";

const MAGIC = 0x01656f6d; // "moe", version 1
const HEAD = 16;
// Bytes that no frame has: the server is another one.
const MAX_FRAME = 64 << 20;

const VALUES = [
  "time", "running", "waiting", "ended", "promptTokens", "cachedTokens", "generatedTokens",
  "computedTokens", "bytesRead", "disk", "computing", "stalled", "waited", "diskSpeed",
  "drafted", "accepted", "drafting", "undrafted", "expertUses", "cardUses",
];

// A frame: values by name, `sizes` (experts of each layer), `counts` (three per expert).
function decode(buffer) {
  const [, , layers, count] = new Uint32Array(buffer, 0, 4);
  const numbers = new Float64Array(buffer, HEAD, count);
  const frame = Object.fromEntries(VALUES.map((name, i) => [name, numbers[i]]));
  const start = HEAD + 8 * count;
  frame.sizes = new Uint32Array(buffer, start, layers);
  frame.counts = new Uint32Array(buffer, start + 4 * layers);
  return frame;
}

// Frames of the feed until it ends or `signal` aborts it.
export async function* frames(signal) {
  const response = await request("/moeflux/experts", { signal });
  let frame = null;
  let head = new Uint8Array(8);
  let filled = 0;
  for await (let bytes of chunks(response)) {
    while (bytes.length > 0) {
      const target = frame ?? head;
      const taken = bytes.subarray(0, target.length - filled);
      target.set(taken, filled);
      filled += taken.length;
      bytes = bytes.subarray(taken.length);
      if (filled < target.length) continue;
      if (frame) {
        yield decode(frame.buffer);
        [frame, filled] = [null, 0];
        continue;
      }
      const [magic, length] = new Uint32Array(head.buffer);
      if (magic !== MAGIC || length > MAX_FRAME || length < HEAD) {
        throw new Error("the feed has another version: reload the page");
      }
      frame = new Uint8Array(length);
      frame.set(head);
    }
  }
}
