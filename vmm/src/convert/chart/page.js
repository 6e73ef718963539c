'use strict';
(() => {
  const NS = 'http://www.w3.org/2000/svg';
  const ROW = 16, HEAD = 18, AXIS = 22, STRIP = 14, TOP = AXIS + STRIP;
  const ENDS = ['', 'not certain: records are missing', 'not known: the return was not seen'];
  const get = (id) => document.getElementById(id);
  const data = JSON.parse(get('data').textContent);
  const { names, marks } = data;
  const main = get('main'), svg = get('chart'), tip = get('tip');
  const since = data.since, until = Math.max(data.until, data.since + 1);

  // From lists of numbers to rows: one for each depth, in order of time, so that it can be searched.
  const tasks = data.tasks.map(([about, calls, ticks]) => {
    const rows = [];
    const row = (depth) => { while (rows.length <= depth) rows.push([]); return rows[depth]; };
    for (let i = 0; i < calls.length; i += 6) {
      const [at, lasts, depth, name, vcpu, end] = calls.slice(i, i + 6);
      row(depth).push({ at, lasts, depth, name, vcpu, end, count: 0 });
    }
    for (let i = 0; i < ticks.length; i += 5) {
      const [at, count, depth, name, vcpu] = ticks.slice(i, i + 5);
      row(depth).push({ at, lasts: 0, depth, name, vcpu, end: 0, count });
    }
    for (const each of rows) each.sort((a, b) => a.at - b.at);
    const label = `${about.comm}-${about.pid}` + (about.tracer ? ` (${about.tracer})` : '');
    return { about, label, rows, top: 0, height: HEAD + rows.length * ROW + 4 };
  });
  let total = TOP;
  for (const task of tasks) { task.top = total; total += task.height; }

  let from = since, to = until, hits = null, drag = null, drawn = [];

  const time = (ns) => {
    const [unit, by] = ns < 1e3 ? ['ns', 1] : ns < 1e6 ? ['us', 1e3] : ns < 1e9 ? ['ms', 1e6] : ['s', 1e9];
    return `${(ns / by).toFixed(by === 1 ? 0 : 3)} ${unit}`;
  };
  const stamp = (ns) => `${Math.floor(ns / 1e9)}.${String(Math.floor(ns % 1e9)).padStart(9, '0')} s`;
  const make = (parent, tag, attributes, text) => {
    const element = document.createElementNS(NS, tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.appendChild(element);
    return element;
  };
  const hues = names.map((name) => {
    let hash = 7;
    for (let i = 0; i < name.length; i++) hash = (hash * 31 + name.charCodeAt(i)) >>> 0;
    return hash % 360;
  });
  const width = () => Math.max(svg.clientWidth, 100);
  const x = (at) => (at - from) / (to - from) * width();
  const at = (pixel) => from + pixel / width() * (to - from);

  // The first of a row that ends behind a time.
  const first = (row, time) => {
    let low = 0, high = row.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row[middle].at + row[middle].lasts < time) low = middle + 1; else high = middle;
    }
    return low;
  };

  function axis() {
    const about = (to - from) / Math.max(width() / 120, 1);
    const power = 10 ** Math.floor(Math.log10(Math.max(about, 1)));
    const step = [1, 2, 5, 10].map((by) => by * power).find((by) => by >= about) || power;
    const digits = Math.min(Math.max(9 - Math.floor(Math.log10(step)), 0), 9);
    for (let mark = Math.ceil(from / step) * step; mark <= to; mark += step) {
      make(svg, 'line', { class: 'grid', x1: x(mark), x2: x(mark), y1: 0, y2: total });
      make(svg, 'text', { class: 'faint', x: x(mark) + 3, y: 14 }, `${(mark / 1e9).toFixed(digits)} s`);
    }
  }

  function strip() {
    let last = -9;
    for (const [when, lasts, loss, text] of marks) {
      if (when + lasts < from || when > to) continue;
      const left = Math.max(x(when), 0), right = Math.min(x(when + lasts), width());
      if (loss) make(svg, 'rect', { class: 'loss', x: left, y: AXIS, width: 1.5, height: total - AXIS });
      else if (right - left < 2 && left - last < 1) continue;
      else last = left;
      const kind = loss ? 'loss' : 'mark';
      const rect = make(svg, 'rect', { class: kind, x: left, y: AXIS + 2, width: Math.max(right - left, 2), height: STRIP - 4 });
      rect.tip = `${text}\n${stamp(when)}` + (lasts ? `\nfor ${time(lasts)}` : '');
    }
  }

  function draw() {
    svg.replaceChildren();
    drawn = [];
    svg.setAttribute('height', total);
    axis();
    const high = main.scrollTop - 50, low = main.scrollTop + main.clientHeight + 50;
    let narrow = 0;
    for (const task of tasks) {
      if (task.top + task.height < high || task.top > low) continue;
      make(svg, 'rect', { class: 'lane', x: 0, y: task.top, width: width(), height: HEAD - 3 });
      make(svg, 'text', { class: 'task', x: 4, y: task.top + 12 }, task.label);
      task.rows.forEach((row, depth) => {
        const y = task.top + HEAD + depth * ROW;
        let last = -9, lastHit = false;
        for (let i = first(row, from); i < row.length && row[i].at <= to; i++) {
          const call = row[i];
          const hit = hits !== null && hits[call.name];
          const left = Math.max(x(call.at), 0), right = Math.min(x(call.at + call.lasts), width());
          const wide = Math.max(right - left, call.count ? 2 : 1);
          // One for all of a pixel, but what was searched for is seen.
          if (right - left < 1 && left - last < 1 && (!hit || lastHit)) { narrow++; continue; }
          if (right - left < 1) { last = left; lastHit = hit; }
          const rect = make(svg, 'rect', {
            class: 'call' + (call.end === 2 ? ' open' : '') + (wide < 3 ? ' thin' : '') + (hit ? ' hit' : ''), x: left, y, width: wide, height: ROW - 1,
          });
          rect.style.setProperty('--hue', hues[call.name]);
          rect.call = call;
          rect.task = task;
          drawn.push(rect);
          const room = Math.floor((wide - 6) / 6.7);
          if (room >= 3) {
            const name = names[call.name];
            const text = name.length > room ? name.slice(0, room - 1) + '…' : name;
            make(svg, 'text', { class: 'name' + (hit ? ' hit' : ''), x: left + 3, y: y + 12 }, text);
          }
        }
      });
    }
    strip();
    get('view').textContent = `${stamp(from)} to ${stamp(to)}: ${time(to - from)}` +
      (narrow ? `; ${narrow} narrower than a pixel are drawn with their neighbours` : '');
  }

  let waiting = false;
  const redraw = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  };
  function zoom(left, right) {
    const least = Math.min(10, until - since);
    if (right - left < least) { const middle = (left + right) / 2; left = middle - least / 2; right = left + least; }
    const wide = Math.min(right - left, until - since);
    from = Math.min(Math.max(left, since), until - wide);
    to = from + wide;
    redraw();
  }
  const reset = () => zoom(since, until);
  const scale = (by, middle = (from + to) / 2) => zoom(middle - (middle - from) * by, middle + (to - middle) * by);
  const move = (by) => zoom(from + (to - from) * by, to + (to - from) * by);

  function search(text) {
    hits = null;
    let matches = () => false;
    if (text !== '') {
      const expression = /^\/(.+)\/$/.exec(text);
      try {
        const regexp = expression && new RegExp(expression[1], 'i');
        matches = regexp ? (name) => regexp.test(name) : (name) => name.toLowerCase().includes(text.toLowerCase());
      } catch (error) {
        get('found').textContent = `not an expression: ${error.message}`;
        redraw();
        return;
      }
      hits = names.map(matches);
    }
    if (hits === null) {
      get('found').textContent = '';
    } else {
      let calls = 0, entries = 0, lasts = 0;
      for (const task of tasks) for (const row of task.rows) for (const call of row) {
        if (!hits[call.name]) continue;
        if (call.count) entries += call.count; else { calls++; lasts += call.lasts; }
      }
      const functions = hits.filter(Boolean).length;
      const what = entries ? `${calls + entries} calls and entries` : `${calls} calls`;
      get('found').textContent = `${what} of ${functions} functions` + (lasts ? `, ${time(lasts)} together` : '');
    }
    redraw();
  }

  function describe(rect) {
    const { call, task } = rect;
    const lines = [names[call.name]];
    if (call.count > 1) lines.push(`and ${call.count - 1} more entries`);
    if (call.count) lines.push('duration: not recorded (boot with --graph)');
    else lines.push(`duration: ${time(call.lasts)}` + (call.end ? ` (${ENDS[call.end]})` : ''));
    lines.push(`from ${stamp(call.at)}`);
    if (!call.count) lines.push(`to   ${stamp(call.at + call.lasts)}`);
    lines.push(`task ${task.label}, vCPU ${call.vcpu}, depth ${call.depth}`);
    return lines.join('\n');
  }
  svg.addEventListener('mousemove', (event) => {
    const text = event.target.call ? describe(event.target) : event.target.tip;
    tip.hidden = !text || drag !== null && drag.moved;
    if (!text) return;
    tip.textContent = text;
    tip.style.left = `${Math.min(event.clientX + 12, Math.max(innerWidth - tip.offsetWidth - 4, 0))}px`;
    tip.style.top = `${Math.min(event.clientY + 14, Math.max(innerHeight - tip.offsetHeight - 4, 0))}px`;
  });
  svg.addEventListener('mouseleave', () => { tip.hidden = true; });

  const place = (event) => event.clientX - svg.getBoundingClientRect().left;
  svg.addEventListener('mousedown', (event) => {
    if (event.button !== 0) return;
    drag = { start: place(event), moved: false, target: event.target, range: null };
    event.preventDefault();
  });
  addEventListener('mousemove', (event) => {
    if (drag === null) return;
    const now = place(event);
    if (Math.abs(now - drag.start) > 4) drag.moved = true;
    if (!drag.moved) return;
    if (drag.range === null || !drag.range.isConnected) {
      drag.range = make(svg, 'rect', { id: 'range', y: 0, height: total });
    }
    drag.range.setAttribute('x', Math.min(now, drag.start));
    drag.range.setAttribute('width', Math.abs(now - drag.start));
  });
  addEventListener('mouseup', (event) => {
    if (drag === null) return;
    const { start, moved, target } = drag, end = place(event);
    drag = null;
    if (moved) zoom(at(Math.min(start, end)), at(Math.max(start, end)));
    else if (target.call) zoom(target.call.at, target.call.at + target.call.lasts);
  });
  main.addEventListener('wheel', (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    scale(event.deltaY > 0 ? 1.25 : 0.8, at(place(event)));
  }, { passive: false });
  main.addEventListener('scroll', redraw);
  addEventListener('resize', redraw);
  get('reset').addEventListener('click', reset);
  get('in').addEventListener('click', () => scale(0.5));
  get('out').addEventListener('click', () => scale(2));
  get('back').addEventListener('click', () => move(-0.5));
  get('on').addEventListener('click', () => move(0.5));
  get('search').addEventListener('input', (event) => search(event.target.value));
  addEventListener('keydown', (event) => {
    if (event.target.tagName === 'INPUT' || event.ctrlKey || event.metaKey || event.altKey) return;
    const acts = { 0: reset, Escape: reset, '+': () => scale(0.5), '-': () => scale(2), ArrowLeft: () => move(-0.5), ArrowRight: () => move(0.5) };
    if (acts[event.key]) acts[event.key]();
  });
  draw();
})();
