/**
 * What the page says to the person: short messages that pass, and a banner that stays while something is
 * wrong.
 */
import { Away, Refused } from "./api.js";
import { button, element, find } from "./dom.js";

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
