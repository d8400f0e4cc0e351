// Talks to the server: JSON, and a reply as a stream of events. Knows nothing of the page.

const KEY = "dspark_edge.key";

/** What went wrong. status: of HTTP, 0 without a connection; retryS: seconds to wait, or null. */
export class ApiError extends Error {
  constructor(message, status, retryS = null) {
    super(message);
    this.status = status;
    this.retryS = retryS;
  }
}

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

/** The JSON at a path. */
export async function getJson(path) {
  return (await ask(path, {})).json();
}

/** The objects of a streamed chat reply. Raises ApiError, also where the stream breaks off. */
export async function* streamChat(body, signal) {
  const response = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of eventsOf(response.body, signal)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, 500);
    yield event;
  }
  throw new ApiError("The connection was lost before the reply had ended.", 0);
}

async function ask(path, options) {
  const headers = { ...options.headers };
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError("The server cannot be reached.", 0);
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  const retryS = Number(response.headers.get("Retry-After")) || null;
  const message = told?.error?.message ?? `The server answered ${response.status}.`;
  throw new ApiError(message, response.status, retryS);
}

async function* eventsOf(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  while (true) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (signal.aborted) throw error;
      throw new ApiError("The connection was lost before the reply had ended.", 0);
    }
    if (part.done) return;
    const lines = (held + part.value).split("\n");
    held = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}
