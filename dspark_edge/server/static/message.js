// One message as nodes: text, thought, figures, and what went wrong. Knows nothing of the server.

import { copyButton, element, say } from "./dom.js";
import { appendText } from "./drafted.js";
import { capital, percent, speed } from "./format.js";
import { render } from "./markdown.js";

/** A question. */
export function questionNode(text) {
  const body = element("div", { className: "body", textContent: text });
  return element("li", { className: "message user" }, name("You"), body);
}

/** A reply that may still grow. */
export class ReplyView {
  #thought = element("div");
  #details = element("details", { className: "thought", hidden: true }, element("summary", {}, "Thought"), this.#thought);
  #body = element("div", { className: "body" });
  #wait = element("p", { className: "waiting", hidden: true }, element("span", { className: "dot" }), element("span"));
  #foot = element("div", { className: "foot" });
  #error = element("div");
  #thoughtShown = -1;
  node = element("li", { className: "message assistant" }, name("Reply"), this.#details, this.#body, this.#wait, this.#error, this.#foot);

  /** reply: {text, ranges, nThought, stats, note}; text from nThought on is the answer. */
  show(reply, isRunning) {
    const hasThought = reply.nThought > 0;
    this.#details.hidden = !hasThought;
    if (hasThought && this.#thoughtShown !== reply.nThought) {
      this.#thoughtShown = reply.nThought;
      this.#thought.replaceChildren();
      appendText(this.#thought, reply, 0, reply.nThought);
      this.#details.open = isRunning && reply.text.length === reply.nThought;
    }
    render(this.#body, reply, reply.nThought);
    this.#wait.hidden = !isRunning || reply.text.length > 0;
    if (!isRunning) this.#showFoot(reply);
  }

  /** What the reply waits for; progress: 0 to 1, or null. */
  showWait(text, progress) {
    say(this.#wait.children[1], text);
    const bar = this.#wait.querySelector("progress");
    if (progress === null) bar?.remove();
    else if (bar) bar.value = progress;
    else this.#wait.append(element("progress", { value: progress, ariaLabel: "Loading the model" }));
  }

  #showFoot(reply) {
    const facts = [];
    const { stats } = reply;
    if (stats) {
      facts.push(`${stats.n_tokens} tokens`, `${speed(stats.tps)} tok/s`, `${stats.tau.toFixed(2)} a round`);
      if (stats.n_accepted) facts.push(`${percent(stats.n_accepted / stats.n_tokens)} drafted`);
      facts.push(`first after ${stats.ttft_s.toFixed(2)} s`);
      // A random seed has more digits than a number here can hold.
      if (Number.isSafeInteger(stats.seed)) facts.push(`seed ${stats.seed}`);
    }
    if (reply.note) facts.push(reply.note);
    const parts = facts.map((fact) => element("span", {}, fact));
    if (reply.text) parts.unshift(copyButton(() => reply.text.slice(reply.nThought)));
    this.#foot.replaceChildren(...parts);
  }

  /** Says that a reload would lose this turn. */
  showUnkept() {
    this.#foot.append(element("span", {}, "not kept: this browser's storage is full or closed"));
  }

  /** Shows what went wrong, with a button to try again once retryS seconds are over. */
  showError(error, retry) {
    const button = element("button", { type: "button", className: "quiet retry", textContent: "Try again" });
    button.addEventListener("click", retry);
    // The live region must be there before its text, or it is not read out.
    const box = element("div", { className: "error", role: "alert" });
    this.#error.replaceChildren(box);
    box.append(element("p", {}, capital(error.message)), button);
    if (error.retryS) countDown(button, error.retryS);
  }
}

function countDown(button, seconds) {
  button.disabled = seconds > 0;
  button.textContent = seconds > 0 ? `Try again in ${seconds} s` : "Try again";
  if (seconds > 0 && (button.isConnected || document.hidden)) setTimeout(() => countDown(button, seconds - 1), 1000);
}

const name = (text) => element("span", { className: "hidden" }, `${text}:`);
