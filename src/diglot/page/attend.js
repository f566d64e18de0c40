"use strict";
// One sentence, every head. The numbers come deflated in #data (attend.py packs them); text is only ever set as text.

const data = JSON.parse(document.getElementById("data").textContent);
const by = (id) => document.getElementById(id);
const isTraining = data.items[0].update !== null;
const PARTS = {
  encoder: ["Encoder", "The source looks at itself"],
  decoder: ["Decoder", "The translation looks at what is written of it"],
  cross: ["Cross attention", "The translation looks at the source"],
};
const UNIT = 2 ** 24 - 1; // weights are whole multiples of 1 / UNIT

// Lightness changes in one direction along each ramp, so that it is read without telling hues apart.
const RAMPS = {
  light: ["#ffffff", "#d6e8f5", "#93c3e6", "#4a93cc", "#155f9e", "#04274d"],
  dark: ["#10151b", "#1a3550", "#25618c", "#4a9bb8", "#a5d3b6", "#fff2b3"],
};
const SIGNED_RAMPS = {
  light: ["#7f3b08", "#c9721a", "#f3c58c", "#ffffff", "#9ec9ea", "#2f7fc1", "#053061"],
  dark: ["#ffd7a3", "#d98a35", "#6b3d10", "#10151b", "#1d486f", "#4a94cf", "#cfe8ff"],
};

const state = {
  item: 0,
  part: "cross",
  heads: [], // [layer, head], counted from 0
  unit: "pieces",
  combine: "mean",
  scale: "root",
  zoom: 1,
  row: null, // what is pointed at
  column: null,
  query: "",
};

// ------------------------------------------------------------------ numbers

const unpacked = new Map();

