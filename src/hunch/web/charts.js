// Small charts on canvas: the last minute as lines, and bars. Colours come from the stylesheet.

const SAMPLES = 60;

function prepare(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  return { pen, width, height, colour };
}

function baseline(pen, width, height, colour) {
  pen.strokeStyle = colour("--line");
  pen.lineWidth = 1;
  pen.beginPath();
  for (const share of [0, 0.5, 1]) {
    const y = Math.round(4 + (height - 8) * share) + 0.5;
    pen.moveTo(0, y);
    pen.lineTo(width, y);
  }
  pen.stroke();
}

// Series of the last minute; `top` is the value at the upper edge, at least.
export class Lines {
  constructor(canvas, colours, top) {
    this.canvas = canvas;
    this.colours = colours;
    this.top = top;
    this.series = colours.map(() => []);
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
    baseline(pen, width, height, colour);
    const top = Math.max(this.top, ...this.series.flat());
    const x = (i, n) => width - ((n - 1 - i) * width) / (SAMPLES - 1);
    const y = (value) => height - 4 - (value / top) * (height - 8);
    this.series.forEach((values, s) => {
      if (values.length < 2) return;
      pen.beginPath();
      values.forEach((value, i) => pen.lineTo(x(i, values.length), y(value)));
      pen.strokeStyle = colour(this.colours[s]);
      pen.lineWidth = 2;
      pen.lineJoin = "round";
      pen.stroke();
      pen.lineTo(width, height - 4);
      pen.lineTo(x(0, values.length), height - 4);
      pen.globalAlpha = 0.16;
      pen.fillStyle = colour(this.colours[s]);
      pen.fill();
      pen.globalAlpha = 1;
    });
  }
}

// One bar per position, from 0 to 1.
export class Bars {
  constructor(canvas, colour) {
    this.canvas = canvas;
    this.colour = colour;
    this.values = [];
  }

  set(values) {
    this.values = values;
    this.draw();
  }

  draw() {
    const { pen, width, height, colour } = prepare(this.canvas);
    baseline(pen, width, height, colour);
    const count = Math.max(this.values.length, 4);
    const step = width / count;
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    this.values.forEach((value, i) => {
      const tall = value * (height - 8);
      pen.fillStyle = colour(this.colour);
      pen.fillRect(i * step + step * 0.14, height - 4 - tall, step * 0.72, tall);
      if (step < 24) return;
      pen.fillStyle = colour("--ink");
      pen.fillText(`${Math.round(value * 100)}`, (i + 0.5) * step, Math.max(13, height - 8 - tall));
    });
  }
}
