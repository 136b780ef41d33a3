// Conversations in the browser's database, settings in its local storage.

import { notify } from "./dom.js";

const STORE = "conversations";
let database = null;

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

// Opens the database. Without one, conversations last until the page is left.
export async function open() {
  try {
    const opening = indexedDB.open("moeflux", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
    database = await done(opening);
  } catch (error) {
    notify(`Conversations are not kept, as the browser has no database: ${error.message}`);
  }
}

const store = (mode) => database.transaction(STORE, mode).objectStore(STORE);

// All conversations, the last used first.
export async function load() {
  if (!database) return [];
  const all = await done(store("readonly").getAll());
  return all.sort((a, b) => b.used - a.used);
}

export async function save(conversation) {
  if (!database || conversation.isRemoved) return;
  try {
    await done(store("readwrite").put(conversation));
  } catch (error) {
    const full = error.name === "QuotaExceededError";
    const help = full ? "the browser has no room left: delete some" : error.message;
    notify(`The conversation is not kept: ${help}`);
  }
}

export async function remove(id) {
  if (database) await done(store("readwrite").delete(id));
}

export function setting(name) {
  try {
    return localStorage.getItem(`moeflux-${name}`) ?? "";
  } catch {
    return "";
  }
}

export function set(name, value) {
  try {
    localStorage.setItem(`moeflux-${name}`, value);
  } catch (error) {
    notify(`The setting is not kept: ${error.message}`);
  }
}