async function inflate(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function unpack(number) {
  if (unpacked.has(number)) return;
  const planes = await inflate(data.blocks[number]);
  const n = planes.length / 3;
  const values = new Float32Array(n);
  for (let i = 0; i < n; i++) values[i] = ((planes[i] << 16) | (planes[n + i] << 8) | planes[2 * n + i]) / UNIT;
  unpacked.set(number, values);
}

async function unpackSigned(number) {
  if (number !== null && !unpacked.has(number)) unpacked.set(number, new Float32Array((await inflate(data.blocks[number])).buffer));
}

async function unpackItem(item) {
  for (const part of Object.keys(PARTS)) await unpack(item[part]);
  for (const number of Object.values(item.attribution)) await unpackSigned(number);
}

function pieces(item, part) {
  const rows = part === "encoder" ? item.src : item.tgt;
  const columns = part === "decoder" ? [data.start, ...item.tgt.slice(0, -1)] : item.src;
  return { rows, columns };
}

// Of each word, its first piece and the one after its last; what is in no word, as the end, stands alone.
function wordSpans(number, spans, shift) {
  const found = [];
  const starts = new Map(spans.map(([start, end]) => [start + shift, end + shift]));
  for (let i = 0; i < number; ) {
    const end = Math.min(starts.get(i) ?? i + 1, number);
    found.push([i, end]);
    i = end;
  }
  return found;
}

// What pieces spell: bytes that stand for a character become it, and a word loses the mark of the space before it.
function spell(names) {
  let text = "";
  let bytes = [];
  for (const name of [...names, ""]) {
    const byte = /^<0x([0-9A-F]{2})>$/.exec(name);
    if (byte) bytes.push(parseInt(byte[1], 16));
    else {
      if (bytes.length) text += names.length > 1 || (bytes[0] > 32 && bytes[0] < 127) ? new TextDecoder().decode(Uint8Array.from(bytes)) : names[0];
      bytes = [];
      text += name;
    }
  }
  return state.unit === "words" ? text.replace(/^▁/, "").replaceAll("▁", " ") || text : text;
}

// The rows and columns that are shown: their names and the pieces that each is made of.
function axes(item, part) {
  const all = pieces(item, part);
  const sides = { rows: part === "encoder" ? "src" : "tgt", columns: part === "decoder" ? "tgt" : "src" };
  const made = {};
  for (const side of ["rows", "columns"]) {
    const names = all[side];
    const shift = part === "decoder" && side === "columns" ? 1 : 0;
    const spans = state.unit === "words" ? wordSpans(names.length, item.words[sides[side]], shift) : names.map((_, i) => [i, i + 1]);
    made[side] = { spans, names: spans.map(([start, end]) => spell(names.slice(start, end))), width: names.length };
  }
  return made;
}

// From pieces to what is shown: a word looks as its pieces do on average, and is looked at as all of them are.
function gather(values, { rows, columns }, isMean) {
  const made = new Float32Array(rows.spans.length * columns.spans.length);
  rows.spans.forEach(([top, bottom], i) => {
    columns.spans.forEach(([left, right], j) => {
      let sum = 0;
      for (let r = top; r < bottom; r++) for (let c = left; c < right; c++) sum += values[r * columns.width + c];
      made[i * columns.spans.length + j] = isMean ? sum / (bottom - top) : sum;
    });
  });
  return made;
}

function headValues(item, part, layer, head) {
  const { rows, columns } = pieces(item, part);
  const size = rows.length * columns.length;
  const start = (layer * data.shapes[part][1] + head) * size;
  return unpacked.get(item[part]).subarray(start, start + size);
}

function shownValues(item, shown) {
  const each = state.heads.map(([layer, head]) => gather(headValues(item, state.part, layer, head), shown, true));
  if (each.length === 1) return each[0];
  const made = new Float32Array(each[0].length);
  for (let i = 0; i < made.length; i++) {
    for (const one of each) made[i] = state.combine === "max" ? Math.max(made[i], one[i]) : made[i] + one[i] / each.length;
  }
  return made;
}

// ------------------------------------------------------------------ colours

const darkByDefault = matchMedia("(prefers-color-scheme: dark)");
const theme = () => document.documentElement.dataset.theme ?? (darkByDefault.matches ? "dark" : "light");
const tables = new Map();

function rgb(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

function table(ramp) {
  if (!tables.has(ramp)) {
    const stops = ramp.map(rgb);
    const made = new Uint32Array(256);
    for (let i = 0; i < 256; i++) {
      const at = (i / 255) * (stops.length - 1);
      const k = Math.min(Math.floor(at), stops.length - 2);
      const [r, g, b] = [0, 1, 2].map((c) => Math.round(stops[k][c] + (at - k) * (stops[k + 1][c] - stops[k][c])));
      made[i] = (255 << 24) | (b << 16) | (g << 8) | r;
    }
    tables.set(ramp, made);
  }
  return tables.get(ramp);
}

function css(name) {
  const probe = by("title");
  probe.style.setProperty("outline-color", `var(${name})`);
  const found = getComputedStyle(probe).outlineColor;
  probe.style.removeProperty("outline-color");
  return found;
}

function largest(values) {
  let most = 0;
  for (const value of values) most = Math.max(most, Math.abs(value));
  return most || 1;
}

// A picture of one pixel a number.
function paint(canvas, values, width, top) {
  const colours = table(RAMPS[theme()]);
  const isRoot = state.scale === "root";
  return paintWith(canvas, values, width, (value) => {
    const share = Math.min(1, value / top);
    return colours[Math.round(255 * (isRoot ? Math.sqrt(share) : share))];
  });
}

function paintWith(canvas, values, width, colour) {
  const height = values.length / width;
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < values.length; i++) pixels[i] = colour(values[i], i);
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// ------------------------------------------------------------------ all heads

const heads = []; // { part, layer, head, button, canvas }

function buildOverview() {
  const numRows = Object.values(data.shapes).reduce((sum, [numLayers]) => sum + numLayers, 0);
  by("parts").style.setProperty("--layers", numRows);
  for (const [part, [name, says]] of Object.entries(PARTS)) {
    const [numLayers, numHeads] = data.shapes[part];
    const section = add(by("parts"), "section", { className: "part" });
    add(section, "h2", { textContent: name });
    add(section, "p", { textContent: says });
    const layers = add(section, "div", { className: "layers" });
    for (let layer = 0; layer < numLayers; layer++) {
      const line = add(layers, "div", { className: "layer", role: "group" });
      line.setAttribute("aria-label", `${name}, layer ${layer + 1}`);
      line.style.setProperty("--heads", numHeads);
      line.style.setProperty("--thumb", `${Math.min(4.6, 22 / numHeads)}rem`);
      const all = add(line, "button", { type: "button", textContent: `${layer + 1}`, title: `All heads of layer ${layer + 1}` });
      all.setAttribute("aria-label", `${name}, all heads of layer ${layer + 1}`);
      all.addEventListener("click", () => select(part, Array.from({ length: numHeads }, (_, head) => [layer, head])));
      for (let head = 0; head < numHeads; head++) {
        const button = add(line, "button", { type: "button", className: "head", title: `Layer ${layer + 1}, head ${head + 1}` });
        button.setAttribute("aria-label", `${name}, layer ${layer + 1}, head ${head + 1}`);
        const one = { part, layer, head, button, canvas: add(button, "canvas", {}) };
        const index = heads.push(one) - 1;
        button.addEventListener("click", (event) => choose(index, event.ctrlKey || event.metaKey || event.shiftKey || by("several").checked));
        button.addEventListener("keydown", (event) => moveBetweenHeads(event, index));
      }
    }
  }
}

function add(parent, tag, properties) {
  const element = Object.assign(document.createElement(tag), properties);
  parent.append(element);
  return element;
}

function choose(index, isAnother) {
  const { part, layer, head } = heads[index];
  const others = state.heads.filter(([l, h]) => l !== layer || h !== head);
  if (!isAnother || part !== state.part) select(part, [[layer, head]]);
  else if (others.length === state.heads.length) select(part, [...others, [layer, head]]);
  else select(part, others.length ? others : state.heads);
}

function moveBetweenHeads(event, index) {
  const { part, layer, head } = heads[index];
  const across = { ArrowLeft: -1, ArrowRight: 1 }[event.key] ?? 0;
  const down = { ArrowUp: -1, ArrowDown: 1 }[event.key] ?? 0;
  if (event.key === " ") {
    event.preventDefault();
    choose(index, true);
  } else if (across || down) {
    event.preventDefault();
    const beside = across ? heads[index + across] : below(part, layer, head, down);
    if (beside) {
      choose(heads.indexOf(beside), false);
      beside.button.focus();
    }
  }
}

function below(part, layer, head, step) {
  const column = heads.filter((one) => one.head === head);
  return column[column.findIndex((one) => one.part === part && one.layer === layer) + step];
}

function drawOverview() {
  const item = data.items[state.item];
  for (const { part, layer, head, canvas, button } of heads) {
    const values = headValues(item, part, layer, head);
    const width = pieces(item, part).columns.length;
    paint(canvas, values, width, state.scale === "own" ? largest(values) : 1);
    button.classList.toggle("fine", width > 40);
  }
}

function select(part, chosen) {
  Object.assign(state, { part, heads: chosen.toSorted((a, b) => a[0] - b[0] || a[1] - b[1]) });
  if (state.row !== null || state.column !== null) point(null, null);
  markHeads();
  drawPicture();
}

function markHeads() {
  for (const { part, layer, head, button } of heads) {
    const isChosen = part === state.part && state.heads.some(([l, h]) => l === layer && h === head);
    button.setAttribute("aria-pressed", isChosen);
    const [firstLayer, firstHead] = state.heads[0];
    button.tabIndex = part === state.part && layer === firstLayer && head === firstHead ? 0 : -1; // one stop for Tab
  }
}

// ------------------------------------------------------------------ one picture

let shown; // { rows, columns, values, signed, image, signedImage }

function drawPicture() {
  const item = data.items[state.item];
  const made = axes(item, state.part);
  const values = shownValues(item, made);
  const block = item.attribution[state.part] ?? null;
  const signed = block === null ? null : gather(unpacked.get(block), made, false);
  shown = { ...made, values, signed };
  const width = made.columns.names.length;
  shown.top = state.scale === "own" ? largest(values) : 1;
  shown.image = paint(document.createElement("canvas"), values, width, shown.top);
  if (signed) {
    const colours = table(SIGNED_RAMPS[theme()]);
    const ofRow = (_, row) => signed.subarray(row * width, (row + 1) * width);
    const most = Array.from({ length: signed.length / width }, ofRow).map(largest);
    const colour = (value, i) => colours[Math.round(127.5 + 127.5 * value / most[Math.floor(i / width)])];
    shown.signedImage = paintWith(document.createElement("canvas"), signed, width, colour);
    paintWith(by("signed-legend"), Float32Array.from({ length: 128 }, (_, i) => i / 127), 128, (x) => colours[Math.round(255 * x)]);
  }
  by("attribution-panel").hidden = !signed;
  by("panels").classList.toggle("large", Math.max(width, made.rows.names.length) > 60);
  paint(by("legend"), Float32Array.from({ length: 128 }, (_, i) => ((i / 127) * shown.top)), 128, shown.top);
  by("top").textContent = shown.top === 1 ? "1" : shown.top.toPrecision(2);
  nameThePicture();
  buildLines();
  drawMaps();
  find();
}

function nameThePicture() {
  const [name, says] = PARTS[state.part];
  const layers = new Set(state.heads.map(([layer]) => layer + 1));
  const list = (numbers) => [...numbers].join(", ");
  let which = `layer ${list(layers)}, head ${list(new Set(state.heads.map(([, head]) => head + 1)))}`;
  if (state.heads.length > 1) {
    const places = layers.size === 1 ? which.replace("head", "heads") : `${state.heads.length} heads of layers ${list(layers)}`;
    which = `${state.combine === "max" ? "maximum" : "mean"} of ${places}`;
  }
  by("title").textContent = `${name}: ${which}`;
  const isAligning = data.aligning && state.part === "cross" && state.heads.every(([l, h]) => l + 1 === data.aligning.layer && data.aligning.heads.includes(h + 1));
  const isRinged = state.part === "cross" && state.unit === "words" && data.aligning;
  const aligning = isRinged ? " Rings: words that stand for each other." : isAligning ? " These heads tell which words stand for each other." : "";
  by("says").textContent = `${says}.${aligning}`;
  by("map").setAttribute("aria-label", `${name}, ${which}; arrow keys go from cell to cell`);
  by("combining").disabled = state.heads.length === 1;
}

// Where a map lies on its canvas: the size of a cell, and the room for names.
function layout(canvas, zoom) {
  const context = canvas.getContext("2d");
  context.font = "13px system-ui, sans-serif";
  const whole = canvas.parentElement.clientWidth - 8;
  const limit = Math.min(130, Math.max(64, whole / 5));
  const room = (names) => Math.ceil(Math.min(limit, Math.max(...names.map((name) => context.measureText(name).width)))) + 10;
  const [left, above] = [room(shown.rows.names), room(shown.columns.names)];
  const [numRows, numColumns] = [shown.rows.names.length, shown.columns.names.length];
  const tall = Math.max(360, innerHeight * 0.8) - above;
  const fitting = Math.min((whole - left) / numColumns, tall / numRows, 34);
  const least = Math.max(numRows, numColumns) > 60 ? 3 : 10; // a longer text is seen whole before its names are
  const cell = Math.max(2, Math.floor(Math.max(fitting, least) * zoom));
  return { left, above, cell, limit };
}

function drawMaps() {
  shown.place = drawMap(by("map"), shown.image);
  if (shown.signed) drawMap(by("attribution"), shown.signedImage);
}

function drawMap(canvas, image) {
  const place = layout(canvas, state.zoom);
  const { left, above, cell } = place;
  const [width, height] = [left + cell * image.width + 1, above + cell * image.height + 1];
  const dense = devicePixelRatio || 1;
  Object.assign(canvas, { width: width * dense, height: height * dense });
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(dense, dense);
  context.imageSmoothingEnabled = false;
  context.drawImage(image, left, above, cell * image.width, cell * image.height);
  context.strokeStyle = css("--edge");
  context.lineWidth = 1;
  if (cell >= 9) {
    context.beginPath();
    for (let x = 0; x <= image.width; x++) context.rect(left + x * cell + 0.5, above + 0.5, 0, cell * image.height);
    for (let y = 0; y <= image.height; y++) context.rect(left + 0.5, above + y * cell + 0.5, cell * image.width, 0);
    context.stroke();
  } else context.strokeRect(left + 0.5, above + 0.5, cell * image.width, cell * image.height);
  writeNames(context, place);
  ringWords(context, place);
  pointOut(context, place, image);
  return place;
}

function writeNames(context, { left, above, cell, limit }) {
  const colours = { ink: css("--ink"), accent: css("--accent"), find: css("--find") };
  const size = Math.max(9, Math.min(14, cell - 1));
  context.textBaseline = "middle";
  const write = (names, active, angle) => {
    context.textAlign = angle ? "left" : "right";
    names.forEach((name, i) => {
      const isActive = i === active;
      const isFound = matches(name);
      if (cell < 9 && !isActive && !isFound) return;
      context.font = `${isActive || isFound ? "700 " : ""}${size}px system-ui, sans-serif`;
      const text = shorten(context, name, limit);
      context.save();
      if (angle) context.translate(left + (i + 0.5) * cell, above - 5);
      else context.translate(left - 5, above + (i + 0.5) * cell);
      context.rotate(angle);
      if (isFound) {
        const wide = context.measureText(text).width;
        context.fillStyle = colours.find;
        context.fillRect(angle ? -2 : -wide - 2, -size * 0.65, wide + 4, size * 1.3);
      }
      context.fillStyle = isActive ? colours.accent : colours.ink;
      context.fillText(text, 0, 0);
      context.restore();
    });
  };
  write(shown.rows.names, state.row, 0);
  write(shown.columns.names, state.column, -Math.PI / 2);
}

function shorten(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  const characters = [...text];
  while (characters.length > 1 && context.measureText(`${characters.join("")}…`).width > room) characters.pop();
  return `${characters.join("")}…`;
}

// Words that stand for each other, as the aligning heads tell.
function ringWords(context, { left, above, cell }) {
  const item = data.items[state.item];
  if (state.part !== "cross" || state.unit !== "words" || !item.alignment || cell < 9) return;
  const at = (side, spans, word) => shown[side].spans.findIndex(([start]) => start === spans[word][0]);
  context.strokeStyle = css("--ring");
  context.lineWidth = 2;
  for (const [src, tgt] of item.alignment) {
    context.beginPath();
    const [x, y] = [at("columns", item.words.src, src) + 0.5, at("rows", item.words.tgt, tgt) + 0.5];
    context.arc(left + x * cell, above + y * cell, cell * 0.28, 0, 2 * Math.PI);
    context.stroke();
  }
}

function pointOut(context, { left, above, cell }, image) {
  context.strokeStyle = css("--accent");
  context.lineWidth = 2;
  if (state.row !== null) context.strokeRect(left, above + state.row * cell, cell * image.width, cell);
  if (state.column !== null) context.strokeRect(left + state.column * cell, above, cell, cell * image.height);
}

// ------------------------------------------------------------------ lines between words

function buildLines() {
  const size = Math.max(shown.rows.names.length, shown.columns.names.length) > 60 ? 17 : 25;
  by("lines").style.setProperty("--line", `${size}px`);
  for (const [id, names] of [["rows", shown.rows.names], ["columns", shown.columns.names]]) {
    by(id).replaceChildren();
    names.forEach((name, i) => {
      const button = add(add(by(id), "li", {}), "button", { type: "button", tabIndex: i ? -1 : 0 });
      add(button, "span", { textContent: name });
      add(button, "small", {});
      const here = id === "rows" ? [i, null] : [null, i];
      button.addEventListener("pointerenter", () => point(...here));
      button.addEventListener("focus", () => point(...here));
      button.addEventListener("keydown", (event) => moveBetweenWords(event, id, i));
    });
  }
}

function moveBetweenWords(event, id, i) {
  const step = { ArrowUp: -1, ArrowDown: 1 }[event.key] ?? 0;
  const side = { ArrowLeft: "rows", ArrowRight: "columns" }[event.key] ?? id;
  if (!step && side === id) return;
  event.preventDefault();
  const words = by(side).children;
  words[Math.max(0, Math.min(words.length - 1, i + step))].firstChild.focus();
}

const weightAt = (row, column) => shown.values[row * shown.columns.names.length + column];
const share = (weight) => (state.scale === "root" ? Math.sqrt(Math.min(1, weight / shown.top)) : Math.min(1, weight / shown.top));

function drawLines() {
  const canvas = by("links");
  const [numRows, numColumns] = [shown.rows.names.length, shown.columns.names.length];
  const step = parseInt(by("lines").style.getPropertyValue("--line"), 10);
  const height = Math.max(numRows, numColumns) * step;
  const dense = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  const width = canvas.clientWidth;
  Object.assign(canvas, { width: width * dense, height: height * dense });
  const context = canvas.getContext("2d");
  context.scale(dense, dense);
  context.strokeStyle = css("--accent");
  const isPointing = state.row !== null || state.column !== null;
  for (let row = 0; row < numRows; row++) {
    for (let column = 0; column < numColumns; column++) {
      const isMeant = state.row !== null ? row === state.row : state.column === null || column === state.column;
      const strength = share(weightAt(row, column));
      if (!isMeant || strength < 0.04) continue;
      context.globalAlpha = (isPointing ? 1 : 0.75) * strength ** 1.5;
      context.lineWidth = 0.5 + 2.5 * strength;
      context.beginPath();
      const [from, to] = [(row + 0.5) * step, (column + 0.5) * step];
      context.moveTo(2, from);
      context.bezierCurveTo(width * 0.35, from, width * 0.65, to, width - 2, to);
      context.stroke();
    }
  }
  markWords("rows", state.row, (row) => (state.row === null && state.column !== null ? weightAt(row, state.column) : null));
  markWords("columns", state.column, (column) => (state.row !== null ? weightAt(state.row, column) : null));
}

function markWords(id, active, weightOf) {
  [...by(id).children].forEach((line, i) => {
    const button = line.firstChild;
    const weight = weightOf(i);
    button.classList.toggle("active", i === active);
    button.classList.toggle("found", matches(shown[id].names[i]));
    button.lastChild.textContent = weight !== null && weight >= 0.005 ? weight.toFixed(2) : "";
    button.style.backgroundColor = weight === null ? "" : `color-mix(in srgb, var(--glow) ${Math.round(100 * share(weight))}%, transparent)`;
  });
}

// ------------------------------------------------------------------ pointing

function point(row, column) {
  if (row === state.row && column === state.column) return;
  Object.assign(state, { row, column });
  if (shown) tell();
}

let isDue = false;
function tell() {
  by("readout").textContent = said();
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    drawMaps();
    drawLines();
  });
}

