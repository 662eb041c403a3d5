"use strict";
// Draws the charts of a page with uPlot from the numbers in #data: one cursor for all charts of a group, axes, zoom, smoothing and hidden
// lines at the reader's choice, and the numbers as CSV.
const data = JSON.parse(document.getElementById("data").textContent);

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

// What the reader has chosen, for all charts; a page that loads itself again keeps it, with the lines that are hidden.
const chosen = { x: "step", logX: false, logY: false, smoothing: 1.5 }, hidden = new Set();
const KEPT = `lmworks ${location.pathname}`;
const keep = () => {
  try { sessionStorage.setItem(KEPT, JSON.stringify({ chosen, hidden: [...hidden] })); } catch { /* a file opened without storage forgets it */ }
};
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
// `axis` of steps of a run, as [steps, values]; none where they are the same.
const tableOf = (group, run, axis = chosen.x) => {
  const found = data.axes[group]?.[run]?.[axis];
  return found && [data.steps[found[0]], found[1]];
};
const fromStep = (group, run, step) => {
  const found = tableOf(group, run);
  return found ? between(...found, step) : step;
};
const toStep = (group, run, x) => {
  const found = tableOf(group, run);
  return found ? between(found[1], found[0], x) : x;
};

// A centered mean with Gaussian weights, `percent` of the series wide, never wider than a fifth of the way from the start, so that the
// steep beginning stays steep also on a logarithmic axis. It does not reach over a gap.
const smooth = (values, percent) => values.map((value, at) => {
  const width = Math.min(percent / 100 * values.length, 0.2 * at);
  if (width < 0.5 || value === null) return value;
  let sum = value, weights = 1;
  for (const side of [-1, 1]) {
    for (let n = at + side; Math.abs(n - at) <= 2.5 * width && (values[n] ?? null) !== null; n += side) {
      const weight = Math.exp(-((n - at) ** 2) / (2 * width * width));
      sum += weight * values[n];
      weights += weight;
    }
  }
  return sum / weights;
});

// The indices of values between gaps: of them a line draws nothing. Of an x of other lines only, a line has undefined.
const lone = values => {
  const own = [...values.keys()].filter(n => values[n] !== undefined), gap = at => (values[own[at]] ?? null) === null;
  return own.filter((n, at) => !gap(at) && gap(at - 1) && gap(at + 1));
};

// Colors of the style sheet as the canvas needs them: resolved, for the theme of the moment.
const probe = document.body.appendChild(Object.assign(document.createElement("i"), { hidden: true }));
const color = (tone, opacity = 1) => {
  probe.style.color = `var(--${tone})`;
  const [red, green, blue] = canvasColor(getComputedStyle(probe).getPropertyValue("color"));
  return `rgb(${red} ${green} ${blue} / ${opacity})`;
};
const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const canvasColor = text => {
  pixel.fillStyle = text;
  pixel.fillRect(0, 0, 1, 1);
  return pixel.getImageData(0, 0, 1, 1).data;
};
const FONT = "12px ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif";
const DASHES = [[7, 3], [3, 3], [10, 3, 2, 3]];  // of runs beyond the number of colors

// Round values of a logarithmic axis, at most about `most()` of them: 1, 2 and 5 of each decade, or fewer of many decades.
const round = most => ({
  filter: (u, ticks) => ticks,
  splits: (u, axis, low, high) => {
    const of = factors => {
      const found = [];
      for (let n = Math.floor(Math.log10(low)); n <= Math.log10(high); n++) found.push(...factors.map(factor => factor * 10 ** n).filter(tick => tick >= low && tick <= high));
      return found;
    };
    const limit = Math.max(2, most()), tried = [[1, 1.5, 2, 3, 4, 5, 7], [1, 2, 5], [1, 3], [1]].map(of);
    const found = tried.find(ticks => ticks.length <= limit) ?? tried.at(-1), often = Math.ceil(found.length / limit);
    return found.filter((_, n) => n % often === 0);
  },
});

