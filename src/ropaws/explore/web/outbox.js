/**
 * Answers on their way to the server: shown at once, sent in order, kept in the browser until the server has
 * them.
 *
 * @import { Columns } from "./columns.js"
 * @typedef {{
 *   path: "/api/labels" | "/api/confirm", ids: number[], label: number | null, why: string, text: string,
 *   names: (string | null)[], session: string, pool: string | null, before: number[],
 * }} Answer - label is null for a confirmed one; before has the labels that it replaces
 */
import { Away, Refused } from "./api.js";

/** @param {Answer} answer */
export function bodyOf(answer) {
  return answer.label === null
    ? { ids: answer.ids }
    : { ids: answer.ids, label: answer.label, why: answer.why };
}

/** Shows an answer. @param {Columns} columns @param {Answer} answer */
export function apply(columns, answer) {
  for (const id of answer.ids) {
    columns.suspected[id] = 0;
    if (answer.label !== null) columns.label[id] = answer.label;
  }
}

/**
 * Takes an answer back, with the later ones still in effect.
 *
 * @param {Columns} columns @param {Answer} answer @param {Answer[]} later
 */
export function takeBack(columns, answer, later) {
  if (answer.label !== null) answer.ids.forEach((id, k) => (columns.label[id] = answer.before[k]));
  for (const other of later) apply(columns, other);
}

export class Outbox {
  /**
   * @param {Pick<Storage, "getItem" | "setItem" | "removeItem">} storage
   * @param {string} key
   */
  constructor(storage, key) {
    this.storage = storage;
    this.key = key;
    /** @type {Answer[]} */
    this.answers = JSON.parse(storage.getItem(key) ?? "[]");
    this.sending = false;
    this.kept = true; // false once the browser has no room: the answers then last as long as the page
  }

  save() {
    try {
      if (this.answers.length) this.storage.setItem(this.key, JSON.stringify(this.answers));
      else this.storage.removeItem(this.key);
      this.kept = true;
    } catch {
      this.kept = false;
    }
  }

  /** @param {Answer} answer */
  add(answer) {
    this.answers.push(answer);
    this.save();
  }

  /** The last answer, if it has not been sent; it leaves the outbox. @returns {Answer | null} */
  dropLast() {
    if (this.answers.length <= (this.sending ? 1 : 0)) return null;
    const last = this.answers.pop() ?? null;
    this.save();
    return last;
  }

  /** Answers of a tab that was closed before they were sent. @param {string} key */
  adopt(key) {
    const others = JSON.parse(this.storage.getItem(key) ?? "[]");
    this.answers.unshift(...others);
    this.save();
    this.storage.removeItem(key);
  }

  /**
   * Sends all answers in order. Ends early while the server is away or cannot save, and says why.
   *
   * @param {(answer: Answer) => Promise<void>} send
   * @param {(answer: Answer, reason: Refused) => void} refused - called after the answer has left the outbox
   * @returns {Promise<Away | Refused | null>}
   */
  async flush(send, refused) {
    if (this.sending) return null;
    this.sending = true;
    try {
      while (this.answers.length) {
        const answer = this.answers[0];
        try {
          await send(answer);
          this.answers.shift();
        } catch (error) {
          if (error instanceof Away || (error instanceof Refused && isLater(error))) return error;
          if (!(error instanceof Refused)) throw error;
          this.answers.shift();
          refused(answer, error);
        }
        this.save();
      }
      return null;
    } finally {
      this.sending = false;
    }
  }
}

/**
 * Whether the same answer may be taken later: not authorized now, or the server's disk is full.
 *
 * @param {Refused} error
 */
function isLater(error) {
  return error.status === 401 || error.status === 503 || error.status === 507;
}

/**
 * An answer with the numbers that its images have now. The server may have been started again since, on a
 * folder that has changed: then images are found by name, and those that are gone leave the answer.
 *
 * @param {Answer} answer
 * @param {{session: string, pool?: string}} state
 * @param {(name: string) => Promise<number | null>} lookUp
 * @returns {Promise<{answer: Answer, lost: number}>}
 */
export async function renumbered(answer, state, lookUp) {
  const same = answer.session === state.session || (answer.pool !== null && answer.pool === state.pool);
  if (same) return { answer, lost: 0 };
  /** @type {{ids: number[], names: (string | null)[], before: number[]}} */
  const kept = { ids: [], names: [], before: [] };
  for (const [k, name] of answer.names.entries()) {
    const id = name === null ? null : await lookUp(name);
    if (id === null) continue;
    kept.ids.push(id);
    kept.names.push(name);
    kept.before.push(answer.before[k]);
  }
  const lost = answer.ids.length - kept.ids.length;
  return { answer: { ...answer, ...kept, session: state.session, pool: state.pool ?? null }, lost };
}

// The id of this tab, and the answers that closed tabs left behind. A duplicated tab starts with a copy of the
// other's sessionStorage. A lock, held as long as the page lives, tells which ids are in use; browsers offer
// locks on localhost and over https.

/**
 * @param {string} id
 * @returns {Promise<boolean>} - whether the lock was free; it is then held until the page ends
 */
function hold(id) {
  return new Promise((done) => {
    navigator.locks.request(`ropaws-tab-${id}`, { ifAvailable: true }, (lock) => {
      done(lock !== null);
      return lock ? new Promise(() => {}) : undefined;
    });
  });
}

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) =>
    byte.toString(16).padStart(2, "0"),
  ).join("");
}

/** @returns {Promise<string>} */
export async function tabId() {
  let id = sessionStorage.getItem("ropaws-tab") ?? newId();
  if (navigator.locks) while (!(await hold(id))) id = newId();
  sessionStorage.setItem("ropaws-tab", id);
  return id;
}

/** @param {string} title - of the pool @param {string} id */
export function outboxKey(title, id) {
  return `ropaws-outbox:${title}:${id}`;
}

/**
 * Outboxes of this pool whose tabs are closed.
 *
 * @param {string} title
 * @param {string} own
 * @returns {Promise<string[]>}
 */
export async function orphans(title, own) {
  if (!navigator.locks) return [];
  const prefix = outboxKey(title, "");
  const ids = Object.keys(localStorage)
    .filter((key) => key.startsWith(prefix))
    .map((key) => key.slice(prefix.length));
  const free = await Promise.all(ids.map(async (id) => id !== own && (await hold(id))));
  return ids.filter((_, k) => free[k]).map((id) => outboxKey(title, id));
}
