// One hue for each request, the same on the map, in the list and beside the answers.

const hues = new Map();
let next = 0;

export function colour(request) {
  if (!hues.has(request)) {
    hues.set(request, (212 + 137.508 * next++) % 360);  // the golden angle keeps neighbours apart
    if (hues.size > 500) hues.delete(hues.keys().next().value);
  }
  return `hsl(${hues.get(request).toFixed(0)} 60% 55%)`;
}

export const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