class Chart {
  constructor(plot) {
    this.plot = plot;
    this.figure = plot.closest("figure");
    Object.assign(this, data.charts[plot.dataset.chart]);
    for (const line of this.lines) {
      line.at = data.steps[line.steps];
      line.hidden = hidden.has(this.nameOf(line));
    }
    this.run = this.lines.some(line => line.run === 0) ? 0 : this.lines[0].run;  // whose steps are read out
    this.chip = Object.assign(document.createElement("span"), { className: "chip" });
    this.signs = this.marks.map(([step, kind, text]) => ({ step, text, element: Object.assign(document.createElement("i"), { className: `mark ${kind}` }) }));
    this.readings = [...this.figure.querySelectorAll("[data-line]")].map(item => this.toggle(item));
    this.cell = this.figure.querySelector(".cell b");
    plot.addEventListener("keydown", event => this.key(event));
    plot.addEventListener("blur", () => charts.forEach(chart => chart.rest()));
    const numbers = this.figure.querySelector(".numbers"), save = Object.assign(document.createElement("button"), { type: "button", textContent: "Save as CSV" });
    save.addEventListener("click", () => this.save());
    numbers.append(save);
    new ResizeObserver(() => this.u?.setSize(this.size())).observe(plot);
  }

  nameOf(line) { return `${this.plot.dataset.chart} ${line.name}`; }

