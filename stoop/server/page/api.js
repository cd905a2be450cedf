// The server's API: JSON, streams of events, and errors in words.

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let key = sessionStorage.getItem("stoop.key") ?? "";

export function useKey(value) {
  key = value.trim();
  if (key) sessionStorage.setItem("stoop.key", key);
  else sessionStorage.removeItem("stoop.key");
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let said = "";
  try {
    const body = await response.json();
    said = body.error?.message ?? body.detail ?? "";
  } catch {
    // Not JSON: a proxy, perhaps.
  }
  const { status } = response;
  if (status === 401) {
    return new ApiError(key ? "The server does not accept this API key." : "This server needs an API key.", 401);
  }
  if (status === 429) {
    const seconds = Number(response.headers.get("retry-after"));
    return new ApiError(`The server is busy. Try again ${seconds > 0 ? `in ${seconds} s` : "soon"}.`, 429);
  }
  if (status === 503) return new ApiError("The model is not ready. Try again in a moment.", 503);
  return new ApiError(typeof said === "string" && said ? said : `The server answered with status ${status}.`, status);
}

export async function getJson(path) {
  return (await request(path, { cache: "no-store" })).json();
}

// Yields the chunks of a streamed answer. Leaving the loop, or the signal, ends the request.
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  let complete = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      complete = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message ?? "The answer failed.", Number(chunk.error.code) || 500);
    yield chunk;
  }
  if (!complete) throw new ApiError("The connection ended before the answer was complete.");
}

// The data of server-sent events: lines may come in pieces.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
