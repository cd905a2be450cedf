// One answer on the page: its tokens, tinted by draft position, and its figures.

export const NUM_TINTS = 8; // later positions share the last one

export function make(tag, properties = {}, ...children) {
  const { className, ...rest } = properties;
  const element = document.createElement(tag);
  if (className) element.className = className;
  for (const [name, value] of Object.entries(rest)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// Appends text as it comes. Three backticks at the start of a line open and close a block of code.
export class TokenWriter {
  constructor(body) {
    this.body = body;
    this.into = null; // the paragraph or code that text goes to
    this.inCode = false;
    this.ticks = []; // backticks at the start of a line, not yet known to be a fence
    this.atLineStart = true;
    this.fence = null; // the rest of a fence's line
    this.breaks = ""; // newlines that are written once text follows them
  }

  write(text, draft) {
    let run = "";
    const flush = () => {
      if (run) this.append(run, draft);
      run = "";
    };
    for (const letter of text) {
      if (this.fence !== null) {
        if (letter === "\n") this.endFence();
        else this.fence += letter;
      } else if (letter === "`" && (this.atLineStart || this.ticks.length)) {
        flush();
        this.ticks.push(draft);
        this.atLineStart = false;
        if (this.ticks.length === 3) {
          this.ticks = [];
          this.fence = "";
        }
      } else {
        if (this.ticks.length) this.flushTicks();
        run += letter;
        this.atLineStart = letter === "\n" || (this.atLineStart && letter === " ");
      }
    }
    flush();
  }

  // The answer is complete.
  end() {
    this.flushTicks();
    if (this.fence !== null) this.endFence();
  }

  flushTicks() {
    const ticks = this.ticks;
    this.ticks = [];
    for (const draft of ticks) this.append("`", draft);
  }

  endFence() {
    const language = this.fence.trim();
    this.fence = null;
    this.atLineStart = true;
    this.inCode = !this.inCode;
    this.into = null;
    this.breaks = "";
    if (!this.inCode) return;
    this.into = make("code");
    const block = make("pre", { tabIndex: 0 }, this.into);
    if (/^[\w+#.-]{1,20}$/.test(language)) block.dataset.language = language;
    this.body.append(block);
  }

  append(text, draft) {
    const [, space, words, breaks] = /^(\s*)([^]*?)(\n*)$/.exec(text);
    if (!words && /^\n*$/.test(space)) {
      this.breaks += space;
      return;
    }
    if (!this.into) {
      this.breaks = ""; // no blank lines at the top
      this.into = make("div", { className: "prose" });
      this.body.append(this.into);
    }
    const before = this.breaks + space;
    if (before) this.into.append(this.into.firstChild ? before : before.replace(/^\n+/, ""));
    if (words) this.into.append(draft > 0 ? tinted(words, draft) : words);
    this.breaks = breaks;
  }
}

// Spaces before a word stay plain: a tint that hangs over the end of a line looks like an error.
function tinted(text, draft) {
  return make("span", {
    className: `tok d${Math.min(draft, NUM_TINTS)}`,
    title: `draft ${draft}`,
    "data-draft": draft,
  }, text);
}

// What an answer's tokens say about drafts and speed.
export class Tally {
  constructor() {
    this.started = performance.now();
    this.first = null; // when its first tokens came
    this.last = null;
    this.numFirst = 0; // tokens that came with them
    this.numTokens = 0;
    this.byPosition = [];
  }

  add(tokens) {
    if (!tokens.length) return;
    this.last = performance.now();
    if (this.first === null) {
      this.first = this.last;
      this.numFirst = tokens.length;
    }
    this.numTokens += tokens.length;
    for (const { draft } of tokens) {
      if (draft > 0) this.byPosition[draft - 1] = (this.byPosition[draft - 1] ?? 0) + 1;
    }
  }

  get numAccepted() {
    return this.byPosition.reduce((sum, count) => sum + (count ?? 0), 0);
  }

  // Tokens per second after the first ones; null if there were too few to tell.
  get speed() {
    const seconds = (this.last - this.first) / 1000;
    const count = this.numTokens - this.numFirst;
    return seconds > 0 && count > 1 ? count / seconds : null;
  }

  words(withDrafts) {
    const parts = [`${this.numTokens} ${this.numTokens === 1 ? "token" : "tokens"}`];
    if (this.speed !== null) parts.push(`${rounded(this.speed)} tokens/s`);
    if (this.first !== null) parts.push(`first after ${Math.round(this.first - this.started)} ms`);
    if (!withDrafts) parts.push("without drafts");
    else if (this.numTokens) {
      const share = Math.round((100 * this.numAccepted) / this.numTokens);
      parts.push(`${share} % from drafts`);
    }
    return parts.join(" · ");
  }
}

export function rounded(value) {
  return value >= 100 ? String(Math.round(value)) : value.toFixed(1);
}
