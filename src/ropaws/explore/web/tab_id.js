/**
 * The id of this tab, and the answers that closed tabs left behind.
 *
 * A duplicated tab starts with a copy of the other's sessionStorage. A lock, held as long as the page lives,
 * tells which ids are in use; browsers offer locks on localhost and over https.
 */

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
