// The chat: what is asked, how it is asked, and what it shows.

import { ApiError, getJson, streamChat, useKey } from "./api.js";
import { make, rounded, Tally, TokenWriter } from "./answer.js";
import { Stats } from "./stats.js";

const $ = (id) => document.getElementById(id);
const WITH = "with";
const WITHOUT = "without";

const state = {
  messages: [], // of the conversation, as the API has them
  running: null, // an AbortController while an answer comes
  speeds: { [WITH]: null, [WITHOUT]: null },
  hasDrafter: true,
  model: null,
};

// ---- sending ----

// Returns whether an answer came, if only a part of it.
async function ask(text, modes) {
  notice("");
  const { messages } = state; // a new chat has another list
  $("welcome").hidden = true;
  const question = { role: "user", content: text };
  const asked = make("article", { className: "turn user", ariaLabel: "You" }, text);
  $("log").append(asked);
  scrollDown(true);
  begin();
  const pair = modes.length > 1;
  const turn = make("div", { className: pair ? "turn pair" : "turn" });
  $("log").append(turn);
  const seed = Math.floor(Math.random() * 2 ** 31); // the same for both: so is the text
  const answers = [];
  try {
    for (const mode of modes) answers.push(await answer(turn, [...messages, question], mode, pair ? seed : null));
    if (pair) compare(turn, answers);
  } catch (error) {
    fail(error, turn);
  } finally {
    finish();
  }
  const kept = answers.at(-1)?.text || lastText(turn);
  if (kept) messages.push(question, { role: "assistant", content: kept });
  else if (messages === state.messages) giveBack(text, asked, turn);
  return Boolean(kept);
}

// Streams one answer into the page and returns its text and tally.
async function answer(turn, messages, mode, seed) {
  const body = make("div", { className: "body" });
  const facts = make("p", { className: "facts" }, "waiting");
  const box = make("article", { className: "answer", ariaLabel: "Answer", ariaBusy: "true", "data-mode": mode });
  if (seed !== null) box.append(make("h3", {}, mode === WITH ? "With drafts" : "Without drafts"));
  box.append(body, facts);
  turn.append(box);
  const writer = new TokenWriter(body);
  const tally = new Tally();
  const found = { text: "", tally, mode };
  try {
    for await (const chunk of streamChat(payload(messages, mode, seed), state.running.signal)) {
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      const text = choice.delta?.content ?? "";
      const tokens = choice.tokens ?? (text ? [{ text, draft: 0 }] : []);
      const atEnd = isAtEnd();
      tally.add(tokens);
      for (const token of tokens) writer.write(token.text, token.draft);
      found.text += text;
      if (tokens.length) facts.textContent = tally.words(mode === WITH && state.hasDrafter);
      if (atEnd) scrollDown();
      if (choice.finish_reason === "error") throw new ApiError(choice.stop_reason ?? "The answer failed.");
      if (choice.finish_reason === "length") box.dataset.cut = "true";
    }
  } finally {
    writer.end();
    box.ariaBusy = "false";
    box.dataset.text = found.text;
    if (!found.text) box.remove();
    else complete(box, facts, found);
  }
  if (tally.speed !== null) state.speeds[mode] = tally.speed;
  showSpeeds();
  say(`Answer complete: ${tally.words(mode === WITH && state.hasDrafter)}`);
  return found;
}

function payload(messages, mode, seed) {
  const system = $("system").value.trim();
  const asked = {
    model: state.model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: Number($("temperature").value),
    max_tokens: Math.max(1, Math.round(Number($("max-tokens").value)) || 256),
    return_draft_positions: true,
  };
  if (mode === WITHOUT) asked.num_speculative_tokens = 0;
  if (seed !== null) asked.seed = seed;
  return asked;
}

function complete(box, facts, found) {
  facts.textContent = found.tally.words(found.mode === WITH && state.hasDrafter);
  if (box.dataset.cut) facts.append(" · cut at the limit of tokens");
  const button = make("button", { type: "button", className: "quiet copy" }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copy(found.text)) ? "Copied" : "Not allowed";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  box.append(make("div", { className: "after" }, facts, button));
}

function compare(turn, answers) {
  const [without, drafted] = answers;
  const same = without.text === drafted.text;
  const ratio = drafted.tally.speed && without.tally.speed ? drafted.tally.speed / without.tally.speed : null;
  const speed = ratio === null ? "" : `${ratio.toFixed(2)} times the speed with drafts. `;
  const words = same
    ? "Both texts are the same, letter for letter."
    : "The texts differ: passes over several tokens round differently in this dtype.";
  turn.append(make("p", { className: "verdict" }, make("strong", {}, speed), words));
  say(speed + words);
  scrollDown();
}

function lastText(turn) {
  return [...turn.querySelectorAll(".answer")].at(-1)?.dataset.text ?? "";
}

// Nothing came: the question goes back into the field, to be sent again.
function giveBack(text, asked, turn) {
  asked.remove();
  turn.remove();
  if (!$("prompt").value) $("prompt").value = text;
  grow();
  if (!state.messages.length) $("welcome").hidden = false;
}

