// A plane of points to look around in: where it is seen from, gestures, keys, what is nearest, and how it is drawn.
const REACH = 18, ONE_PRESS = 1.4;

/** A canvas, the points on it, where it is seen from, and the gesture that is under way.
 * `on` says which points are visible and which is chosen, and is told what is hovered and chosen, and to draw anew;
 * where its `take` returns a gesture for a pointer that goes down, moves and end are that gesture's.
 * @typedef {{ canvas: HTMLCanvasElement, xs: number[], ys: number[], on: any, view: { x: number, y: number, scale: number },
 *   pointers: Map<number, PointerEvent>, moved: boolean, spread: number, taken: any }} Plane */

/** Where a place of the plane is on the canvas. @param {Plane} plane @returns {[number, number]} */
const onCanvas = ({ canvas, view }, x, y) =>
  [(x - view.x) * view.scale + canvas.clientWidth / 2, (y - view.y) * view.scale + canvas.clientHeight / 2];
/** @param {Plane} plane */
const onPlane = ({ canvas, view }, px, py) =>
  [(px - canvas.clientWidth / 2) / view.scale + view.x, (py - canvas.clientHeight / 2) / view.scale + view.y];
/** @returns {[number, number]} */
const local = (canvas, event) => {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
};

const edges = (values, cut) => {
  const sorted = Float64Array.from(values).sort();
  return [sorted[cut], sorted[sorted.length - 1 - cut]];
};
/** @param {Plane} plane */
const fitted = ({ canvas, xs, ys, view, on }) => {
  const seen = (cut) => {
    const [[left, right], [top, bottom]] = [edges(xs, cut), edges(ys, cut)];
    const scale = 0.94 * Math.min(canvas.clientWidth / (right - left || 1), canvas.clientHeight / (bottom - top || 1));
    return { x: (left + right) / 2, y: (top + bottom) / 2, scale };
  };
  // A handful so far from all others that these would be half as large or less are reached by moving.
  const all = seen(0), most = seen(Math.floor(xs.length / 200));
  Object.assign(view, 2 * all.scale > most.scale ? all : most);
  on.redraw();
};
/** Look from nearer or further; what is at a place of the canvas stays there. @param {Plane} plane */
const zoom = (plane, factor, px = plane.canvas.clientWidth / 2, py = plane.canvas.clientHeight / 2) => {
  const { canvas, view } = plane, [x, y] = onPlane(plane, px, py);
  view.scale *= factor;
  view.x = x - (px - canvas.clientWidth / 2) / view.scale;
  view.y = y - (py - canvas.clientHeight / 2) / view.scale;
  plane.on.redraw();
};

/** The visible point that a pointer is at, or -1. @param {Plane} plane */
const nearest = (plane, event) => {
  const { canvas, xs, ys, on, view } = plane, [x, y] = onPlane(plane, ...local(canvas, event));
  let best = -1, least = (REACH / view.scale) ** 2;
  for (let i = 0; i < xs.length; i++) {
    const far = (xs[i] - x) ** 2 + (ys[i] - y) ** 2;
    if (far < least && on.visible(i)) { least = far; best = i; }
  }
  return best;
};
/** The nearest of those that lie more in a direction than beside it, or -1. @param {Plane} plane */
const towards = ({ xs, ys, on }, from, [right, down]) => {
  let best = -1, least = Infinity;
  for (let i = 0; i < xs.length; i++) {
    const along = (xs[i] - xs[from]) * right + (ys[i] - ys[from]) * down;
    const aside = Math.abs((xs[i] - xs[from]) * down) + Math.abs((ys[i] - ys[from]) * right);
    if (along > 0 && aside <= along && along + aside < least && on.visible(i)) { least = along + aside; best = i; }
  }
  return best;
};

