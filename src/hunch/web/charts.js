// Small charts on canvas: the last minute as lines, bars by position, a ribbon of passes.
// Colours come from the stylesheet.

const SAMPLES = 60;
const charts = new Set();

export function redraw() {
  for (const chart of charts) {
    if (chart.canvas.isConnected) chart.draw();
    else charts.delete(chart);
  }
}

function prepare(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, sans-serif";
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  return { pen, width, height, colour };
}

function grid(pen, width, top, bottom, colour) {
  pen.strokeStyle = colour("--line");
  pen.lineWidth = 1;
  pen.beginPath();
  for (const share of [0, 0.5, 1]) {
    const y = Math.round(top + (bottom - top) * share) + 0.5;
    pen.moveTo(0, y);
    pen.lineTo(width, y);
  }
  pen.stroke();
}

// A round number at or above the value, so that the scale does not twitch.
function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 5, 10].find((n) => n * unit >= value * 0.9999) * unit;
}

// Series of the last minute; `least` is the value at the upper edge, at least.
export class Lines {
  constructor(canvas, colours, least, label = (value) => `${value}`) {
    this.canvas = canvas;
    this.colours = colours;
    this.least = least;
    this.label = label;
    this.series = colours.map(() => []);
    charts.add(this);
  }

  push(...values) {
    values.forEach((value, i) => {
      this.series[i].push(value);
      if (this.series[i].length > SAMPLES) this.series[i].shift();
    });
    this.draw();
  }

  draw() {
    const { pen, width, height, colour } = prepare(this.canvas);
    const [above, below] = [6, height - 4];
    grid(pen, width, above, below, colour);
    const most = roundUp(Math.max(this.least, ...this.series.flat()));
    const x = (i, n) => width - ((n - 1 - i) * width) / (SAMPLES - 1);
    const y = (value) => below - (value / most) * (below - above);
    this.series.forEach((values, s) => {
      if (values.length < 2) return;
      pen.beginPath();
      values.forEach((value, i) => pen.lineTo(x(i, values.length), y(value)));
      pen.strokeStyle = colour(this.colours[s]);
      pen.lineWidth = 2;
      pen.lineJoin = "round";
      pen.stroke();
      pen.lineTo(width, below);
      pen.lineTo(x(0, values.length), below);
      pen.globalAlpha = 0.16;
      pen.fillStyle = colour(this.colours[s]);
      pen.fill();
      pen.globalAlpha = 1;
    });
    pen.fillStyle = colour("--quiet");
    pen.fillText(this.label(most), 0, above + 13);
  }
}

// One bar per position, from 0 to 1.
export class Bars {
  constructor(canvas, colour) {
    this.canvas = canvas;
    this.colour = colour;
    this.values = [];
    charts.add(this);
  }

  set(values) {
    this.values = values;
    this.draw();
  }

  draw() {
    const { pen, width, height, colour } = prepare(this.canvas);
    const [above, below] = [6, height - 15];
    grid(pen, width, above, below, colour);
    const count = Math.max(this.values.length, 4);
    const step = width / count;
    pen.textAlign = "center";
    this.values.forEach((value, i) => {
      const tall = value * (below - above);
      pen.fillStyle = colour(this.colour);
      pen.fillRect(i * step + step * 0.14, below - tall, step * 0.72, tall);
      pen.fillStyle = colour("--quiet");
      if (step > 14 || i % 2 === 0) pen.fillText(`${i + 1}`, (i + 0.5) * step, height - 3);
      if (step < 28) return;
      pen.fillStyle = colour("--ink");
      pen.fillText(`${Math.round(value * 100)}`, (i + 0.5) * step, Math.max(15, below - 4 - tall));
    });
  }
}

// One bar per pass of the model: the lowest part is its own token, what stands on it was guessed.
export class Ribbon {
  constructor(canvas) {
    this.canvas = canvas;
    this.passes = []; // tokens each pass gave
    this.span = 0; // passes that fit the width
    charts.add(this);
  }

  get length() {
    return this.passes.length;
  }

  push(numTokens) {
    this.passes.push(numTokens);
  }

  // `span` is the length of the longest ribbon beside this one: the same pass, the same width.
  draw(span = this.span) {
    this.span = span;
    const { pen, width, height, colour } = prepare(this.canvas);
    const step = Math.min(7, width / Math.max(span, 1));
    const most = Math.max(6, ...this.passes);
    const gap = step > 3 ? 1 : 0;
    const tall = (tokens) => Math.max(3, (tokens / most) * height);
    const bar = (i, from, to) => pen.fillRect(i * step, height - to, step - gap, to - from);
    this.passes.forEach((tokens, i) => {
      pen.fillStyle = colour("--mark-edge");
      if (tokens > 1) bar(i, 0, tall(tokens));
      pen.fillStyle = colour("--quiet");
      bar(i, 0, tall(1));
    });
  }
}
