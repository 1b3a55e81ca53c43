// Draws each <figure class="chart"> from the JSON in its data-chart, by Plotly, and shows the values
// as a table where that is opened, and in print; the drawing itself is hidden from screen readers.
// A <figure class="matrix"> has a table of numbers, which is drawn as colours.
"use strict";

const MAX_ROWS = 100, PRINTED_ROWS = 20; // of a table
const MAX_LEGEND = 8; // curves
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

// Where a step lies on another axis: between the ends of two epochs, or beyond the last one.
function placeOf(step, ends, axis) {
  const steps = [0, ...ends.step], places = [0, ...ends[axis]];
  let right = steps.findIndex((end) => end >= step);
  if (right === 0) return 0;
  if (right < 0) right = steps.length - 1;
  const share = (step - steps[right - 1]) / (steps[right] - steps[right - 1]);
  return places[right - 1] + share * (places[right] - places[right - 1]);
}

// The curves of a chart over an axis. A run whose first epoch is not over has steps only.
function viewOf(chart, chosen) {
  const isKnown = chart.ends.every((ends) => ends[chosen]?.length);
  const axis = isKnown ? chosen : "step";
  const curves = chart.curves.map((curve) => {
    if (axis === "step") return curve;
    const place = (step) => placeOf(step, chart.ends[curve.run], axis);
    return { ...curve, x: curve.x.map(place), best: curve.best && place(curve.best) };
  });
  if (axis !== "time") return { ...chart, axis, curves };
  const longest = Math.max(...curves.flatMap((curve) => curve.x));
  const [unit, seconds] = longest > 7200 ? ["h", 3600] : longest > 120 ? ["min", 60] : ["s", 1];
  for (const curve of curves) {
    curve.x = curve.x.map((x) => x / seconds);
    curve.best = curve.best && curve.best / seconds;
  }
  return { ...chart, axis: `time, ${unit}`, curves };
}

// Whole numbers at even distances, and always the first and the last one.
function ticksOf(chart, width) {
  const xs = chart.curves.filter((curve) => !curve.mean).flatMap((curve) => curve.x);
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
  // Single steps stand thinly behind the mean of their epoch, in its colour.
  const fronts = chart.curves.filter((curve) => !curve.mean).map((curve) => curve.name);
  const behind = chart.curves.filter((curve) => curve.mean).map((curve) => {
    const color = style(`--series-${fronts.indexOf(curve.mean) % 8}`);
    return { x: curve.x, y: curve.y, name: plain(curve.name), mode: "lines", opacity: 0.45, line: { color, width: 1 } };
  });
  // The points and stars of many curves would hide their lines.
  const areMany = fronts.length > MAX_LEGEND;
  const shown = chart.curves.filter((curve) => !curve.mean).flatMap((curve, number) => {
    const color = style(`--series-${number % 8}`);
    const dash = DASHES[(number + Math.floor(number / 8)) % DASHES.length];
    const common = { x: curve.x, name: plain(curve.name), legendgroup: number };
    const mode = curve.x.length === 1 || (curve.x.length <= 30 && !areMany) ? "lines+markers" : "lines";
    const line = { color, dash, width: 1.8 }, marker = { color, size: 5 };
    const traces = [{ ...common, y: curve.y, mode, line, marker }];
    if (weight > 0) {
      traces[0] = { ...traces[0], mode: "lines", opacity: 0.25, showlegend: false, hoverinfo: "skip" };
      traces.push({ ...common, y: smooth(curve.y, weight), mode: "lines", line });
    }
    const best = curve.x.indexOf(curve.best);
    if (best >= 0 && !areMany) {
      traces.push({
        x: [curve.best], y: [curve.y[best]], mode: "markers", legendgroup: number, showlegend: false,
        name: `${plain(curve.name)}, best epoch`, hoverinfo: "skip",
        marker: { symbol: "star", size: 13, color, line: { color: style("--ink"), width: 1 } },
      });
    }
    return traces;
  });
  return [...behind, ...shown];
}

