"use strict";
// What pages and images have in common: Plotly unpacked, pictures drawn, and boxes of timelines found and named.

const pictures = JSON.parse(document.getElementById("pictures").textContent);
const BOX_POINTS = 6; // Of a box in its outline; as in penstock/report/timeline.py.
const DIGIT_WIDTH = 7, TEXT_MARGIN = 4, TEXT_HEIGHT = 11, EDGE_WIDTH = 4; // In pixels.
const MOST_TEXTS = 3000;

async function unpackPlotly() {
  const bytes = Uint8Array.from(atob(document.getElementById("plotly").textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

function themed(figure, theme) {
  // A trace for the numbers in boxes is always there, so that their number does not change when one zooms.
  const texts = { type: "scatter", mode: "text", x: [], y: [], text: [], hoverinfo: "skip", showlegend: false };
  const data = isTimeline(figure) ? [...figure.data, { ...texts, meta: { role: "texts" } }] : figure.data;
  return { data, layout: { ...figure.layout, template: { layout: pictures.themes[theme] } } };
}

function isTimeline(figure) {
  return figure.layout.meta?.role === "timeline";
}

async function draw(element, figure, theme) {
  const { data, layout } = themed(figure, theme);
  await Plotly.react(element, data, layout, { responsive: true, displayModeBar: false });
  if (isTimeline(figure)) await writeTexts(element);
}

// Boxes that are seen and large enough get their numbers; edges vanish where boxes are only a few pixels wide.
async function writeTexts(element) {
  const { xaxis, yaxis } = element._fullLayout;
  const [left, right] = xaxis.range;
  const x = [], y = [], text = [], color = [], wide = { boxes: [], widths: [] };
  let seen = 0;
  element.data.forEach((trace, index) => {
    if (trace.meta?.role !== "boxes") return;
    let widest = 0;
    // All numbers of a colour or none: gaps would look like other work.
    const room = Math.max(...trace.meta.labels.map((label) => label.length)) * DIGIT_WIDTH + TEXT_MARGIN;
    const shown = element._fullData[index].visible === true;
    for (let box = 0; box < trace.meta.names.length; box++) {
      const at = box * BOX_POINTS;
      const start = trace.x[at], end = trace.x[at + 1];
      if (end < left || start > right) continue;
      const width = xaxis.c2p(Math.min(end, right)) - xaxis.c2p(Math.max(start, left));
      const height = yaxis.c2p(trace.y[at]) - yaxis.c2p(trace.y[at + 2]);
      const label = trace.meta.labels[box];
      widest = Math.max(widest, width);
      const fits = width >= room && height >= TEXT_HEIGHT;
      if (!shown || !fits || ++seen > MOST_TEXTS) continue;
      x.push((Math.max(start, left) + Math.min(end, right)) / 2);
      y.push((trace.y[at] + trace.y[at + 2]) / 2);
      text.push(label);
      color.push(trace.meta.ink);
    }
    wide.boxes.push(index);
    wide.widths.push(widest < EDGE_WIDTH || !trace.meta.edges ? 0 : 0.7);
  });
  const last = element.data.length - 1, none = wide.boxes.map(() => undefined); // undefined: as it is.
  const change = { x, y, text, "textfont.color": color, "textfont.size": 10 };
  const changes = Object.fromEntries(Object.entries(change).map(([name, value]) => [name, [...none, value]]));
  await Plotly.restyle(element, { ...changes, "line.width": [...wide.widths, undefined] }, [...wide.boxes, last]);
}

// What lies at a time in a lane, `height` above its middle: the box, or the gap between two of them.
function boxAt(element, lane, time, height) {
  let before = 0, after = element.layout.xaxis.range[1];
  for (const trace of element.data) {
    if (trace.meta?.role !== "boxes") continue;
    const { lanes, names } = trace.meta;
    for (let box = 0; box < names.length; box++) {
      if (lanes[box] !== lane) continue;
      const at = box * BOX_POINTS, start = trace.x[at], end = trace.x[at + 1];
      if (start <= time && time < end && trace.y[at] <= height - lane && height - lane <= trace.y[at + 2]) {
        return { name: names[box], start, end };
      }
      if (end <= time) before = Math.max(before, end);
      if (start > time) after = Math.min(after, start);
    }
  }
  return { name: element.data.find((trace) => trace.meta?.role === "waiting").name, start: before, end: after };
}

function heldAt(element, lane, time) {
  const trace = element.data.find((one) => one.meta?.role === "held");
  if (!trace) return "";
  const { bottom, scale, unit } = trace.meta;
  for (let at = 0, row = 0; at + 1 < trace.x.length; at++) {
    if (trace.x[at] === null) { row++; continue; }
    if (row > lane) break;
    if (row === lane && trace.x[at] <= time && time < trace.x[at + 1]) {
      return `held: ${+((trace.y[at] - bottom + lane) / scale).toPrecision(3)} ${unit}`;
    }
  }
  return "";
}
