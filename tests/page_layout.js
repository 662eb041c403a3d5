// Evaluated in a page by page_layout.py: what is wrong with the layout, one line for each fault.
(limits) => {
  const wrong = [], view = document.documentElement.clientWidth;
  const name = element => element.tagName.toLowerCase() + (element.id ? "#" + element.id : "") + [...element.classList].map(one => "." + one).join("");
  const path = element => (element.parentElement ? name(element.parentElement) + " > " : "") + name(element);
  const say = (what, element, text) => { if (wrong.length < 40) wrong.push(`${what}: ${path(element)}: ${JSON.stringify(text.trim().slice(0, 60))}`); };
  if (document.documentElement.scrollWidth > view) wrong.push(`the page scrolls sideways: ${document.documentElement.scrollWidth} > ${view}`);

  // pieces of text: what is seen of each line of each text node, cut by every ancestor that hides or scrolls
  const pieces = [], style = new Map();
  const of = element => { if (!style.has(element)) style.set(element, getComputedStyle(element)); return style.get(element); };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || element.closest("script, style, noscript, title, option, [aria-hidden='true'] > svg") || !element.checkVisibility({ visibilityProperty: true, opacityProperty: true, contentVisibilityAuto: true })) continue;
    if (of(element).clipPath !== "none" || element.closest(".sr, .skip, .visually-hidden")) continue;
    let fixed = false, mine = null;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) {
      if (rect.width < 1 || rect.height < 1) continue;
      let box = { left: rect.left, right: rect.right, top: rect.top, bottom: rect.bottom }, hidden = false;
      for (let up = element; up && up !== document.body; up = up.parentElement) {
        const { overflowX, overflowY, position, textOverflow } = of(up), edge = up.getBoundingClientRect();
        if (position === "sticky" || position === "fixed") fixed = true;
        if (of(up).display === "inline" || (overflowX === "visible" && overflowY === "visible")) continue;
        if (textOverflow === "ellipsis" && up.title.trim() === up.textContent.trim()) { box.right = Math.min(box.right, edge.right); continue; }  // the whole can be had
        const beyond = Math.max(box.right - edge.right, edge.left - box.left), below = Math.max(box.bottom - edge.bottom, edge.top - box.top);
        const scrolls = side => ["auto", "scroll"].includes(side);
        if ((beyond > 1 && !scrolls(overflowX)) || (below > rect.height / 3 && !scrolls(overflowY))) { say("cut", element, node.data); hidden = true; break; }
        box = { left: Math.max(box.left, edge.left), right: Math.min(box.right, edge.right), top: Math.max(box.top, edge.top), bottom: Math.min(box.bottom, edge.bottom) };
        if (box.right - box.left < 1 || box.bottom - box.top < 1) { hidden = true; break; }
      }
      if (hidden) continue;
      if (box.right > view + 1 || box.left < -1) say("outside of the window", element, node.data);
      pieces.push({ ...box, node, element, fixed });
    }
  }
  // letters stacked upon each other: one word broken over many lines
  for (const [node, parts] of Map.groupBy(pieces, piece => piece.node)) {
    const words = node.data.trim().split(/\s+/), longest = Math.max(...words.map(word => word.length));
    const narrow = parts.every(part => part.right - part.left < 2.2 * parseFloat(of(part.element).fontSize));
    if (longest >= 4 && parts.length >= 3 && parts.length > words.length && narrow) say("broken letter by letter", parts[0].element, node.data);
  }
  pieces.sort((a, b) => a.top - b.top);
  pieces.forEach((a, n) => {
    for (let m = n + 1; m < pieces.length && pieces[m].top < a.bottom; m++) {
      const b = pieces[m];
      if (a.node === b.node || a.fixed !== b.fixed) continue;
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left), down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      // lines of one block may have line boxes that overlap by less than a third, as headings do
      if (across > 1 && down > 0.34 * Math.min(a.bottom - a.top, b.bottom - b.top)) say(`collides with ${JSON.stringify(b.node.data.trim().slice(0, 40))}`, a.element, a.node.data);
    }
  });

  // contrast of text with the first opaque ground behind it
  const context = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const rgba = color => {
    if (!known.has(color)) { context.clearRect(0, 0, 1, 1); context.fillStyle = color; context.fillRect(0, 0, 1, 1); known.set(color, [...context.getImageData(0, 0, 1, 1).data]); }
    return known.get(color);
  };
  const light = color => color.slice(0, 3).map(value => value / 255).map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
  const seen = new Set();
  for (const { element, node } of pieces) {
    if (seen.has(element) || element.closest("[disabled], [aria-pressed='false']")) continue;
    seen.add(element);
    let ground = element;
    while (ground.parentElement && rgba(of(ground).backgroundColor)[3] < 250) ground = ground.parentElement;
    const ink = rgba(of(element).color), [a, b] = [light(ink), light(rgba(of(ground).backgroundColor))].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(of(element).fontSize), large = size >= limits.large || (size >= 18.66 && Number(of(element).fontWeight) >= 700);
    if (ratio < (large ? 3 : limits.contrast)) say(`contrast ${ratio.toFixed(2)}`, element, node.data);
  }

  // charts: a canvas with other colors than those of the grid and of phases, and labels that neither collide nor are cut
  for (const plot of document.querySelectorAll(".plot[data-chart]")) {
    if (!plot.checkVisibility()) continue;
    const canvas = plot.querySelector("canvas");
    if (!canvas) { wrong.push(`no chart: ${plot.dataset.chart}`); continue; }
    const { data, width, height } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height), ground = ["rule", "soft"].map(tone => { document.body.style.caretColor = `var(--${tone})`; return rgba(getComputedStyle(document.body).caretColor); });
    let drawn = 0;
    const over = plot.querySelector(".u-over").getBoundingClientRect(), all = canvas.getBoundingClientRect(), scale = width / all.width;
    for (let y = Math.ceil((over.top - all.top) * scale); y < (over.bottom - all.top) * scale; y++) for (let x = Math.ceil((over.left - all.left) * scale); x < (over.right - all.left) * scale; x++) {
      const at = 4 * (y * width + x), [red, green, blue] = data.slice(at, at + 3);
      if (data[at + 3] > 60 && ground.every(one => Math.abs(one[0] - red) + Math.abs(one[1] - green) + Math.abs(one[2] - blue) > 24)) drawn++;
    }
    if (drawn < 12) wrong.push(`a chart without lines: ${plot.dataset.chart}`);
    const texts = window.drawnTexts?.get(canvas) ?? [];
    if (window.drawnTexts && texts.length < 2) wrong.push(`a chart without labels: ${plot.dataset.chart}`);
    texts.forEach((a, n) => {
      if (a.left < -1 || a.right > width + 1 || a.top < -1 || a.bottom > height + 1) wrong.push(`a label of a chart is cut: ${plot.dataset.chart}: ${a.text}`);
      for (const b of texts.slice(n + 1)) if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 0 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0) wrong.push(`labels of a chart collide: ${plot.dataset.chart}: ${a.text}, ${b.text}`);
    });
    if (Math.abs(all.width - plot.clientWidth) > 1 || Math.abs(all.height - plot.clientHeight) > 1) wrong.push(`a chart of another size than its place: ${plot.dataset.chart}`);
  }
  for (const box of document.querySelectorAll(".scroll")) if (box.checkVisibility() && box.scrollWidth > box.clientWidth + 1 && (view < 700 || box.querySelectorAll("thead th").length < 9)) say(`columns out of sight, ${box.scrollWidth} > ${box.clientWidth}`, box, box.textContent.replace(/\s+/g, " "));
  const ids = [...document.querySelectorAll("[id]")].map(one => one.id), twice = ids.find((id, n) => ids.indexOf(id) !== n);
  if (twice) wrong.push(`an id twice: ${twice}`);
  return wrong;
}
