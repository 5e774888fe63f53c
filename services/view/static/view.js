// Keyboard, tokens under the pointer, found words, news: nothing here is needed to read.
"use strict";

const page = document.body.dataset.page;
const find = (selector) => document.querySelector(selector);

// A line of the list, or a sample: next and previous.
const rows = [...document.querySelectorAll(".row")];
let chosen = -1;

function choose(index) {
  if (index < 0 || index >= rows.length) {
    follow(index < 0 ? "prev" : "next");
    return;
  }
  if (chosen >= 0) rows[chosen].classList.remove("chosen");
  chosen = index;
  rows[chosen].classList.add("chosen");
  rows[chosen].focus({ preventScroll: true });
  rows[chosen].scrollIntoView({ block: "nearest" });
}

function follow(rel) {
  const link = find(`a[rel="${rel}"]`);
  if (link) link.click();
}

function back() {
  const link = find("#list");
  if (link) link.click();
}

const onList = {
  j: () => choose(chosen + 1), k: () => choose(chosen - 1),
  ArrowDown: () => choose(chosen + 1), ArrowUp: () => choose(chosen - 1),
  Enter: () => chosen >= 0 && rows[chosen].click(),
};
const onSample = { j: () => follow("next"), k: () => follow("prev"), u: back, Escape: back, c: otherScale };
const everywhere = {
  ArrowRight: () => follow("next"), ArrowLeft: () => follow("prev"),
  "?": () => find("#keys").showModal(),
  "/": () => {
    const field = find('input[name="text"]');
    if (field) { field.focus(); field.select(); } else { location.href = find("#list").href + "#search"; }
  },
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || find("#keys").open) return;
  const target = event.target;
  if (target.matches("input, select, textarea")) {
    if (event.key === "Escape") target.blur();
    return;
  }
  const act = { ...everywhere, ...(page === "list" ? onList : page === "sample" ? onSample : {}) }[event.key];
  if (!act || (event.key === "Enter" && target.matches("a:not(.row), button"))) return;
  event.preventDefault();
  act();
});
rows.forEach((row, index) => row.addEventListener("focus", () => {
  if (chosen >= 0 && chosen !== index) rows[chosen].classList.remove("chosen");
  chosen = index;
}));
if (location.hash === "#search" && page === "list") everywhere["/"]();
document.querySelectorAll("[data-open]").forEach((button) =>
  button.addEventListener("click", () => document.getElementById(button.dataset.open).showModal()));
document.querySelectorAll(".filters select").forEach((select) =>
  select.addEventListener("change", () => select.form.requestSubmit()));
// An address without the fields that say nothing.
document.querySelectorAll(".filters").forEach((form) => form.addEventListener("formdata", (event) => {
  for (const [name, value] of [...event.formData]) if (value === "") event.formData.delete(name);
}));
const more = find("#more");
if (more && [...document.querySelectorAll(".fields select, .fields input")].some((field) => field.value)) more.checked = true;

// Two scales of colours.
function otherScale() {
  const other = find('[data-scale][aria-pressed="false"]');
  if (other) other.click();
}

document.querySelectorAll("[data-scale]").forEach((button) => button.addEventListener("click", () => {
  find("main").className = `sample by-${button.dataset.scale}`;
  document.querySelectorAll("[data-scale]").forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
}));

// The numbers of the token under the pointer, or under the finger.
const tip = find("#tip");
let shown = null;

function entry(list, name, value) {
  const [term, said] = [document.createElement("dt"), document.createElement("dd")];
  term.textContent = name;
  said.textContent = value;
  list.append(term, said);
}

function visible(text) {
  return text.replace(/[\x00-\x1f\x7f]/g, (c) => ({ "\n": "\\n", "\t": "\\t", "\r": "\\r" })[c] || `\\x${c.charCodeAt(0).toString(16).padStart(2, "0")}`);
}

