/**
 * What the page says to the person: short messages that pass, and a banner that stays while something is
 * wrong.
 */
import { Away, Refused } from "./api.js";
import { button, element, find, setText } from "./dom.js";

const SECONDS = { info: 4, error: 12 };

/** @param {string} text @param {"info" | "error"} kind */
export function say(text, kind = "info") {
  const box = find(kind === "error" ? "alerts" : "messages", HTMLElement);
  const line = element("div", { className: `message ${kind}` }, text);
  if (kind === "error") line.append(button("Dismiss", () => line.remove(), { className: "quiet" }));
  box.replaceChildren(line);
  setTimeout(() => line.remove(), 1000 * SECONDS[kind]);
}

/** @param {string} text - "" hides the banner */
export function setBanner(text) {
  const banner = find("banner", HTMLElement);
  if (banner.textContent !== text) banner.textContent = text;
  banner.hidden = !text;
}

/**
 * Whether the person wants it.
 *
 * @param {string} text @param {string} action - what the button says
 * @returns {Promise<boolean>}
 */
export function ask(text, action) {
  const dialog = find("ask", HTMLDialogElement);
  setText("ask-text", text);
  setText("ask-ok", action);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) =>
    dialog.addEventListener("close", () => done(dialog.returnValue === "ok"), { once: true }),
  );
}

/**
 * Runs an action; a refusal, or a server that is away, becomes a message.
 *
 * @param {() => Promise<unknown>} action
 */
export async function attempt(action) {
  try {
    await action();
  } catch (error) {
    if (error instanceof Refused) say(error.message, "error");
    else if (error instanceof Away) say("The server is away: try again when it is back", "error");
    else throw error;
  }
}
