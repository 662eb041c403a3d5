"use strict";
// Adds to a page that is whole without it: one cursor for all charts of a stage, axes, zoom, smoothing and hidden lines at the reader's
// choice, and the switch between light and dark. Charts are drawn again from the numbers in #data.
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;

const significant = (value, digits = 4) => {
  if (value === 0) return "0";
  if (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e9) return value.toExponential(digits - 1).replace(/(\.\d*?)0*e\+?/, "$1e").replace(".e", "e").replaceAll("-", "−");
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))));
  return value.toLocaleString("en-US", { maximumFractionDigits: places }).replace("-", "−");
};
const scaled = (value, units) => {
  const unit = units.find(([size]) => Math.abs(value) >= size * 0.9995);
  return unit ? significant(value / unit[0], 3) + unit[1] : significant(value, 3);
};
const show = {
  number: significant,
  compact: value => scaled(value, [[1e15, "P"], [1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]),
  bytes: value => scaled(value, [[1e15, " PB"], [1e12, " TB"], [1e9, " GB"], [1e6, " MB"], [1e3, " kB"]]),
  seconds: value => value > 0 && value < 1e-3 ? significant(1e6 * value, 2) + " µs" : value > 0 && value < 1 ? significant(1e3 * value, 2) + " ms" : value < 10 ? significant(value, 2) + " s" : value < 60 ? Math.round(value) + " s" : (value / 60).toFixed(1) + " min",
  percent: value => significant(100 * value, 3) + "%",
};

// What the reader has chosen, for all charts; `zoom` by group, in steps of the first run.
const chosen = { x: "step", logX: false, logY: false, smoothing: 1.5, zoom: {} };
const AXES = { step: ["step", show.compact], tokens: ["tokens", show.compact], time: ["hours of training", value => significant(value, 3)] };

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
// The first index of the rising list at which it is not below `value`.
const firstAt = (list, value) => {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
};
const nearest = (list, value) => {
  const at = clamp(firstAt(list, value), 0, list.length - 1);
  return at > 0 && value - list[at - 1] < list[at] - value ? at - 1 : at;
};
// The value at `x` of the line through (xs, ys), which goes on beyond its ends as it was there.
const between = (xs, ys, x) => {
  if (xs.length < 2) return ys[0] ?? x;
  const at = clamp(firstAt(xs, x), 1, xs.length - 1);
  return ys[at - 1] + (xs[at] > xs[at - 1] ? (x - xs[at - 1]) / (xs[at] - xs[at - 1]) : 0) * (ys[at] - ys[at - 1]);
};
const table = (group, run) => data.axes[group][run][chosen.x];
const fromStep = (group, run, step) => {
  const found = table(group, run);
  return found ? between(data.steps[found[0]], found[1], step) : step;
};
const toStep = (group, run, x) => {
  const found = table(group, run);
  return found ? between(found[1], data.steps[found[0]], x) : x;
};

class Axis {
  constructor(low, high, log) {
    Object.assign(this, { low, high: high > low ? high : low + 1, log });
    this.of = log ? value => Math.log(Math.max(value, 1e-300)) : Number;
    this.start = this.of(this.low);
    this.length = this.of(this.high) - this.start;
  }
  place(value) { return (this.of(value) - this.start) / this.length; }
  at(share) { const value = this.start + share * this.length; return this.log ? Math.exp(value) : value; }
  ticks(about) {
    let ticks = [];
    if (this.log && this.high / this.low > 3) {
      const decades = [];
      for (let n = Math.floor(Math.log10(this.low)); n <= Math.ceil(Math.log10(this.high)); n++) decades.push(n);
      const factors = [[1, 2, 5], [1, 3], [1]].find(one => decades.length * one.length <= 2 * about + 2) ?? [1];
      ticks = decades.flatMap(decade => factors.map(factor => factor * 10 ** decade));
      ticks = ticks.filter((_, n) => n % Math.max(1, Math.floor(ticks.length / (2 * about))) === 0);
    } else {
      const raw = (this.high - this.low) / about, power = 10 ** Math.floor(Math.log10(raw));
      const step = power * [1, 2, 2.5, 5, 10].find(factor => factor * power >= raw * 0.999);
      for (let n = Math.ceil(this.low / step); n <= this.high / step; n++) ticks.push(Number((n * step).toPrecision(12)));
    }
    return ticks.filter(tick => tick >= this.low && tick <= this.high);
  }
}

// A centered mean with Gaussian weights, `percent` of the series wide, never wider than a fifth of the way from the start (as charts.py).
const smooth = (values, percent) => values.map((value, at) => {
  const width = Math.min(percent / 100 * values.length, 0.2 * at);
  if (width < 0.5) return value;
  const reach = Math.ceil(2.5 * width);
  let sum = 0, weights = 0;
  for (let n = Math.max(0, at - reach); n <= Math.min(values.length - 1, at + reach); n++) {
    const weight = Math.exp(-((n - at) ** 2) / (2 * width * width));
    sum += weight * values[n];
    weights += weight;
  }
  return sum / weights;
});

class Line {
  constructor([grid, values, kind, run, lows, highs], before) {
    Object.assign(this, { steps: data.steps[grid], values, kind, run, lows, highs, before, hidden: false });
  }
  // Places on the chosen x axis, and the values as smoothed.
  measure(group) {
    this.x = this.steps.map(step => fromStep(group, this.run, step));
    if (this.kind === "smoothed") this.values = smooth(this.before.values, chosen.smoothing);
  }
  at(x) { return this.values[nearest(this.x, x)]; }
}

const unit = share => (1000 * clamp(share, -1, 2)).toFixed(1);

class Chart {
  constructor(plot) {
    this.plot = plot;
    this.figure = plot.closest("figure");
    this.data = data.charts[plot.dataset.chart];
    this.group = this.data.group;
    this.svg = plot.querySelector("svg");
    this.lines = [];
    for (const line of this.data.lines) this.lines.push(new Line(line, this.lines.at(-1)));
    const add = (parent, tag, name) => parent.appendChild(Object.assign(document.createElement(tag), { className: name, hidden: true }));
    this.cursor = add(plot, "div", "cursor");
    this.chip = add(this.cursor, "span", "chip");
    this.band = add(plot, "div", "band");
    this.chip.hidden = false;
    this.marks = [...plot.querySelectorAll(".mark")].map(element => {
      const text = element.title;
      element.removeAttribute("title");
      return { element, step: Number(element.dataset.step), text };
    });
    this.readings = [...this.figure.querySelectorAll("[data-line]")].map(item => this.toggle(item));
    if (this.data.rows) this.cell = this.figure.querySelector(".cell b");
    plot.addEventListener("pointermove", event => this.point(event));
    plot.addEventListener("pointerdown", event => {
      if (event.pointerType === "mouse" && event.button === 0) {
        this.from = this.share(event);
        plot.setPointerCapture(event.pointerId);  // a stretch may be drawn beyond the edge
      }
      this.point(event);
    });
    plot.addEventListener("pointerup", event => this.release(event));
    plot.addEventListener("dblclick", () => zoom(this.group, null));
    plot.addEventListener("pointerleave", event => { this.from = undefined; this.band.hidden = true; if (event.pointerType === "mouse") hide(this.group); });
    plot.addEventListener("blur", () => hide(this.group));
    plot.addEventListener("keydown", event => this.key(event));
  }

  // A legend entry that shows and hides its line.
  toggle(item) {
    const line = this.lines[item.dataset.line], value = item.querySelector("b");
    const turn = () => {
      line.hidden = !line.hidden;
      if (line.before?.kind === "raw" && line.kind === "plain") line.before.hidden = line.hidden;
      item.setAttribute("aria-pressed", String(!line.hidden));
      this.draw();
    };
    Object.assign(item, { tabIndex: 0, title: "show or hide" });
    item.setAttribute("role", "button");
    item.setAttribute("aria-pressed", "true");
    item.addEventListener("click", turn);
    item.addEventListener("keydown", event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); turn(); } });
    return { line, value, item };
  }

  // The visible steps of the first run, and the x axis for them.
  range() { return chosen.zoom[this.group] ?? this.data.steps; }
  xAxis() {
    const runs = this.data.rows ? [0] : [...new Set(this.lines.map(line => line.run))];
    const ends = chosen.zoom[this.group] ? [0] : runs;  // of runs that are compared all is shown
    const [first, last] = this.range();
    const clip = (run, step) => fromStep(this.group, run, chosen.zoom[this.group] ? step : Math.min(step, data.axes[this.group][run].last));
    let low = Math.min(...ends.map(run => clip(run, first))), high = Math.max(...ends.map(run => clip(run, last)));
    if (chosen.logX) low = Math.max(low, high / 1e6, chosen.x === "step" ? 1 : 0);
    return new Axis(low, high, chosen.logX);
  }

  yAxis(x) {
    const { levels, zero, top, log } = this.data, logarithm = log || chosen.logY;
    let low = Infinity, high = -Infinity;
    for (const line of this.lines) {
      if (line.hidden) continue;
      const first = firstAt(line.x, x.low), end = firstAt(line.x, x.high * (1 + 1e-9));
      for (let n = Math.max(0, first - 1); n < Math.min(line.x.length, end + 1); n++) {
        low = Math.min(low, line.lows?.[n] ?? line.values[n]);
        high = Math.max(high, line.highs?.[n] ?? line.values[n]);
      }
    }
    if (low > high) [low, high] = [0, 1];
    this.near = levels.map(value => high === low || (value >= low - 2 * (high - low) && value <= high + 0.5 * (high - low)));
    for (const value of levels.filter((_, n) => this.near[n])) [low, high] = [Math.min(low, value), Math.max(high, value)];
    if (logarithm && high > 0) return new Axis(Math.max(low > 0 ? low : high / 1e4, 1e-12) / 1.15, Math.max(high, 1e-12) * 1.15, true);
    if (top !== null && !chosen.zoom[this.group]) high = Math.min(high, Math.max(top, low));
    const room = 0.06 * (high - low) || 0.05 * Math.abs(high) || 1;
    return new Axis(zero && low >= 0 ? 0 : low - room, high + room, false);
  }

  draw() {
    for (const line of this.lines) line.measure(this.group);
    const x = this.x = this.xAxis();
    const [name, label] = AXES[chosen.x];
    this.figure.querySelector(".axis").textContent = name;
    this.ticks(".ticks.x", "left", x, 6, label);
    const inside = share => share >= -0.001 && share <= 1.001;
    for (const mark of this.marks) {
      mark.at = x.place(fromStep(this.group, 0, mark.step));
      mark.element.style.left = `${100 * clamp(mark.at, 0, 1)}%`;
      mark.element.hidden = !inside(mark.at);
    }
    for (const phase of this.plot.querySelectorAll(".phase")) {
      const [left, right] = [phase.dataset.step, phase.dataset.end].map(step => clamp(x.place(fromStep(this.group, 0, Number(step))), 0, 1));
      Object.assign(phase.style, { left: `${100 * left}%`, width: `${100 * (right - left)}%` });
      phase.hidden = right <= left;
    }
    if (this.data.rows) return this.stretch(x);
    const y = this.yAxis(x);
    this.ticks(".ticks.y", "bottom", y, this.data.ticks, show[this.data.shown]);
    const height = value => unit(1 - y.place(value));
    this.svg.querySelector(".rule").setAttribute("d", y.ticks(this.data.ticks).map(tick => `M0 ${height(tick)}H1000`).join(""));
    this.svg.querySelectorAll(".level").forEach((path, n) => path.setAttribute("d", this.near[n] ? `M0 ${height(this.data.levels[n])}H1000` : ""));
    const dots = this.svg.querySelectorAll(".dots");
    this.svg.querySelectorAll(".line").forEach((path, n) => {
      const line = this.lines[n], points = [];
      const first = Math.max(0, firstAt(line.x, x.low) - 1), end = Math.min(line.x.length, firstAt(line.x, x.high) + 1);
      for (let k = first; k < end && !line.hidden; k++) {
        const at = unit(x.place(line.x[k]));
        if (line.kind === "raw" && line.lows) points.push(`${at} ${height(line.lows[k])}`, `${at} ${height(line.highs[k])}`);
        else points.push(`${at} ${height(line.values[k])}`);
      }
      path.setAttribute("d", points.length ? `M${points.join("L")}${points.length === 1 ? "h1" : ""}` : "");
      dots[n].setAttribute("d", line.kind !== "smoothed" && line.x.length <= 24 && points.length <= 24 ? points.map(point => `M${point}h0`).join("") : "");
    });
  }

  ticks(selector, side, axis, about, label) {
    this.figure.querySelector(selector).replaceChildren(...axis.ticks(about).map(tick => {
      const span = document.createElement("span");
      span.textContent = label(tick);
      span.style[side] = `${100 * axis.place(tick)}%`;
      return span;
    }));
  }

  // A heat map is drawn over steps: only the part that is seen changes, and it stays straight where tokens and time run alike.
  stretch(x) {
    const [first, last] = this.data.steps;
    const [low, high] = [x.low, x.high].map(value => 1000 * (toStep(this.group, 0, value) - first) / (last - first));
    this.svg.setAttribute("viewBox", `${low} 0 ${Math.max(high - low, 1e-3)} 1000`);
    if (chosen.logX) this.ticks(".ticks.x", "left", this.x = new Axis(x.low, x.high, false), 6, AXES[chosen.x][1]);
  }

  share(event) {
    const box = this.plot.getBoundingClientRect();
    return clamp((event.clientX - box.left) / box.width, 0, 1);
  }

  point(event) {
    const share = this.share(event), box = this.plot.getBoundingClientRect();
    if (this.from !== undefined && Math.abs(share - this.from) > 0.01) {
      this.band.hidden = false;
      Object.assign(this.band.style, { left: `${100 * Math.min(share, this.from)}%`, width: `${100 * Math.abs(share - this.from)}%` });
    }
    if (this.data.rows) this.row = clamp(Math.floor((event.clientY - box.top) / box.height * this.data.rows.length), 0, this.data.rows.length - 1);
    move(this, this.x.at(share));
  }

  release(event) {
    const from = this.from, to = this.share(event);
    this.from = undefined;
    this.band.hidden = true;
    if (from === undefined || Math.abs(to - from) <= 0.01) return;
    zoom(this.group, [Math.min(from, to), Math.max(from, to)].map(share => toStep(this.group, 0, this.x.at(share))));
  }

  key(event) {
    const line = this.lines.find(one => !one.hidden) ?? this.lines[0], last = line.x.length - 1;
    const at = nearest(line.x, this.at ?? line.x[last]);
    const [low, high] = this.range(), here = toStep(this.group, 0, line.x[at]);
    const scale = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
    if (event.key === "0") return zoom(this.group, null);
    if (scale) {
      const [first, end] = this.data.steps, around = [here - scale * (here - low), here + scale * (high - here)];
      return zoom(this.group, around[0] <= first && around[1] >= end ? null : around.map(step => clamp(step, first, end)));
    }
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 10, PageDown: at + 10, Home: 0, End: last }[event.key];
    if (this.data.rows && /^Arrow(Up|Down)$/.test(event.key)) this.row = clamp((this.row ?? 0) + (event.key === "ArrowUp" ? -1 : 1), 0, this.data.rows.length - 1);
    else if (to === undefined) return;
    event.preventDefault();
    move(this, line.x[clamp(to ?? at, 0, last)]);
    document.getElementById("spoken").textContent = `${this.chip.textContent}: ${this.said()}`;
  }

  said() {
    return this.data.rows ? this.cell.textContent : this.readings.map(({ item }) => item.textContent.trim()).join(", ");
  }

  set(at, own) {
    const share = this.x.place(at);
    if (share < -0.001 || share > 1.001) return this.hide();
    this.at = at;
    this.cursor.hidden = false;
    this.cursor.style.left = `${100 * share}%`;
    this.cursor.classList.toggle("left", share > 0.6);
    this.cursor.classList.toggle("own", own);
    if (own) {
      const step = Math.round(toStep(this.group, 0, at)), tokens = data.axes[this.group][0].tokens;
      const seen = tokens && chosen.x !== "time" ? `${show.compact(tokens[1][nearest(data.steps[tokens[0]], step)])} tokens` : "";
      const clock = chosen.x === "time" ? `${significant(at, 3)} h` : "";
      const width = this.plot.clientWidth;
      const near = this.marks.filter(mark => !mark.element.hidden && Math.abs(mark.at - share) * width <= 6).map(mark => mark.text);
      this.chip.textContent = [`step ${step.toLocaleString("en-US")}`, seen, clock].filter(Boolean).join(" · ") + near.slice(0, 3).map(text => `\n${text}`).join("");
    }
    if (this.data.rows) {
      const row = this.row ?? 0;
      this.cell.textContent = own ? `layer ${this.data.rows[row]}: ${significant(this.lines[row].at(at))}` : "";
    } else {
      for (const { line, value } of this.readings) value.textContent = show[this.data.shown](line.at(at));
    }
  }

  hide() {
    this.cursor.hidden = true;
    if (this.cell) this.cell.textContent = "";
    for (const { line, value } of this.readings) value.textContent = show[this.data.shown](line.values.at(-1));
  }
}