function show(token) {
  if (shown) shown.classList.remove("shown");
  shown = token;
  tip.hidden = !token;
  if (!token) return;
  token.classList.add("shown");
  const [id, logprob, ratio, version] = token.dataset.n.split(" ");
  const title = document.createElement("b");
  title.textContent = `"${visible(token.textContent)}"`;
  const list = document.createElement("dl");
  if (logprob !== "-") {
    entry(list, "sampler", `${(100 * Math.exp(logprob)).toPrecision(3)} %, log-prob ${Number(logprob).toFixed(3)}`);
  }
  if (ratio !== "-" && logprob !== "-") {
    const learner = Number(logprob) + Number(ratio);
    entry(list, "learner", `${(100 * Math.exp(learner)).toPrecision(3)} %, log-prob ${learner.toFixed(3)}`);
  }
  if (ratio !== "-") entry(list, "log-ratio", `${ratio > 0 ? "+" : ""}${Number(ratio).toFixed(3)} (${Math.exp(ratio).toPrecision(3)} times)`);
  if (version === "given") entry(list, "given", "by the environment");
  else if (version !== "-") entry(list, "policy", `version ${version}`);
  entry(list, "token id", id);
  tip.replaceChildren(title, list);
  const place = token.getClientRects()[0];
  const box = tip.getBoundingClientRect();
  const below = place.bottom + 6 + box.height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - box.width - 8))}px`;
  tip.style.top = `${below ? place.bottom + 6 : Math.max(8, place.top - box.height - 6)}px`;
}

if (page === "sample") {
  document.addEventListener("pointerover", (event) => show(event.target.closest("[data-n]")));
  document.addEventListener("click", (event) => show(event.target.closest("[data-n]")));
  document.addEventListener("scroll", () => show(null), true);
  markFound(document.body.dataset.search);
}

// What was searched for, wherever it stands, also across tokens; the first is brought into view.
function markFound(wanted) {
  if (!wanted || !window.Highlight) return;
  const ranges = [];
  for (const block of document.querySelectorAll("[data-text]")) {
    const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
    const nodes = [];
    let text = "";
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      nodes.push({ node, start: text.length });
      text += node.data;
    }
    const needle = wanted.toLowerCase();
    const folded = text.toLowerCase();
    if (folded.length !== text.length) continue;
    let n = 0;
    const at = (place) => {
      while (n + 1 < nodes.length && nodes[n + 1].start <= place) n += 1;
      return [nodes[n].node, place - nodes[n].start];
    };
    for (let place = folded.indexOf(needle); place >= 0 && ranges.length < 1000; place = folded.indexOf(needle, place + needle.length)) {
      const range = new Range();
      range.setStart(...at(place));
      const [last, offset] = at(place + needle.length - 1);
      range.setEnd(last, offset + 1);
      ranges.push(range);
    }
  }
  CSS.highlights.set("found", new Highlight(...ranges));
  if (ranges.length) ranges[0].startContainer.parentElement.scrollIntoView({ block: "center" });
}

// How far the source was read, and whether there is news.
const state = find("#state");
const news = find("#news");

async function look() {
  let wait = 3000;
  try {
    const found = await (await fetch("/state.json")).json();
    const count = (value) => value.toLocaleString("en");
    const total = Math.max(found.total, found.samples);
    state.className = `state ${found.problem ? "off" : found.is_live ? "live" : ""}`;
    state.title = found.problem || found.remark;
    if (found.problem && (found.is_live || found.is_done)) state.textContent = found.is_live ? "interrupted" : "incomplete";
    else if (!found.is_done || found.read < found.samples) { state.textContent = total ? `${count(found.read)} of ${count(total)} read` : "reading"; wait = 1000; }
    else state.textContent = `${count(found.samples)} samples`;
    const first = page === "list" && document.body.dataset.first === "yes";
    if (first && !rows.length && found.samples && !location.search) location.reload();
    if (first && news && rows.length && found.newest > Number(document.body.dataset.newest)) {
      news.textContent = "There are newer samples: show them";
      news.hidden = false;
    }
    if (!found.is_live && found.is_done) return;
  } catch {
    state.className = "state off";
    state.textContent = "heterorl view has ended";
  }
  setTimeout(look, wait);
}
look();
