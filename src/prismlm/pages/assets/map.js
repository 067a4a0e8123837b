(() => {
  "use strict";
  const root = document.querySelector(".m-map");
  const { categories, prototypes } = JSON.parse(root.querySelector(".p-data").textContent);
  const canvas = root.querySelector(".m-canvas"), card = root.querySelector(".m-card");
  const search = root.querySelector(".m-search"), count = root.querySelector(".m-count");
  const context = canvas.getContext("2d");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const shown = new Set(categories.keys());
  const texts = prototypes.map((p, i) =>
    `#${i} ${p.name} ${p.about} ${p.tokens.map((t) => t[0]).join(" ")} ${p.contexts.map((c) => c.slice(0, 3).join("")).join(" ")}`.toLowerCase());
  let found = null, chosen = -1, hovered = -1, drawn = false;
  // x and y of a prototype are at (x - view.x) * view.scale + half of the canvas.
  const view = { x: 0, y: 0, scale: 1 };

  const colour = (category) => {
    if (categories[category] === "Grammar / Scaffold" || categories[category] === "no label") return dark.matches ? "#70747d" : "#a9a69d";
    const hue = (category * 137.5 + 20) % 360;
    return dark.matches ? `oklch(.74 .14 ${hue})` : `oklch(.58 .15 ${hue})`;
  };
  const element = (name, text, kind) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  // Direction marks in corpus text must not reorder the page.
  const isolated = (text, kind) => element("bdi", text, kind);
  const visible = (i) => shown.has(prototypes[i].category) && (found === null || found.has(i));
  const place = (p) => [(p.x - view.x) * view.scale + canvas.clientWidth / 2, (p.y - view.y) * view.scale + canvas.clientHeight / 2];

  function fit() {
    // A handful far from all others would leave the rest a speck: they are reached by moving.
    const edges = (values) => { values.sort((a, b) => a - b); const cut = Math.floor(values.length / 200); return [values[cut], values.at(-1 - cut)]; };
    const [xs, ys] = [edges(prototypes.map((p) => p.x)), edges(prototypes.map((p) => p.y))];
    const low = [xs[0], ys[0]], high = [xs[1], ys[1]];
    view.x = (low[0] + high[0]) / 2;
    view.y = (low[1] + high[1]) / 2;
    view.scale = 0.94 * Math.min(canvas.clientWidth / (high[0] - low[0] || 1), canvas.clientHeight / (high[1] - low[1] || 1));
  }

  function draw() {
    drawn = false;
    const ratio = devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = canvas.clientHeight * ratio;
    context.scale(ratio, ratio);
    const size = Math.max(1.6, Math.min(6, view.scale / 28));
    const colours = categories.map((_, c) => colour(c));
    for (const those of [false, true]) {
      prototypes.forEach((p, i) => {
        if (visible(i) !== those) return;
        const [x, y] = place(p);
        if (x < -9 || y < -9 || x > canvas.clientWidth + 9 || y > canvas.clientHeight + 9) return;
        context.globalAlpha = those ? 0.8 : 0.07;
        context.fillStyle = colours[p.category];
        context.beginPath();
        context.arc(x, y, those && found !== null ? size + 1 : size, 0, 7);
        context.fill();
      });
    }
    context.globalAlpha = 1;
    for (const i of new Set([chosen, hovered])) {
      if (i < 0) continue;
      const [x, y] = place(prototypes[i]);
      context.lineWidth = 2;
      context.strokeStyle = dark.matches ? "#fff" : "#111";
      context.beginPath();
      context.arc(x, y, size + 4, 0, 7);
      context.stroke();
      label(prototypes[i].name, x, y - size - 10);
    }
  }
  function label(text, x, y) {
    context.font = "13px system-ui, sans-serif";
    const wide = context.measureText(text).width + 12;
    const left = Math.max(2, Math.min(canvas.clientWidth - wide - 2, x - wide / 2)), top = Math.max(2, y - 20);
    context.fillStyle = dark.matches ? "#000c" : "#fffd";
    context.fillRect(left, top, wide, 21);
    context.fillStyle = dark.matches ? "#fff" : "#111";
    context.fillText(text, left + 6, top + 15);
  }
  const redraw = () => { if (!drawn) { drawn = true; requestAnimationFrame(draw); } };

  function nearest(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    let best = -1, least = 18 * 18;
    prototypes.forEach((p, i) => {
      if (!visible(i)) return;
      const [px, py] = place(p), far = (px - x) ** 2 + (py - y) ** 2;
      if (far < least) { least = far; best = i; }
    });
    return best;
  }

  function choose(i) {
    chosen = i;
    history.replaceState(null, "", `#${i}`);
    const p = prototypes[i];
    card.replaceChildren(element("h2"), element("p", undefined, "m-facts"));
    card.firstChild.append(isolated(p.name));
    const facts = [`#${i}`, categories[p.category], p.role, p.tags.join(", "), `${(100 * p.usage).toPrecision(2)} % of tokens use it`];
    if (p.score !== null) facts.push(`name tells its passages from others: ${Math.round(100 * p.score)} %`);
    card.lastChild.textContent = facts.filter(Boolean).join(" · ");
    if (p.about) card.append(element("p", undefined, "m-about")), card.lastChild.append(isolated(p.about));
    card.append(element("h3", "Tokens it raises most, in logits"));
    const tokens = element("ul", undefined, "m-tokens");
    for (const [token, value] of p.tokens) {
      const row = element("li");
      row.append(isolated(token.replaceAll("\n", "↵").replace(/^ /, "·")), element("span", value.toFixed(2), "p-number"));
      tokens.append(row);
    }
    card.append(tokens);
    if (p.contexts.length) card.append(element("h3", "Nearest training text; it fires on the marked token"));
    const places = element("ul");
    for (const [before, token, after, document_] of p.contexts) {
      const row = element("li", undefined, "m-context"), text = isolated("…" + before);
      text.append(element("mark", token), after + "…");
      row.append(text, element("small", document_));
      places.append(row);
    }
    card.append(places);
    redraw();
  }

  function list() {
    const those = prototypes.map((_, i) => i).filter(visible);
    count.textContent = `${those.length.toLocaleString("en")} of ${prototypes.length.toLocaleString("en")}`;
    if (found === null) return;
    const results = element("ul", undefined, "m-results");
    those.sort((a, b) => prototypes[b].usage - prototypes[a].usage);
    for (const i of those.slice(0, 100)) {
      const row = element("li"), button = element("button");
      button.append(isolated(prototypes[i].name));
      button.addEventListener("click", () => choose(i));
      row.append(button);
      results.append(row);
    }
    card.replaceChildren(element("h3", those.length > 100 ? "The 100 most used of those found" : "Found"), results);
  }

  categories.forEach((name, c) => {
    const key = element("button", undefined, "m-key"), dot = element("i");
    const share = prototypes.filter((p) => p.category === c).length / prototypes.length;
    key.type = "button";
    key.setAttribute("aria-pressed", "true");
    key.append(dot, isolated(name), element("span", `${(100 * share).toFixed(1)} %`));
    key.title = "click to hide or show, double-click to show it alone";
    const paint = () => { dot.style.background = colour(c); };
    paint();
    dark.addEventListener("change", paint);
    const update = () => {
      [...key.parentNode.children].forEach((one, i) => one.setAttribute("aria-pressed", String(shown.has(i))));
      list();
      redraw();
    };
    key.addEventListener("click", () => { shown.has(c) ? shown.delete(c) : shown.add(c); update(); });
    key.addEventListener("dblclick", () => { shown.clear(); shown.add(c); update(); });
    root.querySelector(".m-legend").append(key);
  });

  search.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    found = words.length ? new Set(texts.keys().filter((i) => words.every((w) => texts[i].includes(w)))) : null;
    list();
    if (found === null && chosen >= 0) choose(chosen);
    redraw();
  });

  const pointers = new Map();
  let moved = false, spread = 0;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, event);
    moved = false;
    spread = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) {
      const i = nearest(event);
      if (i !== hovered) { hovered = i; redraw(); }
      return;
    }
    pointers.set(event.pointerId, event);
    if (pointers.size === 1) {
      const [dx, dy] = [event.clientX - before.clientX, event.clientY - before.clientY];
      moved ||= Math.abs(dx) + Math.abs(dy) > 2;
      view.x -= dx / view.scale;
      view.y -= dy / view.scale;
    } else {
      moved = true;
      const [a, b] = [...pointers.values()], now = Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
      if (spread) view.scale *= now / spread;
      spread = now;
    }
    redraw();
  });
  const up = (event) => {
    if (pointers.delete(event.pointerId) && !moved && event.type === "pointerup") {
      const i = nearest(event);
      if (i >= 0) choose(i);
    }
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = canvas.getBoundingClientRect(), factor = Math.exp(-event.deltaY / 400);
    const x = event.clientX - box.left - canvas.clientWidth / 2, y = event.clientY - box.top - canvas.clientHeight / 2;
    view.x += x / view.scale - x / (view.scale * factor);
    view.y += y / view.scale - y / (view.scale * factor);
    view.scale *= factor;
    redraw();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!way) return;
    event.preventDefault();
    const from = prototypes[Math.max(chosen, 0)];
    let best = -1, least = Infinity;
    prototypes.forEach((p, i) => {
      const along = (p.x - from.x) * way[0] + (p.y - from.y) * way[1];
      const aside = Math.abs((p.x - from.x) * way[1]) + Math.abs((p.y - from.y) * way[0]);
      if (along > 0 && aside <= along && visible(i) && along + aside < least) { least = along + aside; best = i; }
    });
    if (best >= 0) choose(best);
  });
  dark.addEventListener("change", redraw);
  addEventListener("resize", redraw);

  fit();
  list();
  const linked = Number.parseInt(location.hash.slice(1), 10);
  choose(linked >= 0 && linked < prototypes.length ? linked : prototypes.reduce((best, p, i) => (p.usage > prototypes[best].usage ? i : best), 0));
})();
