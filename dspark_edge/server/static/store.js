// What the page remembers, in this browser only. Where storage is full or forbidden it says so and
// goes on; what was kept before stays.

const CHAT = "dspark_edge.chat";
const SETTINGS = "dspark_edge.settings";

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** Whether it could be kept. */
function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export const store = {
  settings: () => ({ system: "", temperature: "", seed: "", maxTokens: "", tint: true, model: "", ...read(SETTINGS, {}) }),
  saveSettings: (settings) => write(SETTINGS, settings),
  turns: () => read(CHAT, []).filter((turn) => typeof turn?.question === "string" && turn.reply),
  saveTurns: (turns) => write(CHAT, turns),
  forget() {
    try {
      localStorage.removeItem(CHAT);
      localStorage.removeItem(SETTINGS);
    } catch {
      // Nothing was kept.
    }
  },
};