  // A legend entry that shows and hides its line.
  toggle(item) {
    const line = this.lines[item.dataset.line], value = item.querySelector("b");
    const turn = () => {
      line.hidden = !line.hidden;
      hidden[line.hidden ? "add" : "delete"](this.nameOf(line));
      keep();
      item.setAttribute("aria-pressed", String(!line.hidden));
      for (const n of line.series) this.u.setSeries(n, { show: !line.hidden });
    };
    Object.assign(item, { tabIndex: 0, title: "show or hide" });
    item.setAttribute("role", "button");
    item.setAttribute("aria-pressed", String(!line.hidden));
    item.addEventListener("click", turn);
    item.addEventListener("keydown", event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); turn(); } });
    return { line, value, item };
  }

  size() { return { width: Math.max(this.plot.clientWidth, 40), height: Math.max(this.plot.clientHeight, 40) }; }

  // All of the x axis: of the runs compared, up to where the longest has come.
  whole() {
    const ends = [...new Set(this.lines.map(line => line.run))].map(run => {
      const last = Math.min(this.steps[1], data.axes[this.group]?.[run]?.last ?? this.steps[1]);
      return [fromStep(this.group, run, this.steps[0]), fromStep(this.group, run, last)];
    });
    let low = Math.min(...ends.map(end => end[0])), high = Math.max(...ends.map(end => end[1]));
    if (this.logX || chosen.logX) low = Math.max(low, high / 1e6, this.logX || chosen.x !== "step" ? 0 : 1);
    return [low, high > low ? high : low + 1];
  }

  yRange(low, high) {
    if (this.rows) return [0, this.lines.length];
    if (low === null || low === undefined) return [0, 1];
    if (!this.zoomed) for (const [value] of this.levels) [low, high] = [Math.min(low, value), Math.max(high, value)];
    if (this.logY) return [Math.max(low > 0 ? low : high / 1e4, 1e-12) / 1.15, Math.max(high, 1e-12) * 1.15];
    if (this.top !== null && !this.zoomed) high = Math.min(high, Math.max(this.top, low));
    const room = 0.06 * (high - low) || 0.05 * Math.abs(high) || 1;
    if (this.zero && low >= 0) return [low > 0 ? 0 : -0.03 * (high + room), high + room];  // a line of zeros lies within, not on the border
    return [low - room, high + room];
  }

  // The lines as uPlot has them, one table of rising x and values for each.
  build() {
    this.u?.destroy();
    const logX = this.logX || chosen.logX, series = [{}], bands = [], tables = [];
    this.logY = !this.rows && (this.log || chosen.logY) && this.lines.some(line => line.values.some(value => value > 0));
    const [label, text] = this.across ? [this.across, show[this.acrossShown]] : AXES[chosen.x];
    for (const line of this.lines) {
      line.x = line.at.map(step => fromStep(this.group, line.run, step));
      line.series = [];
      const seen = line.x.map((x, n) => n).filter(n => !logX || line.x[n] > 0), table = [seen.map(n => line.x[n])];
      const add = (values, options) => {
        line.series.push(series.length);
        table.push(seen.map(n => values[n]));
        series.push({ show: !line.hidden, points: { show: false }, ...options });
      };
      const tone = opacity => () => color(line.tone, opacity), few = line.values.length <= 24;
      if (this.rows) add(line.values, { paths: () => null });
      else {
        const smoothed = line.style === "smooth" && chosen.smoothing > 0 && !few;
        if (line.low && line.style !== "faint") {
          const gaps = side => side.map((value, n) => line.values[n] === null ? null : value);
          bands.push({ series: [series.length, series.length + 1], fill: tone({ smooth: 0.3, dashed: 0.1 }[line.style] ?? 0.16) });
          for (const side of [line.high, line.low]) add(gaps(side), { stroke: tone(line.style === "smooth" ? 0.4 : 0.001), width: 0.75 });
        }
        if (smoothed && !line.low) add(line.values, { stroke: tone(0.4), width: 1 });
        const width = { thin: 1.25, faint: 1, area: 1.75 }[line.style] ?? 2;
        const dash = line.style === "dashed" ? DASHES[Math.floor((line.run - 1) / 6) % DASHES.length] : undefined;
        add(smoothed ? smooth(line.values, chosen.smoothing) : line.values, {
          stroke: tone(line.style === "faint" ? 0.35 : 1), width, dash, points: { show: few && line.style !== "area" ? true : undefined, filter: (u, n, all) => all ? null : lone(u.data[n]), size: 6, fill: tone(1) },
          ...(line.style === "area" && { fill: tone(0.14), paths: uPlot.paths.stepped({ align: 1 }) }),
        });
      }
      tables.push(table);
    }
    const range = this.whole();
    const about = (_, values) => Math.ceil(Math.max(24, ...(values ?? []).map(value => (pixel.font = FONT, pixel.measureText(value ?? "").width)))) + 12;
    const axis = { stroke: () => color("soft"), ticks: { show: false }, font: FONT, labelFont: FONT };
    const yText = show[this.shown], layers = value => this.lines[this.lines.length - 1 - Math.floor(value)]?.name;
    const table = uPlot.join(tables), first = table[0][0], last = table[0].at(-1);
    const zoomed = (low, high) => low !== null && first !== last && (low !== first || high !== last);  // uPlot widens a range of one value itself
    this.u = new uPlot({
      ...this.size(), bands, series, legend: { show: false }, padding: [this.named ? 20 : 8, 24, 0, 0]  /* names of phases stand above the lines */,
      scales: {
        x: { time: false, distr: logX ? 3 : 1, range: (u, low, high) => zoomed(low, high) ? [low, high] : range },
        y: { distr: this.logY ? 3 : 1, range: (u, low, high) => this.yRange(low, high) },
      },
      axes: [
        { ...axis, grid: { show: false }, values: (u, ticks) => ticks.map(tick => tick === null ? "" : text(tick)), size: 24, gap: 4, space: 64, ...(logX && round(() => this.u.over.clientWidth / 64)), label, labelSize: 16, labelGap: 0 },
        {
          ...axis, grid: { show: !this.rows, stroke: () => color("rule"), width: 1 }, size: about, gap: 6, space: 34, ...(this.logY && round(() => this.u.over.clientHeight / 34)),
          ...(this.rows ? { splits: () => this.layers(), values: (u, ticks) => ticks.map(layers) } : { values: (u, ticks) => ticks.map(tick => tick === null ? "" : yText(tick)) }),
        },
      ],
      cursor: { y: false, points: { show: false }, sync: { key: this.group }, drag: { x: true, y: false, dist: 5 } },
      hooks: {
        drawAxes: [u => this.background(u)],
        draw: [u => this.foreground(u)],
        setCursor: [u => this.read(u)],
        setScale: [(u, key) => {
          if (key !== "x") return;
          this.zoomed = u.scales.x.min > range[0] * (1 + 1e-9) || u.scales.x.max < range[1] * (1 - 1e-9);
          if (controls) controls.whole.hidden = !charts.some(chart => chart.zoomed);
        }],
      },
    }, table, this.plot);
    this.wholeRange = range;
    this.u.over.append(...this.signs.map(sign => sign.element), this.chip);
    this.place();
    this.rest();
  }

  layers() {
    const count = this.lines.length, often = Math.max(1, Math.ceil(count / 10));
    return this.lines.map((_, n) => n).filter(n => n % often === 0).map(n => count - n - 0.5).reverse();
  }

  x(step) { return fromStep(this.group, this.run, step); }

  // Phases, shaded ranges and levels, behind the lines.
  background(u) {
    const { ctx, bbox } = u, ratio = devicePixelRatio, at = value => Math.round(u.valToPos(value, "x", true));
    const rule = (dash, draw) => { ctx.beginPath(); ctx.setLineDash(dash.map(one => one * ratio)); draw(); ctx.stroke(); };
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, 0, bbox.width, bbox.top + bbox.height);
    ctx.clip();
    ctx.lineWidth = ratio;
    if (this.shade) {
      ctx.fillStyle = color("accent", 0.14);
      ctx.fillRect(at(this.shade[0]), bbox.top, at(this.shade[1]) - at(this.shade[0]), bbox.height);
    }
    ctx.strokeStyle = ctx.fillStyle = color("soft");
    ctx.font = FONT.replace("12px", `${12 * ratio}px`);
    ctx.textBaseline = "bottom";
    ctx.textAlign = "left";
    this.phases.forEach(([step, name], n) => {
      const from = Math.max(bbox.left, at(this.x(step))), to = Math.min(bbox.left + bbox.width, n + 1 < this.phases.length ? at(this.x(this.phases[n + 1][0])) : Infinity);
      if (n && from > bbox.left) rule([1, 3], () => { ctx.moveTo(from, bbox.top - (this.named ? 16 * ratio : 0)); ctx.lineTo(from, bbox.top + bbox.height); });
      // a name that does not fit is left to the read-out
      if (this.named && ctx.measureText(name).width + 10 * ratio < to - from) ctx.fillText(name, from + (n ? 5 : 0) * ratio, bbox.top - 3 * ratio);
    });
    ctx.lineWidth = 1.5 * ratio;
    for (const [value, tone] of this.levels) {
      const y = Math.round(u.valToPos(value, "y", true));
      ctx.strokeStyle = color(tone);
      rule({ l0: [6, 4], l1: [2, 3] }[tone] ?? [9, 3, 2, 3], () => { ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); });
    }
    ctx.restore();
    if (this.rows) this.heat(u);
  }

  // A cell for each value, down to half-way to its neighbors. Colors end at the 98th percentile, so that a bad beginning does not bleach the rest.
  heat(u) {
    const { ctx, bbox } = u, values = this.lines.flatMap(line => line.values).filter(value => value !== null).sort((a, b) => a - b);
    const top = values[Math.floor(0.98 * (values.length - 1))] || 1, height = bbox.height / this.lines.length;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.fillStyle = color("rule");
    ctx.fillRect(bbox.left, bbox.top, bbox.width, bbox.height);
    const shades = Array.from({ length: 33 }, (_, n) => color("c0", 0.03 + 0.97 * n / 32));
    this.lines.forEach((line, row) => {
      const places = line.x.map(x => u.valToPos(x, "x", true)), upper = Math.round(bbox.top + row * height);
      places.forEach((place, n) => {
        if (line.values[n] === null) return;
        const left = Math.round(n ? (places[n - 1] + place) / 2 : bbox.left), right = Math.round(n + 1 < places.length ? (place + places[n + 1]) / 2 : bbox.left + bbox.width);
        ctx.fillStyle = shades[Math.round(32 * clamp(line.values[n] / top, 0, 1))];
        ctx.fillRect(left, upper, right - left, Math.round(bbox.top + (row + 1) * height) - upper);
      });
    });
    ctx.restore();
  }

  foreground() { if (this.u) this.place(); }

  place() {
    const { min, max } = this.u.scales.x;
    for (const sign of this.signs) {
      sign.x = this.x(sign.step);
      sign.element.hidden = sign.x < min || sign.x > max;
      sign.element.style.left = `${this.u.valToPos(sign.x, "x")}px`;
    }
  }

  // The values at the cursor, in the legend; and of the chart under the pointer or the keys what happened there.
  read(u) {
    const { left, top } = u.cursor;
    if (!(left >= 0)) return this.rest();
    const x = u.posToVal(left, "x"), width = u.over.clientWidth;
    this.at = x;
    const own = u.over.matches(":hover") || document.activeElement === this.plot && charts.keys === this;
    if (this.rows) {
      if (own && top >= 0) this.row = clamp(Math.floor(top / u.over.clientHeight * this.lines.length), 0, this.lines.length - 1);
      const line = this.lines[this.row ?? 0];
      this.cell.textContent = own ? `layer ${line.name}: ${this.value(line, x)}` : "";
    }
    for (const { line, value } of this.readings) value.textContent = this.value(line, x);
    this.chip.hidden = !own;
    if (!own) return;
    const said = [this.across ? `${show[this.acrossShown](x)} ${this.across}` : ""];
    if (!this.across) {
      const step = Math.round(toStep(this.group, this.run, x)), tokens = tableOf(this.group, this.run, "tokens"), phase = this.phases.findLast(one => one[0] < step);
      said[0] = [`step ${step.toLocaleString("en-US")}`, tokens && `${show.compact(between(...tokens, step))} tokens`, chosen.x === "time" && `${significant(x, 3)} h`].filter(Boolean).join(" · ");
      if (this.phases.length > 1 && phase) said.push(`phase ${phase[1]}`);
      said.push(...this.meant(x));
    }
    const near = this.signs.filter(sign => !sign.element.hidden && Math.abs(u.valToPos(sign.x, "x") - left) <= 6);
    this.chip.textContent = [...said, ...near.slice(0, 8).map(sign => `step ${sign.step.toLocaleString("en-US")}: ${sign.text}`), near.length > 8 ? `and ${near.length - 8} more` : ""].filter(Boolean).join("\n");
    const right = left > 0.6 * width;
    Object.assign(this.chip.style, { left: right ? "auto" : `${left + 6}px`, right: right ? `${width - left + 6}px` : "auto", maxWidth: `${Math.max(90, right ? left - 12 : width - left - 12)}px` });
  }

  // The point of a line that stands for `x`; none beyond the ends of the line. Of a long run a point stands for several steps, and a gap
  // for all of the steps in it.
  point(line, x) {
    const step = toStep(this.group, line.run, x), near = nearest(line.x, x), last = line.at.length - 1;
    const [from, to] = line.from === undefined ? [line.at, line.at] : [data.steps[line.from], data.steps[line.to]];
    const within = n => from[n] < to[n] && from[n] - 0.5 <= step && step < to[n] + 0.5;
    const around = [near, near - 1, near + 1, near - 2, near + 2], found = around.find(n => line.values[n] === null && within(n)) ?? around.find(within);
    const room = last ? Math.max(line.at[1] - line.at[0], line.at[last] - line.at[last - 1]) : (this.steps[1] - this.steps[0]) / 50;
    const beyond = step < from[0] - room || step > to[last] + room;
    return { n: found ?? (beyond ? undefined : near), from, to, step };
  }

  value(line, x) {
    const { n } = this.point(line, x);
    return n === undefined ? "–" : line.values[n] === null ? "not finite" : show[this.shown](line.values[n]);
  }

  // Of which steps the values at `x` are, where they are not those of the step itself.
  meant(x) {
    const lines = this.rows ? [this.lines[this.row ?? 0]] : this.readings.map(({ line }) => line).filter(line => !line.hidden), texts = new Map();
    for (const line of lines) {
      const { n, from, to, step } = this.point(line, x), number = value => Math.round(value).toLocaleString("en-US");
      if (n === undefined) continue;
      const several = from[n] < to[n], words = line.values[n] === null ? "no finite value in" : "mean of";
      const text = several ? `${words} steps ${number(from[n])}–${number(to[n])}` : Math.abs(line.at[n] - step) < 1 ? "" : `measured at step ${number(line.at[n])}`;
      texts.set(text, [...(texts.get(text) ?? []), line.name]);
    }
    return [...texts].filter(([text]) => text).slice(0, 6).map(([text, names]) => texts.size > 1 ? `${names.slice(0, 4).join(", ")}${names.length > 4 ? " and others" : ""}: ${text}` : text);
  }

  rest() {
    this.at = undefined;
    this.chip.hidden = true;
    if (this.cell) this.cell.textContent = "";
    for (const { line, value } of this.readings) value.textContent = line.style === "area" ? "" : line.last === null ? "not finite" : show[this.shown](line.last);
  }

  key(event) {
    const line = this.lines.find(one => !one.hidden) ?? this.lines[0], last = line.x.length - 1, at = nearest(line.x, this.at ?? line.x[last]);
    const { min, max } = this.u.scales.x, scale = { "+": 0.5, "=": 0.5, "-": 2 }[event.key], [low, high] = this.wholeRange;
    if (event.key === "0") return zoom(this.group, null);
    if (scale) return zoom(this.group, [Math.max(low, line.x[at] - scale * (line.x[at] - min)), Math.min(high, line.x[at] + scale * (max - line.x[at]))]);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 10, PageDown: at + 10, Home: 0, End: last }[event.key];
    if (this.rows && /^Arrow(Up|Down)$/.test(event.key)) this.row = clamp((this.row ?? 0) + (event.key === "ArrowUp" ? -1 : 1), 0, this.lines.length - 1);
    else if (to === undefined) return;
    event.preventDefault();
    charts.keys = this;
    const x = line.x[clamp(to ?? at, 0, last)], height = this.u.over.clientHeight;
    for (const chart of charts) if (chart.group === this.group) chart.u.setCursor({ left: chart.u.valToPos(x, "x"), top: chart === this && this.rows ? ((this.row ?? 0) + 0.5) / this.lines.length * height : 1 }, true, false);
    document.getElementById("spoken").textContent = `${this.chip.textContent}: ${this.cell?.textContent || this.readings.map(({ item }) => item.textContent.replace(/\s+/g, " ").trim()).join(", ")}`;
  }

  // One row for each point of each line. A cell that a spreadsheet would take for a formula is made text.
  save() {
    const cell = value => { const text = String(value ?? ""); return `"${(/^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text)) ? "'" + text : text).replaceAll('"', '""')}"`; };
    const over = (line, axis, step) => { const found = tableOf(this.group, line.run, axis); return found ? between(...found, step) : ""; };
    const rows = [["line", this.across || "step", "tokens", "hours", "value", "lowest", "highest"]];
    for (const line of this.lines) line.at.forEach((step, n) => rows.push([line.name, step, over(line, "tokens", step), over(line, "time", step), line.values[n], line.low?.[n], line.high?.[n]]));
    const link = Object.assign(document.createElement("a"), {
      href: URL.createObjectURL(new Blob([rows.map(row => row.map(cell).join(",")).join("\r\n") + "\r\n"], { type: "text/csv" })),
      download: `${this.plot.dataset.chart.replace(/[^\w-]+/g, "-")}.csv`,
    });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }
}

