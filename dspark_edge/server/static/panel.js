// The engine, live: /stats in numbers and pictures. Asks often while a reply runs, seldom otherwise,
// and not at all while nobody looks.

import { apiKey, getJson } from "./api.js";
import { columns, curves, gauge } from "./charts.js";
import { byId, element, say } from "./dom.js";
import { bytes, capital, count, percent, speed } from "./format.js";

const BUSY_MS = 1000;
const IDLE_MS = 4000;
const LOST_MS = 5000;
const SPAN_S = 60;
const NOW_S = 3; // seconds that count as now
const N_COLUMNS = 48;

export class Panel {
  #timer = 0;
  #isBusy = false;
  #isAsking = false;
  #rounds = [];
  #onStats;

  /** onStats: called with each answer, null when the server cannot be reached. */
  constructor(onStats) {
    this.#onStats = onStats;
    document.addEventListener("visibilitychange", () => this.ask());
    new ResizeObserver(() => this.#showRounds()).observe(byId("block-chart"));
    this.ask();
  }

  /** Asks now, and from then on. */
  async ask() {
    clearTimeout(this.#timer);
    if (document.hidden || this.#isAsking) return;
    this.#isAsking = true;
    let wait_ms = this.#isBusy ? BUSY_MS : IDLE_MS;
    try {
      const stats = await getJson("/stats");
      if (stats.status === "loading" || stats.queue.n_requests) wait_ms = BUSY_MS;
      this.#show(stats);
      this.#onStats(stats);
    } catch (error) {
      wait_ms = LOST_MS;
      this.#showLost(error);
      this.#onStats(null);
    }
    this.#isAsking = false;
    if (!document.hidden) this.#timer = setTimeout(() => this.ask(), wait_ms);
  }

  /** A reply begins or ends here. */
  set isBusy(isBusy) {
    this.#isBusy = isBusy;
    if (isBusy) this.#rounds = [];
    this.#showRounds();
    this.ask();
  }

  /** What one event of a stream has gained. */
  addRound(round) {
    if (round.n_tokens) this.#rounds.push(round);
    this.#showRounds();
  }

  #showRounds() {
    const rounds = this.#rounds;
    const sum = (name) => rounds.reduce((total, round) => total + round[name], 0);
    let text = "What each round verified, and how much of it was right";
    if (rounds.length) {
      const tau = (sum("n_tokens") / rounds.length).toFixed(2);
      const right = `${sum("n_accepted")} of ${sum("n_verified")} verified were right`;
      text = `${tau} tokens a round; ${sum("n_verified") ? right : "nothing was verified"}`;
    }
    say(byId("blocks"), text);
    const shown = rounds.slice(-N_COLUMNS);
    const top = Math.max(4, ...shown.map((round) => round.n_verified));
    say(byId("block-span"), `by round, 0–${top}`);
    columns(byId("block-chart"), shown, N_COLUMNS, top, `Blocks of this reply: ${text}`);
  }

  #show(stats) {
    const seconds = lastMinute(stats);
    showSpeed(stats, seconds);
    showAcceptance(seconds);
    showState(stats);
    showMemory(stats.memory);
    showRequests(stats);
  }

  #showLost(error) {
    const needsKey = error.status === 401;
    const reason = needsKey ? "Settings has a field for it" : "Trying again every few seconds";
    setState("lost", needsKey ? "API key needed" : "Not connected", reason);
    if (needsKey && apiKey.get()) say(byId("reason"), "The key in Settings is not the server's");
    byId("pressure").hidden = true;
  }
}

/** The seconds of the last minute in order, null where nothing was emitted. */
function lastMinute(stats) {
  const found = new Map(stats.recent.map((second) => [second.at_s, second]));
  // The second that is still running would show as a dip.
  return Array.from({ length: SPAN_S }, (_, i) => found.get(stats.at_s - SPAN_S + i) ?? null);
}

const tpsOf = (second) => (second?.decode_s ? second.n_tokens / second.decode_s : null);
const plainOf = (second) => (second?.plain_s ? second.n_compared / second.plain_s : null);

function sumOf(seconds) {
  const sum = { n_tokens: 0, n_verified: 0, n_accepted: 0, decode_s: 0, n_compared: 0, plain_s: 0 };
  for (const second of seconds) for (const name in second && sum) sum[name] += second[name];
  return sum;
}