function said() {
  const { rows, columns } = shown;
  const brief = (name) => (name.length > 33 ? `${name.slice(0, 32)}…` : name).replace(/^▁/, "");
  const quoted = (names, i) => `“${brief(names[i])}”`;
  if (state.row !== null && state.column !== null) {
    const weight = weightAt(state.row, state.column);
    const more = shown.signed ? `, gradient × input ${shown.signed[state.row * columns.names.length + state.column].toFixed(6)}` : "";
    return `${quoted(rows.names, state.row)} looks at ${quoted(columns.names, state.column)}: ${weight.toFixed(6)}${more}`;
  }
  const top = (number, weightOf, names) =>
    Array.from({ length: number }, (_, i) => [weightOf(i), names[i]])
      .sort((a, b) => b[0] - a[0])
      .slice(0, 3)
      .map(([weight, name]) => `“${brief(name)}” ${weight.toFixed(3)}`)
      .join(", ");
  if (state.row !== null) return `${quoted(rows.names, state.row)} looks at ${top(columns.names.length, (i) => weightAt(state.row, i), columns.names)}`;
  if (state.column !== null) return `${quoted(columns.names, state.column)} is looked at by ${top(rows.names.length, (i) => weightAt(i, state.column), rows.names)}`;
  return "Point at a cell or a word, or go there with the arrow keys.";
}

