// Heat map of layers and experts: recent steps that found an expert in memory, prefetched, or not.
// One pixel per expert, which the style enlarges; an update allocates nothing per expert.

import { byId, percent } from "./dom.js";

// Part of the heat that is left after a frame.
const COOLING = 0.85;
// Heat below which an expert is cold.
const COLD = 0.02;
// Strengths of colour by heat, in steps of 1 / SCALE.
const SCALE = 8;
const STRENGTHS =
  Float32Array.from({ length: 20 * SCALE }, (_, i) => 1 - Math.exp((-0.3 * i) / SCALE));

const NAMES = ["--hits", "--prefetched", "--misses", "--cold"];

export class HeatMap {
  constructor() {
    this.canvas = byId("heat");
    this.pointed = null;
    this.frame = null;
    this.canvas.onpointermove = ({ offsetX, offsetY }) => {
      const { clientWidth, clientHeight, width } = this.canvas;
      const row = this.rows[Math.floor((offsetY / clientHeight) * this.rows.length)];
      const expert = Math.floor((offsetX / clientWidth) * width);
      this.pointed = row && expert < row.size ? { row, expert } : null;
      if (this.frame) this.describe();
    };
    this.canvas.onpointerleave = () => {
      this.pointed = null;
      if (this.frame) this.describe();
    };
  }

  // Forgets the last frame, as the next one may be another server's.
  restart() {
    this.frame = null;
  }

  // Warms the experts that were used since the last frame.
  show(frame) {
    if (!this.frame) this.layOut(frame.sizes);
    const before = (this.frame ?? frame).counts;
    this.frame = frame;
    const { counts } = frame;
    const { heat, image } = this;
    const [hits, prefetched, misses, cold] = this.colours();
    const ground = [cold & 255, (cold >> 8) & 255, (cold >> 16) & 255];
    for (let pixel = 0; pixel < this.places.length; pixel++) {
      const i = this.places[pixel];
      if (i < 0) continue;
      const a = (heat[i] = heat[i] * COOLING + ((counts[i] - before[i]) >>> 0));
      const b = (heat[i + 1] = heat[i + 1] * COOLING + ((counts[i + 1] - before[i + 1]) >>> 0));
      const c = (heat[i + 2] = heat[i + 2] * COOLING + ((counts[i + 2] - before[i + 2]) >>> 0));
      const sum = a + b + c;
      let colour = cold;
      if (sum > COLD) {
        const strength = STRENGTHS[Math.min(STRENGTHS.length - 1, Math.ceil(sum * SCALE))];
        colour = 0xff000000;
        for (let bits = 0, channel = 0; channel < 3; bits += 8, channel++) {
          const mixed = (a * ((hits >> bits) & 255) + b * ((prefetched >> bits) & 255) +
            c * ((misses >> bits) & 255)) / sum;
          colour |= (ground[channel] + (mixed - ground[channel]) * strength) << bits;
        }
      }
      this.pixels[pixel] = colour;
    }
    this.context.putImageData(image, 0, 0);
    this.describe();
  }

  // Prepares an image with a row for each layer that has experts.
  layOut(sizes) {
    this.rows = [];
    let start = 0;
    sizes.forEach((size, layer) => {
      if (size > 0) this.rows.push({ layer, size, start });
      start += 3 * size;
    });
    const width = Math.max(1, ...sizes);
    const height = Math.max(1, this.rows.length);
    [this.canvas.width, this.canvas.height] = [width, height];
    this.context = this.canvas.getContext("2d");
    this.image = this.context.createImageData(width, height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.heat = new Float32Array(start);
    // Index of each pixel's counts; -1 where a layer has no such expert.
    this.places = new Int32Array(width * height).fill(-1);
    this.rows.forEach(({ size, start }, row) => {
      for (let i = 0; i < size; i++) this.places[row * width + i] = start + 3 * i;
    });
  }

  // Colours of the theme, as pixels.
  colours() {
    const style = getComputedStyle(this.canvas);
    return NAMES.map((name) => {
      const rgb = parseInt(style.getPropertyValue(name).trim().slice(1), 16);
      return ((255 << 24) | ((rgb & 255) << 16) | (rgb & 0xff00) | (rgb >> 16)) >>> 0;
    });
  }

  // Says in words what the pointer is on, or what the map has in all.
  describe() {
    const { counts } = this.frame;
    const text = byId("heat-text");
    if (this.pointed) {
      const { row, expert } = this.pointed;
      const [hits, prefetched, misses] = counts.subarray(row.start + 3 * expert);
      text.textContent = `layer ${row.layer}, expert ${expert}: ${hits} in memory, ` +
        `${prefetched} prefetched, ${misses} read`;
      return;
    }
    let [hits, prefetched, misses] = [0, 0, 0];
    for (let i = 0; i < counts.length; i += 3) {
      hits += counts[i];
      prefetched += counts[i + 1];
      misses += counts[i + 2];
    }
    const share = (count) => percent(count / Math.max(1, hits + prefetched + misses));
    const summary = `${this.rows.length} layers; since the start ${share(hits)} in memory, ` +
      `${share(prefetched)} prefetched, ${share(misses)} read`;
    this.canvas.setAttribute("aria-label", `Recent use of experts: ${summary}`);
    text.textContent = summary;
  }
}
