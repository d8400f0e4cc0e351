// Numbers as people read them.

/** Bytes in the unit that suits them, decimal as the system's own tools show them. */
export function bytes(n) {
  if (n >= 1e9) return `${(n / 1e9).toFixed(n >= 1e10 ? 0 : 1)} GB`;
  return `${(n / 1e6).toFixed(n >= 1e7 ? 0 : 1)} MB`;
}

export const speed = (tps) => (tps >= 100 ? tps.toFixed(0) : tps.toFixed(1));

export const percent = (share) => `${Math.round(share * 100)} %`;

/** "1 token", "2 tokens". */
export const count = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
