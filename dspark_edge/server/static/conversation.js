// Questions and replies: sends, streams, stops, tries again, remembers.

import { streamChat } from "./api.js";
import { byId, say } from "./dom.js";
import { DraftedText } from "./drafted.js";
import { questionNode, ReplyView } from "./message.js";
import { store } from "./store.js";

const FRAME_MS = 60; // between two pictures of a growing reply
const NEAR_END_PX = 80; // who has scrolled up further is not taken along

export class Conversation {
  #turns;
  #views = [];
  #abort = null;
  #panel;
  #settings;
  #onBusy;

  /** settings: a function; onBusy: called when a reply begins and ends. */
  constructor(panel, settings, onBusy) {
    this.#panel = panel;
    this.#settings = settings;
    this.#onBusy = onBusy;
    this.#turns = store.turns();
    for (const turn of this.#turns) this.#append(turn).show(turn.reply, false);
    this.#showWelcome();
    scroller().scrollTop = scroller().scrollHeight;
    addEventListener("pagehide", () => store.saveTurns(this.#turns));
  }

  get isBusy() {
    return this.#abort !== null;
  }

  send(question) {
    const turn = { question, reply: emptyReply() };
    this.#turns.push(turn);
    const view = this.#append(turn);
    this.#showWelcome();
    scroller().scrollTop = scroller().scrollHeight;
    return this.#generate(turn, view);
  }

  stop() {
    this.#abort?.abort();
  }

  clear() {
    this.stop();
    this.#turns = [];
    this.#views = [];
    byId("messages").replaceChildren();
    this.#showWelcome();
    store.saveTurns(this.#turns);
  }

  /** What a reply that has not begun waits for. */
  showWait(stats) {
    const isLoading = stats?.status === "loading";
    const isQueued = stats?.queue.n_waiting > 0;
    const text = isLoading ? "Loading the model" : isQueued ? "Waiting for a turn" : "Reading";
    if (this.isBusy) this.#views.at(-1)?.showWait(text, isLoading && stats.progress < 1 ? stats.progress : null);
  }

  async #generate(turn, view) {
    const abort = (this.#abort = new AbortController());
    this.#onBusy(true);
    this.#panel.isBusy = true;
    say(byId("said"), "Writing a reply");
    view.showWait("Reading", null);
    view.show(turn.reply, true);
    let error = null;
    try {
      await this.#read(turn, view, abort.signal);
    } catch (caught) {
      if (abort.signal.aborted) turn.reply.note = "stopped";
      else error = caught;
      abort.abort(); // nothing more is shown of it
    }
    if (this.#abort === abort) this.#abort = null;
    keepEnd(() => view.show(turn.reply, false));
    if (error) view.showError(error, () => this.#retry(turn));
    this.#end(turn, view, error);
  }

  async #read(turn, view, signal) {
    const { reply } = turn;
    const text = new DraftedText();
    let timer = 0;
    const show = () => {
      timer = 0;
      if (!signal.aborted) keepEnd(() => view.show(reply, true));
    };
    for await (const event of streamChat(this.#body(turn), signal)) {
      const choice = event.choices[0];
      if (!choice) continue;
      const { reasoning_content = "", content = "" } = choice.delta;
      text.push(reasoning_content + content, event.x_dspark.pieces ?? []);
      if (choice.finish_reason) text.end();
      reply.nThought += reasoning_content.length;
      Object.assign(reply, { text: text.text, ranges: text.ranges });
      reply.stats = event.x_dspark.stats ?? null;
      if (choice.finish_reason === "length") reply.note = "cut at the token limit";
      this.#panel.addRound(event.x_dspark);
      // What comes last is shown too, even if nothing follows it for a while.
      timer ||= setTimeout(show, FRAME_MS);
    }
    clearTimeout(timer);
  }

  #end(turn, view, error) {
    if (!this.#turns.includes(turn)) return; // cleared meanwhile
    if (!store.saveTurns(this.#turns)) view.showUnkept();
    const answer = turn.reply.text.slice(turn.reply.nThought);
    if (!error) say(byId("said"), turn.reply.note === "stopped" ? "Stopped" : `Reply: ${answer}`);
    keepEnd(() => {});
    if (!this.isBusy) {
      this.#panel.isBusy = false;
      this.#onBusy(false);
    }
  }

  #retry(turn) {
    if (this.isBusy) return;
    const i = this.#turns.indexOf(turn);
    if (i < 0) return;
    turn.reply = emptyReply();
    const old = this.#views[i];
    const view = (this.#views[i] = new ReplyView());
    old.node.replaceWith(view.node);
    byId("prompt").focus();
    this.#generate(turn, view);
  }

  #body(turn) {
    const { system, temperature, seed, maxTokens, model } = this.#settings();
    const messages = system.trim() ? [{ role: "system", content: system }] : [];
    for (const { question, reply } of this.#turns.slice(0, this.#turns.indexOf(turn))) {
      const content = reply.text.slice(reply.nThought);
      // A question without a reply would leave two questions in a row, which templates refuse.
      if (content) messages.push({ role: "user", content: question }, { role: "assistant", content });
    }
    messages.push({ role: "user", content: turn.question });
    const body = { messages, stream: true, stream_options: { include_pieces: true } };
    if (model) body.model = model;
    if (temperature !== "") body.temperature = Number(temperature);
    if (seed !== "") body.seed = Number(seed);
    if (maxTokens !== "") body.max_tokens = Number(maxTokens);
    return body;
  }

  #append(turn) {
    const view = new ReplyView();
    this.#views.push(view);
    byId("messages").append(questionNode(turn.question), view.node);
    return view;
  }

  #showWelcome() {
    byId("welcome").hidden = this.#turns.length > 0;
  }
}

const emptyReply = () => ({ text: "", ranges: [], nThought: 0, stats: null, note: "" });
const scroller = () => byId("scroller");

function keepEnd(change) {
  const box = scroller();
  const isNear = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END_PX;
  change();
  if (isNear) box.scrollTop = box.scrollHeight;
}
