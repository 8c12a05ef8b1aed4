// Small line charts of the last minutes. A point a snapshot, or a point a finished request.

import { style } from "./colours.js";

const POINTS = 240;
const series = new Map();

export function add(name, value, text) {
  const values = series.get(name) ?? [];
  values.push(value);
  if (values.length > POINTS) values.shift();
  series.set(name, values);
  document.getElementById(`now-${name}`).textContent = text ?? value.toFixed(0);
  draw(name, values);
}

function draw(name, values) {
  const canvas = document.getElementById(`chart-${name}`);
  const scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale)) { canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale); }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  const top = Math.max(...values, 1e-9) * 1.1;
  pen.strokeStyle = style("--line");
  pen.strokeRect(0.5, 0.5, width - 1, height - 1);
  pen.strokeStyle = style("--accent");
  pen.lineWidth = 1.5;
  pen.beginPath();
  values.forEach((value, i) => pen.lineTo((i / Math.max(1, POINTS - 1)) * width, height - 2 - (value / top) * (height - 4)));
  pen.stroke();
  pen.fillStyle = style("--quiet");
  pen.font = "10px system-ui";
  pen.fillText(top < 10 ? top.toFixed(1) : top.toFixed(0), 3, 11);
}
