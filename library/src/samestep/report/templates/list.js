// The list of runs: sorted, filtered and ticked here, from the newest answer of the server.
// Rows are kept and changed in place: a row that was made anew between the two halves of a click
// would lose it.
const rows = new Map(); // by the name of a run
let list = { columns: [], runs: [], num: 0 }, order = { key: "", isDown: false };

// The columns: title, what is shown, and what is sorted by.
function columnsOf() {
  const numeric = (text) => (text !== "" && !Number.isNaN(Number(text)) ? Number(text) : text);
  const values = list.columns.map((key) => [key, (run) => run.values[key], (run) => numeric(run.values[key])]);
  const isUsed = ([, text]) => list.runs.some((run) => text(run));
  return [
    ["state", (run) => run.state], ["best", (run) => run.shown_best, (run) => run.best ?? ""],
    ["mean of seeds", (run) => run.mean, (run) => run.mean && Number.parseFloat(run.mean)],
    ...values, ["epochs", (run) => run.epochs, (run) => Number(run.epochs)],
    ["grid", (run) => run.grid], ["tags", (run) => run.tags.join(" ")], ["seen", (run) => run.time],
  ].filter((column) => column[0] === "state" || isUsed(column));
}

// A run is shown if it has every word: of its name, state, grid or tags, or key=value.
function isShown(run, words) {
  const values = Object.entries(run.values).map(([key, value]) => `${key}=${value}`);
  const text = [run.name, run.state, run.grid, ...run.tags, ...values].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

function shownRuns(columns) {
  const words = document.getElementById("filter").value.toLowerCase().split(/\s+/);
  const runs = list.runs.filter((run) => isShown(run, words));
  const column = columns.find(([title]) => title === order.key);
  if (!column && order.key !== "run") return runs; // the newest first
  const valueOf = column ? column[2] ?? column[1] : (run) => run.name;
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : `${a}`.localeCompare(`${b}`));
  return runs.sort((a, b) => {
    const [x, y] = [valueOf(a), valueOf(b)];
    // What has no value is last in both directions.
    if ((x === "") !== (y === "")) return x === "" ? 1 : -1;
    return order.isDown ? compare(y, x) : compare(x, y);
  });
}

function rowOf(run) {
  if (!rows.has(run.name)) {
    const row = document.createElement("tr"), head = document.createElement("th");
    head.scope = "row";
    const label = document.createElement("label"), box = document.createElement("input");
    Object.assign(box, { type: "checkbox", value: run.name });
    label.append(box, ` ${run.name}`);
    const link = document.createElement("a");
    Object.assign(link, { href: `report/${encodeURIComponent(run.name)}`, textContent: "report", ariaLabel: `Report of ${run.name}` });
    head.append(label, " ", link);
    row.append(head);
    rows.set(run.name, row);
  }
  return rows.get(run.name);
}

function fillCell(cell, title, text, run) {
  cell.dataset.title = title;
  if (cell.dataset.text === text) return;
  cell.dataset.text = text;
  cell.className = ["best", "epochs", "mean of seeds"].includes(title) || text && !Number.isNaN(Number(text)) ? "figure" : "";
  cell.textContent = text;
  if (title === "state") {
    const word = document.createElement("span"), [name] = text.match(/^\w+/) ?? [""];
    Object.assign(word, { className: `state ${name}`, textContent: name });
    cell.replaceChildren(word, text.slice(name.length));
  } else if (title === "mean of seeds" && text) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", textContent: text, title: "Tick these runs" });
    button.dataset.group = run.name;
    cell.replaceChildren(button);
  }
}

// Puts elements in this order, and moves only those that are elsewhere.
function arrange(parent, children) {
  children.forEach((child, place) => {
    if (parent.children[place] !== child) parent.insertBefore(child, parent.children[place] ?? null);
  });
  while (parent.children.length > children.length) parent.lastElementChild.remove();
}

function drawHeads(columns) {
  const titles = ["run", ...columns.map(([title]) => title)];
  const line = document.querySelector("#list thead tr");
  if (line.dataset.titles !== titles.join()) {
    line.dataset.titles = titles.join();
    line.replaceChildren(...titles.map((title) => {
      const head = document.createElement("th"), button = document.createElement("button");
      head.scope = "col";
      Object.assign(button, { type: "button", textContent: title });
      button.dataset.sort = title;
      head.append(button);
      return head;
    }));
  }
  for (const head of line.children) {
    const isSorted = head.firstElementChild.dataset.sort === order.key;
    head.ariaSort = isSorted ? (order.isDown ? "descending" : "ascending") : "none";
  }
}