const charts = [...document.querySelectorAll(".plot")].map(plot => new Chart(plot));
const move = (own, x) => charts.forEach(chart => { if (chart.group === own.group) chart.set(x, chart === own); });
const hide = group => charts.forEach(chart => { if (chart.group === group) chart.hide(); });
const draw = () => charts.forEach(chart => { chart.draw(); chart.hide(); });
const zoom = (group, steps) => {
  chosen.zoom[group] = steps && steps[1] - steps[0] >= 1 ? steps : null;
  controls.whole.hidden = !Object.values(chosen.zoom).some(Boolean);
  draw();
};

const controls = document.getElementById("controls");
if (controls) {
  controls.parentElement.hidden = charts.length === 0;
  controls.addEventListener("submit", event => event.preventDefault());
  controls.addEventListener("input", () => {
    Object.assign(chosen, { x: controls.x.value, logX: controls.logx.checked, logY: controls.logy.checked, smoothing: Number(controls.smoothing.value) });
    draw();
  });
  controls.whole.addEventListener("click", () => { chosen.zoom = {}; controls.whole.hidden = true; draw(); });
}
draw();

const button = document.getElementById("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");
const remembered = () => { try { return localStorage.getItem("lmworks-theme"); } catch { return null; } };
const paint = theme => { root.dataset.theme = theme ?? (dark.matches ? "dark" : "light"); };
paint(remembered());
dark.addEventListener("change", () => paint(remembered()));
button.hidden = false;
button.addEventListener("click", () => {
  const theme = root.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("lmworks-theme", theme); } catch { /* a file opened without storage forgets it */ }
  paint(theme);
});

const written = document.getElementById("written");
const untouched = () => charts.every(chart => chart.cursor.hidden) && !Object.values(chosen.zoom).some(Boolean);
const age = () => {
  const minutes = Math.floor((Date.now() / 1000 - Number(written.dataset.at)) / 60);
  if (data.running) written.title = `${minutes} minutes ago`;
  // a page of a running run is written anew now and then: look, but not while someone reads values out
  if (data.running && minutes >= 1 && !document.hidden && untouched()) location.reload();
};
setInterval(age, 60_000);