const controls = document.getElementById("controls");
// What the controls say, which a browser that goes back to the page sets by itself.
const read = () => Object.assign(chosen, { x: controls.x.value, logX: controls.logx.checked, logY: controls.logy.checked, smoothing: Number(controls.smoothing.value) });
try {
  const kept = JSON.parse(sessionStorage.getItem(KEPT));
  for (const name of kept?.hidden ?? []) hidden.add(name);
  if (kept && controls) {
    Object.assign(chosen, kept.chosen);
    [controls.x.value, controls.logx.checked, controls.logy.checked, controls.smoothing.value] = [chosen.x, chosen.logX, chosen.logY, chosen.smoothing];
  }
} catch { /* as above */ }
const charts = [...document.querySelectorAll(".plot")].map(plot => new Chart(plot));
const draw = () => { for (const chart of charts) { chart.zoomed = false; chart.build(); } if (controls) controls.whole.hidden = true; };
const zoom = (group, range) => {
  for (const chart of charts) if (chart.group === group) { const [min, max] = range ?? chart.wholeRange; chart.u.setScale("x", { min, max }); }
};
if (controls) {
  controls.parentElement.hidden = charts.length === 0;
  if (!Object.keys(data.axes).length) for (const one of controls.querySelectorAll(".axis, .smoothing")) one.hidden = true;
  controls.addEventListener("submit", event => event.preventDefault());
  let waiting = 0;
  controls.addEventListener("input", () => {
    read();
    keep();
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(draw);
  });
  addEventListener("pageshow", () => {
    const before = JSON.stringify(chosen);
    if (JSON.stringify(read()) !== before) draw();
  });
  controls.whole.addEventListener("click", draw);
}

// The switch between light and dark works without this; here it is remembered, and the charts are drawn in its colors.
const turned = document.querySelector("#theme input");
try { turned.checked = localStorage.getItem("lmworks-theme") === "turned"; } catch { /* a file opened without storage forgets it */ }
turned.addEventListener("change", () => {
  try { localStorage.setItem("lmworks-theme", turned.checked ? "turned" : ""); } catch { /* as above */ }
  draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();

// A page of a running run is written anew now and then: look, but not while someone reads. One that was not written for long says so: a
// run that was killed cannot.
const written = document.getElementById("written"), state = document.querySelector(".state.running");
const look = () => {
  const minutes = Math.floor((Date.now() / 1000 - Number(written.dataset.at)) / 60), reading = charts.some(chart => chart.at !== undefined || chart.zoomed) || document.querySelector("details[open]");
  written.title = `${minutes} minutes ago`;
  if (state && minutes >= 5) state.dataset.age = minutes < 120 ? `when this was written, ${minutes} minutes ago` : `when this was written, ${Math.floor(minutes / 60)} hours ago`;
  return minutes >= 1 && !document.hidden && !reading;
};
if (data.running) {
  look();
  setInterval(() => { if (look()) location.reload(); }, 60_000);
}