function showSpeed(stats, seconds) {
  const now = sumOf(seconds.slice(-NOW_S));
  const minute = sumOf(seconds);
  const isNow = now.decode_s > 0;
  const shown = isNow ? now : minute;
  const tps = tpsOf(shown) ?? stats.tps;
  const plain = plainOf(shown) ?? (tpsOf(shown) === null ? null : (stats.plain_tps["1"] ?? null));
  say(byId("tps"), tps === null ? "–" : speed(tps));
  const ratio = byId("ratio");
  ratio.hidden = plain === null || tps === null;
  if (!ratio.hidden) say(ratio, `${(tps / plain).toFixed(2)}× plain`);
  ratio.classList.toggle("is-gain", !ratio.hidden && tps >= plain);
  const when = isNow ? "Now" : tpsOf(minute) === null ? "Since the start" : "Over the last minute";
  const estimate = plain === null ? "no plain round was seen yet" : `plain decoding: about ${speed(plain)}`;
  say(byId("plain"), tps === null ? "No reply yet" : `${when}; ${estimate}`);
  const brief = ratio.hidden ? "" : ` · ${(tps / plain).toFixed(2)}×`;
  say(byId("brief"), tps === null ? "Engine" : `${speed(tps)} tok/s${brief}`);
  const values = seconds.map(tpsOf);
  const plains = seconds.map(plainOf);
  const top = Math.ceil(Math.max(1, ...values, ...plains) * 1.1);
  say(byId("speed-span"), `last minute, 0–${top}`);
  curves(byId("speed-chart"), values, plains, top, `Tokens per second: ${tps === null ? "nothing yet" : `${speed(tps)}; ${estimate}`}`);
}

function showAcceptance(seconds) {
  const { n_verified, n_accepted } = sumOf(seconds);
  const text = n_verified
    ? `${percent(n_accepted / n_verified)} of ${count(n_verified, "drafted token")} in the last minute`
    : "Nothing verified in the last minute";
  say(byId("acceptance"), text);
  const shares = seconds.map((second) => (second?.n_verified ? second.n_accepted / second.n_verified : null));
  curves(byId("acceptance-chart"), shares, [], 1, `Acceptance: ${text}`);
}

function showState(stats) {
  const { status, speculation } = stats;
  if (status === "loading") {
    const share = stats.progress < 1 ? percent(stats.progress) : "All of it is read, getting ready";
    setState("loading", "Loading model", `${share} after ${Math.round(stats.elapsed_s)} s`);
  } else if (stats.failure) {
    setState("lost", "Model not loaded", stats.failure);
  } else if (!speculation) {
    setState("unknown", "Model unloaded", "It comes back with the next message");
  } else {
    const isOff = speculation.state === "off";
    const isHeld = /parked|released/.test(speculation.state);
    const dot = isOff ? "unknown" : isHeld ? "parked" : "on";
    setState(dot, capital(speculation.state), capital(speculation.reason));
  }
  say(byId("drafter"), stats.drafter ? `Drafter: ${stats.drafter}` : "");
  const pressure = stats.pressure ?? [];
  byId("pressure").hidden = !pressure.length;
  byId("pressure").replaceChildren(...pressure.map(({ text }) => element("li", {}, capital(text))));
}

function setState(dot, state, reason) {
  for (const each of document.querySelectorAll("#panel .dot, #toggle-panel .dot")) each.dataset.state = dot;
  say(byId("state"), state);
  say(byId("reason"), reason);
}

function showMemory(memory) {
  const total = memory.ram_total_bytes;
  if (!total || memory.ram_free_bytes === null) return;
  const of = (who) => ["model", "context", "compute"].reduce((n, part) => n + (memory[`${who}_${part}_bytes`] ?? 0), 0);
  const [target, drafter] = [of("target"), of("drafter")];
  const rest = Math.max(memory.process_bytes - target - drafter, 0);
  const others = Math.max(total - memory.ram_free_bytes - target - drafter - rest, 0);
  const parts = [
    ["target", "Target", target],
    ["drafter", "Drafter", drafter],
    ["rest", "Rest of the server", rest],
    ["others", "Other programs", others],
    ["free", "Free", memory.ram_free_bytes],
  ];
  const text = parts.map(([, name, n]) => `${name} ${bytes(n)}`).join(", ");
  gauge(byId("memory-chart"), parts.map(([id, , n]) => [`part-${id}`, n]), total, `Memory, ${bytes(total)} in all: ${text}`);
  byId("memory").replaceChildren(
    ...parts.flatMap(([id, name, n]) => [
      element("dt", {}, element("span", { className: `swatch part-${id}` }), element("span", {}, name)),
      element("dd", {}, bytes(n)),
    ]),
  );
}

function showRequests(stats) {
  const running = stats.queue.n_requests - stats.queue.n_waiting;
  const facts = [
    ["Running", `${running} of ${stats.n_seq}`],
    ["Waiting", `${stats.queue.n_waiting}`],
    ["Tokens emitted", stats.n_tokens.toLocaleString("en")],
    ["Prompt tokens reused", stats.n_prompt_tokens ? percent(stats.n_reused_tokens / stats.n_prompt_tokens) : "–"],
    ["Decoding, parked", stats.decode_s ? percent(stats.parked_s / stats.decode_s) : "–"],
  ];
  byId("requests").replaceChildren(
    ...facts.flatMap(([name, value]) => [element("dt", {}, element("span", {}, name)), element("dd", {}, value)]),
  );
}
