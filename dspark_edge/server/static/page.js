// Wires the page: the message box, the buttons, settings, models.

import { apiKey, getJson } from "./api.js";
import { Conversation } from "./conversation.js";
import { byId, element, say } from "./dom.js";
import { bytes } from "./format.js";
import { Panel } from "./panel.js";
import { store } from "./store.js";

const FIELDS = { system: "system", temperature: "temperature", seed: "seed", maxTokens: "max-tokens" };

let settings = store.settings();
let isConnected = false;
const prompt = byId("prompt");
const panel = new Panel(onStats);
const conversation = new Conversation(panel, () => settings, onBusy);

function onStats(stats) {
  conversation.showWait(stats);
  if (stats && !isConnected) showModels();
  isConnected = stats !== null;
}

function onBusy(isBusy) {
  const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  // A button that vanishes would take the focus with it.
  if (hadFocus) (isBusy ? byId("stop") : prompt).focus();
}

function send() {
  const text = prompt.value.trim();
  if (!text || conversation.isBusy) return;
  prompt.value = "";
  fitPrompt();
  conversation.send(text);
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

async function showModels() {
  const { data } = await getJson("/v1/models").catch(() => ({ data: [] }));
  const select = byId("model");
  select.replaceChildren(
    ...data.map(({ id, x_dspark }) => element("option", { value: id }, `${id} · ${bytes(x_dspark.size_bytes)}`)),
  );
  const isThere = data.some(({ id }) => id === settings.model);
  select.value = isThere ? settings.model : (data.find((model) => model.x_dspark.is_default) ?? data[0])?.id;
  settings.model = select.value;
}

function change(changes) {
  settings = { ...settings, ...changes };
  store.saveSettings(settings);
  document.body.classList.toggle("no-tint", !settings.tint);
}

function showSettings() {
  for (const [name, id] of Object.entries(FIELDS)) byId(id).value = settings[name];
  byId("tint").checked = settings.tint;
  byId("api-key").value = apiKey.get();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("input", fitPrompt);
prompt.addEventListener("keydown", (event) => {
  // While a word is being composed, Enter belongs to the input method.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("settings").open) conversation.stop();
});
byId("stop").addEventListener("click", () => conversation.stop());
byId("new-chat").addEventListener("click", () => {
  conversation.clear();
  say(byId("said"), "New chat");
  prompt.focus();
});
byId("model").addEventListener("change", () => change({ model: byId("model").value }));
byId("toggle-panel").addEventListener("click", () => {
  const isOpen = byId("panel").classList.toggle("is-open");
  byId("toggle-panel").setAttribute("aria-expanded", String(isOpen));
  panel.ask();
});
byId("open-settings").addEventListener("click", () => {
  showSettings();
  byId("settings").showModal();
});
for (const [name, id] of Object.entries(FIELDS)) {
  byId(id).addEventListener("change", () => {
    if (byId(id).checkValidity()) change({ [name]: byId(id).value });
  });
}
byId("tint").addEventListener("change", () => change({ tint: byId("tint").checked }));
byId("api-key").addEventListener("change", () => {
  apiKey.set(byId("api-key").value.trim());
  isConnected = false;
  panel.ask();
});
byId("forget").addEventListener("click", () => {
  conversation.clear();
  store.forget();
  apiKey.set("");
  settings = store.settings();
  document.body.classList.remove("no-tint");
  showSettings();
  showModels();
  say(byId("said"), "Conversation and settings are forgotten");
});

change({});
prompt.focus();
