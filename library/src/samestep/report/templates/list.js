// The list of runs: sorted, filtered, grouped and ticked here, from the newest answer of the server.
// Rows are kept and changed in place: a row that was made anew between the two halves of a click
// would lose it.
const rows = new Map(); // by the group and the name of a run
const heads = new Map(); // of groups, by their value
const opened = new Set(); // the groups whose runs are shown
const AXIS_PX = 120; // between two parallel axes, at least
let list = { columns: [], runs: [], num: 0 }, order = { key: "", isDown: false };
const numeric = (text) => (text !== "" && !Number.isNaN(Number(text)) ? Number(text) : text);
// "failed" of "failed: no space left on device".
const stateOf = (run) => run.state.match(/^\w+/)?.[0] ?? "";

// "lr" of "model.optimizer.lr", unless another column ends so too.
function shortName(key) {
  const lastPart = (name) => name.split(".").at(-1);
  return list.columns.filter((name) => lastPart(name) === lastPart(key)).length > 1 ? key : lastPart(key);
}

// The columns: title, what is shown, and what is sorted by.
function columnsOf() {
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
  return sortBy(runs, column ? column[2] ?? column[1] : (run) => run.name, order.isDown);
}

// What has no value is last in both directions.
function sortBy(items, valueOf, isDown) {
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : `${a}`.localeCompare(`${b}`));
  return items.sort((a, b) => {
    const [x, y] = [valueOf(a), valueOf(b)];
    if ((x === "") !== (y === "")) return x === "" ? 1 : -1;
    return isDown ? compare(y, x) : compare(x, y);
  });
}

// The columns by which runs can be grouped.
function groupKeys() {
  return ["state", ...list.columns, "grid", "tags"];
}

// A run with several tags is in the group of each.
function valuesOf(run, key) {
  if (key === "tags") return run.tags.length ? run.tags : [""];
  if (key === "state") return [stateOf(run)];
  return [key === "grid" ? run.grid : run.values[key] ?? ""];
}

// The shown runs by their values of the chosen column. Without one, a single group has no heading.
function groupsOf(runs) {
  const key = groupKeys().includes(groupBy) ? groupBy : "";
  if (!key) return [{ key, value: "", runs }];
  const byValue = new Map();
  for (const run of runs) {
    for (const value of valuesOf(run, key)) byValue.set(value, [...byValue.get(value) ?? [], run]);
  }
  const groups = [...byValue].map(([value, members]) => ({ key, value, runs: members, mean: meanOf(members) }));
  if (order.key === "best") return sortBy(groups, (group) => group.mean?.value ?? "", order.isDown);
  return sortBy(groups, (group) => numeric(group.value), order.key === key && order.isDown);
}

// The mean of the best values, with half of its 95 % confidence interval. The best value of a run
// that is not over may still improve, and values of different metrics have no mean.
function meanOf(runs) {
  const finished = runs.filter((run) => stateOf(run) === "finished" && run.best !== null);
  if (new Set(finished.map((run) => run.monitor)).size !== 1) return null;
  const n = finished.length, sum = (values) => values.reduce((total, value) => total + value, 0);
  const value = sum(finished.map((run) => run.best)) / n;
  let text = showNumber(value);
  if (n > 1) {
    const variance = sum(finished.map((run) => (run.best - value) ** 2)) / (n - 1);
    const half = T95[n] * Math.sqrt(variance / n);
    text += ` ± ${half >= 100 ? showNumber(half) : Number(half.toPrecision(2))}`;
  }
  return { value, text: `${text} (n = ${n})` };
}

// As the server shows numbers.
function showNumber(value) {
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : value.toPrecision(4);
}

// "3 finished, 1 failed".
function countStates(runs) {
  const counts = {};
  for (const run of runs) counts[stateOf(run)] = (counts[stateOf(run)] ?? 0) + 1;
  return Object.entries(counts).map(([state, count]) => `${count} ${state}`).join(", ");
}

// The row above the runs of a group.
function headOf(group, columns) {
  if (!heads.has(group.value)) {
    const row = document.createElement("tr"), cell = document.createElement("th");
    row.className = "group";
    cell.scope = "row";
    const button = document.createElement("button"), label = document.createElement("label"), box = document.createElement("input");
    Object.assign(button, { type: "button", ariaLabel: "Show or hide its runs" });
    button.dataset.opens = group.value;
    Object.assign(box, { type: "checkbox", name: "group", value: group.value });
    label.append(box, " ", document.createElement("span"));
    cell.append(button, label);
    row.append(cell);
    heads.set(group.value, row);
  }
  const row = heads.get(group.value), num = group.runs.length;
  row.querySelector("span").textContent = `${shortName(group.key)} ${group.value || "none"}: ${num} ${num === 1 ? "run" : "runs"}`;
  row.querySelector("button").ariaExpanded = `${opened.has(group.value)}`;
  showTicks(row.querySelector("input"), group.runs);
  fitCells(row, columns);
  columns.forEach(([title, text], place) => {
    const texts = new Set(group.runs.map(text));
    let shared = texts.size === 1 ? [...texts][0] : "";
    if (title === "state") shared = countStates(group.runs);
    if (title === "best") shared = group.mean?.text ?? "";
    if (title === "mean of seeds") shared = "";
    const cell = row.cells[place + 1];
    cell.dataset.title = title === "best" ? "mean" : shortName(title);
    if (cell.textContent !== shared) cell.textContent = shared;
    cell.className = classOf(title, shared);
  });
  return row;
}

