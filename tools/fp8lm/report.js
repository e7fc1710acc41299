// Values under the pointer, and runs that are hidden. Everything is there without it.
"use strict";
(() => {
  const tip = document.getElementById("tip");
  const buttons = [...document.querySelectorAll(".legend button[data-run]")];
  const charts = [];
  const shows = (run) => buttons[run].getAttribute("aria-pressed") === "true";
  const element = (name, text) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const position = (axis, value, logarithmic) => {
    const share = logarithmic
      ? Math.log(value / axis[0]) / Math.log(axis[1] / axis[0])
      : (value - axis[0]) / (axis[1] - axis[0]);
    return axis[2] + share * (axis[3] - axis[2]);
  };
  // The index of the value of x next to `step`.
  const nearest = (x, step) => {
    let low = 0;
    let high = x.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (x[middle] < step) low = middle + 1;
      else high = middle;
    }
    return low > 0 && step - x[low - 1] < x[low] - step ? low - 1 : low;
  };
  const format = (value, percent) => (percent ? Number((100 * value).toPrecision(4)) + " %" : String(value));

  const clear = () => {
    tip.hidden = true;
    for (const chart of charts) {
      chart.cross.setAttribute("d", "");
      for (const dot of chart.svg.querySelectorAll(".dot")) dot.remove();
    }
  };

  const show = (chart, step) => {
    clear();
    const { data } = chart;
    const kinds = [...new Set(data.series.map((series) => series.kind))];
    // The step of any value that is shown next to the pointer.
    let best = null;
    for (const series of data.series) {
      if (!shows(series.run) || series.x.length === 0) continue;
      const found = series.x[nearest(series.x, step)];
      if (best === null || Math.abs(found - step) < Math.abs(best - step)) best = found;
    }
    if (best === null) return;
    const left = position(data.x, best, 0);
    for (const other of charts) {
      if (other.data.name !== data.name) continue;
      const x = position(other.data.x, best, 0);
      other.cross.setAttribute("d", `M${x} ${other.data.y[2]}V${other.data.y[3]}`);
    }
    // A value counts for the step where no more than 5 units of the drawing lie between.
    const reach = (5 * (data.x[1] - data.x[0])) / (data.x[3] - data.x[2]);
    const rows = new Map();
    for (const series of data.series) {
      if (!shows(series.run) || series.x.length === 0) continue;
      const at = nearest(series.x, best);
      if (series.y[at] === null || Math.abs(series.x[at] - best) > reach) continue;
      if (!rows.has(series.run)) rows.set(series.run, {});
      rows.get(series.run)[series.kind] = series.y[at];
      const dot = document.createElementNS("http://www.w3.org/2000/svg", "circle");
      dot.setAttribute("class", `dot c${series.run % 6}`);
      dot.setAttribute("r", 3);
      dot.setAttribute("cx", position(data.x, series.x[at], 0));
      dot.setAttribute("cy", position(data.y, series.y[at], data.log));
      chart.svg.append(dot);
    }
    const table = element("table");
    const head = element("tr");
    head.append(element("th", (data.name ?? "step") + " " + best.toLocaleString("en")));
    const used = kinds.filter((kind) => [...rows.values()].some((row) => kind in row));
    for (const kind of used) head.append(element("th", kinds.length > 1 ? kind : ""));
    const thead = element("thead");
    thead.append(head);
    const body = element("tbody");
    for (const [run, row] of [...rows].sort((a, b) => a[0] - b[0])) {
      const line = element("tr");
      const name = element("td");
      name.append(buttons[run].querySelector(".swatch").cloneNode(true), " " + buttons[run].textContent);
      line.append(name);
      for (const kind of used) line.append(element("td", kind in row ? format(row[kind], data.percent) : ""));
      body.append(line);
    }
    table.append(thead, body);
    tip.replaceChildren(table);
    tip.hidden = false;
    const box = chart.svg.getBoundingClientRect();
    const x = box.left + (left / chart.svg.viewBox.baseVal.width) * box.width;
    const width = tip.offsetWidth;
    const beside = x + 14 + width > document.documentElement.clientWidth ? x - 14 - width : x + 14;
    tip.style.left = Math.max(4, beside) + window.scrollX + "px";
    tip.style.top = box.top + 14 + window.scrollY + "px";
    chart.step = best;
  };

  for (const figure of document.querySelectorAll("figure.chart")) {
    const svg = figure.querySelector("svg");
    const chart = {
      svg,
      cross: svg.querySelector(".cross"),
      data: JSON.parse(figure.querySelector('script[type="application/json"]').textContent),
      step: null,
    };
    charts.push(chart);
    const [first, last, from, to] = chart.data.x;
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      if (x < from - 8 || x > to + 8) clear();
      else show(chart, first + ((x - from) / (to - from)) * (last - first));
    });
    svg.addEventListener("pointerleave", clear);
    svg.addEventListener("blur", clear);
    svg.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") clear();
      if (!way) return;
      event.preventDefault();
      // By a hundredth of the steps, but at least to the next value.
      const start = chart.step === null ? (way > 0 ? first : last) : chart.step;
      let next = null;
      for (const series of chart.data.series) {
        if (!shows(series.run)) continue;
        const found = way > 0 ? series.x.find((x) => x > start) : series.x.findLast((x) => x < start);
        if (found !== undefined && (next === null || Math.abs(found - start) < Math.abs(next - start))) next = found;
      }
      let step = start + (way * (last - first)) / 100;
      if (next !== null && Math.abs(next - start) > Math.abs(step - start)) step = next;
      show(chart, Math.min(last, Math.max(first, step)));
    });
  }

  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      clear();
      if (button.id === "raw") {
        document.body.classList.toggle("no-raw", !on);
        return;
      }
      for (const part of document.querySelectorAll(`.run[data-run="${button.dataset.run}"]`)) part.classList.toggle("off", !on);
    });
  }

  // Print everything that is folded.
  let folded = [];
  window.addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const part of folded) part.open = true;
  });
  window.addEventListener("afterprint", () => {
    for (const part of folded) part.open = false;
  });
})();