function fail(error, turn) {
  if (error.name === "AbortError") {
    turn.querySelector(".answer:last-of-type .facts")?.append(" · stopped");
    say("Stopped");
    return;
  }
  if (error.status === 401) askForKey();
  notice(error instanceof ApiError ? error.message : `This should not happen: ${error.message}`);
}

function begin() {
  state.running = new AbortController();
  $("send").hidden = true;
  $("both").disabled = true;
  $("stop").hidden = false;
}

function finish() {
  state.running = null;
  const hadFocus = document.activeElement === $("stop") || document.activeElement === document.body;
  $("stop").hidden = true;
  $("send").hidden = false;
  $("both").disabled = !state.hasDrafter;
  if (hadFocus) $("prompt").focus();
}

// ---- what is shown ----

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function say(text) {
  $("said").textContent = text;
}

function showSpeeds() {
  const { [WITH]: drafted, [WITHOUT]: plain } = state.speeds;
  const top = Math.max(drafted ?? 0, plain ?? 0);
  for (const mode of [WITH, WITHOUT]) {
    const speed = state.speeds[mode];
    $(`speed-${mode}`).textContent = speed === null ? "–" : rounded(speed);
    $(`meter-${mode}`).style.width = speed === null ? "0" : `${(100 * speed) / top}%`;
  }
  if (drafted && plain) $("compare-note").textContent = `${(drafted / plain).toFixed(2)} times the speed with drafts`;
}

function isAtEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

function scrollDown() {
  $("log").scrollTop = $("log").scrollHeight;
}

function grow() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, 180)}px`;
}

function askForKey() {
  $("key-form").hidden = false;
  openPanel(true);
}

function openPanel(open) {
  $("panel").classList.toggle("open", open);
  $("panel-toggle").setAttribute("aria-expanded", String(open));
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyByHand(text); // without https the clipboard is not there
  }
}

function copyByHand(text) {
  const field = make("textarea", { className: "unseen", value: text });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

function newChat() {
  state.running?.abort();
  state.messages = [];
  $("log").replaceChildren($("welcome"));
  $("welcome").hidden = false;
  notice("");
  $("prompt").focus();
}

// ---- the server ----

const STATES = { stalled: "not responding", dead: "stopped", draining: "shutting down" };

function takeStats(stats) {
  if (stats.model) $("model").textContent = state.model ??= stats.model;
  const name = stats.state ?? "ready";
  showState(name === "ready" ? "good" : "bad", STATES[name] ?? name);
  state.hasDrafter = (stats.num_drafts ?? 0) > 0;
  $("drafts").disabled = !state.hasDrafter;
  $("both").disabled = !state.hasDrafter || state.running !== null;
  if (!state.hasDrafter) $("drafts").checked = false;
}

function missStats(error) {
  if (error.status === 401 && $("key-form").hidden) {
    askForKey();
    $("key").focus();
  }
  showState("bad", error.status === 401 ? "needs a key" : error.status === 503 ? "not ready" : "not reachable");
}

function showState(kind, words) {
  if ($("state").textContent === words) return; // it is announced when it changes
  $("state").dataset.state = kind;
  $("state").textContent = words;
}

async function learnModel() {
  try {
    const { data } = await getJson("v1/models");
    if (data?.length) $("model").textContent = state.model = data[0].id;
  } catch {
    // The numbers say what is wrong.
  }
}

// ---- wiring ----

const chosen = () => [$("drafts").checked || !state.hasDrafter ? WITH : WITHOUT];

function send(modes) {
  const text = $("prompt").value;
  if (state.running || !text.trim()) return;
  $("prompt").value = "";
  grow();
  ask(text, modes);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(chosen());
});
$("both").addEventListener("click", async () => {
  const { messages } = state;
  if ($("prompt").value.trim()) send([WITHOUT, WITH]);
  else if (messages.length) {
    const last = messages.splice(-2); // the same question again
    if (!(await ask(last[0].content, [WITHOUT, WITH]))) messages.push(...last);
  } else notice("Write a message first.");
});
$("stop").addEventListener("click", () => state.running?.abort());
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send(chosen());
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (state.running) state.running.abort();
  else if ($("panel").classList.contains("open")) {
    openPanel(false);
    $("panel-toggle").focus();
  }
});
$("new-chat").addEventListener("click", newChat);
$("panel-toggle").addEventListener("click", () => openPanel(!$("panel").classList.contains("open")));
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    if (!state.running) ask(example.textContent, chosen());
    $("prompt").focus();
  });
}
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
  $("key").value = "";
  $("key-form").hidden = true;
  notice("");
  openPanel(false);
  learnModel();
  stats.ask();
  $("prompt").focus();
});

for (const id of ["temperature", "max-tokens", "system"]) {
  const kept = sessionStorage.getItem(`stoop.${id}`);
  if (kept !== null) $(id).value = kept;
  $(id).addEventListener("input", () => {
    sessionStorage.setItem(`stoop.${id}`, $(id).value);
    $("temperature-value").textContent = $("temperature").value;
  });
}
$("temperature-value").textContent = $("temperature").value;

const stats = new Stats({ onStats: takeStats, onError: missStats });
learnModel();
if (matchMedia("(pointer: fine)").matches) $("prompt").focus(); // no keyboard on a phone yet
