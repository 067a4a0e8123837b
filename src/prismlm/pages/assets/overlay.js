// What lies over the points of the map: the lasso, the path of the last answer, and names.
import { boxOf, cleared, labelled, plaque, ringed } from "./plane.js";

/** @param {import("./map.js").Ui} ui */
export const overlaid = (ui) => {
  const { canvas, seen, data, dark, line, hovered } = ui, { chosen, pathed, trail } = ui.state.value;
  const context = cleared(canvas);
  if (line) outlined(context, line.map(([x, y]) => seen.at(x, y)), dark.matches);
  if (pathed) trailed(context, ui, trail);
  else labelled(context, canvas, seen, data.regions, dark.matches);
  for (const i of new Set([chosen, hovered])) {
    if (i >= 0) ringed(context, canvas, seen.place(i), seen.size(), data.names[i], dark.matches);
  }
};

const traced = (context, points) => {
  context.beginPath();
  points.forEach(([px, py], i) => (i ? context.lineTo(px, py) : context.moveTo(px, py)));
};

const outlined = (context, points, dark) => {
  traced(context, points);
  context.closePath();
  context.setLineDash([5, 4]);
  context.lineWidth = 1.5;
  context.strokeStyle = dark ? "#fff" : "#111";
  context.fillStyle = dark ? "#ffffff14" : "#0000000f";
  context.fill();
  context.stroke();
  context.setLineDash([]);
};

const trailed = (context, { canvas, seen, dark }, trail) => {
  const points = trail.map(({ id }) => seen.place(id));
  context.lineWidth = 1.6;
  context.strokeStyle = context.fillStyle = dark.matches ? "#93b4ff" : "#1f4fbf";
  // What was read last stands out most.
  points.forEach((point, i) => {
    context.globalAlpha = 0.25 + (0.65 * (i + 1)) / points.length;
    if (i) { traced(context, [points[i - 1], point]); context.stroke(); }
    context.beginPath();
    context.arc(point[0], point[1], 3.5, 0, 7);
    context.fill();
  });
  context.globalAlpha = 1;
  const taken = [];
  trail.forEach(({ text }, i) => {
    const [px, py] = points[i], box = boxOf(context, canvas, text, px, py - 4);
    const [left, top, wide, high] = box;
    const off = px < 0 || py < 0 || px > canvas.clientWidth || py > canvas.clientHeight;
    if (off || taken.some(([l, t, w, h]) => left < l + w && l < left + wide && top < t + h && t < top + high)) return;
    taken.push(box);
    plaque(context, text, box, dark.matches);
  });
};
