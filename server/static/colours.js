// One hue for each request, the same on the map, in the list and beside the answers.

const colours = new Map();
let next = 0;

export function colour(request) {
  let found = colours.get(request);
  if (!found) {
    const hue = (212 + 137.508 * next++) % 360;  // the golden angle keeps neighbours apart
    found = `hsl(${hue.toFixed(0)} 60% 55%)`;
    colours.set(request, found);
    if (colours.size > 500) colours.delete(colours.keys().next().value);
  }
  return found;
}

export const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
