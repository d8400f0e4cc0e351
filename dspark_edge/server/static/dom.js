// Elements by name, for people and for charts. Text is only ever set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An HTML element; props are properties, children nodes or text. */
export function element(tag, props = {}, ...children) {
  const made = Object.assign(document.createElement(tag), props);
  made.append(...children);
  return made;
}

/** An SVG element; attributes are attributes. */
export function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** Sets text only where it changed, so that screen readers and selections are left alone. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A button that copies what text() gives, and says so. */
export function copyButton(text, label = "Copy") {
  const button = element("button", { type: "button", className: "quiet copy", textContent: label });
  button.addEventListener("click", async () => {
    const isDone = await copy(text());
    button.textContent = isDone ? "Copied" : "Not allowed here";
    say(byId("said"), button.textContent);
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Outside of localhost and HTTPS there is no clipboard object; a selection can be copied.
    const box = element("textarea", { value: text, className: "hidden" });
    document.body.append(box);
    box.select();
    const isDone = document.execCommand("copy");
    box.remove();
    return isDone;
  }
}
