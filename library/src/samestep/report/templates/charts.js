// Draws each <figure class="chart"> from the JSON in its data-chart, by Plotly, and shows the values
// as a table where that is opened, and in print; the drawing itself is hidden from screen readers.
"use strict";

const MAX_ROWS = 100, PRINTED_ROWS = 20; // of a table
const DASHES = ["solid", "dash", "dot", "dashdot"];
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// Plotly reads some HTML in texts.
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

// The exponential mean of a curve, as if nothing had been before its first point.
function smooth(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + 1 - weight;
    return mean / total;
  });
}

// Whole numbers at even distances, and always the first and the last one.
function ticksOf(chart, width) {
  const xs = chart.curves.flatMap((curve) => curve.x);
  const first = Math.min(...xs), last = Math.max(...xs);
  const rough = Math.max((last - first) / Math.max(2, Math.floor(width / 75)), 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
  const ticks = [first];
  for (let tick = Math.ceil(first / step) * step; tick < last; tick += step) {
    if (tick - first > 0.6 * step && last - tick > 0.6 * step) ticks.push(tick);
  }
  return last > first ? [...ticks, last] : ticks;
}

function tracesOf(chart, weight) {
  return chart.curves.flatMap((curve, number) => {
    const color = style(`--series-${number % 8}`);
    const dash = DASHES[(number + Math.floor(number / 8)) % DASHES.length];
    const common = { x: curve.x, name: plain(curve.name), legendgroup: number };
    const mode = curve.x.length <= 30 ? "lines+markers" : "lines";
    const line = { color, dash, width: 1.8 }, marker = { color, size: 5 };
    const traces = [{ ...common, y: curve.y, mode, line, marker }];
    if (weight > 0) {
      traces[0] = { ...traces[0], mode: "lines", opacity: 0.25, showlegend: false, hoverinfo: "skip" };
      traces.push({ ...common, y: smooth(curve.y, weight), mode: "lines", line });
    }
    const best = curve.x.indexOf(curve.best);
    if (best >= 0) {
      traces.push({
        x: [curve.best], y: [curve.y[best]], mode: "markers", legendgroup: number, showlegend: false,
        name: `${plain(curve.name)}, best epoch`, hoverinfo: "skip",
        marker: { symbol: "star", size: 13, color, line: { color: style("--ink"), width: 1 } },
      });
    }
    return traces;
  });
}

// The newest values of a chart as a table, each column with the same number of places. On paper a
// long curve has rows at even distances, and always the last one and the best.
function tabulate(chart, isPrinted) {
  const table = document.createElement("table");
  table.className = "numeric";
  table.createCaption().textContent = `${chart.title} by ${chart.axis}`;
  const add = (part, texts) => {
    const row = part.insertRow();
    texts.forEach((text, column) => {
      const cell = document.createElement(part === table.tHead || !column ? "th" : "td");
      if (cell.tagName === "TH") cell.scope = part === table.tHead ? "col" : "row";
      cell.textContent = text;
      row.append(cell);
    });
  };
  add(table.createTHead(), [chart.axis, ...chart.curves.map((curve) => curve.name)]);
  const xs = [...new Set(chart.curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const body = table.createTBody();
  const step = isPrinted ? Math.ceil(xs.length / PRINTED_ROWS) : 1;
  const isBest = (x) => chart.curves.some((curve) => curve.best === x);
  const shown = xs.filter((x, number) => (xs.length - 1 - number) % step === 0 || isBest(x));
  for (const x of shown.slice(-MAX_ROWS)) {
    add(body, [x, ...chart.curves.map((curve) => {
      const place = curve.x.indexOf(x), size = Math.max(...curve.y.map(Math.abs)) || 1;
      const value = curve.y[place], places = Math.max(0, 4 - Math.floor(Math.log10(size)));
      // A column whose smallest value would lose its figures has each with its own places.
      const isWide = curve.y.some((y) => y && Math.abs(y) < size / 1000);
      const text = isWide ? value?.toPrecision(4) : value?.toFixed(places);
      return `${place >= 0 && x === curve.best ? "★ " : ""}${text ?? ""}`;
    })]);
  }
  return table;
}

function draw(figure) {
  const place = figure.querySelector(".plot"), chart = JSON.parse(place.dataset.chart);
  const values = figure.querySelector(".values");
  const isPrinted = "print" in document.documentElement.dataset;
  if (values.open) values.lastElementChild.replaceChildren(tabulate(chart, isPrinted));
  const width = isPrinted ? 640 : place.clientWidth;
  if (!window.Plotly || !width) return; // within closed details
  const ink = style("--ink"), grid = { gridcolor: style("--grid"), linecolor: style("--line"), zeroline: false };
  const ticks = ticksOf(chart, width);
  const isLog = document.getElementById("log")?.checked;
  // Plotly draws a constant within 1 above and below it, where 0.001 and 0.003 look like 0.
  const ys = chart.curves.flatMap((curve) => curve.y), top = Math.max(...ys), bottom = Math.min(...ys);
  const around = top === bottom && top && !isLog ? { clipmin: top - Math.abs(top) / 2, clipmax: top + Math.abs(top) / 2 } : {};
  const layout = {
    width, height: 300, margin: { l: 50, r: 15, t: 10, b: 45 }, uirevision: `${isLog}`,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, size: 12, family: "system-ui, sans-serif" },
    hovermode: "x unified", hoverlabel: { bgcolor: style("--paper"), bordercolor: style("--line"), font: { color: ink } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, showlegend: chart.curves.length > 1 || chart.curves[0].name !== chart.title,
    // A finger scrolls the page; a mouse zooms.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: { ...grid, title: { text: chart.axis, standoff: 8 }, tickmode: place.dataset.ticks ?? "array", tickvals: ticks },
    yaxis: { ...grid, type: isLog ? "log" : "linear", autorangeoptions: around, automargin: true },
  };
  const weight = Number(document.getElementById("smoothing")?.value ?? 0);
  if (!place.on) place.textContent = "";
  Plotly.react(place, tracesOf(chart, weight), layout, { displayModeBar: false, doubleClick: "reset" });
  if (place.dataset.ready) return;
  place.dataset.ready = "yes";
  // What is zoomed has ticks of its own.
  place.on("plotly_relayout", (change) => {
    if (!("xaxis.range[0]" in change || "xaxis.autorange" in change)) return;
    place.dataset.ticks = "xaxis.autorange" in change ? "array" : "auto";
    Plotly.relayout(place, { "xaxis.tickmode": place.dataset.ticks });
  });
}

function drawAll() {
  document.querySelectorAll("figure.chart").forEach(draw);
}

function localTimes() {
  for (const time of document.querySelectorAll("time[datetime]")) {
    const date = new Date(time.dateTime);
    if (!Number.isNaN(date.getTime())) {
      time.textContent = date.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
    }
  }
}

function setUp() {
  localTimes();
  drawAll();
  document.querySelectorAll(".controls").forEach((controls) => { controls.hidden = false; });
  document.addEventListener("input", (event) => {
    if (event.target.closest(".controls")) drawAll();
  });
  document.addEventListener("toggle", drawAll, true);
  document.getElementById("reset")?.addEventListener("click", () => {
    for (const place of document.querySelectorAll(".plot[data-ready]")) {
      Plotly.relayout(place, { "xaxis.autorange": true, "yaxis.autorange": true });
    }
  });
  addEventListener("resize", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let opened = []; // tables, for the printer only
  addEventListener("beforeprint", () => {
    document.documentElement.dataset.print = "";
    opened = [...document.querySelectorAll(".values:not([open])")];
    for (const values of opened) values.open = true;
    drawAll();
  });
  addEventListener("afterprint", () => {
    delete document.documentElement.dataset.print;
    for (const values of opened) values.open = false;
    drawAll();
  });
}
