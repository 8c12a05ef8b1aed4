// Small line charts of the last minutes. A point a snapshot, or a point a finished request.

import { style } from "./colours.js";

const POINTS = 240;
const LEAST = { pool: 100 / 1.1, tokens: 10, queue: 4 };  // height of the scale at least, so that nothing looks like something
const series = new Map();

export function add(name, value, text) {
  const values = series.get(name) ?? [];
  values.push(value);
  if (values.length > POINTS) values.shift();
  series.set(name, values);
  document.getElementById(`now-${name}`).textContent = text ?? value.toFixed(0);
  draw(name);
}

/** Before there is a point: the frame, and the reason. */
export function draw(name) {
  const values = series.get(name) ?? [];
  const canvas = document.getElementById(`chart-${name}`);
  const scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale)) { canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale); }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  const top = Math.max(...values, LEAST[name] ?? 1e-9) * 1.1;
  pen.strokeStyle = style("--line");
  pen.strokeRect(0.5, 0.5, width - 1, height - 1);
  pen.fillStyle = style("--quiet");
  pen.font = "10px system-ui";
  if (!values.length) { pen.fillText("when the first request has ended", 6, height / 2 + 4); return; }
  pen.strokeStyle = pen.fillStyle = style("--accent");
  pen.lineWidth = 1.5;
  const x = (i) => width - 2 - ((values.length - 1 - i) / (POINTS - 1)) * (width - 4);  // the newest at the right
  const y = (value) => height - 3 - (value / top) * (height - 6);
  pen.beginPath();
  values.forEach((value, i) => pen.lineTo(x(i), y(value)));
  pen.stroke();
  if (values.length === 1) pen.fillRect(x(0) - 1, y(values[0]) - 1, 3, 3);  // a line needs two
  const label = top < 10 ? top.toFixed(1) : top.toFixed(0);
  pen.fillStyle = style("--panel");
  pen.fillRect(2, 2, pen.measureText(label).width + 4, 12);
  pen.fillStyle = style("--quiet");
  pen.fillText(label, 4, 12);
}

for (const name of ["ttft", "tpot"]) draw(name);