/** @param {Plane} plane */
const pressed = (plane, event) => {
  plane.canvas.setPointerCapture(event.pointerId);
  plane.pointers.set(event.pointerId, event);
  plane.taken = plane.pointers.size === 1 ? plane.on.take?.(event) ?? null : null;
  plane.taken?.move(...local(plane.canvas, event));
  plane.moved = false;
  plane.spread = 0;
};
/** Move a gesture on: one that was taken, the plane under one pointer, or the zoom between two. @param {Plane} plane */
const dragged = (plane, event) => {
  const { canvas, view, on, pointers } = plane, before = pointers.get(event.pointerId);
  if (!before) { on.hover(nearest(plane, event)); return; }
  pointers.set(event.pointerId, event);
  if (plane.taken) { plane.taken.move(...local(canvas, event)); return; }
  if (pointers.size === 1) {
    const [dx, dy] = [event.clientX - before.clientX, event.clientY - before.clientY];
    plane.moved ||= Math.abs(dx) + Math.abs(dy) > 2;
    view.x -= dx / view.scale;
    view.y -= dy / view.scale;
    on.redraw();
    return;
  }
  plane.moved = true;
  const [[ax, ay], [bx, by]] = [...pointers.values()].map((one) => local(canvas, one)), now = Math.hypot(ax - bx, ay - by);
  if (plane.spread) zoom(plane, now / plane.spread, (ax + bx) / 2, (ay + by) / 2);
  plane.spread = now;
};
/** End a gesture; without a move it chooses. @param {Plane} plane */
const released = (plane, event) => {
  if (!plane.pointers.delete(event.pointerId)) return;
  plane.spread = 0;
  if (plane.taken) { plane.taken.end(event.type === "pointerup"); plane.taken = null; return; }
  if (plane.moved || event.type !== "pointerup") return;
  const i = nearest(plane, event);
  if (i >= 0) plane.on.choose(i);
};
/** @param {Plane} plane */
const keyed = (plane, event) => {
  const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  const larger = { "+": ONE_PRESS, "=": ONE_PRESS, "-": 1 / ONE_PRESS }[event.key];
  if (event.altKey || event.ctrlKey || event.metaKey || !(way || larger || event.key === "0")) return;
  event.preventDefault();
  if (larger) { zoom(plane, larger); return; }
  if (!way) { fitted(plane); return; }
  const next = towards(plane, Math.max(plane.on.chosen(), 0), way);
  if (next >= 0) plane.on.choose(next);
};

/** Let a canvas be looked around in; return what tells where points are on it.
 * @param {HTMLCanvasElement} canvas @param {number[]} xs @param {number[]} ys @param {Plane["on"]} on */
export const plane = (canvas, xs, ys, on) => {
  /** @type {Plane} */
  const own = { canvas, xs, ys, on, view: { x: 0, y: 0, scale: 1 }, pointers: new Map(), moved: false, spread: 0, taken: null };
  canvas.addEventListener("pointerdown", (event) => pressed(own, event));
  canvas.addEventListener("pointermove", (event) => dragged(own, event));
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => released(own, event));
  canvas.addEventListener("pointerleave", () => on.hover(-1));
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(own, Math.exp(-event.deltaY / 400), ...local(canvas, event));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => keyed(own, event));
  return {
    view: own.view,
    at: (x, y) => onCanvas(own, x, y),
    place: (i) => onCanvas(own, xs[i], ys[i]),
    inverse: (px, py) => onPlane(own, px, py),
    size: () => Math.max(1.6, Math.min(6, own.view.scale / 28)),
    fit: () => fitted(own),
  };
};

/** A canvas cleared, of a size on the page and as sharp as the screen, and its context, in which lengths are the page's.
 * @param {HTMLCanvasElement} canvas */
export const cleared = (canvas, width = canvas.clientWidth, height = canvas.clientHeight) => {
  const ratio = devicePixelRatio || 1, context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
};

/** Return what draws the points from an image of them, which is repainted only when the view, the visible points or the size have changed.
 * @param {HTMLCanvasElement} canvas @param {ReturnType<typeof plane>} seen @param {number[]} xs @param {number[]} ys
 * @param {number[]} kinds @param {string[]} colours */
