// All points of the map in one draw call of WebGL 2; where there is none, on a canvas.
import { cleared, discs } from "./plane.js";

const VERTEX = `#version 300 es
in vec2 place;
in vec4 colour;
uniform vec2 centre, scale;
uniform float size;
out vec4 shade;
void main() {
  vec2 at = (place - centre) * scale;
  gl_Position = vec4(at.x, -at.y, 0.0, 1.0);
  gl_PointSize = size;
  shade = colour;
}`;
const FRAGMENT = `#version 300 es
precision highp float;
in vec4 shade;
uniform float size;
out vec4 pixel;
void main() {
  float within = clamp((0.5 - length(gl_PointCoord - 0.5)) * size, 0.0, 1.0);
  float alpha = shade.a * within;
  pixel = vec4(shade.rgb * alpha, alpha);
}`;
const FULL = 204, FAINT = 16;

/** Colours of CSS as bytes. @param {string[]} colours */
const bytes = (colours) => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  return colours.map((colour) => {
    if (!context) return [128, 128, 128];
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  });
};

/** @typedef {{ restyle: (colours: string[], visible: (i: number) => boolean) => void, draw: (seen: any) => void }} Painter */

/** Return what draws points below all else in a place, with WebGL 2 or else without.
 * @param {HTMLElement} host @param {number[]} xs @param {number[]} ys
 * @param {number[]} kinds the colour of each, by number; the commonest are drawn first
 * @param {() => void} redraw called where the graphics were taken away and all is to be drawn anew
 * @returns {Painter} */
export const dots = (host, xs, ys, kinds, redraw) => {
  /** @type {Parameters<Painter["restyle"]> | null} */
  let styled = null;
  // A canvas that has had WebGL never has anything else.
  const fresh = () => {
    const canvas = Object.assign(document.createElement("canvas"), { className: "x-dots" });
    host.querySelector(".x-dots")?.remove();
    host.prepend(canvas);
    return canvas;
  };
  const lost = () => {
    painter = flat(fresh(), xs.length, kinds);
    if (styled) painter.restyle(...styled);
    redraw();
  };
  let painter = fast(fresh(), xs, ys, kinds, lost) ?? flat(fresh(), xs.length, kinds);
  return {
    restyle: (...style) => { styled = style; painter.restyle(...style); },
    draw: (seen) => painter.draw(seen),
  };
};

/** @returns {Painter | null} */
const fast = (canvas, xs, ys, kinds, lost) => {
  const gl = canvas.getContext("webgl2", { alpha: true, antialias: false });
  const program = gl && linked(gl);
  if (!gl || !program) return null;
  canvas.addEventListener("webglcontextlost", lost);
  const count = xs.length;
  const seen = new Map();
  kinds.forEach((kind) => seen.set(kind, (seen.get(kind) ?? 0) + 1));
  const order = [...kinds.keys()].sort((a, b) => seen.get(kinds[b]) - seen.get(kinds[a]) || a - b);
  const places = new Float32Array(2 * count), shades = new Uint8Array(4 * count);
  order.forEach((i, at) => places.set([xs[i], ys[i]], 2 * at));
  const buffer = (name, data, width, type, normalised) => {
    const made = gl.createBuffer(), where = gl.getAttribLocation(program, name);
    gl.bindBuffer(gl.ARRAY_BUFFER, made);
    gl.bufferData(gl.ARRAY_BUFFER, data, gl.DYNAMIC_DRAW);
    gl.enableVertexAttribArray(where);
    gl.vertexAttribPointer(where, width, type, normalised, 0, 0);
    return made;
  };
  gl.useProgram(program);
  buffer("place", places, 2, gl.FLOAT, false);
  const shading = buffer("colour", shades, 4, gl.UNSIGNED_BYTE, true);
  gl.enable(gl.BLEND);
  gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
  const uniform = (name) => gl.getUniformLocation(program, name);
  const [centre, scale, size] = [uniform("centre"), uniform("scale"), uniform("size")];
  return {
    restyle: (colours, visible) => {
      const rgb = bytes(colours);
      order.forEach((i, at) => shades.set([...rgb[kinds[i]], visible(i) ? FULL : FAINT], 4 * at));
      gl.bindBuffer(gl.ARRAY_BUFFER, shading);
      gl.bufferSubData(gl.ARRAY_BUFFER, 0, shades);
    },
    draw: ({ view, size: wide }) => {
      const ratio = devicePixelRatio || 1;
      const [width, height] = [canvas.clientWidth, canvas.clientHeight];
      if (canvas.width !== Math.floor(width * ratio) || canvas.height !== Math.floor(height * ratio)) {
        canvas.width = Math.floor(width * ratio);
        canvas.height = Math.floor(height * ratio);
      }
      gl.viewport(0, 0, canvas.width, canvas.height);
      gl.clearColor(0, 0, 0, 0);
      gl.clear(gl.COLOR_BUFFER_BIT);
      gl.uniform2f(centre, view.x, view.y);
      gl.uniform2f(scale, (2 * view.scale) / width, (2 * view.scale) / height);
      gl.uniform1f(size, (2 * wide() + 1) * ratio);
      gl.drawArrays(gl.POINTS, 0, count);
    },
  };
};

const linked = (gl) => {
  const program = gl.createProgram();
  for (const [type, text] of [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, FRAGMENT]]) {
    const shader = gl.createShader(type);
    gl.shaderSource(shader, text);
    gl.compileShader(shader);
    gl.attachShader(program, shader);
  }
  gl.linkProgram(program);
  return gl.getProgramParameter(program, gl.LINK_STATUS) ? program : null;
};

/** @returns {Painter} */
const flat = (canvas, count, kinds) => {
  /** @type {string[]} */
  let colours = [];
  let visible = (_) => true;
  return {
    restyle: (given, shown) => { colours = given; visible = shown; },
    draw: (seen) => discs(cleared(canvas), canvas, seen, { count, visible, colour: (i) => colours[kinds[i]], size: seen.size() }),
  };
};
