// A reply's text and which of it was drafted. Tokens come as pieces that run ahead of the text and
// are not always in it: marks of thoughts, halves of characters, stop strings.

const WINDOW = 12; // characters within which a piece is looked for
const BROKEN = "\ufffd"; // a piece that is part of a character

export class DraftedText {
  #at = 0; // up to here the pieces are told apart
  #pieces = [];
  #broken = []; // of pieces that are parts of characters: whether each was drafted

  /** ranges: [from, to] in the text, in order, that were drafted. */
  constructor(text = "", ranges = []) {
    this.text = text;
    this.ranges = ranges;
    this.#at = text.length;
  }

  push(text, pieces) {
    this.text += text;
    this.#pieces.push(...pieces);
    this.#align(false);
  }

  end() {
    this.#align(true);
    this.#mark(this.#at, this.text.length, this.#broken.length > 0 && this.#broken.every(Boolean));
    this.#at = this.text.length;
  }

  #align(isLast) {
    while (this.#pieces.length) {
      const [piece, isDrafted] = this.#pieces[0];
      if (piece.includes(BROKEN)) {
        this.#broken.push(isDrafted);
      } else if (piece) {
        const isShort = this.text.length - this.#at < piece.length + WINDOW;
        const [from, length] = this.#find(piece);
        if (from < 0 && isShort && !isLast) return;
        if (from >= 0) this.#place(from, length, isDrafted);
      }
      this.#pieces.shift();
    }
  }

  #find(piece) {
    const isNext = !this.#broken.length;
    if (isNext && this.text.startsWith(piece, this.#at)) return [this.#at, piece.length];
    const bare = piece.trimStart(); // blanks around a thought are dropped
    if (isNext && bare && this.text.startsWith(bare, this.#at)) return [this.#at, bare.length];
    const first = this.#at + (isNext ? 0 : 1);
    const near = this.text.slice(first, first + piece.length + WINDOW).indexOf(piece);
    return [near < 0 ? -1 : first + near, piece.length];
  }

  #place(from, length, isDrafted) {
    const isBrokenDrafted = this.#broken.length > 0 && this.#broken.every(Boolean);
    this.#mark(this.#at, from, isBrokenDrafted);
    this.#mark(from, from + length, isDrafted);
    this.#broken = [];
    this.#at = from + length;
  }

  #mark(from, to, isDrafted) {
    if (!isDrafted || from >= to) return;
    const last = this.ranges.at(-1);
    if (last && last[1] === from) last[1] = to;
    else this.ranges.push([from, to]);
  }
}

/** Appends text[from, to) to a node, what was drafted in a span of its own. */
export function appendText(node, { text, ranges }, from, to) {
  let at = from;
  for (let i = firstAfter(ranges, from); i < ranges.length && ranges[i][0] < to; i++) {
    const begin = Math.max(ranges[i][0], from);
    const end = Math.min(ranges[i][1], to);
    if (begin > at) node.append(text.slice(at, begin));
    const mark = document.createElement("span");
    mark.className = "drafted";
    mark.append(text.slice(begin, end));
    node.append(mark);
    at = end;
  }
  if (at < to) node.append(text.slice(at, to));
}

function firstAfter(ranges, at) {
  let [low, high] = [0, ranges.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ranges[middle][1] > at) high = middle;
    else low = middle + 1;
  }
  return low;
}
