"use strict";
// Adds to a page that is whole without it: one cursor for all charts of a stage, and the switch between light and dark.
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

// The index of the step in `steps` (rising) that is nearest to `step`.
const nearest = (steps, step) => {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
};
const valueAt = ([grid, values], step) => values[nearest(data.steps[grid], step)];

class Chart {
  constructor(plot) {
    this.plot = plot;
    this.figure = plot.closest("figure");
    this.data = data.charts[plot.dataset.chart];
    this.logarithm = this.figure.querySelector(".logx");
    this.cursor = plot.appendChild(Object.assign(document.createElement("div"), { className: "cursor", hidden: true }));
    this.chip = this.cursor.appendChild(Object.assign(document.createElement("span"), { className: "chip" }));
    this.values = [...this.figure.querySelectorAll(".legend li:not(.kind, .scale) b")];
    this.resting = this.values.map(value => value.textContent);
    plot.addEventListener("pointermove", event => this.point(event));
    plot.addEventListener("pointerdown", event => this.point(event));
    plot.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") hide(this.data.group); });
    plot.addEventListener("blur", () => hide(this.data.group));
    plot.addEventListener("keydown", event => this.key(event));
  }

  scale() {
    const [first, last] = this.data.steps;
    return this.logarithm?.checked ? [Math.log(Math.max(first, 1)), Math.log(Math.max(last, 2)), Math.exp, Math.log] : [first, last, Number, Number];
  }

  point(event) {
    const box = this.plot.getBoundingClientRect();
    const [low, high, from] = this.scale();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    this.row = this.data.rows && Math.min(this.data.rows.length - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * this.data.rows.length)));
    move(this, from(low + share * (high - low)));
  }

  key(event) {
    const steps = data.steps[this.data.lines[0][0]];
    const at = nearest(steps, this.step ?? steps[steps.length - 1]);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 10, PageDown: at + 10, Home: 0, End: steps.length - 1 }[event.key];
    if (this.data.rows && /^Arrow(Up|Down)$/.test(event.key)) this.row = Math.min(this.data.rows.length - 1, Math.max(0, (this.row ?? 0) + (event.key === "ArrowUp" ? -1 : 1)));
    else if (to === undefined) return;
    event.preventDefault();
    move(this, steps[Math.min(steps.length - 1, Math.max(0, to ?? at))]);
    document.getElementById("spoken").textContent = `${this.chip.textContent}: ${this.said()}`;
  }

  said() {
    return this.data.rows ? this.values[0].textContent : [...this.figure.querySelectorAll(".legend li:not(.kind, .scale)")].map(item => item.textContent.trim()).join(", ");
  }

  set(step, own) {
    const [low, high, , to] = this.scale();
    const share = (to(Math.max(step, this.logarithm?.checked ? 1 : step)) - low) / (high - low);
    if (share < -0.001 || share > 1.001) return this.hide();
    this.step = step;
    this.cursor.hidden = false;
    this.cursor.style.left = `${100 * share}%`;
    this.cursor.classList.toggle("left", share > 0.6);
    this.cursor.classList.toggle("own", own);
    const reach = 0.006 * (this.data.steps[1] - this.data.steps[0]);
    const near = own ? this.data.marks.filter(([at]) => Math.abs(at - step) <= reach).slice(0, 2).map(([, text]) => text) : [];
    const tokens = own && this.data.group === "pretrain" && data.tokens ? `${show.compact(valueAt(data.tokens, step))} tokens` : "";
    this.chip.textContent = [`step ${Math.round(step).toLocaleString("en-US")}`, tokens, ...near].filter(Boolean).join(" · ");
    if (this.data.rows) {
      const row = this.row ?? 0;
      this.values[0].textContent = own ? `layer ${this.data.rows[row]}: ${significant(valueAt(this.data.lines[row], step))}` : "";
    } else {
      this.data.lines.forEach((line, n) => { this.values[n].textContent = show[this.data.shown](valueAt(line, step)); });
    }
  }

  hide() {
    this.cursor.hidden = true;
    this.values.forEach((value, n) => { value.textContent = this.resting[n]; });
  }
}

const charts = [...document.querySelectorAll(".plot")].map(plot => new Chart(plot));
const move = (own, step) => charts.forEach(chart => { if (chart.data.group === own.data.group) chart.set(step, chart === own); });
const hide = group => charts.forEach(chart => { if (chart.data.group === group) chart.hide(); });

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
const age = () => {
  const minutes = Math.floor((Date.now() / 1000 - Number(written.dataset.at)) / 60);
  if (data.running) written.title = `${minutes} minutes ago`;
  // a page of a running run is written anew now and then: look, but not while someone reads values out
  if (data.running && minutes >= 1 && !document.hidden && charts.every(chart => chart.cursor.hidden)) location.reload();
};
setInterval(age, 60_000);
