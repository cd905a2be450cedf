// Live numbers of the server: asks for /stats once a second while the page is visible.

import { ApiError, getJson } from "./api.js";
import { make, NUM_TINTS, rounded } from "./answer.js";

const PERIOD = 1000; // ms
const KEPT = 60; // samples
const $ = (id) => document.getElementById(id);

export class Stats {
  constructor({ onStats, onError }) {
    this.onStats = onStats;
    this.onError = onError;
    this.samples = [];
    this.rates = [];
    this.timer = null;
    this.asking = false;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.pause() : this.resume()));
    this.resume();
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
  }

  resume() {
    if (this.timer !== null || document.hidden) return;
    this.timer = setInterval(() => this.ask(), PERIOD);
    this.ask();
  }

  async ask() {
    if (this.asking) return; // a slow answer is not asked for twice
    this.asking = true;
    try {
      const stats = await getJson("stats");
      this.take({ ...stats, at: performance.now() });
      this.onStats(stats);
    } catch (error) {
      this.onError(error instanceof ApiError ? error : new ApiError(String(error)));
    } finally {
      this.asking = false;
    }
  }

  take(sample) {
    const before = this.samples.at(-1);
    if (before && before.num_generated_tokens > sample.num_generated_tokens) {
      this.samples = []; // the core restarted and counts from 0
    } else if (before) {
      const seconds = (sample.at - before.at) / 1000;
      const gap = seconds > 5; // the page was hidden
      if (gap) this.rates = [];
      else this.rates.push((sample.num_generated_tokens - before.num_generated_tokens) / seconds);
    }
    this.samples.push(sample);
    this.samples.splice(0, this.samples.length - KEPT - 1);
    this.rates.splice(0, this.rates.length - KEPT);
    this.show(sample);
  }

  show(sample) {
    const rate = this.rates.at(-1) ?? 0;
    $("rate").textContent = rate > 0 ? rounded(rate) : "0";
    $("running").textContent = sample.num_requests_running ?? 0;
    $("waiting").textContent = sample.num_requests_waiting ?? 0;
    $("kv").textContent = Math.round(100 * (sample.kv_cache_usage ?? 0));
    const { prefix_cache_queried_tokens: queried, prefix_cache_hit_tokens: hit } = sample;
    $("prefix").textContent = queried ? `, ${Math.round((100 * hit) / queried)} % of prompt tokens were cached` : "";
    draw($("rate-chart"), [this.rates]);
    draw($("queue-chart"), [
      this.samples.map((each) => each.num_requests_running ?? 0),
      this.samples.map((each) => each.num_requests_waiting ?? 0),
    ]);
    this.showAcceptance(sample);
  }

  // Over the last minute, or since the start if there were no drafts in it.
  showAcceptance(sample) {
    const now = acceptance(sample, this.samples[0]);
    const found = now.numDrafts ? now : acceptance(sample, null);
    showBars(found.rates.slice(0, sample.num_drafts ?? found.rates.length));
    const when = now.numDrafts ? "last minute" : "since the start";
    $("acceptance-note").textContent = !found.rates.length
      ? "This server runs without a drafter."
      : sample.drafting === false
        ? "Drafts are off for the moment: the running requests gain nothing from them."
      : found.numDrafts
        ? `${found.length.toFixed(2)} tokens a step, ${when}`
        : "No drafts yet.";
  }
}

function acceptance(sample, since) {
  const added = (key) =>
    (sample[`spec_decode_num_${key}_per_pos`] ?? []).map(
      (count, at) => count - (since?.[`spec_decode_num_${key}_per_pos`]?.[at] ?? 0),
    );
  const numDrafts = (sample.spec_decode_num_drafts ?? 0) - (since?.spec_decode_num_drafts ?? 0);
  const accepted = added("accepted_tokens");
  const drafted = added("draft_tokens"); // a step may verify fewer drafts than another
  const rates = accepted.map((count, at) => (drafted[at] > 0 ? count / drafted[at] : 0));
  const total = accepted.reduce((sum, count) => sum + count, 0);
  return { numDrafts: Math.max(numDrafts, 0), rates, length: 1 + total / Math.max(numDrafts, 1) };
}

// The bars are the legend of the tints, too.
function showBars(rates) {
  const list = $("acceptance");
  while (list.children.length > rates.length) list.lastChild.remove();
  while (list.children.length < rates.length) {
    const draft = list.children.length + 1;
    list.append(
      make("li", {},
        make("span", { className: `tok d${Math.min(draft, NUM_TINTS)}` }, `draft ${draft}`),
        make("span", { className: "meter", ariaHidden: "true" }, make("span", { className: `fill${Math.min(draft, NUM_TINTS)}` })),
        make("span", { className: "percent" })),
    );
  }
  rates.forEach((rate, at) => {
    const item = list.children[at];
    const percent = Math.round(100 * Math.min(Math.max(rate, 0), 1));
    item.querySelector(".meter > span").style.width = `${percent}%`;
    item.querySelector(".percent").textContent = `${percent} %`;
  });
}

// Lines over the last minute, the newest value at the right edge.
function draw(svg, series) {
  const top = Math.max(1, ...series.flat());
  const x = (at, count) => 120 - ((count - 1 - at) * 120) / (KEPT - 1);
  const y = (value) => 30 - (28 * Math.max(value, 0)) / top;
  const lines = series.map((values) =>
    values.map((value, at) => `${at ? "L" : "M"}${x(at, values.length).toFixed(1)} ${y(value).toFixed(1)}`).join(""));
  svg.querySelectorAll(".line").forEach((line, at) => line.setAttribute("d", lines[at] ?? ""));
  const count = series[0].length;
  svg.querySelector(".area").setAttribute("d", count ? `${lines[0]}L120 32L${x(0, count).toFixed(1)} 32Z` : "");
}