function cellAt(event) {
  const { left, above, cell } = shown.place;
  const column = Math.floor((event.offsetX - left) / cell);
  const row = Math.floor((event.offsetY - above) / cell);
  const isInside = row >= 0 && row < shown.rows.names.length && column >= 0 && column < shown.columns.names.length;
  return isInside ? [row, column] : null;
}

function moveOnMap(event) {
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -1e9], End: [0, 1e9] };
  if (event.key === "Escape") point(null, null);
  if (!steps[event.key]) return;
  event.preventDefault();
  const [down, across] = state.row === null || state.column === null ? [0, 0] : steps[event.key];
  const within = (at, number) => Math.max(0, Math.min(number - 1, at));
  point(within((state.row ?? 0) + down, shown.rows.names.length), within((state.column ?? 0) + across, shown.columns.names.length));
}

// ------------------------------------------------------------------ finding a word

const plain = (text) => text.replaceAll("▁", "").normalize("NFC").toLocaleLowerCase();
const matches = (name) => state.query !== "" && plain(name).includes(state.query);

function found() {
  return [
    ...shown.rows.names.flatMap((name, i) => (matches(name) ? [[i, null]] : [])),
    ...shown.columns.names.flatMap((name, i) => (matches(name) ? [[null, i]] : [])),
  ];
}

