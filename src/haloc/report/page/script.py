"""What the page does beyond being read: words where one points, sorting, copying, light and dark."""

from __future__ import annotations

SCRIPT = r"""
(function () {
  "use strict";
  function all(selector, root) { return Array.from((root || document).querySelectorAll(selector)); }

  // Words where one points. The titles, which browsers show by themselves, become ours.
  var tip = document.createElement("div");
  tip.id = "tip"; tip.hidden = true; tip.setAttribute("role", "status");
  document.body.appendChild(tip);
  function show(mark) {
    tip.textContent = mark.getAttribute("data-tip"); tip.hidden = false;
    var box = (mark.querySelector(".dot,.is,.after,rect:not(.hit)") || mark).getBoundingClientRect();
    var wide = document.documentElement.clientWidth, own = tip.getBoundingClientRect();
    var left = Math.min(Math.max(6, box.left + box.width / 2 - own.width / 2), wide - own.width - 6);
    var above = box.top - own.height - 8;
    tip.style.left = left + "px"; tip.style.top = (above > 4 ? above : box.bottom + 8) + "px";
  }
  function hide() { tip.hidden = true; }
  function markOf(event) { return event.target.closest ? event.target.closest(".m") : null; }
  all(".m").forEach(function (mark) {
    var title = mark.querySelector("title");
    if (!title) return;
    mark.setAttribute("data-tip", title.textContent); mark.setAttribute("aria-label", title.textContent);
    mark.setAttribute("role", "img"); mark.setAttribute("tabindex", "-1"); title.remove();
    var sheet = mark.closest("svg"); if (sheet) sheet.setAttribute("role", "group");
  });
  // One stop of the tab key per chart; arrows go from mark to mark.
  all("[data-marks]").forEach(function (chart) {
    var marks = all(".m", chart);
    if (marks.length) marks[0].setAttribute("tabindex", "0");
    chart.addEventListener("keydown", function (event) {
      var at = marks.indexOf(document.activeElement);
      var to = {ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0,
                End: marks.length - 1}[event.key];
      if (at < 0 || to === undefined || !marks[to]) return;
      event.preventDefault(); marks[at].setAttribute("tabindex", "-1"); marks[to].setAttribute("tabindex", "0");
      marks[to].focus();
    });
  });
  ["pointerover", "pointerdown", "focusin"].forEach(function (kind) {
    document.addEventListener(kind, function (event) { var mark = markOf(event); if (mark) show(mark); else hide(); });
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", function (event) { if (event.key === "Escape") hide(); });
  window.addEventListener("scroll", hide, {passive: true});

  // Tables that sort; what has no value stays last.
  function valueOf(row, column) {
    var cell = row.cells[column], given = cell.getAttribute("data-v"), text = given === null ? cell.textContent : given;
    return text === "" || text === "\u2013" ? null : text;
  }
  function compare(a, b) {
    var x = Number(a), y = Number(b);
    return isNaN(x) || isNaN(y) ? a.localeCompare(b, undefined, {numeric: true}) : x - y;
  }
  all("table.sortable").forEach(function (table) {
    var heads = all("thead th", table), body = table.tBodies[0];
    heads.forEach(function (head, column) {
      var button = document.createElement("button");
      button.type = "button"; button.textContent = head.textContent; head.textContent = ""; head.appendChild(button);
      button.addEventListener("click", function () {
        var up = head.getAttribute("aria-sort") !== "ascending", sign = up ? 1 : -1;
        heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        all("tr", body).map(function (row) { return [row, valueOf(row, column)]; }).sort(function (a, b) {
          if (a[1] === null || b[1] === null) return (a[1] === null) - (b[1] === null);
          return sign * compare(a[1], b[1]);
        }).forEach(function (pair) { body.appendChild(pair[0]); });
      });
    });
  });

  // Copying; where the clipboard is closed, the text is selected instead.
  all("[data-copy]").forEach(function (button) {
    button.hidden = false;
    button.addEventListener("click", function () {
      var code = document.getElementById(button.getAttribute("data-copy"));
      function done(word) { button.textContent = word; setTimeout(function () { button.textContent = "Copy"; }, 1600); }
      function select() { window.getSelection().selectAllChildren(code); done("Selected"); }
      if (!navigator.clipboard) { select(); return; }
      navigator.clipboard.writeText(code.textContent).then(function () { done("Copied"); }, select);
    });
  });

  // Light and dark: as the system says, until somebody chooses.
  var root = document.documentElement, toggle = document.getElementById("theme");
  function remembered(value) {
    try { if (value) localStorage.setItem("haloc-theme", value); return localStorage.getItem("haloc-theme"); }
    catch (closed) { return null; }
  }
  function isDark() {
    var theme = root.getAttribute("data-theme");
    return theme ? theme === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
  }
  function name() { toggle.textContent = isDark() ? "Light" : "Dark"; }
  var before = remembered();
  if (before === "light" || before === "dark") root.setAttribute("data-theme", before);
  toggle.hidden = false; name();
  toggle.addEventListener("click", function () {
    var theme = isDark() ? "light" : "dark";
    root.setAttribute("data-theme", theme); remembered(theme); name();
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);

  // Paper shows what is folded away.
  window.addEventListener("beforeprint", function () {
    all("details").forEach(function (part) { part.open = true; });
  });
})();
"""
