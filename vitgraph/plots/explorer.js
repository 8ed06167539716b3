"use strict";
const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const panels = ["attention", "nearest"].map(byId);
const chosen = { image: 0, block: data.blocks.length - 1, cell: -1 };
const unpacked = new Map();
const firstCells = [];
data.images.reduce((sum, one) => { firstCells.push(sum); return sum + one.rows * one.columns; }, 0);

const STOPS = ["000004", "1b0c41", "4a0c6b", "781c6d", "a52c60", "cf4446", "ed6925", "fb9b06",
  "f7d13d", "fcffa4"].map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
const PALETTE = Array.from({ length: 64 }, (_, value) => {
  const place = (value / 63) * (STOPS.length - 1);
  const low = Math.min(Math.floor(place), STOPS.length - 2);
  return [0, 1, 2].map((c) => STOPS[low][c] + (place - low) * (STOPS[low + 1][c] - STOPS[low][c]));
});

function element(name, attributes = {}, parent = null) {
  const inSvg = ["rect", "text"].includes(name);
  const made = inSvg ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

// The numbers of one picture in one block, as explorer.py packs them.
async function numbersOf(image, block) {
  const key = `${image} ${block}`;
  if (!unpacked.has(key)) {
    const bytes = Uint8Array.from(atob(data.images[image].states[block]), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const buffer = await new Response(stream).arrayBuffer();
    const count = data.images[image].rows * data.images[image].columns;
    const matches = count * data.matches;
    unpacked.set(key, {
      largest: new Float32Array(buffer, 0, count),
      cells: new Uint16Array(buffer, 4 * count, matches),
      cosines: new Int8Array(buffer, 4 * count + 2 * matches, matches),
      weights: new Uint8Array(buffer, 4 * count + 3 * matches, count * count),
    });
  }
  return unpacked.get(key);
}

function place(number) {
  let image = data.images.length - 1;
  while (firstCells[image] > number) image -= 1;
  const cell = number - firstCells[image], { columns } = data.images[image];
  return { image, cell, row: Math.floor(cell / columns), column: cell % columns };
}

function box(svg, { row, column }, kind, label) {
  const at = { x: column, y: row, width: 1, height: 1 };
  element("rect", { ...at, class: "dark" }, svg);
  element("rect", { ...at, class: kind }, svg);
  if (label) {
    const text = element("text", { x: column + 0.5, y: row + 0.52 }, svg);
    text.textContent = label;
    text.style.fontSize = `${Math.min(0.8, data.images[chosen.image].width / 34)}px`;
  }
}

function crop(canvas, match) {
  const one = data.images[match.image];
  canvas.width = canvas.height = 96;
  const picture = byId("images").querySelectorAll("img")[match.image];
  const scale = [picture.naturalWidth / one.width, picture.naturalHeight / one.height];
  const [x, y] = [match.column - 1, match.row - 1];
  const context = canvas.getContext("2d");
  context.drawImage(picture, x * scale[0], y * scale[1], 3 * scale[0], 3 * scale[1], 0, 0, 96, 96);
  context.strokeStyle = "#000"; context.lineWidth = 5; context.strokeRect(32, 32, 32, 32);
  context.strokeStyle = "#45d3ff"; context.lineWidth = 2; context.strokeRect(32, 32, 32, 32);
}

function layOut() {
  const one = data.images[chosen.image];
  for (const panel of panels) {
    panel.querySelector("img").src = one.picture;
    panel.style.aspectRatio = `${one.width} / ${one.height}`;
    panel.style.maxWidth = `calc(70vh * ${one.width / one.height})`;
    panel.querySelector("svg").setAttribute("viewBox", `0 0 ${one.width} ${one.height}`);
  }
  const heat = panels[0].querySelector("canvas");
  heat.width = one.columns;
  heat.height = one.rows;
  heat.style.width = `${(100 * one.columns) / one.width}%`;
  heat.style.height = `${(100 * one.rows) / one.height}%`;
}

async function draw() {
  const { image, block, cell } = chosen, one = data.images[image];
  const numbers = await numbersOf(image, block);
  if (image !== chosen.image || block !== chosen.block || cell !== chosen.cell) return;
  const count = one.rows * one.columns, here = place(firstCells[image] + cell);
  const pixels = new ImageData(one.columns, one.rows);
  numbers.weights.subarray(cell * count, (cell + 1) * count).forEach((value, index) => {
    pixels.data.set([...PALETTE[value], 130 + 1.4 * value], 4 * index);
  });
  panels[0].querySelector("canvas").getContext("2d").putImageData(pixels, 0, 0);
  const [left, right] = panels.map((panel) => panel.querySelector("svg"));
  left.replaceChildren();
  right.replaceChildren();
  const list = byId("matches");
  list.replaceChildren();
  for (let rank = data.matches - 1; rank >= 0; rank -= 1) {
    const at = cell * data.matches + rank, match = place(numbers.cells[at]);
    const cosine = (numbers.cosines[at] / 100).toFixed(2);
    if (match.image === image) box(right, match, "match", rank + 1);
    const item = element("li");
    const name = data.images[match.image].name;
    const label = `${rank + 1}: ${name}, row ${match.row}, column ${match.column}, cosine ${cosine}`;
    const button = element("button", { type: "button", title: label, "aria-label": label }, item);
    crop(element("canvas", {}, button), match);
    button.append(`${rank + 1} · ${cosine}`);
    button.addEventListener("click", () => choose({ image: match.image, cell: match.cell }));
    list.prepend(item);
  }
  box(left, here, "chosen");
  box(right, here, "chosen");
  const largest = numbers.largest[cell], text = (weight) => Number(weight.toPrecision(2)).toString();
  byId("quarter").textContent = text(largest / 4);
  byId("largest").textContent = text(largest);
  const unit = one.side > 1 ? "the cell in row" : "row";
  byId("asked").textContent =
    `From ${unit} ${here.row}, column ${here.column} of ${one.name}, block ${data.blocks[block]}.`;
  for (const [id, number] of [["images", image], ["blocks", block]]) {
    byId(id).querySelectorAll("button").forEach((button, index) =>
      button.setAttribute("aria-pressed", String(index === number)));
  }
}

function choose(change) {
  const moved = change.image !== undefined && change.image !== chosen.image;
  Object.assign(chosen, change);
  if (moved || chosen.cell < 0) {
    const one = data.images[chosen.image];
    if (change.cell === undefined)
      chosen.cell = (one.rows >> 1) * one.columns + (one.columns >> 1);
    layOut();
  }
  draw();
}

function start() {
  data.images.forEach((one, index) => {
    const button = element("button", { type: "button", title: one.name, "aria-label": one.name },
      byId("images"));
    element("img", { src: one.picture, alt: "" }, button);
    button.addEventListener("click", () => choose({ image: index }));
  });
  byId("images").hidden = data.images.length < 2;
  data.blocks.forEach((number, index) => {
    const button = element("button", { type: "button" }, byId("blocks"));
    button.textContent = number;
    button.addEventListener("click", () => choose({ block: index }));
  });
  for (const panel of panels) {
    const click = (event) => {
      const one = data.images[chosen.image], area = panel.getBoundingClientRect();
      const row = Math.floor(((event.clientY - area.top) / area.height) * one.height);
      const column = Math.floor(((event.clientX - area.left) / area.width) * one.width);
      if (row < 0 || column < 0 || row >= one.rows || column >= one.columns) return;
      choose({ cell: row * one.columns + column });
    };
    panel.addEventListener("click", click);
    panel.addEventListener("pointermove", (event) => {
      if (event.pointerType === "mouse" && event.buttons === 1) click(event);
    });
    panel.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
      if (!step[event.key]) return;
      event.preventDefault();
      const one = data.images[chosen.image];
      const row = Math.floor(chosen.cell / one.columns) + step[event.key][0];
      const column = (chosen.cell % one.columns) + step[event.key][1];
      if (row < 0 || column < 0 || row >= one.rows || column >= one.columns) return;
      choose({ cell: row * one.columns + column });
    });
  }
  const decoded = [...byId("images").querySelectorAll("img")].map((picture) => picture.decode());
  Promise.all(decoded).then(() => choose({}));
}

start();
