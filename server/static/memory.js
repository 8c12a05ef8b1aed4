// The block map: one cell a KV block, drawn on a canvas; only what changed moves.

import { getJSON } from "./api.js";
import { colour, style } from "./colours.js";

const FLASH_MS = 700;
const canvas = document.getElementById("map");
const pen = canvas.getContext("2d");
const detail = document.getElementById("block");

let live = null;          // the latest snapshot
let holders = new Map();  // block -> [{request, choice}]
let drawn = [];           // what each cell shows, as a string: a change flashes
let flashes = new Map();  // block -> time of its change
let cursor = -1;
let grid = { columns: 1, size: 10, gap: 2 };
let asked = false;        // for a painting at the next frame
let fading = false;       // frames are being painted

export const holdersOf = () => holders;

export function show(snapshot) {
  live = snapshot;
  holders = new Map();
  const cells = [...live.states];
  for (const sequence of live.sequences) {
    const name = ` ${sequence.request}/${sequence.choice}`;
    for (const block of sequence.table) {
      cells[block] += name;
      const list = holders.get(block);
      if (list) list.push(sequence); else holders.set(block, [sequence]);
    }
  }
  layout();
  const now = performance.now();
  if (drawn.length === cells.length) cells.forEach((cell, block) => { if (cell !== drawn[block]) flashes.set(block, now); });
  drawn = cells;
  document.getElementById("memory-line").textContent = line();
  repaint();
}

function line() {
  const { total, free, cached, shared, saved_bytes: saved, host, disk } = live;
  const parts = [`${total} blocks of ${live.block_size} tokens`, `${free} free`, `${cached} of them cached`, `${shared} shared`];
  if (saved) parts.push(`${(saved / 2 ** 20).toFixed(1)} MiB saved by sharing`);
  if (host.total) parts.push(`host ${host.used}/${host.total}`);
  if (disk.total) parts.push(`disk ${disk.used}/${disk.total}`);
  return parts.join(" · ");
}

function layout() {
  const width = canvas.clientWidth;
  const count = live.states.length + live.host.used;
  const size = count > 6000 ? 5 : count > 2500 ? 7 : count > 800 ? 10 : 14;
  const gap = size > 6 ? 2 : 1;
  const columns = Math.max(1, Math.floor(width / (size + gap)));
  const rows = Math.ceil(live.states.length / columns) + (live.host.used ? 1 + Math.ceil(live.host.used / columns) : 0);
  const height = rows * (size + gap);
  const scale = devicePixelRatio || 1;
  grid = { columns, size, gap };
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  pen.setTransform(scale, 0, 0, scale, 0, 0);
}

function repaint() {
  if (!asked) { asked = true; requestAnimationFrame(paint); }
}

function place(block) {
  const step = grid.size + grid.gap;
  return [(block % grid.columns) * step, Math.floor(block / grid.columns) * step];
}

/** Everything: after a snapshot, a move of the cursor, a new size. */
function paint() {
  asked = false;
  const palette = colours();
  pen.clearRect(0, 0, canvas.width, canvas.height);
  for (let block = 0; block < live.states.length; block++) paintCell(block, palette);
  paintHost();
  if (cursor >= 0) {
    const [x, y] = place(cursor);
    pen.strokeStyle = palette.ink;
    pen.lineWidth = 2;
    pen.strokeRect(x - 1, y - 1, grid.size + 2, grid.size + 2);
  }
  if (!fading && flashes.size) { fading = true; requestAnimationFrame(fade); }
}

/** A frame: only the cells that have just changed. */
function fade(now) {
  const palette = colours(), { size } = grid;
  pen.strokeStyle = palette.ink;
  pen.lineWidth = 2;
  for (const [block, since] of flashes) {
    const left = 1 - (now - since) / FLASH_MS;
    if (left <= 0) flashes.delete(block);
    paintCell(block, palette);
    if (left <= 0) continue;
    const [x, y] = place(block);
    pen.globalAlpha = Math.min(1, left);
    pen.strokeRect(x + 1, y + 1, size - 2, size - 2);
    pen.globalAlpha = 1;
  }
  fading = flashes.size > 0;
  if (fading) requestAnimationFrame(fade);
}

