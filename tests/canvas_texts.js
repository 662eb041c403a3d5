// Run before a page: notes the texts that are drawn on canvases, where the DOM has none.
window.drawnTexts = new Map();
const proto = CanvasRenderingContext2D.prototype, { fillText, clearRect } = proto;
proto.clearRect = function (x, y, width, height) {
  if (width >= this.canvas.width && height >= this.canvas.height) window.drawnTexts.set(this.canvas, []);
  return clearRect.call(this, x, y, width, height);
};
proto.fillText = function (text, x, y) {
  const size = this.measureText(text), m = this.getTransform(), list = window.drawnTexts.get(this.canvas) ?? [];
  const corners = [[-size.actualBoundingBoxLeft, -size.actualBoundingBoxAscent], [size.actualBoundingBoxRight, size.actualBoundingBoxDescent]]
    .map(([a, b]) => new DOMPoint(x + a, y + b).matrixTransform(m));
  if (String(text).trim()) list.push({ text: String(text), left: Math.min(corners[0].x, corners[1].x), right: Math.max(corners[0].x, corners[1].x), top: Math.min(corners[0].y, corners[1].y), bottom: Math.max(corners[0].y, corners[1].y) });
  window.drawnTexts.set(this.canvas, list);
  return fillText.call(this, text, x, y);
};