export const painter = (canvas, seen, xs, ys, kinds, colours) => {
  const image = document.createElement("canvas");
  /** @type {unknown[]} */
  let last = [];
  return (/** @type {CanvasRenderingContext2D} */ context, /** @type {boolean[]} */ visible) => {
    const { clientWidth, clientHeight } = canvas, { x, y, scale } = seen.view;
    const now = [visible, clientWidth, clientHeight, devicePixelRatio, x, y, scale];
    if (now.some((value, i) => value !== last[i])) {
      last = now;
      const [left, top] = seen.at(0, 0), size = seen.size();
      // Null beyond the edges. Reading the canvas's size at every point would be slow.
      const place = (i) => {
        const px = left + xs[i] * scale, py = top + ys[i] * scale;
        return px > -9 && py > -9 && px < clientWidth + 9 && py < clientHeight + 9 ? [px, py] : null;
      };
      discs(cleared(image, clientWidth, clientHeight), place, size, kinds, colours, visible);
    }
    context.save();
    context.resetTransform();
    context.drawImage(image, 0, 0);
    context.restore();
  };
};

/** Every point as a disc in the colour of its kind, those that are not visible faint and below; the commonest kind is drawn first.
 * Each is a path of its own, and a whole turn: one path of many discs, or a longer arc, takes twice as long.
 * @param {CanvasRenderingContext2D} context @param {(i: number) => number[] | null} place @param {number} size
 * @param {number[]} kinds @param {string[]} colours @param {boolean[]} visible */
const discs = (context, place, size, kinds, colours, visible) => {
  const layers = Map.groupBy(kinds.keys(), (i) => (visible[i] ? kinds[i] : kinds[i] - colours.length));
  for (const [layer, points] of [...layers].sort((a, b) => Number(a[0] >= 0) - Number(b[0] >= 0) || b[1].length - a[1].length)) {
    context.globalAlpha = layer < 0 ? 0.07 : 0.8;
    context.fillStyle = colours[layer < 0 ? layer + colours.length : layer];
    for (const i of points) {
      const at = place(i);
      if (!at) continue;
      context.beginPath();
      context.arc(at[0], at[1], size, 0, 2 * Math.PI);
      context.fill();
    }
  }
};

/** A ring around a point, and its name above, inside the canvas. */
export const ringed = (context, canvas, [x, y], size, text, dark) => {
  const [paper, ink] = dark ? ["#000c", "#fff"] : ["#fffd", "#111"];
  context.lineWidth = 2;
  context.strokeStyle = ink;
  context.beginPath();
  context.arc(x, y, size + 4, 0, 7);
  context.stroke();
  context.font = "13px system-ui, sans-serif";
  const wide = context.measureText(text).width + 12, top = Math.max(2, y - size - 30);
  const left = Math.max(2, Math.min(canvas.clientWidth - wide - 2, x - wide / 2));
  context.fillStyle = paper;
  context.fillRect(left, top, wide, 21);
  context.fillStyle = ink;
  context.fillText(text, left + 6, top + 15);
};

/** The names of regions of the plane, [x, y, name] by weight, where they do not overlap. */
export const labelled = (context, canvas, seen, regions, dark) => {
  const taken = [];
  context.font = "600 13px system-ui, sans-serif";
  context.textAlign = "center";
  context.lineWidth = 4;
  context.lineJoin = "round";
  context.strokeStyle = dark ? "#181b21" : "#fffefb";
  context.fillStyle = dark ? "#fff" : "#111";
  for (const [x, y, name] of regions) {
    const [px, py] = seen.at(x, y), half = context.measureText(name).width / 2 + 5;
    const outside = px < half || py < 12 || px > canvas.clientWidth - half || py > canvas.clientHeight - 12;
    if (outside || taken.some(([a, b, h]) => Math.abs(px - a) < half + h && Math.abs(py - b) < 19)) continue;
    taken.push([px, py, half]);
    context.strokeText(name, px, py + 4);
    context.fillText(name, px, py + 4);
  }
  context.textAlign = "start";
};
