// Live panel: speed, queue, experts, disk, time, memory plan. Reads the feed only while it is seen.

import { request } from "./api.js";
import { bytes, byId, element, fillBar, percent } from "./dom.js";
import { frames } from "./feed.js";
import { HeatMap } from "./heat.js";

// Seconds over which figures are averaged, and seconds of the plot.
const WINDOW = 3;
const PLOTTED = 120;

let reading = null;
let history = [];
let map = null;
let plot = null;
// Times of measurements, and speeds.
const series = [[], []];

// Reads the feed while the panel is open and the tab visible.
export function watch(isOpen) {
  const isSeen = isOpen && document.visibilityState === "visible";
  if (isSeen === Boolean(reading)) return;
  reading?.abort();
  reading = isSeen ? new AbortController() : null;
  if (reading) read(reading.signal);
}

async function read(signal) {
  let pause = 1;
  let hasPlan = false;
  while (!signal.aborted) {
    try {
      state("connecting");
      if (!hasPlan) showPlan(await (await request("/moeflux/plan", { signal })).json());
      hasPlan = true;
      history = [];
      map?.restart();
      for await (const frame of frames(signal)) {
        if (signal.aborted) return;
        if (!history.length) state("");
        pause = 1;
        show(frame);
      }
      // The model was unloaded, or another one is loaded.
      if (!history.length) throw new Error("the feed ended");
      hasPlan = false;
    } catch (error) {
      if (signal.aborted) return;
      hasPlan = false;
      // The key was asked for, and not given.
      if (error.status === 401) return state("the server wants a key: reload the page to give one");
      state(`${error.message}; next attempt in ${pause} s`);
      await new Promise((resolve) => setTimeout(resolve, 1000 * pause));
      pause = Math.min(2 * pause, 30);
    }
  }
}

function state(text) {
  byId("live-state").textContent = text;
}

function show(frame) {
  map ??= new HeatMap();
  map.show(frame);
  // Older frames are needed for their values only.
  history.push({ ...frame, counts: null });
  while (history.length > 2 && frame.time - history[1].time > WINDOW) history.shift();
  const first = history[0];
  const past = (name) => frame[name] - first[name];
  const seconds = Math.max(past("time"), 1e-3);
  const speed = past("generatedTokens") / seconds;
  showFigures(frame, speed, past("promptTokens") - past("cachedTokens"), seconds);
  showDrafts(frame, past);
  showCard(past);
  showSpeed(speed);
  showDisk(frame, past);
  showTime(frame, past, seconds);
}

function showFigures(frame, speed, prompt, seconds) {
  const figures = {
    "tokens/s": speed.toFixed(1),
    "prompt tokens/s": (prompt / seconds).toFixed(0),
    "answering": frame.running,
    "waiting": frame.waiting,
    "answered": frame.ended,
    "tokens in all": frame.generatedTokens.toLocaleString("en"),
  };
  byId("figures").replaceChildren(...pairs(figures));
}

// Drafts of the last seconds, once there are any, and the time that drafts have won in all steps
// that only decode, where it is measured.
function showDrafts(frame, past) {
  if (!frame.drafted) return;
  const drafted = past("drafted");
  const figures = {
    "drafts right": drafted > 0 ? percent(past("accepted") / drafted) : "none now",
  };
  if (frame.undrafted > 0) {
    figures["time won by drafts"] = percent(1 - frame.drafting / frame.undrafted);
  }
  byId("figures").append(...pairs(figures));
}

// Share of the experts used in the last seconds that the graphics card's own memory had.
function showCard(past) {
  const uses = past("expertUses");
  if (uses > 0) {
    byId("figures").append(...pairs({ "experts on the card": percent(past("cardUses") / uses) }));
  }
}

const pairs = (figures) => Object.entries(figures).map(([name, value]) =>
  element("div", {}, element("dt", {}, name), element("dd", {}, String(value))));

function showSpeed(speed) {
  const [times, speeds] = series;
  times.push(performance.now() / 1000);
  speeds.push(speed);
  while (times.at(-1) - times[0] > PLOTTED) series.forEach((values) => values.shift());
  // Time before now, so that marks are at whole seconds.
  const now = times.at(-1);
  const data = [times.map((time) => time - now), speeds];
  const parent = byId("speed-plot");
  const style = getComputedStyle(parent);
  const width = parent.clientWidth;
  if (!plot || plot.ink !== style.color) {
    plot?.destroy();
    const axis = { stroke: style.color, grid: { stroke: style.borderColor, width: 1 } };
    plot = new window.uPlot({
      width, height: 110,
      legend: { show: false },
      cursor: { show: false },
      scales: {
        x: { time: false, range: (u, low) => [Math.min(low, -1), 0] },
        y: { range: (u, low, high) => [0, Math.max(1, high)] },
      },
      axes: [{ ...axis, space: 70, incrs: [1, 2, 5, 10, 30], values: ago }, { ...axis, size: 42 }],
      series: [{}, { stroke: style.accentColor, width: 2, points: { show: false } }],
    }, data, parent);
    plot.ink = style.color;
  } else {
    if (plot.width !== width) plot.setSize({ width, height: 110 });
    plot.setData(data);
  }
}

const ago = (u, times) => times.map((time) => `${Math.round(time)} s`);

function showDisk(frame, past) {
  const busy = past("disk");
  const speed = busy > 0 ? past("bytesRead") / busy : 0;
  const roof = frame.diskSpeed;
  const all = `${bytes(frame.bytesRead)} read in all`;
  const share = roof > 0 ? speed / roof : 0;
  fillBar(byId("disk-bar"), [{ name: "of the disk's speed", share, kind: "misses" }]);
  const measured = roof > 0
    ? `${percent(share)} of the ${bytes(roof)}/s that were measured`
    : "the disk's speed is not measured: moeflux plan does it";
  byId("disk-text").textContent = busy > 0
    ? `${bytes(speed)}/s while reading: ${measured}; ${all}`
    : `no reads; ${all}`;
}

function showTime(frame, past, seconds) {
  const tokens = past("computedTokens");
  const times = [
    ["computing", past("computing"), "hits"],
    ["waiting for the disk", past("stalled"), "misses"],
    ["waiting for the GPU", past("waited"), "prefetched"],
  ];
  const parts = times.map(([name, time, kind]) => ({ name, share: time / seconds, kind }));
  fillBar(byId("time-bar"), parts);
  const each = ([name, time]) => `${name} ${((1000 * time) / tokens).toFixed(1)} ms`;
  byId("time-text").textContent = tokens > 0
    ? `per computed token: ${times.filter(([, time]) => time > 0).map(each).join(", ")}`
    : "no steps";
}

function showPlan(plan) {
  if (!plan.model) {
    const text = "no model is loaded: a message loads the chosen one";
    byId("plan").replaceChildren(element("p", { className: "small" }, text));
    return;
  }
  byId("model").textContent = plan.model;
  const facts = `${plan.device}; ${plan.sessions} sessions of ${plan.context} tokens; ` +
    (plan.holds_all ? "all experts in memory" : `experts are read: ${plan.reads}`);
  const pools = plan.pools.map(({ place, budget, lines }) => {
    const rows = lines.map(({ name, bytes: size, count }) => element("tr", {},
      element("th", { scope: "row" }, count > 1 ? `${count} ${name}` : name),
      element("td", {}, bytes(size)),
      element("td", {}, percent(budget ? size / budget : 0))));
    return element("table", {},
      element("caption", {}, `${place}: ${bytes(budget)}`), element("tbody", {}, ...rows));
  });
  byId("plan").replaceChildren(element("p", { className: "small" }, facts), ...pools);
}