function drawList() {
  const columns = columnsOf(), runs = shownRuns(columns);
  drawHeads(columns);
  for (const run of runs) {
    const row = rowOf(run);
    row.querySelector("input").checked = ticked.has(run.name);
    while (row.cells.length > columns.length + 1) row.lastElementChild.remove();
    while (row.cells.length < columns.length + 1) row.insertCell();
    columns.forEach(([title, text], place) => fillCell(row.cells[place + 1], title, text(run), run));
  }
  arrange(document.querySelector("#list tbody"), runs.map(rowOf));
  const all = document.getElementById("all"), numTicked = runs.filter((run) => ticked.has(run.name)).length;
  all.checked = runs.length > 0 && numTicked === runs.length;
  all.indeterminate = numTicked > 0 && !all.checked;
  const newest = list.num > list.runs.length ? `, the newest of ${list.num}` : "";
  document.getElementById("count").textContent = `${runs.length} of ${list.runs.length} runs${newest}; ${ticked.size} ticked`;
}

// A line for each ticked run through what differs, coloured by its best value: parallel coordinates.
function drawParallel() {
  const section = document.getElementById("parallel"), place = section.querySelector(".parallel");
  const runs = list.runs.filter((run) => ticked.has(run.name) && run.best !== null);
  const keys = list.columns.filter((key) => new Set(runs.map((run) => run.values[key])).size > 1);
  const isOfOneKind = new Set(runs.map((run) => run.monitor)).size === 1;
  section.hidden = !(window.Plotly && runs.length > 2 && keys.length && isOfOneKind);
  if (section.hidden) return;
  const monitor = runs[0].monitor;
  const axes = [...keys.map((key) => axisOf(key, runs.map((run) => run.values[key]))), axisOf(monitor, runs.map((run) => run.best))];
  const scores = axes.at(-1).places.map((score) => (runs[0].mode === "min" ? 1 - score : score));
  const ink = style("--ink"), width = section.clientWidth;
  const traces = runs.map((run, number) => ({
    x: axes.map((_, place) => place), y: axes.map((axis) => axis.places[number]), mode: "lines", name: plain(run.name),
    line: { color: style("--series-0"), width: 1 + 2 * scores[number] }, opacity: 0.15 + 0.85 * scores[number] ** 2,
    text: axes.map(() => plain(`${run.name}: ${run.shown_best}`)), hovertemplate: "%{text}<extra></extra>",
  }));
  const annotations = axes.flatMap((axis, place) => [
    { x: place, y: 1.12, text: `<b>${plain(axis.title)}</b>`, showarrow: false, font: { color: ink } },
    ...axis.ticks.map(([text, y]) => ({ x: place, y, text: plain(text), showarrow: false, xanchor: place ? "right" : "left", xshift: place ? -4 : 4, bgcolor: style("--paper"), opacity: 0.85 })),
  ]);
  const shapes = axes.map((_, x) => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, line: { color: style("--line"), width: 1 } }));
  Plotly.react(place, traces, {
    width, height: 320, margin: { l: 40, r: 40, t: 10, b: 10 }, showlegend: false, annotations, shapes, hovermode: "closest",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 11, family: "system-ui, sans-serif" },
    xaxis: { visible: false, fixedrange: true }, yaxis: { visible: false, fixedrange: true, range: [-0.08, 1.2] },
  }, { displayModeBar: false });
}

// Where values lie on an axis, from 0 to 1: numbers by size, or by their order of magnitude if they
// have several; names at even distances.
function axisOf(title, values) {
  const distinct = [...new Set(values)];
  const isNumeric = distinct.every((value) => value !== "" && !Number.isNaN(Number(value)));
  distinct.sort(isNumeric ? (a, b) => a - b : undefined);
  let positions = distinct.map((_, place) => place);
  if (isNumeric) {
    positions = distinct.map(Number);
    if (positions[0] > 0 && positions.at(-1) / positions[0] > 30) positions = positions.map(Math.log);
  }
  const first = positions[0], length = positions.at(-1) - first || 1;
  const placeOfValue = new Map(distinct.map((value, place) => [value, (positions[place] - first) / length]));
  const labelled = distinct.length <= 6 ? distinct : [distinct[0], distinct.at(-1)];
  const short = (value) => (typeof value === "number" ? value.toPrecision(4) : `${value}`.slice(0, 16));
  return { title: title.split(".").at(-1), places: values.map((value) => placeOfValue.get(value)), ticks: labelled.map((value) => [short(value), placeOfValue.get(value)]) };
}
