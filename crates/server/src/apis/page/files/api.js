// Requests to the server: key, errors, streams.

import { byId } from "./dom.js";

const KEY = "moeflux-key";

// Error whose message is for users. `status` is that of the response, if there was one.
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

let asked = null;

// Asks for the key once, however many requests want one.
function askKey() {
  asked ??= new Promise((resolve) => {
    const dialog = byId("key");
    const input = byId("key-text");
    dialog.onclose = () => {
      const given = dialog.returnValue === "use" && input.value.trim();
      if (given) sessionStorage.setItem(KEY, given);
      input.value = dialog.returnValue = "";
      asked = null;
      resolve(Boolean(given));
    };
    dialog.showModal();
  });
  return asked;
}

async function failure(response) {
  const text = await response.text().catch(() => "");
  try {
    return new ApiError(JSON.parse(text).error.message, response.status);
  } catch {
    return new ApiError(`the server answered with status ${response.status}`, response.status);
  }
}

// Sends a request and returns its response, or throws an `ApiError`.
export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers };
    if (key) headers.authorization = `Bearer ${key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw new ApiError("the server cannot be reached");
    }
    if (response.ok) return response;
    const error = await failure(response);
    if (response.status !== 401) throw error;
    // Another request may have asked for the key meanwhile.
    const isNew = sessionStorage.getItem(KEY) !== key;
    if (!isNew && !(await askKey())) throw error;
  }
}

// Data of the events of a stream, one after the other.
async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const bytes of chunks(response)) {
    rest += decoder.decode(bytes, { stream: true });
    let start = 0;
    for (let end; (end = rest.indexOf("\n", start)) >= 0; start = end + 1) {
      const line = rest.slice(start, end);
      if (line.startsWith("data: ")) yield line.slice(6);
    }
    rest = rest.slice(start);
  }
}

// Parts of a response's body.
export async function* chunks(response) {
  const reader = response.body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Chunks of a chat completion. Throws if the stream fails or ends too early.
export async function* complete(body, signal) {
  const headers = { "content-type": "application/json" };
  const text = JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } });
  const response = await request("/v1/chat/completions", {
    method: "POST", headers, body: text, signal,
  });
  try {
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message);
      yield chunk;
    }
  } catch (error) {
    if (signal.aborted || error instanceof ApiError) throw error;
    throw new ApiError("the connection broke before the answer was complete");
  }
  throw new ApiError("the connection ended before the answer was complete");
}
