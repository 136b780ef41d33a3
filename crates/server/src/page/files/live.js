// Live panel: speed, queue, experts, disk, time, memory plan. Reads the feed only while it is seen.

import { request } from "./api.js";
import { bytes, byId, element, fillBar, percent } from "./dom.js";
import { frames } from "./feed.js";

// Seconds over which figures are averaged, and seconds of the plot.
const WINDOW = 3;
const PLOTTED = 120;
// Part of an expert's heat that is left after a frame.
const COOLING = 0.85;
const HITS = 0, PREFETCHED = 1, MISSES = 2;

let reading = null;
let history = [];
let heat = null;
let plot = null;
let pointed = null;
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
      for await (const frame of frames(signal)) {
        if (signal.aborted) return;
        if (!history.length) state("");
        pause = 1;
        show(frame);
      }
      throw new Error("the feed ended");
    } catch (error) {
      if (signal.aborted) return;
      hasPlan = false;
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
  const before = history.at(-1);
  history.push(frame);
  while (history.length > 2 && frame.time - history[1].time > WINDOW) history.shift();
  if (before) warm(before, frame);
  drawHeat(frame);
  // Older frames are needed for their values only.
  if (before) before.counts = null;
  const first = history[0];
  const past = (name) => frame[name] - first[name];
  const seconds = Math.max(past("time"), 1e-3);
  const speed = past("generatedTokens") / seconds;
  showFigures(frame, speed, past("promptTokens") - past("cachedTokens"), seconds);
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
  const pairs = Object.entries(figures).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, String(value))));
  byId("figures").replaceChildren(...pairs);
}

function showSpeed(speed) {
  const [times, speeds] = series;
  times.push(performance.now() / 1000);
  speeds.push(speed);
  while (times.at(-1) - times[0] > PLOTTED) series.forEach((values) => values.shift());
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
      scales: { x: { time: false }, y: { range: (u, low, high) => [0, Math.max(1, high)] } },
      axes: [{ ...axis, space: 70, values: ago }, { ...axis, size: 42 }],
      series: [{}, { stroke: style.accentColor, width: 2, points: { show: false } }],
    }, series, parent);
    plot.ink = style.color;
  } else {
    if (plot.width !== width) plot.setSize({ width, height: 110 });
    plot.setData(series);
  }
}

const ago = (u, times) => times.map((time) => `${Math.round(time - series[0].at(-1))} s`);

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

// Heat of each expert: recent steps that found it in memory, prefetched, or not.
function warm(before, frame) {
  const { counts } = frame;
  if (heat?.length !== counts.length) heat = new Float32Array(counts.length);
  for (let i = 0; i < counts.length; i++) {
    heat[i] = heat[i] * COOLING + ((counts[i] - before.counts[i]) >>> 0);
  }
}

function drawHeat(frame) {
  const layers = frame.sizes.reduce((rows, size, layer) => {
    if (size > 0) rows.push({ layer, size, start: rows.end });
    rows.end += size;
    return rows;
  }, Object.assign([], { end: 0 }));
  const canvas = byId("heat");
  const width = Math.max(1, ...frame.sizes);
  const height = Math.max(1, layers.length);
  const isSame = canvas.width === width && canvas.height === height;
  if (!isSame) [canvas.width, canvas.height] = [width, height];
  const style = getComputedStyle(canvas);
  const colour = (name) => {
    const hex = style.getPropertyValue(name).trim();
    return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  };
  const [ground, ...colours] = ["--cold", "--hits", "--prefetched", "--misses"].map(colour);
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  layers.forEach(({ size, start }, row) => {
    for (let expert = 0; expert < size; expert++) {
      const first = 3 * (start + expert);
      const parts = [HITS, PREFETCHED, MISSES].map((kind) => heat?.[first + kind] ?? 0);
      const sum = parts[HITS] + parts[PREFETCHED] + parts[MISSES];
      const strength = sum > 0.01 ? 1 - Math.exp(-0.3 * sum) : 0;
      for (let channel = 0; channel < 3; channel++) {
        let mixed = 0;
        for (let kind = 0; kind < 3; kind++) mixed += colours[kind][channel] * parts[kind];
        const warmth = strength > 0 ? mixed / sum : 0;
        image.data[4 * (row * width + expert) + channel] =
          ground[channel] * (1 - strength) + warmth * strength;
      }
      image.data[4 * (row * width + expert) + 3] = 255;
    }
  });
  context.putImageData(image, 0, 0);
  canvas.onpointermove = ({ offsetX, offsetY }) => {
    const row = layers[Math.floor((offsetY / canvas.clientHeight) * layers.length)];
    const expert = Math.floor((offsetX / canvas.clientWidth) * width);
    const isExpert = row && expert < row.size;
    pointed = isExpert ? { layer: row.layer, expert, first: 3 * (row.start + expert) } : null;
    describe(frame, layers);
  };
  canvas.onpointerleave = () => {
    pointed = null;
    describe(frame, layers);
  };
  describe(frame, layers);
}

function describe({ counts }, layers) {
  const totals = [0, 0, 0];
  for (let i = 0; i < counts.length; i++) totals[i % 3] += counts[i];
  const all = totals[HITS] + totals[PREFETCHED] + totals[MISSES];
  const share = (kind) => percent(all ? totals[kind] / all : 0);
  const summary = `${layers.length} layers; since the start ${share(HITS)} in memory, ` +
    `${share(PREFETCHED)} prefetched, ${share(MISSES)} read`;
  byId("heat").setAttribute("aria-label", `Recent use of experts: ${summary}`);
  if (!pointed) {
    byId("heat-text").textContent = summary;
    return;
  }
  const { layer, expert, first } = pointed;
  byId("heat-text").textContent = `layer ${layer}, expert ${expert}: ${counts[first]} in memory, ` +
    `${counts[first + 1]} prefetched, ${counts[first + 2]} read`;
}

function showPlan(plan) {
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