function find() {
  const number = state.query ? found().length : 0;
  by("matches").textContent = state.query ? `${number} found${number > 1 ? "; Enter: next" : ""}` : "";
  tell();
}

function findNext() {
  const all = found();
  if (!all.length) return;
  const here = all.findIndex(([row, column]) => row === state.row && column === state.column);
  const [row, column] = all[(here + 1) % all.length];
  point(row, column);
  const list = by(row === null ? "columns" : "rows");
  const line = list.children[row ?? column];
  by("lines").scrollTop = line.offsetTop - by("lines").offsetTop - by("lines").clientHeight / 2;
}

// ------------------------------------------------------------------ hypotheses, updates

async function show(number) {
  const item = data.items[number];
  await unpackItem(item);
  Object.assign(state, { item: number, row: null, column: null });
  by("source").textContent = item.source;
  by("translation").textContent = item.text;
  by("hypothesis").value = number;
  by("frame").value = number;
  by("update").textContent = isTraining ? `after update ${item.update.toLocaleString("en")}` : "";
  drawOverview();
  drawPicture();
}

let timer = null;
function play() {
  const isPlaying = timer !== null;
  clearInterval(timer);
  timer = null;
  by("play").textContent = isPlaying ? "Play" : "Pause";
  if (isPlaying) return;
  let number = state.item + 1 < data.items.length ? state.item : -1;
  timer = setInterval(() => {
    number += 1;
    if (number < data.items.length) show(number);
    else play();
  }, 500);
}

