// Draws what `timeline.py` wrote into the page: requests as rows, or workers as rows, over one time axis for all arms.
// Everything that came from outside reaches the page as text on a canvas or as textContent, never as markup.
"use strict";
(() => {
  const holder = document.getElementById("timeline");
  const data = JSON.parse(document.getElementById("timeline-data").textContent);
  const MS = 1000 / data.units_per_s;
  const GUTTER = innerWidth < 620 ? 58 : 112, AXIS = 22, LEAST_ROW = 0.1, MOST_ROW = 20, HEIGHT = 300, LEAST_WINDOW = 50;
  const COMPLETED = "completed";

  const make = (name, parent, text, className) => {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    parent.append(element);
    return element;
  };
  const duration = (units) => {
    const ms = units * MS;
    if (Math.abs(ms) >= 1000) return (ms / 1000).toFixed(ms >= 10000 ? 2 : 3) + " s";
    return ms.toFixed(Math.abs(ms) >= 100 ? 0 : Math.abs(ms) >= 10 ? 1 : 2) + " ms";
  };

  // One row per request in the order of sending, or one per lane of each worker; a row holds spans and their requests.
  const requestRows = (run) => [...run.requests].sort((a, b) => a.intended - b.intended).map((request) => ({
    label: "#" + request.index + (request.group ? " " + request.group : ""),
    spans: request.spans, request, from: request.intended, to: request.ended,
  }));
  const workerRows = (run) => {
    const lanes = new Map();
    const all = run.requests.flatMap((request) => request.spans).sort((a, b) => a.start - b.start);
    for (const span of all) {
      if (!isWorker(span.worker)) continue;
      if (!lanes.has(span.worker)) lanes.set(span.worker, []);
      const own = lanes.get(span.worker);
      let lane = own.find((each) => each.end <= span.start);
      if (!lane) own.push(lane = { end: 0, spans: [] });
      lane.spans.push(span);
      lane.end = span.start + span.duration;
    }
    return [...lanes.keys()].sort((a, b) => a - b).flatMap((worker) => lanes.get(worker).map((lane, place) => ({
      label: place === 0 ? data.workers[worker] : "", spans: lane.spans, isFirst: place === 0, from: 0, to: Infinity,
    })));
  };
  const isWorker = (worker) => data.workers[worker] !== data.client && data.workers[worker] !== data.coordinator;

  for (const run of data.arms.flatMap((arm) => arm.runs)) {
    for (const request of run.requests) {
      const flat = request.spans;
      request.spans = [];
      for (let at = 0; at < flat.length; at += 5) {
        const [stage, worker, start, length, beside] = flat.slice(at, at + 5);
        request.spans.push({ stage, worker, start, duration: length, beside, request });
      }
      request.chunks = request.first === null ? [] : [request.first];
      for (const gap of request.gaps) request.chunks.push(request.chunks[request.chunks.length - 1] + gap);
    }
  }

  // The window of time is shared by all charts, so that arms can be compared at the same moment.
  const charts = [];
  const whole = () => Math.max(1, ...charts.map((chart) => chart.run.duration));
  const view = { from: 0, to: 1, byWorker: false };
  let isAsked = false;
  const redraw = () => {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => { isAsked = false; charts.forEach((chart) => chart.draw()); });
  };
  const show = (from, length) => {
    const end = whole() * 1.01;
    length = Math.min(end, Math.max(LEAST_WINDOW, length));
    view.from = Math.min(Math.max(0, from), end - length);
    view.to = view.from + length;
    redraw();
  };
  const zoom = (factor, around) => show(around - (around - view.from) / factor, (view.to - view.from) / factor);
  const fit = () => show(0, Infinity);
  const move = (share) => show(view.from + share * (view.to - view.from), view.to - view.from);
  const middle = () => (view.from + view.to) / 2;

  class Chart {
    constructor(arm) {
      this.arm = arm;
      this.figure = make("figure", holder, undefined, "lanes");
      const head = make("figcaption", this.figure);
      make("strong", head, arm.name);
      this.count = make("span", head);
      if (arm.runs.length > 1) {
        const select = make("select", head);
        select.setAttribute("aria-label", "repetition of " + arm.name);
        arm.runs.forEach((run) => make("option", select, run.name));
        select.addEventListener("change", () => { this.take(arm.runs[select.selectedIndex]); fit(); });
      }
      this.canvas = make("canvas", this.figure);
      this.canvas.tabIndex = 0;
      this.canvas.setAttribute("role", "img");
      this.canvas.setAttribute("aria-label", "timeline of the requests of " + arm.name);
      this.listen();
      this.take(arm.runs[0]);
    }

    take(run) {
      this.run = run;
      this.arrange();
    }

    arrange() {
      this.rows = view.byWorker ? workerRows(this.run) : requestRows(this.run);
      const unit = view.byWorker ? "lane" : "request";
      this.count.textContent = this.rows.length + " " + unit + (this.rows.length === 1 ? "" : "s");
      this.scroll = 0;
    }

    // Only rows that have something within the window take up room, so zooming in makes them higher.
    fitRows() {
      this.height = Math.min(HEIGHT, AXIS + this.rows.length * MOST_ROW + 6);
      this.shown = this.rows.filter((row) => row.to >= view.from && row.from <= view.to);
      const fitting = (this.height - AXIS) / Math.max(1, this.shown.length);
      this.rowHeight = Math.min(MOST_ROW, Math.max(LEAST_ROW, fitting));
      const most = Math.max(0, this.shown.length * this.rowHeight - (this.height - AXIS));
      this.scroll = Math.min(most, Math.max(0, this.scroll));
    }

    scrollBy(pixels) {
      this.scroll += pixels;
      redraw();
    }

    timeAt(x) {
      return view.from + (x - GUTTER) / (this.canvas.clientWidth - GUTTER) * (view.to - view.from);
    }

    draw() {
      const style = getComputedStyle(document.documentElement);
      const color = (name) => style.getPropertyValue(name).trim();
      const ink = color("--ink"), soft = color("--ink-soft"), line = color("--line"), alarm = color("--alarm");
      const shades = data.stages.map((name) => color("--stage-" + name.replace(/ /g, "-")) || color("--stage-other"));
      this.fitRows();
      const width = this.canvas.clientWidth, scale = window.devicePixelRatio || 1;
      const height = this.height, rows = this.shown;
      this.canvas.style.height = height + "px";
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      const pen = this.canvas.getContext("2d");
      pen.scale(scale, scale);
      pen.font = "11px " + style.getPropertyValue("--font");
      pen.textBaseline = "middle";
      const perUnit = (width - GUTTER) / (view.to - view.from);
      const xOf = (at) => GUTTER + (at - view.from) * perUnit;

      this.drawAxis(pen, width, height, xOf, soft, line);
      pen.save();
      pen.beginPath();
      pen.rect(0, AXIS, width, height - AXIS);
      pen.clip();
      let drawn = 0;
      const first = Math.max(0, Math.floor(this.scroll / this.rowHeight));
      for (let n = first; n < rows.length; n++) {
        const top = AXIS + n * this.rowHeight - this.scroll;
        if (top > height) break;
        const row = rows[n], full = this.rowHeight > 4 ? this.rowHeight - 1.5 : Math.max(1.2, this.rowHeight);
        if (row.isFirst && n > 0) { pen.fillStyle = line; pen.fillRect(0, top - 1, width, 1); }
        for (const span of row.spans) {
          if (span.start > view.to || span.start + span.duration < view.from) continue;
          const left = Math.max(GUTTER, xOf(span.start)), right = Math.min(width, xOf(span.start + span.duration));
          // What runs while tokens are delivered is drawn lower than what the first token waits for.
          const inset = row.request && span.beside && full > 3 ? full * 0.22 : 0;
          pen.fillStyle = shades[span.stage];
          pen.fillRect(left, top + inset, Math.max(0.6, right - left), full - 2 * inset);
          drawn++;
        }
        if (row.request) this.drawMarks(pen, row.request, top, full, xOf, ink, alarm, width);
      }
      pen.restore();
      this.drawLabels(pen, height, first, soft);
      this.figure.dataset.drawn = drawn;
    }

    drawAxis(pen, width, height, xOf, soft, line) {
      const wanted = (view.to - view.from) * MS / Math.max(2, (width - GUTTER) / 90);
      const power = 10 ** Math.floor(Math.log10(wanted));
      const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= wanted) / MS;
      const inSeconds = view.to * MS >= 1000, decimals = Math.max(0, -Math.floor(Math.log10(step * MS / (inSeconds ? 1000 : 1)) + 1e-9));
      pen.textAlign = "center";
      for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) {
        const x = xOf(at);
        pen.fillStyle = line;
        pen.fillRect(x, AXIS - 4, 1, height);
        pen.fillStyle = soft;
        if (x < width - 20) pen.fillText((at * MS / (inSeconds ? 1000 : 1)).toFixed(decimals) + (inSeconds ? " s" : " ms"), x, 9);
      }
    }

    drawMarks(pen, request, top, full, xOf, ink, alarm, width) {
      const chunks = request.chunks;
      const space = chunks.length > 1 ? (xOf(chunks[chunks.length - 1]) - xOf(chunks[0])) / (chunks.length - 1) : 0;
      if (space > 7 && full > 6) {
        pen.fillStyle = ink;
        pen.globalAlpha = 0.55;
        for (const at of chunks) if (at >= view.from && at <= view.to) pen.fillRect(xOf(at), top + full * 0.3, 1, full * 0.4);
        pen.globalAlpha = 1;
      }
      if (request.ending !== COMPLETED) {
        const x = xOf(request.ended);
        pen.fillStyle = alarm;
        if (x >= GUTTER && x <= width) pen.fillRect(x - 1, top, 4, Math.max(2, full));
      }
    }

    drawLabels(pen, height, first, soft) {
      pen.fillStyle = soft;
      pen.textAlign = "right";
      let free = AXIS;
      for (let n = first; n < this.shown.length; n++) {
        const y = AXIS + (n + 0.5) * this.rowHeight - this.scroll;
        if (y > height) break;
        if (y < free || !this.shown[n].label) continue;
        pen.fillText(this.shown[n].label.slice(0, 18), GUTTER - 8, y, GUTTER - 12);
        free = y + 13;
      }
    }

    at(x, y) {
      this.fitRows();
      const row = this.shown[Math.floor((y - AXIS + this.scroll) / this.rowHeight)];
      if (!row || y < AXIS || x < GUTTER) return null;
      const slack = 3 / (this.canvas.clientWidth - GUTTER) * (view.to - view.from), time = this.timeAt(x);
      const hits = row.spans.filter((span) => time >= span.start - slack && time <= span.start + span.duration + slack);
      // Of several the shortest: it is the hardest to hit.
      const span = hits.sort((a, b) => a.duration - b.duration)[0];
      if (span) return { request: span.request, span };
      return row.request ? { request: row.request } : null;
    }

    listen() {
      const canvas = this.canvas;
      let last = null;
      canvas.addEventListener("pointerdown", (event) => {
        last = { x: event.clientX, y: event.clientY };
        canvas.setPointerCapture(event.pointerId);
      });
      canvas.addEventListener("pointerup", () => { last = null; });
      canvas.addEventListener("pointercancel", () => { last = null; });
      canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
      canvas.addEventListener("pointermove", (event) => {
        if (last) {
          show(view.from - (event.clientX - last.x) / (canvas.clientWidth - GUTTER) * (view.to - view.from), view.to - view.from);
          this.scrollBy(last.y - event.clientY);
          last = { x: event.clientX, y: event.clientY };
          tip.hidden = true;
        } else {
          tell(this.at(event.offsetX, event.offsetY), event);
        }
      });
      canvas.addEventListener("dblclick", (event) => zoom(2, this.timeAt(event.offsetX)));
      canvas.addEventListener("wheel", (event) => {
        // Until the chart is chosen by a click, the wheel scrolls the page as everywhere.
        if (document.activeElement !== canvas && !event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        if (event.shiftKey) { this.scrollBy(event.deltaY || event.deltaX); return; }
        if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) { move(event.deltaX / canvas.clientWidth); return; }
        zoom(Math.exp(-event.deltaY / 300), this.timeAt(event.offsetX));
      }, { passive: false });
      canvas.addEventListener("keydown", (event) => {
        const act = {
          ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2),
          ArrowUp: () => this.scrollBy(-40), ArrowDown: () => this.scrollBy(40),
          "+": () => zoom(1.5, middle()), "=": () => zoom(1.5, middle()), "-": () => zoom(1 / 1.5, middle()), 0: fit,
        }[event.key];
        if (act) { event.preventDefault(); act(); }
      });
    }
  }

  const tip = make("div", document.body, undefined, "tip");
  tip.hidden = true;
  const tell = (found, event) => {
    tip.hidden = !found;
    if (!found) return;
    const { request, span } = found;
    tip.replaceChildren();
    make("strong", tip, "#" + request.index + (request.group ? " · " + request.group : "") + " · " + request.ending);
    if (span) {
      const where = data.workers[span.worker];
      make("div", tip, data.stages[span.stage] + " (" + where + "): " + duration(span.duration) + ", from " + duration(span.start - request.sent) + " after sending");
    }
    make("div", tip, request.input + " tokens in, " + request.output + " out; sent at " + duration(request.sent));
    if (request.first !== null) {
      make("div", tip, "TTFT " + duration(request.first - request.sent) + ", ended after " + duration(request.ended - request.sent));
    }
    if (request.error) make("div", tip, request.error, "error");
    make("div", tip, request.id, "id");
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
    tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18) + "px";
  };

  const bar = make("div", holder, undefined, "toolbar");
  const button = (text, says, act) => {
    const element = make("button", bar, text);
    element.type = "button";
    element.title = says;
    element.setAttribute("aria-label", says);
    element.addEventListener("click", act);
    return element;
  };
  button("+", "zoom in", () => zoom(1.6, middle()));
  button("−", "zoom out", () => zoom(1 / 1.6, middle()));
  button("◂", "earlier", () => move(-0.3));
  button("▸", "later", () => move(0.3));
  button("whole run", "show everything", fit);
  if (data.workers.some((_, worker) => isWorker(worker))) {
    const toggle = button("by worker", "rows are workers, or requests", () => {
      view.byWorker = !view.byWorker;
      toggle.textContent = view.byWorker ? "by request" : "by worker";
      charts.forEach((chart) => chart.arrange());
      redraw();
    });
  }
  make("span", bar, "drag to move · double click zooms · click, then wheel, + − and arrow keys · shift and wheel scroll rows", "hint");
  const legend = make("ul", holder, undefined, "stages");
  data.stages.forEach((name) => {
    const item = make("li", legend);
    const slug = "--stage-" + name.replace(/ /g, "-");
    make("i", item).style.background = "var(" + slug + ", var(--stage-other))";
    make("span", item, name);
  });
  const failed = make("li", legend);
  make("i", failed).style.background = "var(--alarm)";
  make("span", failed, "did not complete");

  data.arms.forEach((arm) => charts.push(new Chart(arm)));
  holder.dataset.requests = data.arms.reduce((sum, arm) => sum + arm.runs.reduce((all, run) => all + run.requests.length, 0), 0);
  view.to = whole() * 1.01;
  charts.forEach((chart) => chart.draw());
  addEventListener("resize", redraw);
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", () => charts.forEach((chart) => chart.draw()));
  }
})();