/** The colours of the theme. Called at the start of a painting: a canvas that was resized has forgotten its own. */
function colours() {
  filled = "";
  return { free: style("--free"), cached: style("--cached"), ink: style("--ink"), panel: style("--panel") };
}

let filled = "";

/** Choose a colour. Most cells have their neighbour's, and the browser would parse it again for each. */
function fill(style) {
  if (style !== filled) pen.fillStyle = filled = style;
}

function paintCell(block, palette) {
  const { size } = grid, [x, y] = place(block), owners = holders.get(block);
  fill(owners ? colour(owners[0].request) : palette.free);
  pen.fillRect(x, y, size, size);
  if (owners && owners.length > 1) {  // shared: a square of the second holder's colour inside
    const other = owners.find((o) => o.request !== owners[0].request);
    fill(other ? colour(other.request) : palette.panel);
    const inset = Math.max(1, size * 0.3);
    pen.fillRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
  } else if (!owners && live.states[block] === "c") {  // cached: half a cell
    fill(palette.cached);
    pen.beginPath();
    pen.moveTo(x, y + size); pen.lineTo(x + size, y); pen.lineTo(x + size, y + size);
    pen.fill();
  }
}

/** Blocks on the host, outlined, below the device's: swapped-out sequences first, then cached prefixes. */
function paintHost() {
  const swapped = live.sequences.flatMap((s) => Array.from({ length: s.host_blocks }, () => s.request));
  const first = Math.ceil(live.states.length / grid.columns) + 1;
  for (let i = 0; i < live.host.used; i++) {
    const x = (i % grid.columns) * (grid.size + grid.gap), y = (first + Math.floor(i / grid.columns)) * (grid.size + grid.gap);
    pen.strokeStyle = i < swapped.length ? colour(swapped[i]) : style("--cached");
    pen.strokeRect(x + 1, y + 1, grid.size - 2, grid.size - 2);
  }
}

const STATES = { f: "free", c: "cached", u: "used", s: "shared" };

async function describe(block) {
  if (!live || block < 0 || block >= live.states.length) return;
  cursor = block;
  repaint();
  const owners = (holders.get(block) ?? []).map((s) => `${s.request} (choice ${s.choice})`);
  const state = STATES[live.states[block]];
  detail.textContent = `Block ${block}: ${state}${owners.length ? `, of ${owners.join(", ")}` : ""}`;
  if (state === "free") return;
  try {
    const { refs, tokens, text } = await getJSON(`debug/kv/${block}`);
    if (cursor !== block) return;
    detail.textContent += ` · ${refs} reference${refs === 1 ? "" : "s"} · ${tokens.length} tokens: `;
    const code = document.createElement("code");
    code.textContent = JSON.stringify(text);
    detail.append(code);
  } catch (error) {
    if (cursor === block) detail.textContent += ` · ${error.message}`;
  }
}

function at(event) {
  const box = canvas.getBoundingClientRect(), step = grid.size + grid.gap;
  const column = Math.floor((event.clientX - box.left) / step);
  return column < grid.columns ? Math.floor((event.clientY - box.top) / step) * grid.columns + column : -1;
}

let waiting = 0;
canvas.addEventListener("pointermove", (event) => {
  const block = at(event);
  if (block === cursor) return;
  clearTimeout(waiting);
  waiting = setTimeout(() => describe(block), 60);  // not a request a pixel
});
canvas.addEventListener("pointerdown", (event) => describe(at(event)));
canvas.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: grid.columns, ArrowUp: -grid.columns }[event.key];
  if (event.key === "Enter") describe(Math.max(0, cursor));
  else if (step) {
    event.preventDefault();
    describe(Math.max(0, Math.min(live.states.length - 1, cursor + step)));
  }
});
addEventListener("resize", () => { if (live) { layout(); repaint(); } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (live) repaint(); });