function start() {
  data.items.forEach((item, i) => add(by("hypothesis"), "option", { value: i, textContent: `${i + 1}.  ${item.text}  (${item.score.toFixed(4)})` }));
  by("hypotheses").hidden = isTraining || data.items.length === 1;
  by("player").hidden = !isTraining;
  by("frame").max = data.items.length - 1;
  buildOverview();
  const [numLayers, numHeads] = data.shapes.cross;
  const [layer, chosen] = data.aligning ? [data.aligning.layer - 1, data.aligning.heads] : [numLayers - 1, Array.from({ length: numHeads }, (_, i) => i + 1)];
  state.heads = chosen.map((head) => [layer, head - 1]);
  markHeads();

  const redraw = () => (drawOverview(), drawPicture());
  by("hypothesis").addEventListener("change", (event) => show(Number(event.target.value)));
  by("frame").addEventListener("input", (event) => show(Number(event.target.value)));
  by("play").addEventListener("click", play);
  by("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
    nameTheme();
    redraw();
  });
  const nameTheme = () => (by("theme").textContent = theme() === "dark" ? "Light" : "Dark");
  darkByDefault.addEventListener("change", () => (nameTheme(), redraw()));
  nameTheme();
  for (const input of document.querySelectorAll("input[type=radio]")) {
    input.addEventListener("change", () => {
      state[input.name] = input.value;
      Object.assign(state, { row: null, column: null });
      drawPicture();
    });
  }
  by("scale").addEventListener("change", (event) => ((state.scale = event.target.value), redraw()));
  by("query").addEventListener("input", (event) => ((state.query = plain(event.target.value.trim())), find()));
  by("query").addEventListener("keydown", (event) => event.key === "Enter" && findNext());
  by("larger").addEventListener("click", () => ((state.zoom = Math.min(8, state.zoom * 1.5)), drawMaps()));
  by("smaller").addEventListener("click", () => ((state.zoom = Math.max(0.3, state.zoom / 1.5)), drawMaps()));
  by("map").addEventListener("pointermove", (event) => point(...(cellAt(event) ?? [null, null])));
  by("map").addEventListener("pointerdown", (event) => point(...(cellAt(event) ?? [null, null])));
  by("map").addEventListener("pointerleave", () => document.activeElement !== by("map") && point(null, null));
  by("map").addEventListener("keydown", moveOnMap);
  by("lines").addEventListener("pointerleave", () => point(null, null));
  addEventListener("resize", () => shown && tell());
  return show(isTraining ? data.items.length - 1 : 0);
}

start().then(
  () => (document.documentElement.dataset.ready = "true"),
  (error) => {
    by("trouble").hidden = false;
    by("trouble").textContent = `This browser cannot draw the page (${error.message}); a newer one can.`;
  },
);
