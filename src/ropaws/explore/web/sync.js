/**
 * The page and the server, kept in step: the state every second, the columns when they have changed, and
 * answers as they are given.
 *
 * @import { Api, State } from "./api.js"
 * @import { Answer, Outbox } from "./outbox.js"
 * @import { Store } from "./store.js"
 */
import { Away, Refused } from "./api.js";
import { decodeColumns, parseVersion } from "./columns.js";
import { plural } from "./format.js";
import { say, setBanner } from "./messages.js";
import { apply, bodyOf, renumbered, takeBack } from "./outbox.js";

const POLL_MS = { visible: 1000, hidden: 3000 };

export class Sync {
  /** @param {Api} api @param {Store} store @param {Outbox} outbox */
  constructor(api, store, outbox) {
    this.api = api;
    this.store = store;
    this.outbox = outbox;
    /** @type {Promise<void> | null} */
    this.refreshing = null;
    this.timer = 0;
    /** @type {Promise<void>} - resolves when the answers given so far were sent, or wait for the server */
    this.sent = Promise.resolve();
    document.addEventListener("visibilitychange", () => document.hidden || this.refresh());
  }

  /** Asks for the state now; calls while one is under way share it. @returns {Promise<void>} */
  refresh() {
    this.refreshing ??= this.refreshOnce().finally(() => {
      this.refreshing = null;
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.refresh(), POLL_MS[document.hidden ? "hidden" : "visible"]);
    });
    return this.refreshing;
  }

  /** The state as it is after everything done so far. */
  async refreshAfresh() {
    await this.refreshing;
    await this.refresh();
  }

  async refreshOnce() {
    try {
      await this.take(await this.api.state());
      this.explain(await this.send());
    } catch (error) {
      if (error instanceof Away || error instanceof Refused) this.explain(error);
      else throw error;
    }
  }

  /** @param {State} state */
  async take(state) {
    const known = this.store.version;
    const isNew = known?.session !== state.session;
    this.store.state = state;
    if (isNew) await this.startSession(state);
    const isOld = !known || isNew || state.revision > known.revision || state.model_version !== known.model;
    if (isOld || state.map_version !== known.map) await this.fetchColumns();
    if (known && isNew) this.store.emit("session");
    this.store.emit("state");
  }

  async fetchColumns() {
    const { buffer, version } = await this.api.columns((share) => this.store.setArrived(share));
    const columns = decodeColumns(buffer);
    for (const answer of this.outbox.answers) apply(columns, answer);
    this.store.columns = columns;
    this.store.version = parseVersion(version);
    this.store.emit("columns");
  }

  /** Forgets old image numbers; answers that wait get the new ones. @param {State} state */
  async startSession(state) {
    const { store } = this;
    store.names.clear();
    store.selection.clear();
    store.filter = { ...store.filter, ids: null, cluster: null, like: null };
    let lost = 0;
    for (const [k, answer] of this.outbox.answers.entries()) {
      const now = await renumbered(answer, state, (name) => this.lookUp(name));
      this.outbox.answers[k] = now.answer;
      lost += now.lost;
    }
    this.outbox.answers = this.outbox.answers.filter((answer) => answer.ids.length);
    this.outbox.save();
    if (lost)
      say(`${plural(lost, "answer")} could not be sent: the images are no longer in the pool`, "error");
  }

  /** @param {string} name @returns {Promise<number | null>} */
  async lookUp(name) {
    const page = await this.api.images({ text: name, limit: 500 });
    return page.items.find((item) => item.name === name)?.id ?? null;
  }

  /**
   * Shows an answer at once, then sends it.
   *
   * @param {Pick<Answer, "path" | "ids" | "label" | "why" | "text">} given
   */
  give(given) {
    const { store, outbox } = this;
    if (!store.state || !store.columns) return;
    const { columns, state } = store;
    const answer = {
      ...given,
      names: given.ids.map((id) => store.names.get(id) ?? null),
      session: state.session,
      pool: state.pool ?? null,
      before: given.ids.map((id) => columns.label[id]),
    };
    outbox.add(answer);
    apply(columns, answer);
    store.emit("labels");
    this.sent = Promise.all([this.sent, this.sendAndRefresh()]).then(() => {});
  }

  async sendAndRefresh() {
    const reason = await this.send();
    this.explain(reason);
    if (!reason) await this.refreshAfresh();
  }

  send() {
    return this.outbox.flush(
      (answer) => this.sendOne(answer),
      (answer, reason) => {
        if (this.store.columns) takeBack(this.store.columns, answer, this.outbox.answers);
        say(`Not saved: ${answer.text}: ${reason.message}`, "error");
        this.store.emit("labels");
      },
    );
  }

  /** @param {Answer} answer */
  async sendOne(answer) {
    const { revision } = await this.api.post(answer.path, bodyOf(answer));
    const known = this.store.version;
    if (known && revision === known.revision + 1) known.revision = revision; // no one else has answered since
  }

  /** Takes back the last answer of this tab. @returns {Promise<{text: string, ids: number[]}>} */
  async undo() {
    await this.sent; // an answer on its way is either saved by then, or waits
    const waiting = this.outbox.dropLast();
    if (waiting) {
      if (this.store.columns) takeBack(this.store.columns, waiting, this.outbox.answers);
      this.store.emit("labels");
      return { text: `Undone: ${waiting.text}`, ids: waiting.ids };
    }
    const { undone, ids } = await this.api.post("/api/undo");
    await this.refreshAfresh();
    return { text: `Undone: ${undone}`, ids };
  }

  /** Says why answers wait, or that all is well. @param {Away | Refused | null} reason */
  explain(reason) {
    const n = this.outbox.answers.length;
    const hint = this.outbox.kept ? "" : " (keep this page open)";
    const waiting = n ? ` ${plural(n, "answer")} will be sent then${hint}.` : "";
    if (!reason) setBanner("");
    else if (reason instanceof Away) setBanner(`Connection lost, trying again.${waiting}`);
    else if (reason.status === 401) setBanner("Not authorized: open the address that the terminal shows.");
    else setBanner(`The server says: ${reason.message}.${waiting}`);
  }
}