// What a table of a chart shows: over epochs, single steps have no row.
function tableOf(chart) {
  return { ...chart, curves: chart.curves.filter((curve) => chart.axis === "step" || !curve.mean) };
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
  const place = figure.querySelector(".plot"), data = JSON.parse(place.dataset.chart);
  const chart = viewOf(data, document.getElementById("axis")?.value || data.axis);
  const values = figure.querySelector(".values");
  const isPrinted = "print" in document.documentElement.dataset;
  if (values.open) values.lastElementChild.replaceChildren(tabulate(tableOf(viewOf(data, data.axis)), isPrinted));
  const width = isPrinted ? 640 : place.clientWidth;
  if (!window.Plotly || !width) return; // within closed details
  const ink = style("--ink"), grid = { gridcolor: style("--grid"), linecolor: style("--line"), zeroline: false };
  const ticks = ticksOf(chart, width);
  // The button of a chart turns what the page has chosen.
  const isLog = Boolean(document.getElementById("log")?.checked) !== Boolean(figure.dataset.log);
  const tools = figure.querySelector(".tools");
  tools.hidden = false;
  tools.querySelector("[name=log]").ariaPressed = `${isLog}`;
  // Plotly draws a constant within 1 above and below it, where 0.001 and 0.003 look like 0.
  const ys = chart.curves.flatMap((curve) => curve.y), top = Math.max(...ys), bottom = Math.min(...ys);
  const around = top === bottom && top && !isLog ? { clipmin: top - Math.abs(top) / 2, clipmax: top + Math.abs(top) / 2 } : {};
  const layout = {
    width, height: 300, margin: { l: 50, r: 15, t: 10, b: 45 }, uirevision: `${isLog} ${chart.axis}`,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, size: 12, family: "system-ui, sans-serif" },
    hovermode: "x unified", hoverlabel: { bgcolor: style("--paper"), bordercolor: style("--line"), font: { color: ink } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    // Many names would leave no room for the curves; they stand at the pointer.
    showlegend: chart.curves.length <= MAX_LEGEND && (chart.curves.length > 1 || chart.curves[0].name !== chart.title),
    // A finger scrolls the page; a mouse zooms.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: { ...grid, title: { text: chart.axis, standoff: 8 }, tickmode: chart.axis.startsWith("time") ? "auto" : place.dataset.ticks ?? "array", tickvals: ticks },
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

// A table of numbers as colours: each the part of its row. The square root shows small parts.
function drawMatrix(figure) {
  const place = figure.querySelector(".plot"), width = figure.clientWidth;
  if (!window.Plotly || !width) return;
  const [[corner, ...columns], ...lines] = JSON.parse(figure.dataset.table);
  const [rowAxis, columnAxis] = corner.split(" / ");
  const rows = lines.map((line) => line[0]), counts = lines.map((line) => line.slice(1).map(Number));
  const sums = counts.map((row) => row.reduce((sum, count) => sum + count, 0) || 1);
  const texts = counts.map((row, r) => row.map((count, c) =>
    plain(`${rowAxis} ${rows[r]}, ${columnAxis ?? ""} ${columns[c]}: `)
    + `${count} of ${sums[r]} (${(100 * count / sums[r]).toFixed(1)} %)`));
  const hasRoom = columns.length <= 20 && width > 30 * columns.length;
  const axis = { type: "category", tickvals: columns.length > 40 ? undefined : columns, fixedrange: true, showgrid: false, automargin: true };
  const ink = style("--ink");
  Plotly.react(place, [{
    type: "heatmap", x: columns, y: rows, z: counts.map((row, r) => row.map((count) => Math.sqrt(count / sums[r]))),
    zmin: 0, zmax: 1, colorscale: [[0, style("--panel")], [1, style("--series-0")]], showscale: false, xgap: 1, ygap: 1,
    text: counts.map((row) => row.map((count) => count || "")), texttemplate: hasRoom ? "%{text}" : "",
    hovertext: texts, hovertemplate: "%{hovertext}<extra></extra>",
  }], {
    width: Math.min(width, 620), height: Math.min(width, 620), margin: { l: 30, r: 10, t: 10, b: 30 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: style("--panel"), font: { color: ink, size: 12, family: "system-ui, sans-serif" },
    hoverlabel: { bgcolor: style("--paper"), bordercolor: style("--line"), font: { color: ink } },
    xaxis: { ...axis, title: { text: plain(columnAxis ?? "") } },
    yaxis: { ...axis, tickvals: rows.length > 40 ? undefined : rows, title: { text: plain(rowAxis) }, autorange: "reversed" },
  }, { displayModeBar: false });
  figure.querySelector(".tools").hidden = false;
}

function drawAll() {
  document.querySelectorAll("figure.chart").forEach(draw);
  document.querySelectorAll("figure.matrix").forEach(drawMatrix);
}

function save(name, address) {
  const link = document.createElement("a");
  Object.assign(link, { href: address, download: name });
  link.click();
}

// The values of a chart or a matrix as a CSV file: all points, and of a chart over the steps.
function csvOf(figure) {
  const quote = (cell) => (/[",\n]/.test(cell) ? `"${`${cell}`.replaceAll('"', '""')}"` : cell);
  let rows;
  if (figure.dataset.table) {
    rows = JSON.parse(figure.dataset.table);
  } else {
    const { curves } = JSON.parse(figure.querySelector(".plot").dataset.chart);
    const points = curves.map((curve) => new Map(curve.x.map((x, place) => [x, curve.y[place]])));
    const steps = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
    rows = [["step", ...curves.map((curve) => curve.name)]];
    for (const step of steps) rows.push([step, ...points.map((values) => values.get(step) ?? "")]);
  }
  return rows.map((row) => row.map(quote).join(",")).join("\n") + "\n";
}

const tools = {
  log(figure) {
    if (figure.dataset.log) delete figure.dataset.log; else figure.dataset.log = "yes";
    draw(figure);
  },
  csv(figure, name) {
    save(`${name}.csv`, `data:text/csv;charset=utf-8,${encodeURIComponent(csvOf(figure))}`);
  },
  // With the background of the page: an image viewer has another one.
  async png(figure, name) {
    const { data, layout } = figure.querySelector(".plot");
    const picture = { ...layout, paper_bgcolor: style("--paper"), title: { text: plain(figure.ariaLabel) }, margin: { ...layout.margin, t: 60 } };
    save(`${name}.png`, await Plotly.toImage({ data, layout: picture }, { format: "png", scale: 2, width: layout.width, height: layout.height }));
  },
};

function setUp() {
  drawAll();
  document.querySelectorAll(".controls").forEach((controls) => { controls.hidden = false; });
  document.addEventListener("input", (event) => {
    if (event.target.closest(".controls")) drawAll();
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest(".tools button"), figure = button?.closest("figure");
    if (figure) tools[button.name](figure, figure.ariaLabel.replace(/[^\w.-]+/g, "-"));
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