// Ticked, or half ticked if some of the runs are.
function showTicks(box, runs) {
  const num = runs.filter((run) => ticked.has(run.name)).length;
  box.checked = runs.length > 0 && num === runs.length;
  box.indeterminate = num > 0 && !box.checked;
}

// As many cells as columns, behind the name.
function fitCells(row, columns) {
  while (row.cells.length > columns.length + 1) row.lastElementChild.remove();
  while (row.cells.length < columns.length + 1) row.insertCell();
}

function rowOf(run, group) {
  const key = `${group.key}\n${group.value}\n${run.name}`;
  if (!rows.has(key)) {
    const row = document.createElement("tr"), head = document.createElement("th");
    head.scope = "row";
    const label = document.createElement("label"), box = document.createElement("input");
    Object.assign(box, { type: "checkbox", value: run.name });
    label.append(box, ` ${run.name}`);
    const link = document.createElement("a");
    Object.assign(link, { href: `report/${encodeURIComponent(run.name)}`, textContent: "report", ariaLabel: `Report of ${run.name}` });
    head.append(label, " ", link);
    row.append(head);
    rows.set(key, row);
  }
  return rows.get(key);
}

// Numbers stand at the right.
function classOf(title, text) {
  const isNumber = typeof numeric(text) === "number" || ["best", "epochs", "mean of seeds"].includes(title);
  return isNumber ? "figure" : "";
}

function fillCell(cell, title, text, run) {
  cell.dataset.title = shortName(title);
  if (cell.dataset.text === text) return;
  cell.dataset.text = text;
  cell.className = classOf(title, text);
  cell.textContent = text;
  if (title === "state") {
    const word = document.createElement("span"), name = stateOf(run);
    Object.assign(word, { className: `state ${name}`, textContent: name });
    cell.replaceChildren(word, text.slice(name.length));
  } else if (title === "mean of seeds" && text) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", textContent: text, title: "Tick these runs" });
    button.dataset.repeats = run.name;
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
      Object.assign(button, { type: "button", textContent: shortName(title), title });
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

// The choice of the column by which the runs are grouped.
function drawChoice() {
  const select = document.getElementById("group"), keys = ["", ...groupKeys()];
  if (select.dataset.keys === keys.join()) return;
  select.dataset.keys = keys.join();
  select.replaceChildren(...keys.map((key) => new Option(key || "nothing", key, false, key === groupBy)));
}

function drawList() {
  const columns = columnsOf(), runs = shownRuns(columns), lines = [];
  drawHeads(columns);
  drawChoice();
  for (const group of groupsOf(runs)) {
    if (group.key) lines.push(headOf(group, columns));
    if (group.key && !opened.has(group.value)) continue;
    for (const run of group.runs) {
      const row = rowOf(run, group);
      row.querySelector("input").checked = ticked.has(run.name);
      fitCells(row, columns);
      columns.forEach(([title, text], place) => fillCell(row.cells[place + 1], title, text(run), run));
      lines.push(row);
    }
  }
  arrange(document.querySelector("#list tbody"), lines);
  showTicks(document.getElementById("all"), runs);
  const newest = list.num > list.runs.length ? `, the newest of ${list.num}` : "";
  document.getElementById("count").textContent = `${runs.length} of ${list.runs.length} runs${newest}; ${ticked.size} ticked`;
}

// Parallel coordinates: a line for each ticked run through what differs, the thicker the better.
function drawParallel() {
  const section = document.getElementById("parallel"), place = section.querySelector(".parallel");
  const scored = list.runs.filter((run) => ticked.has(run.name) && run.best !== null);
  const monitor = mostFrequent(scored.map((run) => run.monitor));
  const runs = scored.filter((run) => run.monitor === monitor);
  const keys = list.columns.filter((key) => new Set(runs.map((run) => run.values[key])).size > 1);
  section.hidden = !(window.Plotly && runs.length > 2 && keys.length);
  if (section.hidden) return;
  const axes = [...keys.map((key) => axisOf(key, runs.map((run) => run.values[key]))), axisOf(monitor, runs.map((run) => run.best))];
  const scores = axes.at(-1).places.map((score) => (runs[0].mode === "min" ? 1 - score : score));
  // On a phone the axes scroll, so that their names stand beside each other.
  const ink = style("--ink"), width = Math.max(section.clientWidth, AXIS_PX * axes.length);
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

// Values of different metrics have no common axis.
function mostFrequent(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  return [...counts].sort(([, a], [, b]) => b - a)[0]?.[0];
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
  return { title: shortName(title), places: values.map((value) => placeOfValue.get(value)), ticks: labelled.map((value) => [short(value), placeOfValue.get(value)]) };
}
